"""The formats of DeepSeek V3, V3.2 and V2, of Kimi K2, and of GLM-5, on the Hugging Face hub."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_clone.config import ConfigError
from torchtitan_clone.documents import shorten
from torchtitan_clone.hub.formats import CONFIG_KEYS
from torchtitan_clone.hub.keys import Arguments, entry_of
from torchtitan_clone.hub.latent import LATENT_RULES, LATENT_SIZES, LatentHub
from torchtitan_clone.hub.mapping import DECODER_RULES, Rules, rotary_rows, same
from torchtitan_clone.hub.predicting import (
    DEPTH,
    GROUPED_KEYS,
    N_DENSE,
    PREDICTING_KEYS,
    PREDICTING_RULES,
    PredictingHub,
)
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.deepseek_v3.model import (
    ROUTER,
    V2_ROUTER,
    V3_ROUTER,
    DeepSeekV3Args,
    SparseDeepSeekArgs,
)

_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_FIXED = {"hidden_act": "silu", "attention_bias": False, "moe_layer_freq": 1, "rope_interleave": True}


def _choice(*, num_groups: int, is_biased: bool) -> str:
    """Returns the hub's name of how a router chooses experts."""
    if is_biased:
        return "noaux_tc"
    return "group_limited_greedy" if num_groups > 1 else "greedy"


@dataclass(frozen=True, kw_only=True)
class _Release(LatentHub, PredictingHub):
    """The hub's format of one of the releases."""

    def arguments(self, args: DeepSeekV3Args) -> Arguments:
        values = super().arguments(args)
        values["moe"] |= {name: getattr(args.moe, name) for name in ROUTER}
        return values

    def to_config(self, args: DeepSeekV3Args) -> dict[str, object]:
        return super().to_config(args) | {
            "topk_method": _choice(num_groups=args.moe.num_groups, is_biased=args.moe.expert_bias)
        }

    def read(self, given: Mapping[str, object]) -> Arguments:
        if N_DENSE not in given:
            raise ConfigError(f"config.json: {N_DENSE} is missing")
        values = super().read(given)
        values["moe"] |= {name: getattr(self.moe, name) for name in ROUTER}
        wanted = _choice(num_groups=values["moe"]["num_groups"], is_biased=self.moe.expert_bias)
        method = given.get("topk_method", "noaux_tc" if self.moe.expert_bias else "greedy")
        if method != wanted:
            rule = f"{self.family} supports only {wanted!r} here"
            raise ConfigError(f"config.json: topk_method = {shorten(repr(method))}, and {rule}")
        return values


@dataclass(frozen=True, kw_only=True)
class DeepSeekHub(_Release):
    """The format of V3, and of V2 for models with its router."""

    v2: _Release

    def is_format_of(self, config: Mapping[str, object]) -> bool:
        return self.v2.is_format_of(config) or super().is_format_of(config)

    def find_format_errors(self, args: ModelArgs) -> list[str]:
        return (self.v2 if vars(args)["moe"].score_func == "softmax" else super()).find_format_errors(args)

    def arguments(self, args: DeepSeekV3Args) -> Arguments:
        return self.v2.arguments(args) if args.moe.score_func == "softmax" else super().arguments(args)

    def to_config(self, args: DeepSeekV3Args) -> dict[str, object]:
        return self.v2.to_config(args) if args.moe.score_func == "softmax" else super().to_config(args)

    def from_config(self, config: Mapping[str, object]) -> Arguments:
        is_v2 = config.get("model_type") == "deepseek_v2"
        return self.v2.from_config(config) if is_v2 else super().from_config(config)


_INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
_LAYER_TYPES, _MLP_TYPES, _INDEXER_TYPES = "layer_types", "mlp_layer_types", "indexer_types"


