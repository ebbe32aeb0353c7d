"""Keys of config.json that are equal in all families, and how values are read.

A key that is neither here nor read by the family is refused by name, see models/hf.py.
"""

from collections.abc import Mapping
from typing import Any

from torchtitan_clone.documents import Value

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
_FLAGS = ("tied_embeddings", "truncate", "qk_norm", "normalize_scores")
_NUMBERS = (
    "norm_eps", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "attention_factor", "query_scale", "score_scale", "swiglu_limit",
)  # fmt: skip
_LENGTHS = ("max_seq_len", "original_max_seq_len", "window", "chunk", "query_scale_floor")
_MOST = {"n_layers": 10_000, **dict.fromkeys(_LENGTHS, 2**31)}
_LONGEST = 2**24
"""Largest size of a dimension: the elements of a matrix can be counted, and building a model takes seconds."""


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
