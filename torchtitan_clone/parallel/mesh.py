"""The device mesh: which rank does what.

One mesh with five named axes, of which any may have size 1, and the groupings of them that the rest of the program
asks for. Built once, because a DeviceMesh that is sliced again in another place makes process groups again.
"""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_clone.config.checks import Degrees

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The mesh and its views.

    - `fsdp`: the axes over which FSDP2 shards (and for HSDP replicates) weights;
    - `batch_rank` of `batch_size` ranks tells which rows of a global batch this rank reads;
    - `is_batch_leader` holds on one of the ranks that read the same rows.
    """

    world: DeviceMesh
    fsdp: DeviceMesh
    batch_rank: int
    batch_size: int
    is_batch_leader: bool


def build_mesh(degrees: Degrees, *, device_type: str) -> Mesh:
    """Makes the process groups of all axes; every rank must call it, after the default process group exists."""
    sizes = tuple(getattr(degrees, axis) for axis in AXES)
    world = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
    coordinate = dict(zip(AXES, world.get_coordinate() or (), strict=True))
    fsdp_axes = ("dp_replicate", "dp_shard") if degrees.dp_replicate > 1 else ("dp_shard",)
    return Mesh(
        world=world,
        fsdp=world[fsdp_axes],
        batch_rank=coordinate["dp_replicate"] * degrees.dp_shard + coordinate["dp_shard"],
        batch_size=degrees.dp_replicate * degrees.dp_shard,
        is_batch_leader=coordinate["pp"] == coordinate["cp"] == coordinate["tp"] == 0,
    )
