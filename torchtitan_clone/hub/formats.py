"""The formats of decoders on the Hugging Face hub: the keys of config.json, and which tensors of a folder hold ours.

Rotary layouts of most families are equal to ours, so that no weights are permuted.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from pkgutil import resolve_name
from typing import Any

from torch import Tensor

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import shown
from torchtitan_clone.documents import DocumentError, Value, shorten
from torchtitan_clone.hub.keys import (
    ONLY_VALUES,
    ORIGINAL_LENGTH,
    ROPE_KEYS,
    WITHOUT_EFFECT,
    Arguments,
    entry_of,
    read_arguments,
    read_kinds,
    read_scaling,
    scaling_to_config,
)
from torchtitan_clone.hub.mapping import DECODER_RULES, Rules, slices_of
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.moe import MoEArgs
from torchtitan_clone.models.spec import ModelSpec
from torchtitan_clone.models.windowed import LayerType
from torchtitan_clone.ops.tensor_slices import TensorSlice

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
_DEFAULT_ROPE_THETA = 10000.0
_NULLABLE = {"head_dim", "mlp_only_layers", "rope_scaling"}
"""Keys with a default that may be null."""
_NEEDED = {"is_causal", "sliding_window"}
"""Keys without a default, of which null is not the same as none."""
_ALWAYS_CHECKED = {"head_dim", "layer_types", "quantization_config"}
"""Keys of all families besides those of keys.py; without an entry of their own they may state what is the case."""
_FULL = "full_attention"
_ROTARY_SHARE = "partial_rotary_factor"
_HUB_TYPES = {"full": _FULL, "window": "sliding_attention"}
_UNWRITTEN = ("bias_update_rate", "batch_balance", "sequence_balance", "router_z", "top_groups", "group_score")
"""Arguments of training, and of groups, which follow num_groups."""


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
    only: Mapping[str, object] = field(default_factory=dict)
    """Keys of config.json that change nothing with this value, are refused with another, and are not exported."""
    others: frozenset[str] = frozenset()
    """Further keys of config.json that read() reads."""
    nulls: Mapping[str, object] = field(default_factory=dict)
    """What null stands for in these keys; in others it stands for the default."""
    without_effect: frozenset[str] = frozenset()
    """Keys of config.json that change nothing in this family, besides those of keys.py."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json by other names of theirs, which transformers reads too."""
    quantization: str = "fp8"
    """Value of quant_method whose weights can be read."""
    is_partly_rotary: bool = False
    """Whether config.json says which share of a head's features is rotated; `defaults` has it too."""
    rules: Rules = field(default_factory=lambda: DECODER_RULES)

    def rules_of(self, args: Any) -> Rules:
        """Returns the rules of a model; a family whose rules depend on sizes overrides it."""
        return self.rules

    def slices(
        self, tensors: Mapping[str, Sequence[int]], *, args: Any, prefix: str = ""
    ) -> dict[str, list[TensorSlice]]:
        """Returns the tensors of the hub that hold our parameters and buffers of these names and shapes."""
        rules = self.rules_of(args)
        return {name: slices_of(rules, name, shape=shape, prefix=prefix) for name, shape in tensors.items()}

    def map_state(self, state: Mapping[str, Tensor], *, args: Any, prefix: str = "") -> dict[str, list[TensorSlice]]:
        """Does the same as slices() for tensors; ConfigError if the format lacks the model."""
        if errors := self.find_format_errors(args):
            raise ConfigError(errors)
        return self.slices({name: tensor.shape for name, tensor in state.items()}, args=args, prefix=prefix)

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

    def of_folder(self, names: Iterable[str]) -> "DecoderHub":
        """Returns the format with the rules of a folder that has tensors of these names."""
        return self

    def without_absent_layers(self, arguments: Arguments, *, names: Iterable[str]) -> tuple[Arguments, list[str]]:
        """Returns the arguments of from_config() less layers that a folder with these tensors lacks, and warnings."""
        return arguments, []

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
            **({"rotary_dim": args.rotary_dim} if self.is_partly_rotary else {}),
        }

    def to_config(self, args: Any) -> dict[str, object]:
        """Returns the architecture's entries of config.json, with the keys of the published releases."""
        values = self.arguments(args)
        scaling = args.rope_scaling and scaling_to_config(args.rope_scaling)
        share = {_ROTARY_SHARE: args.rotary_dim / args.head_dim} if self.is_partly_rotary else {}
        return {
            "architectures": [self.architecture],
            **self.fixed,
            **{theirs: values[ours] for ours, theirs in self.keys.items()},
            "head_dim": args.head_dim,
            # transformers 4 reads the first two, transformers 5 the third; other engines one or the other.
            "rope_theta": args.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": args.rope_theta, **share},
            **share,
        }

    def from_config(self, config: Mapping[str, object]) -> Arguments:
        """Returns the values of `[model.args]` that a config.json asks for; ConfigError for an unsupported one.

        Every key is read, without effect, or refused by name. A null stands for the default, as in transformers.
        """
        nulls = {key for key, value in config.items() if value is None}
        given = {key: value for key, value in config.items() if key not in nulls}
        given |= {key: value for key, value in self.nulls.items() if key in nulls}
        try:
            for alias, key in self.aliases.items():
                if alias in given and given.setdefault(key, given[alias]) != given[alias]:
                    entry_of(given, alias).refuse(f"differs from {key}, another name of it; remove one of them")
            if problems := self._find_key_errors(given, nulls=nulls - {*given}):
                raise ConfigError(problems)
            return self.read(given)
        except DocumentError as error:
            raise ConfigError(str(error)) from None

    def keys_read(self) -> set[str]:
        """Returns the keys of config.json that read() reads, or that have a single supported value."""
        share = (_ROTARY_SHARE,) if self.is_partly_rotary else ()
        return {*self.keys.values(), *self.fixed, *self.others, *ROPE_KEYS, *share}

    def _find_key_errors(self, given: Mapping[str, object], *, nulls: Set[str]) -> list[str]:
        """Returns one sentence for each key that is unknown, or whose value the family does not support."""
        wanted = self.fixed["model_type"]
        if (model_type := given.get("model_type", wanted)) != wanted:
            rule = f"{self.family} supports only {wanted!r}"
            return [f"config.json: model_type = {shorten(repr(model_type))}, and {rule}"]
        read = self.keys_read()
        only = {key: value for key, value in ONLY_VALUES.items() if key not in read} | {**self.only, **self.fixed}
        needed = {key for key, value in {**self.defaults, **self.fixed}.items() if value}  # null is like false or none
        known = {*read, *only, *self.aliases, *self.without_effect, *WITHOUT_EFFECT, *_ALWAYS_CHECKED}
        errors = [
            f"config.json: {shorten(key)} = {shorten(repr(value))}: {self.family} has no such key; remove it if the "
            "model is the same without it"
            for key, value in given.items()
            if key not in known
        ]
        errors += [
            f"config.json: {key} = {shorten(repr(given[key]))}, and {self.family} supports only {value!r}"
            for key, value in only.items()
            if given.get(key, value) != value
        ]
        errors += [
            f"config.json: {key} = null: {self.family} needs a value here"
            for key in sorted(nulls & (needed | _NEEDED) & {*read, *only} - _NULLABLE)
        ]
        types = given.get("layer_types", [])
        if "layer_types" not in read and not (isinstance(types, list) and all(each == _FULL for each in types)):
            errors.append(f"config.json: layer_types: {self.family} has only {_FULL}")
        quantization = given.get("quantization_config")
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        if method is not None and method != self.quantization:
            rule = f"supports only {self.quantization!r}; save the weights in bfloat16 with transformers"
            errors.append(f"config.json: quantization_config = {shorten(repr(method))}: {self.family} {rule}")
        return errors

    def read(self, given: Mapping[str, object]) -> Arguments:
        """Does the same as from_config(), without nulls; a family with other entries extends it. DocumentError too."""
        given = self._with_head_dim(given)
        known = {*self.defaults, *given, "num_key_value_heads"}
        if absent := [key for key in self.keys.values() if key not in known]:
            raise ConfigError([f"config.json: {key} is missing" for key in absent])
        defaults = dict(self.defaults)
        if not given.get("rope_scaling", True):  # transformers takes an empty table as absent
            given = {key: value for key, value in given.items() if key != "rope_scaling"}
        if "rope_parameters" in given:  # they have both
            defaults.pop("rope_scaling", None)
        given = {"num_key_value_heads": {**defaults, **given}["num_attention_heads"], **defaults, **given}
        values = read_arguments(self.keys, given)
        if "head_dim" not in {*self.keys, *self.without_effect}:
            self._check_head_dim(given, size=values["dim"], heads=values["n_heads"])
        return values | self._rope(given, head_dim=values.get("head_dim", 0))

    def _with_head_dim(self, given: Mapping[str, object]) -> Mapping[str, object]:
        """Returns the entries with a size of heads; without one and without a default heads divide the model's."""
        keys = {"dim": "hidden_size", "n_heads": "num_attention_heads"}
        if "head_dim" not in {*self.keys} - {*self.defaults} - {*given} or not {*keys.values()} <= {*given}:
            return given
        sizes = read_arguments(keys, given)
        return {**given, "head_dim": sizes["dim"] // sizes["n_heads"]}

    def _check_head_dim(self, given: Mapping[str, object], *, size: int, heads: int) -> None:
        if "head_dim" in given and (entry := entry_of(given, "head_dim")).integer() not in (0, size // heads):
            supported = f"hidden_size {size} / num_attention_heads {heads} = {size // heads}"
            entry.refuse(f"{self.family} supports only {supported}")

    def _rope(self, given: Mapping[str, object], *, head_dim: int) -> Arguments:
        """Returns theta and scaling; transformers 5 writes both into rope_parameters, and prefers rope_scaling."""
        key = "rope_scaling" if given.get("rope_scaling") else "rope_parameters"
        entries = entry_of(given, key).entries() if given.get(key) else {}
        theta = entries.pop("rope_theta", entry_of({"rope_theta": _DEFAULT_ROPE_THETA} | dict(given), "rope_theta"))
        original = entry_of(given, ORIGINAL_LENGTH) if ORIGINAL_LENGTH in given else None
        rotary: Arguments = {}
        if self.is_partly_rotary:
            share = entries.pop(_ROTARY_SHARE, entry_of(given, _ROTARY_SHARE)).number(low=0.0)
            rotary["rotary_dim"] = int(head_dim * share)
        scaling = read_scaling(entries, family=self.family, original=original)
        return {"rope_theta": theta.number(low=1.0), "rope_scaling": scaling, **rotary}


@dataclass(frozen=True, kw_only=True)
class MoEHub(DecoderHub):
    """The hub's format of a family with experts."""

    moe: MoEArgs = field(default_factory=MoEArgs)
    """The values of the arguments in `moe` that config.json has no key for."""
    moe_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json by the names of the arguments in `moe`."""

    def find_format_errors(self, args: ModelArgs) -> list[str]:
        given: MoEArgs = vars(args)["moe"]
        unwritten = {*_UNWRITTEN} - ({"group_score"} if given.num_groups > 1 else set())
        return [
            f"model.args.moe.{name} = {shown(value)}: {self.family} has {shown(wanted)} in the Hugging Face format; "
            "set it to that, or neither import nor export weights in this format"
            for name, wanted in vars(self.moe).items()
            if name not in {*self.moe_keys, *unwritten} and (value := getattr(given, name)) != wanted
        ]

    def arguments(self, args: Any) -> Arguments:
        return {**super().arguments(args), "moe": {name: getattr(args.moe, name) for name in self.moe_keys}}

    def to_config(self, args: Any) -> dict[str, object]:
        values = self.arguments(args)["moe"]
        return {**super().to_config(args), **{theirs: values[ours] for ours, theirs in self.moe_keys.items()}}

    def keys_read(self) -> set[str]:
        return super().keys_read() | {*self.moe_keys.values()}

    def read(self, given: Mapping[str, object]) -> Arguments:
        complete = {**self.defaults, **given}
        if absent := [key for key in self.moe_keys.values() if key not in complete]:
            raise ConfigError([f"config.json: {key} is missing" for key in absent])
        return super().read(given) | {"moe": read_arguments(self.moe_keys, complete)}


@dataclass(frozen=True, kw_only=True)
class WindowedHub(DecoderHub):
    """The hub's format of a family with windows."""

    pattern: tuple[LayerType, ...]
    """Types of the layers where config.json has none."""
    window: int
    """Size of the windows where config.json has none."""

    def arguments(self, args: Any) -> Arguments:
        types = [args.layer_types[layer % len(args.layer_types)] for layer in range(args.n_layers)]
        return {**super().arguments(args), "layer_types": types, "window": args.window}

    def to_config(self, args: ModelArgs) -> dict[str, object]:
        values = self.arguments(args)
        types = [_HUB_TYPES[kind] for kind in values["layer_types"]]
        return {**super().to_config(args), "layer_types": types, "sliding_window": values["window"]}

    def keys_read(self) -> set[str]:
        return super().keys_read() | {"layer_types", "sliding_window"}

    def read(self, given: Mapping[str, object]) -> Arguments:
        values = super().read(given)
        count = values["n_layers"]
        default = [_HUB_TYPES[self.pattern[layer % len(self.pattern)]] for layer in range(count)]
        entry = Value(given.get("layer_types", default), where="config.json: layer_types")
        types = read_kinds(entry, _HUB_TYPES, count=count)
        window = read_arguments({"window": "sliding_window"}, {"sliding_window": self.window, **given})
        return {**values, "layer_types": types, **window}


LLAMA3 = DecoderHub(
    family="llama3",
    architecture="LlamaForCausalLM",
    fixed={"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False},
)


def format_of(spec: ModelSpec) -> DecoderHub:
    """Returns the format of a family, importing it if `ModelSpec.hugging_face` only names it."""
    hub = resolve_name(spec.hugging_face) if isinstance(spec.hugging_face, str) else spec.hugging_face
    assert isinstance(hub, DecoderHub)
    return hub
