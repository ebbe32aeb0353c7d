"""The format of decoders with a mixture of experts on the Hugging Face hub, where every expert has its own tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan_clone.config import ConfigError
from torchtitan_clone.documents import DocumentError, Value
from torchtitan_clone.models.hf import Arguments, DecoderHub
from torchtitan_clone.models.hf_mapping import Rules, same, stacked

EXPERT_RULES: Rules = {
    "layers.*.feed_forward.router.weight": same("model.layers.*.mlp.gate.weight"),
    "layers.*.feed_forward.router.expert_bias": same("model.layers.*.mlp.gate.e_score_correction_bias"),
    "layers.*.feed_forward.router.expert_load": lambda _shape: [],  # not on the hub
    "layers.*.feed_forward.experts.w1": stacked(same, "model.layers.*.mlp.experts.{index}.gate_proj.weight"),
    "layers.*.feed_forward.experts.w2": stacked(same, "model.layers.*.mlp.experts.{index}.down_proj.weight"),
    "layers.*.feed_forward.experts.w3": stacked(same, "model.layers.*.mlp.experts.{index}.up_proj.weight"),
}
"""Rules of a router and of experts that are stored one by one."""


@dataclass(frozen=True, kw_only=True)
class MoEHub(DecoderHub):
    """The hub's format of a family with experts."""

    moe_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json by the names of the arguments in `moe`."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys: transformers writes one of them, the published releases have the other."""

    def arguments(self, args: Any) -> Arguments:
        return {**super().arguments(args), "moe": {name: getattr(args.moe, name) for name in self.moe_keys}}

    def to_config(self, args: Any) -> dict[str, object]:
        values = self.arguments(args)["moe"]
        config = {**super().to_config(args), **{theirs: values[ours] for ours, theirs in self.moe_keys.items()}}
        return config | {alias: config[key] for key, alias in self.aliases.items()}

    def from_config(self, config: Mapping[str, object]) -> Arguments:
        aliased = {key: config[alias] for key, alias in self.aliases.items() if alias in config}
        given = {key: value for key, value in {**aliased, **config}.items() if value is not None}
        if absent := [key for key in self.moe_keys.values() if key not in given]:
            raise ConfigError([f"config.json: {key} is missing" for key in absent])
        try:
            moe = {
                ours: _read(ours, Value(given[key], where=f"config.json: {key}")) for ours, key in self.moe_keys.items()
            }
        except DocumentError as error:
            raise ConfigError(str(error)) from None
        return super().from_config(given) | {"moe": moe}


def _read(name: str, entry: Value) -> object:
    if name in ("score_scale", "swiglu_limit"):
        return entry.number(low=0.0)
    return entry.flag() if name == "normalize_scores" else entry.integer(low=1, high=2**24)
