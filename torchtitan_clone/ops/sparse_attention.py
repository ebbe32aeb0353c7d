"""Attention over the keys that an indexer selects for each query, and the loss from which the indexer learns.

The score of a key is the sum over the indexer's heads of w relu(q k / sqrt(I)). A query attends to those `top_k` of the
keys it sees whose scores are largest, of equal ones the first. The loss of a query is KL(p || softmax(scores)) over the
keys that it attends to; p is the mean over the heads of attention's probabilities, and has no gradient. All in fp32, a
block of queries at a time, which backward computes again: exact, in the time and without the memory of dense scores.

Legend: B batch, T queries, S keys, N heads, H head dim, V dimensions of a value, M heads of the indexer, I their size;
t and s queries and keys of one block. Source: arXiv 2512.02556.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_clone.comm.tracing import COMMUNICATING_OPERATIONS
from torchtitan_clone.ops.blockwise_attention import in_layout_of
from torchtitan_clone.torch_compat import is_fake, process_group_of, simulates_gpu

Index = tuple[Tensor, Tensor, Tensor]
"""What an indexer computes of tokens: queries [B, T, M, I], keys [B, S, I], and the weights of its heads [B, T, M]."""
_SCORES = {"cpu": 2**21, "cuda": 2**26}
"""Most scores of all heads of one block."""


def _head_scores(q_BtMI: Tensor, k_BsI: Tensor) -> Tensor:
    """Returns relu(q k / sqrt(I)) of each head of the indexer [B, M, t, s]."""
    products_BMts = q_BtMI.float().transpose(1, 2) @ k_BsI.float().mT[:, None]
    return products_BMts.mul_(q_BtMI.shape[-1] ** -0.5).relu_()


def _weighted(scores_BMts: Tensor, weight_BtM: Tensor) -> Tensor:
    """Returns the sum over the indexer's heads [B, t, s]."""
    return (scores_BMts * weight_BtM.float().mT[..., None]).sum(1)


def index_scores(index: Index) -> Tensor:
    """Returns the scores of keys for queries [B, T, S]."""
    q_BTMI, k_BSI, weight_BTM = index
    return _weighted(_head_scores(q_BTMI, k_BSI), weight_BTM)


def select_keys(scores_Bts: Tensor, visible_Bts: Tensor, *, top_k: int) -> Tensor:
    """Returns whether a query attends to a key [B, t, s]: to `top_k` of the visible ones, to all with 0.

    The threshold is the score of the last one. Which keys are chosen does not depend on how queries are divided.
    """
    if top_k == 0 or top_k >= scores_Bts.shape[-1]:
        return visible_Bts
    scores_Bts = scores_Bts.masked_fill(~visible_Bts, -torch.inf)
    threshold_Bt1 = scores_Bts.topk(top_k, dim=-1).values[..., -1:]
    above_Bts = scores_Bts > threshold_Bt1
    equal_Bts = (scores_Bts == threshold_Bt1) & visible_Bts
    room_Bt1 = top_k - above_Bts.sum(-1, keepdim=True)
    return above_Bts | (equal_Bts & (equal_Bts.cumsum(-1) <= room_Bt1))


@dataclass(frozen=True, kw_only=True)
class _ScoredBlock:
    """Queries at `place`, with all keys of their row up to the last of them."""

    place: slice
    keys: slice
    heads_BMts: Tensor
    """Scores of each head of the indexer."""
    scores_Bts: Tensor
    selected_Bts: Tensor
    probs_BNts: Tensor


def _blocks(
    q_BTNH: Tensor, k_BSNH: Tensor, index: Index, starts_BT: Tensor | None, firsts: Sequence[int], top_k: int
) -> Iterator[_ScoredBlock]:
    key_S = torch.arange(k_BSNH.shape[1], device=q_BTNH.device)
    for place, keys in _places(q_BTNH, k_BSNH, firsts, most_heads=max(q_BTNH.shape[2], index[0].shape[2])):
        heads_BMts = _head_scores(index[0][:, place], index[1][:, keys])
        scores_Bts = _weighted(heads_BMts, index[2][:, place])
        count = place.stop - place.start
        visible_Bts = (key_S[keys] <= key_S[keys.stop - count : keys.stop, None]).expand_as(scores_Bts)
        if starts_BT is not None:
            visible_Bts = visible_Bts & (key_S[keys] >= starts_BT[:, place, None])
        selected_Bts = select_keys(scores_Bts, visible_Bts, top_k=top_k)
        logits_BNts = (_heads(q_BTNH, place) @ _heads(k_BSNH, keys).mT).mul_(q_BTNH.shape[-1] ** -0.5)
        yield _ScoredBlock(
            place=place, keys=keys, heads_BMts=heads_BMts, scores_Bts=scores_Bts, selected_Bts=selected_Bts,
            probs_BNts=logits_BNts.masked_fill_(~selected_Bts[:, None], -torch.inf).softmax(-1),
        )  # fmt: skip


