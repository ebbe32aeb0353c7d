"""Live re-meshing: the state of one phase moves in memory into the model parts of the next."""

import gc
import time

import torch
from torch import Tensor, nn

from torchtitan_clone.checkpoint.manager import CheckpointManager
from torchtitan_clone.data import Dataset
from torchtitan_clone.models.decoder import Decoder
from torchtitan_clone.observe.metrics import MetricsWriter
from torchtitan_clone.ops.dtensor_shards import gather_shard_map
from torchtitan_clone.parallel.apply import named_buffers, named_parameters
from torchtitan_clone.parallel.reshard import transfer
from torchtitan_clone.run.engine import Engine, build_plan_mesh, build_teacher
from torchtitan_clone.run.loaders import open_loaders
from torchtitan_clone.run.model_parts import parallelize_model_parts
from torchtitan_clone.run.plan import RunPlan, describe_phase
from torchtitan_clone.run.state import RunState
from torchtitan_clone.run.stopping import Timeouts
from torchtitan_clone.run.validation import Validator


def change_phase(
    state: RunState,
    plan: RunPlan,
    *,
    dataset: Dataset,
    rank: int,
    checkpoints: CheckpointManager,
    validator: Validator,
    timeouts: Timeouts,
    metrics: MetricsWriter,
) -> None:
    """Moves the state to the mesh of a phase, and opens its loaders where the present one is; a collective."""
    start = time.perf_counter()
    checkpoints.forget_layout()
    timeouts.expect_slow_steps()
    position = state.loader.state_dict()
    state.engine = remesh(state.engine, plan)
    timeouts.expect_slow_steps()  # the new groups too
    state.loader, validator.loader = open_loaders(plan, dataset=dataset, rank=rank, position=position)
    gc.collect()  # modules and their hooks refer to one another
    metrics.log_event(state.step, describe_phase(plan), seconds=time.perf_counter() - start)
    metrics.restart_interval()


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
    others = _transfer_state(state, parts=parts, device=old.device)
    teacher = build_teacher(plan, mesh=mesh, device=old.device)
    engine = Engine(plan, mesh=mesh, model_parts=parts, device=old.device, teacher=teacher)
    engine.optimizer.load_state_dict(_without_prefix(others, "optimizer/"))
    if engine.ema is not None:
        engine.ema.load_state_dict(_without_prefix(others, "ema/"))
    old.mesh.close()
    return engine


def _transfer_state(state: dict[str, Tensor], *, parts: list[Decoder], device: torch.device) -> dict[str, Tensor]:
    """Fills parts that are on the meta device.

    Returns the optimizer state of the parameters that are still trained, and averages of all, by their names.
    """
    sources = gather_shard_map(state)
    parameters = named_parameters(parts)
    buffers = named_buffers(parts)
    wanted: dict[str, Tensor] = {f"model/{name}": tensor for name, tensor in (parameters | buffers).items()}
    for name, shards in sources.items():
        is_average = name.startswith("ema/")
        of = name.removeprefix("ema/") if is_average else name.removeprefix("optimizer/").rpartition("/")[0]
        parameter = parameters.get(of)
        if parameter is not None and (is_average or (name.startswith("optimizer/") and parameter.requires_grad)):
            shard = next(iter(shards.values()))
            # Laid out as the parameter, or replicated where the shape differs (a step count).
            like = (
                parameter if shard.global_shape == parameter.shape else torch.empty(shard.global_shape, device="meta")
            )
            wanted[name] = like.detach().to(shard.dtype)
    others: dict[str, Tensor] = {}
    received_buffers: dict[str, Tensor] = {}
    for name, tensor in transfer(state, sources=sources, wanted=wanted, device=device):
        model_name = name.removeprefix("model/")
        if (parameter := parameters.get(model_name)) is not None:
            torch.utils.swap_tensors(parameter, nn.Parameter(tensor, requires_grad=parameter.requires_grad))
        elif model_name in buffers:
            received_buffers[model_name] = tensor
        else:
            others[name] = tensor
    for part in parts:
        part.init_buffers(device)
    for name, buffer in named_buffers(parts).items():
        buffer.copy_(received_buffers[name])
    return others


def _without_prefix(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
