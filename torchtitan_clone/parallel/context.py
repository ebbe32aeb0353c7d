"""Context parallelism: each sequence split over the `cp` axis, every query still meeting all the keys it sees.

Three ways to bring them together, one class each: keys and values of all ranks gathered; queries, keys and values
exchanged for whole sequences of fewer heads; keys and values passed round a ring while the attention over those that
are here is computed. The batch is split when it is loaded, see `local_tokens`.

Under causal attention late tokens cost more than early ones. So each sequence is cut into two chunks for every rank,
and a rank holds one from the front and its mirror image from the back. Exchanging heads balances by itself.

Legend: B batch, T tokens of this rank, N heads, K kv heads, H head dim; R ranks of the axis.
Source: arXiv 2411.01783 (gathered, balanced), 2309.14509 (heads), 2310.01889 (ring).
"""

from collections.abc import Iterator
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from torchtitan_clone.ops.blockwise_attention import (
    Gradients,
    attend_,
    attend_backward_,
    document_starts,
    empty_attention,
)

Method = Literal["allgather", "alltoall", "ring"]


def local_tokens(seq_len: int, *, rank: int, degree: int, method: Method) -> list[range]:
    """Which tokens of each row this rank holds, in their order in memory."""
    if method == "alltoall":
        size = seq_len // degree
        return [range(rank * size, (rank + 1) * size)]
    size = seq_len // (2 * degree)
    return [range(chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * degree - 1 - rank)]


def apply_context_parallel(model: Any, *, mesh: DeviceMesh, method: Method) -> None:
    """Replaces the attention of all blocks in place; the model then takes this rank's tokens of each row.

    Documents it still takes for the whole row: what a rank's queries see lies on other ranks too.
    """
    group = mesh.get_group()
    if method != "alltoall":
        model.attention_mask = LocalStarts(rank=group.rank(), degree=group.size(), method=method)
    for block in model.layers.values():
        attention = block.attention
        attention.core = (
            HeadExchange(attention.core, group=group)
            if method == "alltoall"
            else KeyExchange(group_name=group.group_name, exchange=method)
        )


class LocalStarts(nn.Module):
    """The mask of this rank's queries: the index in the row at which the document of each one starts."""

    def __init__(self, *, rank: int, degree: int, method: Method):
        super().__init__()
        self._split: dict[str, Any] = {"rank": rank, "degree": degree, "method": method}

    def forward(self, documents_BS: Tensor | None) -> Tensor | None:
        """From the documents of whole rows [B, R T] to [B, T]; None, causal and nothing more, gives None."""
        if documents_BS is None:
            return None
        starts_BS = document_starts(documents_BS)
        pieces = local_tokens(documents_BS.shape[1], **self._split)
        return torch.cat([starts_BS[:, piece.start : piece.stop] for piece in pieces], dim=1)


class HeadExchange(nn.Module):
    """Attention of whole sequences, for this rank's share of the heads."""

    def __init__(self, core: nn.Module, *, group: dist.ProcessGroup):
        super().__init__()
        self.core = core
        self._group, self._degree = group, group.size()

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: Any) -> Tensor:
        """Returns [B, T, N, H]; `mask` is that of the whole sequences."""
        shares = [x.unflatten(2, (self._degree, -1)) for x in (q_BTNH, k_BTKH, v_BTKH)]
        heads = [share.shape[3] for share in shares]
        # One exchange for all three: rank r gets the r-th share of the heads of every one.
        packed_RBThH = torch.cat(shares, dim=3).permute(2, 0, 1, 3, 4)
        whole = self._exchange(packed_RBThH).permute(1, 0, 2, 3, 4).flatten(1, 2)
        out = self.core(*whole.split(heads, dim=2), mask)
        parts_RBThH = self._exchange(out.unflatten(1, (self._degree, -1)).transpose(0, 1))
        return parts_RBThH.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _exchange(self, x_R: Tensor) -> Tensor:
        """Sends the r-th part to rank r; the parts that arrive, in the order of the ranks they come from."""
        return all_to_all_single_autograd(x_R.contiguous(), None, None, self._group)


class KeyExchange(nn.Module):
    """Attention of this rank's queries with the keys and values of all ranks."""

    def __init__(self, *, group_name: str, exchange: Method):
        super().__init__()
        self._group_name, self._exchange = group_name, exchange

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: Tensor | None) -> Tensor:
        """Returns [B, T, N, H]; `mask` are the starts of the queries' documents."""
        return context_attention(q_BTNH, k_BTKH, v_BTKH, mask, self._exchange, self._group_name)[0]


