"""Pipeline parallelism: the layers spread over ranks, through which micro-batches follow one another.

torch.distributed.pipelining runs the schedule; here stand the stages it runs, and how long its ranks wait. It takes
half a second to import, so this file is imported only where there is a pipeline.
Legend: B batch rows, T tokens, D model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _PipelineScheduleRuntime, get_schedule_class

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Parallelism
from torchtitan_clone.parallel.forward_backward import ForwardBackward, Rows
from torchtitan_clone.parallel.mesh import Mesh
from torchtitan_clone.parallel.stages import SCHEDULES, Stages


class _Stage(PipelineStage):
    """torch's stage, put right for schedules that turn back and for frozen stages."""

    def __init__(self, *args: Any, frozen_stages: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._is_frozen = self.stage_index < frozen_stages
        self._is_behind_frozen = 0 < self.stage_index <= frozen_stages

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        # Where the input needs no gradient torch would lose the weights' gradients in a backward of two halves.
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward or self._is_behind_frozen, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self._is_behind_frozen:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    # Where there are no gradients none go to the stage before on the same rank; torch's asserts that there are.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else None

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
        # A simulated rank has no neighbours whose vote it could read; all shapes are given, which is what is voted on.
        return torch.tensor(1) if dist.get_backend() == "fake" else super()._warmup_backward_result(*args, **kwargs)

    # Before 2.13 torch sends gradients to frozen stages too.
    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return [] if self._is_frozen else super().get_bwd_recv_ops(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self._is_behind_frozen:
            return super().get_bwd_send_ops(bwd_chunk_id)
        self.bwd_cache.pop(bwd_chunk_id, None)
        return []


def build_pipelined_forward_backward(
    parts: Sequence[nn.Module],
    *,
    stages: Stages,
    frozen_stages: int,
    parallelism: Parallelism,
    mesh: Mesh,
    loss_fn: Callable[..., Tensor],
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ForwardBackward:
    """The pipelined way: each micro-batch of a pass is cut into the pipeline's own.

    `parts` are this rank's stages, `dim` and `dtype` the size and the type of what passes between two stages. Behind
    the first `frozen_stages` no gradient is asked for or sent.
    """

    @cache
    def schedule_for(rows: int, tokens: int, trains: bool) -> Any:
        # One for each shape, and one for each of training and validation: torch's keep the buffers of their first use.
        count = parallelism.pipeline_parallel_microbatch_size
        tokens_BT = torch.empty(count, tokens, dtype=torch.int64, device="meta")
        shape = (count, tokens // mesh.tp.size(), dim)

        def hidden_BTD(stage: int) -> Tensor:
            """What the stage hands on."""
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=trains and stage >= frozen_stages)

        loss = torch.empty((), device="meta", requires_grad=trains)
        last = len(stages.ranks) - 1
        pipeline_stages = [
            _Stage(
                part,
                index,
                last + 1,
                device,
                input_args=hidden_BTD(index - 1) if index else tokens_BT,
                output_args=hidden_BTD(index) if index < last else loss,
                group=mesh.pp.get_group(),
                frozen_stages=frozen_stages,
            )
            for index, part in zip(stages.of_rank(mesh.pp.get_local_rank()), parts, strict=True)
        ]
        return _build_schedule(pipeline_stages, parallelism=parallelism, microbatches=rows // count)

    def run(microbatches: Iterable[Rows], *, num_targets: int) -> Tensor:
        total = torch.zeros((), device=device)
        trains = torch.is_grad_enabled()

        def mean_loss(*args: Tensor) -> Tensor:
            return loss_fn(*args) / num_targets

        for rows in microbatches:
            schedule = schedule_for(*rows.tokens_BT.shape, trains)
            inputs = {"positions_BT": rows.positions_BT, "targets_BT": rows.targets_BT, "loss_fn": mean_loss}
            if rows.documents_BT is not None:
                inputs["documents_BT"] = rows.documents_BT
            losses: list[Tensor] = []
            step = schedule.step if trains else schedule.eval
            step(rows.tokens_BT, target=rows.targets_BT, losses=losses, return_outputs=False, **inputs)
            total += sum(loss.detach() for loss in losses)
        return total

    return run


def _build_schedule(stages: list[Any], *, parallelism: Parallelism, microbatches: int) -> Any:
    # The last stage's output is the loss. It is a sum already, so that gradients are not to be divided.
    options = {"n_microbatches": microbatches, "loss_fn": lambda loss, _target: loss, "scale_grads": False}
    if path := parallelism.pipeline_parallel_schedule_csv:
        schedule = _PipelineScheduleRuntime(stages, **options)
        schedule._load_csv(path)
        return schedule
    schedule_class = get_schedule_class(parallelism.pipeline_parallel_schedule)
    return schedule_class(stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0], **options)


def describe_pipeline(parallelism: Parallelism, *, stages: Stages, rows: int) -> str:
    """The pipeline in one line, for passes of so many rows. ConfigError as bubble_fraction() says."""
    name = parallelism.pipeline_parallel_schedule_csv or parallelism.pipeline_parallel_schedule
    microbatches = rows // parallelism.pipeline_parallel_microbatch_size
    idle = bubble_fraction(parallelism, stages=stages, microbatches=microbatches)
    return (
        f"{name}, {len(stages.ranks)} stages on {parallelism.pipeline_parallel_degree} ranks, {microbatches} "
        f"micro-batches a pass: bubble {idle:.1%}"
    )


def bubble_fraction(parallelism: Parallelism, *, stages: Stages, microbatches: int) -> float:
    """The pipeline's bubble: which share of a pass its ranks wait for one another, all stages taken to be equal.

    A backward counts for two forwards, its half for inputs or weights for one; sending counts for nothing.
    ConfigError for a schedule file whose actions are incomplete or wait for one another in a circle.
    """
    ranks = parallelism.pipeline_parallel_degree
    path = parallelism.pipeline_parallel_schedule_csv
    if not path and SCHEDULES[parallelism.pipeline_parallel_schedule].stages_per_rank == 1:
        return (ranks - 1) / (microbatches + ranks - 1)
    # What a schedule asks of stages to plan its order, without process groups.
    places = [
        SimpleNamespace(stage_index=stage, num_stages=len(stages.ranks), group_size=ranks, group_rank=0, submod=None)
        for stage in stages.of_rank(0)
    ]
    try:
        schedule = _build_schedule(places, parallelism=parallelism, microbatches=microbatches)
        return _bubble_fraction(schedule.pipeline_order, last_stage=len(stages.ranks) - 1)
    except (AssertionError, ValueError, RuntimeError) as error:
        if not path:
            raise
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f'parallelism.pipeline_parallel_schedule_csv = "{path}": no order in which all work gets done: {reason}; '
            "put its actions right, or leave the option out."
        ) from None


_COST = {"F": 1, "B": 2, "I": 1, "W": 1}


def _bubble_fraction(order: Mapping[int, Sequence[Any]], *, last_stage: int) -> float:
    """The same for the actions of each rank in their order; None among them is no action."""
    waiting = {rank: [part for action in line if action for part in action.sub_actions or [action]]
               for rank, line in order.items()}  # fmt: skip
    work = sum(_COST[action.computation_type.value] for line in waiting.values() for action in line)
    ends: dict[tuple[str, int, int], int] = {}
    clock = dict.fromkeys(waiting, 0)
    while any(waiting.values()):
        done = len(ends)
        for rank, line in waiting.items():
            while line and (start := _start(line[0], ends=ends, last_stage=last_stage)) is not None:
                action = line.pop(0)
                kind = action.computation_type.value
                clock[rank] = max(clock[rank], start) + _COST[kind]
                ends[_phase(kind), action.stage_index, action.microbatch_index] = clock[rank]
        assert len(ends) > done, "torch plans no order in which ranks wait for one another"
    return 1 - work / (len(clock) * max(clock.values()))


def _phase(kind: str) -> str:
    """Forward, backward or weights: what the stage before waits for is the whole backward or its half for inputs."""
    return {"B": "I"}.get(kind, kind)


def _start(action: Any, *, ends: Mapping[tuple[str, int, int], int], last_stage: int) -> int | None:
    """The earliest time at which an action has what it needs; None where that is not yet known."""
    phase, stage, microbatch = _phase(action.computation_type.value), action.stage_index, action.microbatch_index
    if phase == "F":
        return ends.get(("F", stage - 1, microbatch)) if stage else 0
    if phase == "W":
        return ends.get(("I", stage, microbatch))
    needed = ("I", stage + 1, microbatch) if stage < last_stage else ("F", stage, microbatch)
    return ends.get(needed)
