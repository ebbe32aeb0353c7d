"""DeepSeek's arguments and blocks: latent attention, first layers dense, then experts. Source: arXiv 2412.19437."""

from dataclasses import dataclass
from typing import Annotated

from torchtitan_clone.config.schema_training import Range, Size
from torchtitan_clone.models.decoder import (
    Decoder,
    Epsilon,
    Heads,
    Hidden,
    RopeTheta,
    TransformerBlock,
    Vocabulary,
    Width,
)
from torchtitan_clone.models.mla import LatentAttention, LatentSizes
from torchtitan_clone.models.moe import MoE, MoEArgs
from torchtitan_clone.models.mtp import PredictingModelArgs, PredictionBlock
from torchtitan_clone.ops.layers import SwiGLU

V3_ROUTER = MoEArgs(score_func="sigmoid", normalize_scores=True, expert_bias=True, group_score="sum of best two")
V2_ROUTER = MoEArgs(score_func="softmax", normalize_scores=False, expert_bias=False, group_score="best")
ROUTER = ("score_func", "normalize_scores", "expert_bias", "group_score")
"""Names of the arguments in which the routers of the two releases on the hub differ."""


@dataclass(frozen=True, kw_only=True)
class DeepSeekV3Args(PredictingModelArgs):
    """Arguments of DeepSeek V3, and of V2, whose router has softmax scores that are not normalized, and no bias."""

    dim: Width = 7168
    n_layers: Annotated[int, Range(1, 1024)] = 61
    n_heads: Heads = 128
    vocab_size: Vocabulary = 129280
    norm_eps: Epsilon = 1e-6
    rope_theta: RopeTheta = 10000.0
    max_seq_len: Size = 163840
    hidden_dim: Hidden = 18432
    """Hidden size of the dense layers."""
    n_dense_layers: Annotated[int, Range(0, 1024)] = 3
    """First layers without experts."""
    q_lora_rank: Annotated[int, Range(0, 2**24)] = 1536
    """Size of the latent of queries; 0: they are computed from the hidden states."""
    kv_lora_rank: Width = 512
    qk_nope_head_dim: Width = 128
    qk_rope_head_dim: Width = 64
    v_head_dim: Width = 128

    @property
    def head_dim(self) -> int:
        """Dimensions of a head with rotary positions."""
        return self.qk_rope_head_dim

    @property
    def attention_dim(self) -> float:
        return (self.latent_sizes.qk + self.v_head_dim) / 2

    @property
    def latent_sizes(self) -> LatentSizes:
        return LatentSizes(
            q_latent=self.q_lora_rank,
            kv_latent=self.kv_lora_rank,
            nope=self.qk_nope_head_dim,
            rope=self.qk_rope_head_dim,
            value=self.v_head_dim,
        )

    @property
    def score_scale(self) -> float:
        """Returns the factor of the attention scores by which YaRN counters longer contexts."""
        scaling = self.rope_scaling
        return scaling.growth(scaling.mscale_all_dim) ** 2 if scaling and scaling.rope_type == "yarn" else 1.0

    def violations(self) -> list[str]:
        errors = super().violations()
        if self.n_kv_heads not in (None, self.n_heads):
            errors.append(
                f"model.args.n_kv_heads = {self.n_kv_heads}: latent attention has as many as n_heads; unset it"
            )
        if self.qk_rope_head_dim % 2:
            errors.append(f"model.args.qk_rope_head_dim = {self.qk_rope_head_dim} must be even, for rotary positions")
        if self.v_head_dim > self.latent_sizes.qk:
            rule = f"must be at most qk_nope_head_dim + qk_rope_head_dim = {self.latent_sizes.qk}"
            errors.append(f"model.args.v_head_dim = {self.v_head_dim}: {rule}")
        if self.n_dense_layers >= self.n_layers:
            rule = f"must be below n_layers {self.n_layers}, so that a layer has experts"
            errors.append(f"model.args.n_dense_layers = {self.n_dense_layers}: {rule}")
        if (scaling := self.rope_scaling) is not None and scaling.mscale_all_dim and not scaling.mscale:
            rule = "the format of the hub has it only with mscale; set both or none"
            errors.append(f"model.args.rope_scaling.mscale_all_dim = {scaling.mscale_all_dim}: {rule}")
        return errors + self._router_violations()

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


def build(args: DeepSeekV3Args) -> Decoder:
    """Returns the model."""
    return Decoder(args, build_block=build_block, auxiliary=args.auxiliary)


def build_block(args: DeepSeekV3Args, layer: int) -> TransformerBlock:
    """Returns the block of a layer."""
    attention = LatentAttention(args.latent_sizes, dim=args.dim, n_heads=args.n_heads, score_scale=args.score_scale)
    is_dense = layer < args.n_dense_layers
    feed_forward = SwiGLU(dim=args.dim, hidden_dim=args.hidden_dim) if is_dense else MoE(args.moe, dim=args.dim)
    kind = TransformerBlock if layer < args.n_layers else PredictionBlock
    return kind(args, attention=attention, feed_forward=feed_forward)
