"""Kimi Linear's format on the Hugging Face hub: KimiLinearForCausalLM."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_clone.documents import DocumentError, Value
from torchtitan_clone.hub.formats import CONFIG_KEYS, DecoderHub, MoEHub
from torchtitan_clone.hub.hybrid import LAYER_TYPES
from torchtitan_clone.hub.keys import Arguments, entry_of, read_kinds
from torchtitan_clone.hub.latent import LATENT_RULES, LATENT_SIZES
from torchtitan_clone.hub.mapping import DECODER_RULES, EXPERT_RULES, Rule, Rules, channels, same, stacked, swiglu_rules
from torchtitan_clone.hub.predicting import N_DENSE
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.kimi_linear.model import ROUTER, KimiLinearArgs
from torchtitan_clone.ops.tensor_slices import TensorSlice

_LINEAR = "linear_attn_config"
_LISTS = {"linear": "kda_layers", "full": "full_attn_layers"}
"""Of the numbers of layers, from 1 on, by our types."""
_SIZES = {
    "linear_key_heads": ("num_heads", "linear_num_heads", 32),
    "linear_key_dim": ("head_dim", "linear_head_dim", 128),
    "linear_conv": ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
}
"""Keys of linear_attn_config by our arguments, those of transformers beside it, and its defaults."""


@dataclass(frozen=True, kw_only=True)
class KimiLinearHub(MoEHub):
    """Kimi Linear's format; transformers writes the names of a dense feed-forward as those of experts."""

    def of_folder(self, names: Iterable[str]) -> DecoderHub:
        is_renamed = any(name.endswith(".block_sparse_moe.gate_proj.weight") for name in names)
        return replace(self, rules={**self.rules, **swiglu_rules(_FFN, _MOE)}) if is_renamed else self

    def find_format_errors(self, args: ModelArgs) -> list[str]:
        tied = (
            f"model.args.tied_embeddings = true: {self.family} has an output of its own in the Hugging Face format; "
            "set it to false, or neither import nor export weights in this format"
        )
        return super().find_format_errors(args) + ([tied] if args.tied_embeddings else [])

    def arguments(self, args: KimiLinearArgs) -> Arguments:
        types = ["linear" if args.is_linear(layer) else "full" for layer in range(args.n_layers)]
        sizes = {name: getattr(args, name) for name in _SIZES}
        own = {"n_dense_layers": args.n_dense_layers, "layer_types": types}
        return {**super().arguments(args), **own, **_of_both(sizes)}

    def to_config(self, args: KimiLinearArgs) -> dict[str, object]:
        types: list[str] = self.arguments(args)["layer_types"]
        lists = {
            theirs: [number for number, kind in enumerate(types, start=1) if kind == ours]
            for ours, theirs in _LISTS.items()
        }
        linear = {**{theirs: getattr(args, ours) for ours, (theirs, *_) in _SIZES.items()}, **lists}
        # By default transformers pads with a token of the releases' vocabulary.
        return {**super().to_config(args), _LINEAR: linear, N_DENSE: args.n_dense_layers, "pad_token_id": None}

    def keys_read(self) -> set[str]:
        beside = {key for _, key, _ in _SIZES.values()}
        return super().keys_read() | {_LINEAR, N_DENSE, "layer_types", "mlp_layer_types"} | beside

    def read(self, given: Mapping[str, object]) -> Arguments:
        values, table = super().read(given), entry_of({_LINEAR: {}, **given}, _LINEAR).entries()
        known = {*_LISTS.values(), *(key for key, *_ in _SIZES.values())}
        for key in (key for key in table if key not in known):
            table[key].refuse(f"{self.family} has no such key; remove it if the model is the same without it")
        sizes = {ours: _size(table, given, *keys) for ours, keys in _SIZES.items()}
        dense = _dense_layers(given, count=values["n_layers"])
        types = _layer_types(table, given, count=values["n_layers"])
        return {**values, **_of_both(sizes), "n_dense_layers": dense, "layer_types": types}


def _of_both(sizes: Arguments) -> Arguments:
    """Returns the sizes of keys, and those of values, which are equal."""
    return sizes | {name.replace("_key_", "_value_"): size for name, size in sizes.items()}


def _size(table: Mapping[str, Value], given: Mapping[str, object], inside: str, beside: str, default: int) -> int:
    """Returns a size that stands in the table, beside it, or in both."""
    found = [*([table[inside]] if inside in table else []), *([entry_of(given, beside)] if beside in given else [])]
    first, *others = [each.integer(low=1, high=2**20) for each in found] or [default]
    if others and others[0] != first:
        found[1].refuse(f"differs from {inside} {first} in {_LINEAR}; remove one of them")
    return first


