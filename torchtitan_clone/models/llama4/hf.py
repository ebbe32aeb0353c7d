"""Llama 4's format on the Hugging Face hub: that of its text model, Llama4ForCausalLM."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_clone.config import ConfigError
from torchtitan_clone.documents import DocumentError, Value, shorten
from torchtitan_clone.models.hf import CONFIG_KEYS, Arguments
from torchtitan_clone.models.hf_mapping import DECODER_RULES, Rules, fused, rotary_rows, same, transposed
from torchtitan_clone.models.llama4.model import FIXED, ROUTER, Llama4Args
from torchtitan_clone.models.moe_hf import EXPERT_RULES, MoEHub

_MLP = "model.layers.*.feed_forward"
_gate_up = transposed(f"{_MLP}.experts.gate_up_proj")
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_RULES: Rules = {
    **DECODER_RULES,
    "layers.*.feed_forward.router.weight": same(f"{_MLP}.router.weight"),
    "layers.*.feed_forward.router.expert_load": EXPERT_RULES["layers.*.feed_forward.router.expert_load"],
    "layers.*.feed_forward.experts.w1": fused(_gate_up, dim=2, index=0),
    "layers.*.feed_forward.experts.w2": transposed(f"{_MLP}.experts.down_proj"),
    "layers.*.feed_forward.experts.w3": fused(_gate_up, dim=2, index=1),
}
_RULES |= {f"layers.*.feed_forward.{ours}.weight": same(f"{_MLP}.{name}.weight") for ours, name in _PROJECTIONS.items()}
_RULES |= {
    f"layers.*.feed_forward.shared_experts.{ours}.weight": same(f"{_MLP}.shared_expert.{name}.weight")
    for ours, name in _PROJECTIONS.items()
}
_COUNTS = {
    "moe_every": "interleave_moe_layer_step",
    "full_every": "no_rope_layer_interval",
    "chunk": "attention_chunk_size",
    "query_scale_floor": "floor_scale",
}
_OTHERS = {"qk_norm": "use_qk_norm", "query_scale": "attn_scale"}
_DEFAULTS = {
    "interleave_moe_layer_step": 1, "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192,
    "use_qk_norm": True, "attn_scale": 0.1, "attn_temperature_tuning": True,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Llama4Hub(MoEHub):
    """Llama 4's format. Kinds of layers are given as numbers, and may be listed too."""

    def rules_of(self, args: Llama4Args) -> Rules:
        rotary = {
            f"layers.*.attention.{ours}.weight": rotary_rows(
                f"model.layers.*.self_attn.{theirs}.weight", plain=0, rotary=args.head_dim
            )
            for ours, theirs in {"wq": "q_proj", "wk": "k_proj"}.items()
        }
        return {**self.rules, **rotary}

    def arguments(self, args: Llama4Args) -> Arguments:
        values = super().arguments(args)
        values["moe"] |= {name: getattr(args.moe, name) for name in FIXED}
        return values | {name: getattr(args, name) for name in (*_COUNTS, *_OTHERS)}

    def to_config(self, args: Llama4Args) -> dict[str, object]:
        config = super().to_config(args) | _lists(args)
        config |= {theirs: getattr(args, ours) for ours, theirs in (*_COUNTS.items(), *_OTHERS.items())}
        return config | {"attn_temperature_tuning": args.query_scale > 0}

    def from_config(self, config: Mapping[str, object]) -> Arguments:
        given = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
        values = super().from_config(given)
        values["moe"] |= {name: getattr(ROUTER, name) for name in FIXED}
        entries = {key: Value(given[key], where=f"config.json: {key}") for key in _DEFAULTS}
        try:
            values |= {ours: entries[theirs].integer(low=1, high=2**31) for ours, theirs in _COUNTS.items()}
            values["qk_norm"] = entries["use_qk_norm"].flag()
            scale = entries["attn_scale"].number(low=0.0)
            values["query_scale"] = scale if entries["attn_temperature_tuning"].flag() else 0.0
        except DocumentError as error:
            raise ConfigError(str(error)) from None
        counts = {name: values[name] for name in ("n_layers", "moe_every", "full_every")}
        for key, wanted in _lists(Llama4Args(**counts)).items():
            if given.get(key, wanted) not in (wanted, []):
                found = shorten(repr(given[key]))
                raise ConfigError(
                    f"config.json: {key} = {found}, and llama4 supports only {shorten(repr(wanted))} here"
                )
        return values


def _lists(args: Llama4Args) -> dict[str, list[object]]:
    """Returns the entries that list what layers are."""
    is_full = [args.is_full(layer) for layer in range(args.n_layers)]
    return {
        "moe_layers": [layer for layer in range(args.n_layers) if args.has_experts(layer)],
        "no_rope_layers": [int(not full) for full in is_full],
        "layer_types": ["full_attention" if full else "chunked_attention" for full in is_full],
    }


HUB = Llama4Hub(
    family="llama4",
    architecture="Llama4ForCausalLM",
    fixed={"model_type": "llama4_text", "hidden_act": "silu", "attention_bias": False},
    defaults={
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "tie_word_embeddings": False, "head_dim": 128,
        "rope_theta": 500000.0,
    },
    keys={**CONFIG_KEYS, "hidden_dim": "intermediate_size_mlp", "head_dim": "head_dim"},
    rules=_RULES,
    moe_keys={"num_experts": "num_local_experts", "top_k": "num_experts_per_tok", "hidden_dim": "intermediate_size"},
)  # fmt: skip
