"""Predicts the memory of a training step: runs steps of a rank on fake tensors, and allocates what they allocate."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from torchtitan_clone.parallel.forward_backward import LossFn
from torchtitan_clone.parallel.stages import Stages
from torchtitan_clone.planner.cuda_allocator import replay
from torchtitan_clone.planner.memory_trace import Event, MemoryTrace
from torchtitan_clone.planner.simulate import CPU, fake_batch, fake_ranks, simulated
from torchtitan_clone.run.engine import Engine
from torchtitan_clone.run.model_parts import parallelize_model_parts
from torchtitan_clone.run.plan import RunPlan
from torchtitan_clone.run.teacher import ModelTeacher, find_teacher_plan
from torchtitan_clone.torch_compat import fake_tensors

STEPS = 2
"""Simulated steps: where the second one allocates depends on what the first one leaves, such as optimizer state."""
KEEPS_ALL_MICROBATCHES = ("GPipe", "LoopedBFS")
"""Schedules whose memory grows with the number of micro-batches."""


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes that a rank of a pipeline stage needs, by what they are for, at the peak of what is allocated.

    `gathered` are weights that FSDP gathered and what it gathers them with, or copies of weights without FSDP,
    `buffers` those of other communication, and `activations` all else that forward and backward compute. A teacher has
    weights, and activations that are part of `loss`. `allocator` is what CUDA's caching allocator reserves beyond; 0 on
    CPU.
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

    `expandable` is the allocator's option (None: as in the environment); `loss_fn` replaces the loss of the plan. Of a
    pipeline not all ranks are simulated, see _predict_1f1b() and _predict_others().
    """
    expandable = expandable_segments() if expandable is None else expandable

    def memory_of(plan: RunPlan, rank: int) -> StepMemory:
        events = trace_steps(plan, pipeline_rank=rank, loss_fn=loss_fn)
        return memory_at_peak(events, device_type=device_type, expandable=expandable)

    parallelism = plan.config.parallelism
    is_1f1b = parallelism.pipeline_parallel_schedule == "1F1B" and not parallelism.pipeline_parallel_schedule_csv
    is_1f1b = is_1f1b and plan.degrees.pp > 2 and not plan.frozen_modules  # else stages are not in proportion
    return (_predict_1f1b if is_1f1b else _predict_others)(plan, memory_of)


MemoryOf = Callable[[RunPlan, int], StepMemory]


def _predict_1f1b(plan: RunPlan, memory_of: MemoryOf) -> list[StepMemory]:
    """Simulates the first stage with two and three micro-batches in flight, of which each stage has one less.

    Another stage but the last needs in proportion to its parameters and layers what the first one needs.
    """
    pp, modules, parameters = plan.degrees.pp, plan.stages.modules, stage_parameters(plan)
    layers = [sum(name.startswith("layers.") for name in names) for names in modules]
    few, more = (memory_of(_with_stages(plan, [*[modules[0]] * (count - 1), modules[-1]]), 0) for count in (2, 3))
    microbatches = plan.config.training.local_batch_size // plan.config.parallelism.pipeline_parallel_microbatch_size
    memories = []
    for rank in range(pp - 1):
        first = _extrapolated(few, more, share=min(pp - rank, microbatches) - 2)
        of_layers, of_parameters = layers[rank] / max(1, layers[0]), parameters[rank] / parameters[0]
        sizes = {
            part: round(size * (of_layers if part in ("activations", "buffers") else of_parameters))
            for part, size in vars(first).items()
        }
        memories.append(StepMemory(**sizes))
    return [*memories, memory_of(_with_stages(plan, [modules[0], modules[-1]]), 1)]


def _with_stages(plan: RunPlan, modules: Sequence[tuple[str, ...]]) -> RunPlan:
    """Returns the plan with a pipeline of one rank for each of these stages."""
    parallelism = replace(plan.config.parallelism, pipeline_parallel_degree=len(modules))
    stages = Stages(modules=tuple(modules), ranks=tuple(range(len(modules))))
    config, degrees = replace(plan.config, parallelism=parallelism), replace(plan.degrees, pp=len(modules))
    return replace(plan, config=config, degrees=degrees, stages=stages)


