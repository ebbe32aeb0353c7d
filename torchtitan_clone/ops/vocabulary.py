"""The vocabulary of which tensor parallelism gives each rank some rows of the output projection.

Legend: B batch, T tokens, D model, V vocabulary (this rank's rows of it), C tokens of a chunk, R ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

Shard = tuple[Tensor, Tensor]
"""This rank's logits [C, V], and the logarithms of the sums of exponentials (lse) of all ranks [R, C, 1]."""
Chunk = tuple[Any, ...]
"""Hidden states [C, D], targets [C], what else belongs to the tokens, and of a sharded vocabulary what ranks have
exchanged, a Shard, else None."""


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

    def chunks(
        self, items: Iterable[tuple[Tensor, ...]], logits_fn: Callable[..., tuple[Any, Tensor]]
    ) -> Iterator[Chunk]:
        """Yields hidden states [C, D], targets [C] and what else a chunk has with its shard, None where it has none.

        `logits_fn` returns logits and lse of a chunk, given all but its targets.

        While ranks exchange the lse of a chunk, they compute the losses of the one before and the logits of the next.
        """
        if self.group is None:
            yield from ((*item, None) for item in items)
            return
        started: list[tuple[dist.Work | None, Chunk]] = []
        for hidden_CD, targets_C, *others in items:
            logits_CV, lse_C1 = logits_fn(hidden_CD, *others)
            lse_RC1 = lse_C1.new_empty(self.group.size(), *lse_C1.shape)
            work = dist.all_gather([*lse_RC1.unbind()], lse_C1, group=self.group, async_op=True)
            started.append((work, (hidden_CD, targets_C, *others, (logits_CV, lse_RC1))))
            if started[1:]:
                yield _finished(*started.pop(0))
        if started:
            yield _finished(*started.pop())


def _finished(work: dist.Work | None, chunk: Chunk) -> Chunk:
    assert work is not None
    work.wait()
    return chunk


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


def token_chunks(
    hidden_ND: Tensor, targets_N: Tensor, *, chunk_tokens: int,
    others: Callable[[int], Iterable[tuple[Tensor, ...]]] = lambda _count: repeat(()),
) -> Iterator[tuple[Tensor, ...]]:  # fmt: skip
    """Yields hidden states [C, D], targets [C] and what `others` yields for each of so many chunks."""
    count = -(-len(targets_N) // chunk_tokens)
    for hidden_CD, targets_C, given in zip(hidden_ND.chunk(count), targets_N.chunk(count), others(count), strict=False):
        yield hidden_CD, targets_C, *given
