"""Tensor and sequence parallelism: each matrix a shard of the `tp` axis, as the model's plan says."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from torchtitan_clone.torch_compat import enable_async_tensor_parallel, wait_tensor


def apply_tensor_parallel(model: Any, *, plan: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Splits the model in place over a one-dimensional mesh.

    The output projection is split by rows of the vocabulary; what that means for logits is left to the loss.
    """
    output = model.output
    tied = is_tied(model)
    embedding = model.tok_embeddings
    parallelize_module(model, mesh, {name: style for name, style in plan.items() if _has(model, name)})
    if embedding is not None:
        embedding.register_forward_hook(_wait)
    if tied and embedding is not None:
        output.weight = embedding.weight
    elif output is not None:
        output.weight = nn.Parameter(distribute_tensor(output.weight, mesh, [Shard(0)]))


def overlap_with_collectives(mesh: DeviceMesh) -> None:
    """Has torch.compile split matrix products next to a collective over this mesh, so that both run at once."""
    enable_async_tensor_parallel(mesh)


def is_tied(model: Any) -> bool:
    """Whether embedding and output projection are one weight."""
    embedding, output = model.tok_embeddings, model.output
    return embedding is not None and output is not None and embedding.weight is output.weight


def _wait(_module: nn.Module, _args: object, hidden_BTD: Tensor) -> Tensor:
    """Waits for the embedding's output.

    A compiled block treats a tensor that is still in flight as one without history: the embedding gets no gradient.
    """
    return wait_tensor(hidden_BTD)


def _has(model: nn.Module, name: str) -> bool:
    """Whether this part of the model has the module, or for a pattern its first part."""
    return getattr(model, name.split(".")[0], None) is not None
