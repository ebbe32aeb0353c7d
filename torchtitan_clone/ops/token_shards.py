"""Gathers tokens that ranks of a tensor-parallel group shard, and sums and shards them: each is the other's gradient.

DTensor does the same with more work on the host for each call. Legend: B batch, T tokens, t a rank's share, D features.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_clone import torch_compat
from torchtitan_clone.comm.collectives import all_gather, reduce_scatter, uses_messages
from torchtitan_clone.torch_compat import process_group_of, wait_tensor


def gather_tokens(shard_BtD: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns the tokens [B, T, D] of all ranks, which hold equally many; gradients are summed over the ranks."""
    return _ExchangeTokens.apply(shard_BtD, True, mesh.size(), mesh.get_group().group_name)


def sum_and_shard_tokens(part_BTD: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns this rank's tokens [B, t, D] of the sum over the ranks; T must be a multiple of their number."""
    return _ExchangeTokens.apply(part_BTD, False, mesh.size(), mesh.get_group().group_name)


def _exchange(x: Tensor, gathers: bool, ranks: int, group_name: str) -> Tensor:
    if uses_messages(x):
        exchange = _compiled_exchange if torch.compiler.is_compiling() else _exchange_by_messages
        return exchange(x, gathers, ranks, group_name)
    if gathers:
        return torch.cat(wait_tensor(torch_compat.all_gather(x.contiguous(), ranks, group_name)).chunk(ranks), dim=1)
    return wait_tensor(torch_compat.reduce_scatter(torch.cat(x.chunk(ranks, dim=1)), "sum", ranks, group_name))


def _exchange_by_messages(x: Tensor, gathers: bool, ranks: int, group_name: str) -> Tensor:
    group = process_group_of(group_name)
    return torch.cat(all_gather(x, group=group), dim=1) if gathers else reduce_scatter(x.chunk(ranks, 1), group=group)


# The same as an operator that a compiled region can contain.
_compiled_exchange = torch.library.custom_op(
    "torchtitan_clone::exchange_tokens", _exchange_by_messages, mutates_args=(), tags=(torch.Tag.flexible_layout,)
)


@_compiled_exchange.register_fake
def _empty(x: Tensor, gathers: bool, ranks: int, _group_name: str) -> Tensor:
    return x.new_empty(len(x), x.shape[1] * ranks if gathers else x.shape[1] // ranks, *x.shape[2:])


class _ExchangeTokens(torch.autograd.Function):
    """Gathers tokens in forward and sums them in backward, or the other way around."""

    @staticmethod
    def forward(ctx, x: Tensor, gathers: bool, ranks: int, group_name: str) -> Tensor:
        ctx.backward_arguments = not gathers, ranks, group_name
        return _exchange(x, gathers, ranks, group_name)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        gathers, ranks, group_name = ctx.backward_arguments
        return _exchange(grad_outputs[0], gathers, ranks, group_name), None, None, None
