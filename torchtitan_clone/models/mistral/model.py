"""Mistral's arguments and blocks: dense, with queries that grow with positions, and with latent attention and experts.

Source: arXiv 2310.06825.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated

from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.schema_training import Range, Size
from torchtitan_clone.models.composed import DenseArgs, DenseThenExpertsArgs
from torchtitan_clone.models.decoder import Epsilon, Heads, Hidden, Layers, ModelArgs, RopeTheta, Vocabulary, Width
from torchtitan_clone.models.heads import SizedHeads
from torchtitan_clone.models.mla import QueryLatentArgs
from torchtitan_clone.models.moe import MoEArgs
from torchtitan_clone.models.rope import QueryScale, RopeArgs, RopeScaling
from torchtitan_clone.models.windowed import WindowedArgs

ROUTER = MoEArgs(group_score="sum of best two", num_shared_experts=1, num_experts=128, top_k=4, hidden_dim=2048)


@dataclass(frozen=True, kw_only=True)
class MistralArgs(SizedHeads, DenseArgs, WindowedArgs):  # pyright: ignore[reportIncompatibleVariableOverride]
    """Arguments of Mistral."""

    hidden_dim: Hidden = 14336
    n_kv_heads: Heads | None = 8
    vocab_size: Vocabulary = 32768
    rope_theta: RopeTheta = 1000000.0
    max_seq_len: Size = 32768

    def violations(self) -> list[str]:
        mixed = [] if len({*self.layer_types}) == 1 else ["layers of both types"]
        rule = 'mistral has ["full"] or ["window"]; set one of them'
        return super().violations() + [f"model.args.layer_types names {each}: {rule}" for each in mixed]


def yarn(factor: float, *, original: int) -> RopeScaling:
    """Returns the scaling of rotary positions of releases, for contexts `factor` times as long as the original one."""
    return RopeScaling(rope_type="yarn", factor=factor, original_max_seq_len=original, mscale=1.0, mscale_all_dim=1.0)


@dataclass(frozen=True, kw_only=True)
class QueryScaledArgs(ModelArgs):
    """Arguments of a model whose queries grow with the multiples of YaRN's original length before them."""

    query_scale: Annotated[float, Range(0.0, 1e6)] = 0.1
    """How queries grow with the position, see QueryScale; 0: not at all."""

    def rope_args(self) -> RopeArgs:
        rope, scaling = super().rope_args(), self.rope_scaling
        if scaling is None or not self.query_scale:
            return rope
        floor = scaling.original_max_seq_len
        return replace(rope, query_scale=QueryScale(scale=self.query_scale, floor=floor, first=0))

    def violations(self) -> list[str]:
        kind = self.rope_scaling and self.rope_scaling.rope_type
        rule = 'must be "yarn", whose original length is also that from which queries grow'
        return super().violations() + (
            [] if kind == "yarn" else [f"model.args.rope_scaling.rope_type = {shown(kind)}: {rule}"]
        )


@dataclass(frozen=True, kw_only=True)
class Ministral3Args(MistralArgs, QueryScaledArgs):  # pyright: ignore[reportIncompatibleVariableOverride], as above
    """Arguments of Ministral 3."""

    n_layers: Layers = 34
    vocab_size: Vocabulary = 131072
    rope_scaling: RopeScaling | None = field(default_factory=lambda: yarn(16.0, original=16384))
    max_seq_len: Size = 262144


@dataclass(frozen=True, kw_only=True)
class Mistral4Args(QueryLatentArgs, DenseThenExpertsArgs, QueryScaledArgs):
    """Arguments of Mistral 4."""

    n_layers: Layers = 36
    hidden_dim: Hidden = 12288
    n_dense_layers: Annotated[int, Range(0, 1024)] = 0
    q_lora_rank: Annotated[int, Range(0, 2**24)] = 1024
    kv_lora_rank: Width = 256
    qk_nope_head_dim: Width = 64
    vocab_size: Vocabulary = 131072
    norm_eps: Epsilon = 1e-6
    rope_theta: RopeTheta = 10000.0
    rope_scaling: RopeScaling | None = field(default_factory=lambda: yarn(128.0, original=8192))
    max_seq_len: Size = 1048576
    moe: MoEArgs = field(default_factory=lambda: ROUTER)
