"""The loss of a student that also learns what a teacher predicts.

Each target adds (1 - alpha) CE + alpha T^2 KL(p || q), where CE is the student's cross-entropy, and p and q are what
teacher and student predict at temperature T: the softmax of logits divided by T. Source: arXiv 1503.02531.

What a teacher predicts is computed from its hidden states, chunk by chunk as the student's logits are, or stored: its
K largest log-probabilities. Then all other tokens are one bucket, which has the rest of the probability. Within it the
teacher is taken to agree with the student, so that the divergence of the buckets is that of all tokens.

Legend: B batch, T tokens, D model, V vocabulary (this rank's rows of it), N tokens of all rows, C tokens of a chunk,
K stored tokens, R ranks that share the vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from torchtitan_clone.ops.cross_entropy import (
    ChunkedCrossEntropy,
    LossTerm,
    build_loss,
    grads_of_targets,
    target_columns,
)
from torchtitan_clone.ops.layers import linear
from torchtitan_clone.ops.softmax import is_overwritten, rows_in_cache
from torchtitan_clone.ops.source_sums import SourceSums, group_observer
from torchtitan_clone.ops.vocabulary import local_shards, token_chunks

_LEAST_REST = 1e-20
"""Probability of the bucket where rounding leaves none, so that its logarithm is finite."""


class TeacherKind(Protocol):
    """How the log-probabilities of a teacher are computed from what a chunk has of it."""

    @staticmethod
    def logits(hidden_CD: Tensor, *given: Tensor, weight_VD: Tensor) -> tuple[Tensor, ...]:
        """Returns the student's logits [C, V], and what is needed of the teacher, by token."""
        ...

    @staticmethod
    def lse(scaled_CV: Tensor, /, *teacher: Tensor, start: int, temperature: float) -> Tensor:
        """Returns lse [C, 1] of this rank, which ranks add up; `scaled_CV` are the student's logits over T."""
        ...

    @staticmethod
    def log_probs(
        scaled_CV: Tensor, /, *teacher: Tensor, lse_C1: Tensor, start: int, temperature: float
    ) -> Tensor:  # fmt: skip
        """Returns the teacher's log-probabilities [C, V]."""
        ...


class OfModel:
    """From its hidden states and output projection."""

    @staticmethod
    def logits(hidden_CD: Tensor, *given: Tensor, weight_VD: Tensor) -> tuple[Tensor, ...]:
        teacher_CD, teacher_VD = given
        return linear(hidden_CD, weight_VD), linear(teacher_CD, teacher_VD)

    @staticmethod
    def lse(_scaled_CV: Tensor, /, *teacher: Tensor, start: int, temperature: float) -> Tensor:
        (logits_CV,) = teacher
        return (logits_CV.float() / temperature).logsumexp(dim=-1, keepdim=True)

    @staticmethod
    def log_probs(_scaled_CV: Tensor, /, *teacher: Tensor, lse_C1: Tensor, start: int, temperature: float) -> Tensor:
        (logits_CV,) = teacher
        return logits_CV.float() / temperature - lse_C1


class Stored:
    """From the ids and values of its K largest ones; the lse is that of the student's other logits."""

    @staticmethod
    def logits(hidden_CD: Tensor, *given: Tensor, weight_VD: Tensor) -> tuple[Tensor, ...]:
        return linear(hidden_CD, weight_VD), *given

    @staticmethod
    def lse(scaled_CV: Tensor, /, *teacher: Tensor, start: int, temperature: float) -> Tensor:
        ids_CK, values_CK = teacher
        others_CV = _with_values(scaled_CV, ids_CK - start, torch.full_like(values_CK, -torch.inf))
        return others_CV.logsumexp(dim=-1, keepdim=True)

    @staticmethod
    def log_probs(scaled_CV: Tensor, /, *teacher: Tensor, lse_C1: Tensor, start: int, temperature: float) -> Tensor:
        ids_CK, values_CK = teacher
        # Rounding may leave less than 0. Without other tokens lse is -inf, and all of the difference is replaced.
        rest_C1 = (1.0 - values_CK.exp().sum(dim=1, keepdim=True)).clamp_min(_LEAST_REST).log()
        return _with_values(scaled_CV - lse_C1 + rest_C1, ids_CK - start, values_CK)


