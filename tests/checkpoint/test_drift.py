"""A checkpoint that does not fit is refused, name by name, or loaded as far as it fits where that is asked for."""

import pytest
import torch

from tests.checkpoint.states import make_state, manager_of, rank_of_a_group, save, whole
from torchtitan_clone.config import ConfigError
from torchtitan_clone.testing.harness import run_ranks


def resume_changed(folder, options):
    """A rank whose state differs from the saved one in every way; what it loads, or the error."""
    with rank_of_a_group():
        state = make_state(step=0)
        state["model/new"] = torch.full((2,), 7.0)
        del state["optimizer/counts"]
        state["optimizer/flags"] = torch.zeros(8, dtype=torch.bool)
        state["optimizer/matrix/step"] = torch.zeros((), dtype=torch.float64)
        try:
            manager = manager_of(folder, state, **options)
            progress = manager.find()
            manager.load()
        except ConfigError as error:
            return str(error)
        whole = {name: tensor.full_tensor() for name, tensor in state.items() if hasattr(tensor, "full_tensor")}
        return progress.step, state | whole


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One step of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder, [3], world_size=2)
    return folder


def test_drift_is_refused_by_name_and_is_no_damage(saved):
    for error in run_ranks(resume_changed, 2, saved, {}):
        assert "missing in the checkpoint: model/new" in error
        assert "only in the checkpoint: optimizer/counts" in error
        assert "of another shape: optimizer/flags (6,) -> (8,)" in error
        assert "of another type: optimizer/matrix/step float32 -> float64" in error
        assert "checkpoint.allow_partial" in error
    assert [path.name for path in saved.iterdir()] == ["step-3"]


def test_allow_partial_loads_what_fits(saved):
    for step, state in run_ranks(resume_changed, 2, saved, {"allow_partial": True}):
        assert step == 3
        assert torch.equal(state["model/matrix"], whole("model/matrix", step=3))
        assert torch.equal(state["model/new"], torch.full((2,), 7.0))
        assert not state["optimizer/flags"].any()
        assert state["optimizer/matrix/step"] == whole("optimizer/matrix/step", step=3)
