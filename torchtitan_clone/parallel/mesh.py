"""The device mesh: which rank does what.

One mesh with five named axes, of which any may have size 1, and the groupings of them that the rest of the program
asks for. Built once, because a DeviceMesh that is sliced again in another place makes process groups again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_clone.config import Degrees

_numbers = count(1)

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The mesh and its views.

    - `world`: all five axes;
    - `fsdp`: what FSDP2 shards weights over, dp_shard and cp as one axis; under HSDP with dp_replicate before it;
    - `tp`: what matrices are split over; `cp`: what sequences are split over; `pp`: what layers are split over;
    - `is_loss_leader` holds on one of the ranks that compute the loss of the same tokens;
    - `groups`: the process groups that were made for it.
    """

    world: DeviceMesh
    fsdp: DeviceMesh
    tp: DeviceMesh
    cp: DeviceMesh
    pp: DeviceMesh
    is_loss_leader: bool
    groups: tuple[dist.ProcessGroup, ...]

    def group_names(self) -> dict[str, str]:
        """What each process group is for, by torch's name for it; of groups that share ranks the first counts."""
        names: dict[str, str] = {_whole_world().group_name: "world"}
        fsdp = ("dp_replicate", "fsdp") if self.fsdp.ndim > 1 else ("fsdp",)
        for axes, view in ((fsdp, self.fsdp), (("tp",), self.tp), (("cp",), self.cp), (("pp",), self.pp)):
            names |= {group.group_name: axis for axis, group in zip(axes, view.get_all_groups(), strict=True)}
        return names

    def close(self) -> None:
        """Destroys the process groups of all axes; what was built on the mesh cannot be used any more."""
        for group in self.groups:
            dist.destroy_process_group(group)


def batch_rank(degrees: Degrees, *, rank: int) -> int:
    """Which slice of a global batch this rank reads; ranks that differ in pp, cp or tp only read the same."""
    coordinate = _coordinate(degrees, rank=rank)
    return coordinate["dp_replicate"] * degrees.dp_shard + coordinate["dp_shard"]


def context_rank(degrees: Degrees, *, rank: int) -> int:
    """Which part of each sequence this rank holds."""
    return _coordinate(degrees, rank=rank)["cp"]


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


def build_mesh(degrees: Degrees, *, loss_rank: int, device_type: str) -> Mesh:
    """Makes the process groups of all axes; every rank must call it, after the default process group exists.

    `loss_rank` is the rank of the pipeline axis that computes the loss.
    """
    names = _names_of_next_mesh()
    sizes = {axis: getattr(degrees, axis) for axis in AXES}
    world = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=names(*sizes))
    coordinate = _coordinate(degrees, rank=world.get_rank())
    # The same ranks in the same order, with the two axes that weights are sharded over as one: slicing an axis that
    # was flattened later is deprecated in torch.
    weights = init_device_mesh(
        device_type,
        (degrees.pp, degrees.dp_replicate, degrees.dp_shard * degrees.cp, degrees.tp),
        mesh_dim_names=names("pp", "dp_replicate", "fsdp", "tp"),
    )
    groups = [*world.get_all_groups(), *weights.get_all_groups()]
    return Mesh(
        world=world,
        fsdp=weights[names("dp_replicate", "fsdp") if degrees.dp_replicate > 1 else names("fsdp")],
        tp=weights[names("tp")],
        cp=world[names("cp")],
        pp=world[names("pp")],
        is_loss_leader=coordinate["tp"] == 0 and coordinate["pp"] == loss_rank,
        groups=tuple(dict.fromkeys(group for group in groups if group is not _whole_world())),
    )


def _whole_world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _names_of_next_mesh() -> Callable[..., tuple[str, ...]]:
    """Gives axes names that no mesh of this process had before.

    torch takes meshes of the same ranks and names for one another, and its caches keep process groups of the first.
    """
    number = next(_numbers)
    return lambda *axes: tuple(f"{axis}.{number}" if number > 1 else axis for axis in axes)
