"""What a rank computes and communicates in each layer of a micro-batch, from the shapes and uses of the weights alone.

Legend: D model, m tokens of a micro-batch on the ranks of one tensor-parallel group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from torchtitan_clone.config import Config, ConfigError, Degrees
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.delta_net import DeltaSizes
from torchtitan_clone.models.hybrid import HybridArgs
from torchtitan_clone.ops.weight_use import VECTOR, UsesWeights, WeightUse
from torchtitan_clone.run.plan import RunPlan, sharding_options

BACKWARD_ATTENTION = 2.5
"""FLOPs of attention backward, in those of its forward: it computes the scores again. Source: arXiv 2307.08691."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter of a layer; experts are stacked along the first dimension."""

    shape: tuple[int, ...]
    use: WeightUse


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The weights of a layer, in the order of use, and how many tokens one token attends to on average."""

    weights: tuple[Weight, ...]
    attended_tokens: float
    delta_sizes: DeltaSizes | None
    """Sizes of linear attention, in which a token sees a state instead."""
    index_dim: int
    """Dimensions of all heads of an indexer; 0: it has none."""

    @property
    def matrices(self) -> list[Weight]:
        return [weight for weight in self.weights if weight.use.is_matrix]

    @property
    def has_experts(self) -> bool:
        return any(weight.use.is_expert for weight in self.weights)

    def elements(self, *, experts: bool, tp: int) -> float:
        """Returns the number of elements of experts, or of all other weights, on one tensor-parallel rank."""
        weights = [weight for weight in self.weights if weight.use.is_expert == experts]
        return sum(prod(weight.shape) / (1 if weight.use.is_replicated else tp) for weight in weights)


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """What the time and the memory of a model follow from; made once for all meshes."""

    layers: tuple[Layer, ...]
    """Equal layers are one object, so that what is computed of them can be kept."""
    costs: list[int]
    """Relative FLOPs of the layers that stages are balanced by."""
    parameters: int
    """Number of those that are trained."""
    flops_per_token: float

    kinds: tuple[Layer, ...]
    """The layers that differ."""


_known: dict[str, ModelWork] = {}


def model_work(plan: RunPlan) -> ModelWork:
    """Returns the work of the model of a plan, with its sequence length."""
    key = f"{plan.spec.name} {plan.model_args} {plan.config.training.seq_len} {plan.frozen_layers}"
    if key not in _known:
        args, seq_len = plan.model_args, plan.config.training.seq_len
        layers = _model_layers(plan, seq_len=seq_len)
        _known[key] = ModelWork(
            layers=layers,
            kinds=tuple({id(layer): layer for layer in layers}.values()),
            costs=plan.spec.layer_costs(args, seq_len=seq_len),
            parameters=sum(weight.numel() for weight in plan.trained_parameters.values()),
            flops_per_token=plan.flops_per_token,
        )
    return _known[key]


def _model_layers(plan: RunPlan, *, seq_len: int) -> tuple[Layer, ...]:
    with torch.device("meta"):
        blocks = plan.spec.build(plan.model_args).layers.values()
    unique: dict[Layer, Layer] = {}
    layers: list[Layer] = []
    args = plan.model_args
    delta_sizes = args.delta_sizes if isinstance(args, HybridArgs) else None
    for block, kind in zip(blocks, args.layer_kinds(), strict=True):
        weights = tuple(_weights_of(block, family=plan.spec.name))
        attended = kind.mean_attended_tokens(seq_len)
        sizes = delta_sizes if kind.recurrent is not None else None
        layer = Layer(weights=weights, attended_tokens=attended, delta_sizes=sizes, index_dim=kind.index_dim)
        layers.append(unique.setdefault(layer, layer))
    return tuple(layers)


def _weights_of(block: nn.Module, *, family: str) -> list[Weight]:
    """Returns the weights of a block in the order of use; ConfigError if no module says how one is used."""
    uses = {
        ".".join(filter(None, (path, name))): use
        for path, module in block.named_modules()
        if isinstance(module, UsesWeights)
        for name, use in module.WEIGHT_USES.items()
    }
    uses |= {name: VECTOR for name, weight in block.named_parameters() if weight.ndim < 2}
    if unknown := [name for name, _ in block.named_parameters() if name not in uses]:
        rule = "no module says how it uses this matrix, so that time and memory of a step cannot be predicted"
        raise ConfigError(f"model.name = {family}: {unknown[0]}: {rule}; add it to WEIGHT_USES of its module")
    weights = [Weight(shape=tuple(weight.shape), use=uses[name]) for name, weight in block.named_parameters()]
    return sorted(weights, key=lambda weight: weight.use.is_last)


@dataclass(frozen=True, kw_only=True)
class Product:
    """`count` matrix products of [rows, inner] and [inner, columns]; `again`: of them in recomputation."""

    rows: float
    inner: int
    columns: float
    count: float = 1.0
    again: float = 0.0
    is_linear: bool = True
    """Whether it may be computed in float8."""

    @property
    def flops(self) -> float:
        return 2 * self.rows * self.inner * self.columns * self.count

    @property
    def elements(self) -> float:
        """Number of elements of both inputs and of the result."""
        return self.count * (self.rows * (self.inner + self.columns) + self.inner * self.columns)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A collective: its bytes, of the larger side, and how often it runs in forward, recomputation and backward."""

    axis: str
    collective: str
    size: float
    forward: float = 0.0
    again: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What decides the work of a micro-batch in a layer."""

    args: ModelArgs
    rows: int
    """Sequences of a micro-batch."""
    seq_len: int
    degrees: Degrees
    recompute: str
    """Mode of activation checkpointing, or its option where it is selective: "none", "full", "op" or a number."""
    share: float
    """Share of the layers for which that holds; of the others nothing is computed again."""
    rotate: str
    itemsize: int
    """Bytes of an activation."""

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one tensor-parallel group."""
        return self.rows * self.seq_len / self.degrees.cp

    @property
    def share_again(self) -> float:
        """Share of the layers that are computed again in backward."""
        if self.recompute == "none":
            return 0.0
        return self.share / (int(self.recompute) if self.recompute.isdigit() else 1)


