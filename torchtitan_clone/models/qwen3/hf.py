"""Qwen3's format on the Hugging Face hub."""

from torchtitan_clone.models.hf import CONFIG_KEYS, DecoderHub
from torchtitan_clone.models.hf_mapping import DECODER_RULES, same

HUB = DecoderHub(
    family="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed={"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": False, "head_dim": 128},
    keys={**CONFIG_KEYS, "head_dim": "head_dim"},
    rules={
        **DECODER_RULES,
        "layers.*.attention.q_norm.weight": same("model.layers.*.self_attn.q_norm.weight"),
        "layers.*.attention.k_norm.weight": same("model.layers.*.self_attn.k_norm.weight"),
    },
)
