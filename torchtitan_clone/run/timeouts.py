"""How long this process may wait for others: collective timeouts, and reports of a hang before they expire."""

from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan_clone.config.schema import Comm
from torchtitan_clone.parallel.runtime import set_timeout
from torchtitan_clone.replicas.watchdog import Heartbeat
from torchtitan_clone.run.plan import RunPlan


class Timeouts:
    """Sets the timeout of collectives, and has a hang reported shortly before it expires.

    Starts with comm.init_timeout_seconds; `expect_steady_state` changes to comm.train_timeout_seconds.
    """

    def __init__(self, plan: RunPlan, *, rank: int) -> None:
        self._options: Comm = plan.config.comm
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
        set_timeout(seconds)
