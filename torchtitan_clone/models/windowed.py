"""Arguments of families whose layers alternate between windows and full attention."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchtitan_clone.config.schema_training import Range
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.layer_kinds import LayerKind, find_pattern_errors, repeat_pattern
from torchtitan_clone.models.rope import RopeArgs

LayerType = Literal["full", "window"]
Window = Annotated[int, Range(1, 2**31)]


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
