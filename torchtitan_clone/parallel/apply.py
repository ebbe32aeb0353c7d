"""Applies all parallelism to a model, in the one order that works."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from torchtitan_clone.config.schema import ActivationCheckpoint, Compile, Parallelism, Training
from torchtitan_clone.parallel.activation import KeptOperations, apply_activation_checkpointing
from torchtitan_clone.parallel.context import apply_context_parallel
from torchtitan_clone.parallel.fsdp import FSDPGroup, apply_fsdp
from torchtitan_clone.parallel.mesh import Mesh
from torchtitan_clone.parallel.tensor import TensorPlan, apply_tensor_parallel
from torchtitan_clone.torch_compat import WRAPPER_NAMES, enable_async_tensor_parallel, persistent_buffers


class ParallelModel(Protocol):
    """What an nn.Module must offer to be parallelized; models/decoder.py has it for all families."""

    @property
    def layers(self) -> nn.ModuleDict: ...
    def keep_modules(self, names: Iterable[str]) -> None: ...
    def fsdp_groups(self) -> Sequence[FSDPGroup]: ...


M = TypeVar("M", bound=ParallelModel)


def apply_parallelism(
    model: M,
    *,
    modules: Iterable[str],
    frozen: Iterable[str],
    mesh: Mesh,
    tensor_plan: TensorPlan,
    kept_operations: KeptOperations,
    convert: Callable[[M], None] | None,
    training: Training,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
) -> None:
    """Applies pipeline, tensor, context, activation checkpointing, compile and FSDP to a model on the meta device.

    The model keeps only the `modules` of its pipeline stage, which `convert` may replace; those that are also in
    `frozen` get no gradients. Changes the model in place.
    """
    assert isinstance(model, nn.Module)
    modules = set(modules)
    model.keep_modules(modules)
    if convert is not None:
        convert(model)
    if mesh.tp.size() > 1:
        apply_tensor_parallel(model, plan=tensor_plan, mesh=mesh.tp)
    if parallelism.enable_async_tensor_parallel:
        enable_async_tensor_parallel(mesh.tp)
    if mesh.cp.size() > 1:
        apply_context_parallel(model, mesh=mesh.cp, method=parallelism.context_parallel_rotate_method)
    apply_activation_checkpointing(model.layers, config=activation_checkpoint, kept=kept_operations)
    if compile.enable and "model" in compile.components:
        # Block by block: equal blocks share one compilation.
        for name, block in list(model.layers.items()):
            model.layers[name] = cast("nn.Module", torch.compile(block, backend=compile.backend, fullgraph=True))
    for name in modules & set(frozen):
        model.get_submodule(name).requires_grad_(False)
    apply_fsdp(model, groups=model.fsdp_groups(), mesh=mesh.fsdp, training=training, parallelism=parallelism)


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
