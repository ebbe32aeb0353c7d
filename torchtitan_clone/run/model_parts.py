"""Builds the parts of a model that a rank has, with parallelism and initial weights."""

from functools import partial

import torch

from torchtitan_clone.models.decoder import Decoder
from torchtitan_clone.ops.attention import use_kernels
from torchtitan_clone.parallel.apply import apply_parallelism, named_parameters
from torchtitan_clone.parallel.init_weights import init_weights
from torchtitan_clone.parallel.mesh import Mesh
from torchtitan_clone.run.plan import RunPlan, sharding_options


def build_model_parts(plan: RunPlan, *, mesh: Mesh, device: torch.device) -> list[Decoder]:
    """Builds the pipeline stages of this rank (the whole model without a pipeline) with initial weights."""
    parts = parallelize_model_parts(plan, mesh=mesh)
    training, seed = plan.config.training, plan.config.debug.seed
    std_of = plan.spec.std_of(plan.model_args)
    for part in parts:
        part.to_empty(device="cpu" if training.enable_cpu_offload else device)
        part.init_buffers(device)
        init_weights(named_parameters([part]), seed=seed, std_of=std_of, cutoff=training.init_cutoff)
    return parts


def parallelize_model_parts(plan: RunPlan, *, mesh: Mesh) -> list[Decoder]:
    """Builds the stages of this rank on the meta device and applies parallelism to them."""
    return [_parallelize_stage(plan, stage=stage, mesh=mesh) for stage in plan.stages.of_rank(mesh.pp.get_local_rank())]


def _parallelize_stage(plan: RunPlan, *, stage: int, mesh: Mesh) -> Decoder:
    config = plan.config
    with torch.device("meta"):
        model = plan.spec.build(plan.model_args).to(getattr(torch, config.training.dtype))
        model.init_buffers()  # of their own types
    if config.debug.moe_force_load_balance:
        from torchtitan_clone.models.moe import force_load_balance

        force_load_balance(model)
    apply_parallelism(
        model, modules=plan.stages.modules[stage], frozen=plan.frozen_modules, mesh=mesh,
        tensor_plan=plan.spec.tensor_plan(plan.model_args), kept_operations=plan.spec.kept_operations,
        convert=partial(_convert, plan=plan), training=config.training, sharding=sharding_options(plan),
        parallelism=config.parallelism, activation_checkpoint=config.activation_checkpoint, compile=config.compile,
    )  # fmt: skip
    use_kernels(model)
    return model


def _convert(model: Decoder, *, plan: RunPlan) -> None:
    """Replaces modules of a stage in place, as the family and the options say."""
    if plan.spec.convert is not None:
        plan.spec.convert(model, args=plan.model_args)
    if plan.config.model.converters:
        from torchtitan_clone.models.float8 import convert_to_float8

        convert_to_float8(
            model,
            options=plan.config.quantize.linear.float8,
            tensor_degree=plan.degrees.tp,
            compiled=plan.config.compile.compiles_model,
        )
