"""Builds the device mesh: five named axes, each of which may have size 1, and the views that the program uses.

Experts have a view of their own: the ranks of dp_shard, cp and tp as two axes, of which `ep` is the inner one.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import prod
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_clone.comm.collectives import connect, disconnect
from torchtitan_clone.config import Degrees
from torchtitan_clone.torch_compat import process_group_of

_numbers = count(1)
_singleton_name = ""
"""torch's name of the process group that _singleton_group() has created."""
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
Method = Literal["allgather", "alltoall", "ring"]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The mesh of all five axes (`world`) and its views; `ep` and `expert_fsdp` only with expert parallelism.

    `fsdp` is the axis that FSDP2 shards parameters over: dp_shard and cp as one, under HSDP after dp_replicate.
    `parameters` has the axis tp after those of `fsdp`.
    `stage` is the group of all ranks with the layers that this rank has.
    `is_loss_leader` is True on exactly one of the ranks that compute the loss of the same tokens.
    """

    world: DeviceMesh
    parameters: DeviceMesh
    fsdp: DeviceMesh
    tp: DeviceMesh
    cp: DeviceMesh
    pp: DeviceMesh
    ep: DeviceMesh | None
    expert_fsdp: DeviceMesh | None
    stage: dist.ProcessGroup
    is_loss_leader: bool
    groups: tuple[dist.ProcessGroup, ...]

    def group_axes(self) -> dict[str, list[str]]:
        """Returns the axes of torch's name of each process group: "world" and those with all ranks share one."""
        assert dist.group.WORLD is not None
        groups = [dist.group.WORLD, *self.fsdp.get_all_groups(), self.tp.get_group(), self.cp.get_group()]
        axes = ["world", *(["dp_replicate"] if self.fsdp.ndim > 1 else []), "fsdp", "tp", "cp", "pp"]
        found: dict[str, list[str]] = {}
        for group, axis in zip([*groups, self.pp.get_group()], axes, strict=True):
            found.setdefault(group.group_name, []).append(axis)
        for mesh, axis in ((self.expert_fsdp, "expert_fsdp"), (self.ep, "ep")):
            if mesh is not None:
                found.setdefault(mesh.get_group(mesh.ndim - 1).group_name, []).append(axis)
        return found

    def close(self) -> None:
        """Destroys the process groups of all axes; models built on the mesh cannot run any more."""
        disconnect(self.groups)
        for group in self.groups:
            dist.destroy_process_group(group)


def local_tokens(seq_len: int, *, rank: int, degree: int, method: Method) -> list[range]:
    """Returns the indices of the tokens of each row that a rank of the cp axis holds, in their order in memory."""
    if method == "alltoall":
        size = seq_len // degree
        return [range(rank * size, (rank + 1) * size)]
    size = seq_len // (2 * degree)
    return [range(chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * degree - 1 - rank)]


def batch_rank(degrees: Degrees, *, rank: int) -> int:
    """Returns the slice of a global batch that this rank reads; the same for ranks that differ in pp, cp or tp."""
    coordinate = _coordinate(degrees, rank=rank)
    return coordinate["dp_replicate"] * degrees.dp_shard + coordinate["dp_shard"]


def context_rank(degrees: Degrees, *, rank: int) -> int:
    """Returns the index of this rank on the cp axis, whose ranks hold different tokens of each sequence."""
    return _coordinate(degrees, rank=rank)["cp"]


def tensor_rank(degrees: Degrees, *, rank: int) -> int:
    """Returns the index of this rank on the tp axis, whose ranks share the tokens of their sequences between layers."""
    return _coordinate(degrees, rank=rank)["tp"]


def describe_mesh(degrees: Degrees) -> str:
    """Returns the mesh as text: one line per rank, or for many ranks the first ones and the last."""
    sizes = {axis: size for axis in AXES if (size := getattr(degrees, axis)) > 1}
    if not sizes:
        return "one rank"
    world_size = prod(sizes.values())
    lines = [f"{world_size} ranks = " + " x ".join(f"{axis} {size}" for axis, size in sizes.items())]
    if degrees.ep > 1:
        rest = degrees.dp_shard * degrees.cp * degrees.tp // degrees.ep
        lines[0] += f"; experts: ep {degrees.ep} x expert_fsdp {rest}"
    for rank in range(world_size):
        if rank < 8 or rank == world_size - 1:
            coordinates = ", ".join(f"{axis} {_coordinate(degrees, rank=rank)[axis]}" for axis in sizes)
            data_slice = f"{batch_rank(degrees, rank=rank)} of {degrees.data}"
            lines.append(f"  rank {rank}: {coordinates}; reads slice {data_slice}")
        elif rank == 8:
            lines.append("  ...")
    return "\n".join(lines)


def _coordinate(degrees: Degrees, *, rank: int) -> dict[str, int]:
    coordinate = {}
    for axis in reversed(AXES):
        rank, coordinate[axis] = divmod(rank, getattr(degrees, axis))
    return coordinate


