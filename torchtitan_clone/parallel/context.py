"""Context parallelism: shards each sequence over the `cp` axis, with exact attention across the shards.

"allgather" gathers the keys and values of all ranks, "ring" passes them around a ring; a rank holds a chunk of tokens
from the front and the mirrored one from the back, since late tokens cost more. "alltoall" exchanges heads for tokens.

Legend: B batch, T tokens of this rank, N heads, K kv heads, H head dim; R ranks of the axis.
Source: arXiv 2411.01783 (gathered, balanced), 2309.14509 (heads), 2310.01889 (ring).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_clone import torch_compat
from torchtitan_clone.ops import blockwise_attention as blockwise
from torchtitan_clone.ops import messages
from torchtitan_clone.ops.blockwise_attention import Pieces
from torchtitan_clone.ops.cpp_attention import CppAttention, attend, attend_backward
from torchtitan_clone.ops.messages import all_gather, reduce_scatter, takes_messages
from torchtitan_clone.ops.varlen_attention import OnHost, moved
from torchtitan_clone.torch_compat import process_group_of

Method = Literal["allgather", "alltoall", "ring"]


def local_tokens(seq_len: int, *, rank: int, degree: int, method: Method) -> list[range]:
    """Returns the indices of the tokens of each row that this rank holds, in their order in memory."""
    if method == "alltoall":
        size = seq_len // degree
        return [range(rank * size, (rank + 1) * size)]
    size = seq_len // (2 * degree)
    return [range(chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * degree - 1 - rank)]


def apply_context_parallel(model: nn.Module, *, mesh: DeviceMesh, method: Method) -> None:
    """Replaces the attention of all blocks in place; the model then gets this rank's tokens, but all documents."""
    group = mesh.get_group()
    if method == "alltoall":
        model.attention_mask = CompleteRows(model.get_submodule("attention_mask"), degree=group.size())
    else:
        model.attention_mask = LocalStarts(rank=group.rank(), degree=group.size(), method=method)
    for block in model.get_submodule("layers").children():
        attention = block.get_submodule("attention")
        if method == "alltoall":
            attention.core = HeadExchange(attention.get_submodule("core"), group=group)
        else:
            attention.core = KeyExchange(group_name=group.group_name, exchange=method)


class CompleteRows(nn.Module):
    """Attention mask of all tokens of rows of which this rank holds a share."""

    def __init__(self, mask: nn.Module, *, degree: int):
        super().__init__()
        self._mask = mask
        self._degree = degree

    def forward(self, documents_BS: OnHost | Tensor | None, positions_BT: Tensor, **options: object) -> object:
        return self._mask(documents_BS, positions_BT.repeat(1, self._degree), **options)


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
        starts_BS = blockwise.visible_starts(documents_BS, like=like_BS, window=window, chunk=chunk)
        if starts_BS is None:
            return None
        pieces = self._local_tokens(starts_BS.shape[1])
        return torch.cat([starts_BS[:, piece.start : piece.stop] for piece in pieces], dim=1)


class HeadExchange(nn.Module):
    """Attention over full sequences for this rank's slice of the heads: Ulysses."""

    def __init__(self, core: nn.Module, *, group: dist.ProcessGroup):
        super().__init__()
        self.core = core
        self._group = group
        self._degree = group.size()

    def forward(
        self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: object, sinks_N: Tensor | None = None
    ) -> Tensor:
        # One exchange for all three: rank r receives the r-th slice of the heads of each.
        slices = [x.unflatten(2, (self._degree, -1)).permute(2, 0, 1, 3, 4) for x in (q_BTNH, k_BTKH, v_BTKH)]
        received_RBThH = all_to_all(torch.cat(slices, dim=3), group=self._group)
        parts = received_RBThH.split([x.shape[3] for x in slices], dim=3)
        if sinks_N is not None:
            sinks_N = sinks_N.unflatten(0, (self._degree, -1))[self._group.rank()]
        out = self.core(*(x.transpose(0, 1).flatten(1, 2) for x in parts), mask, sinks_N)
        out_RBThH = all_to_all(out.unflatten(1, (self._degree, -1)).transpose(0, 1), group=self._group)
        return out_RBThH.permute(1, 2, 0, 3, 4).flatten(2, 3)