def _places(q_BTNH: Tensor, k_BSNH: Tensor, firsts: Sequence[int], *, most_heads: int) -> Iterator[tuple[slice, slice]]:
    """Yields the places of queries and keys of each block."""
    piece = q_BTNH.shape[1] // len(firsts)
    device = "cuda" if simulates_gpu(q_BTNH) else q_BTNH.device.type
    most = max(1, _SCORES[device] // (len(q_BTNH) * k_BSNH.shape[1] * most_heads))
    for number, first in enumerate(firsts):
        for start in range(0, piece, most):
            stop = min(start + most, piece)
            yield slice(number * piece + start, number * piece + stop), slice(0, first + stop)


def _divergence(target_Bts: Tensor, block: _ScoredBlock) -> Tensor:
    """Returns KL(target || softmax(scores)) over selected keys [B, t]."""
    hidden_Bts = ~block.selected_Bts
    target_Bts = target_Bts.clamp_min(torch.finfo(torch.float32).tiny)
    log_q_Bts = block.scores_Bts.masked_fill(hidden_Bts, -torch.inf).log_softmax(-1)
    # p (t + exp(-t) - 1) is p t + q - p, whose sum is that of p t, without differences of large terms that are rounded.
    t_Bts = (target_Bts.log() - log_q_Bts).masked_fill_(hidden_Bts, 0.0)
    return (target_Bts * (t_Bts + (-t_Bts).expm1())).sum(-1)


def _heads(x_BTNH: Tensor, place: slice) -> Tensor:
    return x_BTNH[:, place].float().transpose(1, 2)


@torch.library.custom_op("torchtitan_clone::sparse_attention", mutates_args=())
def sparse_attention(
    q_BTNH: Tensor, k_BSNH: Tensor, v_BSNV: Tensor, index_q_BTMI: Tensor, index_k_BSI: Tensor, weight_BTM: Tensor,
    starts_BT: Tensor | None, firsts: Sequence[int], top_k: int, has_loss: bool, head_ranks: int, head_group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns attention [B, T, N, V], and the loss of the indexer at each query [B, T], zeros without `has_loss`.

    Keys are whole rows, of which a query sees those from its start on, the first index in the row [B, T]. Queries are
    pieces of rows of one size, from the indices `firsts` on. With other heads on `head_ranks` ranks of a group the loss
    is a share, the sum of which over the ranks is the loss.
    """
    group = process_group_of(head_group) if head_group and has_loss else None
    index = index_q_BTMI, index_k_BSI, weight_BTM
    out_BTNV = q_BTNH.new_empty(*q_BTNH.shape[:3], v_BSNV.shape[-1])
    loss_BT = torch.zeros(q_BTNH.shape[:2], device=q_BTNH.device)
    if is_fake(q_BTNH):  # a trace of collectives computes nothing
        places = () if group is None else _places(q_BTNH, k_BSNH, firsts, most_heads=q_BTNH.shape[2])
        for place, keys in places:
            dist.all_reduce(loss_BT.new_empty(len(loss_BT), place.stop - place.start, keys.stop), group=group)
        return out_BTNV, loss_BT
    for block in _blocks(q_BTNH, k_BSNH, index, starts_BT, firsts, top_k):
        out_BTNV[:, block.place] = (block.probs_BNts @ _heads(v_BSNV, block.keys)).transpose(1, 2).to(out_BTNV.dtype)
        if has_loss:
            target_Bts = block.probs_BNts.mean(1) / head_ranks
            if group is not None:
                dist.all_reduce(target_Bts, group=group)
            loss_BT[:, block.place] = _divergence(target_Bts, block) / head_ranks
    return out_BTNV, loss_BT


@torch.library.custom_op("torchtitan_clone::sparse_attention_backward", mutates_args=())
def _sparse_attention_backward(
    grad_BTNV: Tensor, grad_loss_BT: Tensor, q_BTNH: Tensor, k_BSNH: Tensor, v_BSNV: Tensor, index_q_BTMI: Tensor,
    index_k_BSI: Tensor, weight_BTM: Tensor, starts_BT: Tensor | None, firsts: Sequence[int], top_k: int,
    head_ranks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = q_BTNH, k_BSNH, v_BSNV, index_q_BTMI, index_k_BSI, weight_BTM
    grads = [torch.zeros_like(x, dtype=torch.float32, memory_format=torch.contiguous_format) for x in inputs]
    for block in _blocks(q_BTNH, k_BSNH, inputs[3:], starts_BT, firsts, top_k):
        place, keys, probs_BNts = block.place, block.keys, block.probs_BNts
        grad_BNtV = _heads(grad_BTNV, place)
        grads[2][:, keys] += (probs_BNts.mT @ grad_BNtV).transpose(1, 2)
        by_probs_BNts = grad_BNtV @ _heads(v_BSNV, keys).mT
        by_probs_BNts -= (by_probs_BNts * probs_BNts).sum(-1, keepdim=True)
        by_logits_BNts = by_probs_BNts.mul_(probs_BNts).mul_(q_BTNH.shape[-1] ** -0.5)
        grads[0][:, place] = (by_logits_BNts @ _heads(k_BSNH, keys)).transpose(1, 2)
        grads[1][:, keys] += (by_logits_BNts.mT @ _heads(q_BTNH, place)).transpose(1, 2)
        # Of the loss: what softmax(scores) is too large by. It is linear in p, so that each rank has a share of it.
        share_Bts = block.scores_Bts.masked_fill(~block.selected_Bts, -torch.inf).softmax(-1)
        by_scores_Bts = (share_Bts - probs_BNts.mean(1)) * (grad_loss_BT[:, place, None] / head_ranks)
        grads[5][:, place] = (block.heads_BMts * by_scores_Bts[:, None]).sum(-1).mT
        by_heads_BMts = by_scores_Bts[:, None] * weight_BTM[:, place].float().mT[..., None]
        by_heads_BMts *= (block.heads_BMts > 0) * index_q_BTMI.shape[-1] ** -0.5
        grads[3][:, place] = (by_heads_BMts @ index_k_BSI[:, None, keys].float()).transpose(1, 2)
        grads[4][:, keys] += (by_heads_BMts.mT @ _heads(index_q_BTMI, place)).sum(1)
    q, k, v, index_q, index_k, weight = (in_layout_of(x, grad) for x, grad in zip(inputs, grads, strict=True))
    return q, k, v, index_q, index_k, weight


@sparse_attention.register_fake
def _(q_BTNH: Tensor, _k: Tensor, v_BSNV: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    loss_BT = torch.empty(q_BTNH.shape[:2], device=q_BTNH.device)
    return q_BTNH.new_empty(*q_BTNH.shape[:3], v_BSNV.shape[-1]), loss_BT


@_sparse_attention_backward.register_fake
def _(_grad: Tensor, _grad_loss: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in inputs[:6])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.firsts, ctx.top_k, _, ctx.head_ranks, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad_BTNV: Tensor, grad_loss_BT: Tensor) -> tuple[Tensor | None, ...]:
    options = ctx.firsts, ctx.top_k, ctx.head_ranks
    return *_sparse_attention_backward(grad_BTNV, grad_loss_BT, *ctx.saved_tensors, *options), *[None] * 6


sparse_attention.register_autograd(_backward, setup_context=_save_for_backward)
COMMUNICATING_OPERATIONS.append(sparse_attention)


class SparseCore(nn.Module):
    """Attention to the `top_k` keys that an index selects, 0: to all; a module, so that parallelism can change it."""

    def __init__(self, *, top_k: int):
        super().__init__()
        self.top_k = top_k
        self.head_ranks = 1
        self.head_group = ""
        """Ranks that have the other heads, and the name of their group."""

    def forward(
        self, q_BTNH: Tensor, k_BSNH: Tensor, v_BSNV: Tensor, index: Index, starts_BT: Tensor | None,
        firsts: Sequence[int] = (0,),
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns what sparse_attention() does; without gradients no loss."""
        return sparse_attention(
            q_BTNH, k_BSNH, v_BSNV, *index, starts_BT, list(firsts), self.top_k, torch.is_grad_enabled(),
            self.head_ranks, self.head_group,
        )  # fmt: skip
