"""Applies all parallelism and activation checkpointing to a model, in the one order that works.

Source of activation checkpointing: arXiv 1604.06174; selective, arXiv 2205.05198.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan_clone import torch_compat
from torchtitan_clone.config.schema import ActivationCheckpoint, Compile, Parallelism
from torchtitan_clone.config.schema_training import Training
from torchtitan_clone.interfaces import FSDPGroup, KeptOperations, TensorPlan, modules_that_keep_dtype
from torchtitan_clone.parallel.fsdp import ShardingOptions, apply_fsdp
from torchtitan_clone.parallel.mesh import Mesh
from torchtitan_clone.parallel.tensor import apply_tensor_parallel


class ParallelModel(Protocol):
    """What an nn.Module must offer to be parallelized; models/decoder.py has it for all families."""

    @property
    def layers(self) -> nn.ModuleDict: ...
    def keep_modules(self, names: Iterable[str]) -> None: ...
    def fsdp_groups(self) -> Sequence[FSDPGroup]: ...


M = TypeVar("M", bound=ParallelModel)


def apply_parallelism(
    model: M, *, modules: Iterable[str], frozen: Iterable[str], mesh: Mesh, tensor_plan: TensorPlan,
    kept_operations: KeptOperations, convert: Callable[[M], None], training: Training, sharding: ShardingOptions,
    parallelism: Parallelism, activation_checkpoint: ActivationCheckpoint, compile: Compile,
) -> None:  # fmt: skip
    """Applies pipeline, tensor, context, activation checkpointing, compile and FSDP to a model on the meta device.

    The model keeps only the `modules` of its pipeline stage, which `convert` may replace; those that are also in
    `frozen` get no gradients, nor do parameters that require none. Changes the model in place.
    """
    assert isinstance(model, nn.Module)
    modules = set(modules)
    model.keep_modules(modules)
    untrained = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    convert(model)
    experts: list[nn.Module] = []
    if mesh.ep is not None:
        from torchtitan_clone.parallel.expert import apply_expert_parallel, expert_modules

        experts = expert_modules(model)
        apply_expert_parallel(experts, mesh=mesh.ep)
    if mesh.tp.size() > 1:
        apply_tensor_parallel(model, plan=tensor_plan, mesh=mesh.tp)
    if parallelism.enable_async_tensor_parallel:
        torch_compat.enable_async_tensor_parallel(mesh.tp)
    method = parallelism.context_parallel_rotate_method
    if mesh.cp.size() > 1:
        from torchtitan_clone.parallel.context import OPERATORS, apply_context_parallel

        apply_context_parallel(model, mesh=mesh.cp, method=method)
        kept_operations = replace(kept_operations, always=kept_operations.always | OPERATORS)
    if mesh.cp.size() * mesh.tp.size() > 1:
        from torchtitan_clone.parallel.expert import divide_rows

        divide_rows(model, cp=mesh.cp, tp=mesh.tp, method=method)
    frozen = modules & set(frozen)
    _checkpoint_activations(
        model.layers, config=activation_checkpoint, kept=kept_operations, frozen=frozen,
        preserve_rng_state=not compile.cuda_graph,  # a graph cannot read it
    )  # fmt: skip
    if compile.compiles_model:
        # The exchange of tokens is not in the graph, nor is the gathering of parameters inside of blocks.
        is_mixed = training.mixed_precision_param != training.dtype and bool(modules_that_keep_dtype(model))
        fullgraph = not experts and not is_mixed
        for name, block in list(model.layers.items()):  # equal blocks share one compilation
            compiled = torch.compile(block, backend=compile.backend, fullgraph=fullgraph)
            model.layers[name] = cast("nn.Module", compiled)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    for name, parameter in named_parameters([model]).items():
        if name in untrained:
            parameter.requires_grad_(False)
    apply_fsdp(
        model, groups=model.fsdp_groups(), mesh=mesh.fsdp, parameter_mesh=mesh.parameters, experts=experts,
        expert_mesh=mesh.expert_fsdp, training=training, parallelism=parallelism, options=sharding,
    )  # fmt: skip


def _checkpoint_activations(
    layers: nn.ModuleDict,
    *,
    config: ActivationCheckpoint,
    kept: KeptOperations,
    frozen: Set[str],
    preserve_rng_state: bool,
) -> None:
    if config.mode == "none":
        return
    per_op = config.mode == "selective" and config.selective_ac_option == "op"
    every = 1 if config.mode == "full" or per_op else int(config.selective_ac_option)
    options = {"context_fn": partial(_selective_context, kept)} if per_op else {}
    first = len(layers) if config.first_blocks == -1 else config.first_blocks
    for index, (name, block) in enumerate(list(layers.items())[:first]):
        if index % every == 0 and f"layers.{name}" not in frozen:  # they have no backward
            layers[name] = torch_compat.checkpoint_wrapper(block, preserve_rng_state=preserve_rng_state, **options)


def _selective_context(kept: KeptOperations):
    counts = {"forward": 0, "recompute": 0}

    def policy(ctx, op, *args, **kwargs):
        keep = op in kept.always
        if op in kept.alternating:
            phase = "recompute" if ctx.is_recompute else "forward"
            counts[phase] += 1
            keep = counts[phase] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def named_parameters(model_parts: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """Returns the parameters of model parts by the names in the unwrapped model; a tied one once, by its first name."""
    return {_unwrapped(name): parameter for part in model_parts for name, parameter in part.named_parameters()}


def named_buffers(model_parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Returns the persistent buffers of model parts by the names in the unwrapped model."""
    return {_unwrapped(name): buffer for part in model_parts for name, buffer in torch_compat.persistent_buffers(part)}


def named_modules(model_parts: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Returns the modules of model parts by the names in the unwrapped model."""
    return {_unwrapped(name): module for part in model_parts for name, module in part.named_modules()}


def _unwrapped(name: str) -> str:
    for wrapper in torch_compat.WRAPPER_NAMES:
        name = name.replace(f"{wrapper}.", "")
    return name
