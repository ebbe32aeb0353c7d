"""How tensor and sequence parallelism shard a decoder: torch's ParallelStyle objects by module name.

parallel/tensor.py shards the output projection. Source: arXiv 1909.08053, arXiv 2205.05198.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
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


def moe_styles(*, has_shared_experts: bool) -> dict[str, ParallelStyle]:
    """Returns styles for a decoder whose feed-forward is a mixture of experts, instead of a SwiGLU."""
    styles = {name: style for name, style in decoder_styles().items() if not name.startswith("layers.*.feed_forward.")}
    shared = {
        name.replace("feed_forward", "feed_forward.shared_experts"): style
        for name, style in decoder_styles().items()
        if has_shared_experts and name.startswith("layers.*.feed_forward.")
    }
    experts = {"layers.*.feed_forward.router": Replicated(), "layers.*.feed_forward.experts": HiddenSharded()}
    del styles["layers.*.feed_forward"]
    if has_shared_experts:
        shared["layers.*.feed_forward.shared_experts"] = decoder_styles()["layers.*.feed_forward"]
    return styles | shared | experts


class Replicated(ModuleStyle, ParallelStyle):
    """Holds all parameters on every rank, each of which computes a share of their gradients."""

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, weight in list(module.named_parameters(recurse=False)):  # buffers stay plain, as they are state
            module.register_parameter(name, nn.Parameter(distribute_tensor(weight, device_mesh, [Replicate()])))
        return module


class HiddenSharded(ModuleStyle, ParallelStyle):
    """Shards the hidden features of all experts; the results of the ranks are summed and sharded by tokens.

    Experts that are on different ranks already stay as they are: every rank sends its own tokens to them.
    """

    PLACEMENTS: ClassVar[Mapping[str, Placement]] = {"w1": Shard(1), "w2": Shard(2), "w3": Shard(1)}

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
