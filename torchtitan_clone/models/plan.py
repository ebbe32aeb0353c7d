"""How tensor and sequence parallelism shard a decoder: ParallelStyle objects by module name.

parallel/tensor.py shards the output projection. Source: arXiv 1909.08053, arXiv 2205.05198.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from torchtitan_clone.ops.layers import Linear
from torchtitan_clone.ops.token_shards import gather_tokens, sum_and_shard_tokens
from torchtitan_clone.torch_compat import ModuleStyle

if TYPE_CHECKING:
    from torchtitan_clone.models.moe import MoEArgs
    from torchtitan_clone.ops.sparse_attention import SparseCore

Styles = dict[str, ParallelStyle]
"""Styles by module name."""


def decoder_styles() -> Styles:
    """Returns styles for embedding, norms, attention and SwiGLU, by module name."""
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": REPLICATED,
        "layers.*.attention": ColwiseGather("wq", "wk", "wv"),
        "layers.*.attention.wo": RowwiseScatter(),
        "layers.*.ffn_norm": REPLICATED,
        **_feed_forward_styles("layers.*.feed_forward"),
        "norm": SequenceParallel(),
    }


def _feed_forward_styles(name: str) -> dict[str, ParallelStyle]:
    """Returns styles for a SwiGLU of that name."""
    return {name: ColwiseGather("w1", "w3"), f"{name}.w2": RowwiseScatter()}


def learned_position_styles() -> dict[str, ParallelStyle]:
    """Returns styles for an embedding with learned positions, of which a rank adds those of its own tokens."""
    return {"tok_embeddings": VocabularySharded(), "tok_embeddings.positions": OwnPositions()}


def qk_norm_styles() -> dict[str, ParallelStyle]:
    """Returns styles for norms of queries and keys, whose gradients are summed over the axis: a rank has some heads."""
    return {"layers.*.attention.q_norm": REPLICATED, "layers.*.attention.k_norm": REPLICATED}


def gated_attention_styles() -> dict[str, ParallelStyle]:
    """Returns styles for attention with a gate, instead of those of attention."""
    return {"layers.*.attention": ColwiseGather("wq", "wk", "wv", "wg")}


def delta_net_styles(layers: Iterable[int]) -> dict[str, ParallelStyle]:
    """Returns styles for the linear attention of these layers, of which a rank has some heads."""
    return _delta_styles(layers, "wg", "wa")


def kimi_delta_styles(layers: Iterable[int]) -> dict[str, ParallelStyle]:
    """Returns styles for Kimi Delta Attention in these layers; each rank computes the latents of all tokens."""
    latents: dict[str, ParallelStyle] = {f"layers.*.attention.{name}.a": REPLICATED for name in ("wg", "wa")}
    return _delta_styles(layers, "wg.b", "wa.b") | latents


def _delta_styles(layers: Iterable[int], *projections: str) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {
        f"layers.*.attention.{name}": Distributed(Shard(0)) for name in ("q_conv", "k_conv", "v_conv", "decay")
    }
    for layer in layers:
        styles[f"layers.{layer}.attention"] = ColwiseGather("wq", "wk", "wv", "wb", *projections)
        styles[f"layers.{layer}.attention.wo"] = RowwiseScatter()
    return styles | {"layers.*.attention.norm": REPLICATED}


def latent_attention_styles(*, has_query_latent: bool, layer: int | str = "*") -> dict[str, ParallelStyle]:
    """Returns styles for multi-head latent attention of one layer or all, instead of those of attention.

    Each rank computes the latents of its own tokens; the latents are gathered, which are smaller than hidden states.
    """
    with_latent = {"wq_a": REPLICATED, "q_norm": REPLICATED, "wq_b": ColwiseGather()}
    styles: dict[str, ParallelStyle] = {
        **(with_latent if has_query_latent else {"wq": ColwiseGather()}),
        "wkv_a": REPLICATED,
        "kv_norm": REPLICATED,
        "wkv_b": ColwiseGather(),
        "shared_key": PrepareModuleOutput(
            output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False
        ),
        "wo": RowwiseScatter(),
    }
    return {f"layers.{layer}.attention.{name}": style for name, style in styles.items()}


def indexer_styles() -> dict[str, ParallelStyle]:
    """Returns styles for the indexer of latent attention: each rank computes what it needs of its own tokens.

    Scores need all heads of the indexer, whose results for all tokens are gathered; the loss those of attention.
    """
    styles: dict[str, ParallelStyle] = {
        **{f"indexer.{name}": REPLICATED for name in ("wq_b", "wk", "k_norm", "weights_proj")},
        "indexer.gathered": Then(gather_tokens), "loss": Then(sum_and_shard_tokens), "core": SharedHeads(),
    }  # fmt: skip
    return {f"layers.*.attention.{name}": style for name, style in styles.items()}


def without_attention(styles: Styles) -> Styles:
    """Returns the styles of what is not attention."""
    return {name: style for name, style in styles.items() if name.split(".")[2:3] != ["attention"]}


def heads_norm_styles() -> dict[str, ParallelStyle]:
    """Returns styles for norms of queries and keys over all heads, of which a rank has some."""
    norms = [f"layers.*.attention.{name}" for name in ("q_norm", "k_norm")]
    return {**{name: Distributed(Shard(0)) for name in norms}, **{f"{name}.mean_square": Averaged() for name in norms}}


def sink_styles() -> dict[str, ParallelStyle]:
    """Returns styles for the sinks of attention, of which a rank has those of its heads."""
    return {"layers.*.attention.sinks": Distributed(Shard(0))}


def prediction_styles() -> dict[str, ParallelStyle]:
    """Returns styles for what a layer of multi-token prediction has besides its block; each rank has its own tokens."""
    before = SequenceParallel(use_local_output=True)  # of the hidden states after a norm, which are DTensors
    styles = {"enorm": REPLICATED, "hnorm": before, "eh_proj": REPLICATED, "norm": SequenceParallel()}
    return {f"layers.*.{name}": style for name, style in styles.items()}


def moe_styles(moe: "MoEArgs", *, dense_layers: Iterable[int] = ()) -> Styles:
    """Returns styles for a decoder whose feed-forward is a mixture of experts, except in `dense_layers`."""
    feed_forward = "layers.*.feed_forward"
    styles = {name: style for name, style in decoder_styles().items() if not name.startswith(feed_forward)}
    styles |= {f"{feed_forward}.router": REPLICATED, f"{feed_forward}.experts": HiddenSharded()}
    if moe.num_shared_experts:
        styles |= _feed_forward_styles(f"{feed_forward}.shared_experts")
    if moe.shared_gate:
        styles[f"{feed_forward}.shared_gate"] = REPLICATED
    for layer in dense_layers:
        styles |= _feed_forward_styles(feed_forward.replace("*", str(layer)))
    return styles


def distribute_parameters(module: nn.Module, mesh: DeviceMesh, placement: Callable[[str], Placement]) -> None:
    """Makes DTensors of the module's own parameters by their names; buffers stay plain, as they are state."""
    for name, weight in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, nn.Parameter(distribute_tensor(weight, mesh, [placement(name)])))