def _predict_others(plan: RunPlan, memory_of: MemoryOf) -> list[StepMemory]:
    """Simulates the first, the second and the last rank, and those around a change of the number of (frozen) modules.

    What the ranks between two of them need is between what those need, as the micro-batches in flight are.
    """
    pp = plan.degrees.pp
    frozen = set(plan.frozen_modules)
    modules = [[plan.stages.modules[stage] for stage in plan.stages.of_rank(rank)] for rank in range(pp)]
    sizes = [[(len(names), len(frozen.intersection(names))) for names in own] for own in modules]
    starts = [rank for rank in range(pp) if rank in (0, 1, pp - 1) or sizes[rank] != sizes[rank - 1]]
    memories = []
    for start, stop in zip(starts, [*starts[1:], pp], strict=True):
        first = memory_of(plan, start)
        last = memory_of(plan, stop - 1) if stop - start > 1 else first
        shares = (index / max(1, stop - start - 1) for index in range(stop - start))
        memories += [_extrapolated(first, last, share=share) for share in shares]
    return memories


def _extrapolated(first: StepMemory, second: StepMemory, *, share: float) -> StepMemory:
    return StepMemory(**{part: round(size + share * (vars(second)[part] - size)) for part, size in vars(first).items()})


def memory_table(plan: RunPlan, *, device_type: str) -> str:
    """Returns the parameters and the predicted memory of each pipeline rank as text."""
    memories = predict_step_memory(plan, device_type=device_type)
    segments = "expandable" if expandable_segments() else "fixed"
    device = device_type if device_type == "cpu" else f"{device_type} with {segments} segments"
    columns = "".join(f"{part:>13}" for part in PARTS)
    lines = [f"memory of a step in GiB on {device}", f"{'rank':>4}{'parameters':>18}{columns}{'sum':>9}"]
    for rank, (parameters, memory) in enumerate(zip(stage_parameters(plan), memories, strict=True)):
        sizes = "".join(f"{size / 2**30:13.2f}" for size in vars(memory).values())
        largest = max(PARTS, key=vars(memory).__getitem__)
        lines.append(f"{rank:4}{parameters:18,}{sizes}{memory.total / 2**30:9.2f}  most: {largest}")
    return "\n".join(lines)


def stage_parameters(plan: RunPlan) -> list[int]:
    """Returns the number of parameters of each pipeline rank, over all ranks that share them."""
    names = [
        tuple(f"{name}." for stage in plan.stages.of_rank(rank) for name in plan.stages.modules[stage])
        for rank in range(plan.degrees.pp)
    ]
    return [sum(p.numel() for name, p in plan.parameters.items() if name.startswith(own)) for own in names]


def memory_at_peak(events: Sequence[Event], *, device_type: str, expandable: bool) -> StepMemory:
    """Returns the memory of a rank with these allocations."""
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
    """Returns the allocations of a rank in its first steps.

    Micro-batches of a pipeline beyond those that can be in flight at once are not simulated.
    """
    all_rows = plan.config.parallelism.pipeline_parallel_schedule in KEEPS_ALL_MICROBATCHES
    return simulate_steps(simulated(plan, all_rows=all_rows), pipeline_rank=pipeline_rank, loss_fn=loss_fn)


def simulate_steps(plan: RunPlan, *, pipeline_rank: int, loss_fn: LossFn | None = None) -> list[Event]:
    """Returns the same, of all micro-batches."""
    training = plan.config.training
    num_targets = training.local_batch_size * training.seq_len
    # Gradients of several passes are summed before they are reduced over ranks, of a pipeline afterwards.
    passes = min(2, plan.microbatches)
    with fake_ranks(plan, rank=pipeline_rank * (plan.world_size // plan.degrees.pp)) as mesh:
        parts = parallelize_model_parts(plan, mesh=mesh)
        plan_of_teacher = find_teacher_plan(plan)
        teachers = [] if plan_of_teacher is None else parallelize_model_parts(plan_of_teacher, mesh=mesh)
        with fake_tensors(of_gpu=plan.device_type == "cuda"), MemoryTrace() as trace:
            for part in (*parts, *teachers):
                part.to_empty(device=CPU)
                part.init_buffers(CPU)
            for part in parts:
                if part.output is not None:
                    trace.follow_loss(part.output)
            teacher = ModelTeacher(teachers[0].eval()) if teachers else None
            engine = Engine(plan, mesh=mesh, model_parts=parts, device=CPU, loss_fn=loss_fn, teacher=teacher)
            for _ in range(STEPS):
                trace.part = "activations"
                engine.forward_backward([fake_batch(plan)] * passes, num_targets=num_targets)
                trace.name_gradients(p.grad for p in engine.parameters.values() if p.grad is not None)
                trace.part = "optimizer"
                engine.gradient_norm()
                engine.optimizer.step(factor=0.5)
                engine.optimizer.zero_grad()
                if engine.ema is not None:
                    engine.ema.update(engine.plan.config.ema.freq)
            return list(trace.events)
