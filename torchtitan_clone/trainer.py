"""The trainer: builds everything in physical order, then runs the loop.

What a step does is written in `Trainer.train_step`; when something happens between two steps, in `Trainer.train`.
"""

import gc
import logging
import math
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_clone.checkpoint.commit import NOTHING_DONE, Progress
from torchtitan_clone.checkpoint.hf import export_weights
from torchtitan_clone.checkpoint.manager import CheckpointManager
from torchtitan_clone.config import Config, to_toml
from torchtitan_clone.data import Batch
from torchtitan_clone.fault_tolerance.health import Heartbeat
from torchtitan_clone.fault_tolerance.outer import init_outer_weights, outer_state
from torchtitan_clone.fault_tolerance.protocol import RecoveryState, build_replicas
from torchtitan_clone.observe.flops import peak_flops_per_second
from torchtitan_clone.observe.metrics import MetricsWriter, StepRecord, build_metrics
from torchtitan_clone.observe.profiling import build_profiler
from torchtitan_clone.ops.cross_entropy import build_loss
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.optim import OptimizerContainer, build_optimizer, build_schedule
from torchtitan_clone.parallel.apply import apply_parallelism, named_parameters
from torchtitan_clone.parallel.forward_backward import (
    ForwardBackward,
    build_forward_backward,
)
from torchtitan_clone.parallel.gradients import clip_gradients, sum_over_ranks
from torchtitan_clone.parallel.init_weights import init_weights
from torchtitan_clone.parallel.mesh import Mesh, build_mesh, describe_mesh
from torchtitan_clone.parallel.reshard import gather_shard_map, transfer
from torchtitan_clone.parallel.runtime import Launch, set_determinism, set_timeout
from torchtitan_clone.parallel.stragglers import StragglerMonitor
from torchtitan_clone.parallel.trace import trace_collectives
from torchtitan_clone.run.gc_control import GCControl
from torchtitan_clone.run.hub import EXPORT_FOLDER, InitialWeights, export_files
from torchtitan_clone.run.preflight import CONFIG_FILE, PreparedRun, RunPlan, open_loaders
from torchtitan_clone.run.stopping import StopBeforeTraining, StopRequest
from torchtitan_clone.torch_compat import dump_collectives

logger = logging.getLogger("torchtitan_clone")


class TrainingError(Exception):
    """Training cannot go on; the message says why and what to do."""


class StepInterrupted(Exception):
    """The run must end before the step does: nothing has changed but gradients, and the step is trained again later."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step gives: the same numbers on all ranks."""

    loss: float
    grad_norm: float
    lr: float
    data_seconds: float
    stop: bool
    committed: bool
    """Whether it counts; if not, it is as if it had never been."""
    save_overdue: bool


