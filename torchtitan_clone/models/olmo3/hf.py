"""OLMo 2's and 3's formats on the Hugging Face hub."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_clone.documents import Value
from torchtitan_clone.hub.formats import DecoderHub
from torchtitan_clone.hub.keys import Arguments
from torchtitan_clone.hub.layered import LayeredRopeHub
from torchtitan_clone.hub.mapping import DECODER_RULES, QK_NORM_RULES, Rules, same

_FIXED = {"hidden_act": "silu", "attention_bias": False}
_DEFAULTS = {"tie_word_embeddings": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
_THETA = 500000.0
_RULES: Rules = {
    **DECODER_RULES,
    "layers.*.attention_norm.weight": same("model.layers.*.post_attention_layernorm.weight"),
    "layers.*.ffn_norm.weight": same("model.layers.*.post_feedforward_layernorm.weight"),
    **QK_NORM_RULES,
}


@dataclass(frozen=True, kw_only=True)
class Olmo3Hub(LayeredRopeHub):
    """OLMo 3's format: rotary positions of layers with windows differ in the scaling only."""

    def read_window_rope(self, sliding: Value, *, theta: float, given: Mapping[str, object]) -> Arguments:
        only = {"rope_type": "default", "rope_theta": theta}
        if {**only, "rope_theta": _THETA, **sliding.plain_entries()} != only:
            sliding.refuse(f"{self.family} supports only {only}, the theta of full layers without scaling")
        return {}


HUB = Olmo3Hub(
    family="olmo3",
    architecture="Olmo3ForCausalLM",
    fixed={"model_type": "olmo3", **_FIXED},
    defaults={**_DEFAULTS, "rope_theta": _THETA},
    rules=_RULES,
    pattern=("window", "window", "window", "full"),
    window=4096,
)
OLMO2_HUB = DecoderHub(
    family="olmo2",
    architecture="Olmo2ForCausalLM",
    fixed={"model_type": "olmo2", **_FIXED},
    defaults=_DEFAULTS,
    rules=_RULES,
)