def all_to_all(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Sends slice r of dim 0 to rank r, and gradients back; compiled blocks can contain it."""
    return _AllToAll.apply(x, group.size(), group.group_name)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: int, group_name: str) -> Tensor:
        ctx.arguments = ranks, group_name
        return _exchange_slices(x, ranks, group_name)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        return _exchange_slices(grad_outputs[0], *ctx.arguments), None, None


def _exchange_slices(x: Tensor, ranks: int, group_name: str) -> Tensor:
    if takes_messages(x):
        is_compiling = torch.compiler.is_compiling()
        exchange = messages.compiled_exchange_slices if is_compiling else messages.exchange_slices
        return exchange(x, group_name)
    sizes = [1] * ranks
    return torch_compat.wait_tensor(torch_compat.all_to_all(x.contiguous(), sizes, sizes, group_name))


class KeyExchange(CppAttention):
    """Attention of this rank's queries over the keys and values of all ranks."""

    def __init__(self, *, group_name: str, exchange: Method):
        super().__init__()
        self._group_name = group_name
        self._exchange = exchange

    def forward(
        self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: Tensor | None, sinks_N: Tensor | None = None
    ) -> Tensor:
        options = self.takes_cpp(q_BTNH), self._exchange, self._group_name
        return context_attention(q_BTNH, k_BTKH, v_BTKH, mask, sinks_N, *options)[0]


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
    if takes_messages(x):
        target, source = to % group.size(), source % group.size()
        return arriving, [messages.start_exchange({target: x}, {source: arriving}, group=group, collective="send")]
    send = dist.P2POp(dist.isend, x, group=group, group_peer=to % group.size())
    receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=source % group.size())
    return arriving, dist.batch_isend_irecv([send, receive])


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _sum_gradients(gradients: Iterator[tuple[int, Tensor]], group: dist.ProcessGroup) -> Tensor:
    """Returns the sum over ranks of their gradients for this rank's keys and values."""
    by_rank = [gradient for _, gradient in sorted(gradients, key=lambda pair: pair[0])]
    return reduce_scatter(by_rank, group=group)


def _send_back(gradients: Iterator[tuple[int, Tensor]], group: dist.ProcessGroup) -> Tensor:
    """Returns the same sum; each gradient is sent to the rank that owns it while the next one is computed."""
    rank = group.rank()
    _, total = next(gradients)
    arriving = total
    works: list[dist.Work] = []
    for step, (owner, gradient) in enumerate(gradients, start=1):
        _wait(works)
        total = total + arriving if step > 1 else total
        arriving, works = _start_exchange(gradient, to=owner, source=rank + step, group=group)
    _wait(works)
    return total + arriving


# How keys and values of other ranks are received, and how their gradients are sent back.
_FETCH = {"allgather": _gather_keys, "ring": _pass_around}
_RETURN = {"allgather": _sum_gradients, "ring": _send_back}


def _pieces(x_BTNH: Tensor, group: dist.ProcessGroup) -> list[Pieces]:
    """Returns the tokens of each rank."""
    degree = group.size()
    return [local_tokens(x_BTNH.shape[1] * degree, rank=rank, degree=degree, method="ring") for rank in range(degree)]


def _received(
    kv: Tensor, pieces: Sequence[Pieces], group: dist.ProcessGroup, *, exchange: str, by_cpp: bool
) -> Iterator[tuple[Pieces, Tensor]]:
    """Yields tokens with their keys and values: of one rank after another or, for C++ after a gather, of whole rows."""
    received = ((pieces[rank], kv) for rank, kv in _FETCH[exchange](kv, group))
    if by_cpp and exchange == "allgather":
        yield [range(kv.shape[2] * group.size())], _in_order(received)
    else:
        yield from received


def _in_order(received: Iterator[tuple[Pieces, Tensor]]) -> Tensor:
    """Returns the keys and values of rows in the order of their tokens."""
    parts = {x.start: part for tokens, kv in received for x, part in zip(tokens, kv.chunk(2, dim=2), strict=True)}
    return torch.cat([parts[start] for start in sorted(parts)], dim=2)