def _gathered(kv: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """The keys and values of all ranks, each with its rank."""
    parts = [torch.empty_like(kv) for _ in range(group.size())]
    dist.all_gather(parts, kv, group=group)
    return iter(enumerate(parts))


def _passed_on(kv: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """The same, one after another round the ring; the next ones travel while the caller computes."""
    rank, degree = group.rank(), group.size()
    for step in range(degree - 1):
        arriving, works = _swap(kv, to=rank + 1, source=rank - 1, group=group)
        yield (rank - step) % degree, kv
        _wait(works)
        kv = arriving
    yield (rank + 1) % degree, kv


def _swap(x: Tensor, *, to: int, source: int, group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    """Starts to send one tensor and to receive another of the same shape."""
    arriving, degree = torch.empty_like(x), group.size()
    send = dist.P2POp(dist.isend, x, group=group, group_peer=to % degree)
    receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=source % degree)
    return arriving, dist.batch_isend_irecv([send, receive])


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _reduced(parts: Iterator[tuple[int, Tensor]], group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of the gradients that each of them has for this rank's keys and values."""
    by_rank = [part for _, part in sorted(parts, key=lambda pair: pair[0])]
    total = torch.empty_like(by_rank[0])
    dist.reduce_scatter(total, by_rank, group=group)
    return total


def _sent_home(parts: Iterator[tuple[int, Tensor]], group: dist.ProcessGroup) -> Tensor:
    """The same, each gradient on its way to the rank it belongs to while the next one is computed."""
    rank = group.rank()
    _, total = next(parts)
    arriving, works = total, []
    for step, (owner, part) in enumerate(parts, start=1):
        _wait(works)
        total = total + arriving if step > 1 else total
        arriving, works = _swap(part, to=owner, source=rank + step, group=group)
    _wait(works)
    return total + arriving


_BRING = {"allgather": _gathered, "ring": _passed_on}
"""How keys and values get here."""
_RETURN = {"allgather": _reduced, "ring": _sent_home}
"""How their gradients get home."""


def _group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(cast("Any", name))


def _pieces(x_BTNH: Tensor, group: dist.ProcessGroup, rank: int) -> list[range]:
    seq_len = x_BTNH.shape[1] * group.size()
    return local_tokens(seq_len, rank=rank, degree=group.size(), method="ring")


@torch.library.custom_op("torchtitan_clone::context_attention", mutates_args=())
def context_attention(
    q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, starts_BT: Tensor | None, exchange: str, group_name: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of this rank's queries with all keys of their rows; out [B, T, N, H] and lse [B, T, N].

    One operation to compilers and checkpointing. Keeps for backward what is this rank's own; the keys and values of
    others are brought here once more.
    """
    group = _group(group_name)
    queries, attention = _pieces(q_BTNH, group, group.rank()), empty_attention(q_BTNH)
    for rank, (k, v) in _BRING[exchange](torch.stack((k_BTKH, v_BTKH)), group):
        keys = _pieces(q_BTNH, group, rank)
        attend_(attention, (q_BTNH, k, v), queries=queries, keys=keys, starts_BT=starts_BT)
    return attention[0].to(q_BTNH.dtype), attention[1]


@context_attention.register_fake
def _(q_BTNH: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out_BTNH, lse_BTN = empty_attention(q_BTNH)
    return out_BTNH.to(q_BTNH.dtype), lse_BTN


@torch.library.custom_op("torchtitan_clone::context_attention_backward", mutates_args=())
def context_attention_backward(
    grad_BTNH: Tensor, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, starts_BT: Tensor | None, out_BTNH: Tensor,
    lse_BTN: Tensor, exchange: str, group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients by q, k and v of what `context_attention` returned."""
    group = _group(group_name)
    queries, attention = _pieces(q_BTNH, group, group.rank()), (out_BTNH, lse_BTN)
    q_grad_BTNH = torch.zeros_like(q_BTNH, dtype=torch.float32)

    def parts() -> Iterator[tuple[int, Tensor]]:
        for rank, (k, v) in _BRING[exchange](torch.stack((k_BTKH, v_BTKH)), group):
            kv_grad = torch.zeros(2, *k.shape, device=k.device)
            keys = _pieces(q_BTNH, group, rank)
            gradients = Gradients(q_grad_BTNH, kv_grad[0], kv_grad[1])
            attend_backward_(
                gradients, grad_BTNH, (q_BTNH, k, v), attention, queries=queries, keys=keys, starts_BT=starts_BT
            )  # fmt: skip
            yield rank, kv_grad

    # Copies, because what an operation returns must not share memory.
    k_grad, v_grad = (x.to(k_BTKH.dtype, copy=True) for x in _RETURN[exchange](parts(), group))
    return q_grad_BTNH.to(q_BTNH.dtype), k_grad, v_grad


@context_attention_backward.register_fake
def _(_grad: Tensor, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_BTNH), torch.empty_like(k_BTKH), torch.empty_like(v_BTKH)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.exchange, ctx.group_name = inputs
    ctx.save_for_backward(*tensors, *output)


def _pass_back(ctx: Any, grad_BTNH: Tensor, _grad_lse: Tensor) -> tuple[Any, ...]:
    gradients = context_attention_backward(grad_BTNH, *ctx.saved_tensors, ctx.exchange, ctx.group_name)
    return *gradients, None, None, None


context_attention.register_autograd(_pass_back, setup_context=_keep)