class Distributed(ModuleStyle, ParallelStyle):
    """Distributes the parameters of a module that computes with those of its rank and a share of their gradients."""

    def __init__(self, placement: Placement):
        self.placement = placement

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh, lambda _: self.placement)
        return module


REPLICATED = Distributed(Replicate())


class ColwiseGather(ModuleStyle, ParallelStyle):
    """Gathers the tokens of the first argument, and shards the linear layers of these names by output features.

    Layers of this package compute with plain tensors, since DTensor takes time for each operation; those of another
    class, for example in float8, with DTensors. Without names the module itself is the layer.
    """

    def __init__(self, *names: str):
        self.names = names or ("",)

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layers = [module.get_submodule(name) for name in self.names]
        is_plain = all(type(layer) is Linear for layer in layers)

        def gather(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            if is_plain:
                return gather_tokens(args[0], device_mesh), *args[1:]
            x_BTD = DTensor.from_local(args[0], device_mesh, [Shard(1)])
            return x_BTD.redistribute(placements=[Replicate()]), *args[1:]

        module.register_forward_pre_hook(gather)
        for layer in layers:
            parallelize_module(layer, device_mesh, Distributed(Shard(0)) if is_plain else ColwiseParallel())
            if is_plain:
                cast("Linear", layer).holds_shard = layer.bias is None
        return module


class RowwiseScatter(ModuleStyle, ParallelStyle):
    """Shards a linear layer by input features; the results of the ranks are summed and sharded by tokens."""

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not Linear:
            return parallelize_module(module, device_mesh, RowwiseParallel(output_layouts=Shard(1)))
        distribute_parameters(module, device_mesh, lambda name: Shard(1) if name == "weight" else Replicate())
        module.holds_shard = module.bias is None
        # torch's annotations lack the result of the hook.
        return distribute_module(module, device_mesh, output_fn=cast("Callable[..., None]", _sum_and_shard))


def _sum_and_shard(_module: nn.Module, out_BTD: Tensor, mesh: DeviceMesh) -> Tensor:
    return sum_and_shard_tokens(out_BTD, mesh)


class VocabularySharded(ModuleStyle, ParallelStyle):
    """Shards an embedding by tokens of the vocabulary; each rank computes a part of the sum of all."""

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh, lambda _: Shard(0))
        module.register_forward_pre_hook(
            lambda _module, args: (DTensor.from_local(args[0], device_mesh, [Replicate()], run_check=False), *args[1:])
        )
        return module


