"""OLMo 2's and 3's formats on the Hugging Face hub."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_clone.documents import Value
from torchtitan_clone.hub.formats import DecoderHub, WindowedHub
from torchtitan_clone.hub.keys import ORIGINAL_LENGTH, Arguments, entry_of
from torchtitan_clone.hub.mapping import DECODER_RULES, Rules, same
from torchtitan_clone.models.decoder import ModelArgs

_FIXED = {"hidden_act": "silu", "attention_bias": False}
_DEFAULTS = {"tie_word_embeddings": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
_THETA = 500000.0
_WHERE = "config.json: rope_parameters: sliding_attention"
_RULES: Rules = {
    **DECODER_RULES,
    "layers.*.attention_norm.weight": same("model.layers.*.post_attention_layernorm.weight"),
    "layers.*.ffn_norm.weight": same("model.layers.*.post_feedforward_layernorm.weight"),
    "layers.*.attention.q_norm.weight": same("model.layers.*.self_attn.q_norm.weight"),
    "layers.*.attention.k_norm.weight": same("model.layers.*.self_attn.k_norm.weight"),
}


@dataclass(frozen=True, kw_only=True)
class Olmo3Hub(WindowedHub):
    """OLMo 3's format: transformers 5 writes the rotary positions of each type of layers."""

    def to_config(self, args: ModelArgs) -> dict[str, object]:
        config = super().to_config(args)
        plain = {"rope_type": "default", "rope_theta": args.rope_theta}
        scaling = config["rope_scaling"]
        full = {**plain, **scaling} if isinstance(scaling, dict) else plain
        return {**config, "rope_parameters": {"full_attention": full, "sliding_attention": plain}}

    def read(self, given: Mapping[str, object]) -> Arguments:
        """Reads one rope_scaling, for full layers, and what transformers 5 writes for each type of layers.

        transformers 5 gives rope_theta beside them to full layers only, and does not read an original length there.
        """
        types = entry_of({"rope_parameters": {}, **given}, "rope_parameters").entries()
        if unknown := types.keys() - {"full_attention", "sliding_attention"}:
            types[min(unknown)].refuse("must be in full_attention or sliding_attention")
        full, sliding = (types.get(f"{kind}_attention", Value({}, where=_WHERE)) for kind in ("full", "sliding"))
        scaling = entry_of({"rope_scaling": {}, **given}, "rope_scaling").plain_entries()
        outside = {"rope_theta": given.get("rope_theta", _THETA), "rope_scaling": {}}
        others = {key: value for key, value in given.items() if key != ORIGINAL_LENGTH}
        values = super().read({**others, **outside, "rope_parameters": {**full.plain_entries(), **scaling}})
        only = {"rope_type": "default", "rope_theta": values["rope_theta"]}
        if {**only, "rope_theta": _THETA, **sliding.plain_entries()} != only:
            sliding.refuse(f"{self.family} supports only {only}, the theta of full layers without scaling")
        return values


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
