"""Pipeline parallelism: spreads the layers of the model over ranks, through which micro-batches pass in turn.

Importing torch.distributed.pipelining takes half a second, so only pipelines import this file.
Legend: B batch rows, T tokens, D model, A auxiliary terms of the model, K depths of multi-token prediction.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, update_wrapper
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from torchtitan_clone.comm.collectives import moves_in_background, start_exchange, uses_messages
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Parallelism
from torchtitan_clone.ops.attention import OnHost
from torchtitan_clone.parallel import forward_backward
from torchtitan_clone.parallel.forward_backward import LossFn, Objective, Rows, StepOutput
from torchtitan_clone.parallel.mesh import Mesh
from torchtitan_clone.parallel.stages import SCHEDULES, Stages
from torchtitan_clone.parallel.teacher import TeacherOfRows, teacher_tensors, with_teacher
from torchtitan_clone.parallel.unsharded import unsharded_parameters, unwrapped_parameters
from torchtitan_clone.torch_compat import PipelineStageFixes, schedule_from_file

PipelineSchedule = PipelineScheduleSingle | PipelineScheduleMulti
META = torch.device("meta")


class _Received(Protocol):
    buffer: Tensor | None


class _ReceivedByMicrobatch(dict[int, Any]):
    """What a stage receives. torch keeps a buffer for each micro-batch; here they exist while they are in use."""

    def __setitem__(self, microbatch: int, received: tuple[_Received, ...]) -> None:
        super().__setitem__(microbatch, received)
        _move_buffers(received, META)


def _move_buffers(received: Iterable[_Received], device: torch.device) -> None:
    """Replaces the buffers by empty ones on a device, unless they are there."""
    for each in received:
        old = getattr(each, "buffer", None)  # before 2.13 the first stage has descriptions without one
        if old is not None and old.device.type != device.type:
            each.buffer = torch.empty_like(old, device=device, requires_grad=old.requires_grad)


class _Stage(PipelineStageFixes, PipelineStage):
    def forward_maybe_with_nosync(
        self, *args: object, loss_fn: LossFn, teacher: TeacherOfRows | None, rows_of_teacher: Mapping[str, Tensor],
        documents_BT: Tensor | None = None, **kwargs: object,
    ) -> object:  # fmt: skip
        # Only now, because schedules split tensors into micro-batches, and replicate everything else.
        if documents_BT is not None:
            kwargs["documents_BT"] = OnHost(documents_BT)
        loss_fn = with_teacher(loss_fn, teacher, rows_of_teacher)
        return super().forward_maybe_with_nosync(*args, loss_fn=loss_fn, **kwargs)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[object, ...], kwargs: dict[str, object] | None = None,
        save_forward_output: bool = True,
    ) -> object:  # fmt: skip
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        _move_buffers(self.args_recv_info[fwd_chunk_id], META)  # until backward, the cache of inputs keeps them
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        _move_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), META)
        if loss is not None:
            loss.detach_()  # schedules keep it until the end of a pass, and its graph has what the stage received

    def set_local_bwd_input(self, next_stage_bwd_outputs: object, mb_index: int) -> None:
        _move_buffers(self.grad_recv_info.get(mb_index, ()), self.device)  # torch fills those without gradient with 0
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _move_buffers(self.args_recv_info[fwd_chunk_id], self.device)
        return _as_messages(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _as_messages(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        _move_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return _as_messages(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return _as_messages(super().get_bwd_send_ops(bwd_chunk_id))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if (unsharded := unsharded_parameters(self.submod)) is not None:
            unsharded.collect()


def _as_messages(operations: list[dist.P2POp]) -> list[dist.P2POp]:
    """Makes operations on a CPU exchange messages, except large ones, which gloo moves while both ranks compute."""
    for operation in operations:
        tensor = operation.tensor
        if uses_messages(tensor) and moves_in_background(tensor):
            collective = "send" if operation.op is dist.isend else "recv"
            start = partial(_start_message, tensor, operation.group_peer, operation.group, collective)
            operation.op = update_wrapper(start, operation.op)  # torch logs its name
    return operations


def _start_message(
    tensor: Tensor, other: int, group: dist.ProcessGroup, collective: str, /, *_: object, **__: object
) -> dist.Work:
    """Sends a tensor or receives it; torch's schedules pass what the operation has once more."""
    sent, received = ([(other, tensor.contiguous())], []) if collective == "send" else ([], [(other, tensor)])
    return start_exchange(sent, received, group=group, collective=collective)


