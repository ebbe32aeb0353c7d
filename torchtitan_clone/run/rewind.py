"""Goes back to a checkpoint after spikes that skipping does not end, in the processes that train.

A skipped spike leaves the weights as they were. Where many follow one another, the weights are at fault, and the update
before the first of them is the latest that may have spoilt them: the checkpoint must be older. All batches since then
are passed over, those before the spikes too, as data.skip_steps would. Source: PaLM, arXiv 2204.02311, section 5.1.

All replica groups go back to the same step, each by itself: the group that saves names it in an attempt, by a sum over
the groups. They count attempts on, so that one that starts again from a step that was given up is behind the others.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import cast

import torch.distributed as dist

from torchtitan_clone.checkpoint.manager import CheckpointManager
from torchtitan_clone.checkpoint.progress import Progress, Rewind
from torchtitan_clone.observe.metrics import MetricsWriter
from torchtitan_clone.observe.records import REWOUND
from torchtitan_clone.parallel.gradients import sum_over_ranks
from torchtitan_clone.replicas.protocol import ReplicaGroup
from torchtitan_clone.run.folder import record_config
from torchtitan_clone.run.plan import RunPlan
from torchtitan_clone.run.state import RunState, Saver
from torchtitan_clone.run.stopping import Timeouts


def find_target(state: RunState, *, checkpoints: CheckpointManager, replicas: ReplicaGroup) -> None:
    """Sets the newest saved step that is old enough, None without one; a collective over all ranks and replica groups.

    Call it between begin_step() and commit() of the replica group.
    """
    assert state.suspect_step is not None
    is_asked = replicas.is_writer and dist.get_rank() == 0
    found = checkpoints.newest_step(below=state.suspect_step) if is_asked else None
    (number,) = replicas.sum(sum_over_ranks([0.0 if found is None else found + 1.0]))
    state.rewind_target = int(number) - 1 if number else None


def go_back(
    state: RunState,
    *,
    plan: RunPlan,
    checkpoints: CheckpointManager,
    saver: Saver,
    metrics: MetricsWriter,
    timeouts: Timeouts,
    replicas: ReplicaGroup,
    rank: int,
    change_phase: Callable[[], object],
    discard_steps: Callable[[int], None],
) -> None:
    """Loads the step that was found, continues behind the last batch, and forgets the steps in between; a collective.

    `plan` is that of the first phase. `change_phase` moves the state to the mesh of the next step, if that is another;
    `discard_steps` removes a number of steps from metrics and goodput.
    """
    target, trained, start = state.rewind_target, state.step, time.perf_counter()
    assert target is not None

    def before_load(progress: Progress) -> None:
        rewind = _describe(state, progress=progress)
        state.continue_from(replace(progress, data={}, rewinds=(*state.progress.rewinds, rewind)))
        change_phase()
        state.engine.free_unsharded_params()  # a validation leaves some, and the next forward would use them
        if state.engine.ema is not None:
            state.engine.ema.forget()

    with timeouts.relaxed():
        checkpoints.finish()
        saver.log_finished_saves()  # before their steps are forgotten
        checkpoints.go_back(target, leaves_newer=replicas.is_writer, before_load=before_load)
    state.init_averages()  # of a checkpoint that has none
    record_config(plan, checkpoints=checkpoints, rank=rank)
    discard_steps(trained - state.step)
    seconds = time.perf_counter() - start
    metrics.ledger.book("thrown_away", seconds)
    event = asdict(state.progress.rewinds[-1])
    metrics.log_event(event.pop("step"), REWOUND, **event, seconds=seconds)


def _describe(state: RunState, *, progress: Progress) -> Rewind:
    mixture, (last_batch, *_) = state.engine.plan.mixture, state.loader.source_progress()
    assert mixture is not None, "has_timeline() is true with training.on_spike"
    assert last_batch is not None
    first_batch = mixture.timeline.batch_at(cast("int", progress.data["samples"]))
    return Rewind(step=progress.step, from_step=state.step, first_batch=first_batch, last_batch=last_batch)