def _with_values(x_CV: Tensor, columns_CK: Tensor, values_CK: Tensor) -> Tensor:
    """Returns a copy of `x_CV` with other values in these columns, of which other ranks may have some."""
    width = x_CV.shape[1]
    is_local_CK = (columns_CK >= 0) & (columns_CK < width)
    wide = torch.nn.functional.pad(x_CV, (0, 1))  # the last column takes the values of other ranks
    return wide.scatter_(1, torch.where(is_local_CK, columns_CK, width), values_CK)[:, :width]


class Predictions(Protocol):
    """What a teacher predicts for the tokens of a batch."""

    kind: ClassVar[type[TeacherKind]]

    def chunks(self, count: int) -> Iterator[tuple[Tensor, ...]]:
        """Yields what each of `count` chunks of tokens has of it."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelPredictions:
    """Final hidden states of the teacher, and its output projection [V, D]; sharded as the student's."""

    hidden_BTD: Tensor
    weight_VD: Tensor
    kind: ClassVar[type[TeacherKind]] = OfModel

    def chunks(self, count: int) -> Iterator[tuple[Tensor, ...]]:
        hidden_BTD, weight_VD, _ = local_shards(self.hidden_BTD, self.weight_VD)
        yield from zip(hidden_BTD.flatten(0, 1).chunk(count), repeat(weight_VD), strict=False)


@dataclass(frozen=True, kw_only=True)
class StoredPredictions:
    """Ids and log-probabilities of the K most likely tokens."""

    ids_BKT: Tensor
    values_BKT: Tensor
    kind: ClassVar[type[TeacherKind]] = Stored

    def chunks(self, count: int) -> Iterator[tuple[Tensor, ...]]:
        by_token = (x.transpose(1, 2).flatten(0, 1) for x in (self.ids_BKT.long(), self.values_BKT.float()))
        yield from zip(*(x.chunk(count) for x in by_token), strict=True)


Teacher = Callable[[Callable[[Predictions], Tensor]], Tensor]
"""Calls a function with what the teacher predicts for a batch, while its weights are there; returns the result."""


def _row_lse(logits_CV: Tensor, *teacher: Tensor, kind: type[TeacherKind], start: int, temperature: float) -> Tensor:
    """Returns lse [C, 3]: of the student's logits, of the same over T, and that of the teacher."""
    logits_CV = logits_CV.float()
    scaled_CV = logits_CV / temperature
    of_teacher = kind.lse(scaled_CV, *teacher, start=start, temperature=temperature)
    return torch.cat([*(x.logsumexp(dim=-1, keepdim=True) for x in (logits_CV, scaled_CV)), of_teacher], dim=1)


