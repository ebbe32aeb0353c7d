"""Divides a model into pipeline stages: what each schedule requires, which modules a stage has, which rank runs it."""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Literal

from torchtitan_clone.config.schema import Parallelism
from torchtitan_clone.documents import DocumentError, read_regular


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What a schedule requires: an exact number of stages per rank or any (None), and of micro-batches.

    With `turns_back` the ranks run the second half of the stages in reverse order; with `splits_backward` gradients of
    inputs and of weights are computed separately.
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
TRAINED_COST = 3  # of forward and backward, in forwards


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The names of the modules of each stage, and the rank of the pipeline axis that runs it."""

    modules: tuple[tuple[str, ...], ...]
    ranks: tuple[int, ...]

    def of_rank(self, rank: int) -> list[int]:
        """Returns the stages of one rank of the pipeline axis."""
        return [stage for stage, its_rank in enumerate(self.ranks) if its_rank == rank]


@dataclass(frozen=True, kw_only=True)
class ScheduleFile:
    """The contents of a schedule's CSV file: the rank of each stage, and the number of micro-batches."""

    ranks: tuple[int, ...]
    microbatches: int
    splits_backward: bool


def read_schedule_file(path: str) -> ScheduleFile:
    """Reads a file with one line per rank, of actions such as 0F1: forward of stage 0 on micro-batch 1.

    B is a backward, I and W its halves for inputs and for weights. Raises OSError or ValueError for a bad file.
    """
    try:
        rows = [*csv.reader(read_regular(Path(path), follow_links=True).decode().splitlines())]
    except (DocumentError, csv.Error) as error:
        raise ValueError(str(error)) from None
    lines = [re.findall(r"(\d+)([FBIW])(\d+)", ";".join(row)) for row in rows]
    places = {int(stage): rank for rank, line in enumerate(lines) for stage, _, _ in line}
    if not places or sorted(places) != list(range(len(places))):
        raise ValueError(f"its stages are {sorted(places)}, not 0, 1, 2 and so on")
    return ScheduleFile(
        ranks=tuple(places[stage] for stage in range(len(places))),
        microbatches=1 + max(int(microbatch) for line in lines for _, _, microbatch in line),
        splits_backward=any(kind in "IW" for line in lines for _, kind, _ in line),
    )


def model_modules(n_layers: int) -> list[str]:
    """Returns the names of the modules that stages consist of, in the order of the model."""
    return ["tok_embeddings", *(f"layers.{index}" for index in range(n_layers)), "norm", "output"]


def num_stages(parallelism: Parallelism, *, n_layers: int) -> int:
    """Returns the number of stages that the options ask for, valid or not."""
    ranks = parallelism.pipeline_parallel_degree
    if ranks == 1:
        return 1
    if parallelism.module_fqns_per_model_part is not None:
        return len(parallelism.module_fqns_per_model_part)
    if parallelism.pipeline_parallel_schedule_csv:
        return len(read_schedule_file(parallelism.pipeline_parallel_schedule_csv).ranks)
    if parallelism.pipeline_parallel_layers_per_stage is not None:
        # Embedding and output count as layers too.
        n_layers += parallelism.pipeline_parallel_first_stage_less_layers
        n_layers += parallelism.pipeline_parallel_last_stage_less_layers
        return -(-n_layers // parallelism.pipeline_parallel_layers_per_stage)
    return ranks * (SCHEDULES[parallelism.pipeline_parallel_schedule].stages_per_rank or 2)


def layers_of_stages(
    parallelism: Parallelism, *, n_layers: int, frozen_layers: int, layer_costs: Sequence[int | float] | None = None
) -> list[int]:
    """Returns the number of layers of each stage where the split is automatic.

    `layer_costs` are the relative costs of the forward of each layer; None: all are equal.
    """
    forward = list(layer_costs or [1] * n_layers)
    assert len(forward) == n_layers, f"{len(forward)} costs for {n_layers} layers"
    average = sum(forward) / max(1, n_layers)
    costs = (
        (1 if frozen_layers else TRAINED_COST) * average * parallelism.pipeline_parallel_first_stage_less_layers,
        *forward[:frozen_layers],
        *[TRAINED_COST * cost for cost in forward[frozen_layers:]],
        TRAINED_COST * average * parallelism.pipeline_parallel_last_stage_less_layers,
    )
    counts = list(_split(costs, stages=num_stages(parallelism, n_layers=n_layers)))
    counts[0] -= 1
    counts[-1] -= 1
    return counts


@cache
def _split(costs: tuple[float, ...], *, stages: int) -> tuple[int, ...]:
    """Returns the items per stage with the least sum of squared costs; of equal splits, more in the first stages."""
    ends = list(accumulate(costs, initial=0.0))
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
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


def splits_backward(parallelism: Parallelism) -> bool:
    """Whether the schedule computes gradients of inputs and of weights separately."""
    if parallelism.pipeline_parallel_degree == 1:
        return False
    path = parallelism.pipeline_parallel_schedule_csv
    return (read_schedule_file(path) if path else SCHEDULES[parallelism.pipeline_parallel_schedule]).splits_backward


def resolved_stages(
    parallelism: Parallelism, *, n_layers: int, frozen_layers: int = 0, layer_costs: Sequence[int | float] | None = None
) -> Stages:
    """Returns the stages, see layers_of_stages(); without a pipeline there is one. run/rules.py reports bad options."""
    modules = parallelism.module_fqns_per_model_part
    if parallelism.pipeline_parallel_degree == 1:
        modules = [model_modules(n_layers)]
    if modules is None:
        names = iter(model_modules(n_layers))
        counts = layers_of_stages(parallelism, n_layers=n_layers, frozen_layers=frozen_layers, layer_costs=layer_costs)
        counts[0] += 1
        counts[-1] += 2
        modules = [[next(names) for _ in range(count)] for count in counts]
    degree = parallelism.pipeline_parallel_degree
    ranks = tuple(stage % degree for stage in range(len(modules)))
    if degree > 1 and parallelism.pipeline_parallel_schedule_csv:
        ranks = read_schedule_file(parallelism.pipeline_parallel_schedule_csv).ranks
    elif degree > 1 and SCHEDULES[parallelism.pipeline_parallel_schedule].turns_back:
        ranks = (*range(degree), *reversed(range(degree)))
    return Stages(modules=tuple(map(tuple, modules)), ranks=ranks)
