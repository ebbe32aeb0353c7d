"""Predicts the memory of a training step: runs steps of a rank on fake tensors, and allocates what they allocate."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import lcm

from torchtitan_clone.parallel.forward_backward import LossFn
from torchtitan_clone.parallel.stages import splits_backward
from torchtitan_clone.run.cuda_allocator import replay
from torchtitan_clone.run.engine import Engine, parallelize_model_parts
from torchtitan_clone.run.memory_trace import Event, MemoryTrace
from torchtitan_clone.run.plan import RunPlan
from torchtitan_clone.run.simulate import CPU, fake_batch, fake_ranks, simulated
from torchtitan_clone.run.stretched_trace import Stretch, UnlikeError, stretch_trace
from torchtitan_clone.torch_compat import fake_tensors, name_fsdp_modules

STEPS = 2
"""Simulated steps: where the second one allocates depends on what the first one leaves, such as optimizer state."""
KEEPS_ALL_MICROBATCHES = ("GPipe", "LoopedBFS")
"""Schedules whose memory grows with the number of micro-batches."""


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes that a rank of a pipeline stage needs, by what they are for, at the peak of what is allocated.

    `gathered` are weights that FSDP gathered and what it gathers them with, `buffers` those of other communication, and
    `activations` all else that forward and backward compute. `allocator` is what CUDA's caching allocator reserves
    beyond; 0 on CPU.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    buffers: int
    activations: int
    loss: int
    allocator: int

    @property
    def total(self) -> int:
        """Bytes in all: on CUDA what torch reports as max_memory_reserved()."""
        return sum(vars(self).values())


PARTS = [field.name for field in fields(StepMemory)]


def expandable_segments() -> bool:
    """Whether the environment sets this option of CUDA's caching allocator."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any("expandable_segments:True" in os.environ.get(name, "") for name in names)


def predict_step_memory(
    plan: RunPlan, *, device_type: str, expandable: bool | None = None, loss_fn: LossFn | None = None
) -> list[StepMemory]:
    """Returns the memory of a rank of each pipeline stage on "cpu" or "cuda".

    `expandable` is the allocator's option (None: as in the environment); `loss_fn` replaces the loss of the plan. Of
    layers that are alike only a few are simulated, and micro-batches beyond those that are in flight at once are not.
    """
    options = {"device_type": device_type, "expandable": expandable, "loss_fn": loss_fn}
    return [predict_rank_memory(plan, pipeline_rank=rank, **options) for rank in range(plan.degrees.pp)]


def predict_rank_memory(
    plan: RunPlan,
    *,
    pipeline_rank: int,
    device_type: str,
    expandable: bool | None = None,
    loss_fn: LossFn | None = None,
) -> StepMemory:
    """Returns the memory of one rank of the pipeline, see predict_step_memory()."""
    plan = simulated(plan, all_rows=plan.config.parallelism.pipeline_parallel_schedule in KEEPS_ALL_MICROBATCHES)
    expandable = expandable_segments() if expandable is None else expandable
    events = trace_steps(plan, pipeline_rank=pipeline_rank, loss_fn=loss_fn)
    reserved = replay(events, expandable=expandable).reserved if device_type == "cuda" else 0
    sizes = _at_peak(events)
    return StepMemory(**sizes, allocator=max(0, reserved - sum(sizes.values())))


def _at_peak(events: Sequence[Event]) -> dict[str, int]:
    """Returns the bytes of each part when most are allocated."""
    live: dict[int, Event] = {}
    sizes: Counter[str] = Counter(dict.fromkeys(PARTS[:-1], 0))
    total, most, at_peak = 0, 0, dict(sizes)
    for event in events:
        if event.size:
            live[event.block] = event
            sizes[event.part] += event.size
            total += event.size
        else:
            ended = live.pop(event.block)
            if total > most:
                most, at_peak = total, dict(sizes)
            sizes[ended.part] -= ended.size
            total -= ended.size
    return dict(sizes) if total > most else at_peak


