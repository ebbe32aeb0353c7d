"""Mistakes of parallel training that the comparison with one device must notice; `scripts/parity.py --sabotage`.

Each replaces one function of torch or of the package inside a rank, until its process ends.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_clone import trainer
from torchtitan_clone.comm import collectives
from torchtitan_clone.data import Batch, packing
from torchtitan_clone.models import mla, moe, plan
from torchtitan_clone.models.attention import DocumentMask
from torchtitan_clone.models.balancing import ExpertLoads
from torchtitan_clone.ops import attention, cross_entropy, vocabulary
from torchtitan_clone.ops.dtensor_shards import local_with_partial_grad
from torchtitan_clone.optim import muon
from torchtitan_clone.optim.container import OptimizerContainer
from torchtitan_clone.optim.matrices import Gathering, Matrix
from torchtitan_clone.optim.muon import Muon
from torchtitan_clone.parallel import gradients, head_exchange, unsharded
from torchtitan_clone.parallel.fsdp import SumByMessages
from torchtitan_clone.run import engine, loaders

Replacement = Callable[..., object]


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A replaced function, and the case of the parity matrix that it is planted in."""

    case: str
    owner: object
    attribute: str
    replacement: Replacement
    """Called with the original function and its arguments."""

    def plant(self) -> None:
        """Makes the mistake in this process."""
        original, replacement = getattr(self.owner, self.attribute), self.replacement

        def call(*args: object, **kwargs: object) -> object:
            return replacement(original, *args, **kwargs)

        setattr(self.owner, self.attribute, call)


MISTAKES: dict[str, Mistake] = {}
"""Mistakes by description."""


def _mistake(case: str, owner: object, attribute: str) -> Callable[[Replacement], Replacement]:
    def enter(replacement: Replacement) -> Replacement:
        name = replacement.__name__.replace("_", " ").strip()
        MISTAKES[name] = Mistake(case=case, owner=owner, attribute=attribute, replacement=replacement)
        return replacement

    return enter


def _rank() -> int:
    return int(os.environ["RANK"])


# ---------------------------------------------------------------------- reductions, one for each axis


@_mistake("replicate", unsharded, "StartedSum")
def _gradients_of_replicas_are_not_summed(start: Callable[..., object], x: Tensor, **others: object) -> object:
    return start(x.clone(), **others)


@_mistake("shard", SumByMessages, "__call__")
def _gradients_of_shards_are_not_summed(*_: object, output_tensor: Tensor, input_tensor: Tensor, **__: object) -> None:
    output_tensor.copy_(input_tensor.chunk(dist.get_world_size())[_rank()])


@_mistake("shard", SumByMessages, "__call__")
def _gradients_are_averaged_over_ranks(
    add: Callable[..., None], sums: SumByMessages, *, input_tensor: Tensor, **others: object
) -> None:
    add(sums, input_tensor=input_tensor.div_(dist.get_world_size()), **others)


@_mistake("tensor", cross_entropy, "log_softmax")
def _softmax_sums_one_rank_of_the_vocabulary(
    log_softmax: Callable[..., Tensor], logits_CV: Tensor, _: object
) -> Tensor:
    return log_softmax(logits_CV, None)


@_mistake("tensor", vocabulary, "Partial")
def _gradients_by_hidden_states_are_not_summed(_: object) -> Replicate:
    return Replicate()


@_mistake("tensor, latent", mla, "local_with_partial_grad")
def _gradients_of_the_shared_rotary_key_are_not_summed(local: Any, x: Tensor) -> Tensor:
    is_gathered_key = isinstance(x, DTensor) and x.ndim == 3 and x.placements[0].is_replicate()
    return cast("DTensor", x).to_local() if is_gathered_key else local(x)


@_mistake("context", collectives, "sum_parts")
def _gradients_of_keys_are_not_returned(_: object, parts: Sequence[Tensor], *, out: Tensor) -> Tensor:
    return out.copy_(parts[_rank()])


