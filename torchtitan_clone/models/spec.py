"""What a model family hands to the rest of the program."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from torchtitan_clone.config import ConfigError, overlay
from torchtitan_clone.config.schema import Model


class ModelArgs(Protocol):
    """The arguments every family has, whatever else it needs: a frozen dataclass."""

    @property
    def dim(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def tied_embeddings(self) -> bool: ...


class LossFn(Protocol):
    """Sum over targets of the loss, from the last hidden states and the output projection."""

    def __call__(self, hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> Tensor: ...


class HuggingFace(Protocol):
    """How a family is written in the files of the Hugging Face hub; the family's module hf.py is one."""

    def to_name(self, name: str) -> str:
        """The hub's name of our parameter."""
        ...

    def from_name(self, name: str) -> str | None:
        """Our name of the hub's parameter; None where we have no such parameter."""
        ...

    def is_leftover(self, name: str, *, tied: bool) -> bool:
        """Whether a tensor in the hub's files says nothing new and may be passed over."""
        ...

    def to_config(self, args: Any) -> dict[str, Any]:
        """What config.json says of the architecture."""
        ...

    def from_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The values of `[model.args]` that a config.json asks for; ConfigError where the family cannot be so."""
        ...

    def arguments(self, args: Any) -> dict[str, Any]:
        """The values that `from_config(to_config(args))` gives."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A family of models.

    The module that `build` returns is plain single-device PyTorch with

    - `forward(tokens_BT, *, positions_BT, documents_BT=None, targets_BT=None, loss_fn=None)`: logits [B, T, V], or
      what `loss_fn` makes of the last hidden states where it is given;
    - `tok_embeddings`, `layers` (a ModuleDict), `norm` and `output`;
    - `attention_mask`, which makes of the documents what every block's `attention.core` takes as its mask;
    - `init_buffers(device)`: computes what is not a parameter, after construction on the meta device.

    `initial_std(args, name)` is the standard deviation of the parameter of that name, or None where it starts at one.
    `tensor_plan()` gives torch's ParallelStyle for each module that the tensor axis splits.
    `hugging_face` is how weights and arguments are exchanged with other programs.
    """

    name: str
    flavors: Mapping[str, Any]
    build: Callable[[Any], Any]
    initial_std: Callable[[Any, str], float | None]
    tensor_plan: Callable[[], Mapping[str, Any]]
    hugging_face: HuggingFace

    def resolve_args(self, model: Model) -> Any:
        """The flavor's arguments with `[model.args]` laid over them; ConfigError for what this family does not know."""
        if model.flavor not in self.flavors:
            known = ", ".join(self.flavors)
            raise ConfigError([f'model.flavor = "{model.flavor}": {self.name} has no such flavor; known: {known}'])
        return overlay(self.flavors[model.flavor], model.args, where="model.args")
