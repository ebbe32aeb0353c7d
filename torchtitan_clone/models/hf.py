"""The format of a decoder on the Hugging Face hub; rotary layouts are equal, so that no weights are permuted."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torchtitan_clone.config import ConfigError
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.hf_mapping import DECODER_RULES, Rules, pieces_of
from torchtitan_clone.ops.tensor_pieces import Piece

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
_ROPE_KEYS = {key: key for key in ("factor", "low_freq_factor", "high_freq_factor")}
_ROPE_KEYS["original_max_seq_len"] = "original_max_position_embeddings"
_DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class DecoderHub:
    """The hub's format of one family."""

    family: str
    architecture: str
    """Class name in transformers."""
    fixed: Mapping[str, object]
    """Keys of config.json with the only value that the family supports."""
    defaults: Mapping[str, object]
    """Values of keys that a config.json may leave out; all others are required."""
    keys: Mapping[str, str] = field(default_factory=lambda: CONFIG_KEYS)
    rules: Rules = field(default_factory=lambda: DECODER_RULES)

    def pieces(self, name: str, *, shape: Sequence[int]) -> list[Piece]:
        """Returns the tensors of the hub that hold our parameter or buffer of that name and shape."""
        return pieces_of(self.rules, name, shape=shape)

    def is_leftover(self, name: str, *, tied: bool) -> bool:
        """Returns whether a tensor is redundant: rotary frequencies of old releases, or a tied output weight."""
        return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")

    def arguments(self, args: Any) -> dict[str, Any]:
        """Returns the values that `from_config(to_config(args))` gives; computed ones are resolved."""
        return {
            **{name: getattr(args, name) for name in self.keys},
            "n_kv_heads": args.kv_heads,
            "hidden_dim": args.ffn_hidden_dim,
            "rope_theta": args.rope_theta,
            "rope_scaling": args.rope_scaling and asdict(args.rope_scaling),
        }

    def to_config(self, args: ModelArgs) -> dict[str, object]:
        """Returns the architecture's entries of config.json, with the keys of the published releases."""
        values = self.arguments(args)
        scaling = values["rope_scaling"]
        if scaling:
            scaling = {"rope_type": "llama3", **{theirs: scaling[ours] for ours, theirs in _ROPE_KEYS.items()}}
        return {
            "architectures": [self.architecture],
            **self.fixed,
            **{theirs: values[ours] for ours, theirs in self.keys.items()},
            "head_dim": args.head_dim,
            "rope_theta": args.rope_theta,
            "rope_scaling": scaling,
        }

    def from_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of `[model.args]` that a config.json asks for; ConfigError for an unsupported one."""
        known = {*self.defaults, *config, "num_key_value_heads"}
        problems = [f"config.json: {key} is missing" for key in self.keys.values() if key not in known]
        problems += [
            f"config.json: {key} = {config[key]!r}, and {self.family} supports only {value!r}"
            for key, value in self.fixed.items()
            if config.get(key, value) != value
        ]
        if problems:
            raise ConfigError(problems)
        heads = config["num_attention_heads"]
        values = {**self.defaults, **config, "num_key_value_heads": config.get("num_key_value_heads") or heads}
        if "head_dim" not in self.keys:
            self._check_head_dim(values)
        return {ours: values[theirs] for ours, theirs in self.keys.items()} | self._rope(config)

    def _check_head_dim(self, values: Mapping[str, Any]) -> None:
        size = values["hidden_size"]
        heads = values["num_attention_heads"]
        if (head_dim := values.get("head_dim") or size // heads) != size // heads:
            supported = f"hidden_size {size} / num_attention_heads {heads} = {size // heads}"
            raise ConfigError(f"config.json: head_dim = {head_dim}, and {self.family} supports only {supported}")

    def _rope(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns theta and scaling; transformers 5 writes both into rope_parameters."""
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
                rule = f'{self.family} supports only "default" and "llama3"'
                raise ConfigError(f'config.json: rope type "{other}", and {rule}')