def build_pipelined_forward_backward(
    model_parts: Sequence[nn.Module], *, stages: Stages, frozen_stages: int, parallelism: Parallelism, mesh: Mesh,
    loss_fn: LossFn, dim: int, dtype: torch.dtype, device: torch.device, teacher: TeacherOfRows | None = None,
) -> forward_backward.ForwardBackward:  # fmt: skip
    """Returns the pipelined step: each micro-batch is a pass, which is cut into the micro-batches of the pipeline.

    `model_parts` are this rank's stages; hidden states between two stages have size `dim` and this `dtype`. `teacher`
    is that of each micro-batch, None on the ranks without the last stage.
    """
    auxiliary = forward_backward.auxiliary_terms(model_parts[0])
    objective = Objective(auxiliary, device=device)
    own_stages = stages.of_rank(mesh.pp.get_local_rank())
    size = parallelism.pipeline_parallel_microbatch_size
    count = len(stages.ranks)

    @cache  # torch's schedules keep the shapes of their first use
    def schedule_for(rows: int, tokens: int, depth: int, trains: bool) -> tuple[PipelineSchedule, list[PipelineStage]]:
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
        for stage in pipeline_stages:
            stage.args_recv_info, stage.grad_recv_info = _ReceivedByMicrobatch(), _ReceivedByMicrobatch()
        options = {"parallelism": parallelism, "microbatches": rows // size, "loss": objective.add}
        return _build_schedule(pipeline_stages, **options), pipeline_stages

    def run(microbatches: Iterable[Rows], *, num_targets: int) -> StepOutput:
        trains = torch.is_grad_enabled()
        objective.begin_step(num_targets=num_targets)
        with unwrapped_parameters(model_parts):
            for rows in microbatches:
                depth = 0 if rows.mtp_targets_BKT is None else rows.mtp_targets_BKT.shape[1]
                schedule, own = schedule_for(*rows.tokens_BT.shape, depth, trains)
                step = schedule.step if trains else schedule.eval
                # The schedule splits only tensors into micro-batches, not None.
                given: dict[str, Any] = {**forward_backward.optional_tensors(rows), "teacher": teacher}
                given["rows_of_teacher"] = {} if teacher is None else teacher_tensors(rows)
                if rows.documents_BT is not None:
                    given["documents_BT"] = rows.documents_BT
                step(
                    rows.tokens_BT, target=rows.targets_BT, return_outputs=False, positions_BT=rows.positions_BT,
                    targets_BT=rows.targets_BT, loss_fn=loss_fn, **given,
                )  # fmt: skip
                objective.end_pass()
                for stage in own:
                    stage.clear_runtime_states()  # else those of a validation stay until the next one
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
    start: float
    end: float


Action = tuple[str, int, int | None]
"""Kind as in read_schedule_file(), stage and micro-batch."""
Cost = Callable[[str, int], float]
"""Returns the time of an action of that kind on that stage."""
_COST = {"F": 1, "B": 2, "I": 1, "W": 1}


def timed_actions(parallelism: Parallelism, *, stages: Stages, microbatches: int) -> list[TimedAction]:
    """Returns the actions of a pass if all stages take equally long. Raises ConfigError as bubble_fraction()."""
    return _timed(parallelism, stages=stages, microbatches=microbatches, cost=lambda kind, _stage: _COST[kind], delay=0)


def schedule_seconds(parallelism: Parallelism, *, stages: Stages, microbatches: int, cost: Cost, delay: float) -> float:
    """Returns the time of a pass, whose actions take `cost`, and `delay` to send results to another rank.

    Of many micro-batches it times some: in the middle of a pass all take equally long.
    """

    def end(count: int) -> float:
        timed = _timed(parallelism, stages=stages, microbatches=count, cost=cost, delay=delay)
        return max(action.end for action in timed)

    ranks = parallelism.pipeline_parallel_degree
    few, some = (_some(stages, ranks=ranks, rounds=rounds) for rounds in (1, 2))
    if microbatches <= some or parallelism.pipeline_parallel_schedule_csv:
        return end(microbatches)
    first, second = end(few), end(some)
    return second + (second - first) / (some - few) * (microbatches - some)


def most_in_flight(parallelism: Parallelism, *, stages: Stages, microbatches: int, rank: int) -> int:
    """Returns the most micro-batches, counted once per stage, whose activations a rank keeps at a time."""
    count = min(microbatches, _some(stages, ranks=parallelism.pipeline_parallel_degree, rounds=2))
    if parallelism.pipeline_parallel_schedule in ("GPipe", "LoopedBFS"):  # keep all
        return microbatches * len(stages.of_rank(rank))
    orders = _orders_of(parallelism, stages=stages, microbatches=count)
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return max(accumulate(change[kind] for kind, _, _ in orders[rank]))


def _some(stages: Stages, *, ranks: int, rounds: int) -> int:
    """Returns a number of micro-batches after whose first ones a pass repeats itself."""
    return (len(stages.ranks) // ranks + rounds) * ranks


def _orders_of(parallelism: Parallelism, *, stages: Stages, microbatches: int) -> dict[int, list[Action]]:
    return _orders(
        parallelism.pipeline_parallel_schedule,
        path=parallelism.pipeline_parallel_schedule_csv,
        ranks=parallelism.pipeline_parallel_degree,
        stages=stages.ranks,
        microbatches=microbatches,
    )


def _timed(
    parallelism: Parallelism, *, stages: Stages, microbatches: int, cost: Cost, delay: float
) -> list[TimedAction]:
    path = parallelism.pipeline_parallel_schedule_csv
    try:
        orders = _orders_of(parallelism, stages=stages, microbatches=microbatches)
        return _as_early_as_possible(orders, stages=stages.ranks, cost=cost, delay=delay)
    except (AssertionError, ValueError, RuntimeError) as error:
        if not path:
            raise
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f'parallelism.pipeline_parallel_schedule_csv = "{path}": no order in which all work gets done: {reason}; '
            "correct its actions, or leave the option out."
        ) from None


@cache
def _orders(
    schedule: str, *, path: str | None, ranks: int, stages: tuple[int, ...], microbatches: int
) -> dict[int, list[Action]]:
    """Returns the actions of each rank, in order; `stages` has the rank of each stage."""
    if not path and SCHEDULES[schedule].stages_per_rank == 1:
        first = [microbatches if schedule == "GPipe" else min(microbatches, ranks - rank) for rank in range(ranks)]
        return {rank: _single_order(rank, ahead=first[rank], microbatches=microbatches) for rank in range(ranks)}
    # What a schedule reads of stages to plan its order, without process groups.
    stand_in = partial(SimpleNamespace, num_stages=len(stages), group_size=ranks, group_rank=0, submod=None)
    own = [stand_in(stage_index=stage) for stage, rank in enumerate(stages) if rank == 0]
    options = Parallelism(
        pipeline_parallel_degree=ranks, pipeline_parallel_schedule=schedule, pipeline_parallel_schedule_csv=path
    )
    planned = _build_schedule(
        cast("list[PipelineStage]", own), parallelism=options, microbatches=microbatches, loss=torch.sum
    )
    assert isinstance(planned, PipelineScheduleMulti)
    return {
        rank: [
            (one.computation_type.value, one.stage_index, one.microbatch_index)
            for action in order
            if action is not None
            for one in action.sub_actions or [action]
        ]
        for rank, order in planned.pipeline_order.items()
    }


def _single_order(rank: int, *, ahead: int, microbatches: int) -> list[Action]:
    """Returns the actions of a rank with one stage, which runs `ahead` forwards before its first backward."""
    order: list[Action] = [("F", rank, index) for index in range(ahead)]
    for index in range(microbatches):
        order.append(("B", rank, index))
        order += [("F", rank, index + ahead)] if index + ahead < microbatches else []
    return order


def _as_early_as_possible(
    orders: Mapping[int, list[Action]], *, stages: Sequence[int], cost: Cost, delay: float
) -> list[TimedAction]:
    """Returns the actions of each rank as early as their inputs are there."""
    timed: list[TimedAction] = []
    ends: dict[Action, float] = {}
    clock: dict[int, float] = dict.fromkeys(orders, 0)
    left = {rank: iter(order) for rank, order in orders.items()}
    heads = {rank: next(actions, None) for rank, actions in left.items()}
    while any(heads.values()):
        done = len(ends)
        for rank, actions in left.items():
            while (head := heads[rank]) and (start := _start(head, ends=ends, stages=stages, delay=delay)) is not None:
                kind, stage, microbatch = head
                begin = max(clock[rank], start)
                clock[rank] = begin + cost(kind, stage)
                timed.append(
                    TimedAction(rank=rank, kind=kind, stage=stage, microbatch=microbatch, start=begin, end=clock[rank])
                )
                # After either kind of backward the previous stage has its gradients.
                ends["I" if kind == "B" else kind, stage, microbatch] = clock[rank]
                heads[rank] = next(actions, None)
        assert len(ends) > done, "torch plans no order in which ranks wait for one another"
    return timed


def _start(action: Action, *, ends: Mapping[Action, float], stages: Sequence[int], delay: float) -> float | None:
    """Returns the earliest time at which an action has its inputs; None where that is not known yet."""
    kind, stage, microbatch = action
    if kind == "W":
        return ends.get(("I", stage, microbatch))
    step = -1 if kind == "F" else 1
    before = stage + step
    if not 0 <= before < len(stages):
        return 0 if kind == "F" else ends.get(("F", stage, microbatch))
    end = ends.get((kind if kind == "F" else "I", before, microbatch))
    return None if end is None else end + delay * (stages[before] != stages[stage])
