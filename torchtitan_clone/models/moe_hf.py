"""The formats of decoders with a mixture of experts on the Hugging Face hub: experts one by one, or stacked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.overlay import shown
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.hf import DecoderHub
from torchtitan_clone.models.hf_mapping import Rules, fused, same, stacked, transposed
from torchtitan_clone.models.hub_keys import Arguments, read_arguments
from torchtitan_clone.models.moe import MoEArgs

_ROUTER, _EXPERTS = "layers.*.feed_forward.router", "layers.*.feed_forward.experts"
EXPERT_RULES: Rules = {
    f"{_ROUTER}.weight": same("model.layers.*.mlp.gate.weight"),
    f"{_ROUTER}.expert_bias": same("model.layers.*.mlp.gate.e_score_correction_bias"),
    f"{_ROUTER}.expert_load": lambda _shape: [],  # not on the hub
    f"{_EXPERTS}.w1": stacked(same, "model.layers.*.mlp.experts.{index}.gate_proj.weight"),
    f"{_EXPERTS}.w2": stacked(same, "model.layers.*.mlp.experts.{index}.down_proj.weight"),
    f"{_EXPERTS}.w3": stacked(same, "model.layers.*.mlp.experts.{index}.up_proj.weight"),
}
"""Rules of a router and of experts that are stored one by one."""
_UNWRITTEN = ("bias_update_rate", "batch_balance", "sequence_balance", "router_z", "top_groups", "group_score")
"""Arguments of training, and of groups, which follow num_groups."""


def stacked_expert_rules(mlp: str, *, interleaved: bool) -> Rules:
    """Returns rules of a router and of experts in two tensors: gates are one half of the first, or interleaved."""
    gate_up = transposed(f"{mlp}.experts.gate_up_proj")
    return {
        f"{_ROUTER}.weight": same(f"{mlp}.router.weight"),
        f"{_ROUTER}.expert_load": EXPERT_RULES[f"{_ROUTER}.expert_load"],
        f"{_EXPERTS}.w1": fused(gate_up, dim=2, index=0, interleaved=interleaved),
        f"{_EXPERTS}.w2": transposed(f"{mlp}.experts.down_proj"),
        f"{_EXPERTS}.w3": fused(gate_up, dim=2, index=1, interleaved=interleaved),
    }


@dataclass(frozen=True, kw_only=True)
class MoEHub(DecoderHub):
    """The hub's format of a family with experts."""

    moe: MoEArgs = field(default_factory=MoEArgs)
    """The values of the arguments in `moe` that config.json has no key for."""
    moe_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json by the names of the arguments in `moe`."""

    def find_format_errors(self, args: ModelArgs) -> list[str]:
        given: MoEArgs = vars(args)["moe"]
        return [
            f"model.args.moe.{name} = {shown(value)}: {self.family} has {shown(wanted)} in the Hugging Face format; "
            "set it to that, or neither import nor export weights in this format"
            for name, wanted in vars(self.moe).items()
            if name not in {*self.moe_keys, *_UNWRITTEN} and (value := getattr(given, name)) != wanted
        ]

    def arguments(self, args: Any) -> Arguments:
        return {**super().arguments(args), "moe": {name: getattr(args.moe, name) for name in self.moe_keys}}

    def to_config(self, args: Any) -> dict[str, object]:
        values = self.arguments(args)["moe"]
        return {**super().to_config(args), **{theirs: values[ours] for ours, theirs in self.moe_keys.items()}}

    def keys_read(self) -> set[str]:
        return super().keys_read() | {*self.moe_keys.values()}

    def read(self, given: Mapping[str, object]) -> Arguments:
        if absent := [key for key in self.moe_keys.values() if key not in given]:
            raise ConfigError([f"config.json: {key} is missing" for key in absent])
        return super().read(given) | {"moe": read_arguments(self.moe_keys, given)}
