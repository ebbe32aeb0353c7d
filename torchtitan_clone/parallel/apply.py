"""The one place that says in which order parallelism is applied to a model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from torchtitan_clone.config.schema import ActivationCheckpoint, Compile, Parallelism, Training
from torchtitan_clone.parallel.activation import apply_activation_checkpointing
from torchtitan_clone.parallel.fsdp import apply_fsdp
from torchtitan_clone.parallel.mesh import Mesh
from torchtitan_clone.parallel.tensor import apply_tensor_parallel

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def apply_parallelism(
    model: Any,
    *,
    mesh: Mesh,
    tensor_plan: Mapping[str, ParallelStyle],
    training: Training,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
) -> None:
    """Changes a model on the meta device in place: tensor, activation checkpointing, compile, data; in this order."""
    if mesh.tp.size() > 1:
        apply_tensor_parallel(model, plan=tensor_plan, mesh=mesh.tp)
    apply_activation_checkpointing(model.layers, config=activation_checkpoint)
    if compile.enable and "model" in compile.components:
        # Block by block: equal blocks share one compilation.
        for name, block in list(model.layers.items()):
            model.layers[name] = torch.compile(block, backend=compile.backend, fullgraph=True)
    apply_fsdp(model, mesh=mesh.fsdp, training=training, parallelism=parallelism)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters under the names that the unwrapped model gives them; a tied one once, under its first name."""
    found = {}
    for name, parameter in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        found[name] = parameter
    return found
