"""How modules use their weights: what a prediction of a step's time and memory needs besides their shapes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class WeightUse:
    """How a weight [*, output features, input features] is used, once for each token."""

    is_matrix: bool = True
    """Whether it multiplies tokens; False for vectors, which cost no time."""
    is_expert: bool = False
    """Whether it is a stack of matrices, one for each expert, of which a token is multiplied by a few."""
    is_replicated: bool = False
    """Whether every tensor-parallel rank has the complete weight and applies it to its own tokens."""
    is_latent: bool = False
    """Whether tensor parallelism gathers its results, instead of the inputs of attention."""
    is_last: bool = False
    """Whether it is used after the other matrices of its block, as what ends a feed-forward."""
    saved: float = 0.0
    """Features saved for backward of its results and of what is computed from them, for each of its output features."""

    def of_experts(self, *, saved: float = 0.0) -> "WeightUse":
        """Returns the use of a stack of such weights, of which each expert has one."""
        return replace(self, is_expert=True, saved=saved)


WeightUses = Mapping[str, WeightUse]
VECTOR = WeightUse(is_matrix=False, is_replicated=True)
MATRIX = WeightUse()
REPLICATED = WeightUse(is_replicated=True)
LATENT = WeightUse(is_replicated=True, is_latent=True, saved=2.0)  # before and after its norm
GATED = WeightUse(saved=1.5)  # one of two that are multiplied: its result, and half of the product
LAST = WeightUse(is_last=True)


@runtime_checkable
class UsesWeights(Protocol):
    """A module with matrices."""

    WEIGHT_USES: ClassVar[WeightUses]
    """The use of each matrix by its name in the module; parameters of one dimension are vectors without an entry."""
