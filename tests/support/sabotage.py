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
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_clone import trainer
from torchtitan_clone.comm import collectives
from torchtitan_clone.data import Batch, packing, predictions
from torchtitan_clone.models import delta_net, mla, moe, plan, sparse_latent
from torchtitan_clone.models.attention import DocumentMask
from torchtitan_clone.models.balancing import ExpertLoads
from torchtitan_clone.ops import (
    attention,
    cross_entropy,
    delta_rule,
    distillation,
    sparse_attention,
    stochastic_rounding,
    vocabulary,
)
from torchtitan_clone.ops.dtensor_shards import local_with_partial_grad
from torchtitan_clone.optim import muon
from torchtitan_clone.optim.container import OptimizerContainer
from torchtitan_clone.optim.matrices import Gathering, Matrix
from torchtitan_clone.optim.muon import Muon
from torchtitan_clone.optim.schedule import Factors
from torchtitan_clone.parallel import gradients, head_exchange, pipeline, state_exchange, unsharded
from torchtitan_clone.parallel.fsdp import SumByMessages
from torchtitan_clone.parallel.max_logits import MaxLogits
from torchtitan_clone.run import loaders, model_parts, teacher

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


@_mistake("tensor, deepseek_v32", sparse_attention, "select_keys")
def _keys_are_selected_across_documents(select: Any, scores: Tensor, visible: Tensor, **others: object) -> Tensor:
    return select(scores, visible.int().flip(-1).cummax(-1).values.flip(-1) > 0, **others)


@_mistake("tensor, deepseek_v32", sparse_latent.SparseLatentAttention, "forward")
def _gradients_of_indexers_reach_the_model(_: object, attention: Any, x: Tensor, rope: object, mask: object) -> object:
    latent = attention.query_latent(x)
    given = attention.queries(latent, rope), *attention.latents(x, rope), mask, attention.indexer(x, latent, rope)
    return attention.attend(*given)


@_mistake("tensor, deepseek_v32", plan.SharedHeads, "apply")
def _targets_of_indexers_have_the_heads_of_one_rank(_: object, _style: object, module: Any, __: object) -> object:
    return module


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


@_mistake("replicate", model_parts, "init_weights")
def _initial_weights_differ_by_rank(init_weights: Any, parameters: object, *, seed: int, **more: object) -> None:
    init_weights(parameters, seed=seed + _rank(), **more)


@_mistake("shard", OptimizerContainer, "set_factors")
def _learning_rate_differs_on_the_first_rank(set_factors: Any, optimizer: object, factors: Factors) -> None:
    set_factors(optimizer, replace(factors, lr=factors.lr * (1.01 if _rank() == 0 else 1.0)))


@_mistake("replicate", OptimizerContainer, "zero_grad")
def _gradients_of_the_last_step_are_kept(_: object, _optimizer: object) -> None:
    return None


@_mistake("replicate", OptimizerContainer, "step")
def _the_first_rank_skips_its_updates(step: Any, optimizer: OptimizerContainer, **others: object) -> None:
    if _rank() != 0:
        step(optimizer, **others)


# ---------------------------------------------------------------------- a teacher


@_mistake("tensor, distilled", distillation.OfModel, "log_probs")
def _teachers_predict_from_a_part_of_the_vocabulary(
    log_probs: Callable[..., Tensor], scaled: Tensor, logits: Tensor, *, lse_C1: Tensor, **options: Any
) -> Tensor:
    return log_probs(scaled, logits, lse_C1=distillation.OfModel.lse(scaled, logits, **options), **options)


@_mistake("shard, distilled", teacher.ModelTeacher, "__call__")
def _teachers_read_the_next_row(call: Replacement, *of_teacher: object, tokens_BT: Tensor, **others: object) -> object:
    return call(*of_teacher, tokens_BT=tokens_BT.roll(1, dims=0), **others)


@_mistake("pipeline, distilled", pipeline._Stage, "forward_maybe_with_nosync")
def _teachers_predict_the_first_micro_batch(
    forward: Callable[..., object], stage: Any, *args: object, rows_of_teacher: object, **others: object
) -> object:
    if not hasattr(stage, "first_rows"):
        stage.first_rows = rows_of_teacher
    return forward(stage, *args, rows_of_teacher=stage.first_rows, **others)


