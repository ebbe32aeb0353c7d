"""Llama 3's format on the Hugging Face hub."""

from torchtitan_clone.models.hf import DecoderHub

HUB = DecoderHub(
    family="llama3",
    architecture="LlamaForCausalLM",
    fixed={"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False},
)
