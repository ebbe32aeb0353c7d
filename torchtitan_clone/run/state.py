"""The state of a run: what checkpoints save and replica groups recover, the save of the last step, and the outcome."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint.manager import OUT_OF_TIME, CheckpointManager
from torchtitan_clone.checkpoint.progress import Progress, parse_progress
from torchtitan_clone.data import Loader
from torchtitan_clone.documents import DocumentError, Value
from torchtitan_clone.observe.by_source import Totals
from torchtitan_clone.observe.metrics import MetricsWriter
from torchtitan_clone.observe.records import SAVED
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.replicas.protocol import RecoveryState, ReplicaGroup, init_outer_weights
from torchtitan_clone.run.engine import Engine
from torchtitan_clone.run.spikes import SpikeWindow
from torchtitan_clone.run.stopping import StopPolicy, Timeouts

logger = logging.getLogger("torchtitan_clone")


class TrainingError(Exception):
    """Training cannot continue; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one attempt at a step, equal on all ranks but for the times."""

    step: int
    loss: float
    grad_norm: float
    auxiliary: dict[str, float]
    loads: Mapping[str, Tensor]
    """Tokens [E] of each expert by router, fp64."""
    by_source: Mapping[str, Totals]
    data_seconds: float
    stop: bool
    committed: bool
    """False if the attempt has no effect, because another replica group failed in it."""
    save_overdue: bool


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """What is left of a run when its process ends."""

    step: int
    last_step: int
    is_seed_checkpoint: bool
    is_saving_enabled: bool
    is_writer: bool
    """Whether this replica group is the one that saves."""
    is_obsolete: bool
    """Whether other replica groups completed the run meanwhile."""
    saved_step: int
    """The latest step of which this process committed a checkpoint, or from which it resumed."""
    is_exported: bool
    """False if the export of the last step was asked for and failed."""
    stop_reason: str
    goodput: str
    next_steps: Sequence[str] = ()
    """Lines that say where the results are, and how to go on."""

    @property
    def is_saved(self) -> bool:
        """Whether a checkpoint of the last trained step is committed."""
        return self.is_saving_enabled and self.saved_step == self.step

    def report(self) -> None:
        """Logs the end of the run. TrainingError where the last step could not be saved or exported."""
        step, last_step = self.step, self.last_step
        if self.is_obsolete:
            logger.info(
                "other replica groups have completed the run; this one ends after step %d of %d", step, last_step
            )
            return
        if self.is_saving_enabled and self.is_writer and not self.is_saved:
            raise TrainingError(
                f"step {step} of {last_step} was trained but could not be saved, see above; the latest checkpoint is "
                f"that of step {self.saved_step}. Remove the cause and rerun the same command"
            )
        if step == last_step and not self.is_exported:
            raise TrainingError(f"step {step} was trained, but its weights could not be exported, see above")
        if self.is_seed_checkpoint:
            logger.info("the initial state is saved as step %d", step)
        elif step == last_step:
            logger.info("training is complete: step %d of %d", step, last_step)
            for line in (self.goodput, *self.next_steps):
                logger.info("%s", line)
        elif step == 0:
            logger.info("stopped by %s: no step is trained yet; rerun the same command to start", self.stop_reason)
        elif self.is_saved:
            logger.info("stopped by %s: step %d is saved, rerun the same command to resume", self.stop_reason, step)
        elif self.is_saving_enabled:
            logger.info(
                "stopped by %s after step %d: another replica group continues or saves it; rerun the same command to "
                "rejoin",
                self.stop_reason,
                step,
            )
        else:
            logger.warning("stopped by %s after step %d, which is not saved", self.stop_reason, step)


class RunState:
    """The state of a run. `engine` and `loader` are replaced when the phase changes."""

    def __init__(self, progress: Progress, *, engine: Engine, loader: Loader, outer_weights: dict[str, Tensor]) -> None:
        self.progress = progress
        self.engine = engine
        self.loader = loader
        self.outer_weights = outer_weights
        self._skipped_in_a_row = 0
        self._spikes = SpikeWindow()
        self.rewind_target: int | None = None
        """Step that the run goes back to if the next one is the last of too many spikes."""
        self.must_go_back = False
        """Whether it was."""
        self.continue_from(progress)
        self._left_at: int | None = None
        self.was_recovered = False
        """Whether the state was received from another replica group since this was last set to False."""

    @property
    def step(self) -> int:
        """Number of the last step that counts; 0 before the first."""
        return self.progress.step

    def tensors(self) -> dict[str, Tensor]:
        """Returns all state tensors by name: the tensors themselves, not copies."""
        return self.engine.state_tensors() | self.outer_weights

    def resume_at(self, progress: Progress | None) -> None:
        """Continues from another checkpoint than at first, which was deleted before it was loaded."""
        if progress is not None and progress.step != self.step:
            self.continue_from(progress)
            if progress.data:
                self.loader.load_state_dict(progress.data, allow_change=True)  # it was checked with the first

    def continue_from(self, progress: Progress) -> None:
        """Continues from a progress, at the present position in the data."""
        self.progress = progress
        self._spikes = SpikeWindow.from_json(progress.spikes)
        self.rewind_target, self.must_go_back = None, False
        if progress.rewinds and (mixture := self.engine.plan.mixture) is not None:
            mixture.pass_over((rewind.first_batch, rewind.last_batch) for rewind in progress.rewinds)

    @property
    def last_known_step(self) -> int:
        """Last step that counts of those that this replica group has seen: the others may have gone back without it."""
        return self.step if self._left_at is None else min(self.step, self._left_at)

    def steps_of(self, commits: set[int]) -> set[int]:
        """Returns the steps of commits of replica groups, whose numbers go on where a run goes back."""
        return {step for commit in commits if (step := self.progress.step_of(commit)) is not None}

    @property
    def suspect_step(self) -> int | None:
        """With training.on_spike = "rewind" and one spike left before the run goes back: the step before the first."""
        options, window = self.engine.plan.config.training, self._spikes
        is_last = options.on_spike == "rewind" and window.in_a_row + 1 >= options.spike_patience
        return (window.first_step or self.step + 1) - 1 if is_last else None

    def init_averages(self) -> None:
        """Sets averages that were not loaded, of replica groups and of this run, to the weights."""
        init_outer_weights(self.outer_weights, parameters=self.engine.parameters)
        if self.engine.ema is not None:
            self.engine.ema.fill()

    def advance(self, *, step: int, tokens: int, skipped: bool) -> None:
        """Counts a step, and its batch as consumed."""
        self.loader.commit()
        self._skipped_in_a_row = self._skipped_in_a_row if skipped else 0
        self.progress = replace(
            self.progress,
            step=step,
            tokens_seen=self.progress.tokens_seen + tokens,
            skipped_steps=self.progress.skipped_steps + skipped,
            data={},
            spikes={},
        )
        if self.engine.ema is not None and not skipped:
            self.engine.ema.update(step - self.progress.skipped_steps)

    def is_spike(self, step: int, *, loss: float, grad_norm: float) -> bool:
        """Returns whether a step with finite values is a spike that is to be skipped, and compares later ones with it.

        Equal on all ranks and replica groups, whose values are equal. TrainingError past training.max_rewinds.
        """
        options = self.engine.plan.config.training
        if options.on_spike == "none":
            return False
        timeline = self.engine.plan.mixture and self.engine.plan.mixture.timeline
        batch = self.loader.next_batch_number
        window = self._spikes.in_stage(timeline.stage_index(batch=batch)) if timeline and batch else self._spikes
        spike = window.find_spike(loss=loss, grad_norm=grad_norm, options=options)
        self._spikes = window.after(step, loss=loss, grad_norm=grad_norm, is_spike=spike is not None, options=options)
        if spike is None:
            return False
        if dist.get_rank() == 0:
            logger.warning("step %d is a spike: %s; it is skipped and the weights are unchanged", step, spike)
        if options.on_spike == "rewind" and window.in_a_row + 1 >= options.spike_patience:
            self._decide_to_go_back(step, spike=spike, suspect=(window.first_step or step) - 1)
        return True

    def _decide_to_go_back(self, step: int, *, spike: str, suspect: int) -> None:
        """Decides what follows the last of training.spike_patience spikes in a row."""
        options, rewinds = self.engine.plan.config.training, self.progress.rewinds
        what = f"step {step} is spike number {options.spike_patience} in a row"
        if len(rewinds) >= options.max_rewinds:
            raise TrainingError(
                f"{what}, {spike}; the run has gone back {len(rewinds)} times, and training.max_rewinds is "
                f"{options.max_rewinds}. Lower optimizer.lr or training.max_norm and go back further with "
                "checkpoint.load_step, or raise training.max_rewinds"
            )
        self.must_go_back = self.rewind_target is not None
        if not self.must_go_back and dist.get_rank() == 0:
            text = "%s, but no checkpoint is older than step %d to go back to: their level counts as normal"
            logger.warning(text, what, suspect)

    def count_skip(self, step: int, *, loss: float, grad_norm: float) -> None:
        """Counts a step whose loss or gradient norm is not finite. TrainingError past training.max_skipped_steps."""
        limit = self.engine.plan.config.training.max_skipped_steps
        self._skipped_in_a_row += 1
        what = f"step {step}: loss {loss}, gradient norm {grad_norm}"
        if self._skipped_in_a_row > limit:
            raise TrainingError(
                f"{what}: not finite for {self._skipped_in_a_row} steps in a row, and training.max_skipped_steps is "
                f"{limit}; lower optimizer.lr or training.max_norm, or inspect the data of these steps"
            )
        if dist.get_rank() == 0:
            logger.warning("%s: not finite, the step is skipped and the weights are unchanged", what)

    def progress_with_data(self) -> Progress:
        """Returns the progress with the position in the data and the last steps; a collective for hub data."""
        return replace(self.progress, data=self.loader.state_dict(), spikes=self._spikes.to_json())

    def recovery_state(self, *, before_load: Callable[[], None]) -> RecoveryState:
        """Returns what another replica group needs to continue from here; `before_load` runs before tensors change."""

        def load_from_peer(metadata: Mapping[str, Any]) -> None:
            before_load()
            self.engine.free_unsharded_params()  # a validation leaves some, and the next forward would use them
            self.was_recovered, known = True, len(self.progress.rewinds)
            try:
                self.continue_from(parse_progress(Value(metadata, where="the state of another replica group")))
            except DocumentError as error:
                raise TrainingError(f"cannot recover from another replica group: {error}") from None
            self._left_at = min((rewind.step for rewind in self.progress.rewinds[known:]), default=None)
            self.loader.load_state_dict(self.progress.data, allow_change=False)

        return RecoveryState(
            tensors={name: local_shard(tensor) for name, tensor in self.tensors().items()},
            metadata=lambda: self.progress_with_data().to_json(),
            load_from_peer=load_from_peer,
            stream_positions=lambda: self.loader.stream_positions,
            # `loader` is replaced when the phase changes.
            set_stream_positions=lambda positions: self.loader.set_stream_positions(positions),  # noqa: PLW0108
        )


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
        self.is_cut_off = False
        """Whether the last step is not in the object store because the run had to exit."""
        self._checked: Progress | None = None

    def save_if_due(self, step: int, *, overdue: bool) -> None:
        """Compares what ranks must hold alike, and saves, each if it is due after a step. A collective."""
        freq = self._state.engine.plan.config.comm.replica_check_freq
        if freq and step % freq == 0:
            self.check_replicas()
        if self._checkpoints.is_due(step, overdue=overdue):
            self.save()
            self._metrics.restart_interval()
        self.log_finished_saves()

    def check_replicas(self) -> None:
        """Compares what ranks must hold alike, if the options ask for it. TrainingError if it differs. A collective."""
        engine, progress = self._state.engine, self._state.progress
        if not engine.plan.config.comm.replica_check_freq or self._checked is progress:
            return
        from torchtitan_clone.run.replica_check import find_differences

        with self._timeouts.relaxed():
            stage = dist.get_process_group_ranks(engine.mesh.stage)
            if found := find_differences(self._state.tensors(), stage=stage):
                self._checkpoints.finish()  # the save in progress is of an earlier step
                remedy = "the memory or a unit of that machine may be faulty. Nothing is saved; resume without it"
                raise TrainingError(f"step {progress.step}: {'; '.join(found)}: {remedy}")
        self._checked = progress

    def save(self, *, wait: bool = False) -> None:
        """Starts to save the step; with `wait` returns once it is committed. A collective."""
        if self._has_saved_last and self._checkpoints.saved_step == self._state.step:
            return
        if self._checkpoints.is_saving_enabled and self._replicas.is_writer:
            self.check_replicas()
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
        """Marks the run as complete, if its last step is saved and exported; returns if it is. A collective.

        TrainingError if the last step of the run cannot be put into the object store that is configured.
        """
        step, is_last = self._state.step, self._state.step == self._state.engine.plan.config.training.steps
        with self._timeouts.relaxed():
            failure = self._checkpoints.finish_uploads(beat=self._timeouts.beat, is_out_of_time=self._stop.must_exit)
        if failure is not None:
            remedy = "rerun the same command to upload it, on nodes that have the local folder"
            text = f"step {self._checkpoints.saved_step} is saved in the local folder only: {failure}; {remedy}"
            self.is_cut_off = failure == OUT_OF_TIME
            if is_last and not self.is_cut_off:
                self._checkpoints.close()
                raise TrainingError(text)
            if dist.get_rank() == 0:
                logger.warning("%s", text)
        is_complete = is_last and is_exported and failure is None
        if is_complete and self._checkpoints.saved_step == step and self._replicas.is_writer:
            is_exported = self._checkpoints.mark_complete(self._state.progress)
        self._checkpoints.close()
        return is_exported
