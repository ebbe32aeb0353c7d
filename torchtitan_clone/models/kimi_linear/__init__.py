"""Kimi Linear and its sizes."""

from dataclasses import replace

from torchtitan_clone.models.composed import build, tensor_plan
from torchtitan_clone.models.kimi_linear.model import ROUTER, KimiLinearArgs, initial_values_of
from torchtitan_clone.models.spec import ModelSpec

FLAVORS = {
    # The shipped tokenizer's vocabulary, a layer of each kind without experts and with; learns on two CPU cores.
    "debugmodel": KimiLinearArgs(
        dim=256, n_layers=8, n_heads=4, hidden_dim=512, layer_types=["linear", "linear", "linear", "full"],
        linear_key_heads=4, linear_value_heads=4, linear_key_dim=64, linear_value_dim=64, kv_lora_rank=64,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, vocab_size=2048, max_seq_len=8192,
        moe=replace(ROUTER, num_experts=8, top_k=2, hidden_dim=160, score_scale=2.446),
    ),
    "48B-A3B": KimiLinearArgs(
        moe=replace(ROUTER, num_experts=256, top_k=8, hidden_dim=1024, score_scale=2.446),
    ),
}  # fmt: skip

SPEC = ModelSpec(
    name="kimi_linear",
    flavors=FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.kimi_linear.hf:HUB",
    initial_std=initial_values_of,
)