def trace_steps(plan: RunPlan, *, pipeline_rank: int, loss_fn: LossFn | None = None) -> list[Event]:
    """Returns the allocations of a rank in its first steps."""
    modules = list(plan.stages.modules)
    stretches = []
    if not plan.frozen_modules and not splits_backward(plan.config.parallelism):
        for stage in plan.stages.of_rank(pipeline_rank):
            if (stretch := _stretch_of(plan, stage=stage)) is not None:
                removed = {f"layers.{layer}" for layer in stretch.removed}
                modules[stage] = tuple(name for name in modules[stage] if name not in removed)
                stretches.append(stretch)
    small = replace(plan, stages=replace(plan.stages, modules=tuple(modules)))
    try:
        return stretch_trace(simulate_steps(small, pipeline_rank=pipeline_rank, loss_fn=loss_fn), stretches=stretches)
    except UnlikeError:
        return simulate_steps(plan, pipeline_rank=pipeline_rank, loss_fn=loss_fn)


def _stretch_of(plan: RunPlan, *, stage: int) -> Stretch | None:
    """Returns which layers of a stage need not be simulated, because they repeat those before; None for too few."""
    layers = [int(name.partition(".")[2]) for name in plan.stages.modules[stage] if name.startswith("layers.")]
    kinds = _kinds_of_layers(plan)
    own = [kinds[layer] for layer in layers]
    found = [
        (first, period) for period in (1, 2, 3, 4, 6) for first in range(len(own)) if _repeats(own[first:], period)
    ]
    if not found:
        return None
    first, period = min(found, key=sum)
    ac = plan.config.activation_checkpoint
    period = lcm(
        period, int(ac.selective_ac_option) if ac.mode == "selective" and ac.selective_ac_option != "op" else 1
    )
    # FSDP gathers the weights of the next blocks, and frees what it gathered them with one later.
    ahead = -(-plan.config.parallelism.fsdp_prefetch_blocks // period)
    groups = [layers[start : start + period] for start in range(first, len(layers) - period + 1, period)]
    copied, reach = 2 * ahead + 1, ahead + 1
    more = len(groups) - (copied + ahead + 2)
    return Stretch(groups=groups, copied=copied, reach=reach, more=more) if more > 0 else None


def _kinds_of_layers(plan: RunPlan) -> list[object]:
    """Returns what distinguishes the layers: shapes of their weights, and their kind of attention."""
    shapes: dict[str, list[object]] = {}
    for name, parameter in plan.parameters.items():
        layer, _, rest = name.removeprefix("layers.").partition(".")
        shapes.setdefault(layer, []).append((rest, parameter.shape))
    return [(shapes[str(layer)], kind) for layer, kind in enumerate(plan.model_args.layer_kinds())]


def _repeats(kinds: Sequence[object], period: int) -> bool:
    return all(kind == kinds[index % period] for index, kind in enumerate(kinds))


def simulate_steps(plan: RunPlan, *, pipeline_rank: int, loss_fn: LossFn | None = None) -> list[Event]:
    """Returns the same, of all layers."""
    training = plan.config.training
    num_targets = training.local_batch_size * training.seq_len
    # Gradients of several micro-batches are summed before they are reduced over ranks.
    microbatches = min(2, plan.global_batch_size // (plan.degrees.data * training.local_batch_size))
    with fake_ranks(plan, rank=pipeline_rank * (plan.world_size // plan.degrees.pp)) as mesh:
        parts = parallelize_model_parts(plan, mesh=mesh)
        with fake_tensors(), MemoryTrace() as trace:
            for part in parts:
                part.to_empty(device=CPU)
                trace.name_layers(part)
                part.init_buffers(CPU)
                name_fsdp_modules(part)
                trace.follow(part, loss=part.output)
                trace.name_layers(part)
            engine = Engine(plan, mesh=mesh, model_parts=parts, device=CPU, loss_fn=loss_fn)
            for _ in range(STEPS):
                trace.enter("activations")
                engine.forward_backward([fake_batch(plan)] * microbatches, num_targets=num_targets)
                trace.enter("optimizer")
                engine.clip_gradients()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            return list(trace.events)
