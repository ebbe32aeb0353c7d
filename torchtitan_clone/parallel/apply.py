"""The one place that says in which order parallelism is applied to a model."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_clone.config.schema import ActivationCheckpoint, Compile, Parallelism, Training
from torchtitan_clone.parallel.activation import KeptOperations, apply_activation_checkpointing
from torchtitan_clone.parallel.context import apply_context_parallel
from torchtitan_clone.parallel.fsdp import apply_fsdp
from torchtitan_clone.parallel.mesh import Mesh
from torchtitan_clone.parallel.tensor import TensorPlan, apply_tensor_parallel, overlap_with_collectives
from torchtitan_clone.torch_compat import WRAPPER_NAMES, persistent_buffers


def apply_parallelism(
    model: Any,
    *,
    modules: Iterable[str],
    frozen: Iterable[str],
    mesh: Mesh,
    tensor_plan: TensorPlan,
    kept_operations: KeptOperations,
    convert: Callable[[Any], None] | None,
    training: Training,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
) -> None:
    """Changes a model on the meta device in place: pipeline, tensor, context, activation checkpointing, compile, data.

    In this order; of the pipeline, the model keeps the stage that has these `modules`, which `convert` may replace.
    Those that are `frozen` too get no gradients.
    """
    modules = set(modules)
    model.keep_modules(modules)
    if convert is not None:
        convert(model)
    if mesh.tp.size() > 1:
        apply_tensor_parallel(model, plan=tensor_plan, mesh=mesh.tp)
    if parallelism.enable_async_tensor_parallel:
        overlap_with_collectives(mesh.tp)
    if mesh.cp.size() > 1:
        apply_context_parallel(model, mesh=mesh.cp, method=parallelism.context_parallel_rotate_method)
    apply_activation_checkpointing(model.layers, config=activation_checkpoint, kept=kept_operations)
    if compile.enable and "model" in compile.components:
        # Block by block: equal blocks share one compilation.
        for name, block in list(model.layers.items()):
            model.layers[name] = torch.compile(block, backend=compile.backend, fullgraph=True)
    for name in modules & set(frozen):
        model.get_submodule(name).requires_grad_(False)
    apply_fsdp(model, mesh=mesh.fsdp, training=training, parallelism=parallelism)


def named_parameters(model_parts: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """Returns the parameters of model parts by the names in the unwrapped model; a tied one once, by its first name."""
    return {_unwrapped(name): parameter for part in model_parts for name, parameter in part.named_parameters()}


def named_buffers(model_parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Returns the persistent buffers of model parts by the names in the unwrapped model."""
    return {_unwrapped(name): buffer for part in model_parts for name, buffer in persistent_buffers(part)}


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPER_NAMES:
        name = name.replace(f"{wrapper}.", "")
    return name
