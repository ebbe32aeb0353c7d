"""Estimates the peak memory of a step from shapes alone, in microseconds: the search compares thousands of meshes.

planner/step_memory.py simulates a step instead, and verifies the best meshes.
"""

from collections import Counter
from dataclasses import dataclass
from math import ceil

import torch

from torchtitan_clone.ops.layers import ZeroCenteredRMSNorm
from torchtitan_clone.parallel.pipeline import most_in_flight
from torchtitan_clone.planner.work import (
    Layer,
    Shape,
    blocks_together,
    fsdp_group,
    model_work,
    reshards,
    shape_of,
    sharded_groups,
)
from torchtitan_clone.run.plan import RunPlan, is_without_fsdp, loss_chunk_tokens, sharding_options
from torchtitan_clone.run.teacher import find_teacher_plan


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of the pipeline rank that needs the most, at its peak."""

    state: float
    """Weights, optimizer state and averages of weights, and gradients where they exist at the peak."""
    gathered: float
    """Weights that FSDP gathered, or copies of weights without it, and gradients before they are reduced."""
    activations: float

    @property
    def total(self) -> float:
        return self.state + self.gathered + self.activations

    @property
    def largest(self) -> str:
        """Name of the largest part."""
        return max(vars(self), key=lambda name: vars(self)[name])


def estimate_memory(plan: RunPlan, *, teacher: RunPlan | None = None) -> MemoryEstimate:
    """Returns the estimated peak of the worst pipeline rank, without what CUDA's allocator wastes.

    `teacher` is the plan of run.teacher.find_teacher_plan().
    """
    # The first rank keeps the most micro-batches, the last one has the output.
    ranks = {rank: _of_rank(plan, rank=rank) for rank in dict.fromkeys((0, plan.degrees.pp - 1, plan.loss_rank))}
    if teacher is not None:
        ranks[plan.loss_rank] = _with_teacher(ranks[plan.loss_rank], teacher)
    return max(ranks.values(), key=lambda each: each.total)


def _with_teacher(student: MemoryEstimate, plan: RunPlan) -> MemoryEstimate:
    """Returns the memory of the rank with the loss, before which the teacher runs, keeping its last hidden states."""
    weights, shape = _weights_of(plan, rank=plan.loss_rank), shape_of(plan)
    hidden = shape.tokens * plan.model_args.dim * shape.itemsize
    of_layers = (saved_bytes(layer, shape=shape, all_saved=True) for layer in model_work(plan).kinds)
    columns, chunk = plan.model_args.vocab_size / plan.degrees.tp, min(shape.tokens, loss_chunk_tokens(plan))
    of_loss = hidden + (8 + shape.itemsize) * columns * chunk  # as the student's
    return MemoryEstimate(
        state=student.state + weights.shards * getattr(torch, plan.config.training.dtype).itemsize,
        gathered=student.gathered + weights.gathered,
        activations=student.activations + max(of_loss, *of_layers),
    )


def describe_memory(plan: RunPlan, *, memory_gib: float | None = None) -> str:
    """Returns the estimate as a line of a dry run, with the memory of a device that is known and too small."""
    found = estimate_memory(plan, teacher=find_teacher_plan(plan))
    sizes = {
        "weights, optimizer state and gradients": found.state,
        "gathered weights": found.gathered,
        "activations": found.activations,
    }
    parts = ", ".join(f"{name} {size / 2**30:,.2f}" for name, size in sizes.items())
    is_larger = memory_gib and found.total > memory_gib * 2**30
    limit = f"; more than the {memory_gib:,.0f} GiB of the device" if is_larger else ""
    return f"memory of a rank  about {found.total / 2**30:,.2f} GiB: {parts}{limit}\n"


@dataclass(frozen=True, kw_only=True)
class _StageWeights:
    """The weights of a pipeline rank."""

    layers: dict[Layer, int]
    """Number of layers of each kind."""
    shards: float
    """Elements that the rank holds."""
    complete: float
    """Elements of all groups of FSDP when gathered."""
    largest: float
    """Elements of the largest group of blocks when gathered."""
    has_output: bool
    gathered: float
    """Bytes of those that FSDP gathered, or of copies without it."""


def _weights_of(plan: RunPlan, *, rank: int) -> _StageWeights:
    config, degrees, args = plan.config, plan.degrees, plan.model_args
    work = model_work(plan)
    modules = [name for stage in plan.stages.of_rank(rank) for name in plan.stages.modules[stage]]
    counts = Counter(id(work.layers[int(name[7:])]) for name in modules if name.startswith("layers."))
    layers = {layer: counts[id(layer)] for layer in work.kinds if counts[id(layer)]}
    end = fsdp_group(args.vocab_size * args.dim / degrees.tp, degrees=degrees)
    ends = sum(name == "output" or (name == "tok_embeddings" and not args.tied_embeddings) for name in modules)
    positions = fsdp_group(args.max_seq_len * args.dim * args.learns_positions, degrees=degrees)
    groups = [(sharded_groups(layer, degrees=degrees), count) for layer, count in layers.items()]
    groups += [([end], ends), ([positions], "tok_embeddings" in modules)]
    complete = sum(count * group.elements for each, count in groups for group in each)
    together = blocks_together(plan, layers=sum(layers.values()) // len(plan.stages.of_rank(rank)))
    blocks = [
        [group.elements * (ceil(together) if group.axis == "fsdp" else 1) for group in each]
        for each, _ in groups[: len(layers)]
    ]
    largest = max(map(sum, blocks), default=0.0)
    shards = sum(count * group.elements / group.axis_size for each, count in groups for group in each)
    gathered = min(complete, 2 * largest + ends * end.elements) if reshards(config, degrees=degrees) else complete
    if is_without_fsdp(plan):  # copies of weights, if their data type is another
        gathered = complete if config.training.dtype != config.training.mixed_precision_param else 0.0
    return _StageWeights(
        layers=layers, shards=shards, complete=complete, largest=largest, has_output="output" in modules,
        gathered=gathered * getattr(torch, config.training.mixed_precision_param).itemsize,
    )  # fmt: skip


def _of_rank(plan: RunPlan, *, rank: int) -> MemoryEstimate:
    config, degrees = plan.config, plan.degrees
    weights, shape = _weights_of(plan, rank=rank), shape_of(plan)
    layers, shards, gathered = weights.layers, weights.shards, weights.gathered
    tensor = shards * getattr(torch, config.training.dtype).itemsize
    averages = 4 * shards if config.ema.enable else 0.0
    reduced = getattr(torch, config.training.mixed_precision_reduce).itemsize
    microbatches = _microbatches(plan)
    again = max((saved_bytes(layer, shape=shape, all_saved=True) for layer in layers), default=0.0)
    again = again if shape.share_again else 0.0
    in_flight = 1.0
    if degrees.pp > 1:
        in_flight = most_in_flight(config.parallelism, stages=plan.stages, microbatches=microbatches, rank=rank)
    saved = sum(count * saved_bytes(layer, shape=shape) for layer, count in layers.items())
    saved *= in_flight / len(plan.stages.of_rank(rank))
    loss = _loss_bytes(plan, shape=shape) if weights.has_output else 0.0
    if microbatches > 1:
        # Gradients of several micro-batches are summed before they are reduced over the ranks.
        gathered += weights.complete * reduced + weights.largest * shape.itemsize
        passes = plan.microbatches if degrees.pp > 1 else 1  # a second one finds the reduced gradients of the first
        return MemoryEstimate(
            state=(3 + (passes > 1)) * tensor + averages, gathered=gathered, activations=saved + max(loss, again)
        )
    gradients, reduction = tensor, weights.largest * (shape.itemsize + reduced)
    if is_without_fsdp(plan):
        gradients, reduction = tensor if not sharding_options(plan).keeps_gradients else shards * shape.itemsize, 0.0
    return max(
        MemoryEstimate(state=3 * tensor + averages, gathered=gathered, activations=saved + max(loss, again)),
        MemoryEstimate(state=3 * tensor + averages + gradients, gathered=gathered + reduction, activations=again),
        key=lambda each: each.total,
    )


def _microbatches(plan: RunPlan) -> int:
    """Returns the micro-batches of a pass through the pipeline, or of a step without one."""
    if plan.degrees.pp > 1:
        return plan.config.training.local_batch_size // plan.config.parallelism.pipeline_parallel_microbatch_size
    return plan.microbatches


def _loss_bytes(plan: RunPlan, *, shape: Shape) -> float:
    """Returns the bytes of the weight's gradient in fp32, and of logits or that gradient in lower precision."""
    columns = plan.model_args.vocab_size / plan.degrees.tp
    chunk = min(shape.tokens, loss_chunk_tokens(plan))
    logits = (8 + shape.itemsize) * chunk  # and twice in fp32
    converted = shape.itemsize * (chunk + plan.model_args.dim) if shape.itemsize < 4 else 0
    return columns * (4 * plan.model_args.dim + max(logits, converted))


