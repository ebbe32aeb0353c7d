"""The format of families with dense layers first, then experts, and layers that predict tokens after the next one."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_clone.hub.formats import MoEHub
from torchtitan_clone.hub.keys import Arguments, entry_of
from torchtitan_clone.hub.mapping import EXPERT_RULES, Rules, repeated, same, swiglu_rules
from torchtitan_clone.models.decoder import ModelArgs

DEPTH, N_DENSE = "num_nextn_predict_layers", "first_k_dense_replace"
PREDICTING_KEYS = frozenset({DEPTH, N_DENSE})
"""Keys of config.json that PredictingHub reads besides those of MoEHub."""
GROUPED_KEYS: Mapping[str, str] = {
    "num_experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "hidden_dim": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
    "score_scale": "routed_scaling_factor",
    "num_groups": "n_group",
    "top_groups": "topk_group",
}
"""Keys of a router with groups and of its experts, by the names of the arguments in `moe`."""
PREDICTING_RULES: Rules = {
    **EXPERT_RULES,
    **swiglu_rules("layers.*.feed_forward.shared_experts", "model.layers.*.mlp.shared_experts"),
    **{f"layers.*.{name}.weight": same(f"model.layers.*.{name}.weight") for name in ("enorm", "hnorm", "eh_proj")},
    "layers.*.norm.weight": same("model.layers.*.shared_head.norm.weight"),
}
"""Rules of experts, and of what predicts later tokens."""


def _is_omitted(name: str, args: ModelArgs) -> bool:
    """Whether a tensor is of a layer of multi-token prediction, which follow the others, that the model lacks."""
    match = re.match(r"model\.layers\.(\d{1,9})\.", name)
    return match is not None and int(match[1]) >= args.n_layers + args.mtp_depth


@dataclass(frozen=True, kw_only=True)
class PredictingHub(MoEHub):
    """The format of such a family; releases repeat the embedding and the output in the layers that predict."""

    def rules_of(self, args: Any) -> Rules:
        layers = [f"model.layers.{args.n_layers + depth}." for depth in range(args.mtp_depth)]
        shared = {
            "tok_embeddings.weight": repeated(
                "model.embed_tokens.weight", *(f"{each}embed_tokens.weight" for each in layers)
            ),
            "output.weight": repeated("lm_head.weight", *(f"{each}shared_head.head.weight" for each in layers)),
        }
        return {**self.rules, **shared}

    def is_leftover(self, name: str, *, args: ModelArgs) -> bool:
        return _is_omitted(name, args) or super().is_leftover(name, args=args)

    def describe_leftovers(self, names: Iterable[str], *, args: ModelArgs) -> list[str]:
        if not (count := sum(_is_omitted(name, args) for name in names)):
            return []
        where = f"model.layers.{args.n_layers + args.mtp_depth} and later"
        what = "which predict tokens after the next one; model.args.mtp_depth is how many layers are kept"
        return [f"leaves out the {count} tensors of {where}, {what}"]

    def arguments(self, args: Any) -> Arguments:
        return {**super().arguments(args), "n_dense_layers": args.n_dense_layers, "mtp_depth": args.mtp_depth}

    def to_config(self, args: Any) -> dict[str, object]:
        return {**super().to_config(args), N_DENSE: args.n_dense_layers, DEPTH: args.mtp_depth}

    def read(self, given: Mapping[str, object]) -> Arguments:
        values, complete = super().read(given), {DEPTH: 0, **self.defaults, **given}
        values["n_dense_layers"] = entry_of(complete, N_DENSE).integer(low=0, high=1024)
        values["mtp_depth"] = entry_of(complete, DEPTH).integer(low=0, high=64)
        return values

    def without_absent_layers(self, arguments: Arguments, *, names: Iterable[str]) -> tuple[Arguments, list[str]]:
        first = arguments["n_layers"]
        prefixes = tuple(f"model.layers.{first + depth}." for depth in range(arguments["mtp_depth"]))
        if not prefixes or any(name.startswith(prefixes) for name in names):
            return arguments, []
        what = f"config.json has {DEPTH} = {arguments['mtp_depth']}, but the folder lacks the weights of these layers"
        return arguments | {"mtp_depth": 0}, [f"{what}, as transformers saves it; the model is read without them"]
