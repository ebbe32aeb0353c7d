"""Cross-entropy from hidden states, a chunk of tokens at a time.

Where tensor parallelism shards the output projection, a rank holds the logits of its rows of the vocabulary only.
Legend: B batch, T tokens, D model, V vocabulary (this rank's rows of it), C tokens of a chunk, N tokens of all rows.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from torchtitan_clone.ops import IGNORE_INDEX
from torchtitan_clone.ops.layers import add_weight_grad, input_grad, linear
from torchtitan_clone.ops.softmax import is_overwritten, log_softmax, logits_and_lse, rows_in_cache
from torchtitan_clone.ops.source_sums import SourceSums, group_observer
from torchtitan_clone.ops.vocabulary import Chunk, Shard, Vocabulary, local_shards, token_chunks
from torchtitan_clone.torch_compat import keeps_graph

ObserveFn = Callable[[list[Tensor]], None]
ChunkFn = Callable[..., tuple[Tensor, ...]]
Z_LOSS = "output_z"
"""Name of the auxiliary term of z-loss."""
DIVERGENCE = "distillation_kl"
"""Name of that of distillation."""


class LossTerm(Protocol):
    """What takes a value of each token, in chunks [C, 1]; see parallel/logged_term.py."""

    def add(self, values: list[Tensor], *, targets_N: Tensor) -> None: ...


class LseTerm(LossTerm, Protocol):
    """A coefficient of squared lse, and what takes the lse."""

    @property
    def coefficient(self) -> float: ...


def target_columns(targets_C: Tensor, weight_VD: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Returns the row of this rank's weights that is each token's target [C, 1], else 0, and whether it has it."""
    column_C = targets_C - start
    is_local_C = (targets_C != IGNORE_INDEX) & (column_C >= 0) & (column_C < weight_VD.shape[0])
    return torch.where(is_local_C, column_C, 0).unsqueeze(1), is_local_C.unsqueeze(1)


def _chunk_loss(weight_VD: Tensor, start: int, hidden_CD: Tensor, targets_C: Tensor, shard: Shard | None) -> Tensor:
    """Returns this rank's losses [C, 1].

    Of a sharded vocabulary `start` is this rank's first row, and `shard` has what the ranks have computed already.
    """
    logits_CV, lse_RC1 = (linear(hidden_CD, weight_VD), None) if shard is None else shard
    column_C1, is_local_C1 = target_columns(targets_C, weight_VD, start)
    picked = []
    for logits, lse, column in rows_in_cache(logits_CV, lse_RC1, column_C1):
        picked.append(log_softmax(logits, lse).gather(1, column))
    return -torch.where(is_local_C1, torch.cat(picked), 0.0)


def _chunk_loss_and_grads(
    weight_VD: Tensor, start: int, hidden_CD: Tensor, targets_C: Tensor, shard: Shard | None, z_loss: float = 0.0
) -> tuple[Tensor, ...]:
    """Returns this rank's losses [C, 1], the gradient of their sum by hidden state [C, D], and two factors of another.

    Its gradient by weight is the first one [C, V], transposed, times the second one [C, D]. With `z_loss` gradients are
    of the losses plus `z_loss` times lse squared, and the lse of all ranks [C, 1] comes last.
    """
    logits_CV, lse_RC1 = (linear(hidden_CD, weight_VD), None) if shard is None else shard
    column_C1, is_local_C1 = target_columns(targets_C, weight_VD, start)
    minus_one_C1 = -is_local_C1.float()
    picked, lse_of_rows, grad_CV = [], [], logits_CV
    for logits, lse, column, minus_one in rows_in_cache(logits_CV, lse_RC1, column_C1, minus_one_C1):
        logit = logits.gather(1, column).float() if z_loss else None
        log_probs = log_softmax(logits, lse)
        picked.append(log_probs.gather(1, column))
        probs = log_probs.exp_()
        if logit is not None:
            lse_of_rows.append(logit - picked[-1])
            probs.mul_(1 + 2 * z_loss * lse_of_rows[-1])
        grad = probs.scatter_add_(1, column, minus_one)
        if not is_overwritten(logits):
            grad_CV = grad.to(weight_VD.dtype)
        elif grad.dtype != logits.dtype:
            logits.copy_(grad)
    losses_C1 = -torch.where(is_local_C1, torch.cat(picked), 0.0)
    lse = [torch.cat(lse_of_rows)] if z_loss else []
    return losses_C1, *grads_of_targets(grad_CV, hidden_CD, weight_VD, targets_C), *lse


