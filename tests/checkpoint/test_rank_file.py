"""Tests of rank_file.py and staging.py: every mode writes the same files, also without memory for staging."""

import resource

import pytest
import torch

from tests.support.checkpoint_states import (
    SHAPES,
    build_manager,
    load,
    log_lines,
    make_state,
    progress_at,
    rank_of_a_group,
    read_tensors,
    save,
    values_at,
)
from tests.support.harness import run_ranks

MODES = ("disabled", "async", "async_with_pinned_mem")


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_writes_the_same_files(tmp_path, mode):
    (report,) = save(tmp_path, [3], world_size=2, async_mode=mode)
    assert report.error is None
    assert report.step == 3
    assert report.bytes > 1000
    assert report.blocked_seconds > 0
    names = ["config.toml", "index.json", "manifest.json", "progress.json", "rank-0.safetensors", "rank-1.safetensors"]
    assert sorted(path.name for path in (tmp_path / "step-3").iterdir()) == [*names, "versions.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3"]
    for name, tensor in read_tensors(tmp_path / "step-3", SHAPES).items():
        assert torch.equal(tensor, values_at(name, step=3)), name
        assert tensor.dtype == SHAPES[name][1]


def save_with_little_memory(folder):
    """Saves in a process that cannot allocate a staging buffer; its log."""
    lines = log_lines()
    with rank_of_a_group():
        state = make_state(step=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
        manager = build_manager(folder, state, async_mode="async_with_pinned_mem", writer_timeout_seconds=0.5)
        manager.prepare()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        manager.save(progress_at(1), wait=True)
        return "\n".join(lines)


def test_without_memory_for_staging_training_waits_for_the_save(tmp_path):
    (log,) = run_ranks(save_with_little_memory, 1, tmp_path)
    assert "of memory for staging" in log
    assert load(tmp_path).step == 1
