"""Chrome traces of host and device, and CUDA memory snapshots, written per rank and step."""

import time
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import profiler

from torchtitan_clone import torch_compat
from torchtitan_clone.config.schema import Profiling
from torchtitan_clone.observe.logging import logger

MAX_MEMORY_EVENTS = 100_000
"""Number of allocator events in a snapshot; older ones are dropped."""


class _Tracer:
    """Runs torch.profiler; writes a trace of profiler_active steps every profile_freq steps."""

    def __init__(self, profiling: Profiling, *, folder: Path, rank: int, resume_step: int) -> None:
        self.folder = folder
        self.rank = rank
        self.step_number = resume_step
        warmup = profiling.profiler_warmup
        active = profiling.profiler_active
        self.profile = profiler.profile(
            schedule=profiler.schedule(wait=profiling.profile_freq - warmup - active, warmup=warmup, active=active),
            on_trace_ready=self._export,
        )

    def start(self) -> None:
        self.profile.start()

    def step(self) -> None:
        self.step_number += 1
        self.profile.step()

    def stop(self, error: BaseException | None) -> None:
        self.profile.stop()

    def _export(self, profile: profiler.profile) -> None:
        file = _make_file(self.folder, step=self.step_number, name=f"rank{self.rank}_trace.json")
        start = time.perf_counter()
        profile.export_chrome_trace(str(file))
        logger.info("wrote trace %s in %.1f s", file, time.perf_counter() - start)


class _MemoryRecorder:
    """Records CUDA allocator events; writes a snapshot every profile_freq steps and on out-of-memory errors."""

    def __init__(self, profiling: Profiling, *, folder: Path, rank: int, resume_step: int) -> None:
        self.folder = folder
        self.rank = rank
        self.freq = profiling.profile_freq
        self.resume_step = resume_step
        self.step_number = resume_step

    def start(self) -> None:
        torch_compat.record_memory_history(max_entries=MAX_MEMORY_EVENTS)

    def step(self) -> None:
        self.step_number += 1
        if (self.step_number - self.resume_step) % self.freq == 0:
            self._dump("memory")

    def stop(self, error: BaseException | None) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self._dump("out_of_memory")
        torch_compat.stop_memory_history()

    def _dump(self, name: str) -> None:
        file = _make_file(self.folder, step=self.step_number, name=f"rank{self.rank}_{name}.pickle")
        torch_compat.dump_memory_snapshot(str(file))
        logger.info("wrote memory snapshot %s", file)


class Profiler:
    """Runs the enabled recorders, possibly none. As a context manager it starts and stops them."""

    def __init__(self, recorders: list[_Tracer | _MemoryRecorder]) -> None:
        self._recorders = recorders

    def start(self) -> None:
        """Starts recording."""
        for recorder in self._recorders:
            recorder.start()

    def step(self) -> None:
        """Marks the end of a training step."""
        for recorder in self._recorders:
            recorder.step()

    def stop(self, error: BaseException | None = None) -> None:
        """Stops recording; `error` is the exception that ended training, if any."""
        for recorder in self._recorders:
            recorder.stop(error)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(error)


def build_profiler(profiling: Profiling, *, folder: Path, rank: int, resume_step: int) -> Profiler:
    """Builds the recorders that [profiling] enables, writing into the run's `folder`; counts steps from resume_step.

    config/checks.py validates the schedule and that memory snapshots run on CUDA.
    """
    recorders: list[_Tracer | _MemoryRecorder] = []
    if profiling.enable_profiling:
        traces = folder / profiling.save_traces_folder
        recorders.append(_Tracer(profiling, folder=traces, rank=rank, resume_step=resume_step))
    if profiling.enable_memory_snapshot:
        snapshots = folder / profiling.save_memory_snapshot_folder
        recorders.append(_MemoryRecorder(profiling, folder=snapshots, rank=rank, resume_step=resume_step))
    return Profiler(recorders)


def _make_file(folder: Path, *, step: int, name: str) -> Path:
    """Creates the folder of a step and returns the path of a file in it."""
    step_folder = folder / f"step-{step}"
    step_folder.mkdir(parents=True, exist_ok=True)
    return step_folder / name