def recompute_option(config: Config) -> str:
    """Returns Shape.recompute."""
    options = config.activation_checkpoint
    return options.selective_ac_option if options.mode == "selective" else options.mode


def reshards(config: Config, *, degrees: Degrees) -> bool:
    """Whether FSDP frees the weights of layers after forward."""
    choice = config.parallelism.fsdp_reshard_after_forward
    return choice == "always" or (choice == "default" and degrees.pp == 1)


def shape_of(plan: RunPlan) -> Shape:
    """Returns the shape of a micro-batch; in a pipeline of one of its micro-batches."""
    config = plan.config
    parallelism, training = config.parallelism, config.training
    pipelined = plan.degrees.pp > 1
    first = config.activation_checkpoint.first_blocks
    return Shape(
        args=plan.model_args,
        rows=parallelism.pipeline_parallel_microbatch_size if pipelined else training.local_batch_size,
        seq_len=training.seq_len,
        degrees=plan.degrees,
        recompute=recompute_option(config),
        share=1.0 if first == -1 else min(1.0, first * len(plan.stages.modules) / plan.model_args.n_layers),
        rotate=parallelism.context_parallel_rotate_method,
        itemsize=getattr(torch, training.mixed_precision_param).itemsize,
    )


def layer_products(layer: Layer, *, shape: Shape) -> Iterator[Product]:
    """Yields the products of a layer's forward on one rank, without attention."""
    degrees, tokens = shape.degrees, shape.tokens
    matrices = layer.matrices
    last = None if layer.has_experts else matrices[-1]
    for index, weight in enumerate(matrices):
        again = shape.share_again
        if shape.recompute == "op":
            again *= index % 2
        elif weight is last:
            again = 0.0  # recomputation ends as soon as it has what backward reads
        if weight.use.is_expert:
            experts, columns, inner = weight.shape
            per_rank = experts // degrees.ep
            # Without expert parallelism the ranks of tensor parallelism share each expert.
            apart, together = (degrees.tp, 1) if degrees.ep > 1 else (1, degrees.tp)
            rows = tokens * shape.args.experts_per_token / apart / per_rank
            yield Product(
                rows=rows, inner=inner, columns=columns / together, count=per_rank, again=again, is_linear=False
            )
        else:
            columns, inner = weight.shape[-2:]
            yield Product(rows=tokens, inner=inner, columns=columns / degrees.tp, again=again)


def attention_flops(layer: Layer, *, shape: Shape) -> float:
    """Returns the FLOPs of attention forward on one rank; of linear attention those in chunks, with an indexer's."""
    args = shape.args
    if layer.delta_sizes is not None:
        return shape.tokens * layer.delta_sizes.chunk_flops / shape.degrees.tp
    of_heads = 4 * args.n_heads * args.attention_dim / shape.degrees.tp
    return shape.tokens * layer.attended_tokens * (of_heads + 2 * layer.index_dim)


def layer_transfers(layer: Layer, *, shape: Shape) -> Iterator[Transfer]:
    """Yields the collectives of a layer in one micro-batch, without those of FSDP."""
    args, degrees = shape.args, shape.degrees
    again = shape.share_again
    hidden = shape.tokens * args.dim * shape.itemsize
    if degrees.tp > 1:
        gathered = _gathered_features(layer, dim=args.dim) * shape.tokens * shape.itemsize
        yield from _sublayer_transfers(gathered, hidden, again=(again, again))
        has_shared_experts = any(weight.use.is_last and not weight.use.is_expert for weight in layer.weights)
        if not layer.has_experts or degrees.ep == 1 or has_shared_experts:
            yield from _sublayer_transfers(hidden, hidden, again=(again, 0.0))
    if degrees.cp > 1:
        sizes = layer.delta_sizes
        yield from _context_transfers(shape) if sizes is None else _state_transfers(sizes, shape=shape)
    if degrees.ep > 1 and layer.has_experts:
        size = hidden / degrees.tp * args.experts_per_token
        yield Transfer(axis="ep", collective="all_to_all", size=size, forward=2, again=2 * again, backward=2)


