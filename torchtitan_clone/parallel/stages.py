"""How a pipeline divides a model: what each schedule asks for, which modules a stage holds, which rank runs it.

A stage is a piece of the model; a rank of the pipeline axis runs one or several. A pass takes the rows of
training.local_batch_size through all stages, a micro-batch at a time.
"""

import csv
import re
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Literal

from torchtitan_clone.config.schema import Parallelism


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What a schedule asks for.

    - `stages_per_rank`: exactly so many; None: any number;
    - `turns_back`: the second half of the stages lies on the ranks in reverse, so that rank 0 has first and last;
    - `splits_backward`: gradients of inputs and of weights are computed apart (zero bubble);
    - `microbatches`: any number; at least one a stage; or in equal rounds of at least one a rank.
    """

    stages_per_rank: int | None
    turns_back: bool = False
    splits_backward: bool = False
    microbatches: Literal["any", "one a stage", "equal rounds"] = "any"


SCHEDULES = {
    "GPipe": Schedule(stages_per_rank=1),
    "1F1B": Schedule(stages_per_rank=1, microbatches="one a stage"),
    "LoopedBFS": Schedule(stages_per_rank=None),
    "Interleaved1F1B": Schedule(stages_per_rank=None, microbatches="equal rounds"),
    "InterleavedZeroBubble": Schedule(stages_per_rank=None, splits_backward=True, microbatches="equal rounds"),
    "ZBVZeroBubble": Schedule(stages_per_rank=2, turns_back=True, splits_backward=True),
    "DualPipeV": Schedule(stages_per_rank=2, turns_back=True, splits_backward=True, microbatches="one a stage"),
}


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The names of the modules of each stage, and the rank of the pipeline axis that runs it."""

    modules: tuple[tuple[str, ...], ...]
    ranks: tuple[int, ...]

    def of_rank(self, rank: int) -> list[int]:
        """The stages of one rank of the pipeline axis."""
        return [stage for stage, its_rank in enumerate(self.ranks) if its_rank == rank]


@dataclass(frozen=True, kw_only=True)
class ScheduleFile:
    """What stands in a schedule's CSV file: the rank of each stage, and how many micro-batches it runs."""

    ranks: tuple[int, ...]
    microbatches: int
    splits_backward: bool


def read_schedule_file(path: str) -> ScheduleFile:
    """Reads a file with a line a rank, of actions such as 0F1: forward of stage 0 on micro-batch 1.

    B is a backward, I and W its parts for inputs and for weights. OSError or ValueError where it cannot be used.
    """
    with Path(path).open(newline="") as file:
        lines = [re.findall(r"(\d+)([FBIW])(\d+)", ";".join(line)) for line in csv.reader(file)]
    places = {int(stage): rank for rank, line in enumerate(lines) for stage, _, _ in line}
    if not places or sorted(places) != list(range(len(places))):
        raise ValueError(f"its stages are {sorted(places)}, not 0, 1, 2 and so on")
    return ScheduleFile(
        ranks=tuple(places[stage] for stage in range(len(places))),
        microbatches=1 + max(int(microbatch) for line in lines for _, _, microbatch in line),
        splits_backward=any(kind in "IW" for line in lines for _, kind, _ in line),
    )


def model_modules(n_layers: int) -> list[str]:
    """The modules that stages are made of, in the order of the model."""
    return ["tok_embeddings", *(f"layers.{index}" for index in range(n_layers)), "norm", "output"]


def num_stages(parallelism: Parallelism, *, n_layers: int) -> int:
    """How many stages the options ask for, whether or not that can be."""
    ranks = parallelism.pipeline_parallel_degree
    if ranks == 1:
        return 1
    if parallelism.module_fqns_per_model_part is not None:
        return len(parallelism.module_fqns_per_model_part)
    if parallelism.pipeline_parallel_schedule_csv:
        return len(read_schedule_file(parallelism.pipeline_parallel_schedule_csv).ranks)
    if parallelism.pipeline_parallel_layers_per_stage is not None:
        return -(-_places(parallelism, n_layers) // parallelism.pipeline_parallel_layers_per_stage)
    return ranks * (SCHEDULES[parallelism.pipeline_parallel_schedule].stages_per_rank or 2)


def layers_of_stages(parallelism: Parallelism, *, n_layers: int, frozen_layers: int) -> list[int]:
    """How many layers each stage gets where the split is automatic.

    A layer that learns costs three, for its backward takes twice its forward; one that is frozen, one.
    """
    learning, embedding = 3, 1 if frozen_layers else 3
    costs = (
        embedding * parallelism.pipeline_parallel_first_stage_less_layers,
        *[1] * frozen_layers,
        *[learning] * (n_layers - frozen_layers),
        learning * parallelism.pipeline_parallel_last_stage_less_layers,
    )
    counts = list(_split(costs, stages=num_stages(parallelism, n_layers=n_layers)))
    counts[0] -= 1
    counts[-1] -= 1
    return counts


@cache
def _split(costs: tuple[int, ...], *, stages: int) -> tuple[int, ...]:
    """How many items each stage gets, at least one: most evenly, which is the least sum of squares; first ones more."""
    ends = list(accumulate(costs, initial=0))
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(stages):
        best = {
            end: min(
                (squares + (ends[end] - ends[start]) ** 2, (*negative_sizes, start - end))
                for start, (squares, negative_sizes) in best.items()
                if start < end
            )
            for end in range(stage + 1, len(costs) + 1)
        }
    return tuple(-size for size in best[len(costs)][1])


def _places(parallelism: Parallelism, n_layers: int) -> int:
    """Layers, with those that embedding and output count for."""
    less = parallelism.pipeline_parallel_first_stage_less_layers + parallelism.pipeline_parallel_last_stage_less_layers
    return n_layers + less


def splits_backward(parallelism: Parallelism) -> bool:
    """Whether the schedule computes gradients of inputs and of weights apart."""
    if parallelism.pipeline_parallel_degree == 1:
        return False
    path = parallelism.pipeline_parallel_schedule_csv
    return (read_schedule_file(path) if path else SCHEDULES[parallelism.pipeline_parallel_schedule]).splits_backward


def resolved_stages(parallelism: Parallelism, *, n_layers: int, frozen_layers: int = 0) -> Stages:
    """The stages; run/rules.py finds options that give none. Without a pipeline one stage has all modules."""
    modules = parallelism.module_fqns_per_model_part
    if parallelism.pipeline_parallel_degree == 1:
        modules = [model_modules(n_layers)]
    if modules is None:
        names = iter(model_modules(n_layers))
        counts = layers_of_stages(parallelism, n_layers=n_layers, frozen_layers=frozen_layers)
        counts[0] += 1
        counts[-1] += 2
        modules = [[next(names) for _ in range(count)] for count in counts]
    return Stages(modules=tuple(map(tuple, modules)), ranks=_ranks(parallelism, len(modules)))


def _ranks(parallelism: Parallelism, stages: int) -> tuple[int, ...]:
    ranks = parallelism.pipeline_parallel_degree
    if ranks > 1 and parallelism.pipeline_parallel_schedule_csv:
        return read_schedule_file(parallelism.pipeline_parallel_schedule_csv).ranks
    if ranks > 1 and SCHEDULES[parallelism.pipeline_parallel_schedule].turns_back:
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(stage % ranks for stage in range(stages))
