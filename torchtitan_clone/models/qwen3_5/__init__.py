"""Qwen3.5 (text), dense and with experts, Qwen3-Next, and their sizes."""

from dataclasses import replace

from torchtitan_clone.models.composed import build, tensor_plan
from torchtitan_clone.models.qwen3_5.model import ROUTER, Qwen3_5Args, Qwen3_5MoEArgs, initial_values_of
from torchtitan_clone.models.spec import ModelSpec

FLAVORS = {
    # The shipped tokenizer's vocabulary, and as many parameters as the dense debug models; learns on two CPU cores.
    "debugmodel": Qwen3_5Args(
        dim=256, n_layers=8, n_heads=4, n_kv_heads=2, head_dim=64, rotary_dim=16, hidden_dim=512, vocab_size=2048,
        max_seq_len=8192, linear_key_heads=4, linear_value_heads=4, linear_key_dim=64, linear_value_dim=64,
        rope_theta=1e4,
    ),
    "0.8B": Qwen3_5Args(tied_embeddings=True),
    "2B": Qwen3_5Args(dim=2048, hidden_dim=6144, tied_embeddings=True),
    "4B": Qwen3_5Args(
        dim=2560, n_layers=32, n_heads=16, n_kv_heads=4, hidden_dim=9216, linear_value_heads=32,
        tied_embeddings=True,
    ),
    "9B": Qwen3_5Args(
        dim=4096, n_layers=32, n_heads=16, n_kv_heads=4, hidden_dim=12288, linear_value_heads=32
    ),
    "27B": Qwen3_5Args(
        dim=5120, n_layers=64, n_heads=24, n_kv_heads=4, hidden_dim=17408, linear_value_heads=48
    ),
}  # fmt: skip

SPEC = ModelSpec(
    name="qwen3_5",
    flavors=FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.qwen3_5.hf:HUB",
    initial_std=initial_values_of,
)

MOE_FLAVORS = {
    # 2 of 8 experts and a shared one of 160 hidden features each; learns on two CPU cores.
    "debugmodel": Qwen3_5MoEArgs(
        dim=256, n_layers=8, n_heads=4, n_kv_heads=2, head_dim=64, rotary_dim=16, vocab_size=2048, max_seq_len=8192,
        linear_key_heads=2, linear_value_heads=4, linear_key_dim=64, linear_value_dim=64, rope_theta=1e4,
        moe=replace(ROUTER, num_experts=8, top_k=2, hidden_dim=160, num_shared_experts=1),
    ),
    "35B-A3B": Qwen3_5MoEArgs(),
    "122B-A10B": Qwen3_5MoEArgs(
        dim=3072, n_layers=48, n_heads=32, linear_value_heads=64,
        moe=replace(ROUTER, num_experts=256, top_k=8, hidden_dim=1024, num_shared_experts=1),
    ),
    "397B-A17B": Qwen3_5MoEArgs(
        dim=4096, n_layers=60, n_heads=32, linear_value_heads=64,
        moe=replace(ROUTER, num_experts=512, top_k=10, hidden_dim=1024, num_shared_experts=1),
    ),
}  # fmt: skip

MOE_SPEC = ModelSpec(
    name="qwen3_5_moe",
    flavors=MOE_FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.qwen3_5.hf:MOE_HUB",
    initial_std=initial_values_of,
)

NEXT_FLAVORS = {
    # More experts, of which more process a token, than Qwen3.5's.
    "debugmodel": replace(
        MOE_FLAVORS["debugmodel"],
        moe=replace(ROUTER, num_experts=16, top_k=4, hidden_dim=96, num_shared_experts=1),
    ),
    "80B-A3B": Qwen3_5MoEArgs(
        n_layers=48, vocab_size=151936,
        moe=replace(ROUTER, num_experts=512, top_k=10, hidden_dim=512, num_shared_experts=1),
    ),
}  # fmt: skip

NEXT_SPEC = ModelSpec(
    name="qwen3_next",
    flavors=NEXT_FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.qwen3_5.hf:NEXT_HUB",
    initial_std=initial_values_of,
)
