"""GLM-4.5 to 4.7 and their sizes: partly rotary heads with biases, DeepSeek V3's router. Source: arXiv 2508.06471."""

from dataclasses import dataclass, field, replace

from torchtitan_clone.config.schema_training import Size
from torchtitan_clone.models.composed import AttentionOptions, DenseFirstArgs, build, tensor_plan
from torchtitan_clone.models.decoder import Heads, Hidden, Layers, RopeTheta, Vocabulary, Width
from torchtitan_clone.models.heads import PartlyRotary
from torchtitan_clone.models.moe import MoEArgs
from torchtitan_clone.models.spec import ModelSpec

ROUTER = MoEArgs(
    score_func="sigmoid", expert_bias=True, num_experts=160, top_k=8, hidden_dim=1536, num_shared_experts=1,
    score_scale=2.5,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Glm4MoEArgs(PartlyRotary, DenseFirstArgs):  # pyright: ignore[reportIncompatibleVariableOverride], as in Qwen3
    """Arguments of GLM-4.5."""

    dim: Width = 5120
    n_layers: Layers = 92
    n_heads: Heads = 96
    n_kv_heads: Heads | None = 8
    hidden_dim: Hidden = 12288
    n_dense_layers: int = 3
    vocab_size: Vocabulary = 151552
    rope_theta: RopeTheta = 1000000.0
    max_seq_len: Size = 131072
    attention_bias: bool = True
    """Whether queries, keys and values have biases."""
    qk_norm: bool = True
    """Whether queries and keys are normalized."""
    moe: MoEArgs = field(default_factory=lambda: ROUTER)

    def attention_options(self) -> AttentionOptions:
        return {"bias": self.attention_bias, "qk_norm_eps": self.norm_eps if self.qk_norm else None}


FLAVORS = {
    # The shipped tokenizer's vocabulary; learns on two CPU cores.
    "debugmodel": Glm4MoEArgs(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=64, rotary_dim=32, hidden_dim=768, n_dense_layers=1,
        vocab_size=2048, max_seq_len=8192, moe=replace(ROUTER, num_experts=8, top_k=2, hidden_dim=256),
    ),
    "106B-A12B": Glm4MoEArgs(
        dim=4096, n_layers=46, hidden_dim=10944, n_dense_layers=1, qk_norm=False,
        moe=replace(ROUTER, num_experts=128, hidden_dim=1408, score_scale=1.0),
    ),
    "355B-A32B": Glm4MoEArgs(),
}  # fmt: skip

SPEC = ModelSpec(
    name="glm4_moe",
    flavors=FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.glm4_moe.hf:HUB",
)
