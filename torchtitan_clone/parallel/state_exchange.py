"""Context parallelism of linear attention: ranks gather what each piece of a row does to the state before it.

A rank holds one or two pieces of each row (`local_tokens`), which stay where they are. The gated delta rule maps the
state S before a piece to results and to the state after it, both of which are affine:

    out = out_0 + R S        S' = U + M S

Columns of the values do not depend on each other, so that one call for the values [v | 0] and the state [0 | I] returns
[out_0 | R] and [U | M]. Ranks gather [U | M] of all pieces, and each composes those before its own. Backward is the
same from the last piece to the first, dS = R^T dout + M^T dS'. Where a document begins in a piece, M is zero, and R
from there on. Convolutions gather the last tokens of all pieces.

Legend: B pieces of all rows on this rank, T tokens of a piece, C channels, H key heads, N heads, K and V dimensions of
a key and of a value, X = V + K, W width of a convolution; B rows, S tokens and P pieces of a row in masks.
Source: arXiv 2502.07563 (gathered states).
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_clone.comm.collectives import all_gather
from torchtitan_clone.comm.tracing import COMMUNICATING_OPERATIONS
from torchtitan_clone.ops.attention import OnHost, document_starts, moved
from torchtitan_clone.ops.delta_rule import CHUNK, gated_delta_rule, gated_delta_rule_backward
from torchtitan_clone.ops.dtensor_shards import local_with_partial_grad
from torchtitan_clone.ops.short_convolution import short_convolution, short_convolution_backward
from torchtitan_clone.parallel.mesh import Method, local_tokens
from torchtitan_clone.torch_compat import process_group_of


class PieceStarts(nn.Module):
    """Attention mask, with that of linear attention: first tokens of documents, counted from the start of a piece."""

    def __init__(self, mask: nn.Module, *, group: dist.ProcessGroup, method: Method):
        super().__init__()
        self.mask = mask
        self._ranks = {"rank": group.rank(), "degree": group.size(), "method": method}

    def forward(
        self, documents_BS: OnHost | Tensor | None, positions_BT: Tensor, *, recurrent: bool = False, **options: object
    ) -> object:
        """Maps documents of full rows [B, S] to starts [B, P T], which are negative where a document began before."""
        if not recurrent:
            return self.mask(documents_BS, positions_BT, **options)
        if documents_BS is None:
            return None
        starts_BS = document_starts(moved(documents_BS, positions_BT.device))
        pieces = local_tokens(starts_BS.shape[1], **self._ranks)
        return torch.cat([starts_BS[:, piece.start : piece.stop] - piece.start for piece in pieces], dim=1)


class StateExchange(nn.Module):
    """What goes from token to token in linear attention, over rows of which this rank holds some pieces."""

    def __init__(self, *, group_name: str, method: Method):
        super().__init__()
        self.pieces = _num_pieces(method)
        self.exchange = method, group_name

    def convolve(
        self, convolutions: Sequence[nn.Module], inputs: Sequence[Tensor], starts_BT: Tensor | None
    ) -> Sequence[Tensor]:
        """Maps tokens of rows to results of convolutions, each [rows, P T, C]."""
        weights = [local_with_partial_grad(cast("Tensor", convolution.weight)) for convolution in convolutions]
        starts_BT = None if starts_BT is None else _by_piece(starts_BT, self.pieces)
        by_piece = [_by_piece(x, self.pieces) for x in inputs]
        outs = context_convolutions(by_piece, weights, starts_BT, *self.exchange)
        return [out_BTC.view(x.shape) for out_BTC, x in zip(outs, inputs, strict=False)]

    def forward(
        self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTNV: Tensor, decay_BTN: Tensor, beta_BTN: Tensor,
        starts_BT: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Maps tokens of rows to results of the gated delta rule, each [rows, P T, *]."""
        tensors = (_by_piece(x, self.pieces) for x in (q_BTHK, k_BTHK, v_BTNV, decay_BTN, beta_BTN))
        starts_BT = None if starts_BT is None else _by_piece(starts_BT, self.pieces)
        return context_delta_rule(*tensors, starts_BT, *self.exchange)[0].view(v_BTNV.shape)


def _num_pieces(method: Method) -> int:
    """Returns the pieces of a row on each rank."""
    return len(local_tokens(2, rank=0, degree=1, method=method))


def _by_piece(x: Tensor, pieces: int) -> Tensor:
    """Returns the tokens of rows as those of their pieces, the pieces of a row one after another."""
    return x.reshape(len(x) * pieces, -1, *x.shape[2:])


# ---------------------------------------------------------------- pieces of other ranks


