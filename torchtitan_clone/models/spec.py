"""What a model family provides to the rest of the program."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchtitan_clone.config import ConfigError, overlay
from torchtitan_clone.config.checks import find_unknown_flavor
from torchtitan_clone.config.schema_training import Model
from torchtitan_clone.interfaces import Constant, KeptOperations, TensorPlan
from torchtitan_clone.models.decoder import Decoder, ModelArgs, named_state
from torchtitan_clone.observe.flops import training_flops_per_token
from torchtitan_clone.ops import grouped_mm, sparse_attention  # noqa: F401, register operators
from torchtitan_clone.ops.attention import OPERATORS
from torchtitan_clone.ops.kernels import CPU


class LayerFlops(Protocol):
    """Returns the FLOPs of forward and backward of each layer for one token."""

    def __call__(self, args: Any, *, parameters: Mapping[str, Tensor], seq_len: int) -> list[float]: ...


class ConvertModel(Protocol):
    """Replaces modules of a model, or of a stage of it, in place."""

    def __call__(self, model: Decoder, /, *, args: Any) -> None: ...


KEPT = KeptOperations(
    always=OPERATORS | {torch.ops.torchtitan_clone.sparse_attention.default},
    alternating=frozenset(
        {
            torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default,
            torch.ops.torchtitan_clone.grouped_mm.default, *(CPU.ALTERNATING if CPU is not None else ()),
        }
    ),
)  # fmt: skip


def active_parameters(args: ModelArgs, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns of each parameter what processes one token: of stacked experts the weights of as many as it chooses."""
    share = {name: args.experts_per_token if ".experts." in name else None for name in parameters}
    return {name: parameter[: share[name]] for name, parameter in parameters.items()}


def layer_flops(args: ModelArgs, *, parameters: Mapping[str, Tensor], seq_len: int) -> list[float]:
    """Returns the FLOPs of forward and backward of each layer for one token: of parameters, attention and indexers."""
    sizes: dict[str, int] = {}
    for name, parameter in active_parameters(args, parameters).items():
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        sizes[layer] = sizes.get(layer, 0) + parameter.numel()
    flops = partial(training_flops_per_token, n_heads=args.n_heads, head_dim=args.attention_dim)
    return [
        flops(matmul_parameters=sizes.get(str(layer), 0), attended_tokens=[kind.attended_tokens(seq_len)])
        + 6.0 * kind.index_dim * seq_len
        for layer, kind in enumerate(args.layer_kinds())
    ]


_SCALED_BY_DEPTH = (
    "attention.wo.weight", "feed_forward.w2.weight", "feed_forward.w3.weight", "experts.w2", "experts.w3",
    "shared_experts.w2.weight", "shared_experts.w3.weight",
)  # fmt: skip


InitialValues = float | Constant | Callable[[Tensor], Tensor] | None
"""The deviation of normal values, what all are, or a function of values with deviation 1; None: all are one."""


def initial_std(args: ModelArgs, name: str) -> float | None:
    """Returns the standard deviation of a parameter's initial values; None for norms, which start at one."""
    if "bias" in name:
        return 0.0
    if "norm" in name:
        return None
    if name == "output.weight":
        return args.dim**-0.5
    if name == "tok_embeddings.weight":
        # Tied, a larger embedding would dominate the hidden states, and each token would predict itself.
        return 0.02 if args.tied_embeddings else 1.0
    if name.endswith(_SCALED_BY_DEPTH):
        return 0.02 / (2 * (int(name.split(".")[1]) + 1)) ** 0.5
    return 0.02


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A family of models."""

    name: str
    flavors: Mapping[str, ModelArgs]
    """Arguments by the value of `model.flavor`."""
    build: Callable[[Any], Decoder]
    """Builds the model, in single-device PyTorch without any parallelism."""
    tensor_plan: Callable[[Any], TensorPlan]
    hugging_face: object
    """The format on the Hugging Face hub, a `DecoderHub` of hub/formats.py, or where it is defined, as "module:NAME".

    By name it is imported only where weights of the hub are read or written.
    """
    related: tuple[str, ...] = ()
    """Names of families whose flavors this name has too, as in torchtitan."""
    initial_std: Callable[[Any, str], InitialValues] = initial_std
    """How the initial values of the parameter of a name are drawn."""
    layer_flops: LayerFlops = layer_flops
    kept_operations: KeptOperations = KEPT
    convert: ConvertModel | None = None
    """Replaces modules in place before tensor parallelism is applied; the model is on the meta device."""
    after_step: Callable[[Sequence[Decoder]], None] | None = None
    """Updates the model parts of this rank after each optimizer step that is committed."""

    def resolve_args(self, model: Model) -> Any:
        """Returns the flavor's arguments with `[model.args]` applied; ConfigError for an unknown flavor or argument."""
        if unknown := [*find_unknown_flavor(model, family=self.name, known=self.flavors)]:
            raise ConfigError(unknown)
        args = overlay(self.flavors[model.flavor], model.args, where="model.args")
        is_unset = args.rope_scaling is not None and args.rope_scaling.rope_type == "default"
        return replace(args, rope_scaling=None) if is_unset else args

    def std_of(self, args: Any) -> Callable[[str], InitialValues]:
        """Returns initial_std() of these arguments, scaled by their width where they ask for it."""
        if not args.mup_base_dim:
            return partial(self.initial_std, args)
        from torchtitan_clone.models.mup import scaled_std

        return scaled_std(args, self.initial_std)

    def lr_factor(self, args: Any) -> Callable[[str], float] | None:
        """Returns what the learning rate of a parameter under Adam is multiplied by, by its name; None: nothing."""
        if not args.mup_base_dim:
            return None
        from torchtitan_clone.models.mup import lr_factor

        return partial(lr_factor, args)

    def state_on_meta(self, args: Any) -> dict[str, Tensor]:
        """Returns parameters and persistent buffers by name, without values; a tied weight comes once."""
        with torch.device("meta"):
            return named_state(self.build(args))

    def flops_per_token(
        self, args: ModelArgs, *, parameters: Mapping[str, Tensor], seq_len: int, frozen_layers: int
    ) -> float:
        """Returns the FLOPs of forward and backward for one token; of the first `frozen_layers` blocks forward only."""
        layers = self.layer_flops(args, parameters=parameters, seq_len=seq_len)
        others = sum(parameter.numel() for name, parameter in parameters.items() if not name.startswith("layers."))
        embedding = 0 if args.tied_embeddings else args.vocab_size * args.dim
        # Backward costs twice the forward.
        embedding += args.max_seq_len * args.dim if args.learns_positions else 0
        again = args.mtp_depth * args.vocab_size * args.dim  # the output projection, in multi-token prediction
        return 6.0 * (others - embedding + again) + sum(layers) - sum(layers[:frozen_layers]) * 2 / 3

    def layer_costs(self, args: ModelArgs, *, seq_len: int) -> list[int]:
        """Returns the FLOPs of each layer in percent of the cheapest, by which pipeline stages are balanced."""
        state = self.state_on_meta(args)
        parameters = {name: tensor for name, tensor in state.items() if isinstance(tensor, nn.Parameter)}
        flops = self.layer_flops(args, parameters=parameters, seq_len=seq_len)[: args.n_layers]
        return [round(100 * each / min(flops)) for each in flops]
