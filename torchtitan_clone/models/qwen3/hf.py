"""Qwen3's formats on the Hugging Face hub."""

from torchtitan_clone.hub.formats import CONFIG_KEYS, DecoderHub, MoEHub
from torchtitan_clone.hub.mapping import DECODER_RULES, EXPERT_RULES, QK_NORM_RULES, Rules
from torchtitan_clone.models.qwen3.model import Qwen3MoEArgs

_FIXED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": False}
# Unused, since use_sliding_window is false.
_WITHOUT_EFFECT = frozenset({"sliding_window", "max_window_layers"})
_KEYS = {**CONFIG_KEYS, "head_dim": "head_dim"}
_RULES: Rules = {**DECODER_RULES, **QK_NORM_RULES}

HUB = DecoderHub(
    family="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed={"model_type": "qwen3", **_FIXED},
    defaults={**_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
    keys=_KEYS,
    without_effect=_WITHOUT_EFFECT,
    rules=_RULES,
)


class _MoEHub(MoEHub):
    """Qwen3's format with experts."""

    def to_config(self, args: Qwen3MoEArgs) -> dict[str, object]:
        # The first is of the releases, the second of transformers.
        return {**super().to_config(args), "num_local_experts": args.moe.num_experts}


MOE_HUB = _MoEHub(
    family="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    # Every layer has experts.
    fixed={"model_type": "qwen3_moe", **_FIXED, "decoder_sparse_step": 1, "mlp_only_layers": []},
    defaults={**_DEFAULTS, "num_key_value_heads": 4},
    keys=_KEYS,
    without_effect=_WITHOUT_EFFECT,
    rules={**_RULES, **EXPERT_RULES},
    moe_keys={
        "num_experts": "num_experts",
        "top_k": "num_experts_per_tok",
        "hidden_dim": "moe_intermediate_size",
        "normalize_scores": "norm_topk_prob",
    },
    aliases={"num_local_experts": "num_experts"},
)
