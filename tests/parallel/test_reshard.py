"""Tensors change from one mesh to another in memory, whatever their layouts, and never take twice their memory."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torchtitan_clone.config import load_config
from torchtitan_clone.parallel.mesh import build_mesh
from torchtitan_clone.parallel.reshard import gather_shard_map, transfer
from torchtitan_clone.parallel.runtime import Launch, process_group
from torchtitan_clone.run.preflight import resolved_degrees
from torchtitan_clone.testing.harness import run_ranks

CPU = torch.device("cpu")
ROWS, COUNT = 7, 12


def mesh_of(*degrees):
    config = load_config([f"--parallelism.{key}" for key in degrees])
    return build_mesh(resolved_degrees(config.parallelism, dist.get_world_size()), loss_rank=0, device_type="cpu")


def value(index):
    """A tensor that divides by no number of ranks, of some type."""
    kind = (torch.float32, torch.bfloat16, torch.int64)[index % 3]
    return (torch.arange(ROWS * 5).reshape(ROWS, 5) + 100 * index).to(kind)


def move_through_meshes():
    """From halves of the tensors on pairs of ranks, through columns and copies, to rows on all; what arrives."""
    with process_group(load_config([]).comm, launch=Launch.from_environment(), device=CPU):
        rank = dist.get_rank()
        pipeline, flat, copies = mesh_of("pipeline_parallel_degree=2"), mesh_of(), mesh_of("tensor_parallel_degree=2")
        first = rank // 2 * (COUNT // 2)
        held = {
            str(i): distribute_tensor(value(i), pipeline.fsdp, [Shard(0)]) for i in range(first, first + COUNT // 2)
        }
        held["step"] = torch.tensor(5.0)
        for mesh, placement in ((copies.tp, Shard(1)), (pipeline.fsdp, Replicate()), (flat.fsdp, Shard(0))):
            # On the first tensor's own ranks only, where it is a copy on some of them.
            wanted = {str(i): distribute_tensor(value(i), mesh, [placement]).to("meta") for i in range(COUNT)}
            wanted["step"] = torch.empty((), device="meta")
            held = dict(transfer(held, sources=gather_shard_map(held), wanted=wanted, device=CPU))
            assert all(tensor.placements == (placement,) for name, tensor in held.items() if name != "step")
        return {name: (t if name == "step" else t.full_tensor()) for name, t in held.items()}


def test_tensors_arrive_whole():
    for found in run_ranks(move_through_meshes, 4):
        assert found.pop("step") == 5
        assert len(found) == COUNT
        for name, tensor in found.items():
            assert torch.equal(tensor, value(int(name))), name
            assert tensor.dtype == value(int(name)).dtype


def most_memory(count, size):
    """Most bytes that this rank's tensors take while those of two stages become shards on both ranks."""
    with process_group(load_config([]).comm, launch=Launch.from_environment(), device=CPU):
        rank, flat = dist.get_rank(), mesh_of()
        old = {str(i): torch.ones(size) for i in range(rank * count, (rank + 1) * count)}
        wanted = {
            str(i): distribute_tensor(torch.ones(size), flat.fsdp, [Shard(0)]).to("meta") for i in range(2 * count)
        }
        storages = [tensor.untyped_storage() for tensor in old.values()]
        most = 0
        for _, tensor in transfer(old, sources=gather_shard_map(old), wanted=wanted, device=CPU):
            storages.append(tensor.to_local().untyped_storage())
            most = max(most, sum(storage.nbytes() for storage in storages))
        assert not old
        return most


@pytest.mark.parametrize("count", [4, 32])
def test_both_meshes_never_lie_in_memory_at_once(count):
    size = 1000
    for most in run_ranks(most_memory, 2, count, size):
        assert most <= 4 * size * (count + 1)
