"""Requests to stop: a signal or a time limit asks, all ranks agree, and the trainer stops between two steps.

Also what keeps ranks from waiting for one another: timeouts of collectives, and collections of garbage at the same
steps. Imports nothing heavy, because the handlers are installed before torch is imported: a signal that arrives during
start-up must not be lost. The launcher blocks signals until then.
"""

import gc
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from torchtitan_clone.config.environment import handled_signals
from torchtitan_clone.config.schema import Comm
from torchtitan_clone.observe.logging import logger

if TYPE_CHECKING:
    from torchtitan_clone.run.plan import RunPlan

REQUEUE_EXIT_CODE = 75
"""Exit code of a run that was stopped with steps left, if `preemption.requeue` is set: a temporary failure."""
_EXIT_SHARE = 0.8
"""Share of the deadline after which no upload is waited for."""


class StopBeforeTraining(BaseException):
    """The run was asked to stop before there was anything to save."""


class StepInterrupted(Exception):
    """The deadline passed within a step: nothing but gradients has changed, and the step is trained again later."""


_ENDED_RANK = (
    "connection (closed|reset|was (closed|likely closed))|has ended during a collective|broken pipe|socket closed|"
    "remote process exited|failed to recv, got 0 bytes"
)
_ENDED_WORKER = "dataloader worker .*(exited unexpectedly|is killed)"


def explain_ended_process(error: BaseException, *, is_alone: bool) -> str:
    """Returns that another process of the run has ended and what to do, "" if something else raised this error.

    A rank that `is_alone` has no others: its connections are to other programs.
    """
    seen: list[BaseException] = []
    while error not in seen:
        seen.append(error)
        text = str(error).strip().split("\n")[0]
        if isinstance(error, RuntimeError | OSError) and re.search(_ENDED_WORKER, text, re.IGNORECASE):
            remedy = "if it was killed as memory is short, lower data.num_workers; rerun the same command to resume"
            return f"a process that reads data has ended ({text}); {remedy}"
        if not is_alone and isinstance(error, RuntimeError | OSError) and re.search(_ENDED_RANK, text, re.IGNORECASE):
            cause = "its output says why, or the log of the kernel (dmesg) if it was killed"
            return f"another rank has ended ({text}); {cause}; rerun the same command to resume"
        error = error.__cause__ or error.__context__ or error
    return ""


class StopRequest:
    """What asked this process to stop, and when. Only the first request counts."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Name of a signal or an option."""
        self._started = time.monotonic()
        self._asked = self._started
        self._raises_at_once = False

    def install(self) -> None:
        """Handles the stop signals of this process, including those blocked so far; main thread only."""
        numbers = handled_signals()
        for number in numbers:
            signal.signal(number, self._record)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    @contextmanager
    def raising_at_once(self) -> Iterator[None]:
        """Inside, a signal raises StopBeforeTraining, even one received earlier; outside it is only recorded."""
        self._raises_at_once = True
        try:
            if self.reason is not None:
                raise StopBeforeTraining(self.reason)
            yield
        finally:
            self._raises_at_once = False

    @property
    def age_seconds(self) -> float:
        """Seconds since this object was made, at the start of the process."""
        return time.monotonic() - self._started

    def is_wanted(self, *, max_seconds: float | None, seconds_needed: float) -> bool:
        """Returns whether a request was received, or max_seconds will have passed in seconds_needed from now."""
        if max_seconds is not None and self.age_seconds + seconds_needed >= max_seconds:
            self._ask("training.max_seconds")
        return self.reason is not None

    @property
    def seconds_since(self) -> float:
        """Seconds since the request; 0 without one."""
        return 0.0 if self.reason is None else time.monotonic() - self._asked

    def _ask(self, reason: str) -> None:
        if self.reason is None:
            self.reason, self._asked = reason, time.monotonic()

    def _record(self, number: int, _frame: FrameType | None) -> None:
        self._ask(signal.Signals(number).name)
        if self._raises_at_once:
            self._raises_at_once = False
            raise StopBeforeTraining(self.reason)


