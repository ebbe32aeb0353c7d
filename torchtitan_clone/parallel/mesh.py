"""The device mesh: which rank does what.

One mesh with five named axes, of which any may have size 1, and the groupings of them that the rest of the program
asks for. Built once, because a DeviceMesh that is sliced again in another place makes process groups again.
"""

from dataclasses import dataclass
from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_clone.config import Degrees

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The mesh and its views.

    - `fsdp`: the axes over which FSDP2 shards (and for HSDP replicates) weights;
    - `is_batch_leader` holds on one of the ranks that read the same rows.
    """

    world: DeviceMesh
    fsdp: DeviceMesh
    is_batch_leader: bool


def batch_rank(degrees: Degrees, *, rank: int) -> int:
    """Which slice of a global batch this rank reads; ranks that differ in pp, cp or tp only read the same."""
    coordinate = _coordinate(degrees, rank=rank)
    return coordinate["dp_replicate"] * degrees.dp_shard + coordinate["dp_shard"]


def describe_mesh(degrees: Degrees) -> str:
    """The mesh as text: a line a rank, or for many ranks the first and the last."""
    world_size = prod(getattr(degrees, axis) for axis in AXES)
    shown = [axis for axis in AXES if getattr(degrees, axis) > 1]
    sizes = " x ".join(f"{axis} {getattr(degrees, axis)}" for axis in shown) or "one rank"
    lines = [f"{world_size} ranks = {sizes}" if shown else sizes]
    for rank in range(world_size if shown else 0):
        if rank < 8 or rank == world_size - 1:
            places = ", ".join(f"{axis} {_coordinate(degrees, rank=rank)[axis]}" for axis in shown)
            lines.append(f"  rank {rank}: {places}; reads slice {batch_rank(degrees, rank=rank)} of {degrees.data}")
        elif rank == 8:
            lines.append("  ...")
    return "\n".join(lines)


def _coordinate(degrees: Degrees, *, rank: int) -> dict[str, int]:
    coordinate = {}
    for axis in reversed(AXES):
        rank, coordinate[axis] = divmod(rank, getattr(degrees, axis))
    return coordinate


def build_mesh(degrees: Degrees, *, device_type: str) -> Mesh:
    """Makes the process groups of all axes; every rank must call it, after the default process group exists."""
    sizes = tuple(getattr(degrees, axis) for axis in AXES)
    world = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
    coordinate = _coordinate(degrees, rank=world.get_rank())
    fsdp_axes = ("dp_replicate", "dp_shard") if degrees.dp_replicate > 1 else ("dp_shard",)
    return Mesh(
        world=world,
        fsdp=world[fsdp_axes],
        is_batch_leader=coordinate["pp"] == coordinate["cp"] == coordinate["tp"] == 0,
    )