@_mistake("context", collectives, "start_exchange")
def _keys_change_their_sign_on_the_way(
    start: Replacement, sent: collectives.Addressed, *more: object, **others: object
):
    are_keys = others["collective"] != "reduce_scatter"
    return start([(rank, -x) for rank, x in sent] if are_keys else sent, *more, **others)


@_mistake("context, alltoall, masked", head_exchange, "exchange_parts")
def _heads_are_not_exchanged_for_tokens(_: object, tensors: Sequence[Tensor], **__: object) -> list[Tensor]:
    return [x.contiguous() for x in tensors]


@_mistake("pipeline", PipelineStage, "get_bwd_send_ops")
def _stages_send_zero_gradients(get_ops: Any, stage: PipelineStage, chunk: int) -> list[dist.P2POp]:
    operations = get_ops(stage, chunk)
    for operation in operations:
        operation.tensor.zero_()
    return operations


@_mistake("shard x pipeline", PipelineStage, "perform_reduce_grad")
def _gradients_of_a_pipeline_are_averaged(reduce: Any, stage: PipelineStage, _factor: int) -> None:
    reduce(stage, 4)


# ---------------------------------------------------------------------- loss and norm


@_mistake("shard", trainer, "sum_over_ranks")
def _divisor_counts_the_targets_of_one_rank(sum_over_ranks: Any, values: list[float]) -> list[float]:
    return values if len(values) == 1 else sum_over_ranks(values)


@_mistake("one rank", Batch, "microbatches")
def _ignored_targets_are_trained_on(microbatches: Any, batch: Batch, size: int) -> list[Batch]:
    return [replace(part, targets_BT=part.targets_BT.clamp_min(0)) for part in microbatches(batch, size)]


@_mistake("tensor", gradients, "_num_shards")
def _norm_counts_tensor_parallel_copies_twice(_: object, _gradient: Tensor) -> int:
    return 2


@_mistake("shard x tensor, clipped", dist, "all_reduce")
def _clipping_uses_the_norm_of_one_rank(all_reduce: Any, x: Tensor, *args: Any, **kwargs: Any) -> object:
    return None if x.ndim == 0 else all_reduce(x, *args, **kwargs)


@_mistake("pipeline", dist, "all_reduce")
def _norm_counts_one_pipeline_stage(all_reduce: Any, x: Tensor, *args: Any, **kwargs: Any) -> object:
    return None if x.ndim == 0 else all_reduce(x, *args, **kwargs)


# ---------------------------------------------------------------------- data, positions and masks


@_mistake("shard, accumulated", Batch, "microbatches")
def _last_micro_batch_is_dropped(microbatches: Any, batch: Batch, size: int) -> list[Batch]:
    return microbatches(batch, size)[:-1]


@_mistake("shard", loaders, "batch_rank")
def _all_ranks_read_the_same_rows(_: object, *__: object, **___: object) -> int:
    return 0


@_mistake("context", Batch, "select_tokens")
def _positions_count_from_the_start_of_each_shard(select: Any, batch: Batch, index_T: Tensor) -> Batch:
    return replace(select(batch, index_T), positions_BT=batch.positions_BT[:, : len(index_T)].contiguous())


@_mistake("context, prediction, ring masked", packing, "later_targets")
def _later_targets_lie_in_other_documents(_: object, targets_BT: np.ndarray, *, depth: int) -> np.ndarray:
    return np.stack([np.roll(targets_BT, -1 - each, axis=1) for each in range(depth)], axis=1)


@_mistake("tensor x context, prediction, padded", Batch, "select_context")
def _tokens_without_targets_count_in_routers(select: Callable[..., Batch], batch: Batch, tokens: slice) -> Batch:
    found = select(batch, tokens)
    assert found.is_context_BKT is not None
    return replace(found, is_context_BKT=torch.ones_like(found.is_context_BKT))


@_mistake("tensor x context, prediction, padded", Batch, "select_context")
def _routers_of_all_ranks_have_the_context_of_the_first(
    select: Callable[..., Batch], batch: Batch, tokens: slice
) -> Batch:
    return select(batch, slice(0, tokens.stop - tokens.start))


