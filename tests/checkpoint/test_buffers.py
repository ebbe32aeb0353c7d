"""Persistent buffers of any dtype, on any mesh: tests of load.py, format.py and save.py."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.checkpoint_states import build_manager, progress_at, rank_of_a_group, read_tensors
from tests.support.harness import run_ranks

BUFFERS = {
    "model/layers.0.moe.expert_bias": torch.tensor([0.5, -1.25, 3.0]),
    "model/layers.0.moe.is_used": torch.tensor([True, False, True]),
    "model/layers.1.moe.expert_bias": torch.tensor([7.0, 8.0, -9.0]),
    "model/layers.1.moe.tokens_per_expert": torch.tensor([2**40 + 1, 0, 5]),
    "model/num_updates": torch.tensor(2**33 + 7),
    "model/is_warm": torch.tensor(True),
    "model/scale": torch.tensor(1.5),
    "model/half": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    "model/empty": torch.zeros(0, 2),
}
"""Those of a layer are only on the pipeline ranks that hold it."""
WEIGHTS = {
    "model/layers.0.weight": torch.arange(20.0).reshape(5, 4),
    "model/layers.1.weight": -torch.arange(20.0).reshape(5, 4),
}
OPTIMIZER = {"optimizer/layers.0.weight/exp_avg": torch.full((5, 4), 2.0)}
TENSORS = BUFFERS | WEIGHTS | OPTIMIZER
MESHES = {1: (1, 1), 2: (2, 1), 4: (2, 2)}
"""Degrees of pipeline and data parallelism, by the number of ranks."""


def make_state(*, is_filled):
    """Returns the tensors of this rank's pipeline stage: weights sharded over data parallelism, buffers plain."""
    mesh = init_device_mesh("cpu", MESHES[dist.get_world_size()], mesh_dim_names=("pp", "dp"))
    state = {}
    for name, values in TENSORS.items():
        layer = next((layer for layer in (0, 1) if f"layers.{layer}." in name), None)
        if layer is not None and layer % mesh["pp"].size() != mesh["pp"].get_local_rank():
            continue
        values = values.clone() if is_filled else torch.zeros_like(values)
        state[name] = values if name in BUFFERS else distribute_tensor(values, mesh["dp"], [Shard(0)])
    return state


def save_state(folder, options):
    """Saves one step, and marks the run as complete; the error, if any."""
    with rank_of_a_group():
        manager = build_manager(folder, make_state(is_filled=True), **options)
        manager.save(progress_at(1), wait=True)
        manager.mark_complete(progress_at(1))
        errors = [report.error for report in manager.reports()]
        manager.close()
        return errors


def load_state(folder):
    """Loads into a state of zeros; returns full tensors of this rank."""
    with rank_of_a_group():
        state = make_state(is_filled=False)
        manager = build_manager(folder, state)
        manager.find_resume_point()
        manager.load()
        return {
            name: tensor.redistribute(placements=[Replicate()]).to_local() if name not in BUFFERS else tensor
            for name, tensor in state.items()
        }


def assert_equal(found, expected):
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns the folder of one step of four ranks, with an export of its weights."""
    folder = tmp_path_factory.mktemp("saved")
    options = {"last_save_model_only": True, "export_dtype": "bfloat16"}
    assert run_ranks(save_state, 4, folder, options)[0] == [None, None]
    return folder


@pytest.mark.parametrize(
    ("world_size", "mode"),
    [(1, "disabled"), (2, "disabled"), (4, "disabled"), (4, "async"), (4, "async_with_pinned_mem")],
)
def test_buffers_are_bit_identical_on_any_mesh_in_any_mode(tmp_path, world_size, mode):
    run_ranks(save_state, world_size, tmp_path, {"async_mode": mode})
    for ranks in (4, 2, 1):
        merged = {}
        for state in run_ranks(load_state, ranks, tmp_path):
            assert_equal(state, {name: TENSORS[name] for name in state})
            merged |= state
        assert_equal(merged, TENSORS)


def test_every_buffer_is_written_once(saved):
    index = json.loads((saved / "step-1" / "index.json").read_text())["tensors"]
    assert {name: len(index[name]["parts"]) for name in BUFFERS} == dict.fromkeys(BUFFERS, 1)
    assert {name: len(index[name]["parts"]) for name in WEIGHTS} == dict.fromkeys(WEIGHTS, 2)
    assert_equal(read_tensors(saved / "step-1", TENSORS), TENSORS)


def test_an_export_keeps_the_types_of_router_biases_integers_and_booleans(saved):
    exported = read_tensors(saved / "model_only" / "step-1")
    expected = {
        name: tensor.to(torch.bfloat16) if tensor.dtype.is_floating_point and "expert_bias" not in name else tensor
        for name, tensor in (BUFFERS | WEIGHTS).items()
    }
    assert_equal(exported, expected)
