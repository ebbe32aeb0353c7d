"""Cross-entropy straight from hidden states, a chunk of tokens at a time.

The loss is a sum over targets; the trainer divides it by the number of targets in the whole global batch, so that
gradient accumulation and every data axis give the gradient of one large batch.

Legend: B batch, T tokens, D model, V vocabulary, C tokens of one chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IGNORE_INDEX = -100

ChunkFn = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def _chunk_loss(hidden_CD: Tensor, weight_VD: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of losses, and the fp32 log-probabilities [C, V] with the mask of targets [C, 1] that the gradient needs."""
    log_probs_CV = torch.log_softmax(hidden_CD @ weight_VD.T, dim=-1, dtype=torch.float32)
    is_target_C1 = (targets_C != IGNORE_INDEX)[:, None]
    picked_C1 = log_probs_CV.gather(1, targets_C[:, None].clamp_min(0))
    return -torch.where(is_target_C1, picked_C1, 0.0).sum(), log_probs_CV, is_target_C1


def _chunk_loss_and_grads(hidden_CD: Tensor, weight_VD: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of losses and its gradients by hidden state [C, D] and by weight [V, D]."""
    loss, log_probs_CV, is_target_C1 = _chunk_loss(hidden_CD, weight_VD, targets_C)
    grad_CV = log_probs_CV.exp_()
    one_C1 = torch.ones_like(targets_C, dtype=grad_CV.dtype)[:, None]
    grad_CV.scatter_add_(1, targets_C[:, None].clamp_min(0), -one_C1)
    grad_CV = grad_CV.mul_(is_target_C1).to(weight_VD.dtype)
    return loss, grad_CV @ weight_VD, grad_CV.T @ hidden_CD


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients during forward, chunk by chunk, and only scales them in backward."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunks: int, chunk_fn: ChunkFn):
        losses, hidden_grads, weight_grad_VD = [], [], None
        for hidden_CD, targets_C in zip(hidden_ND.chunk(chunks), targets_N.chunk(chunks), strict=True):
            loss, hidden_grad_CD, chunk_grad_VD = chunk_fn(hidden_CD, weight_VD, targets_C)
            losses.append(loss)
            hidden_grads.append(hidden_grad_CD)
            # Summed in fp32, so that the rounding does not grow with the number of chunks.
            weight_grad_VD = chunk_grad_VD.float() if weight_grad_VD is None else weight_grad_VD.add_(chunk_grad_VD)
        assert weight_grad_VD is not None
        ctx.save_for_backward(torch.cat(hidden_grads), weight_grad_VD.to(weight_VD.dtype))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        hidden_grad_ND, weight_grad_VD = ctx.saved_tensors
        (scale,) = grad_outputs
        return hidden_grad_ND * scale, weight_grad_VD * scale, None, None, None


def build_loss(*, chunk_tokens: int, compile_backend: str | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The loss function that the output projection is given: (hidden_BTD, weight_VD, targets_BT) -> sum, fp32.

    Logits exist for at most `chunk_tokens` tokens at a time; targets equal to IGNORE_INDEX count nothing.
    `compile_backend` compiles what happens to a chunk; None leaves it eager.
    """
    train_chunk, eval_chunk = _chunk_loss_and_grads, _chunk_loss
    if compile_backend is not None:
        train_chunk = torch.compile(train_chunk, backend=compile_backend)
        eval_chunk = torch.compile(eval_chunk, backend=compile_backend)

    def loss_fn(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> Tensor:
        hidden_ND, targets_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
        chunks = -(-len(targets_N) // chunk_tokens)
        if torch.is_grad_enabled():
            return _ChunkedCrossEntropy.apply(hidden_ND, weight_VD, targets_N, chunks, train_chunk)
        pairs = zip(hidden_ND.chunk(chunks), targets_N.chunk(chunks), strict=True)
        return torch.stack([eval_chunk(h_CD, weight_VD, t_C)[0] for h_CD, t_C in pairs]).sum()

    return loss_fn
