"""Arguments of families whose layers alternate between linear and full attention."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor

from torchtitan_clone.config.schema_training import Range
from torchtitan_clone.models.decoder import Heads, ModelArgs, Width
from torchtitan_clone.models.delta_net import DeltaSizes
from torchtitan_clone.models.layer_kinds import LayerKind, find_pattern_errors, repeat_pattern
from torchtitan_clone.models.spec import InitialValues, initial_std

LayerType = Literal["linear", "full"]


@dataclass(frozen=True, kw_only=True)
class HybridArgs(ModelArgs):
    """Arguments of a model in which some layers have linear attention instead of full attention."""

    layer_types: list[LayerType] = field(default_factory=lambda: ["linear", "linear", "linear", "full"])
    """Type of each layer, or a pattern that repeats: its length must divide `n_layers`."""
    linear_key_heads: Heads = 16
    linear_value_heads: Heads = 16
    """A multiple of `linear_key_heads`."""
    linear_key_dim: Width = 128
    linear_value_dim: Width = 128
    linear_conv: Annotated[int, Range(2, 64)] = 4
    """Tokens that the convolutions of linear attention see, each itself included."""

    @property
    def delta_sizes(self) -> DeltaSizes:
        return DeltaSizes(
            key_heads=self.linear_key_heads, value_heads=self.linear_value_heads, key=self.linear_key_dim,
            value=self.linear_value_dim, conv=self.linear_conv,
        )  # fmt: skip

    @property
    def heads(self) -> dict[str, int]:
        linear = {"linear_key_heads": self.linear_key_heads, "linear_value_heads": self.linear_value_heads}
        return super().heads | linear

    def is_linear(self, layer: int) -> bool:
        """Returns whether a layer has linear attention."""
        return self.layer_types[layer % len(self.layer_types)] == "linear"

    def linear_layers(self) -> list[int]:
        """Returns the layers with linear attention."""
        return [layer for layer in range(self.n_layers) if self.is_linear(layer)]

    def full_kind(self) -> LayerKind:
        """Returns the kind of layers with full attention."""
        return LayerKind(positions=self.rope_args())

    def layer_kinds(self) -> list[LayerKind]:
        attended = -(-self.delta_sizes.recurrent_flops // int(4 * self.n_heads * self.attention_dim))
        kinds = {"full": self.full_kind(), "linear": LayerKind(positions=None, recurrent=attended)}
        return repeat_pattern(self.layer_types, kinds, n_layers=self.n_layers)

    def violations(self) -> list[str]:
        errors = super().violations() + find_pattern_errors(self.layer_types, n_layers=self.n_layers)
        if self.full_kind().positions is None and self.rope_scaling is not None:
            errors.append("model.args.rope_scaling: no layer has rotary positions here; unset it")
        if self.linear_key_heads >= 1 and self.linear_value_heads % self.linear_key_heads:
            rule = f"must be a multiple of linear_key_heads {self.linear_key_heads}, which serve as many heads each"
            errors.append(f"model.args.linear_value_heads = {self.linear_value_heads}: {rule}")
        return errors


def initial_values(args: HybridArgs, name: str, *, slowest: float = 0.01) -> InitialValues:
    """Returns the initial values of a parameter: decays of heads as in Mamba-2, arXiv 2405.21060, from `slowest` on."""
    if name.endswith(".A_log"):
        return lambda normal: _uniform(normal, slowest, 16.0).log_()
    if name.endswith(".dt_bias"):
        return _steps
    if "_conv." in name:
        return (3 * args.linear_conv) ** -0.5
    return initial_std(args, name)


def _uniform(normal: Tensor, low: float, high: float) -> Tensor:
    """Returns uniform values from those of a normal distribution."""
    return torch.special.ndtr(normal).mul_(high - low).add_(low)


def _steps(normal: Tensor) -> Tensor:
    """Returns biases with which softplus(bias) is from 0.001 to 0.1, uniform in its logarithm."""
    steps = _uniform(normal, math.log(1e-3), math.log(1e-1)).exp_()
    return steps + torch.log(-torch.expm1(-steps))
