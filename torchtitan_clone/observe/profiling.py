"""Peak memory, Chrome traces of host and device, and CUDA memory snapshots, written per rank and step."""

import resource
import time
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import profiler

from torchtitan_clone import torch_compat
from torchtitan_clone.config.schema import Profiling
from torchtitan_clone.observe.logging import logger
from torchtitan_clone.observe.records import ignore_disk_errors

MAX_MEMORY_EVENTS = 100_000


def peak_memory_gib(device: torch.device) -> float:
    """Returns the peak memory so far in GiB: reserved by the CUDA allocator, or resident size of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Profiler:
    """Context manager that writes what [profiling] enables into the run's `folder`, counting steps from resume_step."""

    def __init__(self, profiling: Profiling, *, folder: Path, rank: int, resume_step: int) -> None:
        self._profiling = profiling
        self._folder = folder
        self._rank = rank
        self._resume_step = resume_step
        self._step = resume_step
        self._profile = self._build_profile() if profiling.enable_profiling else None

    def _build_profile(self) -> profiler.profile:
        warmup = self._profiling.profiler_warmup
        active = self._profiling.profiler_active
        wait = self._profiling.profile_freq - warmup - active
        schedule = profiler.schedule(wait=wait, warmup=warmup, active=active)
        return profiler.profile(
            schedule=schedule, on_trace_ready=partial(ignore_disk_errors, self._write_trace, what="traces")
        )

    def __enter__(self) -> Self:
        if self._profile:
            self._profile.start()
        if self._profiling.enable_memory_snapshot:
            torch_compat.record_memory_history(max_entries=MAX_MEMORY_EVENTS)
        return self

    def step(self) -> None:
        self._step += 1
        if self._profile:
            self._profile.step()
        is_due = (self._step - self._resume_step) % self._profiling.profile_freq == 0
        if self._profiling.enable_memory_snapshot and is_due:
            ignore_disk_errors(self._write_snapshot, "memory", what="memory snapshots")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._profile:
            freq, active = self._profiling.profile_freq, self._profiling.profiler_active
            if error is None and (self._step - self._resume_step) % freq <= freq - active:
                self._profile.on_trace_ready = None  # has recorded no step since the last trace
            self._profile.stop()
        if self._profiling.enable_memory_snapshot:
            if isinstance(error, torch.OutOfMemoryError):
                ignore_disk_errors(self._write_snapshot, "out_of_memory", what="memory snapshots")
            torch_compat.stop_memory_history()

    def _write_trace(self, profile: profiler.profile) -> None:
        file = self._make_file(self._profiling.save_traces_folder, name="trace.json")
        start = time.perf_counter()
        profile.export_chrome_trace(str(file))
        logger.info("wrote trace %s in %.1f s", file, time.perf_counter() - start)

    def _write_snapshot(self, name: str) -> None:
        file = self._make_file(self._profiling.save_memory_snapshot_folder, name=f"{name}.pickle")
        torch_compat.dump_memory_snapshot(str(file))
        logger.info("wrote memory snapshot %s", file)

    def _make_file(self, folder: str, *, name: str) -> Path:
        step_folder = self._folder / folder / f"step-{self._step}"
        step_folder.mkdir(parents=True, exist_ok=True)
        return step_folder / f"rank{self._rank}_{name}"
