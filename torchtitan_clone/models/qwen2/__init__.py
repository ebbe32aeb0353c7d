"""Qwen2, Qwen2.5 and their sizes: Llama with biases of queries, keys and values. Source: arXiv 2412.15115."""

from dataclasses import dataclass

from torchtitan_clone.config.schema_training import Size
from torchtitan_clone.models.composed import AttentionOptions, DenseArgs, build, tensor_plan
from torchtitan_clone.models.decoder import Epsilon, RopeTheta, Vocabulary
from torchtitan_clone.models.heads import DividedHeads
from torchtitan_clone.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Qwen2Args(DividedHeads, DenseArgs):
    """Arguments of Qwen2 and Qwen2.5."""

    vocab_size: Vocabulary = 152064
    norm_eps: Epsilon = 1e-6
    rope_theta: RopeTheta = 1000000.0
    max_seq_len: Size = 32768

    def attention_options(self) -> AttentionOptions:
        return {"bias": True}


def _small(dim: int, n_layers: int, n_heads: int, hidden_dim: int) -> Qwen2Args:
    return Qwen2Args(
        dim=dim, n_layers=n_layers, n_heads=n_heads, n_kv_heads=2, hidden_dim=hidden_dim, vocab_size=151936,
        tied_embeddings=True,
    )  # fmt: skip


FLAVORS = {
    # The shipped tokenizer's vocabulary; learns on two CPU cores.
    "debugmodel": Qwen2Args(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, hidden_dim=768, vocab_size=2048),
    "0.5B": _small(896, 24, 14, 4864),
    "1.5B": _small(1536, 28, 12, 8960),
    "3B": _small(2048, 36, 16, 11008),
    "7B": Qwen2Args(dim=3584, n_layers=28, n_heads=28, n_kv_heads=4, hidden_dim=18944),
    "14B": Qwen2Args(dim=5120, n_layers=48, n_heads=40, n_kv_heads=8, hidden_dim=13824, norm_eps=1e-5),
    "32B": Qwen2Args(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, hidden_dim=27648, norm_eps=1e-5),
    "72B": Qwen2Args(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=29568, norm_eps=1e-5),
}

SPEC = ModelSpec(
    name="qwen2",
    flavors=FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.qwen2.hf:HUB",
)
