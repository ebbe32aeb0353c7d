"""Tensor and sequence parallelism: shards matrices over the `tp` axis, as the model's plan says."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from torchtitan_clone.config import ConfigError
from torchtitan_clone.interfaces import TensorPlan
from torchtitan_clone.torch_compat import wait_tensor


def apply_tensor_parallel(model: nn.Module, *, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Shards the model in place over a one-dimensional mesh; ConfigError where the plan lacks a parameter."""
    children = dict(model.named_children())
    embedding = children.get("tok_embeddings")
    output = children.get("output")
    is_tied = embedding is not None and output is not None and embedding.weight is output.weight
    # A pipeline stage lacks some of the modules, and layers may differ: torch warns about patterns without a module.
    names = [name for name, _ in model.named_modules()]
    matching = {name: style for pattern, style in plan.styles.items() for name in names if _matches(name, pattern)}
    parallelize_module(model, mesh, matching)
    if embedding is not None:
        # A compiled block treats a tensor in flight as one without history: the embedding would get no gradient.
        embedding.register_forward_hook(lambda _module, _args, hidden_BTD: wait_tensor(hidden_BTD))
    if output is not None and embedding is not None and is_tied:
        output.weight = embedding.weight
    elif output is not None:  # by rows of the vocabulary: the loss computes with sharded logits
        output.weight = nn.Parameter(distribute_tensor(output.get_parameter("weight"), mesh, [Shard(0)]))
    _check_coverage(model, replicated=plan.replicated)


def _matches(name: str, pattern: str) -> bool:
    """Whether a style's pattern, in which * is one component, has the module of that name."""
    components, wanted = name.split("."), pattern.split(".")
    return len(components) == len(wanted) and all(map(fnmatchcase, components, wanted))


def _check_coverage(model: nn.Module, *, replicated: Sequence[str]) -> None:
    """Raises ConfigError for plain parameters that the plan does not name: their gradients would differ over ranks."""
    plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    forgotten = [name for name in plain if not any(fnmatchcase(name, pattern) for pattern in replicated)]
    if forgotten:
        raise ConfigError(
            f"parallelism.tensor_parallel_degree: the model's tensor-parallel plan does not split {forgotten[0]}"
            f"{f' and {len(forgotten) - 1} more parameters' if forgotten[1:] else ''}; give its module a style in the "
            "model's plan.py, or name it as replicated there"
        )