def grads_of_targets(grad_CV: Tensor, hidden_CD: Tensor, weight_VD: Tensor, targets_C: Tensor) -> tuple[Tensor, ...]:
    """Returns the gradient by hidden state [C, D] and the two factors of that by weight, of rows with a target."""
    # Others are left out of the products rather than set to zero, which is a pass over [C, V].
    is_target_C1 = (targets_C != IGNORE_INDEX).unsqueeze(1)
    hidden_CD = hidden_CD * is_target_C1
    return input_grad(grad_CV, weight_VD).mul_(is_target_C1), grad_CV, hidden_CD


class ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients in forward, chunk by chunk; backward only scales them."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden_ND: Tensor, weight_VD: Tensor, chunks: Iterable[Chunk], vocabulary: Vocabulary,
        chunk_fn: ChunkFn, observe: ObserveFn | None, observe_term: ObserveFn | None,
    ) -> Tensor:  # fmt: skip
        losses, values_of_term, hidden_grads = [], [], []
        weight_grad_VD = None
        for chunk in chunks:
            losses_C1, hidden_grad_CD, *factors = chunk_fn(weight_VD, vocabulary.start, *chunk)
            losses.append(losses_C1)
            values_of_term += factors[2:]
            hidden_grads.append(hidden_grad_CD)
            # Summed in fp32, so that the rounding does not grow with the number of chunks.
            weight_grad_VD = add_weight_grad(weight_grad_VD, *factors[:2])
            del factors, chunk  # frees logits before others are computed
        assert weight_grad_VD is not None
        ctx.save_for_backward(torch.cat(hidden_grads), weight_grad_VD.to(weight_VD.dtype))
        if observe_term is not None:
            observe_term(values_of_term)
        return _sum(losses, observe, vocabulary)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        hidden_grad_ND, weight_grad_VD = ctx.saved_tensors
        (scale,) = grad_outputs
        # Memory peaks here, before activations are freed: in place, unless another backward reads the same tensors.
        multiply = torch.mul if keeps_graph() else Tensor.mul_
        return multiply(hidden_grad_ND, scale), multiply(weight_grad_VD, scale), None, None, None, None, None


def _sum(losses: list[Tensor], observe: ObserveFn | None, vocabulary: Vocabulary) -> Tensor:
    """Returns the sum of losses [C, 1] of all chunks over the ranks; `observe` gets those of this rank."""
    if observe is not None:
        observe(losses)
    return vocabulary.reduce_(torch.stack([losses_C1.sum() for losses_C1 in losses]).sum())


def build_loss(
    *, chunk_tokens: int, compile_backend: str | None, sums: SourceSums | None = None, z_loss: LseTerm | None = None
) -> Callable[..., Tensor]:
    """Returns the loss function for the output projection: (hidden_BTD, weight_VD, targets_BT[, groups_BT]) -> sum [].

    The sum is fp32. Logits exist for at most `chunk_tokens` tokens at a time; targets equal to IGNORE_INDEX are
    skipped. `compile_backend` compiles the computation of a chunk; None leaves it eager. `sums` gets the losses by
    group, of calls that pass the groups. `z_loss` adds its gradients, unless tokens are those `later` than the next.
    """
    logits_fn = logits_and_lse
    train_chunk: ChunkFn = _chunk_loss_and_grads
    eval_chunk: Callable[..., Tensor] = _chunk_loss
    if compile_backend is not None:
        logits_fn = torch.compile(logits_fn, backend=compile_backend)
        train_chunk = torch.compile(train_chunk, backend=compile_backend)
        eval_chunk = torch.compile(eval_chunk, backend=compile_backend)

    def loss_fn(
        hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, groups_BT: Tensor | None = None, *,
        later: bool = False,
    ) -> Tensor:  # fmt: skip
        hidden_BTD, weight_VD, vocabulary = local_shards(hidden_BTD, weight_VD)
        hidden_ND, targets_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
        observe, observe_term, chunk_fn = group_observer(sums, targets_N, groups_BT), None, train_chunk
        if z_loss is not None and not later:
            chunk_fn = partial(train_chunk, z_loss=z_loss.coefficient)
            observe_term = partial(z_loss.add, targets_N=targets_N)
        pairs = token_chunks(hidden_ND, targets_N, chunk_tokens=chunk_tokens)
        chunks = vocabulary.chunks(pairs, partial(logits_fn, weight_VD=weight_VD))
        if torch.is_grad_enabled():
            return ChunkedCrossEntropy.apply(hidden_ND, weight_VD, chunks, vocabulary, chunk_fn, observe, observe_term)
        losses = [eval_chunk(weight_VD, vocabulary.start, *chunk) for chunk in chunks]
        return _sum(losses, observe, vocabulary)

    return loss_fn