class _RowPieces:
    """The pieces of rows that the ranks of a group hold."""

    def __init__(self, method: str, group_name: str):
        self.group = process_group_of(group_name)
        self.count = _num_pieces(cast("Method", method))
        """Of each row, on each rank."""
        self.places = _places(self.group.size(), method=cast("Method", method))

    def gather(self, x_B: Tensor) -> list[Tensor]:
        """Returns what ranks have for their pieces [B, *] as one tensor for each piece of a row, in order."""
        by_rank = [x.unflatten(0, (-1, self.count)) for x in all_gather(x_B, group=self.group)]
        return [by_rank[rank][:, index] for rank, index in self.places]

    def own(self, by_piece: Sequence[Tensor]) -> Tensor:
        """Returns what belongs to the pieces of this rank [B, *]."""
        own = [by_piece[self.places.index((self.group.rank(), index))] for index in range(self.count)]
        return torch.stack(own, dim=1).flatten(0, 1)

    def shift(self, x_B: Tensor, *, is_backward: bool = False) -> Tensor:
        """Returns what the piece before each one has, or backward the piece after it; zeros where there is none."""
        found = self.gather(x_B)
        nothing = torch.zeros_like(found[0])
        return self.own([*found[1:], nothing] if is_backward else [nothing, *found[:-1]])


def _places(degree: int, *, method: Method) -> list[tuple[int, int]]:
    """Returns the rank of each piece of a row, in order, and which of its pieces that is."""
    held = [local_tokens(2 * degree, rank=rank, degree=degree, method=method) for rank in range(degree)]
    order = sorted((piece.start, rank, index) for rank, pieces in enumerate(held) for index, piece in enumerate(pieces))
    return [(rank, index) for _, rank, index in order]


def _compose(maps_BNKX: Tensor, pieces: _RowPieces, *, is_backward: bool = False) -> Tensor:
    """Returns the states before the pieces of this rank [B, N, K, V] from the map [U | M] of each piece.

    Backward, these are gradients with respect to the states after them.
    """
    *maps, last = pieces.gather(maps_BNKX)[:: -1 if is_backward else 1]
    K = last.shape[2]
    states = [torch.zeros_like(last[..., :-K])]
    for each in maps:
        states.append(each[..., :-K] + each[..., -K:] @ states[-1])
    return pieces.own(states[:: -1 if is_backward else 1])


# ---------------------------------------------------------------- convolutions


@torch.library.custom_op("torchtitan_clone::context_convolutions", mutates_args=())
def context_convolutions(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], starts_BT: Tensor | None, method: str, group_name: str
) -> list[Tensor]:
    """Returns short_convolution() of each input [B, T, C], and the tokens of all before the pieces [B, W - 1, C]."""
    last = torch.cat([x_BTC[:, 1 - weights[0].shape[1] :] for x_BTC in inputs], dim=2)
    before = _RowPieces(method, group_name).shift(last)
    parts = zip(inputs, weights, _split(before, inputs), strict=True)
    return [*(short_convolution(x_BTC, weight_CW, starts_BT, part) for x_BTC, weight_CW, part in parts), before]


@context_convolutions.register_fake
def _empty_convolutions(inputs: Sequence[Tensor], weights: Sequence[Tensor], *_: object) -> list[Tensor]:
    outs = [torch.empty_like(x_BTC, memory_format=torch.contiguous_format) for x_BTC in inputs]
    return [*outs, inputs[0].new_empty(len(outs[0]), weights[0].shape[1] - 1, sum(x.shape[2] for x in outs))]


@torch.library.custom_op("torchtitan_clone::context_convolutions_backward", mutates_args=())
def context_convolutions_backward(
    grads: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor], starts_BT: Tensor | None,
    before: Tensor, method: str, group_name: str,
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients of `context_convolutions` with respect to inputs, then those to weights."""
    parts = zip(grads, inputs, weights, _split(before, inputs), strict=True)
    found = [short_convolution_backward(*tensors, starts_BT, part) for *tensors, part in parts]
    input_grads, weight_grads, before_grads = zip(*found, strict=True)
    returned = _RowPieces(method, group_name).shift(torch.cat(before_grads, dim=2), is_backward=True)
    for grad_BTC, part in zip(input_grads, _split(returned, inputs), strict=True):
        grad_BTC[:, -part.shape[1] :] += part
    return [*input_grads, *weight_grads]


@context_convolutions_backward.register_fake
def _empty_convolution_gradients(
    _grads: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor], *_: object
) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (*inputs, *weights)]


def _split(joint: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the channels of each input."""
    return joint.split([x_BTC.shape[2] for x_BTC in inputs], dim=2)


def _save_convolutions(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, weights, starts_BT, *ctx.exchange = inputs
    ctx.save_for_backward(*tensors, *weights, starts_BT, output[-1])


def _convolutions_backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor] | None, ...]:
    *tensors, starts_BT, before = ctx.saved_tensors
    count = len(tensors) // 2
    found = context_convolutions_backward(
        grads[:-1], tensors[:count], tensors[count:], starts_BT, before, *ctx.exchange
    )  # fmt: skip
    return found[:count], found[count:], None, None, None


