"""The mesh: which slice of the data a rank reads, the axis of each process group, and the mesh as text."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from tests.marks import needs_door
from tests.support.harness import run_ranks
from torchtitan_clone.config import Degrees, load_config, resolved_degrees
from torchtitan_clone.cpu.shared_memory import streams_of
from torchtitan_clone.parallel.mesh import batch_rank, build_mesh, context_rank, describe_mesh
from torchtitan_clone.parallel.runtime import Launch, process_group


def degrees_of(world_size, **axes):
    """Returns the degrees of a mesh by short names of its axes."""
    names = {
        "pp": "pipeline_parallel_degree",
        "replicate": "data_parallel_replicate_degree",
        "cp": "context_parallel_degree",
        "tp": "tensor_parallel_degree",
    }
    argv = [f"--parallelism.{names[axis]}={degree}" for axis, degree in axes.items()]
    return resolved_degrees(load_config(argv).parallelism, world_size)


@pytest.mark.parametrize(
    ("axes", "batch_ranks", "context_ranks"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7], [0] * 8),
        ({"replicate": 2}, [0, 1, 2, 3, 4, 5, 6, 7], [0] * 8),
        ({"tp": 2}, [0, 0, 1, 1, 2, 2, 3, 3], [0] * 8),
        ({"cp": 2}, [0, 0, 1, 1, 2, 2, 3, 3], [0, 1] * 4),
        ({"pp": 2}, [0, 1, 2, 3] * 2, [0] * 8),
        ({"pp": 2, "cp": 2, "tp": 2}, [0] * 8, [0, 0, 1, 1] * 2),
        ({"replicate": 2, "cp": 2, "tp": 2}, [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1] * 2),
    ],
)
def test_ranks_that_share_rows_differ_in_pp_cp_or_tp_only(axes, batch_ranks, context_ranks):
    degrees = degrees_of(8, **axes)
    assert [batch_rank(degrees, rank=rank) for rank in range(8)] == batch_ranks
    assert [context_rank(degrees, rank=rank) for rank in range(8)] == context_ranks


def test_the_mesh_as_text():
    assert describe_mesh(degrees_of(1)) == "one rank"
    lines = describe_mesh(degrees_of(4, pp=2)).splitlines()
    assert lines == [
        "4 ranks = pp 2 x dp_shard 2",
        "  rank 0: pp 0, dp_shard 0; reads slice 0 of 2",
        "  rank 1: pp 0, dp_shard 1; reads slice 1 of 2",
        "  rank 2: pp 1, dp_shard 0; reads slice 0 of 2",
        "  rank 3: pp 1, dp_shard 1; reads slice 1 of 2",
    ]


def test_of_many_ranks_the_first_and_the_last_are_shown():
    lines = describe_mesh(degrees_of(512, tp=8)).splitlines()
    assert len(lines) == 11
    assert lines[8] == "  rank 7: dp_shard 0, tp 7; reads slice 0 of 64"
    assert lines[9:] == ["  ...", "  rank 511: dp_shard 63, tp 7; reads slice 63 of 64"]


def groups_of_rank(degrees, loss_rank):
    """Returns the ranks of each process group by the name of its axis, and whether this rank leads the loss.

    Third are the axes whose ranks exchange messages through shared memory.
    """
    with process_group(load_config([]).comm, launch=Launch.from_environment(), device=torch.device("cpu")):
        mesh = build_mesh(Degrees(**degrees), loss_rank=loss_rank, device_type="cpu")
        ranks = {group.group_name: sorted(dist.get_process_group_ranks(group)) for group in mesh.groups}
        ranks[dist.group.WORLD.group_name] = list(range(dist.get_world_size()))
        names = mesh.group_axes().items()
        found = {axis: ranks[name] for name, axes in names for axis in axes if name in ranks}
        connected = {axis for name, axes in names for axis in axes if streams_of(name)}
        mesh.close()
        return found, mesh.is_loss_leader, connected


@needs_door("cpu")
def test_process_groups_have_the_names_of_their_axes():
    answers = run_ranks(groups_of_rank, 4, dataclasses.asdict(degrees_of(4, pp=2, tp=2)), 1)
    assert [found for found, *_ in answers] == [
        {"world": [0, 1, 2, 3], "tp": [0, 1], "pp": [0, 2]},
        {"world": [0, 1, 2, 3], "tp": [0, 1], "pp": [1, 3]},
        {"world": [0, 1, 2, 3], "tp": [2, 3], "pp": [0, 2]},
        {"world": [0, 1, 2, 3], "tp": [2, 3], "pp": [1, 3]},
    ]
    assert [is_leader for _, is_leader, _ in answers] == [False, False, True, False]
    assert [connected for *_, connected in answers] == [{"tp", "pp"}] * 4


@needs_door("cpu")
def test_hsdp_has_a_group_of_replicas_and_one_of_shards():
    answers = run_ranks(groups_of_rank, 4, dataclasses.asdict(degrees_of(4, replicate=2)), 0)
    assert [(found["dp_replicate"], found["fsdp"]) for found, *_ in answers] == [
        ([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3]), ([1, 3], [2, 3])
    ]  # fmt: skip
    assert [is_leader for _, is_leader, _ in answers] == [True] * 4
    assert [connected for *_, connected in answers] == [{"fsdp"}] * 4  # FSDP sums over replicas, by gloo


def groups_of_axes(degrees):
    """Returns how many groups the axes with one rank have, and the ranks of all axes' groups."""
    launch = Launch.from_environment()
    with process_group(load_config([]).comm, launch=launch, device=torch.device("cpu")):
        mesh = build_mesh(degrees, loss_rank=0, device_type="cpu")
        count = len(dist.distributed_c10d._world.pg_map)
        for _ in range(3):  # as a run that changes its mesh
            old, mesh = mesh, build_mesh(degrees, loss_rank=0, device_type="cpu")
            old.close()
        assert len(dist.distributed_c10d._world.pg_map) == count
        groups = [mesh.pp, mesh.tp, mesh.cp, *(mesh.fsdp[axis] for axis in mesh.fsdp.mesh_dim_names), mesh.ep]
        groups = [each.get_group() for each in groups if each is not None]
        ranks = [dist.get_process_group_ranks(group) for group in groups]
        alone = {group.group_name for group in groups if group.size() == 1}
        mesh.close()
        return len(alone), ranks


def test_axes_with_one_rank_share_a_process_group():
    plain = Degrees(pp=1, dp_replicate=1, dp_shard=2, cp=1, tp=2)
    assert run_ranks(groups_of_axes, 4, plain)[0] == (1, [[0], [0, 1], [0], [0, 2]])
    experts = Degrees(pp=2, dp_replicate=1, dp_shard=2, cp=1, tp=1, ep=2)
    assert run_ranks(groups_of_axes, 4, experts)[3] == (1, [[1, 3], [3], [3], [2, 3], [2, 3]])


@needs_door("cpu")
def test_replicas_that_shard_nothing_exchange_messages():
    answers = run_ranks(groups_of_rank, 2, dataclasses.asdict(degrees_of(2, replicate=2)), 0)
    assert [connected for *_, connected in answers] == [{"world", "dp_replicate"}] * 2  # one group
