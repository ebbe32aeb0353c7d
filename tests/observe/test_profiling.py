"""Traces and memory snapshots at the configured steps, and peak memory."""

import json

import pytest
import torch

from torchtitan_clone.config.schema import Profiling
from torchtitan_clone.observe.profiling import Profiler, peak_memory_gib


def train(profiler, steps: int) -> None:
    weight = torch.ones(8, 8)
    for _ in range(steps):
        torch.mm(weight, weight)
        profiler.step()


def test_trace_every_profile_freq_steps(tmp_path):
    profiling = Profiling(enable_profiling=True, profile_freq=4, profiler_warmup=1)
    with Profiler(profiling, folder=tmp_path, rank=3, resume_step=100) as profiler:
        train(profiler, 10)
    traces = sorted((tmp_path / "profile_traces").rglob("*"))
    assert [str(file.relative_to(tmp_path / "profile_traces")) for file in traces if file.is_file()] == [
        "step-104/rank3_trace.json",
        "step-108/rank3_trace.json",
    ]
    for file in filter(lambda path: path.is_file(), traces):
        events = json.loads(file.read_text())["traceEvents"]
        assert sum(event["name"] == "aten::mm" for event in events) == 1


def test_disabled_profiler_writes_nothing(tmp_path):
    with Profiler(Profiling(), folder=tmp_path, rank=0, resume_step=0) as profiler:
        train(profiler, 20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records the CUDA allocator")
def test_memory_snapshots_at_their_step_and_on_out_of_memory(tmp_path):
    profiling = Profiling(enable_memory_snapshot=True, profile_freq=2)
    profiler = Profiler(profiling, folder=tmp_path, rank=0, resume_step=0)
    with pytest.raises(torch.OutOfMemoryError), profiler:  # noqa: PT012
        train(profiler, 2)
        torch.empty(2**50, device="cuda")
    snapshots = sorted(file.name for file in (tmp_path / "memory_snapshot" / "step-2").iterdir())
    assert snapshots == ["rank0_memory.pickle", "rank0_out_of_memory.pickle"]


def test_peak_memory_of_the_process_includes_a_freed_buffer():
    buffer = bytearray(2**28)
    buffer[:: 2**12] = b"x" * len(range(0, 2**28, 2**12))  # touches every page
    del buffer
    assert peak_memory_gib(torch.device("cpu")) > 0.25


@pytest.mark.parametrize("steps", [4, 5])
def test_the_end_of_a_run_writes_no_trace_without_a_step(tmp_path, steps):
    profiling = Profiling(enable_profiling=True, profile_freq=2, profiler_warmup=0)
    with Profiler(profiling, folder=tmp_path, rank=0, resume_step=0) as profiler:
        train(profiler, steps)
    assert sorted(file.parent.name for file in tmp_path.rglob("*.json")) == ["step-2", "step-4"]


def test_a_trace_that_cannot_be_written_does_not_end_training(tmp_path, caplog):
    (tmp_path / "profile_traces").write_text("")
    profiling = Profiling(enable_profiling=True, profile_freq=2, profiler_warmup=0)
    with Profiler(profiling, folder=tmp_path, rank=0, resume_step=0) as profiler:
        train(profiler, 4)
    assert caplog.text.count("traces cannot be written") == 2