@dataclass(frozen=True, kw_only=True)
class SparseHub(_Release):
    """The format of a release with an indexer in every layer; `is_neighboring`: it rotates pairs of neighbors."""

    is_neighboring: bool

    def rules_of(self, args: SparseDeepSeekArgs) -> Rules:
        hub = {name: f"model.layers.*.self_attn.indexer.{name}" for name in _INDEXER}
        found = {name: same(theirs) for name, theirs in hub.items()}
        if self.is_neighboring:
            rotary, plain = args.qk_rope_head_dim, args.index_head_dim - args.qk_rope_head_dim
            rotated = _INDEXER[:-1]
            found |= {name: rotary_rows(hub[name], plain=plain, rotary=rotary, rotary_first=True) for name in rotated}
        return {**super().rules_of(args), **{f"layers.*.attention.indexer.{name}": found[name] for name in found}}

    def read(self, given: Mapping[str, object]) -> Arguments:
        values = super().read(given)
        layers, dense = values["n_layers"], values["n_dense_layers"]
        only = {
            _LAYER_TYPES: ["indexed_attention"] * layers,
            _MLP_TYPES: ["dense"] * dense + ["sparse"] * (layers - dense),
            _INDEXER_TYPES: ["full"] * layers,
        }
        for key, types in only.items():
            if given.get(key, types) != types:
                entry_of(given, key).refuse(f"{self.family} supports only {', '.join(dict.fromkeys(types))}, in order")
        return values


_COMMON: Arguments = {
    "only": {"mlp_bias": False},
    "others": PREDICTING_KEYS | {"topk_method"},
    # transformers writes what it derives from the sizes of heads; the last is of the releases' own code.
    "without_effect": frozenset({"head_dim", "qk_head_dim", "ep_size"}),
    # One group is no groups. Without a size queries have no latent.
    "nulls": {"n_group": 1, "topk_group": 1, "q_lora_rank": None},
    "keys": {**CONFIG_KEYS, **LATENT_SIZES},
    "rules": {**DECODER_RULES, **PREDICTING_RULES, **LATENT_RULES},
    "moe_keys": GROUPED_KEYS,
}
_V3: Arguments = {
    "architecture": "DeepseekV3ForCausalLM",
    "moe": V3_ROUTER,
    "aliases": {"num_local_experts": "n_routed_experts", "num_mtp_layers": DEPTH},
    **_COMMON,
}
_V3_FIXED = {**_FIXED, "scoring_func": "sigmoid", "norm_topk_prob": True}
HUB = DeepSeekHub(
    family="deepseek_v3",
    fixed={"model_type": "deepseek_v3", **_V3_FIXED},
    defaults={**_DEFAULTS, "n_group": 8, "topk_group": 4},
    v2=_Release(
        family="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        fixed={"model_type": "deepseek_v2", **_FIXED, "scoring_func": "softmax", "norm_topk_prob": False},
        defaults={**_DEFAULTS, "n_group": 1, "topk_group": 1},
        moe=V2_ROUTER,
        aliases={"num_experts": "n_routed_experts"},
        **_COMMON,
    ),
    **_V3,
)
KIMI_K2_HUB = _Release(
    family="kimi_k2",
    fixed={"model_type": "kimi_k2", **_V3_FIXED},
    defaults={**_DEFAULTS, "n_group": 1, "topk_group": 1},
    **_V3,
)
_SPARSE: Arguments = {
    **_V3,
    "others": _COMMON["others"] | {_LAYER_TYPES, _MLP_TYPES, _INDEXER_TYPES},
    "keys": {**_COMMON["keys"], **{name: name for name in ("index_n_heads", "index_head_dim", "index_topk")}},
}
V3_2_HUB = SparseHub(
    family="deepseek_v32",
    fixed={"model_type": "deepseek_v32", **_V3_FIXED},
    defaults={**_DEFAULTS, "n_group": 8, "topk_group": 4},
    is_neighboring=False,
    **_SPARSE
    | {
        "architecture": "DeepseekV32ForCausalLM",
        "only": {"mlp_bias": False, "indexer_rope_interleave": False},
    },
)
GLM5_HUB = SparseHub(
    family="glm_moe_dsa",
    fixed={"model_type": "glm_moe_dsa", **_V3_FIXED},
    defaults={**_DEFAULTS, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1},
    is_neighboring=True,
    **_SPARSE
    | {
        "architecture": "GlmMoeDsaForCausalLM",
        # Of later releases, whose layers share what one of them selects.
        "only": {"mlp_bias": False, "indexer_rope_interleave": True, "index_topk_freq": 1},
    },
)
