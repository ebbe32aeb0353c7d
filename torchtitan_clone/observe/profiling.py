"""Chrome traces of the host and the device, and snapshots of CUDA memory, as files of one rank at one step."""

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import profiler

from torchtitan_clone import torch_compat
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Profiling
from torchtitan_clone.observe.logging import logger

MAX_MEMORY_EVENTS = 100_000
"""Allocations and frees kept for a snapshot; older ones are forgotten."""


class _Tracer:
    """torch.profiler; a trace of `profiler_active` steps ends every profile_freq steps after the start."""

    def __init__(self, profiling: Profiling, *, folder: Path, rank: int, resume_step: int) -> None:
        self.folder, self.rank, self.step_number = folder, rank, resume_step
        warmup, active = profiling.profiler_warmup, profiling.profiler_active
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

    def _export(self, profile: Any) -> None:
        file = _file(self.folder, step=self.step_number, name=f"rank{self.rank}_trace.json")
        start = time.perf_counter()
        profile.export_chrome_trace(str(file))
        logger.info("trace: %s (%.1f s)", file, time.perf_counter() - start)


class _MemoryRecorder:
    """The history of the CUDA allocator, written every profile_freq steps and when memory runs out."""

    def __init__(self, profiling: Profiling, *, folder: Path, rank: int, resume_step: int) -> None:
        self.folder, self.rank, self.freq = folder, rank, profiling.profile_freq
        self.resume_step = self.step_number = resume_step

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

    def _dump(self, what: str) -> None:
        file = _file(self.folder, step=self.step_number, name=f"rank{self.rank}_{what}.pickle")
        torch_compat.dump_memory_snapshot(str(file))
        logger.info("memory snapshot: %s", file)


class Profiler:
    """Calls what is enabled, which may be nothing. As a context manager it starts, stops, and sees memory run out."""

    def __init__(self, parts: list[_Tracer | _MemoryRecorder]) -> None:
        self.parts = parts

    def start(self) -> None:
        """Begin to record."""
        for part in self.parts:
            part.start()

    def step(self) -> None:
        """A training step has ended."""
        for part in self.parts:
            part.step()

    def stop(self, error: BaseException | None = None) -> None:
        """End the recording; `error` is what ended the training, if anything."""
        for part in self.parts:
            part.stop(error)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(error)


def build_profiler(profiling: Profiling, *, folder: Path, rank: int, device_type: str, resume_step: int) -> Profiler:
    """What [profiling] asks for, below the run's `folder`; steps are counted from resume_step."""
    parts: list[_Tracer | _MemoryRecorder] = []
    if profiling.enable_profiling:
        _check_schedule(profiling)
        traces = folder / profiling.save_traces_folder
        parts.append(_Tracer(profiling, folder=traces, rank=rank, resume_step=resume_step))
    if profiling.enable_memory_snapshot:
        if device_type != "cuda":
            raise ConfigError(
                "profiling.enable_memory_snapshot: snapshots are of CUDA memory, and this run is on the "
                f"{device_type}; set it to false"
            )
        snapshots = folder / profiling.save_memory_snapshot_folder
        parts.append(_MemoryRecorder(profiling, folder=snapshots, rank=rank, resume_step=resume_step))
    return Profiler(parts)


def _check_schedule(profiling: Profiling) -> None:
    needed = profiling.profiler_warmup + profiling.profiler_active
    if profiling.profile_freq < needed:
        raise ConfigError(
            f"profiling.profile_freq = {profiling.profile_freq}: shorter than profiler_warmup "
            f"{profiling.profiler_warmup} + profiler_active {profiling.profiler_active}; set it to {needed} or more"
        )


def _file(folder: Path, *, step: int, name: str) -> Path:
    below = folder / f"step-{step}"
    below.mkdir(parents=True, exist_ok=True)
    return below / name
