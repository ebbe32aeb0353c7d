"""The largest attention logit of each head in a step, over all tokens of the global batch, exactly.

No kernel for GPUs but FlexAttention's returns it, so that the products of queries and keys are computed once more, a
block of queries and keys at a time, without the softmax and the values: half of the FLOPs of attention's forward.
A logit is q k^T / sqrt(H) of a key that the query sees, without sinks.

Legend: B batch, T queries, S keys, N heads, K kv heads, G query heads of a kv head, H head dim; L layers; t and s
queries and keys of one block.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_clone.comm.tracing import COMMUNICATING_OPERATIONS, OVER_ALL_RANKS
from torchtitan_clone.ops.attention import AttentionMask, OnHost, moved, visible_starts
from torchtitan_clone.ops.blockwise_attention import Block, key_blocks
from torchtitan_clone.ops.varlen_attention import Queries, Spans, copied
from torchtitan_clone.parallel.context import KeyExchange, keys_of_ranks, spans_of_ranks
from torchtitan_clone.parallel.head_exchange import CompleteRows, HeadExchange
from torchtitan_clone.parallel.state_exchange import PieceStarts
from torchtitan_clone.torch_compat import is_fake, process_group_of

MaskAndStarts = tuple[AttentionMask, Tensor | None]
"""The mask of attention, and the first token of the row that each query sees [B, T], on the CPU; None: causal only."""
_SCORES = {"cpu": 2**20, "cuda": 2**26}
"""Most scores in memory at a time: on a CPU those that stay in its cache."""
_CPU = torch.device("cpu")


class MaskWithStarts(nn.Module):
    """Adds to a mask what only the host needs, which a mask of FlexAttention does not tell."""

    def __init__(self, mask: nn.Module):
        super().__init__()
        self._mask = mask

    def forward(
        self, documents_BT: OnHost | Tensor | None, positions_BT: Tensor, *, window: int | None = None,
        chunk: int | None = None, recurrent: bool = False, **options: Any,
    ) -> MaskAndStarts | AttentionMask:  # fmt: skip
        mask = self._mask(documents_BT, positions_BT, window=window, chunk=chunk, recurrent=recurrent, **options)
        if recurrent:
            return mask
        if mask is None or isinstance(mask, Tensor):
            return mask, mask
        documents_BT = None if documents_BT is None else moved(documents_BT, _CPU)
        like_BT = torch.empty(positions_BT.shape, device=_CPU)
        return mask, visible_starts(documents_BT, like=like_BT, window=window, chunk=chunk)


class MeasuredAttention(nn.Module):
    """Attention that raises `max_N` to the largest logit of each head in the backward of each micro-batch."""

    max_N: Tensor

    def __init__(self, core: nn.Module, *, max_N: Tensor):
        super().__init__()
        self.core = core
        self.register_buffer("max_N", max_N, persistent=False)
        self._exchange = core.exchange if isinstance(core, KeyExchange) else ("", "")

    def forward(
        self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: MaskAndStarts, sinks_N: Tensor | None = None
    ) -> Tensor:
        q_BTNH = cast("Tensor", _Measured.apply(q_BTNH, k_BTKH, mask[1], self.max_N, *self._exchange))
        return self.core(q_BTNH, k_BTKH, v_BTKH, mask[0], sinks_N)


class _Measured(torch.autograd.Function):
    """Returns the queries, and measures when their gradient is computed.

    Backward runs exactly once for each token that is trained: recomputed forwards and validation do not count.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BTNH: Tensor, k_BTKH: Tensor, starts_BT: Tensor | None, max_N: Tensor, exchange: str, group: str
    ) -> Tensor:
        ctx.save_for_backward(q_BTNH, k_BTKH, starts_BT)
        ctx.arguments = max_N, exchange, group
        return q_BTNH.view_as(q_BTNH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        max_N, *exchange = ctx.arguments
        raise_to_max_logits(max_N, *ctx.saved_tensors, *exchange)
        return grads[0], None, None, None, None, None


@torch.library.custom_op("torchtitan_clone::raise_to_max_logits", mutates_args={"max_N"})
def raise_to_max_logits(
    max_N: Tensor, q_BTNH: Tensor, k_BTKH: Tensor, starts_BT: Tensor | None, exchange: str, group_name: str
) -> None:
    """Raises `max_N` to the largest logit of each head; with an exchange over the keys of all ranks of a group."""
    spans: Spans = [range(q_BTNH.shape[1])]
    shares: Iterator[tuple[Spans, Tensor]] = iter([(spans, k_BTKH)])
    if exchange:
        group = process_group_of(group_name)
        spans = spans_of_ranks(q_BTNH, group)[group.rank()]
        shares = keys_of_ranks(k_BTKH, group=group, exchange=exchange)
    queries = Queries(spans=spans, starts_BT=starts_BT, num_rows=len(q_BTNH))
    on_device_BT = None if starts_BT is None or is_fake(q_BTNH) else copied(starts_BT, q_BTNH.device)
    for keys, k_BSKH in shares:
        if is_fake(q_BTNH):
            continue  # a trace of collectives computes nothing
        for block in key_blocks(queries.spans, keys, queries.starts_BT, like=q_BTNH):
            _raise_to_block(max_N, q_BTNH, k_BSKH, block, starts_BT=on_device_BT)


@raise_to_max_logits.register_fake
def _(max_N: Tensor, *_: object) -> None: ...


COMMUNICATING_OPERATIONS.append(raise_to_max_logits)


def _raise_to_block(max_N: Tensor, q_BTNH: Tensor, k_BSKH: Tensor, block: Block, *, starts_BT: Tensor | None) -> None:
    """Raises `max_N` to the largest logits of a block of queries and keys."""
    num_kv, scale = k_BSKH.shape[2], q_BTNH.shape[-1] ** -0.5
    groups = q_BTNH.shape[2] // num_kv
    heads = max(1, _SCORES[q_BTNH.device.type] // (groups * len(block.queries.index) * len(block.index)))
    max_KG = max_N.view(num_kv, groups)
    for row in range(*block.queries.rows.indices(len(q_BTNH))):
        hidden_ts = _hidden(block, None if starts_BT is None else starts_BT[row], device=q_BTNH.device)
        q_KGtH = q_BTNH[row, block.queries.place].unflatten(1, (num_kv, groups)).permute(1, 2, 0, 3)
        k_KHs = k_BSKH[row, block.place].permute(1, 2, 0)
        for max_kG, q_kGtH, k_kHs in zip(max_KG.split(heads), q_KGtH.split(heads), k_KHs.split(heads), strict=True):
            scores_kGts = _product(q_kGtH.flatten(1, 2), k_kHs).unflatten(1, (groups, -1))
            if hidden_ts is not None:
                scores_kGts.masked_fill_(hidden_ts, -torch.inf)
            torch.maximum(max_kG, scores_kGts.flatten(2).amax(-1) * scale, out=max_kG)


def _product(q: Tensor, k: Tensor) -> Tensor:
    """Returns the products [k, G t, s] in fp32, in which a logit of 100 in bfloat16 would be off by up to 0.25."""
    if q.dtype != torch.float32 and q.is_cuda:
        return torch.bmm(q, k, out_dtype=torch.float32)
    return torch.bmm(q.float(), k.float())


def _hidden(block: Block, starts_T: Tensor | None, *, device: torch.device) -> Tensor | None:
    """Returns whether a key is hidden from a query [t, s]; None: none is."""
    if block.is_full:
        return None
    q_t1 = torch.arange(block.queries.index.start, block.queries.index.stop, device=device)[:, None]
    k_s = torch.arange(block.index.start, block.index.stop, device=device)
    hidden_ts = k_s > q_t1
    return hidden_ts if starts_T is None else hidden_ts | (k_s < starts_T[block.queries.place, None])


class MaxLogits:
    """The largest logits of all heads of all layers, of which this rank computes some.

    `layers` has the attention modules of this rank by number, and `heads` is the number of heads of the model. Changes
    the modules and the masks of the `models` in place.
    """

    def __init__(
        self,
        layers: dict[int, nn.Module],
        *,
        models: Sequence[nn.Module],
        num_layers: int,
        heads: int,
        tp: DeviceMesh,
        device: torch.device,
    ) -> None:
        self.max_LN = torch.full((num_layers, heads), -torch.inf, device=device)
        """-inf for a layer without attention."""
        own, tensor_rank = heads // tp.size(), tp.get_local_rank()
        for layer, attention in layers.items():
            core = attention.get_submodule("core")
            max_N = self.max_LN[layer, tensor_rank * own : (tensor_rank + 1) * own]
            if isinstance(core, HeadExchange):
                core.core = MeasuredAttention(core.core, max_N=max_N.chunk(core.group.size())[core.group.rank()])
            else:
                attention.core = MeasuredAttention(core, max_N=max_N)
        for model in models:
            holder, name = model, "attention_mask"
            while isinstance(mask := holder.get_submodule(name), CompleteRows | PieceStarts):
                holder, name = mask, "mask"
            setattr(holder, name, MaskWithStarts(mask))

    def reset(self) -> None:
        """Forgets the logits of the last step."""
        self.max_LN.fill_(-torch.inf)

    def reduce(self) -> None:
        """Raises the logits to those of all ranks, in place. A collective over all ranks."""
        if dist.get_world_size() > 1:
            with OVER_ALL_RANKS:
                dist.all_reduce(self.max_LN, dist.ReduceOp.MAX)