class StopPolicy:
    """Decides with all ranks of this replica group whether to stop."""

    def __init__(
        self,
        request: StopRequest,
        *,
        max_seconds: float | None,
        deadline_seconds: float | None,
        sum_over_ranks: Callable[[list[float]], list[float]],
    ) -> None:
        self._request = request
        self._max_seconds = max_seconds
        self._deadline_seconds = deadline_seconds
        self._sum_over_ranks = sum_over_ranks
        self.step_seconds = 0.0
        self.save_seconds = 0.0
        """Of the longest save so far."""

    @property
    def reason(self) -> str:
        """What asked the run to stop."""
        return self._request.reason or "a signal to another rank"

    @property
    def process_age_seconds(self) -> float:
        """Seconds since the process started."""
        return self._request.age_seconds

    def is_wanted_here(self) -> bool:
        """Returns this rank's own view, which leaves time for one more step and its save."""
        seconds_needed = self.step_seconds + self.save_seconds
        return self._request.is_wanted(max_seconds=self._max_seconds, seconds_needed=seconds_needed)

    def agree(self) -> bool:
        """Returns whether any rank wants to stop; a collective."""
        return any(self._sum_over_ranks([self.is_wanted_here()]))

    def is_out_of_time(self) -> bool:
        """Returns whether on any rank half of the deadline has passed, or max_seconds but for a save; a collective."""
        ends = self._max_seconds is not None and self._request.age_seconds + self.save_seconds >= self._max_seconds
        return any(self._sum_over_ranks([ends or self._is_past_deadline()]))

    def must_exit(self) -> bool:
        """Returns this rank's own view of whether what is left of the deadline, or of max_seconds, is for the exit."""
        ends = self._max_seconds is not None and self._request.age_seconds >= self._max_seconds
        return ends or self._is_past_deadline(share=_EXIT_SHARE)

    def check_deadline(self) -> None:
        """Raises StepInterrupted on all ranks once half of the deadline has passed on one. A collective."""
        if self._deadline_seconds is not None and any(self._sum_over_ranks([self._is_past_deadline()])):
            raise StepInterrupted

    def _is_past_deadline(self, *, share: float = 0.5) -> bool:
        return self._deadline_seconds is not None and self._request.seconds_since > share * self._deadline_seconds


class Timeouts:
    """Sets the timeout of collectives, and has a hang reported shortly before it expires.

    Starts with comm.init_timeout_seconds; `expect_steady_state` changes to comm.train_timeout_seconds.
    """

    def __init__(self, plan: "RunPlan", *, rank: int) -> None:
        from torchtitan_clone.parallel.runtime import set_timeout  # these import torch
        from torchtitan_clone.replicas.watchdog import Heartbeat

        self._options: Comm = plan.config.comm
        self._set_timeout = set_timeout
        self._heartbeat = Heartbeat(folder=plan.output_folder / self._options.save_traces_folder, rank=rank)
        self._seconds = 0
        self.expect_slow_steps()

    def beat(self) -> None:
        """Reports progress; cheap enough for every micro-batch."""
        self._heartbeat.beat(timeout_seconds=self._seconds)

    def expect_slow_steps(self) -> None:
        """Allows for compilation, connecting and reading: before the first step of a phase."""
        self._set(self._options.init_timeout_seconds)

    def expect_steady_state(self) -> None:
        """Applies the timeout of training, in which nothing slow remains."""
        self._set(self._options.train_timeout_seconds)

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Inside, some ranks may take much longer than others."""
        before = self._seconds
        self.expect_slow_steps()
        self.beat()
        yield
        self._set(before)
        self.beat()

    def close(self) -> None:
        self._heartbeat.close()

    def _set(self, seconds: int) -> None:
        self._seconds = seconds
        self._set_timeout(seconds)


@contextmanager
def importing() -> Iterator[None]:
    """Imports modules without collections, and excludes them from later ones: torch has a million objects."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class GCControl:
    """Context manager that collects on entry and then every gc_freq steps, and not in between.

    The model is not excluded, since another one may replace it: 1 ms for each 4,000 objects, of which 80 blocks have
    50,000.
    """

    def __init__(self, gc_freq: int) -> None:
        self._gc_freq = gc_freq

    def __enter__(self) -> "GCControl":
        gc.disable()
        self._collect()
        return self

    def __exit__(self, *_: object) -> None:
        gc.enable()

    def maybe_collect(self, step: int) -> None:
        if step % self._gc_freq == 0:
            self._collect()

    def _collect(self) -> None:
        start = time.perf_counter()
        found = gc.collect()
        logger.info("garbage collection: %.3f s, %s objects", time.perf_counter() - start, f"{found:,}")
