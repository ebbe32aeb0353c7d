"""The format of Qwen2 and Qwen2.5 on the Hugging Face hub."""

from torchtitan_clone.hub.formats import DecoderHub
from torchtitan_clone.hub.mapping import BIAS_RULES, DECODER_RULES

HUB = DecoderHub(
    family="qwen2",
    architecture="Qwen2ForCausalLM",
    fixed={"model_type": "qwen2", "hidden_act": "silu", "use_sliding_window": False},
    defaults={
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": False, "num_key_value_heads": 32,
    },
    only={"attention_bias": True, "use_mrope": False},
    # Unused, since use_sliding_window is false.
    without_effect=frozenset({"sliding_window", "max_window_layers"}),
    rules={**DECODER_RULES, **BIAS_RULES},
)  # fmt: skip
