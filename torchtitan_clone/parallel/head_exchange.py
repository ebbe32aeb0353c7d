"""Context parallelism that exchanges heads for tokens: a rank attends over whole rows for a slice of the heads.

Whole rows are in memory as [R T, B, n, H]: what a rank has is one block, which it sends or receives without a copy.

Legend: B batch, T tokens of this rank, N heads, K kv heads, n heads of one rank, H head dim; R ranks of the axis.
Source: arXiv 2309.14509 (Ulysses).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_clone import torch_compat
from torchtitan_clone.comm.collectives import exchange_parts, exchange_slices, uses_messages
from torchtitan_clone.ops.attention import OnHost
from torchtitan_clone.torch_compat import process_group_of


class CompleteRows(nn.Module):
    """Attention mask of all tokens of rows of which this rank holds a share."""

    def __init__(self, mask: nn.Module, *, degree: int):
        super().__init__()
        self.mask = mask
        self._degree = degree

    def forward(self, documents_BS: OnHost | Tensor | None, positions_BT: Tensor, **options: object) -> object:
        return self.mask(documents_BS, positions_BT.repeat(1, self._degree), **options)


class HeadExchange(nn.Module):
    """Attention over full sequences for this rank's slice of the heads."""

    def __init__(self, core: nn.Module, *, group: dist.ProcessGroup):
        super().__init__()
        self.core = core
        self.group = group

    def forward(
        self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: object, sinks_N: Tensor | None = None
    ) -> Tensor:
        qkv = gather_tokens((q_BTNH, k_BTKH, v_BTKH), group=self.group)
        if sinks_N is not None:
            sinks_N = sinks_N.unflatten(0, (self.group.size(), -1))[self.group.rank()]
        return gather_heads(self.core(*qkv, mask, sinks_N), group=self.group)


def gather_tokens(by_heads: Sequence[Tensor], *, group: dist.ProcessGroup) -> Sequence[Tensor]:
    """Returns [B, R T, n, H] of tensors [B, T, R n, H] in one exchange: rank r receives the r-th slice of the heads."""
    return _ExchangeHeads.apply(group.group_name, group.size(), True, *by_heads)


def gather_heads(x_BSnH: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Returns [B, T, R n, H] of a tensor [B, R T, n, H]: rank r receives its tokens."""
    return _ExchangeHeads.apply(group.group_name, group.size(), False, x_BSnH)[0]


class _ExchangeHeads(torch.autograd.Function):
    """gather_tokens(), or gather_heads() of several tensors: each computes the gradients of the other."""

    @staticmethod
    def forward(ctx, group_name: str, ranks: int, gathers_tokens: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments = group_name, ranks, not gathers_tokens
        return tuple(_exchange(tensors, group_name, ranks, gathers_tokens))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None, None, None, *_exchange(grads, *ctx.arguments)


def _exchange(tensors: Sequence[Tensor], group_name: str, ranks: int, gathers_tokens: bool) -> list[Tensor]:
    dim = 2 if gathers_tokens else 0
    parts_RTBnH = [x.transpose(0, 1).unflatten(dim, (ranks, -1)).movedim(dim, 0) for x in tensors]
    if uses_messages(tensors[0]) and not torch.compiler.is_compiling():
        received_RTBnH = exchange_parts(parts_RTBnH, group=process_group_of(group_name))
    else:  # in one tensor, which a compiled block writes together with what it computes
        joint = _exchange_slices(torch.cat(parts_RTBnH, dim=3), group_name, ranks)
        received_RTBnH = joint.split([x.shape[3] for x in parts_RTBnH], dim=3)
    if gathers_tokens:
        return [x.flatten(0, 1).transpose(0, 1) for x in received_RTBnH]
    return [x.permute(2, 1, 0, 3, 4).flatten(2, 3) for x in received_RTBnH]


def _exchange_slices(x: Tensor, group_name: str, ranks: int) -> Tensor:
    if uses_messages(x):
        return exchange_slices(x, group_name)
    sizes = [1] * ranks
    return torch_compat.wait_tensor(torch_compat.all_to_all(x.contiguous(), sizes, sizes, group_name))
