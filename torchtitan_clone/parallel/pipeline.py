"""Pipeline parallelism: spreads the layers of the model over ranks, through which micro-batches pass in turn.

Importing torch.distributed.pipelining takes half a second, so only pipelines import this file.
Legend: B batch rows, T tokens, D model, A auxiliary terms of the model, K depths of multi-token prediction.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Parallelism
from torchtitan_clone.parallel import forward_backward
from torchtitan_clone.parallel.forward_backward import LossFn, Objective, Rows, StepOutput
from torchtitan_clone.parallel.mesh import Mesh
from torchtitan_clone.parallel.stages import SCHEDULES, Stages
from torchtitan_clone.torch_compat import PipelineStageFixes, schedule_from_file

PipelineSchedule = PipelineScheduleSingle | PipelineScheduleMulti


class _Stage(PipelineStageFixes, PipelineStage): ...


def build_pipelined_forward_backward(
    model_parts: Sequence[nn.Module], *, stages: Stages, frozen_stages: int, parallelism: Parallelism, mesh: Mesh,
    loss_fn: LossFn, dim: int, dtype: torch.dtype, device: torch.device,
) -> forward_backward.ForwardBackward:  # fmt: skip
    """Returns the pipelined step: each micro-batch is a pass, which is cut into the micro-batches of the pipeline.

    `model_parts` are this rank's stages; hidden states between two stages have size `dim` and this `dtype`.
    """
    auxiliary = forward_backward.auxiliary_terms(model_parts[0])
    objective = Objective(auxiliary, device=device)
    own_stages = stages.of_rank(mesh.pp.get_local_rank())
    size = parallelism.pipeline_parallel_microbatch_size
    count = len(stages.ranks)

    @cache  # torch's schedules keep the buffers of their first use
    def schedule_for(rows: int, tokens: int, depth: int, trains: bool) -> PipelineSchedule:
        def inputs_of(stage: int) -> tuple[Tensor, ...]:
            """Returns meta tensors like the inputs of a stage; of stage `count`, like the output of the last one."""
            if stage == 0:
                return (torch.empty(size, tokens, dtype=torch.int64, device="meta"),)
            terms = len(auxiliary)
            empty = partial(torch.empty, device="meta", requires_grad=trains and stage > frozen_stages)
            if stage == count:
                return (empty((1 + terms,) if terms else ()),)
            hidden_BTD = empty(size * (1 + depth), tokens // mesh.tp.size(), dim, dtype=dtype)
            return (hidden_BTD, empty(terms)) if terms else (hidden_BTD,)

        pipeline_stages: list[PipelineStage] = [
            _Stage(
                module, index, count, device, input_args=inputs_of(index), output_args=inputs_of(index + 1),
                group=mesh.pp.get_group(), frozen_stages=frozen_stages,
            )
            for index, module in zip(own_stages, model_parts, strict=True)
        ]  # fmt: skip
        return _build_schedule(pipeline_stages, parallelism=parallelism, microbatches=rows // size, loss=objective.add)

    def run(microbatches: Iterable[Rows], *, num_targets: int) -> StepOutput:
        trains = torch.is_grad_enabled()
        objective.begin_step(num_targets=num_targets)
        for rows in microbatches:
            later_BKT = rows.mtp_targets_BKT
            schedule = schedule_for(*rows.tokens_BT.shape, 0 if later_BKT is None else later_BKT.shape[1], trains)
            step = schedule.step if trains else schedule.eval
            optional = {"documents_BT": rows.documents_BT, "mtp_targets_BKT": later_BKT}
            # The schedule splits only tensors into micro-batches, not None.
            given: dict[str, Any] = {name: tensor for name, tensor in optional.items() if tensor is not None}
            step(
                rows.tokens_BT, target=rows.targets_BT, return_outputs=False, positions_BT=rows.positions_BT,
                targets_BT=rows.targets_BT, loss_fn=loss_fn, **given,
            )  # fmt: skip
            objective.end_pass()
        return objective.output()

    return run


def _build_schedule(
    stages: list[PipelineStage], *, parallelism: Parallelism, microbatches: int, loss: Callable[[Tensor], Tensor]
) -> PipelineSchedule:
    # The objective is a sum already, so that gradients are not to be divided.
    options: dict[str, Any] = {"n_microbatches": microbatches, "scale_grads": False}
    options["loss_fn"] = lambda sums, _target: loss(sums)
    if path := parallelism.pipeline_parallel_schedule_csv:
        return schedule_from_file(path, stages=stages, **options)
    schedule_class = get_schedule_class(parallelism.pipeline_parallel_schedule)
    return schedule_class(stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0], **options)


def describe_pipeline(parallelism: Parallelism, *, stages: Stages, rows: int) -> str:
    """Returns one line about the pipeline, for passes of `rows` rows. Raises ConfigError as bubble_fraction()."""
    name = parallelism.pipeline_parallel_schedule_csv or parallelism.pipeline_parallel_schedule
    microbatches = rows // parallelism.pipeline_parallel_microbatch_size
    idle = bubble_fraction(parallelism, stages=stages, microbatches=microbatches)
    places = f"{len(stages.ranks)} stages on {parallelism.pipeline_parallel_degree} ranks"
    return f"{name}, {places}, {microbatches} micro-batches a pass: bubble {idle:.1%}"


def bubble_fraction(parallelism: Parallelism, *, stages: Stages, microbatches: int) -> float:
    """Returns the fraction of a pass in which ranks wait for one another, if all stages take equally long.

    Raises ConfigError for a schedule file with missing actions, or with actions that wait for one another in a cycle.
    """
    ranks = parallelism.pipeline_parallel_degree
    if _has_single_stages(parallelism):
        return (ranks - 1) / (microbatches + ranks - 1)
    actions = timed_actions(parallelism, stages=stages, microbatches=microbatches)
    work = sum(action.end - action.start for action in actions)
    return 1 - work / (ranks * max(action.end for action in actions))


def _has_single_stages(parallelism: Parallelism) -> bool:
    schedule = parallelism.pipeline_parallel_schedule
    return not parallelism.pipeline_parallel_schedule_csv and SCHEDULES[schedule].stages_per_rank == 1


@dataclass(frozen=True, kw_only=True)
class TimedAction:
    """A forward (F), a backward (B) or its half for inputs (I) or weights (W); in units of one forward."""

    rank: int
    kind: str
    stage: int
    microbatch: int | None
    start: int
    end: int


def timed_actions(parallelism: Parallelism, *, stages: Stages, microbatches: int) -> list[TimedAction]:
    """Returns the actions of a pass if all stages take equally long. Raises ConfigError as bubble_fraction()."""
    ranks = parallelism.pipeline_parallel_degree
    path = parallelism.pipeline_parallel_schedule_csv
    if _has_single_stages(parallelism):
        is_gpipe = parallelism.pipeline_parallel_schedule == "GPipe"
        first = [microbatches if is_gpipe else min(microbatches, ranks - rank) for rank in range(ranks)]
        orders = {rank: _single_order(rank, ahead=first[rank], microbatches=microbatches) for rank in range(ranks)}
        return _timed(orders, last_stage=ranks - 1)
    # What a schedule reads of stages to plan its order, without process groups.
    stand_in = partial(SimpleNamespace, num_stages=len(stages.ranks), group_size=ranks, group_rank=0, submod=None)
    try:
        planned = cast("list[PipelineStage]", [stand_in(stage_index=stage) for stage in stages.of_rank(0)])
        schedule = _build_schedule(planned, parallelism=parallelism, microbatches=microbatches, loss=torch.sum)
        assert isinstance(schedule, PipelineScheduleMulti)
        orders = {
            rank: [
                (one.computation_type.value, one.stage_index, one.microbatch_index)
                for action in order
                if action is not None
                for one in action.sub_actions or [action]
            ]
            for rank, order in schedule.pipeline_order.items()
        }
        return _timed(orders, last_stage=len(stages.ranks) - 1)
    except (AssertionError, ValueError, RuntimeError) as error:
        if not path:
            raise
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f'parallelism.pipeline_parallel_schedule_csv = "{path}": no order in which all work gets done: {reason}; '
            "correct its actions, or leave the option out."
        ) from None


_Action = tuple[str, int, int | None]  # kind as in read_schedule_file(), stage and micro-batch
_COST = {"F": 1, "B": 2, "I": 1, "W": 1}


def _single_order(rank: int, *, ahead: int, microbatches: int) -> list[_Action]:
    """Returns the actions of a rank with one stage, which runs `ahead` forwards before its first backward."""
    order: list[_Action] = [("F", rank, index) for index in range(ahead)]
    for index in range(microbatches):
        order.append(("B", rank, index))
        order += [("F", rank, index + ahead)] if index + ahead < microbatches else []
    return order


def _timed(orders: Mapping[int, list[_Action]], *, last_stage: int) -> list[TimedAction]:
    """Returns the actions of each rank, whose order is used up, as early as their inputs are there."""
    timed: list[TimedAction] = []
    ends: dict[_Action, int] = {}
    clock = dict.fromkeys(orders, 0)
    while any(orders.values()):
        done = len(ends)
        for rank, order in orders.items():
            while order and (start := _start(order[0], ends=ends, last_stage=last_stage)) is not None:
                kind, stage, microbatch = order.pop(0)
                begin = max(clock[rank], start)
                clock[rank] = begin + _COST[kind]
                action = TimedAction(
                    rank=rank, kind=kind, stage=stage, microbatch=microbatch, start=begin, end=clock[rank]
                )
                timed.append(action)
                # After either kind of backward the previous stage has its gradients.
                ends["I" if kind == "B" else kind, stage, microbatch] = clock[rank]
        assert len(ends) > done, "torch plans no order in which ranks wait for one another"
    return timed


def _start(action: _Action, *, ends: Mapping[_Action, int], last_stage: int) -> int | None:
    """Returns the earliest time at which an action has its inputs; None where that is not known yet."""
    kind, stage, microbatch = action
    if kind == "F":
        return ends.get(("F", stage - 1, microbatch)) if stage else 0
    if kind == "W":
        return ends.get(("I", stage, microbatch))
    return ends.get(("I", stage + 1, microbatch) if stage < last_stage else ("F", stage, microbatch))