def _logits_and_lse(
    hidden_CD: Tensor, *given: Tensor, weight_VD: Tensor, kind: type[TeacherKind], start: int, temperature: float
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Returns what TeacherKind.logits() does, and lse [C, 3] of this rank's part of the vocabulary."""
    logits_CV, *teacher = kind.logits(hidden_CD, *given, weight_VD=weight_VD)
    rows = rows_in_cache(logits_CV, None, *teacher)
    options = {"kind": kind, "start": start, "temperature": temperature}
    return (logits_CV, *teacher), torch.cat([_row_lse(logits, *others, **options) for logits, _, *others in rows])


def _loss_and_grads(
    weight_VD: Tensor, start: int, hidden_CD: Tensor, targets_C: Tensor, *chunk: Any, kind: type[TeacherKind],
    alpha: float, temperature: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Returns what the chunk of a cross-entropy does, with gradients of the objective, and KL [C, 1] of this rank.

    `chunk` has what the chunk has of the teacher, and of a sharded vocabulary what ranks have exchanged, else None.
    """
    *given, shard = chunk
    tensors, lse_RC3 = (kind.logits(hidden_CD, *given, weight_VD=weight_VD), None) if shard is None else shard
    logits_CV, *teacher = tensors
    column_C1, is_local_C1 = target_columns(targets_C, weight_VD, start)
    minus_C1 = (alpha - 1.0) * is_local_C1.float()
    options = {"start": start, "temperature": temperature}
    picked, divergences, grad_CV = [], [], logits_CV
    for logits, lse, column, minus, *rows in rows_in_cache(logits_CV, lse_RC3, column_C1, minus_C1, *teacher):
        lse_C3 = _row_lse(logits, *rows, kind=kind, **options) if lse is None else lse.logsumexp(dim=0)
        of_target_C1, of_student_C1, of_teacher_C1 = lse_C3.split(1, dim=1)
        log_probs = logits.float() - of_target_C1
        scaled = logits.float() / temperature
        q = scaled - of_student_C1
        p = kind.log_probs(scaled, *rows, lse_C1=of_teacher_C1, **options)
        picked.append(log_probs.gather(1, column))
        difference = p - q
        p = p.exp()
        divergences.append((p * difference).sum(dim=1, keepdim=True))
        grad = log_probs.exp_().mul_(1.0 - alpha).scatter_add_(1, column, minus)
        grad = grad.add_(q.exp_().sub_(p), alpha=alpha * temperature)
        if is_overwritten(logits):
            logits.copy_(grad)
        else:
            grad_CV = grad.to(weight_VD.dtype)
    losses_C1 = -torch.where(is_local_C1, torch.cat(picked), 0.0)
    return losses_C1, *grads_of_targets(grad_CV, hidden_CD, weight_VD, targets_C), torch.cat(divergences)


def build_distilled_loss(
    *, alpha: float, temperature: float, divergence: LossTerm, chunk_tokens: int, compile_backend: str | None,
    sums: SourceSums | None = None,
) -> Callable[..., Tensor]:  # fmt: skip
    """Returns build_loss() of the same options, with gradients of the objective in calls that pass a `teacher`.

    Its value is the cross-entropy; `divergence` gets KL. Without gradients, and for targets `later` than the next
    token, it is the cross-entropy alone.
    """
    options = {"chunk_tokens": chunk_tokens, "compile_backend": compile_backend, "sums": sums}
    plain = build_loss(**options)
    train_chunk, logits_fn = _loss_and_grads, _logits_and_lse
    if compile_backend is not None:
        train_chunk = torch.compile(train_chunk, backend=compile_backend)
        logits_fn = torch.compile(logits_fn, backend=compile_backend)

    def distilled(
        hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, groups_BT: Tensor | None, predictions: Predictions
    ) -> Tensor:
        hidden_BTD, weight_VD, vocabulary = local_shards(hidden_BTD, weight_VD)
        hidden_ND, targets_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
        items = token_chunks(hidden_ND, targets_N, chunk_tokens=chunk_tokens, others=predictions.chunks)
        shared = {"kind": predictions.kind, "temperature": temperature}
        chunks = vocabulary.chunks(items, partial(logits_fn, weight_VD=weight_VD, start=vocabulary.start, **shared))
        chunk_fn, observe = partial(train_chunk, alpha=alpha, **shared), group_observer(sums, targets_N, groups_BT)
        add = partial(divergence.add, targets_N=targets_N)
        return ChunkedCrossEntropy.apply(hidden_ND, weight_VD, chunks, vocabulary, chunk_fn, observe, add)

    def loss_fn(
        hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, groups_BT: Tensor | None = None, *,
        later: bool = False, teacher: Teacher | None = None,
    ) -> Tensor:  # fmt: skip
        if teacher is None or later or not torch.is_grad_enabled():
            return plain(hidden_BTD, weight_VD, targets_BT, groups_BT, later=later)
        return teacher(partial(distilled, hidden_BTD, weight_VD, targets_BT, groups_BT))

    return loss_fn
