"""How tensor and sequence parallelism shard a decoder: torch's ParallelStyle objects by module name.

parallel/tensor.py shards the output projection. Source: arXiv 1909.08053, arXiv 2205.05198.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from torchtitan_clone.torch_compat import ModuleStyle


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How tensor parallelism shards the modules of a family."""

    styles: Mapping[str, ParallelStyle]
    """Styles by module name; * matches one component of a name."""
    replicated: tuple[str, ...] = ()
    """Parameters that stay plain tensors; * as in fnmatch. Each rank must compute their gradients completely."""


def decoder_styles() -> dict[str, ParallelStyle]:
    """Returns styles for embedding, norms, attention and SwiGLU, by module name."""
    gather = PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None))
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": gather,
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wk": ColwiseParallel(),
        "layers.*.attention.wv": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        # DTensors know the hidden size even where the degree does not divide it.
        "layers.*.feed_forward.w1": ColwiseParallel(use_local_output=False),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.feed_forward.w3": ColwiseParallel(use_local_output=False),
        "norm": SequenceParallel(),
    }


def qk_norm_styles() -> dict[str, ParallelStyle]:
    """Returns styles for norms of queries and keys, whose gradients are summed over the axis: a rank has some heads."""
    norm = SequenceParallel(sequence_dim=2, use_local_output=True)
    return {"layers.*.attention.q_norm": norm, "layers.*.attention.k_norm": norm}


def latent_attention_styles(*, has_query_latent: bool) -> dict[str, ParallelStyle]:
    """Returns styles for multi-head latent attention, instead of those of attention with this prefix.

    Each rank computes the latents of its own tokens; the latents are gathered, which are smaller than hidden states.
    """
    from_latent = ColwiseParallel(input_layouts=Shard(1))
    norm = SequenceParallel(use_local_output=True)
    with_latent = {"wq_a": Replicated(), "q_norm": norm, "wq_b": from_latent}
    styles: dict[str, ParallelStyle] = {
        **(with_latent if has_query_latent else {"wq": from_latent}),
        "wkv_a": Replicated(),
        "kv_norm": norm,
        "wkv_b": from_latent,
        "shared_key": PrepareModuleOutput(
            output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False
        ),
        "wo": RowwiseParallel(output_layouts=Shard(1)),
    }
    return {f"layers.*.attention.{name}": style for name, style in styles.items()}


def heads_norm_styles() -> dict[str, ParallelStyle]:
    """Returns styles for norms of queries and keys over all heads, of which a rank has some."""
    norms = [f"layers.*.attention.{name}" for name in ("q_norm", "k_norm")]
    return {**{name: HeadSharded() for name in norms}, **{f"{name}.mean_square": Averaged() for name in norms}}


def sink_styles() -> dict[str, ParallelStyle]:
    """Returns styles for the sinks of attention, of which a rank has those of its heads."""
    return {"layers.*.attention.sinks": HeadSharded()}


def post_norm_styles() -> dict[str, ParallelStyle]:
    """Returns styles for norms after attention and feed-forward."""
    norm = SequenceParallel(use_local_output=True)
    return {"layers.*.attention_norm": norm, "layers.*.ffn_norm": norm}


def prediction_styles() -> dict[str, ParallelStyle]:
    """Returns styles for what a layer of multi-token prediction has besides its block; each rank has its own tokens."""
    norm = SequenceParallel(use_local_output=True)
    styles = {"enorm": norm, "hnorm": norm, "eh_proj": Replicated(), "norm": SequenceParallel()}
    return {f"layers.*.{name}": style for name, style in styles.items()}


def moe_styles(*, has_shared_experts: bool, dense_layers: Iterable[int] = ()) -> dict[str, ParallelStyle]:
    """Returns styles for a decoder whose feed-forward is a mixture of experts, except in `dense_layers`."""
    styles = {name: style for name, style in decoder_styles().items() if not name.startswith("layers.*.feed_forward.")}
    dense = {
        name.replace("*", str(layer)): style
        for layer in dense_layers
        for name, style in decoder_styles().items()
        if name.startswith("layers.*.feed_forward")
    }
    shared = {
        name.replace("feed_forward", "feed_forward.shared_experts"): style
        for name, style in decoder_styles().items()
        if has_shared_experts and name.startswith("layers.*.feed_forward.")
    }
    experts = {"layers.*.feed_forward.router": Replicated(), "layers.*.feed_forward.experts": HiddenSharded()}
    del styles["layers.*.feed_forward"]
    if has_shared_experts:
        shared["layers.*.feed_forward.shared_experts"] = decoder_styles()["layers.*.feed_forward"]
    return styles | shared | experts | dense


class Replicated(ModuleStyle, ParallelStyle):
    """Holds all parameters on every rank, each of which computes a share of their gradients."""

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, weight in list(module.named_parameters(recurse=False)):  # buffers stay plain, as they are state
            module.register_parameter(name, nn.Parameter(distribute_tensor(weight, device_mesh, [Replicate()])))
        return module


class HeadSharded(ModuleStyle, ParallelStyle):
    """Shards the parameters by heads; the module computes with those of its rank."""

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, weight in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(weight, device_mesh, [Shard(0)])))
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
        # torch's annotations lack the results of both hooks.
        gather = cast("Callable[..., None]", self._gather)
        output = cast("Callable[..., None]", self._sum)
        return distribute_module(module, device_mesh, self._shard, gather, output)

    def _shard(self, _name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, weight in list(module.named_parameters(recurse=False)):
            sharded = nn.Parameter(distribute_tensor(weight, mesh, [self.PLACEMENTS[name]]))
            module.register_parameter(name, sharded)

    @staticmethod
    def _gather(_module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
        """Gathers tokens, scores and numbers of experts, each [B, T, *], from the shards by tokens."""
        shards = (x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Shard(1)]) for x in inputs)
        return tuple(shard.redistribute(placements=[Replicate()]) for shard in shards)

    @staticmethod
    def _sum(_module: nn.Module, out_BTD: Tensor, mesh: DeviceMesh) -> Tensor:
        return DTensor.from_local(out_BTD, mesh, [Partial()]).redistribute(placements=[Shard(1)]).to_local()
