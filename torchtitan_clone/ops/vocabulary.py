"""Softmax over a vocabulary whose rows of the output projection tensor parallelism may have sharded.

Legend: B batch, T tokens, D model, V vocabulary (this rank's rows of it), C tokens of a chunk, N of all rows, R ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from torchtitan_clone.ops.linear import linear
from torchtitan_clone.torch_compat import simulates_gpu

Shard = tuple[Tensor, Tensor]
"""This rank's logits [C, V], and the lse of all ranks [R, C, 1], see logits_and_lse()."""
Chunk = tuple[Tensor, Tensor, Shard | None]
_CACHED_LOGITS = 2**17


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


def logits_and_lse(hidden_CD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
    """Returns this rank's logits, and the logarithms of the sums of their exponentials (lse) [C, 1], fp32."""
    logits_CV = linear(hidden_CD, weight_VD)
    pieces = [torch.logsumexp(logits.float(), dim=-1, keepdim=True) for logits, _ in pieces_of(logits_CV, None)]
    return logits_CV, torch.cat(pieces)


def chunks_of(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, count: int, vocabulary: Vocabulary,
    logits_fn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Iterator[Chunk]:  # fmt: skip
    """Yields hidden states, targets and shard of each chunk; no shard where this rank has the whole vocabulary.

    While ranks exchange the lse of a chunk, they compute the losses of the one before and the logits of the next one.
    """
    started: list[tuple[dist.Work | None, Chunk]] = []
    for hidden_CD, targets_C in zip(hidden_ND.chunk(count), targets_N.chunk(count), strict=True):
        if vocabulary.group is None:
            yield hidden_CD, targets_C, None
            continue
        logits_CV, lse_C1 = logits_fn(hidden_CD, weight_VD)
        lse_RC1 = lse_C1.new_empty(vocabulary.group.size(), *lse_C1.shape)
        work = dist.all_gather([*lse_RC1.unbind()], lse_C1, group=vocabulary.group, async_op=True)
        started.append((work, (hidden_CD, targets_C, (logits_CV, lse_RC1))))
        if started[1:]:
            yield _finished(*started.pop(0))
    if started:
        yield _finished(*started.pop())


def _finished(work: dist.Work | None, chunk: Chunk) -> Chunk:
    assert work is not None
    work.wait()
    return chunk


def logits_of(hidden_CD: Tensor, weight_VD: Tensor, shard: Shard | None) -> tuple[Tensor, Tensor | None]:
    """Returns this rank's logits [C, V], and of a sharded vocabulary the lse of all ranks [R, C, 1]."""
    return (linear(hidden_CD, weight_VD), None) if shard is None else shard


def is_overwritten(logits_CV: Tensor) -> bool:
    """Whether results are written over these logits: new memory would cost a CPU more than the computation."""
    if logits_CV.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not simulates_gpu(logits_CV)


def pieces_of(logits_CV: Tensor, lse_RC1: Tensor | None, *others: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yields the rows that softmax takes at a time: on a CPU so many as stay in the cache of each thread."""
    size = len(logits_CV)
    if is_overwritten(logits_CV):
        size = torch.get_num_threads() * max(1, _CACHED_LOGITS // logits_CV.shape[1])
    lse = repeat(None) if lse_RC1 is None else lse_RC1.split(size, dim=1)
    yield from zip(logits_CV.split(size), lse, *(x.split(size) for x in others), strict=False)


def log_softmax(logits_CV: Tensor, lse_RC1: Tensor | None) -> Tensor:
    """Returns this rank's log-probabilities [C, V], fp32; in the memory of fp32 logits if they may be overwritten."""
    logits_CV = logits_CV.float() if is_overwritten(logits_CV) else logits_CV
    out = logits_CV if is_overwritten(logits_CV) else None
    if lse_RC1 is None:  # The kernel has read a row before it writes it.
        return torch.log_softmax(logits_CV, dim=-1, dtype=torch.float32, out=out)
    return torch.sub(logits_CV, lse_RC1.logsumexp(dim=0), out=out)
