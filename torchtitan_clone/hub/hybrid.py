"""Formats of families whose layers alternate between linear and full attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_clone.documents import Value
from torchtitan_clone.hub.formats import CONFIG_KEYS, DecoderHub
from torchtitan_clone.hub.keys import Arguments, entry_of, read_kinds

LAYER_TYPES = {"linear": "linear_attention", "full": "full_attention"}
"""Types of layers in config.json by ours."""
_INTERVAL = "full_attention_interval"
_TABLES = ("rope_parameters", "rope_scaling")
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Of rotary positions: features that are rotated by the rows and columns of images, which text does not have."""
HYBRID_KEYS = {
    **CONFIG_KEYS, "head_dim": "head_dim", "linear_key_heads": "linear_num_key_heads",
    "linear_value_heads": "linear_num_value_heads", "linear_key_dim": "linear_key_head_dim",
    "linear_value_dim": "linear_value_head_dim", "linear_conv": "linear_conv_kernel_dim",
}  # fmt: skip
"""Keys of config.json by the names of our arguments."""


@dataclass(frozen=True, kw_only=True)
class HybridHub(DecoderHub):
    """The hub's format of a family with linear attention."""

    def arguments(self, args: Any) -> Arguments:
        types = ["linear" if args.is_linear(layer) else "full" for layer in range(args.n_layers)]
        return {**super().arguments(args), "layer_types": types}

    def to_config(self, args: Any) -> dict[str, object]:
        values = self.arguments(args)
        return {**super().to_config(args), "layer_types": [LAYER_TYPES[kind] for kind in values["layer_types"]]}

    def keys_read(self) -> set[str]:
        return super().keys_read() | {"layer_types", _INTERVAL}

    def read(self, given: Mapping[str, object]) -> Arguments:
        values = super().read(given)
        count = values["n_layers"]
        interval = entry_of({_INTERVAL: 4, **given}, _INTERVAL).integer(low=1, high=count)
        default = [LAYER_TYPES["linear" if (layer + 1) % interval else "full"] for layer in range(count)]
        entry = Value(given.get("layer_types", default), where="config.json: layer_types")
        return {**values, "layer_types": read_kinds(entry, LAYER_TYPES, count=count)}

    def _rope(self, given: Mapping[str, object], *, head_dim: int) -> Arguments:
        """Does what all families do, without what concerns positions in images."""
        tables = {key: entry_of(given, key).plain_entries() for key in _TABLES if given.get(key)}
        for table in tables.values():
            for name in _OF_IMAGES:
                table.pop(name, None)
        return super()._rope({**given, **tables}, head_dim=head_dim)
