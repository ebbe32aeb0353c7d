"""Pipeline parallelism: the layers of the model are spread over ranks, and micro-batches pass through them in turn.

torch.distributed.pipelining runs the schedule; here are the stages that it runs, and the time that ranks wait. Its
import takes half a second, so this file is imported only where there is a pipeline.

Legend: B batch rows, T tokens, D model, A auxiliary terms of the model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Parallelism
from torchtitan_clone.parallel.forward_backward import (
    ForwardBackward,
    LossFn,
    Objective,
    Rows,
    StepOutput,
    auxiliary_terms,
)
from torchtitan_clone.parallel.mesh import Mesh
from torchtitan_clone.parallel.stages import SCHEDULES, Stages
from torchtitan_clone.torch_compat import PipelineStageFixes, schedule_from_file

PipelineSchedule = PipelineScheduleSingle | PipelineScheduleMulti


class _Stage(PipelineStageFixes, PipelineStage):
    """A stage of the pipeline."""


def build_pipelined_forward_backward(
    model_parts: Sequence[nn.Module],
    *,
    stages: Stages,
    frozen_stages: int,
    parallelism: Parallelism,
    mesh: Mesh,
    loss_fn: LossFn,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ForwardBackward:
    """Returns the pipelined step: each micro-batch is a pass, which is cut into the micro-batches of the pipeline.

    `model_parts` are this rank's stages; hidden states between two stages have size `dim` and this `dtype`. Gradients
    stop at the first `frozen_stages` stages.
    """
    auxiliary = auxiliary_terms(model_parts[0])
    objective = Objective(auxiliary, device=device)
    count = len(stages.ranks)

    @cache
    def schedule_for(rows: int, tokens: int, trains: bool) -> PipelineSchedule:
        # One for each shape, and one for each of training and validation: torch's keep the buffers of their first use.
        size = parallelism.pipeline_parallel_microbatch_size
        tensors = _StageTensors(
            tokens_shape=(size, tokens),
            hidden_shape=(size, tokens // mesh.tp.size(), dim),
            dtype=dtype,
            num_terms=len(auxiliary),
            num_stages=count,
            frozen_stages=frozen_stages if trains else count,
        )
        pipeline_stages: list[PipelineStage] = [
            _Stage(
                module,
                index,
                count,
                device,
                input_args=tensors.inputs_of(index),
                output_args=tensors.outputs_of(index),
                group=mesh.pp.get_group(),
                frozen_stages=frozen_stages,
            )
            for index, module in zip(stages.of_rank(mesh.pp.get_local_rank()), model_parts, strict=True)
        ]
        return _build_schedule(
            pipeline_stages, parallelism=parallelism, microbatches=rows // size, objective=objective.add
        )

    def run(microbatches: Iterable[Rows], *, num_targets: int) -> StepOutput:
        trains = torch.is_grad_enabled()
        objective.begin_step(num_targets=num_targets)
        for rows in microbatches:
            schedule = schedule_for(*rows.tokens_BT.shape, trains)
            inputs: dict[str, Any] = {
                "positions_BT": rows.positions_BT,
                "targets_BT": rows.targets_BT,
                "loss_fn": loss_fn,
            }
            if rows.documents_BT is not None:
                inputs["documents_BT"] = rows.documents_BT
            step = schedule.step if trains else schedule.eval
            step(rows.tokens_BT, target=rows.targets_BT, return_outputs=False, **inputs)
            objective.end_pass()
        return objective.output()

    return run


@dataclass(frozen=True, kw_only=True)
class _StageTensors:
    """Shapes and dtypes of what one micro-batch passes between stages, as tensors on the meta device."""

    tokens_shape: tuple[int, int]
    hidden_shape: tuple[int, int, int]
    dtype: torch.dtype
    num_terms: int
    num_stages: int
    frozen_stages: int

    def inputs_of(self, stage: int) -> tuple[Tensor, ...]:
        """Returns the tokens [B, T] for the first stage; for others hidden_BTD, and sums_A if there are terms."""
        if stage == 0:
            return (torch.empty(self.tokens_shape, dtype=torch.int64, device="meta"),)
        return self.outputs_of(stage - 1)

    def outputs_of(self, stage: int) -> tuple[Tensor, ...]:
        """Returns what the next stage gets; for the last stage the loss [], or the loss and the terms [1 + A]."""
        has_gradient = stage >= self.frozen_stages
        if stage == self.num_stages - 1:
            shape = (1 + self.num_terms,) if self.num_terms else ()
            return (torch.empty(shape, device="meta", requires_grad=has_gradient),)
        hidden_BTD = torch.empty(self.hidden_shape, dtype=self.dtype, device="meta", requires_grad=has_gradient)
        if not self.num_terms:
            return (hidden_BTD,)
        return hidden_BTD, torch.empty(self.num_terms, device="meta", requires_grad=has_gradient)


def _build_schedule(
    stages: list[PipelineStage],
    *,
    parallelism: Parallelism,
    microbatches: int,
    objective: Callable[[Tensor], Tensor],
) -> PipelineSchedule:
    # The objective is a sum already, so that gradients are not to be divided.
    options: dict[str, Any] = {
        "n_microbatches": microbatches,
        "loss_fn": lambda sums, _target: objective(sums),
        "scale_grads": False,
    }
    if path := parallelism.pipeline_parallel_schedule_csv:
        return schedule_from_file(path, stages=stages, **options)
    schedule_class = get_schedule_class(parallelism.pipeline_parallel_schedule)
    return schedule_class(stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0], **options)


def describe_pipeline(parallelism: Parallelism, *, stages: Stages, rows: int) -> str:
    """Describes the pipeline in one line, for passes of `rows` rows. Raises ConfigError as bubble_fraction()."""
    name = parallelism.pipeline_parallel_schedule_csv or parallelism.pipeline_parallel_schedule
    microbatches = rows // parallelism.pipeline_parallel_microbatch_size
    idle = bubble_fraction(parallelism, stages=stages, microbatches=microbatches)
    return (
        f"{name}, {len(stages.ranks)} stages on {parallelism.pipeline_parallel_degree} ranks, {microbatches} "
        f"micro-batches a pass: bubble {idle:.1%}"
    )


def bubble_fraction(parallelism: Parallelism, *, stages: Stages, microbatches: int) -> float:
    """Returns the fraction of a pass in which ranks wait for one another, if all stages take equally long.

    A backward takes as long as two forwards, and each half of it as long as one; communication takes no time. Raises
    ConfigError for a schedule file with missing actions, or with actions that wait for one another in a cycle.
    """
    ranks = parallelism.pipeline_parallel_degree
    path = parallelism.pipeline_parallel_schedule_csv
    if not path and SCHEDULES[parallelism.pipeline_parallel_schedule].stages_per_rank == 1:
        return (ranks - 1) / (microbatches + ranks - 1)
    # What a schedule reads of stages to plan its order, without process groups.
    stand_ins = [
        SimpleNamespace(stage_index=stage, num_stages=len(stages.ranks), group_size=ranks, group_rank=0, submod=None)
        for stage in stages.of_rank(0)
    ]
    try:
        schedule = _build_schedule(
            cast("list[PipelineStage]", stand_ins),
            parallelism=parallelism,
            microbatches=microbatches,
            objective=torch.sum,
        )
        assert isinstance(schedule, PipelineScheduleMulti)
        return _bubble_fraction(schedule.pipeline_order, last_stage=len(stages.ranks) - 1)
    except (AssertionError, ValueError, RuntimeError) as error:
        if not path:
            raise
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f'parallelism.pipeline_parallel_schedule_csv = "{path}": no order in which all work gets done: {reason}; '
            "put its actions right, or leave the option out."
        ) from None


class _Kind(Protocol):
    """Kind of an action: F forward, B backward, I and W its halves for inputs and weights."""

    @property
    def value(self) -> str: ...


class _Action(Protocol):
    """One action of a schedule, such as 0F1: forward of stage 0 on micro-batch 1."""

    @property
    def stage_index(self) -> int: ...
    @property
    def computation_type(self) -> _Kind: ...
    @property
    def microbatch_index(self) -> int | None: ...
    @property
    def sub_actions(self) -> "tuple[_Action, ...] | None": ...


_COST = {"F": 1, "B": 2, "I": 1, "W": 1}
_Ends = Mapping[tuple[str, int, int | None], int]
"""When a phase of a stage on a micro-batch ends."""


def _bubble_fraction(order: Mapping[int, Sequence[_Action | None]], *, last_stage: int) -> float:
    """Returns the same for the actions of each rank in their order; None among them is no action."""
    waiting = {
        rank: [one for action in line if action for one in action.sub_actions or [action]]
        for rank, line in order.items()
    }
    work = sum(_COST[action.computation_type.value] for line in waiting.values() for action in line)
    ends: dict[tuple[str, int, int | None], int] = {}
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
    """Returns "I" for a backward: the previous stage waits for gradients of inputs only."""
    return {"B": "I"}.get(kind, kind)


def _start(action: _Action, *, ends: _Ends, last_stage: int) -> int | None:
    """Returns the earliest time at which an action has its inputs; None where that is not known yet."""
    phase = _phase(action.computation_type.value)
    stage = action.stage_index
    microbatch = action.microbatch_index
    if phase == "F":
        return ends.get(("F", stage - 1, microbatch)) if stage else 0
    if phase == "W":
        return ends.get(("I", stage, microbatch))
    needed = ("I", stage + 1, microbatch) if stage < last_stage else ("F", stage, microbatch)
    return ends.get(needed)
