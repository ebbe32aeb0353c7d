"""The gated delta rule: linear attention by a state that decays, and that each token corrects.

    S <- exp(g) S;    S <- S + k (beta (v - S^T k))^T;    out = S^T q / sqrt(K)

q and k are normalized. The tokens i of a chunk of C are computed together from the state S before it, with G the sum of
g from the first token of the chunk on:

    P_ij = q_i k_j exp(G_i - G_j), j <= i           u = (1 + beta M)^-1 beta (v - exp(G) S^T k)
    M_ij = k_i k_j exp(G_i - G_j), j < i            out = exp(G) S^T q + P u
                                                    S <- exp(G_C) S + (exp(G_C - G) k)^T u

Decays g may be vectors, one number for each dimension of keys; then so are G and exp(G), and those of pairs of tokens
are inside of the products over K. No exponent of what counts is above 0. Where documents begin inside a chunk, pairs of
tokens of two documents, and the state of an earlier one, count as zero. For backward, only the states before groups of
chunks are kept.

Legend: B batch, T tokens, H key heads, N heads, K and V dimensions of a key and of a value, S groups; of a group G
chunks, M = B N, C tokens of a chunk, X = 2 C: its queries, then its keys. Computes in fp32, of fp64 in fp64.
Source: arXiv 2412.06464; in chunks, arXiv 2406.06484; vectors of decays, arXiv 2510.26692.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk."""
NORM_EPS = 1e-6
"""Added to the sum of squares of a query or key."""
_LEAST = 2.0**-63
"""Smaller values are zero on a CPU, on which products below 2^-126 take up to 100 times as long as others."""
_GROUP = {"cpu": 2**18, "cuda": 2**24}
"""Elements of the keys of chunks that are computed together: on a CPU those that stay in its caches."""