@_mistake("shard, prediction", ExpertLoads, "update")
def _biases_of_routers_follow_the_load_of_one_rank(update: Callable[..., None], loads: ExpertLoads, _: object) -> None:
    update(loads, loads.by_router(loads.own(torch.device("cpu")).tolist()))


@_mistake("context", attention, "document_starts")
def _document_mask_is_shifted_by_one_token(document_starts: Any, documents_BT: Tensor) -> Tensor:
    return document_starts(documents_BT.roll(1, dims=1).cummax(dim=1).values)


@_mistake("context, olmo3 ring masked", attention, "visible_starts")
def _windows_are_a_token_longer(
    visible_starts: Replacement, *args: object, window: int | None, **limits: object
) -> object:
    return visible_starts(*args, window=None if window is None else window + 1, **limits)


@_mistake("tensor, olmo3", plan.Averaged, "_average")
def _norms_are_of_the_heads_of_one_rank(_: object, *__: object) -> None:
    return None


@_mistake("tensor, gpt_oss", moe, "share_of_sum")
def _biases_of_results_are_added_by_every_rank(_: object, bias: Tensor) -> Tensor:
    return local_with_partial_grad(bias)


@_mistake("shard, accumulated", DocumentMask, "forward")
def _mask_of_the_first_micro_batch_is_kept(
    forward: Any, module: DocumentMask, *args: object, **limits: object
) -> object:
    if not hasattr(module, "first_mask"):
        module.first_mask = forward(module, *args, **limits)
    return module.first_mask


# ---------------------------------------------------------------------- weights and optimizer


@_mistake("replicate", engine, "init_weights")
def _initial_weights_differ_by_rank(init_weights: Any, parameters: object, *, seed: int, **more: object) -> None:
    init_weights(parameters, seed=seed + _rank(), **more)


@_mistake("shard", OptimizerContainer, "set_lr_factor")
def _learning_rate_differs_on_the_first_rank(set_lr_factor: Any, optimizer: object, factor: float) -> None:
    set_lr_factor(optimizer, factor * (1.01 if _rank() == 0 else 1.0))


@_mistake("replicate", OptimizerContainer, "zero_grad")
def _gradients_of_the_last_step_are_kept(_: object, _optimizer: object) -> None:
    return None


@_mistake("replicate", OptimizerContainer, "step")
def _the_first_rank_skips_its_updates(step: Any, optimizer: OptimizerContainer, **others: object) -> None:
    if _rank() != 0:
        step(optimizer, **others)


# ---------------------------------------------------------------------- matrices that are orthogonalized as a whole


@_mistake("shard 3, muon", muon, "assign_owners")
def _shards_are_orthogonalized_alone(
    assign: Callable[..., list[list[Matrix]]], *args: object, **others: object
) -> object:
    def alone(matrix: Matrix) -> Iterator[Matrix]:
        if (part := matrix.parts.get(_rank())) is not None:
            yield replace(matrix, region=part, parts={_rank(): part}, owner=_rank())

    return [[each for matrix in bucket for each in alone(matrix)] for bucket in assign(*args, **others)]


@_mistake("replicate x shard, muon", muon, "_orthogonalized")
def _updates_of_a_matrix_with_two_owners_are_added(
    orthogonalized: Callable[..., dict[int, Tensor]], *args: object
) -> dict[int, Tensor]:
    return {key: 2 * update for key, update in orthogonalized(*args).items()}


@_mistake("shard 3, muon", Gathering, "wait")
def _momentum_is_that_of_other_rows(
    wait: Callable[..., list[tuple[Matrix, Tensor]]], gathering: Gathering
) -> list[tuple[Matrix, Tensor]]:
    return [(matrix, values.roll(1, dims=0)) for matrix, values in wait(gathering)]


@_mistake("shard, muon", Muon, "step")
def _weights_decay_twice(step: Callable[..., None], optimizer: Muon, **factor: float) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.2
    step(optimizer, **factor)


@_mistake("tensor, muon", muon, "lr_adjustment")
def _the_rate_is_of_the_shape_of_a_shard(adjust: Callable[..., float], rows: int, cols: int, **how: object) -> float:
    return adjust(rows // 2, cols // 2, **how)
