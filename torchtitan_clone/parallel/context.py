"""Context parallelism: shards each sequence over the `cp` axis, with exact attention across the shards.

"allgather" gathers the keys and values of all ranks, "ring" passes them around a ring. With both a rank holds a span of
tokens from the front and the mirrored one from the back, since late tokens cost more; of three ranks:

    tokens of a row   [ 0 ][ 1 ][ 2 ][ 2 ][ 1 ][ 0 ]

"alltoall" exchanges heads for tokens (`head_exchange.py`), of contiguous spans. With all of them linear attention
passes states from span to span (`state_exchange.py`).

Legend: B batch, T tokens of this rank, N heads, K kv heads, H head dim; R ranks of the axis.
Source: arXiv 2411.01783 (gathered, balanced), 2310.01889 (ring).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_clone.comm import collectives
from torchtitan_clone.comm.collectives import all_gather, others, reduce_scatter, uses_messages
from torchtitan_clone.comm.tracing import COMMUNICATING_OPERATIONS
from torchtitan_clone.ops import attention as masks
from torchtitan_clone.ops.attention import KERNELS, AttentionModule, OnHost, moved
from torchtitan_clone.ops.blockwise_attention import (
    empty_attention,
    fake_attention,
    fake_gradients,
    in_layout_of,
    sink_gradients,
)
from torchtitan_clone.ops.kernels import PartialKernel
from torchtitan_clone.ops.sparse_attention import Index, SparseCore
from torchtitan_clone.ops.token_shards import gather_tokens
from torchtitan_clone.ops.varlen_attention import Attention, Queries, Spans
from torchtitan_clone.parallel.head_exchange import CompleteRows, HeadExchange
from torchtitan_clone.parallel.mesh import Method, local_tokens
from torchtitan_clone.parallel.state_exchange import OPERATORS as STATE_OPERATORS
from torchtitan_clone.parallel.state_exchange import PieceStarts, StateExchange
from torchtitan_clone.torch_compat import process_group_of


def apply_context_parallel(model: nn.Module, *, mesh: DeviceMesh, method: Method) -> None:
    """Replaces the attention of all blocks in place; the model then gets this rank's tokens, but all documents."""
    group = mesh.get_group()
    if method == "alltoall":
        mask = CompleteRows(model.get_submodule("attention_mask"), degree=group.size())
    else:
        mask = LocalStarts(rank=group.rank(), degree=group.size(), method=method)
    model.attention_mask = PieceStarts(mask, group=group, method=method)
    for block in model.get_submodule("layers").children():
        attention = block.get_submodule("attention")
        core = attention.get_submodule("core")
        if isinstance(core, SparseCore):
            attention.core = SparseKeyExchange(core, mesh=mesh)
        elif not isinstance(core, AttentionModule):  # linear attention
            attention.core = StateExchange(group_name=group.group_name, method=method)
        elif method == "alltoall":
            attention.core = HeadExchange(core, group=group)
        else:
            attention.core = KeyExchange(group_name=group.group_name, exchange=method)


class LocalStarts(nn.Module):
    """Attention mask of this rank's queries, on the CPU: the first token of the row that each attends to."""

    def __init__(self, *, rank: int, degree: int, method: Method):
        super().__init__()
        self._degree = degree
        self._local_tokens = partial(local_tokens, rank=rank, degree=degree, method=method)

    def forward(
        self, documents_BS: OnHost | Tensor | None, positions_BT: Tensor, *, window: int | None = None,
        chunk: int | None = None, **_: object,
    ) -> Tensor | None:  # fmt: skip
        """Maps documents of full rows [B, R T] to starts [B, T]; returns None for causal attention."""
        if documents_BS is not None:
            documents_BS = moved(documents_BS, torch.device("cpu"))
        like_BS = torch.empty(len(positions_BT), positions_BT.shape[1] * self._degree, device="cpu")
        starts_BS = masks.visible_starts(documents_BS, like=like_BS, window=window, chunk=chunk)
        if starts_BS is None:
            return None
        spans = self._local_tokens(starts_BS.shape[1])
        return torch.cat([starts_BS[:, span.start : span.stop] for span in spans], dim=1)