def _by_rank(by_kv: list[Tensor], keys: Pieces, pieces: Sequence[Pieces]) -> Iterator[tuple[int, Tensor]]:
    """Yields the gradients by the keys and values of each rank, of which those of whole rows have all."""
    if keys in pieces:
        yield pieces.index(keys), torch.stack(by_kv)
        return
    B, S, *sizes = by_kv[0].shape
    for rank, of_rank in enumerate(pieces):
        gradient = by_kv[0].new_empty(2, B, S // len(pieces), *sizes)
        for out, x in zip(gradient, by_kv, strict=True):
            torch.cat([x[:, piece.start : piece.stop] for piece in of_rank], dim=1, out=out)
        yield rank, gradient


@torch.library.custom_op("torchtitan_clone::context_attention", mutates_args=())
def context_attention(
    q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, starts_BT: Tensor | None, sinks_N: Tensor | None, by_cpp: bool,
    exchange: str, group_name: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns attention of this rank's queries over all keys of their rows: out [B, T, N, H] and lse [B, T, N].

    `starts_BT` is on the CPU, where it says which blocks to compute; `by_cpp` computes by ops/cpp_attention.py. Saves
    only this rank's tensors for backward, which receives the keys and values of other ranks again.
    """
    group = process_group_of(group_name)
    pieces = _pieces(q_BTNH, group)
    queries = pieces[group.rank()]
    segments = blockwise.flash_segments(q_BTNH, queries=queries, starts_BT=starts_BT)
    attention = None if by_cpp and sinks_N is None else blockwise.empty_attention(q_BTNH, sinks_N)
    kv_BTKH = torch.stack((k_BTKH, v_BTKH))
    for keys, (k, v) in _received(kv_BTKH, pieces, group, exchange=exchange, by_cpp=by_cpp):
        if by_cpp:
            ranges = blockwise.ranges_of_keys(queries, keys, starts_BT, rows=len(k))
            out_BTNH, lse_BNT = attend(q_BTNH.float(), k, v, *ranges)  # in fp32, as it is merged
            if attention is None:
                attention = (out_BTNH, lse_BNT.transpose(1, 2).contiguous())
            else:
                blockwise.merge_(*attention, out_BTNH, lse_BNT.transpose(1, 2))
        else:
            assert attention is not None
            qkv = (q_BTNH, k, v)
            blockwise.attend_(attention, qkv, queries=queries, keys=keys, starts_BT=starts_BT, segments=segments)
    assert attention is not None
    return attention[0].to(q_BTNH.dtype), attention[1]


@torch.library.custom_op("torchtitan_clone::context_attention_backward", mutates_args=())
def context_attention_backward(
    grad_BTNH: Tensor, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, starts_BT: Tensor | None, out_BTNH: Tensor,
    lse_BTN: Tensor, by_cpp: bool, exchange: str, group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of `context_attention` by q, k and v."""
    group = process_group_of(group_name)
    pieces = _pieces(q_BTNH, group)
    queries = pieces[group.rank()]
    segments = blockwise.flash_segments(q_BTNH, queries=queries, starts_BT=starts_BT)
    attention = (out_BTNH, lse_BTN)
    q_grad_BTNH = None if by_cpp else torch.zeros_like(q_BTNH, dtype=torch.float32)

    def kv_gradients() -> Iterator[tuple[int, Tensor]]:
        nonlocal q_grad_BTNH
        kv_BTKH = torch.stack((k_BTKH, v_BTKH))
        for keys, (k, v) in _received(kv_BTKH, pieces, group, exchange=exchange, by_cpp=by_cpp):
            if by_cpp:
                ranges = blockwise.ranges_of_keys(queries, keys, starts_BT, rows=len(k))
                qkv = (q_BTNH.float(), k, v)  # gradients in fp32, as they are summed
                q_grad, *by_kv = attend_backward(grad_BTNH, *qkv, *ranges, out_BTNH, lse_BTN.transpose(1, 2))
                q_grad_BTNH = q_grad if q_grad_BTNH is None else q_grad_BTNH.add_(q_grad)
                yield from _by_rank(by_kv, keys, pieces)
                continue
            assert q_grad_BTNH is not None
            kv_grad = torch.zeros(2, *k.shape, device=k.device)
            gradients = blockwise.Gradients(q_grad_BTNH, *kv_grad)
            blockwise.attend_backward_(
                gradients, grad_BTNH, (q_BTNH, k, v), attention, queries=queries, keys=keys, starts_BT=starts_BT,
                segments=segments,
            )  # fmt: skip
            yield pieces.index(keys), kv_grad

    # Copies, because outputs of an operator must not share memory.
    k_grad, v_grad = (x.to(k_BTKH.dtype, copy=True) for x in _RETURN[exchange](kv_gradients(), group))
    assert q_grad_BTNH is not None
    return q_grad_BTNH.to(q_BTNH.dtype), k_grad, v_grad


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.by_cpp, ctx.exchange, ctx.group_name = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad_BTNH: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, sinks_N, out_BTNH, lse_BTN = ctx.saved_tensors
    attention = (out_BTNH, lse_BTN)
    sinks_grad_N = None if sinks_N is None else blockwise.sink_gradients(grad_BTNH, attention, sinks_N)
    gradients = context_attention_backward(
        grad_BTNH, *inputs, *attention, ctx.by_cpp, ctx.exchange, ctx.group_name
    )  # fmt: skip
    return *gradients, None, sinks_grad_N, None, None, None


context_attention.register_fake(blockwise.fake_attention)
context_attention_backward.register_fake(blockwise.fake_gradients)
context_attention.register_autograd(_backward, setup_context=_save_for_backward)
