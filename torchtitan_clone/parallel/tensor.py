"""Tensor and sequence parallelism: each matrix a shard of the `tp` axis, as the model's plan says."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from torchtitan_clone.config import ConfigError
from torchtitan_clone.torch_compat import enable_async_tensor_parallel, wait_tensor


class TensorPlan(Protocol):
    """How the model's family splits its modules over the tensor axis."""

    @property
    def styles(self) -> Mapping[str, ParallelStyle]:
        """Styles by module name; * matches one component."""
        ...

    @property
    def replicated(self) -> Sequence[str]:
        """Names of parameters that stay plain tensors; * as in fnmatch."""
        ...


def apply_tensor_parallel(model: Any, *, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Splits the model in place over a one-dimensional mesh; ConfigError where the plan forgets a parameter.

    The output projection is split by rows of the vocabulary; what that means for logits is left to the loss.
    """
    output = model.output
    tied = model.is_tied
    embedding = model.tok_embeddings
    parallelize_module(model, mesh, {name: style for name, style in plan.styles.items() if _has(model, name)})
    if embedding is not None:
        embedding.register_forward_hook(_wait)
    if tied and embedding is not None:
        output.weight = embedding.weight
    elif output is not None:
        output.weight = nn.Parameter(distribute_tensor(output.weight, mesh, [Shard(0)]))
    _check_coverage(model, replicated=plan.replicated)


def _check_coverage(model: nn.Module, *, replicated: Sequence[str]) -> None:
    """Refuses plain parameters that the plan does not name: their gradients would differ between ranks unnoticed."""
    forgotten = [
        name
        for name, parameter in model.named_parameters()
        if not isinstance(parameter, DTensor) and not any(fnmatchcase(name, pattern) for pattern in replicated)
    ]
    if forgotten:
        raise ConfigError(
            f"parallelism.tensor_parallel_degree: the model's tensor-parallel plan does not split {forgotten[0]}"
            f"{f' and {len(forgotten) - 1} more parameters' if forgotten[1:] else ''}; give its module a style in the "
            "model's plan.py, or name it as replicated there"
        )


def overlap_with_collectives(mesh: DeviceMesh) -> None:
    """Has torch.compile split matrix products next to a collective over this mesh, so that both run at once."""
    enable_async_tensor_parallel(mesh)


def _wait(_module: nn.Module, _args: object, hidden_BTD: Tensor) -> Tensor:
    """Waits for the embedding's output.

    A compiled block treats a tensor that is still in flight as one without history: the embedding gets no gradient.
    """
    return wait_tensor(hidden_BTD)


def _has(model: nn.Module, name: str) -> bool:
    """Whether this part of the model has the module, or for a pattern its first part."""
    return getattr(model, name.split(".")[0], None) is not None
