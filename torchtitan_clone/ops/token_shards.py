"""Gathers tokens that ranks of a tensor-parallel group shard, and sums and shards them: each is the other's gradient.

DTensor does the same with more work on the host for each call. Legend: B batch, T tokens, t a rank's share, D features.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_clone.torch_compat import all_gather, all_to_all, is_fake, reduce_scatter, wait_tensor


def gather_tokens(shard_BtD: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns the tokens [B, T, D] of all ranks, which hold equally many; gradients are summed over the ranks."""
    return _Exchange.apply(shard_BtD, True, mesh.size(), mesh.get_group().group_name)


def sum_and_shard_tokens(part_BTD: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns this rank's tokens [B, t, D] of the sum over the ranks; T must be a multiple of their number."""
    return _Exchange.apply(part_BTD, False, mesh.size(), mesh.get_group().group_name)


def _exchange(x: Tensor, gathers: bool, ranks: int, group_name: str) -> Tensor:
    if gathers:
        return torch.cat(wait_tensor(all_gather(x.contiguous(), ranks, group_name)).chunk(ranks), dim=1)
    parts = torch.cat(x.chunk(ranks, dim=1))
    # gloo implements reduce-scatter by an all-reduce, of twice the bytes. Simulated runs are of a GPU.
    if x.device.type == "cpu" and (torch.compiler.is_compiling() or not is_fake(x)):
        sizes = [len(x)] * ranks
        return wait_tensor(all_to_all(parts, sizes, sizes, group_name)).unflatten(0, (ranks, -1)).sum(0)
    return wait_tensor(reduce_scatter(parts, "sum", ranks, group_name))


class _Exchange(torch.autograd.Function):
    """Gathers tokens in forward and sums them in backward, or the other way around."""

    @staticmethod
    def forward(ctx, x: Tensor, gathers: bool, ranks: int, group_name: str) -> Tensor:
        ctx.backward_arguments = not gathers, ranks, group_name
        return _exchange(x, gathers, ranks, group_name)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        gathers, ranks, group_name = ctx.backward_arguments
        return _exchange(grad_outputs[0], gathers, ranks, group_name), None, None, None