class KeyExchange(AttentionModule):
    """Attention of this rank's queries over the keys and values of all ranks."""

    def __init__(self, *, group_name: str, exchange: Method):
        super().__init__()
        self.exchange = exchange, group_name

    def forward(
        self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: Tensor | None, sinks_N: Tensor | None = None
    ) -> Tensor:
        options = self.choose(q_BTNH, mask, over_keys=True).name, *self.exchange
        return context_attention(q_BTNH, k_BTKH, v_BTKH, mask, sinks_N, *options)[0]


class SparseKeyExchange(nn.Module):
    """Attention of this rank's queries to selected keys of whole rows, which it gathers."""

    def __init__(self, core: SparseCore, *, mesh: DeviceMesh):
        super().__init__()
        self.core = core
        self._mesh = mesh

    def forward(
        self, q_BTNH: Tensor, k_BTNH: Tensor, v_BTNV: Tensor, index: Index, starts_BT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns what SparseCore does; `starts_BT` are counted from the start of a piece, as PieceStarts does."""
        spans = spans_of_ranks(q_BTNH, self._mesh.get_group())
        place_S = torch.cat([torch.arange(span.start, span.stop) for of_rank in spans for span in of_rank])
        order_S = place_S.argsort().to(q_BTNH.device)
        index_q, index_k, weights = index
        k, v, index_k = (gather_tokens(x, self._mesh)[:, order_S] for x in (k_BTNH, v_BTNV, index_k))
        firsts = [span.start for span in spans[self._mesh.get_local_rank()]]
        if starts_BT is not None:
            pieces = starts_BT.chunk(len(firsts), dim=1)
            starts_BT = torch.cat([piece + first for piece, first in zip(pieces, firsts, strict=True)], dim=1)
        return self.core(q_BTNH, k, v, (index_q, index_k, weights), starts_BT, firsts)


def _gather_keys(kv: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yields the keys and values of all ranks, each with its rank."""
    return iter(enumerate(all_gather(kv, group=group)))


def _pass_around(kv: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yields the same from rank to rank around the ring; the next ones are in flight while the caller computes."""
    rank = group.rank()
    degree = group.size()
    for step in range(degree - 1):
        arriving, works = _start_exchange(kv, to=rank + 1, source=rank - 1, group=group)
        yield (rank - step) % degree, kv
        _wait(works)
        kv = arriving
    yield (rank + 1) % degree, kv


def _start_exchange(x: Tensor, *, to: int, source: int, group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    arriving = torch.empty_like(x)
    if uses_messages(x):
        target, source = to % group.size(), source % group.size()
        return arriving, [
            collectives.start_exchange([(target, x)], [(source, arriving)], group=group, collective="send")
        ]
    send = dist.P2POp(dist.isend, x, group=group, group_peer=to % group.size())
    receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=source % group.size())
    return arriving, dist.batch_isend_irecv([send, receive])


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _sum_gradients(gradients: Iterator[tuple[int, Tensor]], group: dist.ProcessGroup) -> list[Tensor]:
    """Returns the sums over ranks of their gradients for this rank's keys and values, which share no memory."""
    by_rank = [gradient for _, gradient in sorted(gradients, key=lambda pair: pair[0])]
    return [x.clone() for x in reduce_scatter(by_rank, group=group)]


def _send_back(gradients: Iterator[tuple[int, Tensor]], group: dist.ProcessGroup) -> list[Tensor]:
    """Returns the same sums; each gradient is sent to the rank that owns it while the next one is computed."""
    rank = group.rank()
    _, total = next(gradients)
    arriving = total
    works: list[dist.Work] = []
    for step, (owner, gradient) in enumerate(gradients, start=1):
        _wait(works)
        total = total + arriving if step > 1 else total
        arriving, works = _start_exchange(gradient, to=owner, source=rank + step, group=group)
    _wait(works)
    return [x + y for x, y in zip(total, arriving, strict=True)]


# How keys and values of other ranks are received, and how their gradients are sent back.
_FETCH = {"allgather": _gather_keys, "ring": _pass_around}
_RETURN = {"allgather": _sum_gradients, "ring": _send_back}


def _shares_of_keys(
    k_BTKH: Tensor, v_BTKH: Tensor, *, spans: Sequence[Spans], group: dist.ProcessGroup, exchange: str,
    whole_rows: bool,
) -> Iterator[tuple[Spans, Sequence[Tensor]]]:  # fmt: skip
    """Yields spans of rows with their keys and values: of one rank after another, or `whole_rows` at once."""
    if whole_rows:
        rows = _WholeRows(k_BTKH.shape, dtype=k_BTKH.dtype, spans=spans, group=group)
        rows.gather(k_BTKH, v_BTKH)
        yield [range(rows.k_BSKH.shape[1])], (rows.k_BSKH, rows.v_BSKH)
    else:
        for rank, kv in _FETCH[exchange](torch.stack((k_BTKH, v_BTKH)), group):
            yield spans[rank], tuple(kv)


def spans_of_ranks(x_BTNH: Tensor, group: dist.ProcessGroup) -> list[Spans]:
    """Returns the tokens of each rank."""
    degree = group.size()
    return [local_tokens(x_BTNH.shape[1] * degree, rank=rank, degree=degree, method="ring") for rank in range(degree)]


def keys_of_ranks(k_BTKH: Tensor, *, group: dist.ProcessGroup, exchange: str) -> Iterator[tuple[Spans, Tensor]]:
    """Yields the spans of a rank and its keys, of one rank after another."""
    spans = spans_of_ranks(k_BTKH, group)
    yield from ((spans[rank], k) for rank, k in _FETCH[exchange](k_BTKH.contiguous(), group))


class _WholeRows:
    """Keys and values of whole rows, or their gradients, for a kernel.

    In memory they are [R T, 2, B, K, H]: a span of tokens is one block, which ranks send and receive without a copy.
    """

    def __init__(
        self, shape: torch.Size, *, dtype: torch.dtype, spans: Sequence[Spans], group: dist.ProcessGroup
    ) -> None:
        """`shape` is that of the keys of one rank [B, T, K, H]."""
        self._shape = B, T, K, H = shape
        memory = torch.empty(T * group.size(), 2, B, K, H, dtype=dtype)
        self.k_BSKH, self.v_BSKH = memory.transpose(0, 2).unbind(1)
        self._by_rank = [[memory[x.start : x.stop] for x in of_rank] for of_rank in spans]
        self._own = self._by_rank[group.rank()]
        self._group = group

    def gather(self, k_BTKH: Tensor, v_BTKH: Tensor) -> None:
        """Fills them with the keys and values of all ranks."""
        halves = (x.transpose(0, 1).chunk(2) for x in (k_BTKH, v_BTKH))
        for own, *parts in zip(self._own, *halves, strict=True):
            torch.stack(parts, dim=1, out=own)
        received = others(self._by_rank, group=self._group)
        self._exchange([(rank, self._own) for rank, _ in received], received, collective="all_gather")

    def sum(self) -> list[Tensor]:
        """Returns the sums over ranks of what they have for this rank's keys and values, each [B, T, K, H]."""
        by_rank = [self._own if x is self._own else [*map(torch.empty_like, self._own)] for x in self._by_rank]
        sent, received = (others(x, group=self._group) for x in (self._by_rank, by_rank))
        self._exchange(sent, received, collective="reduce_scatter")
        sums = [self.k_BSKH.new_empty(self._shape) for _ in range(2)]
        for index, total_BTKH in enumerate(sums):
            for out, *parts in zip(total_BTKH.transpose(0, 1).chunk(2), *by_rank, strict=True):
                collectives.sum_parts([part[:, index] for part in parts], out=out)
        return sums

    def _exchange(
        self, sent: Sequence[tuple[int, Sequence[Tensor]]], received: Sequence[tuple[int, Sequence[Tensor]]], *,
        collective: str,
    ) -> None:  # fmt: skip
        of_parts = ([(rank, part) for rank, parts in x for part in parts] for x in (sent, received))
        arguments = {"group": self._group, "collective": collective, "own": self._own, "is_awaited": True}
        collectives.start_exchange(*of_parts, **arguments).wait()


@torch.library.custom_op("torchtitan_clone::context_attention", mutates_args=())
def context_attention(
    q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, starts_BT: Tensor | None, sinks_N: Tensor | None, kernel: str,
    exchange: str, group_name: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns attention of this rank's queries over all keys of their rows: out [B, T, N, H] and lse [B, T, N].

    `starts_BT` is on the CPU; `kernel` is a name in KERNELS. Saves only this rank's tensors for backward, which
    receives the keys and values of other ranks again.
    """
    group, over_keys = process_group_of(group_name), KERNELS[kernel].over_keys
    assert over_keys is not None
    spans = spans_of_ranks(q_BTNH, group)
    queries = Queries(spans=spans[group.rank()], starts_BT=starts_BT, num_rows=len(q_BTNH))
    whole_rows = over_keys.takes_whole_rows and exchange == "allgather"
    shares = _shares_of_keys(k_BTKH, v_BTKH, spans=spans, group=group, exchange=exchange, whole_rows=whole_rows)
    attention = None if sinks_N is None else empty_attention(q_BTNH, sinks_N)
    for keys, (k, v) in shares:
        attention = over_keys.attend((q_BTNH, k, v), queries=queries, keys=keys, merge_into=attention)
    assert attention is not None
    return attention[0].to(q_BTNH.dtype).contiguous(), attention[1].contiguous()


@torch.library.custom_op("torchtitan_clone::context_attention_backward", mutates_args=())
def context_attention_backward(
    grad_BTNH: Tensor, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, starts_BT: Tensor | None, out_BTNH: Tensor,
    lse_BTN: Tensor, kernel: str, exchange: str, group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of `context_attention` with respect to q, k and v."""
    group, over_keys = process_group_of(group_name), KERNELS[kernel].over_keys
    assert over_keys is not None
    spans = spans_of_ranks(q_BTNH, group)
    queries = Queries(spans=spans[group.rank()], starts_BT=starts_BT, num_rows=len(q_BTNH))
    whole_rows = over_keys.takes_whole_rows and exchange == "allgather"
    shares = _shares_of_keys(k_BTKH, v_BTKH, spans=spans, group=group, exchange=exchange, whole_rows=whole_rows)
    attention = (out_BTNH, lse_BTN)
    if whole_rows:
        [(keys, (k, v))] = shares
        rows = _WholeRows(k_BTKH.shape, dtype=torch.float32, spans=spans, group=group)
        q_grad_BTNH = over_keys.attend_backward(
            grad_BTNH, (q_BTNH, k, v), attention, queries=queries, keys=keys, q_grad=None,
            kv_grads=(rows.k_BSKH, rows.v_BSKH),
        )  # fmt: skip
        kv_grads = rows.sum()
    else:
        q_grad_BTNH = torch.zeros_like(q_BTNH, dtype=torch.float32)
        by_rank = _kv_gradients(over_keys, shares, spans, grad_BTNH, q_BTNH, attention, queries, q_grad_BTNH)
        kv_grads = _RETURN[exchange](by_rank, group)
    pairs = zip((q_BTNH, k_BTKH, v_BTKH), (q_grad_BTNH, *kv_grads), strict=True)
    q_grad, k_grad, v_grad = (in_layout_of(x, gradient) for x, gradient in pairs)
    return q_grad, k_grad, v_grad


def _kv_gradients(
    over_keys: PartialKernel, shares: Iterator[tuple[Spans, Sequence[Tensor]]], spans: Sequence[Spans],
    grad_BTNH: Tensor, q_BTNH: Tensor, attention: Attention, queries: Queries, q_grad_BTNH: Tensor,
) -> Iterator[tuple[int, Tensor]]:  # fmt: skip
    """Yields ranks with the gradients with respect to their keys and values [2, B, T, K, H]; adds to `q_grad_BTNH`."""
    for keys, (k, v) in shares:
        kv_grad = torch.empty(2, *k.shape, device=k.device)
        over_keys.attend_backward(
            grad_BTNH, (q_BTNH, k, v), attention, queries=queries, keys=keys, q_grad=q_grad_BTNH,
            kv_grads=kv_grad.unbind(),
        )  # fmt: skip
        yield spans.index(keys), kv_grad


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.kernel, ctx.exchange, ctx.group_name = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad_BTNH: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, sinks_N, out_BTNH, lse_BTN = ctx.saved_tensors
    attention = (out_BTNH, lse_BTN)
    sinks_grad_N = None if sinks_N is None else sink_gradients(grad_BTNH, attention, sinks_N)
    gradients = context_attention_backward(
        grad_BTNH, *inputs, *attention, ctx.kernel, ctx.exchange, ctx.group_name
    )  # fmt: skip
    return *gradients, None, sinks_grad_N, None, None, None


context_attention.register_fake(fake_attention)
context_attention_backward.register_fake(fake_gradients)
context_attention.register_autograd(_backward, setup_context=_save_for_backward)
COMMUNICATING_OPERATIONS.extend((context_attention, context_attention_backward))
OPERATORS = STATE_OPERATORS | {torch.ops.torchtitan_clone.context_attention.default}
"""Those that selective activation checkpointing keeps."""