@torch.library.custom_op("torchtitan_clone::gated_delta_rule", mutates_args=())
def gated_delta_rule(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTNV: Tensor, decay_BTN: Tensor, beta_BTN: Tensor,
    starts_BT: Tensor | None = None, state_BNKV: Tensor | None = None, chunk: int = CHUNK,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns out [B, T, N, V] and the state after the last token [B, N, K, V]; a key head serves N / H heads.

    `decay_BTN` are the g, at most 0, of heads, or [B, T, N, K] of dimensions of keys, and then `chunk` is a power of 2.
    `starts_BT` are the indices of the first tokens of each token's document, on the device of the others; negative
    where it began before, with `state_BNKV` (default: zeros) as its state. None: all tokens continue that document.
    The third result is for backward: the states before groups of chunks.
    """
    inputs = q_BTHK, k_BTHK, v_BTNV, decay_BTN, beta_BTN
    out_BTNV = torch.empty_like(v_BTNV, memory_format=torch.contiguous_format)
    state_MKV = _state(inputs, state_BNKV)
    states: list[Tensor] = []
    for span in _spans(inputs, chunk):
        chunks = _prepare(inputs, starts_BT, span=span, chunk=chunk)
        states.append(state_MKV)
        outs: list[Tensor] = []
        for index in range(len(chunks.v)):
            out_MCV, _, _, state_MKV = chunks.advance(index, state_MKV)
            outs.append(out_MCV)
        _write(torch.stack(outs), to=out_BTNV[:, span])
    shape = _state_shape(inputs)
    return out_BTNV, state_MKV.view(shape), torch.stack(states).unflatten(1, shape[:2])


@gated_delta_rule.register_fake
def _empty(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, v_BTNV = arguments[:5], arguments[2]
    chunk = arguments[7] if len(arguments) > 7 else CHUNK
    shape, dtype, groups = _state_shape(inputs), _dtype(v_BTNV), len(_spans(inputs, chunk))
    out_BTNV = torch.empty_like(v_BTNV, memory_format=torch.contiguous_format)
    return out_BTNV, v_BTNV.new_empty(shape, dtype=dtype), v_BTNV.new_empty((groups, *shape), dtype=dtype)


@torch.library.custom_op("torchtitan_clone::gated_delta_rule_backward", mutates_args=())
def gated_delta_rule_backward(
    grad_BTNV: Tensor, state_grad_BNKV: Tensor | None, q_BTHK: Tensor, k_BTHK: Tensor, v_BTNV: Tensor,
    decay_BTN: Tensor, beta_BTN: Tensor, starts_BT: Tensor | None, states_SBNKV: Tensor, chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients with respect to q, k, v, g, beta and the first state, from those to out and last state."""
    inputs = q_BTHK, k_BTHK, v_BTNV, decay_BTN, beta_BTN
    q, k, v, decay, beta = grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    state_grad_MKV = _state(inputs, state_grad_BNKV)
    spans = _spans(inputs, chunk)
    for span, state_BNKV in zip(reversed(spans), reversed(states_SBNKV.unbind()), strict=True):
        chunks = _prepare(inputs, starts_BT, span=span, chunk=chunk)
        grad_GMCV = _chunked(grad_BTNV[:, span], chunk=chunk, dtype=chunks.v.dtype)
        *of_span, state_grad_MKV = _gradients(chunks, state_BNKV.flatten(0, 1), grad_GMCV, state_grad_MKV)
        for grad, total in zip(of_span, grads, strict=True):
            _write(grad, to=total[:, span])
    return q, k, v, decay, beta, state_grad_MKV.view(_state_shape(inputs))


@gated_delta_rule_backward.register_fake
def _empty_gradients(_grad: Tensor, _state_grad: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    inputs, v_BTNV = arguments[:5], arguments[2]
    state = v_BTNV.new_empty(_state_shape(inputs), dtype=_dtype(v_BTNV))
    return *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs), state


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, state, ctx.chunk = inputs
    ctx.has_state = state is not None
    ctx.save_for_backward(*tensors, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_BTNV: Tensor | None, state_grad: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grad_BTNV = torch.zeros_like(tensors[2]) if grad_BTNV is None else grad_BTNV
    *grads, of_state = gated_delta_rule_backward(grad_BTNV, state_grad, *tensors, ctx.chunk)
    return *grads, None, of_state if ctx.has_state else None, None


gated_delta_rule.register_autograd(_backward, setup_context=_save_for_backward)


# ---------------------------------------------------------------- groups of chunks


@dataclass(frozen=True, kw_only=True)
class _Decay:
    """What heads forget within and between the chunks of a group."""

    pairs: Tensor
    """exp(G_i - G_j), 0 for pairs that do not count [G, M, C, C]."""
    read: Tensor
    """exp(G) of queries and keys, 0 where their document begins in the chunk [G, M, X, 1]."""
    write: Tensor
    """exp(G_C - G) of keys, 0 where their document ends in the chunk [G, M, C, 1]."""
    carry: Tensor
    """exp(G_C), 0 where a document begins in the chunk [G, M, 1, 1]; [G, M, K, 1] of dimensions of keys."""

    def scores(self, x_GMXK: Tensor) -> Tensor:
        """Returns P over M [G, M, X, C]."""
        return self._weigh(x_GMXK @ _keys(x_GMXK).mT)

    def x_gradients(self, scores_grad_GMXC: Tensor, x_GMXK: Tensor) -> tuple[Tensor, Tensor]:
        """Returns gradients with respect to x as rows of the scores [G, M, X, K], and to keys as columns, in place."""
        grad_GMXC = self._weigh(scores_grad_GMXC)
        return grad_GMXC @ _keys(x_GMXK), grad_GMXC.mT @ x_GMXK

    def _weigh(self, scores_GMXC: Tensor) -> Tensor:
        scores_GMXC.unflatten(2, (2, -1)).mul_(self.pairs[:, :, None])
        _keys(scores_GMXC).diagonal(dim1=-2, dim2=-1).zero_()
        return scores_GMXC

    @staticmethod
    def gradient(of_rows_GMXK: Tensor, of_columns_GMCK: Tensor, of_states_GMK: Tensor) -> Tensor:
        """Returns the gradient with respect to g [G, M, C] from x, keys and states after chunks times their own."""
        rows_GMXC = of_rows_GMXK.sum(-1)
        total_GMC = sum(rows_GMXC.chunk(2, dim=-1)) - of_columns_GMCK.sum(-1)
        total_GMC[..., -1] += of_states_GMK.sum(-1)
        return total_GMC.double().flip(-1).cumsum(-1).flip(-1)


@dataclass(frozen=True, kw_only=True)
class _ChannelDecay(_Decay):
    """What dimensions of keys forget: `read`, `write` and `carry` have K numbers, and `pairs` says which pairs count.

    A chunk is halved again and again: pairs of a row of a second half and a key of the first have
    exp(G_i - G_r) exp(G_r - G_j), with r the first row. Legend: P parts of a chunk, with two halves of L tokens.
    """

    sums: Tensor
    """G in fp64 [G, M, C, K]."""

    def scores(self, x_GMXK: Tensor) -> Tensor:
        q_GMCK, k_GMCK = x_GMXK.chunk(2, dim=2)
        scores_GMXC = x_GMXK.new_zeros(*x_GMXK.shape[:3], q_GMCK.shape[2])
        scores_GMXC.diagonal(dim1=2, dim2=3).copy_((q_GMCK * k_GMCK).sum(-1))  # those of a query with its own key
        for since_GMPLK, until_GMPLK in self._halves():
            rows_GMPXK, keys_GMPLK = _second_rows(x_GMXK, since_GMPLK), _first_keys(k_GMCK, until_GMPLK)
            _between(scores_GMXC, since_GMPLK).copy_((rows_GMPXK @ keys_GMPLK.mT).unflatten(3, (2, -1)))
        return self._weigh(scores_GMXC)

    def x_gradients(self, scores_grad_GMXC: Tensor, x_GMXK: Tensor) -> tuple[Tensor, Tensor]:
        q_GMCK, k_GMCK = x_GMXK.chunk(2, dim=2)
        grad_GMXC = self._weigh(scores_grad_GMXC)
        own_GMC1 = grad_GMXC.diagonal(dim1=2, dim2=3)[..., None]
        rows_GMXK, columns_GMCK = torch.cat((own_GMC1 * k_GMCK, torch.zeros_like(k_GMCK)), dim=2), own_GMC1 * q_GMCK
        for since_GMPLK, until_GMPLK in self._halves():
            grad_GMPXL = _between(grad_GMXC, since_GMPLK).flatten(3, 4)
            of_rows = (grad_GMPXL @ _first_keys(k_GMCK, until_GMPLK)).unflatten(3, (2, -1))
            _second(rows_GMXK, since_GMPLK).addcmul_(of_rows, since_GMPLK[:, :, :, None])
            of_keys = grad_GMPXL.mT @ _second_rows(x_GMXK, since_GMPLK)
            _first(columns_GMCK, until_GMPLK).addcmul_(of_keys, until_GMPLK)
        return rows_GMXK, columns_GMCK

    @staticmethod
    def gradient(of_rows_GMXK: Tensor, of_columns_GMCK: Tensor, of_states_GMK: Tensor) -> Tensor:
        """Returns the gradient with respect to g [G, M, C, K]."""
        total_GMCK = sum(of_rows_GMXK.chunk(2, dim=2)) - of_columns_GMCK
        total_GMCK[:, :, -1] += of_states_GMK
        return total_GMCK.double().flip(2).cumsum(2).flip(2)

    def _halves(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields exp(G_i - G_r) of second halves and exp(G_r - G_j) of first ones, from half a chunk to one token."""
        length = self.sums.shape[2] // 2
        while length:
            first, second = self.sums.unflatten(2, (-1, 2, length)).unbind(3)
            start = second[:, :, :, :1]
            since, until = (_flush(x.to(self.read.dtype).exp_()) for x in (second - start, start - first))
            yield since, until
            length //= 2


def _first(x_GMC: Tensor, like_GMPL: Tensor) -> Tensor:
    """Returns the first halves of keys as [G, M, P, L, *], a view."""
    return x_GMC.unflatten(2, (-1, 2, like_GMPL.shape[3]))[:, :, :, 0]


def _second(x_GMX: Tensor, like_GMPL: Tensor) -> Tensor:
    """Returns the second halves of queries and keys as [G, M, P, 2, L, *], a view."""
    return x_GMX.unflatten(2, (2, -1, 2, like_GMPL.shape[3]))[:, :, :, :, 1].transpose(2, 3)


def _first_keys(k_GMCK: Tensor, until_GMPLK: Tensor) -> Tensor:
    return _first(k_GMCK, until_GMPLK) * until_GMPLK


def _second_rows(x_GMXK: Tensor, since_GMPLK: Tensor) -> Tensor:
    return (_second(x_GMXK, since_GMPLK) * since_GMPLK[:, :, :, None]).flatten(3, 4)


def _between(scores_GMXC: Tensor, like_GMPL: Tensor) -> Tensor:
    """Returns the scores of second halves with the first ones of their parts [G, M, P, 2, L, L], a view."""
    halves = like_GMPL.shape[2], 2, like_GMPL.shape[3]
    by_part = scores_GMXC.unflatten(3, halves).unflatten(2, (2, *halves)).diagonal(dim1=3, dim2=6)
    return by_part[:, :, :, 1, :, 0].movedim(-1, 2)


@dataclass(frozen=True, kw_only=True)
class _ChunkGroup:
    """The chunks of a group."""

    x: Tensor
    """Normalized queries, divided by sqrt(K), and keys [G, M, X, K]."""
    factors: Tensor
    """By which they were multiplied for that [G, M, X, 1]."""
    v: Tensor
    """[G, M, C, V]"""
    beta: Tensor
    """[G, M, C, 1]"""
    decay: _Decay
    scores: Tensor
    """P over M [G, M, X, C]."""
    inverse: Tensor
    """(1 + beta M)^-1 [G, M, C, C]."""
    x_read: Tensor
    """x times decay.read."""
    k_write: Tensor
    """Keys times decay.write."""

    def advance(self, index: int, state_MKV: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns out, v - exp(G) S^T k and u of a chunk, each [M, C, V], and the state after it [M, K, V]."""
        seen_MCV, of_keys_MCV = (self.x_read[index] @ state_MKV).chunk(2, dim=1)
        error_MCV = self.v[index] - of_keys_MCV
        u_MCV = self.inverse[index] @ (self.beta[index] * error_MCV)
        out_MCV = torch.baddbmm(seen_MCV, self.scores[index].chunk(2, dim=1)[0], u_MCV)
        state_MKV = torch.baddbmm(self.decay.carry[index] * state_MKV, self.k_write[index].mT, u_MCV)
        return out_MCV, error_MCV, u_MCV, _flush(state_MKV)

    def retreat(self, index: int, grad_MCV: Tensor, state_grad_MKV: Tensor) -> tuple[Tensor, Tensor]:
        """Returns gradients with respect to beta times the error of a chunk [M, C, V], and to the state before it.

        Takes those with respect to its out and the state after it.
        """
        seen_MCV = self.k_write[index] @ state_grad_MKV
        u_grad_MCV = seen_MCV.baddbmm_(self.scores[index].chunk(2, dim=1)[0].mT, grad_MCV)
        scaled_grad_MCV = self.inverse[index].mT @ u_grad_MCV
        seen_grad_MXV = torch.cat((grad_MCV, -self.beta[index] * scaled_grad_MCV), dim=1)
        kept_MKV = self.decay.carry[index] * state_grad_MKV
        return scaled_grad_MCV, kept_MKV.baddbmm_(self.x_read[index].mT, seen_grad_MXV)


def _gradients(
    chunks: _ChunkGroup, state_MKV: Tensor, grad_GMCV: Tensor, state_grad_MKV: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    """Returns gradients with respect to q, k, v, g and beta of a group, and to the state before it.

    `state_MKV` is the state before it; the gradients are with respect to its out and the state after it.
    """
    indices = range(len(chunks.v))
    states, of_chunks = [state_MKV], []
    for index in indices:
        _, *of_chunk, state_MKV = chunks.advance(index, state_MKV)
        of_chunks.append(of_chunk)
        states.append(state_MKV)
    state_grads, scaled_grads = [state_grad_MKV], []
    for index in reversed(indices):
        scaled_grad_MCV, state_grad_MKV = chunks.retreat(index, grad_GMCV[index], state_grad_MKV)
        scaled_grads.insert(0, scaled_grad_MCV)
        state_grads.insert(0, state_grad_MKV)
    error_GMCV, u_GMCV = map(torch.stack, zip(*of_chunks, strict=True))
    before_GMKV, after_GMKV, after_grad_GMKV = map(torch.stack, (states[:-1], states[1:], state_grads[1:]))
    scaled_GMCV = torch.stack(scaled_grads)

    scores_grad_GMXC = torch.cat((grad_GMCV, -scaled_GMCV), dim=2) @ u_GMCV.mT
    of_keys = _keys(scores_grad_GMXC)
    beta_grad_GMC = (of_keys * _keys(chunks.scores)).sum(-1) + (scaled_GMCV * error_GMCV).sum(-1)
    of_keys *= chunks.beta
    v_grad_GMCV = scaled_GMCV * chunks.beta
    rows_GMXK, columns_GMCK = chunks.decay.x_gradients(scores_grad_GMXC, chunks.x)
    rows_GMXK += (torch.cat((grad_GMCV, -v_grad_GMCV), dim=2) @ before_GMKV.mT).mul_(chunks.decay.read)
    columns_GMCK += (u_GMCV @ after_grad_GMKV.mT).mul_(chunks.decay.write)

    along_GMXK, of_columns = chunks.x * rows_GMXK, _keys(chunks.x) * columns_GMCK
    decay_grad = chunks.decay.gradient(along_GMXK, of_columns, (after_GMKV * after_grad_GMKV).sum(-1))
    _keys(rows_GMXK).add_(columns_GMCK)
    _keys(along_GMXK).add_(of_columns)
    return *_raw_gradients(chunks, rows_GMXK, along_GMXK), v_grad_GMCV, decay_grad, beta_grad_GMC, state_grad_MKV


def _raw_gradients(chunks: _ChunkGroup, grad_GMXK: Tensor, along_GMXK: Tensor) -> Sequence[Tensor]:
    """Returns the gradients with respect to q and k before normalization from those to x, and their products with x."""
    along_GMX = along_GMXK.sum(-1, keepdim=True)
    along_GMX.chunk(2, dim=2)[0].mul_(grad_GMXK.shape[-1])  # normalized queries are those of x times sqrt(K)
    return grad_GMXK.addcmul_(chunks.x, along_GMX, value=-1).mul_(chunks.factors).chunk(2, dim=2)


def _prepare(inputs: Sequence[Tensor], starts_BT: Tensor | None, *, span: slice, chunk: int) -> _ChunkGroup:
    """Returns the chunks of some tokens."""
    dtype = _dtype(inputs[2])
    q, k, v, decay, beta = (_chunked(x[:, span], chunk=chunk, dtype=dtype) for x in inputs)
    raw = torch.cat((q, k), dim=2)
    factors = (raw.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt_()
    factors.chunk(2, dim=2)[0].mul_(raw.shape[-1] ** -0.5)
    x, repeats = raw.mul_(factors), v.shape[1] // raw.shape[1]
    x, factors = (y.repeat_interleave(repeats, dim=1) for y in (x, factors)) if repeats > 1 else (x, factors)
    beta = beta.unsqueeze(-1)
    sums, masks = decay.double().cumsum(2), _document_masks(starts_BT, span=span, chunk=chunk)
    decay = (_decay if sums.ndim == 3 else _channel_decay)(sums, masks, dtype=dtype)
    scores = decay.scores(x)
    identity = torch.eye(chunk, dtype=dtype, device=v.device).expand_as(decay.pairs)
    inverse = torch.linalg.solve_triangular(beta * _keys(scores), identity, upper=False, unitriangular=True)
    return _ChunkGroup(
        x=x, factors=factors, v=v, beta=beta, decay=decay, scores=scores, inverse=_flush(inverse),
        x_read=x * decay.read, k_write=_keys(x) * decay.write,
    )  # fmt: skip


def _decay(sums_GMC: Tensor, masks: Sequence[Tensor] | None, *, dtype: torch.dtype) -> _Decay:
    """Returns the factors of decays from their sums in fp64: differences of large ones would be inexact in fp32."""
    pairs = (sums_GMC[..., None] - sums_GMC[..., None, :]).to(dtype).exp_().tril_()  # infinite above, and replaced
    last_GM1 = sums_GMC[..., -1:]
    read, write, carry = (x.exp().to(dtype) for x in (sums_GMC, last_GM1 - sums_GMC, last_GM1))
    if masks is not None:
        for x, mask in zip((pairs, read, write, carry), masks, strict=True):
            x.unflatten(1, (mask.shape[1], -1)).mul_(mask[:, :, None])
    pairs, read, write, carry = map(_flush, (pairs, read, write, carry))
    read_GMX = torch.cat((read, read), dim=2)
    return _Decay(pairs=pairs, read=read_GMX[..., None], write=write[..., None], carry=carry[..., None])


def _channel_decay(sums_GMCK: Tensor, masks: Sequence[Tensor] | None, *, dtype: torch.dtype) -> _ChannelDecay:
    """Does the same as _decay() for decays of dimensions of keys."""
    last_GM1K = sums_GMCK[:, :, -1:]
    read, write, carry = (x.exp().to(dtype) for x in (sums_GMCK, last_GM1K - sums_GMCK, last_GM1K))
    pairs = torch.ones(*sums_GMCK.shape[:2], *[sums_GMCK.shape[2]] * 2, dtype=dtype, device=read.device).tril_()
    if masks is not None:
        for x, mask in zip((pairs, read, write, carry), masks, strict=True):
            x.unflatten(1, (mask.shape[1], -1)).mul_(mask[:, :, None] if x is pairs else mask[:, :, None, :, None])
    read, write, carry = map(_flush, (read, write, carry))
    return _ChannelDecay(pairs=pairs, read=torch.cat((read, read), dim=2), write=write, carry=carry.mT, sums=sums_GMCK)


def _flush(x: Tensor) -> Tensor:
    """Returns x with zeros for what has decayed to nothing."""
    return F.hardshrink(x, _LEAST) if x.device.type == "cpu" else x


def _document_masks(starts_BT: Tensor | None, *, span: slice, chunk: int) -> Sequence[Tensor] | None:
    """Returns which pairs [G, B, C, C] count, which tokens read and write the state [G, B, C], and what keeps it."""
    if starts_BT is None:
        return None
    tokens_GC = torch.arange(span.start, span.stop, device=starts_BT.device).view(-1, chunk)
    starts_GBC = starts_BT[:, tokens_GC.clamp_max(starts_BT.shape[1] - 1)].transpose(0, 1)
    tokens_G1C, last_GB1 = tokens_GC[:, None], starts_GBC[..., -1:]
    first_G11 = tokens_G1C[..., :1]
    same_GBCC = starts_GBC[..., None] <= tokens_G1C[..., None, :]
    return same_GBCC, starts_GBC < first_G11, tokens_G1C >= last_GB1, last_GB1 < first_G11


# ---------------------------------------------------------------- layout


def _keys(x_GMX: Tensor) -> Tensor:
    """Returns the half that belongs to keys."""
    return x_GMX.chunk(2, dim=2)[1]


def _dtype(v_BTNV: Tensor) -> torch.dtype:
    return torch.float64 if v_BTNV.dtype == torch.float64 else torch.float32


def _state_shape(inputs: Sequence[Tensor]) -> tuple[int, int, int, int]:
    k_BTHK, v_BTNV = inputs[1:3]
    return (len(v_BTNV), v_BTNV.shape[2], k_BTHK.shape[3], v_BTNV.shape[3])


def _state(inputs: Sequence[Tensor], state_BNKV: Tensor | None) -> Tensor:
    """Returns a state, or its gradient, of all heads of all rows [M, K, V]: zeros for None."""
    shape, v_BTNV = _state_shape(inputs), inputs[2]
    state_BNKV = v_BTNV.new_zeros(shape, dtype=_dtype(v_BTNV)) if state_BNKV is None else state_BNKV
    return state_BNKV.to(_dtype(v_BTNV)).flatten(0, 1)


def _spans(inputs: Sequence[Tensor], chunk: int) -> list[slice]:
    """Returns the tokens of each group, in complete chunks: the last one may end after the last token."""
    B, T, N, _ = inputs[2].shape
    most = _GROUP.get(inputs[2].device.type, _GROUP["cuda"])
    size = max(1, most // (B * N * chunk * inputs[1].shape[3])) * chunk
    end = -(-T // chunk) * chunk
    return [slice(first, min(first + size, end)) for first in range(0, T, size)]


def _chunked(x_BT: Tensor, *, chunk: int, dtype: torch.dtype) -> Tensor:
    """Returns values of some tokens and heads [B, t, N, *] as [G, B N, C, *], with zeros after the last token."""
    x_BT = F.pad(x_BT, (0, 0) * (x_BT.ndim - 2) + (0, -x_BT.shape[1] % chunk))
    return x_BT.unflatten(1, (-1, chunk)).transpose(0, 1).transpose(2, 3).to(dtype).flatten(1, 2)


def _write(x_GMC: Tensor, *, to: Tensor) -> None:
    """Writes values [G, B N, C, *] of some tokens to those of their heads [B, t, N, *], or sums of consecutive ones."""
    x_GBNC = x_GMC.unflatten(1, (len(to), -1))
    if x_GBNC.shape[2] != to.shape[2]:
        x_GBNC = x_GBNC.unflatten(2, (to.shape[2], -1)).sum(3)
    to.copy_(x_GBNC.transpose(0, 1).transpose(2, 3).flatten(1, 2)[:, : to.shape[1]])
