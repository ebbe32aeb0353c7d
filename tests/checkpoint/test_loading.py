"""Loading onto another number of ranks, by other programs, and into a state that does not match."""

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import load as dcp_load

from torchtitan_clone.config import ConfigError
from torchtitan_clone.testing.checkpoint_states import (
    build_manager,
    load,
    make_state,
    rank_of_a_group,
    save,
    values_at,
)
from torchtitan_clone.testing.harness import run_ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_resharding_is_bit_identical(tmp_path, world_size):
    save(tmp_path, [1], world_size=world_size)
    for ranks in (1, 2, 3, 4):
        loaded = load(tmp_path, world_size=ranks)
        assert (loaded.step, loaded.error) == (1, None)
        assert loaded.progress.data == {"samples": 8}


def test_safetensors_and_torch_can_read_the_files(tmp_path):
    save(tmp_path, [3], world_size=2)
    folder = tmp_path / "step-3"
    shards = [load_file(folder / f"rank-{rank}.safetensors")["model/matrix"] for rank in (0, 1)]
    assert torch.equal(torch.cat(shards), values_at("model/matrix", step=3))
    state = {"model/matrix": torch.zeros(7, 5), "model/wide": torch.zeros(4, 33, dtype=torch.bfloat16)}
    dcp_load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(tensor, values_at(name, step=3))


def resume_changed(folder, options):
    """Resumes into a state that differs from the saved one in every way; what it loads, or the error."""
    with rank_of_a_group():
        state = make_state(step=0)
        state["model/new"] = torch.full((2,), 7.0)
        del state["optimizer/counts"]
        state["optimizer/flags"] = torch.zeros(8, dtype=torch.bool)
        state["optimizer/matrix/step"] = torch.zeros((), dtype=torch.float64)
        try:
            manager = build_manager(folder, state, **options)
            progress = manager.find_resume_point()
            manager.load()
        except ConfigError as error:
            return str(error)
        full = {name: tensor.full_tensor() for name, tensor in state.items() if hasattr(tensor, "full_tensor")}
        return progress.step, state | full


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One step of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder, [3], world_size=2)
    return folder


def test_a_mismatch_is_refused_by_name_and_not_treated_as_corruption(saved):
    for error in run_ranks(resume_changed, 2, saved, {}):
        assert "missing in the checkpoint: model/new" in error
        assert "only in the checkpoint: optimizer/counts" in error
        assert "different shape: optimizer/flags (6,) -> (8,)" in error
        assert "different dtype: optimizer/matrix/step float32 -> float64" in error
        assert "checkpoint.allow_partial" in error
    assert [path.name for path in saved.iterdir()] == ["step-3"]


def test_allow_partial_loads_what_matches(saved):
    for step, state in run_ranks(resume_changed, 2, saved, {"allow_partial": True}):
        assert step == 3
        assert torch.equal(state["model/matrix"], values_at("model/matrix", step=3))
        assert torch.equal(state["model/new"], torch.full((2,), 7.0))
        assert not state["optimizer/flags"].any()
        assert state["optimizer/matrix/step"] == values_at("optimizer/matrix/step", step=3)
