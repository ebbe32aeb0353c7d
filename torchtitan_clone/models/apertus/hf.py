"""Apertus' format on the Hugging Face hub."""

from torchtitan_clone.hub.formats import DecoderHub
from torchtitan_clone.hub.keys import scaling_to_config
from torchtitan_clone.hub.mapping import DECODER_RULES, QK_NORM_RULES, Rules, optional, same
from torchtitan_clone.models.rope import RopeScaling

_LAYER, _OURS = "model.layers.*", "layers.*.feed_forward"
_RULES: Rules = {
    **{name: rule for name, rule in DECODER_RULES.items() if "feed_forward" not in name},
    **QK_NORM_RULES,
    "layers.*.attention_norm.weight": same(f"{_LAYER}.attention_layernorm.weight"),
    "layers.*.ffn_norm.weight": same(f"{_LAYER}.feedforward_layernorm.weight"),
    f"{_OURS}.w1.weight": same(f"{_LAYER}.mlp.up_proj.weight"),
    f"{_OURS}.w2.weight": same(f"{_LAYER}.mlp.down_proj.weight"),
    **{f"{_OURS}.activation.{name}": same(f"{_LAYER}.mlp.act_fn.{name}") for name in ("alpha_p", "alpha_n")},
    **{f"{_OURS}.activation.{name}": optional(f"{_LAYER}.mlp.act_fn.{name}") for name in ("beta", "eps")},
}

HUB = DecoderHub(
    family="apertus",
    architecture="ApertusForCausalLM",
    fixed={"model_type": "apertus", "hidden_act": "xielu", "attention_bias": False},
    only={"mlp_bias": False, "post_norm": False, "qk_norm": True},
    defaults={
        "rms_norm_eps": 1e-5, "max_position_embeddings": 65536, "tie_word_embeddings": False, "rope_theta": 12000000.0,
        "rope_scaling": scaling_to_config(RopeScaling(factor=8.0, original_max_seq_len=8192)),
    },
    rules=_RULES,
)  # fmt: skip
