"""Gathers tokens that ranks of a tensor-parallel group shard, and sums and shards them: each is the other's gradient.

DTensor does the same with more work on the host for each call. Legend: B batch, T tokens, t a rank's share, D features.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_clone.torch_compat import all_gather, reduce_scatter, wait_tensor


def gather_tokens(shard_BtD: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns the tokens [B, T, D] of all ranks, which hold equally many; gradients are summed over the ranks."""
    return _GatherTokens.apply(shard_BtD, mesh.size(), mesh.get_group().group_name)


def sum_and_shard_tokens(part_BTD: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns this rank's tokens [B, t, D] of the sum over the ranks; T must be a multiple of their number."""
    return _SumAndShardTokens.apply(part_BTD, mesh.size(), mesh.get_group().group_name)


def _gather(shard_BtD: Tensor, ranks: int, group_name: str) -> Tensor:
    by_rank = wait_tensor(all_gather(shard_BtD.contiguous(), ranks, group_name))
    return torch.cat(by_rank.chunk(ranks), dim=1)


def _sum_and_shard(part_BTD: Tensor, ranks: int, group_name: str) -> Tensor:
    return wait_tensor(reduce_scatter(torch.cat(part_BTD.chunk(ranks, dim=1)), "sum", ranks, group_name))


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard_BtD: Tensor, ranks: int, group_name: str) -> Tensor:
        ctx.group = ranks, group_name
        return _gather(shard_BtD, ranks, group_name)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        ranks, group_name = ctx.group
        return _sum_and_shard(grad_outputs[0], ranks, group_name), None, None


class _SumAndShardTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part_BTD: Tensor, ranks: int, group_name: str) -> Tensor:
        ctx.group = ranks, group_name
        return _sum_and_shard(part_BTD, ranks, group_name)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        ranks, group_name = ctx.group
        return _gather(grad_outputs[0], ranks, group_name), None, None
