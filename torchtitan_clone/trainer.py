"""The trainer: builds everything in physical order, then runs the loop.

What a step does is written in `Trainer.train_step`; what happens between two steps, in `Trainer.train`.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from torchtitan_clone.checkpoint.manager import CheckpointManager
from torchtitan_clone.checkpoint.progress import NOTHING_DONE
from torchtitan_clone.config import to_toml
from torchtitan_clone.data import Batch
from torchtitan_clone.observe.profiling import Profiler
from torchtitan_clone.observe.records import RECOVERED
from torchtitan_clone.ops.kernels import use_huge_pages
from torchtitan_clone.parallel.gradients import sum_over_ranks
from torchtitan_clone.parallel.runtime import Launch, apply_debug_options
from torchtitan_clone.parallel.stragglers import StragglerMonitor
from torchtitan_clone.replicas.protocol import ReplicaGroup, outer_state
from torchtitan_clone.run.describe import describe_results, trace_collectives
from torchtitan_clone.run.engine import Engine, build_engine
from torchtitan_clone.run.export import Exporter
from torchtitan_clone.run.folder import record_config
from torchtitan_clone.run.loaders import open_loaders
from torchtitan_clone.run.measuring import build_run_metrics, log_step, log_stragglers
from torchtitan_clone.run.plan import is_export_due, plan_after, run_identity
from torchtitan_clone.run.prepared import PreparedRun, find_initial_weights
from torchtitan_clone.run.replicas import join_run
from torchtitan_clone.run.state import RunOutcome, RunState, Saver, StepResult, TrainingError
from torchtitan_clone.run.stopping import (
    GCControl,
    StepInterrupted,
    StopBeforeTraining,
    StopPolicy,
    StopRequest,
    Timeouts,
)
from torchtitan_clone.run.validation import Validator


class Trainer:
    """Trains one run to its last step, or until it is asked to stop. Needs the process group."""

    def __init__(
        self,
        run: PreparedRun,
        *,
        launch: Launch,
        device: torch.device,
        stop: StopRequest,
        wrap_replica_group: Callable[[ReplicaGroup], ReplicaGroup] | None = None,
    ) -> None:
        config = run.plan.config
        self._run = run
        self._launch = launch
        apply_debug_options(config.debug, launch=launch, tensor_degree=run.plan.degrees.tp)
        # 1. Where the run resumes: decided once, by all ranks together.
        self._checkpoints = CheckpointManager(
            config.checkpoint,
            folder=run.plan.checkpoint_folder,
            state=self.state_tensors,
            config=to_toml(config),
            identity=run_identity(run.plan),
            group=f"r{config.fault_tolerance.replica_id}" if config.fault_tolerance.enable else "",
        )
        progress = self._checkpoints.find_resume_point() or NOTHING_DONE
        plan = plan_after(progress, first=run.plan)
        # 2. What is trained: random weights, then those of the hub or of a checkpoint.
        engine = build_engine(plan, device=device)
        outer_weights = outer_state(config.fault_tolerance, parameters=engine.parameters)
        # 3. What it is trained on.
        loader, validation_loader = open_loaders(plan, dataset=run.dataset, rank=launch.rank, position=progress.data)
        self._validator = Validator(config, loader=validation_loader, evaluators=run.evaluators)
        self._state = RunState(progress, engine=engine, loader=loader, outer_weights=outer_weights)
        self._load_weights()
        # 4. What is measured and watched.
        self._timeouts = Timeouts(plan, rank=launch.rank)
        record_config(run.plan, checkpoints=self._checkpoints, rank=launch.rank)
        self._stop = StopPolicy(
            stop,
            max_seconds=config.training.max_seconds,
            deadline_seconds=config.preemption.deadline_seconds,
            sum_over_ranks=sum_over_ranks,
        )
        self._metrics = build_run_metrics(
            plan, launch=launch, device=device, age_seconds=stop.age_seconds, folder=run.folder
        )
        self._stragglers = StragglerMonitor(
            config.comm, launch=launch, device=device, can_time_collectives=not config.compile.enable
        )
        self._profiler = Profiler(
            config.profiling, folder=plan.output_folder, rank=launch.rank, resume_step=progress.step
        )
        # 5. Must come last: once joined, other replica groups wait for this one's heartbeat.
        replicas = join_run(
            plan, state=self._state, checkpoints=self._checkpoints, timeouts=self._timeouts, stop=self._stop
        )
        self._replicas = replicas if wrap_replica_group is None else wrap_replica_group(replicas)
        self._exporter = Exporter(metrics=self._metrics)
        self._saver = Saver(
            self._checkpoints,
            state=self._state,
            replicas=self._replicas,
            metrics=self._metrics,
            timeouts=self._timeouts,
            stop=self._stop,
        )

    @property
    def engine(self) -> Engine:
        """The engine of the present phase."""
        return self._state.engine

    def state_tensors(self) -> dict[str, Tensor]:
        """Returns what checkpoints hold, by name: the tensors themselves, not copies."""
        return self._state.tensors()

    def _load_weights(self) -> None:
        """Fills the engine from the checkpoint or, in a new run, from the Hugging Face weights that are asked for."""
        self._state.resume_at(self._checkpoints.load())
        if not self._state.step and (weights := self._run.initial_weights or find_initial_weights(self._run.plan)):
            weights.load_into(self.engine.model_tensors(), log_warnings=self._launch.rank == 0)
        self._state.init_averages()

    # ------------------------------------------------------------------ the loop: what happens between two steps

    def train(self) -> bool:
        """Trains the remaining steps, saves and validates in between; returns whether nothing is left to do.

        StopBeforeTraining if the run was asked to stop before it trained anything, TrainingError if it cannot continue.
        """
        if self._stop.agree():
            raise StopBeforeTraining(self._stop.reason)
        state, metrics, last_step = self._state, self._metrics, self._run.plan.last_step
        attempts, is_rewound = 0, False
        can_train = self._begin_step(first=True)
        if can_train and self._replicas.is_writer:
            with self._timeouts.relaxed():
                self._exporter.export_missing(state.progress, engine=self.engine, first=self._run.plan)
        metrics.restart_interval()
        with self._profiler, GCControl(self._run.plan.config.training.gc_freq) as gc_control:
            while can_train and state.step < last_step:
                attempts += 1
                is_new_phase = self._maybe_change_phase() or is_rewound
                result = self._attempt_step(state.step + 1, attempt=attempts)
                if result is None:
                    break
                stop = result.stop
                if is_new_phase or attempts == 1:
                    self._timeouts.expect_steady_state()
                    use_huge_pages()
                    self._checkpoints.prepare()
                is_rewound = result.committed and self._maybe_rewind()
                if result.committed and not is_rewound:
                    log_step(self._metrics, result=result, state=state, is_first=attempts == 1)
                    gc_control.maybe_collect(result.step)
                    self._profiler.step()
                    if self._validator.is_due(result.step) and (result.step == last_step or not stop):
                        stop = not self._validate(result.step)
                    self._saver.save_if_due(result.step, overdue=result.save_overdue)
                    if result.step < last_step and not stop:
                        self._maybe_export(result.step)
                can_train = not stop and state.step < last_step and self._begin_step()
        return self._finish()

    def _begin_step(self, *, first: bool = False) -> bool:
        """Meets the other replica groups; returns False if there is nothing to continue for."""
        state, metrics = self._state, self._metrics
        self._timeouts.beat()
        state.was_recovered = False
        start = time.perf_counter()
        can_train = self._replicas.begin_step()
        seconds = time.perf_counter() - start
        if first:  # only now is it known at which step the run continues
            metrics.start(after_step=state.last_known_step, lost=state.steps_of(self._replicas.rolled_back_steps()))
            metrics.ledger.book("start_up", self._stop.process_age_seconds - seconds)
        elif state.was_recovered:
            metrics.forget(after_step=state.last_known_step, lost=state.steps_of(self._replicas.rolled_back_steps()))
        if state.was_recovered:
            metrics.log_event(state.step, RECOVERED, seconds=seconds)
        metrics.ledger.book("healing" if state.was_recovered else "waiting", seconds)
        return can_train

    def _attempt_step(self, step: int, *, attempt: int) -> StepResult | None:
        """Runs a step, traced and timed as the options say; None if the deadline interrupted it."""
        plan, state = self.engine.plan, self._state
        if state.suspect_step is not None:
            from torchtitan_clone.run.rewind import find_target

            find_target(state, checkpoints=self._checkpoints, replicas=self._replicas)
        timer = self._stragglers.timer(step, mesh=self.engine.mesh) if plan.degrees.pp == 1 else None
        is_traced = attempt == 2 and plan.config.debug.trace_collectives
        trace = trace_collectives(plan, mesh=self.engine.mesh, rank=self._launch.rank) if is_traced else nullcontext()
        start = time.perf_counter()
        try:
            with trace, timer or nullcontext():
                result = self.train_step(step)
        except StepInterrupted:
            self._replicas.commit(healthy=False)
            self._metrics.ledger.throw_away(steps=1, seconds=time.perf_counter() - start)
            return None
        except TrainingError:  # too many skipped steps, on all ranks: no step is saved any more
            self._saver.save_last(is_obsolete=True)
            raise
        seconds = self._stop.step_seconds = time.perf_counter() - start
        self._metrics.observe_step(step, data_seconds=result.data_seconds, by_source=result.by_source)
        found = self._stragglers.report(step, timer=timer, data_seconds=result.data_seconds, total_seconds=seconds)
        log_stragglers(self._metrics, found=found, state=self._state)
        self._discard_steps(step - self._state.step)
        return result

    def _discard_steps(self, count: int) -> None:
        """Removes the last steps, which do not count, from metrics and goodput."""
        if count:
            self._metrics.ledger.throw_away(steps=count, seconds=count * self._stop.step_seconds)
            self._metrics.forget(after_step=self._state.step)
            self._metrics.restart_interval()

    def _maybe_change_phase(self) -> bool:
        """Freezes layers and moves the state to another mesh in memory, where training.freeze_schedule says so."""
        state = self._state
        plan = self._run.plan.at_step(state.step + 1, batch=state.loader.next_batch_number)
        if plan is self.engine.plan:
            return False
        from torchtitan_clone.run.remesh import change_phase

        change_phase(
            state, plan, dataset=self._run.dataset, rank=self._launch.rank, checkpoints=self._checkpoints,
            validator=self._validator, timeouts=self._timeouts, metrics=self._metrics,
        )  # fmt: skip
        return True

    def _maybe_rewind(self) -> bool:
        """Goes back to a checkpoint after spikes that did not end, and returns whether it did."""
        if not self._state.must_go_back:
            return False
        from torchtitan_clone.run.rewind import go_back

        go_back(
            self._state, plan=self._run.plan, checkpoints=self._checkpoints, saver=self._saver, metrics=self._metrics,
            timeouts=self._timeouts, replicas=self._replicas, rank=self._launch.rank,
            change_phase=self._maybe_change_phase, discard_steps=self._discard_steps,
        )  # fmt: skip
        return True

    # ------------------------------------------------------------------ the step

    def train_step(self, step: int) -> StepResult:
        """Attempts the step of this number, which must follow the last; a collective over all ranks."""
        engine, replicas, state = self.engine, self._replicas, self._state
        start = time.perf_counter()
        batch = state.loader.next_batch(replica_index=replicas.replica_index, num_replicas=replicas.num_replicas)
        replicas.record_samples(state.loader.sample_range)
        data_seconds = time.perf_counter() - start
        (num_targets,) = replicas.sum(sum_over_ranks([batch.num_targets * engine.mesh.is_loss_leader]))
        engine.begin_step(step)
        output = engine.forward_backward(self._microbatches(batch), num_targets=max(1, int(num_targets)))
        data_seconds += state.loader.read_ahead() if batch.tokens_BT.is_pinned() and step < engine.plan.last_step else 0
        replicas.sum_gradients(engine.parameters.values())
        norm = engine.gradient_norm()
        # The step's host sync: whether it counts must be known before the weights change.
        grad_norm, *own = engine.read(norm, output)
        is_overdue = self._launch.rank == 0 and self._checkpoints.is_overdue()
        stops, overdue, *sums = sum_over_ranks([self._stop.is_wanted_here(), is_overdue, *own])
        mean_norm, *sums = replicas.sum([grad_norm / replicas.num_replicas, *sums])
        totals = engine.totals(sums)
        healthy = math.isfinite(totals.loss) and math.isfinite(grad_norm)
        committed = replicas.commit(healthy=healthy)
        is_spike = healthy and committed and state.is_spike(step, loss=totals.loss, grad_norm=mean_norm)
        if not healthy:
            state.count_skip(step, loss=totals.loss, grad_norm=grad_norm)
        elif committed and not is_spike:
            self._checkpoints.wait_for_staging()
            engine.optimizer_step(totals, grad_norm=grad_norm)
        engine.optimizer.zero_grad()
        if committed:
            state.advance(step=step, tokens=engine.plan.tokens_per_step, skipped=is_spike or not healthy)
            committed = replicas.complete_step()
        return StepResult(
            step=step,
            loss=totals.loss,
            grad_norm=grad_norm,
            auxiliary=totals.auxiliary,
            loads=totals.loads,
            by_source=state.loader.scale_bytes(totals.by_source) if healthy and committed else {},
            data_seconds=data_seconds,
            stop=stops > 0,
            committed=committed,
            save_overdue=overdue > 0,
        )

    def _microbatches(self, batch: Batch) -> Iterator[Batch]:
        """Yields the micro-batches on the device. StepInterrupted, on all ranks at the same one, past the deadline."""
        for rows in batch.microbatches(self.engine.plan.config.training.local_batch_size):
            self._timeouts.beat()
            self._stop.check_deadline()
            yield rows.to(self.engine.device)

    # ------------------------------------------------------------------ what follows a step

    def _validate(self, step: int) -> bool:
        """Logs validation and evaluation; returns False if a request to stop interrupted them."""
        if self._run.plan.config.ema.validate:  # the save in progress is of the weights
            self._checkpoints.wait_for_staging()
        return self._validator.run(
            step, engine=self.engine, metrics=self._metrics, timeouts=self._timeouts, stops=self._saver.stops_validation
        )

    def _maybe_export(self, step: int) -> None:
        if is_export_due(self._run.plan.config, step=step) and self._replicas.is_writer:
            self._saver.check_replicas()
            with self._timeouts.relaxed():
                self._exporter.export(step, engine=self.engine, plan=self.engine.plan)
            self._metrics.restart_interval()

    def _finish(self) -> bool:
        """Saves and exports the last step, closes everything and reports the outcome."""
        state, plan, trained = self._state, self._run.plan, self._state.step
        self._replicas.close()
        self._discard_steps(trained - state.step)
        is_complete = state.step == plan.last_step
        is_obsolete = not is_complete and not self._stop.agree()  # other replica groups have completed the run
        self._saver.save_last(is_obsolete=is_obsolete)
        if is_complete:
            self._maybe_export(state.step)
        is_exported = self._saver.close(is_exported=state.step not in self._exporter.failed_steps)
        self._timeouts.close()
        goodput = self._metrics.log_goodput(state.step, complete=is_complete)
        self._metrics.close()
        RunOutcome(
            step=state.step,
            last_step=plan.config.training.steps,
            is_seed_checkpoint=plan.config.checkpoint.create_seed_checkpoint,
            is_saving_enabled=self._checkpoints.is_saving_enabled,
            is_writer=self._replicas.is_writer,
            is_obsolete=is_obsolete,
            saved_step=self._checkpoints.saved_step,
            is_exported=is_exported,
            stop_reason=self._stop.reason,
            goodput=goodput,
            next_steps=describe_results(plan),
        ).report()
        return (is_complete and not self._saver.is_cut_off) or is_obsolete
