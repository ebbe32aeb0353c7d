"""Mistral's models and their sizes: dense (mistral, ministral3), and with latent attention and experts (mistral4)."""

from dataclasses import replace

from torchtitan_clone.models.composed import build, tensor_plan
from torchtitan_clone.models.mistral.model import ROUTER, Ministral3Args, Mistral4Args, MistralArgs, yarn
from torchtitan_clone.models.spec import ModelSpec

FLAVORS = {
    # The shipped tokenizer's vocabulary, and windows shorter than rows; learns on two CPU cores.
    "debugmodel": MistralArgs(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=64, hidden_dim=768, vocab_size=2048,
        layer_types=["window"], window=512,
    ),
    # The first release; later ones have no window.
    "7B-v0.1": MistralArgs(vocab_size=32000, rope_theta=10000.0, layer_types=["window"]),
    "7B": MistralArgs(),
    "12B": MistralArgs(dim=5120, n_layers=40, vocab_size=131072, max_seq_len=131072),
    "24B": MistralArgs(dim=5120, n_layers=40, hidden_dim=32768, vocab_size=131072, rope_theta=1e8),
    "123B": MistralArgs(dim=12288, n_layers=88, n_heads=96, hidden_dim=28672, max_seq_len=131072),
}  # fmt: skip

SPEC = ModelSpec(
    name="mistral",
    flavors=FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.mistral.hf:HUB",
)

MINISTRAL3_FLAVORS = {
    # The shipped tokenizer's vocabulary, and rows longer than the original length; learns on two CPU cores.
    "debugmodel": Ministral3Args(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=64, hidden_dim=768, vocab_size=2048, max_seq_len=8192,
        rope_scaling=yarn(16.0, original=512),
    ),
    "3B": Ministral3Args(dim=3072, n_layers=26, hidden_dim=9216, rope_theta=1e6, tied_embeddings=True),
    "8B": Ministral3Args(rope_theta=1e6),
    "14B": Ministral3Args(dim=5120, n_layers=40, hidden_dim=16384, rope_theta=1e9),
}  # fmt: skip

MINISTRAL3_SPEC = ModelSpec(
    name="ministral3",
    flavors=MINISTRAL3_FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.mistral.hf:MINISTRAL3_HUB",
)

MISTRAL4_FLAVORS = {
    # The shipped tokenizer's vocabulary, and rows longer than the original length; learns on two CPU cores.
    "debugmodel": Mistral4Args(
        dim=256, n_layers=6, n_heads=8, hidden_dim=768, q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=32,
        qk_rope_head_dim=32, v_head_dim=64, vocab_size=2048, max_seq_len=8192, rope_scaling=yarn(16.0, original=512),
        moe=replace(ROUTER, num_experts=8, top_k=2, hidden_dim=256),
    ),
    "119B": Mistral4Args(),
}  # fmt: skip

MISTRAL4_SPEC = ModelSpec(
    name="mistral4",
    flavors=MISTRAL4_FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.mistral.hf:MISTRAL4_HUB",
)