class Trainer:
    """Trains one run to its last step, or to a request to stop. Needs the process group."""

    def __init__(self, run: PreparedRun, *, launch: Launch, device: torch.device, stop: StopRequest):
        config = run.plan.config
        self._config = config
        self._run = run
        self._device = device
        self._stop = stop
        self._launch = launch
        set_determinism(config.debug, launch=launch, tensor_degree=run.plan.degrees.tp)
        self._checkpoints = CheckpointManager(
            config.checkpoint,
            folder=run.plan.folder / config.checkpoint.folder,
            state=self._state,
            documents={CONFIG_FILE: to_toml(config)},
            is_shared=config.fault_tolerance.enable,
        )
        self._progress = self._find_progress()
        plan = run.plan.at_step(self._progress.step + 1)
        mesh = build_mesh(plan.degrees, loss_rank=plan.stages.ranks[-1], device_type=device.type)
        self._take(build_parts(plan, mesh=mesh, device=device), plan=plan, mesh=mesh)
        self._lr_factor = build_schedule(config.lr_scheduler, steps=config.training.steps)
        self._outer = outer_state(config.fault_tolerance, parameters=self.parameters)
        self._checkpoints.load()
        if not self._progress.step and run.initial_weights is not None:
            self._load_initial(run.initial_weights)
        init_outer_weights(self._outer, parameters=self.parameters)
        self._watch = Heartbeat(
            folder=run.plan.records / config.comm.save_traces_folder,
            rank=launch.rank,
            dump_collectives=dump_collectives,
        )
        self._set_timeout(config.comm.init_timeout_seconds)
        self._skipped_in_a_row = 0
        self._step_seconds = self._save_seconds = 0.0
        self._failed_exports: list[int] = []
        if launch.rank == 0:
            write_config(run.plan)
        self._metrics = self._build_metrics(launch)
        self._profiler = build_profiler(
            config.profiling,
            folder=run.plan.records,
            rank=launch.rank,
            device_type=device.type,
            resume_step=self._progress.step,
        )
        if config.fault_tolerance.enable:
            self._warm_up()
        # Last: from now on the others count on this group's heart.
        self._replicas = build_replicas(
            config.fault_tolerance,
            device=device,
            step=self._progress.step,
            parameters=self.parameters,
            outer=self._outer,
            healing=self._healing,
            sum_over_ranks=sum_over_ranks,
            is_over=lambda: (self._checkpoints.newest_step() or 0) >= config.training.steps,
            wants_to_stop=self._wants_to_stop_waiting,
            identity=identity_of(config),
            folder=run.plan.records,
        )

    def _find_progress(self) -> Progress:
        """Where the run goes on; where that is not what preflight expected, the data follow."""
        run, checkpoint = self._run, self._config.checkpoint
        progress = (self._checkpoints.find() if checkpoint.enable else None) or NOTHING_DONE
        self._loader, self._validation_loader = run.loader, run.validation_loader
        if progress.step != run.progress.step:
            plan = run.plan.at_step(progress.step + 1)
            self._loader, self._validation_loader = open_loaders(plan, dataset=run.dataset, rank=self._launch.rank)
            if progress.data:
                self._loader.load_state_dict(progress.data, allow_change=checkpoint.allow_data_change)
        return progress

    def _take(self, parts: list[nn.Module], *, plan: RunPlan, mesh: Mesh) -> None:
        """Trains these parts of the model from now on."""
        config = plan.config
        self._shape, self._mesh, self.parts = plan, mesh, parts
        self.parameters = named_parameters(parts)
        self.optimizer = build_optimizer(config.optimizer, named_parameters=self.parameters)
        compile_loss = config.compile.enable and "loss" in config.compile.components
        loss_fn = build_loss(
            chunk_tokens=config.training.loss_chunk_tokens,
            compile_backend=config.compile.backend if compile_loss else None,
        )
        self._forward_backward = build_step(parts, plan=plan, mesh=mesh, loss_fn=loss_fn, device=self._device)
        self._stragglers = StragglerMonitor(
            config.comm,
            launch=self._launch,
            device=self._device,
            can_time_collectives=not config.compile.enable and plan.degrees.pp == 1,
        )

    def _enter_phase_of(self, step: int) -> bool:
        """Freezes blocks, and builds the mesh anew, where training.freeze_schedule says so; whether it did.

        All state stays in memory: it moves from the old parts of the model to the new ones.
        """
        plan = self._run.plan.at_step(step)
        if plan.first_step == self._shape.first_step:
            return False
        start = time.perf_counter()
        self._checkpoints.forget_plan()
        self._set_timeout(self._config.comm.init_timeout_seconds)
        position = self._loader.state_dict()
        old_state, old_mesh = training_state(self.parameters, self.optimizer), self._mesh
        release(self.parts)
        if self._config.compile.enable:
            torch.compiler.reset()  # the names of process groups are compiled in
        del self.parts, self.parameters, self.optimizer, self._forward_backward, self._loader, self._validation_loader
        mesh = build_mesh(plan.degrees, loss_rank=plan.stages.ranks[-1], device_type=self._device.type)
        stages = plan.stages.of_rank(mesh.pp.get_local_rank())
        parts = [parallelized_part(plan, stage=stage, mesh=mesh) for stage in stages]
        optimizer_state = move_state(old_state, parts=parts, device=self._device)
        self._take(parts, plan=plan, mesh=mesh)
        self.optimizer.load_state_dict(optimizer_state)
        old_mesh.close()
        gc.collect()  # modules and their hooks refer to one another
        self._loader, self._validation_loader = open_loaders(plan, dataset=self._run.dataset, rank=self._launch.rank)
        self._loader.load_state_dict(position, allow_change=False)
        self._metrics.flops_per_token = plan.flops_per_token
        mesh_text = describe_mesh(plan.degrees).partition("\n")[0]
        what = f"{plan.frozen_layers} blocks frozen from now on, {mesh_text}"
        self._metrics.log_event(self._progress.step, what, seconds=time.perf_counter() - start)
        return True

    def train(self) -> bool:
        """Runs the steps that are left, saving and validating in between; whether nothing is left to do.

        StopBeforeTraining where the run was asked to stop before it trained anything.
        """
        if self._agree_to_stop():
            raise StopBeforeTraining(self._stop_reason)
        goes_on = self._begin_step(first=True)
        garbage = GCControl(self._config.training.gc_freq)
        last_step = 0 if self._config.checkpoint.create_seed_checkpoint else self._config.training.steps
        interval, attempts, stop = _Interval(), 0, False
        with self._profiler:
            while self._progress.step < last_step and not stop and (self._begin_step() if attempts else goes_on):
                if is_new := self._enter_phase_of(self._progress.step + 1):
                    interval = _Interval()
                step = self._progress.step + 1
                timer, start = self._stragglers.timer(step), time.perf_counter()
                try:
                    with self._trace(attempts == 1), timer or nullcontext():
                        result = self.train_step(step)
                except StepInterrupted:
                    self._replicas.commit(healthy=False)
                    self._metrics.ledger.throw_away(steps=1, seconds=time.perf_counter() - start)
                    break
                stop = result.stop
                attempts += 1
                interval.add(result.data_seconds)
                if is_new or attempts == 1:
                    self._set_timeout(self._config.comm.train_timeout_seconds)
                    self._checkpoints.prepare()
                for line in self._stragglers.report(
                    step, timer=timer, data_seconds=result.data_seconds, total_seconds=self._step_seconds
                ):
                    if self._metrics.active:
                        logger.warning("step %d: %s", self._progress.step, line)
                if not result.committed:
                    self._forget_steps(step - self._progress.step)
                    continue
                if attempts == 1 or step == last_step or step % self._config.metrics.log_freq == 0 or stop:
                    self._log(result, interval)
                    interval = _Interval()
                if attempts == 1:
                    self._metrics.log_goodput(step)
                self._metrics.progress(step)
                garbage.run(step)
                self._profiler.step()
                if self._is_validation_due(step) and (step == last_step or not stop):
                    stop = not self._validate(step)
                    interval = _Interval()
                if self._checkpoints.is_due(step, overdue=result.save_overdue):
                    self._save()
                    interval = _Interval()
                self._log_saves()
                if step < last_step and not stop and self._is_export_due(step):
                    self._export(step)
                    interval = _Interval()
        trained = self._progress.step
        self._replicas.close()
        self._forget_steps(trained - self._progress.step)
        self._save_last()
        if self._progress.step == last_step and self._is_export_due(last_step):
            self._export(last_step)
        self._end_saving()
        self._checkpoints.close()
        garbage.close()
        self._watch.close()
        self._metrics.log_goodput(self._progress.step, complete=self._progress.step == last_step)
        self._metrics.close()
        self._say_how_it_ended()
        return self._progress.step == last_step or not self._agree_to_stop()

    def _warm_up(self) -> None:
        """One pass of which nothing comes: other replica groups do not wait until this one has compiled its model."""
        options = self._config.fault_tolerance
        batch = self._loader.take(part=options.replica_id, parts=options.group_size)
        first = next(iter(batch.microbatches(self._shape.config.training.local_batch_size)))
        self._forward_backward([first.to(self._device)], num_targets=1)
        self.optimizer.zero_grad()

    def _begin_step(self, *, first: bool = False) -> bool:
        """Meets the other replica groups; False where there is nothing to go on for."""
        self._watch.moved(timeout_seconds=self._timeout_seconds)
        start, self._healed = time.perf_counter(), False
        goes_on = self._replicas.begin()
        seconds, metrics, step = time.perf_counter() - start, self._metrics, self._progress.step
        if first:  # only now it is known where the run goes on
            metrics.start(after_step=step, lost=self._replicas.lost_steps())
            metrics.ledger.book("start_up", self._stop.age_seconds - seconds)
        elif self._healed:
            metrics.forget(after_step=step, lost=self._replicas.lost_steps())
        metrics.ledger.book("healing" if self._healed else "waiting", seconds)
        return goes_on

    def _forget_steps(self, count: int) -> None:
        """The last steps, one or a round of them, do not count."""
        self._metrics.ledger.throw_away(steps=count, seconds=count * self._step_seconds)
        self._metrics.forget(after_step=self._progress.step)

    def train_step(self, step: int) -> StepResult:
        """One attempt at the step of this number, which must follow the last; a collective over all ranks."""
        training, replicas = self._config.training, self._replicas
        start = time.perf_counter()
        batch = self._loader.take(part=replicas.part, parts=replicas.parts)
        replicas.record(self._loader.taken)
        data_seconds = time.perf_counter() - start
        (num_targets,) = replicas.sum(sum_over_ranks([batch.num_targets if self._mesh.is_loss_leader else 0]))
        lr_factor = self._lr_factor(step)
        self.optimizer.set_lr_factor(lr_factor)
        output = self._forward_backward(self._microbatches(batch), num_targets=max(1, int(num_targets)))
        replicas.sum_gradients(self.parameters.values())
        norm = clip_gradients(self.parameters.values(), max_norm=training.max_norm)
        # Host sync: whether the step counts must be known before the weights change.
        grad_norm = norm.item()
        save_overdue = self._launch.rank == 0 and self._checkpoints.is_overdue()
        own_loss = output.loss.item() if self._mesh.is_loss_leader else 0.0
        loss, stops, overdue = sum_over_ranks([own_loss, self._wants_to_stop(), save_overdue])
        (loss,) = replicas.sum([loss])
        healthy = math.isfinite(loss) and math.isfinite(grad_norm)
        committed = replicas.commit(healthy=healthy)
        if not healthy:
            self._count_skip(step, loss=loss, grad_norm=grad_norm)
        elif committed:
            self._checkpoints.wait_for_staging()
            self.optimizer.step()
            self._skipped_in_a_row = 0
        self.optimizer.zero_grad()
        if committed:
            self._count_step(step, skipped=not healthy)
            committed = replicas.complete()
        self._step_seconds = time.perf_counter() - start
        return StepResult(
            loss=loss,
            grad_norm=grad_norm,
            lr=self.optimizer.lr,
            data_seconds=data_seconds,
            stop=stops > 0,
            committed=committed,
            save_overdue=overdue > 0,
        )

    def _count_step(self, step: int, *, skipped: bool) -> None:
        self._loader.advance()
        self._progress = Progress(
            step=step,
            tokens_seen=self._progress.tokens_seen + self._shape.tokens_per_step,
            skipped_steps=self._progress.skipped_steps + skipped,
            data={},
        )

    def _state(self) -> dict[str, Tensor]:
        return training_state(self.parameters, self.optimizer) | self._outer

    def _healing(self) -> RecoveryState:
        """What another replica group needs to go on where this one is."""
        local = {name: local_shard(tensor) for name, tensor in self._state().items()}
        return RecoveryState(
            tensors=local,
            note=lambda: asdict(self._progress_with_data()),
            take_over=self._take_over,
            positions=lambda: self._loader.notes,
            take_positions=self._loader.set_stream_positions,
        )

    def _take_over(self, note: dict[str, Any]) -> None:
        self._checkpoints.wait_for_staging()  # the tensors are overwritten next
        self._healed = True
        self._progress = Progress(**note)
        self._loader.load_state_dict(self._progress.data, allow_change=False)

    def _progress_with_data(self) -> Progress:
        return replace(self._progress, data=self._loader.state_dict())

    def _microbatches(self, batch: Batch) -> Iterator[Batch]:
        """The batch in parts, on the device. StepInterrupted, on all ranks at the same part, where time has run out."""
        deadline = self._config.preemption.deadline_seconds
        for rows in batch.microbatches(self._shape.config.training.local_batch_size):
            self._watch.moved(timeout_seconds=self._timeout_seconds)
            if deadline is not None and any(sum_over_ranks([self._stop.seconds_since > deadline / 2])):
                raise StepInterrupted
            yield rows.to(self._device)

    def _set_timeout(self, seconds: int) -> None:
        self._timeout_seconds = seconds
        set_timeout(seconds)

    @contextmanager
    def _patience(self) -> Iterator[None]:
        """For what may take some ranks much longer than others."""
        before = self._timeout_seconds
        self._set_timeout(self._config.comm.init_timeout_seconds)
        self._watch.moved(timeout_seconds=self._timeout_seconds)
        yield
        self._set_timeout(before)
        self._watch.moved(timeout_seconds=before)

    def _wants_to_stop(self) -> bool:
        """This rank's own view; leaves time for one more step and for a save like the longest so far."""
        return self._stop.is_wanted(
            max_seconds=self._config.training.max_seconds, seconds_needed=self._step_seconds + self._save_seconds
        )

    def _wants_to_stop_waiting(self) -> bool:
        """For other replica groups, which is no hang."""
        self._watch.moved(timeout_seconds=self._timeout_seconds)
        return self._wants_to_stop()

    def _agree_to_stop(self) -> bool:
        return any(sum_over_ranks([self._wants_to_stop()]))

    @property
    def _stop_reason(self) -> str:
        return self._stop.reason or "a signal to another rank"

    def _trace(self, is_traced_step: bool) -> AbstractContextManager[None]:
        return trace_collectives(
            is_traced_step and self._config.debug.trace_collectives,
            group_names=self._mesh.group_names(),
            rank=self._launch.rank,
            folder=self._shape.records,
        )

    def _count_skip(self, step: int, *, loss: float, grad_norm: float) -> None:
        self._skipped_in_a_row += 1
        limit = self._config.training.max_skipped_steps
        what = f"step {step}: loss {loss}, gradient norm {grad_norm}"
        if self._skipped_in_a_row > limit:
            raise TrainingError(
                f"{what}: not finite for {self._skipped_in_a_row} steps in a row, and training.max_skipped_steps is "
                f"{limit}; lower optimizer.lr or training.max_norm, or look at the data of these steps"
            )
        if self._metrics.active:
            logger.warning("%s: not finite, the weights stay as they are", what)

    def _is_validation_due(self, step: int) -> bool:
        validation = self._config.validation
        return validation.enable and (step % validation.freq == 0 or step == self._config.training.steps)

    def _validate(self, step: int) -> bool:
        """Mean loss over the targets of the held-out documents; False where a request to stop came first."""
        assert self._validation_loader is not None
        start = time.perf_counter()
        loss_sum = torch.zeros((), device=self._device)
        num_targets = 0
        with torch.no_grad():
            for count, batch in enumerate(self._validation_loader, start=1):
                loss_sum += self._forward_backward([batch.to(self._device)], num_targets=1).loss
                num_targets += batch.num_targets
                self._watch.moved(timeout_seconds=self._timeout_seconds)
                if self._agree_to_stop():
                    return False
                if count == self._config.validation.steps:
                    break
        is_leader = self._mesh.is_loss_leader
        total, targets = sum_over_ranks([loss_sum.item() * is_leader, num_targets * is_leader])
        seconds = time.perf_counter() - start
        self._metrics.log_validation(step, total / max(1, targets), validation_targets=targets, seconds=seconds)
        return True

    def _save(self, *, wait: bool = False) -> None:
        """Begins to save the step, with `wait` until it is committed; of several replica groups, one does it."""
        if self._checkpoints.saves and self._replicas.writes:
            with self._patience():
                self._checkpoints.save(self._progress_with_data(), wait=wait)

    def _log_saves(self) -> None:
        """What has become of the saves begun so far."""
        for save in self._checkpoints.reports():
            if save.error is None:
                self._save_seconds = max(self._save_seconds, save.seconds)
                self._metrics.log_event(
                    save.step,
                    "checkpoint saved",
                    seconds=save.seconds,
                    blocked_seconds=save.blocked_seconds,
                    staging_seconds=save.staging_seconds,
                    bytes=save.bytes,
                )
                self._metrics.ledger.book("saving", save.blocked_seconds)
                self._metrics.log_goodput(self._progress.step)

    def _save_last(self) -> None:
        """When it returns, the last step that this process trains is committed, or has failed to be."""
        with self._patience():
            self._checkpoints.finish()
        if self._checkpoints.saved_step != self._progress.step or self._config.checkpoint.create_seed_checkpoint:
            self._save(wait=True)
        self._log_saves()

    def _end_saving(self) -> None:
        """The last step of the run marks it as complete."""
        step = self._progress.step
        if step in self._failed_exports:
            return
        if step == self._config.training.steps and self._checkpoints.saved_step == step and self._replicas.writes:
            self._checkpoints.complete(self._progress)

    def _load_initial(self, weights: InitialWeights) -> None:
        start = time.perf_counter()
        weights.fill(self.parameters)
        for warning in weights.warnings if self._launch.rank == 0 else ():
            logger.warning("%s", warning)
        logger.info("weights of %s, read in %.1f s", weights.folder.path, time.perf_counter() - start)

    def _is_export_due(self, step: int) -> bool:
        checkpoint = self._config.checkpoint
        is_last = step == self._config.training.steps and checkpoint.last_save_in_hf
        return is_last or (checkpoint.hf_export_interval > 0 and step % checkpoint.hf_export_interval == 0)

    def _export(self, step: int) -> None:
        """Writes the weights in the format of the Hugging Face hub; training waits."""
        if not self._replicas.writes:
            return
        with self._patience():
            self._write_export(step)

    def _write_export(self, step: int) -> None:
        plan, to_name = self._shape, self._shape.spec.hugging_face.to_name
        dtype = getattr(torch, self._config.checkpoint.export_dtype)
        report = export_weights(
            plan.folder / EXPORT_FOLDER / f"step-{step}",
            tensors={to_name(name): parameter for name, parameter in self.parameters.items()},
            names=[to_name(name) for name in plan.parameters],
            dtype=dtype,
            files=export_files(
                spec=plan.spec,
                model_args=plan.model_args,
                model=self._config.model,
                tokenizer=plan.tokenizer,
                dtype=dtype,
            ),
        )
        if report.error is None:
            self._metrics.log_event(step, "weights exported", seconds=report.seconds, size_gib=report.gib)
            self._metrics.ledger.book("saving", report.seconds)
        else:
            logger.warning("step %d could not be exported: %s; training goes on without it", step, report.error)
            self._failed_exports.append(step)

    def _log(self, result: StepResult, interval: "_Interval") -> None:
        self._metrics.log(
            StepRecord(
                step=self._progress.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                tokens_seen=self._progress.tokens_seen,
                step_seconds=interval.seconds / interval.steps,
                data_seconds=interval.data_seconds / interval.steps,
                memory_gib=peak_memory_gib(self._device),
                skipped_steps=self._progress.skipped_steps,
            )
        )

    def _build_metrics(self, launch: Launch) -> MetricsWriter:
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"
        peak = peak_flops_per_second(name, dtype=self._config.training.mixed_precision_param)
        return build_metrics(
            self._config.metrics,
            folder=self._shape.records,
            rank=launch.rank,
            total_steps=self._config.training.steps,
            tokens_per_step=self._shape.tokens_per_step,
            flops_per_token=self._shape.flops_per_token,
            peak_flops=peak and peak * launch.world_size * self._shape.replica_groups,
            run_config=asdict(self._config),
            started=time.time() - self._stop.age_seconds,
        )

    def _say_how_it_ended(self) -> None:
        step, last_step = self._progress.step, self._config.training.steps
        saves = self._checkpoints.saves
        elsewhere = saves and not self._replicas.writes
        saved = saves and self._checkpoints.saved_step == step
        if saves and not (saved or elsewhere):
            raise TrainingError(
                f"step {step} of {last_step} was trained but could not be saved, see above; the newest checkpoint is "
                f"that of step {self._checkpoints.saved_step}. Make room and start again"
            )
        if step == last_step and step in self._failed_exports:
            raise TrainingError(f"step {step} was trained, but its weights could not be exported, see above")
        if self._config.checkpoint.create_seed_checkpoint:
            logger.info("the initial state is saved as step %d", step)
        elif step == last_step:
            logger.info("training is complete: step %d of %d", step, last_step)
            logger.info("%s", self._metrics.ledger.line())
        elif saved:
            logger.info("stopped by %s: step %d is saved, the same command goes on", self._stop_reason, step)
        elif elsewhere:
            what = "another replica group goes on or saves it, the same command comes back"
            logger.info("stopped by %s after step %d: %s", self._stop_reason, step, what)
        else:
            logger.warning("stopped by %s after step %d, which is not saved", self._stop_reason, step)


