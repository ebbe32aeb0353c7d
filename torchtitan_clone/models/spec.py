"""What a model family provides to the rest of the program."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from torchtitan_clone.config import ConfigError, overlay
from torchtitan_clone.config.overlay import shown
from torchtitan_clone.config.schema import Model
from torchtitan_clone.models.decoder import Decoder, ModelArgs, initial_std, named_state
from torchtitan_clone.models.hf import DecoderHub
from torchtitan_clone.models.plan import TensorPlan
from torchtitan_clone.observe.flops import training_flops_per_token
from torchtitan_clone.ops.tensor_pieces import Piece
from torchtitan_clone.torch_compat import cpu_flash_attention, cudnn_attention, efficient_attention, flash_attention


class FlopsPerToken(Protocol):
    """Returns the FLOPs of forward and backward for one token; of the first `frozen_layers` blocks forward only."""

    def __call__(self, args: Any, *, parameters: Mapping[str, Tensor], seq_len: int, frozen_layers: int) -> float: ...


class ConvertModel(Protocol):
    """Replaces modules of a model, or of a stage of it, in place."""

    def __call__(self, model: Decoder, /, *, args: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class KeptOperations:
    """Operations that selective activation checkpointing keeps instead of recomputing them in backward."""

    always: frozenset[object]
    """Those whose results cost much to compute for their size."""
    alternating: frozenset[object]
    """Those of which every second one is recomputed: half the memory for half the work."""


_TORCH_ATTENTION = (flash_attention, efficient_attention, cudnn_attention, cpu_flash_attention)
_ATTENTION = frozenset(attention.default for attention in _TORCH_ATTENTION)
DENSE_KEPT = KeptOperations(
    always=frozenset(
        {*_ATTENTION, torch.ops.higher_order.flex_attention, torch.ops.torchtitan_clone.document_attention.default}
    ),
    alternating=frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default}),
)


def dense_flops_per_token(
    args: ModelArgs, *, parameters: Mapping[str, Tensor], seq_len: int, frozen_layers: int
) -> float:
    """Returns the FLOPs of a model in which every parameter is used for every token; see FlopsPerToken."""
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    embedding = 0 if args.tied_embeddings else args.vocab_size * args.dim
    frozen_blocks = tuple(f"layers.{index}." for index in range(frozen_layers))
    frozen = sum(size for name, size in sizes.items() if name.startswith(frozen_blocks))
    attended = [kind.attended_tokens(seq_len) for kind in args.layer_kinds()]
    flops = partial(training_flops_per_token, n_heads=args.n_heads, head_dim=args.attention_dim)
    total = flops(matmul_parameters=sum(sizes.values()) - embedding, attended_tokens=attended)
    # Backward costs twice the forward.
    return total - flops(matmul_parameters=frozen, attended_tokens=attended[:frozen_layers]) * 2 / 3


def active_parameters(args: ModelArgs, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns of each parameter what processes one token: of stacked experts the weights of as many as it chooses."""
    share = {name: args.experts_per_token if ".experts." in name else None for name in parameters}
    return {name: parameter[: share[name]] for name, parameter in parameters.items()}


def equal_costs(args: ModelArgs) -> list[int]:
    """Returns 1 for each layer."""
    return [1] * args.n_layers


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A family of models."""

    name: str
    flavors: Mapping[str, ModelArgs]
    """Arguments by the value of `model.flavor`."""
    build: Callable[[Any], Decoder]
    """Builds the model, in single-device PyTorch without any parallelism."""
    tensor_plan: Callable[[Any], TensorPlan]
    hugging_face: DecoderHub
    related: tuple[str, ...] = ()
    """Names of families whose flavors this name has too, as in torchtitan."""
    initial_std: Callable[[Any, str], float | None] = initial_std
    """Standard deviation of the initial values of the parameter of a name; None: they are one."""
    flops_per_token: FlopsPerToken = dense_flops_per_token
    kept_operations: KeptOperations = DENSE_KEPT
    layer_costs: Callable[[Any], Sequence[int]] = equal_costs
    """Cost of each layer relative to the others, by which pipeline stages are balanced."""
    convert: ConvertModel | None = None
    """Replaces modules in place before tensor parallelism is applied; the model is on the meta device."""
    after_step: Callable[[Sequence[Decoder]], None] | None = None
    """Updates the model parts of this rank after each optimizer step that is committed."""

    def resolve_args(self, model: Model) -> Any:
        """Returns the flavor's arguments with `[model.args]` applied; ConfigError for an unknown flavor or argument."""
        if model.flavor not in self.flavors:
            known = ", ".join(self.flavors)
            raise ConfigError([f"model.flavor = {shown(model.flavor)}: {self.name} has no such flavor; known: {known}"])
        return overlay(self.flavors[model.flavor], model.args, where="model.args")

    def state_on_meta(self, args: Any) -> dict[str, Tensor]:
        """Returns parameters and persistent buffers by name, without values; a tied weight comes once."""
        with torch.device("meta"):
            return named_state(self.build(args))

    def hub_pieces(self, state: Mapping[str, Tensor], *, args: Any) -> dict[str, list[Piece]]:
        """Returns for each of our tensors, by name, the tensors of the hub that hold its values."""
        return self.hugging_face.pieces({name: tensor.shape for name, tensor in state.items()}, args=args)