def _layer_types(table: Mapping[str, Value], given: Mapping[str, object], *, count: int) -> list[str]:
    """Returns the types of the layers, which both formats of the lists must agree on."""
    numbers = {
        ours: [each.integer(low=1, high=count) for each in table[theirs].items()]
        for ours, theirs in _LISTS.items()
        if theirs in table
    }
    if numbers and sorted(number for each in numbers.values() for number in each) != [*range(1, count + 1)]:
        lists = " and ".join(_LISTS.values())
        raise DocumentError(f"config.json: {_LINEAR}: {lists} must have each layer from 1 to {count} once")
    default = ["full" if layer and layer % 4 == 0 else "linear" for layer in range(count)]
    if numbers:
        default = ["linear" if number in numbers["linear"] else "full" for number in range(1, count + 1)]
    if "layer_types" not in given:
        return default
    entry = entry_of(given, "layer_types")
    types = read_kinds(entry, LAYER_TYPES, count=count)
    if numbers and types != default:
        entry.refuse(f"differs from the lists of {_LINEAR}; remove one of them")
    return types


def _dense_layers(given: Mapping[str, object], *, count: int) -> int:
    """Returns the number of first layers without experts."""
    if "mlp_layer_types" not in given:
        return entry_of({N_DENSE: 1, **given}, N_DENSE).integer(low=0, high=count)
    entry = entry_of(given, "mlp_layer_types")
    types = [each.choice("dense", "sparse") for each in entry.items(count=count)]
    if types != sorted(types):
        entry.refuse("must be dense first, then sparse")
    dense = types.count("dense")
    if N_DENSE in given and (entry := entry_of(given, N_DENSE)).integer(low=0, high=count) != dense:
        entry.refuse(f"differs from mlp_layer_types, which has {dense} dense layers; remove one of them")
    return dense


def _decays(name: str) -> Rule:
    """One tensor of the hub, [1, 1, heads, 1], and ours [heads]."""
    return lambda shape: [TensorSlice(source=name, shape=(1, 1, *shape, 1), of=(0, 0, slice(None), 0))]


_ATTENTION, _MOE = "model.layers.*.self_attn", "model.layers.*.block_sparse_moe"
_OURS, _FFN = "layers.*.attention", "layers.*.feed_forward"
_NAMES = {
    "wb": "b_proj", "wa.a": "f_a_proj", "wa.b": "f_b_proj", "wg.a": "g_a_proj", "wg.b": "g_b_proj", "norm": "o_norm",
    "wkv_a": "kv_a_proj_with_mqa",
}  # fmt: skip
_RULES: Rules = {
    **DECODER_RULES,
    **EXPERT_RULES,
    **LATENT_RULES,
    **{f"{_OURS}.{ours}.weight": same(f"{_ATTENTION}.{theirs}.weight") for ours, theirs in _NAMES.items()},
    **{f"{_OURS}.{name}_conv.weight": channels(f"{_ATTENTION}.{name}_conv1d.weight") for name in "qkv"},
    f"{_OURS}.decay.A_log": _decays(f"{_ATTENTION}.A_log"),
    f"{_OURS}.decay.dt_bias": same(f"{_ATTENTION}.dt_bias"),
    f"{_FFN}.router.weight": same(f"{_MOE}.gate.weight"),
    f"{_FFN}.router.expert_bias": same(f"{_MOE}.gate.e_score_correction_bias"),
    **{f"{_FFN}.experts.{w}": stacked(same, f"{_MOE}.experts.{{index}}.{w}.weight") for w in ("w1", "w2", "w3")},
    **swiglu_rules(f"{_FFN}.shared_experts", f"{_MOE}.shared_experts"),
}
_KEYS = {ours: theirs for ours, theirs in CONFIG_KEYS.items() if ours != "tied_embeddings"}
_ALIASES = {
    "max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize", "n_group": "num_expert_group",
    "num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-5, "model_max_length": 1048576, "num_expert_group": 1, "topk_group": 1,
}  # fmt: skip
HUB = KimiLinearHub(
    family="kimi_linear",
    architecture="KimiLinearForCausalLM",
    fixed={
        "model_type": "kimi_linear", "hidden_act": "silu", "mla_use_nope": True, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "q_lora_rank": None,
        "tie_word_embeddings": False,
    },
    only={"attention_bias": False, "num_nextn_predict_layers": 0, "use_grouped_topk": True},
    # transformers writes the sizes of heads, which it derives from others.
    without_effect=frozenset({"head_dim", "qk_head_dim"}),
    defaults=_DEFAULTS,
    keys={**_KEYS, "max_seq_len": "model_max_length", **LATENT_SIZES},
    aliases=_ALIASES,
    rules=_RULES,
    moe=ROUTER,
    moe_keys={
        "num_experts": "num_experts", "top_k": "num_experts_per_token", "hidden_dim": "moe_intermediate_size",
        "num_shared_experts": "num_shared_experts", "score_scale": "routed_scaling_factor",
        "num_groups": "num_expert_group", "top_groups": "topk_group",
    },
)  # fmt: skip
