"""MiniMax-M2's format on the Hugging Face hub."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_clone.hub.formats import CONFIG_KEYS, MoEHub
from torchtitan_clone.hub.keys import Arguments, entry_of, read_argument
from torchtitan_clone.hub.mapping import DECODER_RULES, EXPERT_RULES, QK_NORM_RULES, Rules, same, stacked
from torchtitan_clone.models.moe import MoEArgs

_MOE, _OURS = "model.layers.*.block_sparse_moe", "layers.*.feed_forward"
_RULES: Rules = {
    **DECODER_RULES,
    **EXPERT_RULES,
    **QK_NORM_RULES,
    f"{_OURS}.router.weight": same(f"{_MOE}.gate.weight"),
    f"{_OURS}.router.expert_bias": same(f"{_MOE}.e_score_correction_bias"),
    **{f"{_OURS}.experts.{w}": stacked(same, f"{_MOE}.experts.{{index}}.{w}.weight") for w in ("w1", "w2", "w3")},
}


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2Hub(MoEHub):
    """MiniMax-M2's format; rotary_dim is what releases have instead of a share of the head."""

    def read(self, given: Mapping[str, object]) -> Arguments:
        sizes = {"head_dim": 128, **given}
        if "rotary_dim" in given and "partial_rotary_factor" not in given:
            dims = {name: read_argument(name, entry_of(sizes, name)) for name in ("rotary_dim", "head_dim")}
            given = {**given, "partial_rotary_factor": dims["rotary_dim"] / dims["head_dim"]}
        types = given.get("attn_type_list", [])
        if not isinstance(types, list) or any(each != 1 for each in types):
            entry_of(given, "attn_type_list").refuse("minimax_m2 supports only 1, full attention, in each layer")
        return super().read(given)


HUB = MiniMaxM2Hub(
    family="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    fixed={"model_type": "minimax_m2", "hidden_act": "silu"},
    defaults={
        "rms_norm_eps": 1e-6, "max_position_embeddings": 196608, "tie_word_embeddings": False, "num_key_value_heads": 8,
        "head_dim": 128, "rope_theta": 5000000.0, "partial_rotary_factor": 1.0,
    },
    only={
        "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
        "qk_norm_type": "per_layer", "router_jitter_noise": 0.0, "scoring_func": "sigmoid", "sliding_window": None,
        "shared_intermediate_size": 0, "use_qk_norm": True, "use_routing_bias": True,
    },
    nulls={"sliding_window": None},
    keys={**{ours: theirs for ours, theirs in CONFIG_KEYS.items() if ours != "hidden_dim"}, "head_dim": "head_dim"},
    others=frozenset({"attn_type_list", "rotary_dim"}),
    aliases={"num_experts": "num_local_experts"},
    # Of dense layers, shared experts and layers that predict later tokens, which the releases lack.
    without_effect=frozenset(
        {"mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp"}
    ),
    is_partly_rotary=True,
    rules=_RULES,
    moe=MoEArgs(score_func="sigmoid", expert_bias=True),
    moe_keys={"num_experts": "num_local_experts", "top_k": "num_experts_per_tok", "hidden_dim": "intermediate_size"},
)  # fmt: skip