def _singleton_group() -> dist.ProcessGroup:
    """Returns the process group of this rank only, which all meshes share and none destroys."""
    global _singleton_name
    with suppress(RuntimeError):  # there is none yet, or it was destroyed with all others
        return process_group_of(_singleton_name)
    singleton = cast("dist.ProcessGroup", dist.new_group([dist.get_rank()], use_local_synchronization=True))
    _singleton_name = singleton.group_name
    return singleton


def _mesh_of_gloo(
    device_type: str, shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...], singleton: dist.ProcessGroup
) -> DeviceMesh:
    """Creates a mesh as init_device_mesh() does, but `singleton` is the process group of all axes with one rank.

    Each group of gloo has two threads, of which one wakes up a hundred times a second.
    """
    sizes = {name: size for name, size in zip(mesh_dim_names, shape, strict=True) if size > 1}
    groups = dict.fromkeys(mesh_dim_names, singleton)
    if sizes:
        shared = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        groups |= {name: shared.get_group(name) for name in sizes}
    ranks = torch.arange(dist.get_world_size()).view(shape)
    return DeviceMesh.from_group([*groups.values()], device_type, mesh=ranks, mesh_dim_names=mesh_dim_names)


def build_mesh(degrees: Degrees, *, loss_rank: int, device_type: str) -> Mesh:
    """Creates the process groups of all axes, a collective; `loss_rank` of the pipeline axis computes the loss."""
    # torch treats meshes with the same ranks and names as equal, and its caches keep process groups of the first one.
    number = next(_numbers)

    def names(*axes: str) -> tuple[str, ...]:
        return tuple(f"{axis}.{number}" if number > 1 else axis for axis in axes)

    sizes = {axis: getattr(degrees, axis) for axis in AXES}
    build, singleton = init_device_mesh, dist.group.WORLD
    if dist.get_backend() == "gloo" and dist.get_world_size() > 1:
        singleton = _singleton_group()
        build = partial(_mesh_of_gloo, singleton=singleton)
    world = build(device_type, tuple(sizes.values()), mesh_dim_names=names(*sizes))
    coordinate = _coordinate(degrees, rank=world.get_rank())
    # A second mesh with dp_shard and cp as one axis: slicing an axis that was flattened later is deprecated in torch.
    shape = (degrees.pp, degrees.dp_replicate, degrees.dp_shard * degrees.cp, degrees.tp)
    parameters = build(device_type, shape, mesh_dim_names=names("pp", "dp_replicate", "fsdp", "tp"))
    groups = [*world.get_all_groups(), *parameters.get_all_groups()]
    experts = None
    if degrees.ep > 1:
        shape = (degrees.pp, degrees.dp_replicate, degrees.dp_shard * degrees.cp * degrees.tp // degrees.ep, degrees.ep)
        experts = build(device_type, shape, mesh_dim_names=names("pp", "dp_replicate", "expert_fsdp", "ep"))
        groups += experts.get_all_groups()
    stage = dist.group.WORLD
    if degrees.pp > 1:  # that of an axis, if it is the only one
        axes = [dim for dim, size in enumerate(parameters.shape) if dim and size > 1]
        if len(axes) > 1:
            stages = build(device_type, (degrees.pp, world.size() // degrees.pp), mesh_dim_names=names("pp", "stage"))
            groups += stages.get_all_groups()
            stage = stages.get_group(1)
        else:
            stage = parameters.get_group(axes[0] if axes else 1)
    assert stage is not None
    fsdp_axes = names("dp_replicate", "fsdp") if degrees.dp_replicate > 1 else names("fsdp")
    expert_axes = ("dp_replicate", "expert_fsdp") if degrees.dp_replicate > 1 else ("expert_fsdp",)
    mesh = Mesh(
        world=world,
        parameters=parameters[(*fsdp_axes, *names("tp"))],
        fsdp=parameters[fsdp_axes],
        tp=parameters[names("tp")],
        cp=world[names("cp")],
        pp=world[names("pp")],
        ep=experts[names("ep")] if experts is not None else None,
        expert_fsdp=experts[names(*expert_axes)] if experts is not None else None,
        stage=stage,
        is_loss_leader=coordinate["tp"] == 0 and coordinate["pp"] == loss_rank,
        groups=tuple(dict.fromkeys(group for group in groups if group not in (dist.group.WORLD, singleton))),
    )
    axes = (mesh.fsdp, mesh.cp, mesh.tp, mesh.pp, mesh.expert_fsdp, mesh.ep)
    used = [axis.get_group(axis.ndim - 1) for axis in axes if axis is not None]
    # With dp_shard or cp, FSDP all-reduces gradients over replicas itself.
    if degrees.dp_replicate > 1 and degrees.dp_shard * degrees.cp == 1:
        used.append(mesh.fsdp.get_group(0))
    for group in used:
        if group.size() > 1 and dist.get_backend(group) == "gloo":
            connect(group)
    return mesh