class _Interval:
    """Time since the last logged step."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.steps = 0
        self.data_seconds = 0.0

    def add(self, data_seconds: float) -> None:
        """Counts one step."""
        self.steps += 1
        self.data_seconds += data_seconds

    @property
    def seconds(self) -> float:
        """Seconds of all its steps."""
        return time.perf_counter() - self._start


def build_parts(plan: RunPlan, *, mesh: Mesh, device: torch.device) -> list[nn.Module]:
    """What this rank has of the model: the whole of it, or its stages."""
    return [
        build_part(plan, stage=stage, mesh=mesh, device=device)
        for stage in plan.stages.of_rank(mesh.pp.get_local_rank())
    ]


def build_part(plan: RunPlan, *, stage: int, mesh: Mesh, device: torch.device) -> nn.Module:
    """A stage of the model, parallelized on the meta device, then made real and given its initial weights."""
    config = plan.config
    model = parallelized_part(plan, stage=stage, mesh=mesh)
    model.to_empty(device="cpu" if config.training.enable_cpu_offload else device)
    model.init_buffers(device)
    parameters = named_parameters([model])
    init_weights(parameters, seed=config.debug.seed, std_of=partial(plan.spec.initial_std, plan.model_args))
    return model


def parallelized_part(plan: RunPlan, *, stage: int, mesh: Mesh) -> Any:
    """A stage of the model on the meta device, ready to be made real."""
    config = plan.config
    with torch.device("meta"):
        model = plan.spec.build(plan.model_args).to(getattr(torch, config.training.dtype))
    apply_parallelism(
        model,
        modules=plan.stages.modules[stage],
        frozen=plan.frozen_modules,
        mesh=mesh,
        tensor_plan=plan.spec.tensor_plan(),
        training=config.training,
        parallelism=config.parallelism,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
    )
    return model


def build_step(
    parts: list[nn.Module], *, plan: RunPlan, mesh: Mesh, loss_fn: Callable[..., Tensor], device: torch.device
) -> ForwardBackward:
    """How one forward and backward runs: plain, or through a pipeline."""
    if plan.degrees.pp == 1:
        return build_forward_backward(parts[0], loss_fn=loss_fn, device=device)
    from torchtitan_clone.parallel.pipeline import build_pipelined_forward_backward

    return build_pipelined_forward_backward(
        parts,
        stages=plan.stages,
        frozen_stages=plan.frozen_stages,
        parallelism=plan.config.parallelism,
        mesh=mesh,
        loss_fn=loss_fn,
        dim=plan.model_args.dim,
        dtype=getattr(torch, plan.config.training.mixed_precision_param),
        device=device,
    )


def training_state(parameters: dict[str, nn.Parameter], optimizer: OptimizerContainer) -> dict[str, Tensor]:
    """The tensors that a checkpoint holds: the very tensors, not copies."""
    state: dict[str, Tensor] = {f"model/{name}": parameter.detach() for name, parameter in parameters.items()}
    return state | {f"optimizer/{name}": tensor for name, tensor in optimizer.state_dict().items()}


def release(parts: list[nn.Module]) -> None:
    """Frees the gathered weights of parts of the model that are given up."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def move_state(old: dict[str, Tensor], *, parts: list[Any], device: torch.device) -> dict[str, Tensor]:
    """Moves the state that `training_state` gave into parts on the meta device, and empties it; a collective.

    Returns the optimizer's state of what still learns.
    """
    sources = gather_shard_map(old)
    parameters = named_parameters(parts)
    wanted: dict[str, Tensor] = {f"model/{name}": parameter for name, parameter in parameters.items()}
    for name, holders in sources.items():
        parameter = parameters.get(name.removeprefix("optimizer/").rpartition("/")[0])
        if name.startswith("optimizer/") and parameter is not None and parameter.requires_grad:
            whole = next(iter(holders.values()))
            # As the parameter lies, or where it is another kind of number, on every rank.
            shape = whole.global_shape
            like = parameter if shape == parameter.shape else torch.empty(shape, device="meta")
            wanted[name] = like.detach().to(whole.dtype)
    optimizer_state = {}
    for name, tensor in transfer(old, sources=sources, wanted=wanted, device=device):
        if (parameter := parameters.get(name.removeprefix("model/"))) is not None:
            torch.utils.swap_tensors(parameter, nn.Parameter(tensor, requires_grad=parameter.requires_grad))
        else:
            optimizer_state[name.removeprefix("optimizer/")] = tensor
    for part in parts:
        part.init_buffers(device)
    return optimizer_state


def identity_of(config: Config) -> str:
    """What replica groups that train together must have alike, as text; where the data lie may differ."""
    training = replace(config.training, dataset_path=None)
    return repr((config.model, training, config.optimizer, config.lr_scheduler, config.debug.seed))


def write_config(plan: RunPlan) -> None:
    """Writes the resolved configuration into the run's folder, all of it or nothing."""
    plan.records.mkdir(parents=True, exist_ok=True)
    partial_file = plan.records / f"{CONFIG_FILE}.partial"
    partial_file.write_text(to_toml(plan.config))
    partial_file.rename(plan.records / CONFIG_FILE)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory in use so far: of the CUDA allocator, or of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
