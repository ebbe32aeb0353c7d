"""The one place that says in which order parallelism is applied to a model."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from torchtitan_clone.config.schema import ActivationCheckpoint, Compile, Parallelism, Training
from torchtitan_clone.parallel.activation import apply_activation_checkpointing
from torchtitan_clone.parallel.context import apply_context_parallel
from torchtitan_clone.parallel.fsdp import apply_fsdp
from torchtitan_clone.parallel.mesh import Mesh
from torchtitan_clone.parallel.tensor import apply_tensor_parallel, overlap_with_collectives
from torchtitan_clone.torch_compat import WRAPPER_NAMES


def apply_parallelism(
    model: Any,
    *,
    modules: Iterable[str],
    frozen: Iterable[str],
    mesh: Mesh,
    tensor_plan: Mapping[str, ParallelStyle],
    training: Training,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
) -> None:
    """Changes a model on the meta device in place: pipeline, tensor, context, activation checkpointing, compile, data.

    In this order; of the pipeline, the model keeps the stage that has these `modules`. Those that are `frozen` too get
    no gradients.
    """
    modules = set(modules)
    _keep_modules(model, names=modules)
    if mesh.tp.size() > 1:
        apply_tensor_parallel(model, plan=tensor_plan, mesh=mesh.tp)
    if parallelism.enable_async_tensor_parallel:
        overlap_with_collectives(mesh.tp)
    if mesh.cp.size() > 1:
        apply_context_parallel(model, mesh=mesh.cp, method=parallelism.context_parallel_rotate_method)
    apply_activation_checkpointing(model.layers, config=activation_checkpoint)
    if compile.enable and "model" in compile.components:
        # Block by block: equal blocks share one compilation.
        for name, block in list(model.layers.items()):
            model.layers[name] = torch.compile(block, backend=compile.backend, fullgraph=True)
    for name in modules & set(frozen):
        model.get_submodule(name).requires_grad_(False)
    apply_fsdp(model, mesh=mesh.fsdp, training=training, parallelism=parallelism)


def _keep_modules(model: Any, *, names: set[str]) -> None:
    """Removes all other modules; the names of the parameters stay as they are."""
    for name in {"tok_embeddings", "norm", "output"} - names:
        setattr(model, name, None)
    for name in list(model.layers):
        if f"layers.{name}" not in names:
            del model.layers[name]


def named_parameters(parts: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """Returns the parameters of model parts under the names that they have without wrappers.

    A tied parameter comes once, under its first name.
    """
    found = {}
    for name, parameter in (item for part in parts for item in part.named_parameters()):
        for wrapper in WRAPPER_NAMES:
            name = name.replace(f"{wrapper}.", "")
        found[name] = parameter
    return found