def _gathered_features(layer: Layer, *, dim: int) -> int:
    """Returns the features per token that attention gathers: those of its input, or of latents."""
    latents = [weight.shape[0] for weight in layer.weights if weight.use.is_latent]
    return sum(latents) or dim


def _sublayer_transfers(gathered: float, reduced: float, *, again: tuple[float, float]) -> Iterator[Transfer]:
    """Yields a gather before and a reduction after a sublayer, of which the backward of each is the other."""
    for collective, size, backward, times in (
        ("all_gather", gathered, "reduce_scatter", again[0]),
        ("reduce_scatter", reduced, "all_gather", again[1]),
    ):
        yield Transfer(axis="tp", collective=collective, size=size, forward=1, again=times)
        yield Transfer(axis="tp", collective=backward, size=size, backward=1)


def _context_transfers(shape: Shape) -> Iterator[Transfer]:
    args, degrees = shape.args, shape.degrees
    # Selective checkpointing keeps the results of attention.
    again = 0.0 if shape.recompute == "op" else shape.share_again
    per_head = shape.tokens * args.attention_dim * shape.itemsize / degrees.tp
    pairs = 2 * args.kv_heads * per_head
    if shape.rotate == "alltoall":
        sizes = ((2 * args.kv_heads + args.n_heads) * per_head, args.n_heads * per_head)
        for size in sizes:
            yield Transfer(axis="cp", collective="all_to_all", size=size, forward=1, again=again, backward=1)
    elif shape.rotate == "ring":
        hops = degrees.cp - 1
        # Backward passes on keys, values and their gradients in fp32.
        sent = Transfer(axis="cp", collective="send", size=pairs, forward=hops, again=hops * again, backward=hops)
        yield sent
        yield Transfer(axis="cp", collective="send", size=pairs * 4 / shape.itemsize, backward=hops)
    else:
        size = pairs * degrees.cp
        yield Transfer(axis="cp", collective="all_gather", size=size, forward=1, again=again, backward=1)
        yield Transfer(axis="cp", collective="reduce_scatter", size=size * 4 / shape.itemsize, backward=1)


def _state_transfers(sizes: DeltaSizes, *, shape: Shape) -> Iterator[Transfer]:
    """Yields those of linear attention: of the states of all pieces of rows, and of tokens between pieces."""
    degrees, again = shape.degrees, shape.share_again
    pieces = shape.rows * degrees.cp * (1 if shape.rotate == "alltoall" else 2)
    states = 4 * sizes.value_heads * sizes.key * (sizes.key + sizes.value) / degrees.tp
    channels = (2 * sizes.key_heads * sizes.key + sizes.value_heads * sizes.value) / degrees.tp
    # Selective checkpointing keeps the results of the gated delta rule.
    of_states = 0.0 if shape.recompute == "op" else again
    for size, times in ((states, of_states), ((sizes.conv - 1) * channels * shape.itemsize, again)):
        yield Transfer(axis="cp", collective="all_gather", size=pieces * size, forward=1, again=times, backward=1)


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A group of weights that FSDP gathers together: elements on one rank when gathered, and over which axis."""

    elements: float
    axis: str
    axis_size: int
    stride: int


def sharded_groups(layer: Layer, *, degrees: Degrees) -> Sequence[Sharded]:
    """Returns what FSDP gathers for a layer."""
    if degrees.ep == 1:
        both = sum(layer.elements(experts=each, tp=degrees.tp) for each in (True, False))
        return [fsdp_group(both, degrees=degrees)]
    experts = layer.elements(experts=True, tp=1) / degrees.ep
    size = degrees.dp_shard * degrees.cp * degrees.tp // degrees.ep
    apart = Sharded(elements=experts, axis="expert_fsdp", axis_size=size, stride=degrees.ep)
    dense = fsdp_group(layer.elements(experts=False, tp=degrees.tp), degrees=degrees)
    return [dense, apart] if experts else [dense]


def blocks_together(plan: RunPlan, *, layers: int) -> float:
    """Returns how many of so many layers of a stage FSDP gathers together, on average: sizes differ by at most one."""
    return layers / -(-layers // sharding_options(plan).blocks_per_group) if layers else 1.0


def fsdp_group(elements: float, *, degrees: Degrees) -> Sharded:
    """Returns the group of weights with so many elements on one tensor-parallel rank."""
    return Sharded(elements=elements, axis="fsdp", axis_size=degrees.dp_shard * degrees.cp, stride=degrees.tp)
