"""The formats of DeepSeek V3 and V2 on the Hugging Face hub."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torchtitan_clone.config import ConfigError
from torchtitan_clone.documents import shorten
from torchtitan_clone.hub.formats import CONFIG_KEYS, MoEHub
from torchtitan_clone.hub.keys import Arguments, entry_of
from torchtitan_clone.hub.mapping import DECODER_RULES, EXPERT_RULES, Rules, repeated, rotary_rows, same
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.deepseek_v3.model import ROUTER, V2_ROUTER, V3_ROUTER, DeepSeekV3Args

_DEPTH = "num_nextn_predict_layers"
_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_MOE_KEYS = {
    "num_experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "hidden_dim": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
    "score_scale": "routed_scaling_factor",
    "num_groups": "n_group",
    "top_groups": "topk_group",
}
_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_FIXED = {"hidden_act": "silu", "attention_bias": False, "moe_layer_freq": 1, "rope_interleave": True}
_ATTENTION = "model.layers.*.self_attn"
_SHARED_EXPERTS: Rules = {
    f"layers.*.feed_forward.shared_experts.{ours}.weight": same(f"model.layers.*.mlp.shared_experts.{theirs}.weight")
    for ours, theirs in {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.items()
}
_PREDICTION_RULES: Rules = {
    f"layers.*.{ours}.weight": same(f"model.layers.*.{theirs}.weight")
    for ours, theirs in {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}.items()
}
_LATENT = {"q_norm": "q_a_layernorm", "wq_a": "q_a_proj", "kv_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj"}
_LATENT_RULES: Rules = {
    f"layers.*.attention.{ours}.weight": same(f"{_ATTENTION}.{theirs}.weight") for ours, theirs in _LATENT.items()
}


def _is_omitted(name: str, args: ModelArgs) -> bool:
    """Whether a tensor is of a layer of multi-token prediction, which follow the others, that the model lacks."""
    match = re.match(r"model\.layers\.(\d{1,9})\.", name)
    return match is not None and int(match[1]) >= args.n_layers + args.mtp_depth


def _choice(*, num_groups: int, is_biased: bool) -> str:
    """Returns the hub's name of how a router chooses experts."""
    if is_biased:
        return "noaux_tc"
    return "group_limited_greedy" if num_groups > 1 else "greedy"


