"""Saves of a run: by which replica group, with relaxed timeouts, reported to the metrics."""

from torchtitan_clone.checkpoint.manager import CheckpointManager
from torchtitan_clone.observe.metrics import MetricsWriter
from torchtitan_clone.observe.records import SAVED
from torchtitan_clone.replicas.protocol import ReplicaGroup
from torchtitan_clone.run.run_state import RunState
from torchtitan_clone.run.stopping import StopPolicy
from torchtitan_clone.run.timeouts import Timeouts


class Saver:
    """Saves the run's state; of several replica groups, one does."""

    def __init__(
        self,
        checkpoints: CheckpointManager,
        *,
        state: RunState,
        replicas: ReplicaGroup,
        metrics: MetricsWriter,
        timeouts: Timeouts,
        stop: StopPolicy,
    ) -> None:
        self._checkpoints = checkpoints
        self._state = state
        self._replicas = replicas
        self._metrics = metrics
        self._timeouts = timeouts
        self._stop = stop
        self._has_saved_last = False

    def save(self, *, wait: bool = False) -> None:
        """Starts to save the step; with `wait` returns once it is committed. A collective."""
        if self._has_saved_last and self._checkpoints.saved_step == self._state.step:
            return
        if self._checkpoints.is_saving_enabled and self._replicas.is_writer:
            with self._timeouts.relaxed():
                self._checkpoints.save(self._state.progress_with_data(), wait=wait)

    def log_finished_saves(self) -> None:
        """Logs the saves that have finished since the last call."""
        for save in self._checkpoints.reports():
            if save.error is None:
                self._stop.save_seconds = max(self._stop.save_seconds, save.seconds)
                self._metrics.log_event(
                    save.step,
                    SAVED,
                    seconds=save.seconds,
                    blocked_seconds=save.blocked_seconds,
                    staging_seconds=save.staging_seconds,
                    bytes=save.bytes,
                )
                self._metrics.ledger.book("saving", save.blocked_seconds)
                self._metrics.log_goodput(self._state.step)

    def stops_validation(self) -> bool:
        """Returns whether a validation must stop: upon a request to stop, but in the last step only for lack of time.

        Then the step is saved first, as no later start validates it. A collective.
        """
        if not self._stop.agree():
            return False
        if self._state.step < self._state.engine.plan.config.training.steps:
            return True
        if not self._has_saved_last:
            self._has_saved_last = True
            self.save_last(is_obsolete=False)
        return self._stop.is_out_of_time()

    def save_last(self, *, is_obsolete: bool) -> None:
        """Waits for saves, and saves the last step that this process trained, unless it is saved. A collective.

        A step is obsolete if other replica groups have completed the run: it must not appear among their checkpoints.
        """
        with self._timeouts.relaxed():
            self._checkpoints.finish()
        is_seed = self._state.engine.plan.config.checkpoint.create_seed_checkpoint
        if is_seed or not (is_obsolete or self._checkpoints.saved_step == self._state.step):
            self.save(wait=True)
        self.log_finished_saves()

    def close(self, *, is_exported: bool) -> bool:
        """Marks the run as complete, if its last step is saved and exported; returns if it is. A collective."""
        is_complete = self._state.step == self._state.engine.plan.config.training.steps and is_exported
        if is_complete and self._checkpoints.saved_step == self._state.step and self._replicas.is_writer:
            is_exported = self._checkpoints.mark_complete(self._state.progress)
        self._checkpoints.close()
        return is_exported
