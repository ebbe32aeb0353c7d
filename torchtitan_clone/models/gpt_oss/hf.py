"""gpt-oss's format on the Hugging Face hub: the experts of a layer are stacked, gates interleaved with the others."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_clone.hub.formats import CONFIG_KEYS, MoEHub, WindowedHub
from torchtitan_clone.hub.keys import Arguments, entry_of, scaling_to_config
from torchtitan_clone.hub.mapping import BIAS_RULES, DECODER_RULES, Rules, fused, same, stacked_expert_rules
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.gpt_oss.model import YARN
from torchtitan_clone.models.moe import MoEArgs

_MLP = "model.layers.*.mlp"
_gate_up_bias = same(f"{_MLP}.experts.gate_up_proj_bias")
_RULES: Rules = {
    **{name: rule for name, rule in DECODER_RULES.items() if "feed_forward" not in name},
    **BIAS_RULES,
    "layers.*.attention.wo.bias": same("model.layers.*.self_attn.o_proj.bias"),
    "layers.*.attention.sinks.weight": same("model.layers.*.self_attn.sinks"),
    **stacked_expert_rules(_MLP, interleaved=True),
    "layers.*.feed_forward.router.bias": same(f"{_MLP}.router.bias"),
    "layers.*.feed_forward.experts.w1_bias": fused(_gate_up_bias, dim=1, index=0, interleaved=True),
    "layers.*.feed_forward.experts.w2_bias": same(f"{_MLP}.experts.down_proj_bias"),
    "layers.*.feed_forward.experts.w3_bias": fused(_gate_up_bias, dim=1, index=1, interleaved=True),
}


@dataclass(frozen=True, kw_only=True)
class GptOssHub(WindowedHub, MoEHub):
    """gpt-oss's format; the experts of the releases are in MXFP4."""

    def to_config(self, args: ModelArgs) -> dict[str, object]:
        config = super().to_config(args)
        # Without an entry transformers has that of the releases.
        return {**config, "rope_scaling": config["rope_scaling"] or {"rope_type": "default"}}

    def read(self, given: Mapping[str, object]) -> Arguments:
        chosen = given.get("num_experts_per_tok")
        if given.get("experts_per_token", chosen) != chosen:  # a copy, which transformers does not read
            entry_of(given, "experts_per_token").refuse("differs from num_experts_per_tok; remove one of them")
        return super().read({"swiglu_limit": 7.0, **given})


HUB = GptOssHub(
    family="gpt_oss",
    architecture="GptOssForCausalLM",
    fixed={"model_type": "gpt_oss", "hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702},
    defaults={
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "tie_word_embeddings": False, "head_dim": 64,
        "num_key_value_heads": 8,
        "rope_theta": 150000.0, "rope_scaling": scaling_to_config(YARN),
    },
    keys={**{ours: theirs for ours, theirs in CONFIG_KEYS.items() if ours != "hidden_dim"}, "head_dim": "head_dim"},
    aliases={"num_experts": "num_local_experts"},
    others=frozenset({"experts_per_token"}),
    without_effect=frozenset({"initial_context_length"}),
    quantization="mxfp4",
    rules=_RULES,
    moe=MoEArgs(biases=True),
    moe_keys={
        "num_experts": "num_local_experts",
        "top_k": "num_experts_per_tok",
        "hidden_dim": "intermediate_size",
        "swiglu_limit": "swiglu_limit",
    },
    pattern=("window", "full"),
    window=128,
)  # fmt: skip