@dataclass(frozen=True, kw_only=True)
class _Release(MoEHub):
    """The hub's format of one of the two releases."""

    def rules_of(self, args: DeepSeekV3Args) -> Rules:
        sizes = args.latent_sizes
        queries = "q_b_proj" if sizes.q_latent else "q_proj"
        ours = "wq_b" if sizes.q_latent else "wq"
        of_heads = rotary_rows(f"{_ATTENTION}.{queries}.weight", plain=sizes.nope, rotary=sizes.rope)
        of_latent = rotary_rows(f"{_ATTENTION}.kv_a_proj_with_mqa.weight", plain=sizes.kv_latent, rotary=sizes.rope)
        rotary = {f"layers.*.attention.{ours}.weight": of_heads, "layers.*.attention.wkv_a.weight": of_latent}
        layers = [f"model.layers.{args.n_layers + depth}." for depth in range(args.mtp_depth)]
        shared = {
            "tok_embeddings.weight": repeated(
                "model.embed_tokens.weight", *(f"{each}embed_tokens.weight" for each in layers)
            ),
            "output.weight": repeated("lm_head.weight", *(f"{each}shared_head.head.weight" for each in layers)),
        }
        return {**self.rules, **rotary, **shared}

    def is_leftover(self, name: str, *, args: ModelArgs) -> bool:
        return _is_omitted(name, args) or super().is_leftover(name, args=args)

    def describe_leftovers(self, names: Iterable[str], *, args: ModelArgs) -> list[str]:
        if not (count := sum(_is_omitted(name, args) for name in names)):
            return []
        where = f"model.layers.{args.n_layers + args.mtp_depth} and later"
        what = "which predict tokens after the next one; model.args.mtp_depth is how many layers are kept"
        return [f"leaves out the {count} tensors of {where}, {what}"]

    def arguments(self, args: DeepSeekV3Args) -> Arguments:
        values = super().arguments(args)
        values["moe"] |= {name: getattr(args.moe, name) for name in ROUTER}
        others = ("q_lora_rank", "n_dense_layers", "mtp_depth")
        return values | {name: getattr(args, name) for name in others}

    def to_config(self, args: DeepSeekV3Args) -> dict[str, object]:
        return super().to_config(args) | {
            "topk_method": _choice(num_groups=args.moe.num_groups, is_biased=args.moe.expert_bias),
            "q_lora_rank": args.q_lora_rank or None,
            "first_k_dense_replace": args.n_dense_layers,
            _DEPTH: args.mtp_depth,
        }

    def read(self, given: Mapping[str, object]) -> Arguments:
        values = super().read(given)
        if absent := [key for key in ("q_lora_rank", "first_k_dense_replace") if key not in given]:
            raise ConfigError([f"config.json: {key} is missing" for key in absent])
        values["n_dense_layers"] = entry_of(given, "first_k_dense_replace").integer(low=0, high=1024)
        if (rank := entry_of(given, "q_lora_rank")).value == 0:
            rank.refuse("must be above 0, or null")
        values["q_lora_rank"] = 0 if rank.value is None else rank.integer(low=0, high=2**24)
        values["mtp_depth"] = entry_of({_DEPTH: 0, **given}, _DEPTH).integer(low=0, high=64)
        values["moe"] |= {name: getattr(self.moe, name) for name in ROUTER}
        wanted = _choice(num_groups=values["moe"]["num_groups"], is_biased=self.moe.expert_bias)
        method = given.get("topk_method", "noaux_tc" if self.moe.expert_bias else "greedy")
        if method != wanted:
            rule = f"{self.family} supports only {wanted!r} here"
            raise ConfigError(f"config.json: topk_method = {shorten(repr(method))}, and {rule}")
        return values

    def without_absent_layers(self, arguments: Arguments, *, names: Iterable[str]) -> tuple[Arguments, list[str]]:
        first = arguments["n_layers"]
        prefixes = tuple(f"model.layers.{first + depth}." for depth in range(arguments["mtp_depth"]))
        if not prefixes or any(name.startswith(prefixes) for name in names):
            return arguments, []
        what = f"config.json has {_DEPTH} = {arguments['mtp_depth']}, but the folder lacks the weights of these layers"
        return arguments | {"mtp_depth": 0}, [f"{what}, as transformers saves it; the model is read without them"]


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


_COMMON: Arguments = {
    "only": {"mlp_bias": False},
    "others": frozenset({"q_lora_rank", "first_k_dense_replace", "topk_method", _DEPTH}),
    # transformers writes what it derives from the sizes of heads; the last is of the releases' own code.
    "without_effect": frozenset({"head_dim", "qk_head_dim", "ep_size"}),
    # One group is no groups. Without a size queries have no latent.
    "nulls": {"n_group": 1, "topk_group": 1, "q_lora_rank": None},
    "keys": {**CONFIG_KEYS, **{size: size for size in _SIZES}},
    "rules": {**DECODER_RULES, **EXPERT_RULES, **_SHARED_EXPERTS, **_LATENT_RULES, **_PREDICTION_RULES},
    "moe_keys": _MOE_KEYS,
}
HUB = DeepSeekHub(
    family="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fixed={"model_type": "deepseek_v3", **_FIXED, "scoring_func": "sigmoid", "norm_topk_prob": True},
    defaults={**_DEFAULTS, "n_group": 8, "topk_group": 4},
    moe=V3_ROUTER,
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": _DEPTH},
    v2=_Release(
        family="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        fixed={"model_type": "deepseek_v2", **_FIXED, "scoring_func": "softmax", "norm_topk_prob": False},
        defaults={**_DEFAULTS, "n_group": 1, "topk_group": 1},
        moe=V2_ROUTER,
        aliases={"num_experts": "n_routed_experts"},
        **_COMMON,
    ),
    **_COMMON,
)
