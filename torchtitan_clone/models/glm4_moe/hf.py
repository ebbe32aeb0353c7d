"""GLM-4.5's format on the Hugging Face hub."""

from torchtitan_clone.hub.formats import CONFIG_KEYS
from torchtitan_clone.hub.mapping import BIAS_RULES, DECODER_RULES, QK_NORM_RULES
from torchtitan_clone.hub.predicting import (
    DEPTH,
    GROUPED_KEYS,
    N_DENSE,
    PREDICTING_KEYS,
    PREDICTING_RULES,
    PredictingHub,
)
from torchtitan_clone.models.moe import MoEArgs

HUB = PredictingHub(
    family="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    fixed={"model_type": "glm4_moe", "hidden_act": "silu", "norm_topk_prob": True},
    defaults={
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "tie_word_embeddings": False, "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5, "attention_bias": False, "use_qk_norm": False, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, N_DENSE: 1, DEPTH: 1,
    },
    only={"mlp_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    keys={**CONFIG_KEYS, "head_dim": "head_dim", "attention_bias": "attention_bias", "qk_norm": "use_qk_norm"},
    others=PREDICTING_KEYS,
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": DEPTH},
    nulls={"n_group": 1, "topk_group": 1},
    is_partly_rotary=True,
    rules={**DECODER_RULES, **PREDICTING_RULES, **BIAS_RULES, **QK_NORM_RULES},
    moe=MoEArgs(score_func="sigmoid", expert_bias=True),
    moe_keys=GROUPED_KEYS,
)  # fmt: skip
