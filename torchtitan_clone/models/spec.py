"""What a model family provides to the rest of the program."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchtitan_clone.config import ConfigError, overlay
from torchtitan_clone.config.schema import Model
from torchtitan_clone.models.decoder import Decoder, ModelArgs, named_state
from torchtitan_clone.models.plan import TensorPlan
from torchtitan_clone.ops.tensor_pieces import Piece
from torchtitan_clone.torch_compat import cpu_flash_attention, cudnn_attention, efficient_attention, flash_attention

BuildModel = Callable[[Any], Decoder]
"""Makes the model of a family's arguments."""


class HuggingFace(Protocol):
    """How a family is written in the files of the Hugging Face hub; models/hf.py has one for decoders."""

    def pieces(self, name: str, *, shape: Sequence[int]) -> list[Piece]:
        """Returns the tensors of the hub that hold our parameter or buffer of that name and shape."""
        ...

    def is_leftover(self, name: str, *, tied: bool) -> bool:
        """Returns whether a tensor in the hub's files is redundant and may be skipped."""
        ...

    def to_config(self, args: Any) -> dict[str, object]:
        """Returns what config.json says of the architecture."""
        ...

    def from_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of `[model.args]` that a config.json asks for; ConfigError for an unsupported one."""
        ...

    def arguments(self, args: Any) -> dict[str, Any]:
        """Returns the values that `from_config(to_config(args))` gives."""
        ...


class FlopsPerToken(Protocol):
    """Counts the FLOPs of forward and backward for one token; of frozen blocks forward only."""

    def __call__(self, args: Any, *, seq_len: int, frozen_layers: int) -> float: ...


class ConvertModel(Protocol):
    """Replaces modules of a model, or of a stage of it, in place."""

    def __call__(self, model: Decoder, /, *, args: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class KeptOperations:
    """What selective activation checkpointing per operation keeps instead of recomputing it in backward.

    Attributes:
        always: operations whose results cost much to compute for their size.
        alternating: operations of which every second one is recomputed: half the memory for half the work.
    """

    always: frozenset[object]
    alternating: frozenset[object]


_aten = torch.ops.aten
DENSE_KEPT = KeptOperations(
    always=frozenset(
        {
            flash_attention.default,
            efficient_attention.default,
            cudnn_attention.default,
            cpu_flash_attention.default,
            torch.ops.higher_order.flex_attention,
            torch.ops.torchtitan_clone.document_attention.default,
        }
    ),
    alternating=frozenset({_aten.mm.default, _aten.addmm.default, _aten.linear.default}),
)
"""For decoders whose work is attention and dense products."""


def equal_costs(args: ModelArgs) -> list[int]:
    """Returns 1 for each layer."""
    return [1] * args.n_layers


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A family of models.

    Attributes:
        name: value of `model.name`.
        flavors: arguments by the value of `model.flavor`.
        build: makes the model, single-device PyTorch without any parallelism.
        initial_std: standard deviation of the initial values of the parameter of a name; None: it starts at one.
        tensor_plan: how the tensor axis splits the modules.
        hugging_face: how tensors and arguments are exchanged with the Hugging Face hub.
        flops_per_token: FLOPs of training, for MFU.
        kept_operations: what selective activation checkpointing keeps.
        layer_costs: cost of each layer relative to the others, by which pipeline stages are balanced.
        convert: replaces modules in place before tensor parallelism is applied; the model is on the meta device.
        after_step: updates the model parts of this rank after each optimizer step that is committed.
    """

    name: str
    flavors: Mapping[str, ModelArgs]
    build: BuildModel
    initial_std: Callable[[Any, str], float | None]
    tensor_plan: Callable[[Any], TensorPlan]
    hugging_face: HuggingFace
    flops_per_token: FlopsPerToken
    kept_operations: KeptOperations = DENSE_KEPT
    layer_costs: Callable[[Any], Sequence[int]] = equal_costs
    convert: ConvertModel | None = None
    after_step: Callable[[Sequence[Decoder]], None] | None = None

    def resolve_args(self, model: Model) -> Any:
        """Returns the flavor's arguments with `[model.args]` applied; ConfigError for what the family does not know."""
        if model.flavor not in self.flavors:
            known = ", ".join(self.flavors)
            raise ConfigError([f'model.flavor = "{model.flavor}": {self.name} has no such flavor; known: {known}'])
        return overlay(self.flavors[model.flavor], model.args, where="model.args")

    def state_on_meta(self, args: Any) -> dict[str, Tensor]:
        """Returns parameters and persistent buffers by name, without values; a tied weight comes once."""
        with torch.device("meta"):
            return named_state(self.build(args))

    def hub_pieces(self, state: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
        """Returns for each of our tensors, by name, the tensors of the hub that hold its values."""
        return {name: self.hugging_face.pieces(name, shape=tensor.shape) for name, tensor in state.items()}
