"""The engine of one phase: mesh, model parts, optimizer and forward_backward, and their state as named tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from torchtitan_clone.models.balancing import ExpertLoads
from torchtitan_clone.models.decoder import Decoder
from torchtitan_clone.models.moe import Router, force_load_balance
from torchtitan_clone.models.mtp import MTP_LOSS
from torchtitan_clone.observe.by_source import Totals
from torchtitan_clone.ops.attention import use_kernels
from torchtitan_clone.ops.cross_entropy import build_loss
from torchtitan_clone.ops.kernels import prepare
from torchtitan_clone.ops.source_sums import SourceSums
from torchtitan_clone.optim import MatrixLayout, build_optimizer, build_schedule
from torchtitan_clone.parallel.apply import apply_parallelism, named_buffers, named_modules, named_parameters
from torchtitan_clone.parallel.forward_backward import ForwardBackward, LossFn, StepOutput, build_forward_backward
from torchtitan_clone.parallel.gradients import clipping_factor, gradient_norm
from torchtitan_clone.parallel.init_weights import init_weights
from torchtitan_clone.parallel.mesh import Mesh, build_mesh
from torchtitan_clone.parallel.runtime import set_up_compile
from torchtitan_clone.run.plan import RunPlan, loss_chunk_tokens, sharding_options


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """What a step computed, summed over all ranks and replica groups: means over the targets, tokens [E] by router."""

    loss: float
    auxiliary: dict[str, float]
    loads: Mapping[str, Tensor]
    by_source: Mapping[str, Totals]


class Engine:
    """Trains the model parts of this rank in one phase of a run."""

    def __init__(
        self,
        plan: RunPlan,
        *,
        mesh: Mesh,
        model_parts: list[Decoder],
        device: torch.device,
        loss_fn: LossFn | None = None,
    ) -> None:
        config = plan.config
        self.plan = plan
        self.mesh = mesh
        self.model_parts = model_parts
        self.device = device
        self.parameters = named_parameters(model_parts)
        layout = MatrixLayout(group=mesh.stage, block_rows=_head_rows(model_parts).get)
        self.optimizer = build_optimizer(config.optimizer, named_parameters=self.parameters, layout=layout)
        self.source_sums = _build_source_sums(plan, device=device)
        self.forward_backward = build_plan_forward_backward(
            model_parts,
            plan=plan,
            mesh=mesh,
            device=device,
            source_sums=self.source_sums,
            loss_fn=loss_fn,
        )
        if config.compile.cuda_graph and device.type == "cuda":
            from torchtitan_clone.parallel.cuda_graph import GraphedForwardBackward

            self.forward_backward = GraphedForwardBackward(self.forward_backward, self.parameters.values())
        self._loads = _build_loads(plan, model_parts=model_parts)
        self._lr_factor = build_schedule(config.lr_scheduler, steps=config.training.steps)

    @property
    def lr(self) -> float:
        """Learning rate of the step that `begin_step` was called for."""
        return self.optimizer.lr

    def model_tensors(self) -> dict[str, Tensor]:
        """Returns the parameters and persistent buffers by name: the tensors themselves, detached, not copies."""
        tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in self.parameters.items()}
        return tensors | named_buffers(self.model_parts)

    def state_tensors(self) -> dict[str, Tensor]:
        """Returns what checkpoints, recovery and re-meshing move: "model/NAME" and "optimizer/NAME/STATE"."""
        model = {f"model/{name}": tensor for name, tensor in self.model_tensors().items()}
        return model | {f"optimizer/{name}": tensor for name, tensor in self.optimizer.state_dict().items()}

    def begin_step(self, step: int) -> None:
        """Sets the learning rate of a step, and forgets the tokens of a backward that belongs to none, as a warm-up."""
        self.optimizer.set_lr_factor(self._lr_factor(step))
        for sums in (self._loads, self.source_sums):
            if sums is not None:
                sums.reset()

    def gradient_norm(self) -> Tensor:
        """Returns the norm [] of the gradients, fp32. A collective."""
        return gradient_norm(self.parameters.values(), ranks=self.mesh.world.size() // self.mesh.pp.size())

    def read(self, norm: Tensor, output: StepOutput) -> list[float]:
        """Returns the gradient norm, and this rank's share of what a step computed; one host sync for all of it."""
        is_leader = self.mesh.is_loss_leader
        # With CPU offload the norm is not on the device of the loss.
        scalars = torch.stack([norm.to(self.device), output.loss, *output.auxiliary.values()])
        sums = [] if self._loads is None else [self._loads.own(self.device)]
        sums += [] if self.source_sums is None else [self.source_sums.own(counts=is_leader)]
        # fp64 holds fp32 and counts exactly.
        grad_norm, loss, *others = torch.cat([each.double() for each in (scalars, *sums)]).tolist()
        terms, own = others[: len(output.auxiliary)], others[len(output.auxiliary) :]
        # Ranks of the tp axis compute the same losses, and other auxiliary terms of different tokens.
        has_terms = self.mesh.pp.get_local_rank() == self.plan.loss_rank
        counts = {name: is_leader if name.startswith(MTP_LOSS) else has_terms for name in output.auxiliary}
        auxiliary = [term if counts[name] else 0.0 for name, term in zip(output.auxiliary, terms, strict=True)]
        return [grad_norm, loss if is_leader else 0.0, *auxiliary, *own]

    def totals(self, sums: Sequence[float]) -> StepTotals:
        """Returns what the sums over all ranks of read(), less its norm, mean."""
        names = list(self.model_parts[0].auxiliary)
        loss, *others = sums
        loads, sources = self._loads, self.source_sums
        ends = len(names), len(others) - (0 if sources is None else sources.size)
        return StepTotals(
            loss=loss,
            auxiliary=dict(zip(names, others[: ends[0]], strict=True)),
            loads={} if loads is None else loads.by_router(others[ends[0] : ends[1]]),
            by_source={} if sources is None else sources.by_source(others[ends[1] :]),
        )

    def optimizer_step(self, totals: StepTotals, *, grad_norm: float) -> None:
        """Updates the bias of routers, the parameters and what else the family changes once a committed step.

        Gradients, whose norm is given, are scaled to at most training.max_norm.
        """
        if self._loads is not None:
            self._loads.update(totals.loads)  # first: its copies from the host would wait for the optimizer
        self.optimizer.step(factor=clipping_factor(grad_norm, max_norm=self.plan.config.training.max_norm))
        if self.plan.spec.after_step is not None:
            with torch.no_grad():
                self.plan.spec.after_step(self.model_parts)

    def free_unsharded_params(self) -> None:
        """Frees the gathered weights that FSDP still holds."""
        for module in (module for part in self.model_parts for module in part.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()


def _head_rows(model_parts: Sequence[Decoder]) -> dict[str, int]:
    """Returns the rows of one head in each weight that computes heads, by name."""
    return {
        f"{name}.{projection}.weight": rows
        for name, module in named_modules(model_parts).items()
        for projection, rows in getattr(module, "head_rows", {}).items()
    }


def _build_source_sums(plan: RunPlan, *, device: torch.device) -> SourceSums | None:
    """Returns the sums of losses by source; None without a mixture."""
    if plan.mixture is None:
        return None
    bytes_V = torch.tensor(plan.tokenizer.byte_lengths(), dtype=torch.int32)
    return SourceSums(plan.mixture.names, bytes_V=bytes_V, device=device)


def _build_loads(plan: RunPlan, *, model_parts: Sequence[Decoder]) -> ExpertLoads | None:
    """Returns the tokens by expert of all routers; None for a model without them."""
    suffix = ".router.weight"
    sizes = {
        name.removesuffix(".weight"): len(weight) for name, weight in plan.parameters.items() if name.endswith(suffix)
    }
    routers = {name: module for name, module in named_modules(model_parts).items() if isinstance(module, Router)}
    return ExpertLoads(routers=routers, sizes=sizes) if sizes else None


def build_engine(plan: RunPlan, *, device: torch.device) -> Engine:
    """Builds the engine of a phase with initial weights; a collective over all ranks."""
    prepare(device, compiles_model=plan.config.compile.compiles_model)  # first: threads compile C++
    set_up_compile(plan.config.compile, device_type=device.type)
    mesh = build_plan_mesh(plan, device_type=device.type)
    return Engine(plan, mesh=mesh, model_parts=build_model_parts(plan, mesh=mesh, device=device), device=device)


def build_plan_mesh(plan: RunPlan, *, device_type: str) -> Mesh:
    """Builds the mesh of a phase; a collective over all ranks."""
    return build_mesh(plan.degrees, loss_rank=plan.loss_rank, device_type=device_type)


def build_model_parts(plan: RunPlan, *, mesh: Mesh, device: torch.device) -> list[Decoder]:
    """Builds the pipeline stages of this rank (the whole model without a pipeline) with initial weights."""
    parts = parallelize_model_parts(plan, mesh=mesh)
    training, seed = plan.config.training, plan.config.debug.seed
    std_of = partial(plan.spec.initial_std, plan.model_args)
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


def build_plan_forward_backward(
    model_parts: Sequence[Decoder],
    *,
    plan: RunPlan,
    mesh: Mesh,
    device: torch.device,
    source_sums: SourceSums | None = None,
    loss_fn: LossFn | None = None,
) -> ForwardBackward:
    """Builds forward_backward: plain, or through a pipeline; with a loss of its own, or cross-entropy."""
    config = plan.config
    # Eager passes over a CPU's logits reuse their memory and take rows that stay in the cache; compiled ones do not.
    compiled = config.compile.enable and "loss" in config.compile.components and device.type != "cpu"
    loss_fn = loss_fn or build_loss(
        chunk_tokens=loss_chunk_tokens(plan),
        compile_backend=config.compile.backend if compiled else None,
        sums=source_sums,
    )
    if plan.degrees.pp == 1:
        return build_forward_backward(model_parts[0], loss_fn=loss_fn, device=device)
    from torchtitan_clone.parallel.pipeline import build_pipelined_forward_backward

    return build_pipelined_forward_backward(
        model_parts,
        stages=plan.stages,
        frozen_stages=plan.frozen_stages,
        parallelism=config.parallelism,
        mesh=mesh,
        loss_fn=loss_fn,
        dim=plan.model_args.dim,
        dtype=getattr(torch, config.training.mixed_precision_param),
        device=device,
    )