context_convolutions.register_autograd(_convolutions_backward, setup_context=_save_convolutions)


# ---------------------------------------------------------------- the gated delta rule


@torch.library.custom_op("torchtitan_clone::context_delta_rule", mutates_args=())
def context_delta_rule(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTNV: Tensor, decay_BTN: Tensor, beta_BTN: Tensor, starts_BT: Tensor | None,
    method: str, group_name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns out [B, T, N, V] of this rank's pieces, as gated_delta_rule() does of complete rows.

    The other results are for backward: states before groups of chunks, R [B, N, T, K] and M [B, N, K, K].
    """
    V, K = v_BTNV.shape[3], k_BTHK.shape[3]
    dtype = torch.promote_types(v_BTNV.dtype, torch.float32)
    identity_KK = torch.eye(K, dtype=dtype, device=v_BTNV.device)
    start_BNKX = F.pad(identity_KK, (V, 0)).expand(len(v_BTNV), v_BTNV.shape[2], -1, -1)
    values_BTNX = F.pad(v_BTNV.to(dtype), (0, K))
    out_BTNX, end_BNKX, states_SBNKX = gated_delta_rule(
        q_BTHK, k_BTHK, values_BTNX, decay_BTN, beta_BTN, starts_BT, start_BNKX
    )
    state_BNKV = _compose(end_BNKX, _RowPieces(method, group_name))
    reads_BNTK = out_BTNX[..., V:].transpose(1, 2).contiguous()
    out_BTNV = out_BTNX[..., :V] + (reads_BNTK @ state_BNKV).transpose(1, 2)
    states_SBNKV = states_SBNKX[..., :V].contiguous()
    for states_BNKV, transfers_BNKK in zip(states_SBNKV, states_SBNKX[..., V:], strict=True):
        states_BNKV.flatten(0, 1).baddbmm_(transfers_BNKK.flatten(0, 1), state_BNKV.flatten(0, 1))
    out_BTNV, reads_BNTK = (x.to(v_BTNV.dtype).contiguous() for x in (out_BTNV, reads_BNTK))
    return out_BTNV, states_SBNKV, reads_BNTK, end_BNKX[..., V:].contiguous()


@context_delta_rule.register_fake
def _empty(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTNV: Tensor, decay_BTN: Tensor, beta_BTN: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out_BTNV, state_BNKV, states_SBNKV = gated_delta_rule(q_BTHK, k_BTHK, v_BTNV, decay_BTN, beta_BTN)
    B, T, N = v_BTNV.shape[:3]
    K = k_BTHK.shape[3]
    return out_BTNV, states_SBNKV, v_BTNV.new_empty(B, N, T, K), state_BNKV.new_empty(B, N, K, K)


@torch.library.custom_op("torchtitan_clone::context_delta_rule_backward", mutates_args=())
def context_delta_rule_backward(
    grad_BTNV: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTNV: Tensor, decay_BTN: Tensor, beta_BTN: Tensor,
    starts_BT: Tensor | None, states_SBNKV: Tensor, reads_BNTK: Tensor, transfer_BNKK: Tensor, method: str,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of `context_delta_rule` with respect to q, k, v, g and beta."""
    dtype = transfer_BNKK.dtype
    read_BNKV = reads_BNTK.to(dtype).mT @ grad_BTNV.to(dtype).transpose(1, 2)
    maps_BNKX = torch.cat((read_BNKV, transfer_BNKK.mT), dim=-1)
    state_grad_BNKV = _compose(maps_BNKX, _RowPieces(method, group_name), is_backward=True)
    *grads, _ = gated_delta_rule_backward(
        grad_BTNV, state_grad_BNKV, q_BTHK, k_BTHK, v_BTNV, decay_BTN, beta_BTN, starts_BT, states_SBNKV, CHUNK
    )
    q, k, v, decay, beta = grads
    return q, k, v, decay, beta


@context_delta_rule_backward.register_fake
def _empty_gradients(_grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in arguments[:5])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, method, group_name = inputs
    ctx.exchange = method, group_name
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_BTNV: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    return *context_delta_rule_backward(grad_BTNV, *ctx.saved_tensors, *ctx.exchange), None, None, None


context_delta_rule.register_autograd(_backward, setup_context=_save_for_backward)
COMMUNICATING_OPERATIONS.extend((context_convolutions, context_convolutions_backward))
COMMUNICATING_OPERATIONS.extend((context_delta_rule, context_delta_rule_backward))
OPERATORS = frozenset({torch.ops.torchtitan_clone.context_delta_rule.default})
"""Those that selective activation checkpointing keeps."""