class OwnPositions(ModuleStyle, ParallelStyle):
    """Sums the embeddings of the ranks, shards them by tokens, and adds the positions of a rank's tokens."""

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def shard(_module: nn.Module, args: tuple[DTensor, Tensor]) -> tuple[Tensor, Tensor]:
            x_BTD, positions_BT = args
            own_BT = positions_BT.chunk(device_mesh.size(), dim=1)[device_mesh.get_local_rank()]
            return x_BTD.redistribute(placements=[Shard(1)]).to_local(), own_BT

        module.register_forward_pre_hook(shard)
        return REPLICATED.apply(module, device_mesh)


class Then(ModuleStyle, ParallelStyle):
    """Lets a function exchange the result of a module with those of other ranks."""

    def __init__(self, exchange: Callable[[Tensor, DeviceMesh], Tensor]):
        self.exchange = exchange

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def exchange(_module: nn.Module, _args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            return self.exchange(out, device_mesh)

        module.register_forward_hook(exchange)
        return module


class SharedHeads(ModuleStyle, ParallelStyle):
    """Tells attention to selected keys which ranks have the other heads."""

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        core = cast("SparseCore", module)
        core.head_ranks, core.head_group = device_mesh.size(), device_mesh.get_group().group_name
        return module


class Averaged(ModuleStyle, ParallelStyle):
    """Averages the result over the ranks, each of which then computes a share of its gradient."""

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # torch's annotations lack the result of the hook.
        return distribute_module(module, device_mesh, output_fn=cast("Callable[..., None]", self._average))

    @staticmethod
    def _average(_module: nn.Module, out: Tensor, mesh: DeviceMesh) -> Tensor:
        total = DTensor.from_local(out / mesh.size(), mesh, [Partial()]).redistribute(placements=[Replicate()])
        # The second one does nothing forward, and backward sums the gradients.
        return total.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class HiddenSharded(ModuleStyle, ParallelStyle):
    """Shards the hidden features of all experts; the results of the ranks are summed and sharded by tokens.

    Experts that are on different ranks already stay as they are: every rank sends its own tokens to them.
    """

    PLACEMENTS: ClassVar[Mapping[str, Placement]] = {
        "w1": Shard(1), "w2": Shard(2), "w3": Shard(1),
        "w1_bias": Shard(1), "w2_bias": Replicate(), "w3_bias": Shard(1),
    }  # fmt: skip

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if any(isinstance(weight, DTensor) for weight in module.parameters()):
            return module
        distribute_parameters(module, device_mesh, self.PLACEMENTS.__getitem__)
        # torch's annotations lack the results of both hooks.
        hooks = (cast("Callable[..., None]", hook) for hook in (self._gather, _sum_and_shard))
        return distribute_module(module, device_mesh, None, *hooks)

    @staticmethod
    def _gather(_module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
        """Gathers tokens, scores and numbers of experts, each [B, T, *]."""
        return tuple(gather_tokens(x, mesh) for x in inputs)
