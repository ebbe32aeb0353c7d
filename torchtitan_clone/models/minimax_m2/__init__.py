"""MiniMax-M2 and its size: norms over all heads, which are partly rotary, and experts in each layer."""

from dataclasses import dataclass, field, replace

from torchtitan_clone.config.schema_training import Size
from torchtitan_clone.models.composed import AttentionOptions, ExpertsArgs, build, tensor_plan
from torchtitan_clone.models.decoder import Epsilon, Heads, Layers, RopeTheta, Vocabulary, Width
from torchtitan_clone.models.heads import PartlyRotary
from torchtitan_clone.models.moe import MoEArgs
from torchtitan_clone.models.spec import ModelSpec

ROUTER = MoEArgs(score_func="sigmoid", expert_bias=True, num_experts=256, top_k=8, hidden_dim=1536)


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2Args(PartlyRotary, ExpertsArgs):  # pyright: ignore[reportIncompatibleVariableOverride], as in Qwen3
    """Arguments of MiniMax-M2."""

    dim: Width = 3072
    n_layers: Layers = 62
    n_heads: Heads = 48
    n_kv_heads: Heads | None = 8
    vocab_size: Vocabulary = 200064
    norm_eps: Epsilon = 1e-6
    rope_theta: RopeTheta = 5000000.0
    max_seq_len: Size = 196608
    moe: MoEArgs = field(default_factory=lambda: ROUTER)

    def attention_options(self) -> AttentionOptions:
        return {"qk_norm_eps": self.norm_eps, "norm_all_heads": True}


FLAVORS = {
    # The shipped tokenizer's vocabulary; learns on two CPU cores.
    "debugmodel": MiniMaxM2Args(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=64, rotary_dim=32, vocab_size=2048, max_seq_len=8192,
        moe=replace(ROUTER, num_experts=8, top_k=2, hidden_dim=384),
    ),
    "230B-A10B": MiniMaxM2Args(),
}  # fmt: skip

SPEC = ModelSpec(
    name="minimax_m2",
    flavors=FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.minimax_m2.hf:HUB",
)
