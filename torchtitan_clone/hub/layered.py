"""The format of families whose layers with windows have rotary positions of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_clone.documents import Value
from torchtitan_clone.hub.formats import WindowedHub
from torchtitan_clone.hub.keys import ORIGINAL_LENGTH, Arguments, entry_of

_FULL, _SLIDING = "full_attention", "sliding_attention"
_WHERE = f"config.json: rope_parameters: {_SLIDING}"


@dataclass(frozen=True, kw_only=True)
class LayeredRopeHub(WindowedHub):
    """The format of such a family: transformers 5 writes the rotary positions of each type of layers."""

    def to_config(self, args: Any) -> dict[str, object]:
        config = super().to_config(args)
        scaling = config["rope_scaling"] if isinstance(config["rope_scaling"], dict) else {}
        full = {"rope_type": "default", **scaling, "rope_theta": args.rope_theta}
        sliding = {"rope_type": "default", "rope_theta": args.window_rope_args().theta}
        return {**config, "rope_parameters": {_FULL: full, _SLIDING: sliding}}

    def read(self, given: Mapping[str, object]) -> Arguments:
        """Reads one rope_scaling, for full layers, and what transformers 5 writes for each type of layers.

        transformers 5 gives rope_theta beside them to full layers only, and does not read an original length there.
        """
        types = entry_of({"rope_parameters": {}, **given}, "rope_parameters").entries()
        if unknown := types.keys() - {_FULL, _SLIDING}:
            types[min(unknown)].refuse(f"must be in {_FULL} or {_SLIDING}")
        full, sliding = (types.get(kind, Value({}, where=_WHERE)) for kind in (_FULL, _SLIDING))
        scaling = entry_of({"rope_scaling": {}, **given}, "rope_scaling").plain_entries()
        outside = {"rope_theta": given.get("rope_theta", self.defaults["rope_theta"]), "rope_scaling": {}}
        others = {key: value for key, value in given.items() if key != ORIGINAL_LENGTH}
        values = super().read({**others, **outside, "rope_parameters": {**full.plain_entries(), **scaling}})
        return values | self.read_window_rope(sliding, theta=values["rope_theta"], given=given)

    def read_window_rope(self, sliding: Value, *, theta: float, given: Mapping[str, object]) -> Arguments:
        """Returns the arguments of rotary positions of layers with windows; `theta` is that of full layers."""
        raise NotImplementedError
