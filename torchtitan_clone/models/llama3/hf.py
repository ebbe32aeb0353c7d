"""Llama 3 as the Hugging Face hub writes it: names of weights and config.json, both ways; see models/spec.py.

The values are the same on both sides: rotary positions turn the pairs (i, i + H/2) here too, so nothing is permuted.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torchtitan_clone.config import ConfigError
from torchtitan_clone.models.llama3.model import Llama3Args

_ENDS = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_ENDS_BACK = {theirs: ours for ours, theirs in _ENDS.items()}
_BLOCK_BACK = {theirs: ours for ours, theirs in _BLOCK.items()}

_CONFIG_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
}
_ROPE_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}
_FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""What this model cannot be otherwise."""
_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False}
"""What a config.json means where it leaves a key out; the keys that are in neither must be there."""
_DEFAULT_ROPE_THETA = 10000.0


def to_name(name: str) -> str:
    """Our name of a parameter as the hub has it."""
    module, _, kind = name.rpartition(".")
    if module in _ENDS:
        return f"{_ENDS[module]}.{kind}"
    layers, layer, part = module.split(".", 2)
    return f"model.{layers}.{layer}.{_BLOCK[part]}.{kind}"


def from_name(name: str) -> str | None:
    """The hub's name of a parameter as we have it; None where no parameter of this model is called so."""
    module, _, kind = name.rpartition(".")
    if module in _ENDS_BACK:
        return f"{_ENDS_BACK[module]}.{kind}"
    match module.split(".", 3):
        case ["model", "layers", layer, part] if part in _BLOCK_BACK:
            return f"layers.{layer}.{_BLOCK_BACK[part]}.{kind}"
        case _:
            return None


def is_leftover(name: str, *, tied: bool) -> bool:
    """Whether a name in the hub's files says nothing new: frequencies of old releases, a tied output written twice."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def arguments(args: Llama3Args) -> dict[str, Any]:
    """The arguments as `from_config(to_config(args))` gives them: what is computed from others is resolved."""
    found = {name: getattr(args, name) for name in _CONFIG_KEYS}
    found |= {"n_kv_heads": args.kv_heads, "hidden_dim": args.ffn_hidden_dim}
    return found | {"rope_theta": args.rope_theta, "rope_scaling": args.rope_scaling and asdict(args.rope_scaling)}


def to_config(args: Llama3Args) -> dict[str, Any]:
    """What config.json says of the architecture, with the keys of the published Llama releases."""
    values = arguments(args)
    scaling = args.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        **_FIXED,
        **{theirs: values[ours] for ours, theirs in _CONFIG_KEYS.items()},
        "head_dim": args.head_dim,
        "rope_theta": args.rope_theta,
        "rope_scaling": scaling
        and {"rope_type": "llama3"} | {theirs: getattr(scaling, ours) for ours, theirs in _ROPE_KEYS.items()},
    }


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `[model.args]` that a config.json asks for; ConfigError for what this model cannot be."""
    required = [key for key in _CONFIG_KEYS.values() if key not in _DEFAULTS and key != "num_key_value_heads"]
    problems = [f"config.json: {key} is missing" for key in required if key not in config]
    problems += [
        f"config.json: {key} = {config[key]!r}, and llama3 knows only {value!r}"
        for key, value in _FIXED.items()
        if config.get(key, value) != value
    ]
    if problems:
        raise ConfigError(problems)
    size, heads = config["hidden_size"], config["num_attention_heads"]
    if (head_dim := config.get("head_dim") or size // heads) != size // heads:
        raise ConfigError(
            f"config.json: head_dim = {head_dim}, and llama3 knows only hidden_size {size} / num_attention_heads "
            f"{heads} = {size // heads}"
        )
    values = {**_DEFAULTS, **config, "num_key_value_heads": config.get("num_key_value_heads") or heads}
    return {ours: values[theirs] for ours, theirs in _CONFIG_KEYS.items()} | _rope(config)


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """theta and scaling; transformers 5 writes both into rope_parameters."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or config.get("rope_theta") or _DEFAULT_ROPE_THETA
    match scaling.get("rope_type") or scaling.get("type") or "default":
        case "default":
            return {"rope_theta": float(theta), "rope_scaling": None}
        case "llama3":
            if absent := [key for key in _ROPE_KEYS.values() if key not in scaling]:
                raise ConfigError(f"config.json: the rope scaling has no {', '.join(absent)}")
            values = {ours: scaling[theirs] for ours, theirs in _ROPE_KEYS.items()}
            return {"rope_theta": float(theta), "rope_scaling": values}
        case other:
            raise ConfigError(f'config.json: rope type "{other}", and llama3 knows only "default" and "llama3"')
