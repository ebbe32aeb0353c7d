"""Tensors are transferred between meshes in memory, in any layout and dtype, without twice their memory."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.harness import run_ranks
from torchtitan_clone.config import load_config, resolved_degrees
from torchtitan_clone.parallel.mesh import build_mesh
from torchtitan_clone.parallel.reshard import gather_shard_map, transfer
from torchtitan_clone.parallel.runtime import Launch, process_group

CPU = torch.device("cpu")
ROWS, COUNT = 7, 12


def mesh_of(*degrees):
    config = load_config([f"--parallelism.{key}" for key in degrees])
    return build_mesh(resolved_degrees(config.parallelism, dist.get_world_size()), loss_rank=0, device_type="cpu")


def value(index):
    """Returns a tensor of one of several dtypes, whose size no number of ranks divides."""
    kind = (torch.float32, torch.bfloat16, torch.int64)[index % 3]
    return (torch.arange(ROWS * 5).reshape(ROWS, 5) + 100 * index).to(kind)


def transfer_through_meshes():
    """Transfers halves of the tensors on pairs of ranks, through columns and replicas, to rows on all ranks."""
    with process_group(load_config([]).comm, launch=Launch.from_environment(), device=CPU):
        rank = dist.get_rank()
        pipeline, flat, copies = mesh_of("pipeline_parallel_degree=2"), mesh_of(), mesh_of("tensor_parallel_degree=2")
        first = rank // 2 * (COUNT // 2)
        held = {
            str(i): distribute_tensor(value(i), pipeline.fsdp, [Shard(0)]) for i in range(first, first + COUNT // 2)
        }
        held["step"] = torch.tensor(5.0)
        for mesh, placement in ((copies.tp, Shard(1)), (pipeline.fsdp, Replicate()), (flat.fsdp, Shard(0))):
            wanted = {str(i): distribute_tensor(value(i), mesh, [placement]).to("meta") for i in range(COUNT)}
            wanted["step"] = torch.empty((), device="meta")
            held = dict(transfer(held, sources=gather_shard_map(held), wanted=wanted, device=CPU))
            assert all(tensor.placements == (placement,) for name, tensor in held.items() if name != "step")
        return {name: (t if name == "step" else t.full_tensor()) for name, t in held.items()}


def test_tensors_arrive_complete():
    for found in run_ranks(transfer_through_meshes, 4):
        assert found.pop("step") == 5
        assert len(found) == COUNT
        for name, tensor in found.items():
            assert torch.equal(tensor, value(int(name))), name
            assert tensor.dtype == value(int(name)).dtype


BUFFERS = {
    "zero_dim": torch.tensor(7),
    "bias": torch.arange(5, dtype=torch.float32),
    "mask": torch.tensor([[True, False], [False, True]]),
    "half": torch.tensor([1.5, -2.5], dtype=torch.float16),
    "float8": torch.tensor([1.0, -0.5, 448.0]).to(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j]),
    "count": torch.tensor([3], dtype=torch.uint8),
    "empty": torch.empty(0, 3),
}


def transfer_buffers():
    """Buffers of the first stage, replicated on its two ranks, are wanted by all ranks but the first."""
    with process_group(load_config([]).comm, launch=Launch.from_environment(), device=CPU):
        rank = dist.get_rank()
        held = {name: tensor.clone() for name, tensor in BUFFERS.items()} if rank < 2 else {}
        wanted = {name: tensor.to("meta") for name, tensor in BUFFERS.items()} if rank else {}
        received = transfer(held, sources=gather_shard_map(held), wanted=wanted, device=CPU)
        return {name: described(tensor) for name, tensor in received}


def described(tensor):
    """Returns all that identifies a tensor, as plain data: pickle does not support float8."""
    return str(tensor.dtype), tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).tolist()


def test_replicated_buffers_of_any_dtype_arrive():
    first, *others = run_ranks(transfer_buffers, 4)
    assert first == {}
    for found in others:
        assert found == {name: described(tensor) for name, tensor in BUFFERS.items()}


def most_memory(count, size):
    """Returns the maximum bytes of this rank's tensors while those of two stages become shards on both ranks."""
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
def test_both_meshes_are_never_in_memory_at_once(count):
    size = 1000
    for most in run_ranks(most_memory, 2, count, size):
        assert most <= 4 * size * (count + 1)
