"""What models, data, optimizers and parallelism know of each other, below all of them.

Legend: B rows, T tokens of a row, N rows of tokens, D model, E experts, K depths of multi-token prediction.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel.style import ParallelStyle

MTP_LOSS = "mtp_loss"
"""Name of the auxiliary terms of multi-token prediction, before the number of the depth."""


@dataclass(frozen=True, kw_only=True)
class FSDPGroup:
    """Modules whose weights FSDP gathers and frees together."""

    modules: Sequence[nn.Module]
    is_block: bool = False
    """Whether it is one block of `layers`, whose weights the blocks before it can prefetch."""
    starts_backward: bool = False
    """Whether backward starts with it, so that freeing its weights after forward saves nothing."""
    is_lookup: bool = False
    """Whether its backward does not read its weights."""


@runtime_checkable
class KeepsDtype(Protocol):
    """A module that computes with its parameters in their own data type, also in mixed precision."""

    KEEPS_DTYPE: ClassVar[bool]


def modules_that_keep_dtype(model: nn.Module) -> list[nn.Module]:
    """Returns these modules of a model."""
    return [module for module in model.modules() if isinstance(module, KeepsDtype)]


@dataclass(frozen=True, kw_only=True)
class KeptOperations:
    """Operations that selective activation checkpointing keeps instead of recomputing them in backward."""

    always: Set[object]
    """Those whose results cost much to compute for their size."""
    alternating: Set[object]
    """Those of which every second one is recomputed: half the memory for half the work."""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How tensor parallelism shards the modules of a family."""

    styles: Mapping[str, ParallelStyle]
    """Styles by module name; * matches one component of a name."""
    replicated: tuple[str, ...] = ()
    """Parameters that stay plain tensors; * as in fnmatch. Each rank must compute their gradients completely."""


@dataclass(frozen=True, kw_only=True)
class MatrixLayout:
    """How the ranks of a mesh share matrices, and which blocks the matrices have."""

    group: dist.ProcessGroup | None = None
    """Group of all ranks that share parameters over several axes of a mesh; None: no parameter is shared so."""
    block_rows: Callable[[str], int | None] = lambda _: None
    """Returns the rows of one head in the projection of this name to queries, keys or values; None: it is none."""


class Constant(NamedTuple):
    """First value of all elements of a parameter."""

    value: float


class RowShards(Protocol):
    """How the tokens of a row are divided over ranks."""

    def indices(self, count: int, /) -> Tensor:
        """Returns the indices in their row of this rank's `count` tokens."""
        ...

    def sum(self, counts: Tensor, /) -> Tensor:
        """Returns the sum over the ranks that hold tokens of the same rows."""
        ...


class TokenExchange(Protocol):
    """Moves rows to the ranks of their experts and back, in expert parallelism."""

    def send(self, rows_ND: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, object]:
        """Returns the rows of this rank's experts, sorted by expert, counts of each, and what `send_back` needs."""
        ...

    def send_back(self, rows_ND: Tensor, route: Any) -> Tensor: ...
