"""How a decoder is written in the files of the Hugging Face hub: its tensors, and config.json in both directions.

What differs between families is data; see llama3/hf.py. Values are the same on both sides: rotary positions rotate the
pairs (i, i + H/2) here too, so that nothing is permuted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torchtitan_clone.config import ConfigError
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.hf_mapping import DECODER_RULES, TensorMapping
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
_ROPE_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}
_DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class DecoderHub:
    """The hub's format of one family; a HuggingFace of models/spec.py.

    Attributes:
        family: our name of the family, for messages.
        architecture: transformers' class.
        fixed: keys of config.json with the one value that the family supports.
        defaults: what a config.json means where it leaves out a key; other keys are required.
        keys: keys of config.json by the names of our arguments.
        mapping: the tensors of the hub that hold ours.
    """

    family: str
    architecture: str
    fixed: Mapping[str, object]
    defaults: Mapping[str, object]
    keys: Mapping[str, str] = field(default_factory=lambda: CONFIG_KEYS)
    mapping: TensorMapping = field(default_factory=lambda: TensorMapping(DECODER_RULES))

    def pieces(self, name: str, *, shape: Sequence[int]) -> list[Piece]:
        """Returns the tensors of the hub that hold our parameter or buffer of that name and shape."""
        return self.mapping.pieces(name, shape=shape)

    def is_leftover(self, name: str, *, tied: bool) -> bool:
        """Returns whether a tensor is redundant: frequencies in old releases, a tied output written twice."""
        return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")

    def arguments(self, args: Any) -> dict[str, Any]:
        """Returns the arguments as `from_config(to_config(args))` gives them: computed ones are resolved."""
        found = {name: getattr(args, name) for name in self.keys}
        found |= {"n_kv_heads": args.kv_heads, "hidden_dim": args.ffn_hidden_dim}
        return found | {"rope_theta": args.rope_theta, "rope_scaling": args.rope_scaling and asdict(args.rope_scaling)}

    def to_config(self, args: ModelArgs) -> dict[str, object]:
        """Returns what config.json says of the architecture, with the keys of the published releases."""
        values = self.arguments(args)
        scaling = args.rope_scaling
        return {
            "architectures": [self.architecture],
            **self.fixed,
            **{theirs: values[ours] for ours, theirs in self.keys.items()},
            "head_dim": args.head_dim,
            "rope_theta": args.rope_theta,
            "rope_scaling": scaling
            and {"rope_type": "llama3"} | {theirs: getattr(scaling, ours) for ours, theirs in _ROPE_KEYS.items()},
        }

    def from_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of `[model.args]` that a config.json asks for; ConfigError for an unsupported one."""
        required = [key for key in self.keys.values() if key not in self.defaults and key != "num_key_value_heads"]
        problems = [f"config.json: {key} is missing" for key in required if key not in config]
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
        size, heads = values["hidden_size"], values["num_attention_heads"]
        if (head_dim := values.get("head_dim") or size // heads) != size // heads:
            raise ConfigError(
                f"config.json: head_dim = {head_dim}, and {self.family} supports only hidden_size {size} / "
                f"num_attention_heads {heads} = {size // heads}"
            )

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
                raise ConfigError(
                    f'config.json: rope type "{other}", and {self.family} supports only "default" and "llama3"'
                )
