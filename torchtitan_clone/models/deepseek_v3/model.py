"""DeepSeek's arguments and blocks: latent attention, first layers dense, then experts. Source: arXiv 2412.19437."""

from dataclasses import dataclass
from typing import Annotated

from torchtitan_clone.config.schema_training import Range, Size
from torchtitan_clone.models.composed import DenseFirstArgs
from torchtitan_clone.models.decoder import Epsilon, Heads, Hidden, RopeTheta, Vocabulary, Width
from torchtitan_clone.models.mla import QueryLatentArgs
from torchtitan_clone.models.moe import MoEArgs

V3_ROUTER = MoEArgs(score_func="sigmoid", normalize_scores=True, expert_bias=True, group_score="sum of best two")
V2_ROUTER = MoEArgs(score_func="softmax", normalize_scores=False, expert_bias=False, group_score="best")
ROUTER = ("score_func", "normalize_scores", "expert_bias", "group_score")
"""Names of the arguments in which the routers of the two releases on the hub differ."""


@dataclass(frozen=True, kw_only=True)
class DeepSeekV3Args(QueryLatentArgs, DenseFirstArgs):  # pyright: ignore[reportIncompatibleVariableOverride], a field
    """Arguments of DeepSeek V3, and of V2, whose router has softmax scores that are not normalized, and no bias."""

    dim: Width = 7168
    n_layers: Annotated[int, Range(1, 1024)] = 61
    n_heads: Heads = 128
    vocab_size: Vocabulary = 129280
    norm_eps: Epsilon = 1e-6
    rope_theta: RopeTheta = 10000.0
    max_seq_len: Size = 163840
    hidden_dim: Hidden = 18432
    n_dense_layers: Annotated[int, Range(0, 1024)] = 3

    def violations(self) -> list[str]:
        return super().violations() + self._router_violations()

    def _router_violations(self) -> list[str]:
        """The hub has a format for each of two routers only."""
        wanted = V3_ROUTER if self.moe.score_func == "sigmoid" else V2_ROUTER
        errors = [
            f"model.args.moe.{name} = {getattr(self.moe, name)!r}: must be {getattr(wanted, name)!r} with score_func "
            f"{self.moe.score_func!r}, as in the published models"
            for name in ROUTER
            if getattr(self.moe, name) != getattr(wanted, name)
        ]
        if not self.moe.num_shared_experts:
            errors.append("model.args.moe.num_shared_experts = 0: must be at least 1, as in the published models")
        return errors
