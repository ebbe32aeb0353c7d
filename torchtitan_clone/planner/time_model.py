"""Predicts the time of a training step from the work of its layers, a hardware table and the schedule of the pipeline.

An operation takes the larger of its FLOPs over the speed and of its bytes over the bandwidth. FSDP's collectives are
hidden by the computation of a layer as far as it lasts; those of the tensor, context and expert axes wait for each
other. Times are in seconds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from torchtitan_clone.config import Degrees
from torchtitan_clone.parallel.pipeline import schedule_seconds
from torchtitan_clone.planner.hardware import Hardware
from torchtitan_clone.planner.work import (
    BACKWARD_ATTENTION,
    Layer,
    Product,
    Shape,
    Sharded,
    Transfer,
    attention_flops,
    blocks_together,
    fsdp_group,
    layer_products,
    layer_transfers,
    model_work,
    reshards,
    shape_of,
    sharded_groups,
)
from torchtitan_clone.run.plan import RunPlan

OPTIMIZER_BYTES = 8
"""AdamW reads weight, gradient and both moments and writes three of them; the gradient norm reads the gradient."""
PARTS = (
    "products", "attention", "elementwise", "tp", "cp", "ep", "fsdp", "dp_replicate", "pp", "bubble", "optimizer",
)  # fmt: skip


@dataclass(frozen=True)
class Seconds:
    """Times of one forward or backward, by part."""

    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __add__(self, other: "Seconds") -> "Seconds":
        both = {**self.parts, **other.parts}
        return Seconds({name: self.parts.get(name, 0.0) + other.parts.get(name, 0.0) for name in both})

    def times(self, factor: float) -> "Seconds":
        """Returns the times of that many of it."""
        return Seconds({name: factor * value for name, value in self.parts.items()})


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Forward and backward of one layer, or of a stage, on one micro-batch."""

    forward: Seconds = Seconds()
    backward: Seconds = Seconds()

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(forward=self.forward + other.forward, backward=self.backward + other.backward)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The predicted time of one optimizer step."""

    parts: Mapping[str, float]
    tokens_per_second: float
    """Per device."""
    mfu: float
    """Model FLOPs, as observe/flops.py counts them, per second and per the peak on the data sheet; 0: unknown."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def limit(self) -> str:
        """Name of the largest part."""
        return max(self.parts, key=lambda name: self.parts[name])


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Times of operations and collectives, of one rank of a mesh on some hardware."""

    hardware: Hardware
    degrees: Degrees
    compiled: bool
    float8: bool
    itemsize: int
    hides_tensor: bool

    def memory_seconds(self, size: float) -> float:
        """Returns the time of reading and writing `size` bytes."""
        return size / (1e9 * self.hardware.memory_gbps)

    def elementwise_seconds(self, elements: float) -> float:
        """Returns the time of what follows products with so many results."""
        fitted = self.hardware.fitted
        return self.memory_seconds(
            elements * self.itemsize * (fitted.compiled_passes if self.compiled else fitted.eager_passes)
        )

    def product_seconds(self, product: Product) -> float:
        """Returns the time of these products."""
        hardware, fitted = self.hardware, self.hardware.fitted
        speed = hardware.product_speed(min(product.rows, product.inner, product.columns)) * fitted.products
        casts = 0.0
        if self.float8 and product.is_linear:
            speed *= fitted.float8
            # Casts read twice, for the scale and for the value, and write one byte; inputs before they are gathered.
            cast = product.inner * (product.rows / self.degrees.tp + product.columns)
            casts = self.memory_seconds(5 * cast)
        computed = product.flops / speed
        moved = self.memory_seconds(product.elements * self.itemsize)
        return max(computed, moved) + casts + 1e-6 * hardware.operation_us

    def attention_seconds(self, flops: float) -> float:
        """Returns the time of attention with so many FLOPs."""
        hardware, fitted = self.hardware, self.hardware.fitted
        speed = hardware.product_speed(hardware.products[-1][0]) * fitted.attention
        slower = 1 + fitted.context * (1 - 1 / self.degrees.cp)
        return flops * (1 / speed) * slower

    def transfer_seconds(self, transfer: Transfer) -> float:
        """Returns the time of one collective that no computation hides."""
        size, stride = _axis(transfer.axis, degrees=self.degrees)
        seconds = self.hardware.collective_seconds(transfer.collective, size=transfer.size, ranks=size, stride=stride)
        if transfer.axis != "tp":
            return seconds
        return seconds * (1 - self.hardware.fitted.async_tensor * self.hides_tensor)

    def shard_seconds(self, group: Sharded, *, kind: str, itemsize: int) -> float:
        """Returns the time in which FSDP gathers or reduces a group of weights."""
        size = group.elements * itemsize
        return self.hardware.collective_seconds(kind, size=size, ranks=group.axis_size, stride=group.stride)

    def replica_seconds(self, group: Sharded, *, itemsize: int) -> float:
        """Returns the time in which replicas sum the gradients of a group of weights."""
        stride = group.axis_size * group.stride
        size = group.elements / group.axis_size * itemsize
        return self.hardware.collective_seconds("all_reduce", size=size, ranks=self.degrees.dp_replicate, stride=stride)

    def hidden(self, seconds: Seconds, *, axis: str, collectives: float) -> Seconds:
        """Returns computation together with collectives that it hides as far as it lasts."""
        return seconds + Seconds({axis: collectives - min(seconds.total, collectives)})


def _axis(axis: str, *, degrees: Degrees) -> tuple[int, int]:
    """Returns the size of an axis and the distance of its ranks."""
    if axis == "tp":
        return degrees.tp, 1
    if axis == "cp":
        return degrees.cp, degrees.tp
    if axis == "ep":
        return degrees.ep, 1
    return 2, degrees.data * degrees.cp * degrees.tp  # two stages of a pipeline


def layer_passes(layer: Layer, *, shape: Shape, machine: Machine) -> Passes:
    """Returns the times of a layer, without FSDP."""
    forward: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    backward = dict(forward)
    results = 0.0
    for product in layer_products(layer, shape=shape):
        seconds = machine.product_seconds(product)
        forward["products"] += seconds
        backward["products"] += (2 + product.again) * seconds
        results += product.rows * product.columns * product.count
    again = shape.share_again
    attention = machine.attention_seconds(attention_flops(layer, shape=shape))
    forward["attention"] = attention
    backward["attention"] = (BACKWARD_ATTENTION + (again if shape.recompute != "op" else 0.0)) * attention
    elementwise = machine.elementwise_seconds(results)
    forward["elementwise"] = elementwise
    backward["elementwise"] = (2 + again) * elementwise
    for transfer in layer_transfers(layer, shape=shape):
        seconds = machine.transfer_seconds(transfer)
        forward[transfer.axis] += transfer.forward * seconds
        backward[transfer.axis] += (transfer.again + transfer.backward) * seconds
    return Passes(forward=Seconds(forward), backward=Seconds(backward))


def output_passes(shape: Shape, *, machine: Machine) -> Passes:
    """Returns the times of the output projection and the loss, in chunks whose backward follows at once."""
    args, degrees = shape.args, shape.degrees
    columns = args.vocab_size / degrees.tp
    product = Product(rows=shape.tokens * (1 + args.mtp_depth), inner=args.dim, columns=columns, is_linear=False)
    seconds = machine.product_seconds(product)
    logits = machine.elementwise_seconds(product.rows * columns)
    passes = Passes(
        forward=Seconds({"products": seconds, "elementwise": logits}),
        backward=Seconds({"products": 2 * seconds, "elementwise": logits}),
    )
    if degrees.tp == 1:
        return passes
    gather = Transfer(axis="tp", collective="all_gather", size=shape.tokens * args.dim * shape.itemsize)
    exposed = Seconds({"tp": machine.transfer_seconds(gather)})
    return passes + Passes(forward=exposed, backward=exposed)


@dataclass(frozen=True, kw_only=True)
class TimedBlock:
    """A layer, or the ends of the model, with what FSDP communicates for it."""

    passes: Passes
    gather: float = 0.0
    reduce: float = 0.0
    """Sum of the gradients over the shards and over the replicas."""
    regathers: bool = True
    """Whether weights that were freed after forward are gathered again in backward."""
    together: float = 1.0
    """Number of blocks that are gathered and reduced at once."""


def layer_block(layer: Layer, *, shape: Shape, machine: Machine, reduce_itemsize: int, together: float) -> TimedBlock:
    """Returns the block of a layer, of which FSDP gathers and reduces as many as `together` says at once."""
    groups = sharded_groups(layer, degrees=machine.degrees)
    passes = layer_passes(layer, shape=shape, machine=machine)
    return _block(groups, passes=passes, machine=machine, reduce_itemsize=reduce_itemsize, together=together)


def _block(
    groups: Sequence[Sharded], *, passes: Passes, machine: Machine, reduce_itemsize: int, regathers: bool = True,
    together: float = 1.0,
) -> TimedBlock:  # fmt: skip
    kinds = {"gather": ("all_gather", machine.itemsize), "reduce": ("reduce_scatter", reduce_itemsize)}
    # The experts of each block are a group of their own.
    counts = [together if group.axis == "fsdp" else 1.0 for group in groups]
    sized = [(n, replace(group, elements=n * group.elements)) for n, group in zip(counts, groups, strict=True)]
    seconds = {
        name: sum(machine.shard_seconds(group, kind=kind, itemsize=size) / n for n, group in sized)
        for name, (kind, size) in kinds.items()
    }
    seconds["reduce"] += sum(machine.replica_seconds(group, itemsize=reduce_itemsize) / n for n, group in sized)
    return TimedBlock(passes=passes, regathers=regathers, together=together, **seconds)


@dataclass(frozen=True, kw_only=True)
class TimedStage:
    """A pipeline stage, or the complete model: its blocks and how often it has each, on one micro-batch."""

    blocks: tuple[tuple[TimedBlock, int], ...]
    machine: Machine
    reshards: bool

    def forward(self, *, gathers: bool) -> Seconds:
        """Returns the time of forward; the first group of blocks waits for its weights."""
        parts = [
            self.machine.hidden(block.passes.forward, axis="fsdp", collectives=block.gather * gathers).times(count)
            for block, count in self.blocks
        ]
        first = self.blocks[0][0]
        return sum(parts, Seconds({"fsdp": first.together * first.gather * gathers}))

    def backward(self, *, reduces: bool) -> Seconds:
        """Returns the time of backward; the gradients of the first group of blocks are reduced after it."""
        parts = [
            self.machine.hidden(
                block.passes.backward,
                axis="fsdp",
                collectives=block.gather * (self.reshards and block.regathers) + block.reduce * reduces,
            ).times(count)
            for block, count in self.blocks
        ]
        first = self.blocks[0][0]
        return sum(parts, Seconds({"fsdp": first.together * first.reduce * reduces}))


def step_seconds(plan: RunPlan, *, hardware: Hardware, real_order: bool) -> Seconds:
    """Returns the predicted times of the parts of one step."""
    stages = plan_stages(plan, hardware=hardware)
    parallelism, degrees = plan.config.parallelism, plan.degrees
    rows = plan.config.training.local_batch_size
    passes = plan.microbatches
    machine = stages[0].machine
    if degrees.pp == 1:
        (stage,) = stages
        later = passes - 1
        seconds = stage.forward(gathers=True) + stage.forward(gathers=stage.reshards).times(later)
        seconds += stage.backward(reduces=False).times(later) + stage.backward(reduces=True)
    else:
        microbatches = rows // parallelism.pipeline_parallel_microbatch_size
        seconds = pipeline_step(stages, plan=plan, microbatches=microbatches, real_order=real_order).times(passes)
        ends = [
            stage.forward(gathers=True)
            + stage.backward(reduces=True)
            + (stage.forward(gathers=stage.reshards) + stage.backward(reduces=False)).times(-1)
            for stage in {id(stage): stage for stage in stages}.values()
        ]
        # The ranks communicate at the same time.
        seconds += max(ends, key=lambda each: each.total)
    return seconds + Seconds({"optimizer": _optimizer_seconds(plan, machine=machine)})


def pipeline_step(stages: Sequence[TimedStage], *, plan: RunPlan, microbatches: int, real_order: bool) -> Seconds:
    """Returns the times of one pass through the pipeline: those of the busiest rank, and its bubble."""
    passes = {
        id(stage): (stage.forward(gathers=stage.reshards), stage.backward(reduces=False))
        for stage in {id(stage): stage for stage in stages}.values()
    }
    forward, backward = ([passes[id(stage)][half] for stage in stages] for half in (0, 1))
    shape = shape_of(plan)
    size = shape.tokens / plan.degrees.tp * shape.args.dim * shape.itemsize
    delay = stages[0].machine.transfer_seconds(Transfer(axis="pp", collective="send", size=size))

    def cost(kind: str, stage: int) -> float:
        if kind == "F":
            return forward[stage].total
        # Gradients of weights take as many products as forward; frozen layers have none.
        weights = min(half[stage].parts.get("products", 0.0) for half in (forward, backward))
        return {"B": backward[stage].total, "W": weights, "I": backward[stage].total - weights}[kind]

    ranks = plan.degrees.pp
    totals = [0.0] * ranks
    for stage, rank in enumerate(plan.stages.ranks):
        totals[rank] += forward[stage].total + backward[stage].total
    slowest = totals.index(max(totals))
    busiest = sum((forward[stage] + backward[stage] for stage in plan.stages.of_rank(slowest)), Seconds())
    if not real_order:  # of one-forward-one-backward schedules
        return busiest.times(microbatches) + Seconds({"bubble": busiest.total * (ranks - 1) * ranks / len(stages)})
    seconds = schedule_seconds(
        plan.config.parallelism, stages=plan.stages, microbatches=microbatches, cost=cost, delay=delay
    )
    return busiest.times(microbatches) + Seconds({"bubble": seconds - busiest.total * microbatches})


def plan_stages(plan: RunPlan, *, hardware: Hardware) -> list[TimedStage]:
    """Returns the stages of a plan on some hardware; one without a pipeline."""
    config, degrees, args = plan.config, plan.degrees, plan.model_args
    shape = shape_of(plan)
    machine = Machine(
        hardware=hardware,
        degrees=degrees,
        compiled=config.compile.compiles_model,
        float8=bool(config.model.converters),
        itemsize=shape.itemsize,
        hides_tensor=config.parallelism.enable_async_tensor_parallel,
    )
    reduce_itemsize = getattr(torch, config.training.mixed_precision_reduce).itemsize
    work = model_work(plan)
    layers = sum(name.startswith("layers.") for name in plan.stages.modules[0])
    sizes = {"reduce_itemsize": reduce_itemsize, "together": blocks_together(plan, layers=layers)}
    known = {str(id(layer)): layer_block(layer, shape=shape, machine=machine, **sizes) for layer in work.kinds}
    embedding = [fsdp_group(args.vocab_size * args.dim / degrees.tp, degrees=degrees)]
    end = {"machine": machine, "reduce_itemsize": reduce_itemsize, "regathers": False}
    known["output"] = _block(embedding, passes=output_passes(shape, machine=machine), **end)
    if not args.tied_embeddings:
        known["tok_embeddings"] = _block(embedding, passes=Passes(), **end)
    known |= {
        f"frozen {name}": TimedBlock(passes=Passes(forward=block.passes.forward), gather=block.gather, regathers=False)
        for name, block in known.items()
    }
    frozen, frees = set(plan.frozen_modules), reshards(config, degrees=degrees)
    stages: list[TimedStage] = []
    same: dict[tuple[tuple[str, int], ...], TimedStage] = {}
    for modules in plan.stages.modules:
        names = [str(id(work.layers[int(name[7:])])) if name.startswith("layers.") else name for name in modules]
        names = [f"frozen {name}" if module in frozen else name for name, module in zip(names, modules, strict=True)]
        counts = tuple((name, count) for name, count in Counter(names).items() if name in known)
        if counts not in same:
            blocks = tuple((known[name], count) for name, count in counts)
            same[counts] = TimedStage(blocks=blocks, machine=machine, reshards=frees)
        stages.append(same[counts])
    return stages


def _optimizer_seconds(plan: RunPlan, *, machine: Machine) -> float:
    """Returns the time in which a rank updates its weights."""
    degrees = plan.degrees
    ranks = degrees.pp * degrees.dp_shard * degrees.cp * degrees.tp
    size = model_work(plan).parameters / ranks * getattr(torch, plan.config.training.dtype).itemsize
    return machine.memory_seconds(size * OPTIMIZER_BYTES)


def predict_step_time(plan: RunPlan, *, hardware: Hardware, real_order: bool = True) -> StepTime:
    """Returns the predicted time of a step; without `real_order` with a formula for the bubble, quickly."""
    seconds = step_seconds(plan, hardware=hardware, real_order=real_order)
    rate = plan.tokens_per_step / seconds.total / (plan.world_size * plan.num_replica_groups)
    peak = 1e12 * hardware.peak_tflops
    return StepTime(
        parts={name: seconds.parts[name] for name in PARTS if seconds.parts.get(name)},
        tokens_per_second=rate,
        mfu=rate * model_work(plan).flops_per_token / peak if peak else 0.0,
    )


def describe_step_time(plan: RunPlan, *, hardware: Hardware) -> str:
    """Returns the predicted step time by part, as lines of a dry run."""
    time = predict_step_time(plan, hardware=hardware)
    lines = [f"predicted step time on {plan.world_size:,} x {hardware.name}"]
    lines += [f"  {name:15} {seconds:9.3f} s {seconds / time.seconds:6.1%}" for name, seconds in time.parts.items()]
    speed = f"{time.tokens_per_second:,.0f} tokens/s/GPU" + (f", MFU {time.mfu:.1%}" if time.mfu else "")
    return "\n".join([*lines, f"  {'sum':15} {time.seconds:9.3f} s, {speed}", ""])
