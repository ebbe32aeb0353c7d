"""Cross-entropy from hidden states, a chunk of tokens at a time.

Where tensor parallelism shards the output projection, a rank holds the logits of its rows of the vocabulary only.
Legend: B batch, T tokens, D model, V vocabulary (this rank's rows of it), C tokens of a chunk, N tokens of all rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor, Partial, Replicate

from torchtitan_clone.ops import IGNORE_INDEX
from torchtitan_clone.ops.linear import is_for_onednn
from torchtitan_clone.ops.source_sums import SourceSums, split_targets
from torchtitan_clone.torch_compat import onednn_linear


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The rows of the output projection that this rank holds: from `start` on, or all of them without a group."""

    start: int = 0
    group: dist.ProcessGroup | None = None

    def reduce_(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduces `x` in place over the ranks that hold the other rows; returns it."""
        if self.group is not None:
            dist.all_reduce(x, op, group=self.group)
        return x


Chunk = tuple[Tensor, Tensor, Tensor]
ObserveFn = Callable[[list[Tensor]], None]
ChunkFn = Callable[[Tensor, Tensor, Tensor, Vocabulary], Chunk]


def _log_softmax(logits_CV: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Returns log-probabilities in fp32; on CPU in the memory of the logits, if they are fp32."""
    if vocabulary.group is None:
        # The CPU's kernel has read a row before it writes it. New memory would cost more than the computation.
        is_reusable = logits_CV.device.type == "cpu" and logits_CV.dtype == torch.float32
        out = logits_CV if is_reusable and not torch.compiler.is_compiling() else None
        return torch.log_softmax(logits_CV, dim=-1, dtype=torch.float32, out=out)
    logits_CV = logits_CV.float()
    shifted_CV = logits_CV - vocabulary.reduce_(logits_CV.amax(dim=-1, keepdim=True), dist.ReduceOp.MAX)
    return shifted_CV - vocabulary.reduce_(shifted_CV.exp().sum(dim=-1, keepdim=True)).log()


def _logits(hidden_CD: Tensor, weight_VD: Tensor) -> Tensor:
    return onednn_linear(hidden_CD, weight_VD) if is_for_onednn(hidden_CD, weight_VD) else hidden_CD @ weight_VD.T


def _chunk_loss(hidden_CD: Tensor, weight_VD: Tensor, targets_C: Tensor, vocabulary: Vocabulary) -> Chunk:
    """Returns this rank's losses [C, 1], log-probabilities [C, V] in fp32, and each target's column [C, 1] or -1."""
    log_probs_CV = _log_softmax(_logits(hidden_CD, weight_VD), vocabulary)
    column_C = targets_C - vocabulary.start
    is_local_C = (targets_C != IGNORE_INDEX) & (column_C >= 0) & (column_C < weight_VD.shape[0])
    column_C1 = torch.where(is_local_C, column_C, -1)[:, None]
    picked_C1 = log_probs_CV.gather(1, column_C1.clamp_min(0))
    return -torch.where(column_C1 >= 0, picked_C1, 0.0), log_probs_CV, column_C1


def _chunk_loss_and_grads(hidden_CD: Tensor, weight_VD: Tensor, targets_C: Tensor, vocabulary: Vocabulary) -> Chunk:
    """Returns this rank's losses [C, 1] and the gradients of their sum by hidden state [C, D] and by weight [V, D]."""
    losses_C1, log_probs_CV, column_C1 = _chunk_loss(hidden_CD, weight_VD, targets_C, vocabulary)
    grad_CV = log_probs_CV.exp_()
    grad_CV.scatter_add_(1, column_C1.clamp_min(0), -(column_C1 >= 0).to(grad_CV.dtype))
    grad_CV = grad_CV.to(weight_VD.dtype)
    # Rows without a target are left out of the products rather than set to zero, which is a pass over [C, V].
    is_target_C1 = (targets_C != IGNORE_INDEX)[:, None]
    hidden_CD = hidden_CD * is_target_C1
    if is_for_onednn(hidden_CD, weight_VD):  # oneDNN computes the transposed gradients faster
        hidden_grad_CD, weight_grad_VD = onednn_linear(weight_VD.T, grad_CV).T, onednn_linear(hidden_CD.T, grad_CV.T).T
    else:
        hidden_grad_CD, weight_grad_VD = grad_CV @ weight_VD, grad_CV.T @ hidden_CD
    return losses_C1, hidden_grad_CD.mul_(is_target_C1), weight_grad_VD


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients in forward, chunk by chunk; backward only scales them."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, vocabulary: Vocabulary, chunks: int,
        chunk_fn: ChunkFn, observe: ObserveFn,
    ) -> Tensor:  # fmt: skip
        losses = []
        hidden_grads = []
        weight_grad_VD = None
        for hidden_CD, targets_C in zip(hidden_ND.chunk(chunks), targets_N.chunk(chunks), strict=True):
            losses_C1, hidden_grad_CD, chunk_grad_VD = chunk_fn(hidden_CD, weight_VD, targets_C, vocabulary)
            losses.append(losses_C1)
            hidden_grads.append(hidden_grad_CD)
            # Summed in fp32, so that the rounding does not grow with the number of chunks.
            weight_grad_VD = chunk_grad_VD.float() if weight_grad_VD is None else weight_grad_VD.add_(chunk_grad_VD)
        assert weight_grad_VD is not None
        ctx.save_for_backward(torch.cat(hidden_grads), weight_grad_VD.to(weight_VD.dtype))
        return vocabulary.reduce_(_sum(losses, observe))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        hidden_grad_ND, weight_grad_VD = ctx.saved_tensors
        (scale,) = grad_outputs
        return hidden_grad_ND * scale, weight_grad_VD * scale, None, None, None, None, None


