"""Keys of config.json that are equal in all families, how values are read, and rotary scaling.

A key that is neither here nor read by the family is refused by name, see formats.py.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from torchtitan_clone.documents import DocumentError, Value, shorten
from torchtitan_clone.models.rope import RopeScaling

Arguments = dict[str, Any]
"""Arguments of `[model.args]`."""

_FILES = (
    "_name_or_path", "name_or_path", "_commit_hash", "architectures", "auto_map", "transformers_version", "dtype",
    "torch_dtype", "tokenizer_class", "unsloth_fixed", "unsloth_version",
)  # fmt: skip
_RUNTIME = (
    "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "chunk_size_feed_forward",
    "experts_implementation", "is_decoder", "output_attentions", "output_hidden_states", "pretraining_tp",
    "return_dict", "tf_legacy_loss", "torchscript", "use_bfloat16", "use_cache",
)  # fmt: skip
_TRAINING = (
    "aux_loss_alpha", "initializer_range", "output_router_logits", "router_aux_loss_coef", "seq_aux",
    "tie_encoder_decoder",
)  # fmt: skip
_TASKS = (
    "finetuning_task", "id2label", "label2id", "num_labels", "prefix", "problem_type", "task_specific_params",
)  # fmt: skip
_TOKENS = (
    "bos_token_id", "cls_token_id", "decoder_start_token_id", "eos_token_id", "mask_token_id", "pad_token_id",
    "sep_token_id", "unk_token_id",
)  # fmt: skip
_GENERATION = (
    "bad_words_ids", "begin_suppress_tokens", "cache_implementation", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "max_sequence_length", "min_length",
    "min_new_tokens", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_scores", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens",
    "temperature", "top_k", "top_p", "typical_p",
)  # fmt: skip
WITHOUT_EFFECT = frozenset((*_FILES, *_RUNTIME, *_TRAINING, *_TASKS, *_TOKENS, *_GENERATION))
"""Keys of all families that change no logit in transformers, whatever their value."""
ONLY_VALUES: Mapping[str, object] = {
    "add_cross_attention": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "is_causal": True,
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
}
"""Keys of all families that change nothing with this value, and are refused with another."""
ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"})
"""Keys of rotary positions, which all families read."""
_FLAGS = ("tied_embeddings", "truncate", "qk_norm", "normalize_scores", "attention_bias", "negative_eigenvalues")
_NUMBERS = (
    "norm_eps", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "attention_factor", "query_scale", "score_scale", "swiglu_limit", "embedding_multiplier", "attention_multiplier",
    "residual_multiplier", "logits_scaling",
)  # fmt: skip
_LENGTHS = ("max_seq_len", "original_max_seq_len", "window", "chunk", "query_scale_floor")
_MOST = {"n_layers": 10_000, **dict.fromkeys(_LENGTHS, 2**31)}
_LONGEST = 2**24
"""Largest size of a dimension: the elements of a matrix can be counted, and building a model takes seconds."""
ORIGINAL_LENGTH = "original_max_position_embeddings"
"""Of a rotary scaling, or of config.json itself: transformers prefers the latter."""
_SCALED = {"factor": "factor", "original_max_seq_len": ORIGINAL_LENGTH}
_SCALING_KEYS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {**_SCALED, "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"},
    "yarn": _SCALED,
}
"""Keys of each type of rotary scaling by the names of our arguments, all of them required."""
_YARN_KEYS = ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor")
"""Keys that YaRN may have, with names and defaults of ours."""
_TYPE_KEYS = {"rope_type", "type", "finetuned"}
"""Keys of all types; the last is without effect."""


def entry_of(config: Mapping[str, object], key: str) -> Value:
    """Returns a value of config.json that knows its key."""
    return Value(config[key], where=f"config.json: {key}")


def read_arguments(keys: Mapping[str, str], given: Mapping[str, object]) -> Arguments:
    """Returns the values of our arguments from their keys in config.json. DocumentError."""
    return {ours: read_argument(ours, entry_of(given, theirs)) for ours, theirs in keys.items()}


def read_argument(name: str, entry: Value) -> int | float | bool:
    """Returns the value of one of our arguments from its entry in config.json. DocumentError."""
    if name in _FLAGS:
        return entry.flag()
    if name in _NUMBERS:
        return entry.number(low=0.0)
    return entry.integer(low=1, high=_MOST.get(name, _LONGEST))


def read_kinds(entry: Value, names: Mapping[str, str], *, count: int) -> list[str]:
    """Returns the kinds of `count` layers from their names in config.json, which `names` has by kind. DocumentError."""
    kinds = {name: kind for kind, name in names.items()}
    return [kinds[each.choice(*kinds)] for each in entry.items(count=count)]


def read_scaling(entries: Mapping[str, Value], *, family: str, original: Value | None) -> Arguments | None:
    """Returns the arguments of a rotary scaling without its theta, None for none. DocumentError.

    Every key is read, without effect, or refused by name. `original` is the original length of config.json itself.
    """
    given = {name: entry for name, entry in entries.items() if entry.value is not None or name == "truncate"}
    kind = _read_type(given, family=family)
    if original is not None and ORIGINAL_LENGTH in _SCALING_KEYS[kind].values():
        given[ORIGINAL_LENGTH] = original
    if absent := [name for name in _SCALING_KEYS[kind].values() if name not in given]:
        raise DocumentError(f"config.json: the rope scaling has no {', '.join(absent)}")
    keys = {**_SCALING_KEYS[kind], **{name: name for name in _YARN_KEYS if name in given and kind == "yarn"}}
    for name, entry in given.items():
        if name == "partial_rotary_factor" and entry.value != 1.0:
            entry.refuse(f"{family} rotates all features of a head")
        if name not in {*keys.values(), *_TYPE_KEYS, "partial_rotary_factor"}:
            entry.refuse(f"a rope scaling of type {kind} has no such key in {family}; remove it if it has no effect")
    values: Arguments = {ours: read_argument(ours, given[theirs]) for ours, theirs in keys.items()}
    return None if kind == "default" else _checked(values, given=given, kind=kind)


def _read_type(given: Mapping[str, Value], *, family: str) -> str:
    """Returns the type; `type` is its older name."""
    entry = given.get("rope_type", given.get("type"))
    if entry is None:
        return "default"
    if "type" in given and given["type"].value != entry.value:
        entry.refuse(f"differs from type, an older name of it, which is {shorten(repr(given['type'].value))}")
    if entry.text() not in _SCALING_KEYS:
        entry.refuse(f'{family} supports only "default", "linear", "llama3" and "yarn"')
    return entry.text()


def _checked(values: Arguments, *, given: Mapping[str, Value], kind: str) -> Arguments:
    """Returns the arguments without those that are computed or that transformers takes as absent."""
    if values.get("attention_factor") == 0.0:  # which transformers multiplies by, and means "computed" here
        given["attention_factor"].refuse("must be above 0; remove it, so that it is computed from the factor")
    if bool(values.get("mscale")) != bool(values.get("mscale_all_dim")):
        raise DocumentError("config.json: the rope scaling has one of mscale and mscale_all_dim; give both or none")
    if not values.get("mscale"):  # transformers takes zeros as absent
        values = {name: value for name, value in values.items() if not name.startswith("mscale")}
    scaling = replace(RopeScaling(**values), rope_type=kind)
    if kind == "yarn" and scaling.original_max_seq_len < 2 * math.pi * scaling.beta_slow:
        rule = "no pair of features rotates beta_slow times in it, which transformers does not stretch"
        given[ORIGINAL_LENGTH].refuse(f"{rule}; set a length of pretraining")
    is_default = math.isclose(scaling.magnitude(), replace(scaling, attention_factor=0.0).magnitude(), rel_tol=1e-9)
    return asdict(replace(scaling, attention_factor=0.0) if is_default else scaling)


def scaling_to_config(scaling: RopeScaling) -> dict[str, object]:
    """Returns a rotary scaling as in config.json."""
    values = asdict(scaling)
    entries = {theirs: values[ours] for ours, theirs in _SCALING_KEYS[scaling.rope_type].items()}
    if scaling.rope_type == "yarn":
        entries |= {name: values[name] for name in ("beta_fast", "beta_slow", "truncate")}
        if scaling.mscale and scaling.mscale_all_dim:
            entries |= {name: values[name] for name in ("mscale", "mscale_all_dim")}
        elif scaling.magnitude() != scaling.growth(1.0):  # transformers reads both of mscale or none
            values["attention_factor"] = scaling.magnitude()
        if values["attention_factor"]:
            entries["attention_factor"] = values["attention_factor"]
    return {"rope_type": scaling.rope_type, **entries}
