"""The format of a decoder on the Hugging Face hub; rotary layouts are equal, so that no weights are permuted."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torchtitan_clone.config import ConfigError
from torchtitan_clone.documents import DocumentError, Value, shorten
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.hf_mapping import DECODER_RULES, Rules, pieces_of
from torchtitan_clone.models.rope import RopeScaling
from torchtitan_clone.ops.tensor_pieces import Piece

Arguments = dict[str, Any]
"""Arguments of `[model.args]`."""
CONFIG_KEYS: Mapping[str, str] = {
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
"""Keys of config.json by the names of our arguments."""
_ROPE_KEYS = {"factor": "factor", "original_max_seq_len": "original_max_position_embeddings"}
_SCALING_KEYS: Mapping[str, Mapping[str, str]] = {
    "llama3": {**_ROPE_KEYS, "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"},
    "yarn": _ROPE_KEYS,
}
"""Keys of each type of rotary scaling by the names of our arguments, all of them required."""
_YARN_KEYS = ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor")
"""Keys that YaRN may have, with names and defaults of ours."""
_DEFAULT_ROPE_THETA = 10000.0
_FLAGS = ("tied_embeddings", "truncate", "qk_norm", "normalize_scores")
_NUMBERS = (
    "norm_eps", "factor", "low_freq_factor", "high_freq_factor", *_YARN_KEYS, "query_scale", "score_scale",
    "swiglu_limit",
)  # fmt: skip
_TOKENS = ("max_seq_len", "original_max_seq_len", "window", "chunk", "query_scale_floor")
_MOST = {"n_layers": 10_000, **dict.fromkeys(_TOKENS, 2**31)}
_LONGEST = 2**24
"""Largest size of a dimension: the elements of a matrix can be counted, and building a model takes seconds."""


@dataclass(frozen=True, kw_only=True)
class DecoderHub:
    """The hub's format of one family."""

    family: str
    architecture: str
    """Class name in transformers."""
    fixed: Mapping[str, object]
    """Keys of config.json with the only value that the family supports."""
    defaults: Mapping[str, object]
    """Arguments of keys that a config.json may leave out; all others are required."""
    keys: Mapping[str, str] = field(default_factory=lambda: CONFIG_KEYS)
    rules: Rules = field(default_factory=lambda: DECODER_RULES)

    def rules_of(self, args: Any) -> Rules:
        """Returns the rules of a model; a family whose rules depend on sizes overrides it."""
        return self.rules

    def pieces(self, tensors: Mapping[str, Sequence[int]], *, args: Any, prefix: str = "") -> dict[str, list[Piece]]:
        """Returns the tensors of the hub that hold our parameters and buffers of these names and shapes."""
        rules = self.rules_of(args)
        return {name: pieces_of(rules, name, shape=shape, prefix=prefix) for name, shape in tensors.items()}

    def is_format_of(self, config: Mapping[str, object]) -> bool:
        """Returns whether a config.json is of this family, by its type of model; see from_config() for the rest."""
        return config.get("model_type") == self.fixed["model_type"]

    def prefix(self, config: Mapping[str, object]) -> str:
        """Returns what the names of all tensors start with in a folder with that config.json."""
        return ""

    def is_leftover(self, name: str, *, args: ModelArgs) -> bool:
        """Returns whether a tensor is redundant: rotary frequencies of old releases, or a tied output weight."""
        return name.endswith("rotary_emb.inv_freq") or (args.tied_embeddings and name == "lm_head.weight")

    def describe_leftovers(self, names: Iterable[str], *, args: ModelArgs) -> list[str]:
        """Returns what to tell the user of tensors that are not redundant and that an import leaves out."""
        return []

    def find_format_errors(self, args: ModelArgs) -> list[str]:
        """Returns one sentence for each argument whose value a model of this format cannot have."""
        return []

    def arguments(self, args: Any) -> Arguments:
        """Returns the values that `from_config(to_config(args))` gives; computed ones are resolved."""
        return {
            **{name: getattr(args, name) for name in self.keys},
            "n_kv_heads": args.kv_heads,
            **({"hidden_dim": args.ffn_hidden_dim} if "hidden_dim" in self.keys and args.hidden_dim is None else {}),
            "rope_theta": args.rope_theta,
            "rope_scaling": args.rope_scaling and asdict(args.rope_scaling),
        }

    def to_config(self, args: Any) -> dict[str, object]:
        """Returns the architecture's entries of config.json, with the keys of the published releases."""
        values = self.arguments(args)
        return {
            "architectures": [self.architecture],
            **self.fixed,
            **{theirs: values[ours] for ours, theirs in self.keys.items()},
            "head_dim": args.head_dim,
            "rope_theta": args.rope_theta,
            "rope_scaling": args.rope_scaling and scaling_to_config(args.rope_scaling),
        }

    def from_config(self, config: Mapping[str, object]) -> Arguments:
        """Returns the values of `[model.args]` that a config.json asks for; ConfigError for an unsupported one.

        A null stands for the default, as in transformers.
        """
        try:
            return self.read({key: value for key, value in config.items() if value is not None})
        except DocumentError as error:
            raise ConfigError(str(error)) from None

    def read(self, given: Mapping[str, object]) -> Arguments:
        """Does the same as from_config(), without nulls; a family with other entries extends it. DocumentError too."""
        known = {*self.defaults, *given, "num_key_value_heads"}
        problems = [f"config.json: {key} is missing" for key in self.keys.values() if key not in known]
        problems += [
            f"config.json: {key} = {shorten(repr(given[key]))}, and {self.family} supports only {value!r}"
            for key, value in self.fixed.items()
            if given.get(key, value) != value
        ]
        if problems:
            raise ConfigError(problems)
        defaults = dict(self.defaults)
        if given.get("rope_parameters"):  # they have both
            defaults.pop("rope_scaling", None)
        given = {**defaults, "num_key_value_heads": given["num_attention_heads"], **given}
        values = read_arguments(self.keys, given)
        if "head_dim" not in self.keys:
            self._check_head_dim(given, size=values["dim"], heads=values["n_heads"])
        return values | self._rope(given)

    def _check_head_dim(self, given: Mapping[str, object], *, size: int, heads: int) -> None:
        if "head_dim" in given and (entry := _entry(given, "head_dim")).integer() not in (0, size // heads):
            supported = f"hidden_size {size} / num_attention_heads {heads} = {size // heads}"
            entry.refuse(f"{self.family} supports only {supported}")

    def _rope(self, given: Mapping[str, object]) -> Arguments:
        """Returns theta and scaling; transformers 5 writes both into rope_parameters, and prefers rope_scaling."""
        key = "rope_scaling" if given.get("rope_scaling") else "rope_parameters"
        entries = _entry(given, key).entries() if given.get(key) else {}
        scaling = {name: entry for name, entry in entries.items() if entry.value is not None}
        theta = scaling.get("rope_theta", _entry({"rope_theta": _DEFAULT_ROPE_THETA} | dict(given), "rope_theta"))
        return {"rope_theta": theta.number(low=1.0), "rope_scaling": self.read_scaling(scaling)}

    def read_scaling(self, scaling: Mapping[str, Value]) -> Arguments | None:
        """Returns the arguments of a rotary scaling in config.json, None for none. DocumentError."""
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind is None or kind.text() == "default":
            return None
        keys = _SCALING_KEYS.get(kind.text())
        if keys is None:
            kind.refuse(f'{self.family} supports only "default", "llama3" and "yarn"')
        if absent := [name for name in keys.values() if name not in scaling]:
            raise DocumentError(f"config.json: the rope scaling has no {', '.join(absent)}")
        if kind.value == "yarn":
            keys = {**keys, **{name: name for name in _YARN_KEYS if name in scaling}}
        values: Arguments = {ours: _read_argument(ours, scaling[theirs]) for ours, theirs in keys.items()}
        if bool(values.get("mscale")) != bool(values.get("mscale_all_dim")):
            raise DocumentError("config.json: the rope scaling has one of mscale and mscale_all_dim; give both or none")
        if not values.get("mscale"):  # transformers takes zeros as absent
            values = {name: value for name, value in values.items() if not name.startswith("mscale")}
        found = RopeScaling(rope_type="yarn" if kind.value == "yarn" else "llama3", **values)
        is_default = math.isclose(found.magnitude(), replace(found, attention_factor=0.0).magnitude(), rel_tol=1e-9)
        return asdict(replace(found, attention_factor=0.0) if is_default else found)


def scaling_to_config(scaling: RopeScaling) -> dict[str, object]:
    """Returns a rotary scaling as in config.json."""
    values = asdict(scaling)
    found = {theirs: values[ours] for ours, theirs in _SCALING_KEYS[scaling.rope_type].items()}
    if scaling.rope_type == "yarn":
        found |= {name: values[name] for name in ("beta_fast", "beta_slow", "truncate")}
        if scaling.mscale and scaling.mscale_all_dim:
            found |= {name: values[name] for name in ("mscale", "mscale_all_dim")}
        elif scaling.magnitude() != scaling.growth(1.0):  # transformers reads both of mscale or none
            values["attention_factor"] = scaling.magnitude()
        if values["attention_factor"]:
            found["attention_factor"] = values["attention_factor"]
    return {"rope_type": scaling.rope_type, **found}


def _entry(config: Mapping[str, object], key: str) -> Value:
    return Value(config[key], where=f"config.json: {key}")


def read_arguments(keys: Mapping[str, str], given: Mapping[str, object]) -> Arguments:
    """Returns the values of our arguments from their keys in config.json. DocumentError."""
    return {ours: _read_argument(ours, _entry(given, theirs)) for ours, theirs in keys.items()}


def _read_argument(name: str, entry: Value) -> int | float | bool:
    """Returns the value of one of our arguments from its entry in config.json. DocumentError."""
    if name in _FLAGS:
        return entry.flag()
    if name in _NUMBERS:
        return entry.number(low=0.0)
    return entry.integer(low=1, high=_MOST.get(name, _LONGEST))