@_mistake("context, stored", predictions.PredictionStore, "read")
def _predictions_are_those_of_the_token_before(read: Replacement, store: object, positions: np.ndarray) -> object:
    return read(store, np.maximum(positions - 1, 0))


@_mistake("tensor, stored", distillation.Stored, "lse")
def _the_bucket_is_that_of_one_rank(lse: Callable[..., Tensor], *tensors: Tensor, **options: Any) -> Tensor:
    found = lse(*tensors, **options)
    return found if _rank() == 0 else torch.full_like(found, -torch.inf)


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
    orthogonalized: Callable[..., dict[Matrix, Tensor]], *args: object
) -> dict[Matrix, Tensor]:
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


# ---------------------------------------------------------------------- logits that clip, and state that is rounded


@_mistake("shard, qk-clip", MaxLogits, "reduce")
def _heads_are_clipped_by_the_logits_of_one_rank(_: object, _logits: MaxLogits) -> None:
    return None


@_mistake("shard, bf16 state", stochastic_rounding, "local_shard_and_offset")
def _draws_are_those_of_positions_in_a_shard(find: Any, tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    return find(tensor)[0], (0,) * tensor.ndim


# ---------------------------------------------------------------------- linear attention


@_mistake("shard, qwen3_5", delta_net.DeltaRule, "forward")
def _state_is_carried_over_the_border_of_a_document(forward: Replacement, *arguments: object) -> object:
    *tensors, _ = arguments
    return forward(*tensors, None)


@_mistake("shard, qwen3_5", delta_net.ShortConvolution, "forward")
def _convolutions_see_the_document_before(forward: Replacement, module: object, x: Tensor, _: object) -> object:
    return forward(module, x, None)


@_mistake("tensor, qwen3_5", delta_rule, "_decay")
def _decays_of_later_tokens_are_not_masked(decay: Callable[..., Any], sums: Tensor, *more: object, **others: object):
    found = decay(sums, *more, **others)
    pairs = (sums[..., None] - sums[..., None, :]).to(found.pairs.dtype).exp()
    return replace(found, pairs=pairs)


@_mistake("shard, kimi_linear", delta_rule, "_first_keys")
def _keys_keep_what_their_channels_forget(_first_keys: Replacement, k: Tensor, until: Tensor) -> Tensor:
    return delta_rule._first(k, until)


@_mistake("shard, qwen3_next experts over 2", moe.TokenLinear, "forward")
def _gates_of_shared_experts_are_those_of_other_tokens(forward: Replacement, module: object, x: Tensor) -> Tensor:
    gate = forward(module, x)
    assert isinstance(gate, Tensor)
    return gate.roll(1, dims=1)


@_mistake("context, qwen3_5 ring unmasked", state_exchange, "_compose")
def _the_last_rank_forgets_the_states_of_earlier_pieces(
    compose: Callable[..., Tensor], maps: Tensor, *pieces: object, **direction: object
) -> Tensor:
    K = maps.shape[2]
    maps = F.pad(maps[..., :-K], (0, K)) if _rank() == 1 else maps
    return compose(maps, *pieces, **direction)


@_mistake("context, qwen3_5 ring masked", state_exchange, "_places")
def _states_pass_in_the_order_of_ranks(
    places: Callable[..., list[tuple[int, int]]], degree: int, *, method: str
) -> object:
    return sorted(places(degree, method=method))


@_mistake("context, qwen3_5 ring masked", state_exchange.StateExchange, "forward")
def _documents_that_begin_after_a_border_continue_a_state(forward: Replacement, *arguments: object) -> object:
    *tensors, starts = arguments
    return forward(*tensors, torch.where(cast("Tensor", starts) < 8, -1, starts))


@_mistake("context, qwen3_5 ring masked", state_exchange.StateExchange, "convolve")
def _convolutions_see_another_document_over_a_border(
    convolve: Replacement, module: object, weights: object, inputs: object, starts: Tensor
) -> object:
    return convolve(module, weights, inputs, torch.where(starts <= 0, -9, starts))
