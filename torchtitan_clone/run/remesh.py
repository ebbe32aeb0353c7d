"""Live re-meshing: the state of one phase moves in memory into the model parts of the next."""

import torch
from torch import Tensor, nn

from torchtitan_clone.models.decoder import Decoder
from torchtitan_clone.ops.dtensor_shards import gather_shard_map
from torchtitan_clone.parallel.apply import named_buffers, named_parameters
from torchtitan_clone.parallel.reshard import transfer
from torchtitan_clone.run.engine import Engine, build_plan_mesh, parallelize_model_parts
from torchtitan_clone.run.plan import RunPlan


def remesh(old: Engine, plan: RunPlan) -> Engine:
    """Builds the engine of the next phase from the state of the last, whose tensors it empties; a collective.

    Besides what a rank had or will have, no more than a few tensors take memory at any time.
    """
    state = old.state_tensors()
    old.free_unsharded_params()
    if plan.config.compile.enable:
        torch.compiler.reset()  # the names of process groups are compiled in
    mesh = build_plan_mesh(plan, device_type=old.device.type)
    parts = parallelize_model_parts(plan, mesh=mesh)
    optimizer_state = _transfer_state(state, parts=parts, device=old.device)
    engine = Engine(plan, mesh=mesh, model_parts=parts, device=old.device)
    engine.optimizer.load_state_dict(optimizer_state)
    old.mesh.close()
    return engine


def _transfer_state(state: dict[str, Tensor], *, parts: list[Decoder], device: torch.device) -> dict[str, Tensor]:
    """Fills parts that are on the meta device; returns the optimizer state of the parameters that are still trained."""
    sources = gather_shard_map(state)
    parameters = named_parameters(parts)
    buffers = named_buffers(parts)
    wanted: dict[str, Tensor] = {f"model/{name}": tensor for name, tensor in (parameters | buffers).items()}
    for name, shards in sources.items():
        parameter = parameters.get(name.removeprefix("optimizer/").rpartition("/")[0])
        if name.startswith("optimizer/") and parameter is not None and parameter.requires_grad:
            shard = next(iter(shards.values()))
            # Laid out as the parameter, or replicated where the shape differs (a step count).
            like = (
                parameter if shard.global_shape == parameter.shape else torch.empty(shard.global_shape, device="meta")
            )
            wanted[name] = like.detach().to(shard.dtype)
    optimizer_state: dict[str, Tensor] = {}
    received_buffers: dict[str, Tensor] = {}
    for name, tensor in transfer(state, sources=sources, wanted=wanted, device=device):
        model_name = name.removeprefix("model/")
        if (parameter := parameters.get(model_name)) is not None:
            torch.utils.swap_tensors(parameter, nn.Parameter(tensor, requires_grad=parameter.requires_grad))
        elif model_name in buffers:
            received_buffers[model_name] = tensor
        else:
            optimizer_state[name.removeprefix("optimizer/")] = tensor
    for part in parts:
        part.init_buffers(device)
    for name, buffer in named_buffers(parts).items():
        buffer.copy_(received_buffers[name])
    return optimizer_state
