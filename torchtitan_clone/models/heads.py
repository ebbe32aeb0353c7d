"""Arguments of families by the sizes of their heads."""

from dataclasses import dataclass

from torchtitan_clone.models.decoder import ModelArgs, Width
from torchtitan_clone.models.rope import RopeArgs


@dataclass(frozen=True, kw_only=True)
class DividedHeads(ModelArgs):
    """Arguments of a model whose heads have dim / n_heads features."""

    def violations(self) -> list[str]:
        errors = []
        if self.n_heads < 1 or self.dim % self.n_heads or self.head_dim % 2:
            rule = "must give heads of an even size; set dim to an even multiple of n_heads"
            errors.append(f"model.args: dim {self.dim} over n_heads {self.n_heads} {rule}")
        return errors + super().violations()


@dataclass(frozen=True, kw_only=True)
class SizedHeads(ModelArgs):
    """Arguments of a model whose heads have a given size instead of dim / n_heads."""

    head_dim: Width = 128  # pyright: ignore[reportIncompatibleMethodOverride], a field instead of a property

    def violations(self) -> list[str]:
        odd = [f"model.args.head_dim = {self.head_dim} must be even, for rotary positions"] if self.head_dim % 2 else []
        return super().violations() + odd


@dataclass(frozen=True, kw_only=True)
class PartlyRotary(SizedHeads):
    """Arguments of a model that rotates the first features of its heads only."""

    rotary_dim: Width = 64
    """Features of a head with rotary positions."""

    def rope_args(self) -> RopeArgs:
        return RopeArgs(dim=self.rotary_dim, theta=self.rope_theta, scaling=self.rope_scaling)

    def violations(self) -> list[str]:
        errors = super().violations()
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            rule = f"must be even, and at most head_dim {self.head_dim}"
            errors.append(f"model.args.rotary_dim = {self.rotary_dim}: {rule}")
        return errors
