"""What is saved is what is loaded, on any number of ranks, in any mode, and by other programs."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import load as dcp_load

from tests.checkpoint.states import SHAPES, load, save, whole
from torchtitan_clone.checkpoint.loading import read_tensors

MODES = ("disabled", "async", "async_with_pinned_mem")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_resharding_is_bit_identical(tmp_path, world_size):
    save(tmp_path, [1], world_size=world_size)
    for ranks in (1, 2, 3, 4):
        loaded = load(tmp_path, world_size=ranks)
        assert (loaded.step, loaded.error) == (1, None)
        assert loaded.progress.data == {"samples": 8}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_writes_the_same_files(tmp_path, mode):
    (report,) = save(tmp_path, [3], world_size=2, async_mode=mode)
    assert report["error"] is None
    assert report["step"] == 3
    assert report["bytes"] > 1000
    assert report["blocked_seconds"] > 0
    names = ["config.toml", "index.json", "manifest.json", "progress.json", "rank-0.safetensors", "rank-1.safetensors"]
    assert sorted(path.name for path in (tmp_path / "step-3").iterdir()) == [*names, "versions.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3"]
    for name, tensor in read_tensors(tmp_path / "step-3", SHAPES).items():
        assert torch.equal(tensor, whole(name, step=3)), name
        assert tensor.dtype == SHAPES[name][1]


def test_other_programs_can_read_it(tmp_path):
    save(tmp_path, [3], world_size=2)
    folder = tmp_path / "step-3"
    parts = [load_file(folder / f"rank-{rank}.safetensors")["model/matrix"] for rank in (0, 1)]
    assert torch.equal(torch.cat(parts), whole("model/matrix", step=3))
    state = {"model/matrix": torch.zeros(7, 5), "model/wide": torch.zeros(4, 33, dtype=torch.bfloat16)}
    dcp_load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(tensor, whole(name, step=3))
    assert json.loads((folder / "versions.json").read_text())["ranks"] == 2


def test_the_newest_step_is_taken(tmp_path):
    save(tmp_path, [1, 5, 10], world_size=2)
    assert load(tmp_path, world_size=2).step == 10
