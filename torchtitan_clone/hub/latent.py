"""The format of families with latent attention, whose rotary features alternate in the files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_clone.config import ConfigError
from torchtitan_clone.hub.formats import MoEHub
from torchtitan_clone.hub.keys import Arguments, entry_of
from torchtitan_clone.hub.mapping import Rules, rotary_rows, same

_ATTENTION, _OURS, _Q_RANK = "model.layers.*.self_attn", "layers.*.attention", "q_lora_rank"
_NAMES = {"q_norm": "q_a_layernorm", "wq_a": "q_a_proj", "kv_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj"}
LATENT_SIZES = {size: size for size in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
"""Keys of config.json by the names of our arguments."""
LATENT_RULES: Rules = {
    f"{_OURS}.{ours}.weight": same(f"{_ATTENTION}.{theirs}.weight") for ours, theirs in _NAMES.items()
}
"""Rules of latents."""


@dataclass(frozen=True, kw_only=True)
class LatentHub(MoEHub):
    """The format of a family with latent attention and experts; `nulls` must have q_lora_rank: null is no latent."""

    def rules_of(self, args: Any) -> Rules:
        sizes = args.latent_sizes
        ours, theirs = ("wq_b", "q_b_proj") if sizes.q_latent else ("wq", "q_proj")
        of_heads = rotary_rows(f"{_ATTENTION}.{theirs}.weight", plain=sizes.nope, rotary=sizes.rope)
        of_latent = rotary_rows(f"{_ATTENTION}.kv_a_proj_with_mqa.weight", plain=sizes.kv_latent, rotary=sizes.rope)
        rotary = {f"{_OURS}.{ours}.weight": of_heads, f"{_OURS}.wkv_a.weight": of_latent}
        return {**super().rules_of(args), **rotary}

    def arguments(self, args: Any) -> Arguments:
        return super().arguments(args) | {_Q_RANK: args.q_lora_rank}

    def to_config(self, args: Any) -> dict[str, object]:
        return super().to_config(args) | {_Q_RANK: args.q_lora_rank or None}

    def keys_read(self) -> set[str]:
        return super().keys_read() | {_Q_RANK}

    def read(self, given: Mapping[str, object]) -> Arguments:
        if _Q_RANK not in given:
            raise ConfigError(f"config.json: {_Q_RANK} is missing")
        rank = entry_of(given, _Q_RANK)
        if rank.value == 0:
            rank.refuse("must be above 0, or null")
        return super().read(given) | {_Q_RANK: 0 if rank.value is None else rank.integer(low=0, high=2**24)}