def saved_bytes(layer: Layer, *, shape: Shape, all_saved: bool = False) -> float:
    """Returns the bytes of activations that a layer keeps for backward; `all_saved`: without recomputation."""
    tp, hidden = shape.degrees.tp, shape.args.dim
    share = 0.0 if all_saved else shape.share_again
    # Inputs of norms are sharded over the sequence, their results are gathered.
    # A zero-centered one keeps its input in fp32.
    copies = 4 / shape.itemsize if shape.args.norm_class is ZeroCenteredRMSNorm else 1.0
    everything = 2 * copies * hidden / tp + 2 * hidden + _complete_features(layer, shape=shape) / tp
    kept = hidden / tp
    if shape.recompute == "op":
        kept += hidden + _kept_features(layer, shape=shape) / tp
    return (share * kept + (1 - share) * everything) * shape.tokens * shape.itemsize


def _attention_features(layer: Layer, *, shape: Shape) -> float:
    """Returns the features per token of queries, keys, values and the result of attention with logits."""
    args = shape.args
    return 2 * (args.n_heads + args.kv_heads) * args.attention_dim if layer.delta_sizes is None else 0.0


def _complete_features(layer: Layer, *, shape: Shape) -> float:
    """Returns the features per token that a layer saves, without the inputs of attention and feed-forward."""
    used = shape.args.experts_per_token
    saved = ((used if weight.use.is_expert else 1) * weight.use.saved * weight.shape[-2] for weight in layer.matrices)
    return _attention_features(layer, shape=shape) + sum(saved)


def _kept_features(layer: Layer, *, shape: Shape) -> float:
    """Returns the features per token that are kept per operation: attention's, and every second product's."""
    used = shape.args.experts_per_token
    kept = sum(weight.shape[-2] * (used if weight.use.is_expert else 1) for weight in layer.matrices[::2])
    return kept + (shape.args.n_heads * shape.args.attention_dim if layer.delta_sizes is None else 0.0)
