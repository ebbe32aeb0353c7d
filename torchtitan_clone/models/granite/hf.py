"""Granite 3's format on the Hugging Face hub."""

from torchtitan_clone.hub.formats import CONFIG_KEYS, DecoderHub

_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")

HUB = DecoderHub(
    family="granite",
    architecture="GraniteForCausalLM",
    fixed={"model_type": "granite", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    defaults={
        "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False,
        **dict.fromkeys(_MULTIPLIERS, 1.0),
    },
    keys={**CONFIG_KEYS, **{name: name for name in _MULTIPLIERS}},
)  # fmt: skip
