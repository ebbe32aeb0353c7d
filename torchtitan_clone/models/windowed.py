"""Families whose layers alternate between windows and full attention: their arguments, and config.json of the hub."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torchtitan_clone.config.schema import Range
from torchtitan_clone.documents import Value
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.hf import DecoderHub
from torchtitan_clone.models.hub_keys import Arguments, read_arguments
from torchtitan_clone.models.layer_kinds import LayerKind, find_pattern_errors, repeat_pattern
from torchtitan_clone.models.rope import RopeArgs

LayerType = Literal["full", "window"]
Window = Annotated[int, Range(1, 2**31)]
_HUB_TYPES = {"full": "full_attention", "window": "sliding_attention"}


@dataclass(frozen=True, kw_only=True)
class WindowedArgs(ModelArgs):
    """Arguments of a model in which some layers attend to the last `window` tokens only."""

    layer_types: list[LayerType] = field(default_factory=lambda: ["full"])
    """Type of each layer, or a pattern that repeats: its length must divide `n_layers`."""
    window: Window = 4096

    def window_rope_args(self) -> RopeArgs:
        """Returns the rotary positions of layers with a window."""
        return self.rope_args()

    def layer_kinds(self) -> list[LayerKind]:
        kinds = {
            "full": LayerKind(positions=self.rope_args()),
            "window": LayerKind(positions=self.window_rope_args(), window=self.window),
        }
        return repeat_pattern(self.layer_types, kinds, n_layers=self.n_layers)

    def violations(self) -> list[str]:
        return super().violations() + find_pattern_errors(self.layer_types, n_layers=self.n_layers)


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
        ours = {theirs: kind for kind, theirs in _HUB_TYPES.items()}
        types = [ours[each.choice(*ours)] for each in entry.items(count=count)]
        window = read_arguments({"window": "sliding_window"}, {"sliding_window": self.window, **given})
        return {**values, "layer_types": types, **window}