def _ignore(_: list[Tensor]) -> None:
    """Observes nothing."""


def _sum(losses: list[Tensor], observe: ObserveFn) -> Tensor:
    """Returns the sum of losses [C, 1] of all chunks, which `observe` gets too."""
    observe(losses)
    return torch.stack([losses_C1.sum() for losses_C1 in losses]).sum()


def local_shards(hidden_BTD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor, Vocabulary]:
    """Returns plain tensors where tensor parallelism sharded them: full hidden states, this rank's rows of weights."""
    if not isinstance(weight_VD, DTensor):
        return hidden_BTD, weight_VD, Vocabulary()
    assert isinstance(hidden_BTD, DTensor)
    mesh = weight_VD.device_mesh
    rows = -(-weight_VD.shape[0] // mesh.size())  # as torch shards: all but the last ranks have equally many
    # The gradient of the hidden states is the sum over all ranks' rows.
    full_BTD = hidden_BTD.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return full_BTD, weight_VD.to_local(), Vocabulary(start=mesh.get_local_rank() * rows, group=mesh.get_group())


def build_loss(
    *, chunk_tokens: int, compile_backend: str | None, sums: SourceSums | None = None
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns the loss function for the output projection: (hidden_BTD, weight_VD, targets_BT) -> sum [], fp32.

    Logits exist for at most `chunk_tokens` tokens at a time; targets equal to IGNORE_INDEX are skipped.
    `compile_backend` compiles the computation of a chunk; None leaves it eager. `sums` gets the losses by source, which
    the targets then name.
    """
    train_chunk = _chunk_loss_and_grads
    eval_chunk = _chunk_loss
    if compile_backend is not None:
        train_chunk = torch.compile(train_chunk, backend=compile_backend)
        eval_chunk = torch.compile(eval_chunk, backend=compile_backend)

    def loss_fn(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> Tensor:
        hidden_BTD, weight_VD, vocabulary = local_shards(hidden_BTD, weight_VD)
        hidden_ND = hidden_BTD.flatten(0, 1)
        targets_N = targets_BT.flatten()
        observe: ObserveFn = _ignore
        if sums is not None:
            targets_N, sources_N = split_targets(targets_N)
            observe = partial(sums.add, targets_N=targets_N, sources_N=sources_N)
        chunks = -(-len(targets_N) // chunk_tokens)
        if torch.is_grad_enabled():
            return _ChunkedCrossEntropy.apply(hidden_ND, weight_VD, targets_N, vocabulary, chunks, train_chunk, observe)
        pairs = zip(hidden_ND.chunk(chunks), targets_N.chunk(chunks), strict=True)
        losses = [eval_chunk(hidden_CD, weight_VD, targets_C, vocabulary)[0] for hidden_CD, targets_C in pairs]
        return vocabulary.reduce_(_sum(losses, observe))

    return loss_fn
