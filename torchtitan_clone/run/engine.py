"""The engine of one phase: mesh, model parts, optimizer and forward_backward, and their state as named tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from torchtitan_clone.interfaces import MTP_LOSS, MatrixLayout
from torchtitan_clone.models.decoder import Decoder
from torchtitan_clone.observe.by_source import Totals
from torchtitan_clone.ops.cross_entropy import DIVERGENCE, Z_LOSS
from torchtitan_clone.ops.kernels import prepare
from torchtitan_clone.ops.source_sums import SourceSums
from torchtitan_clone.optim import build_factors, build_optimizer
from torchtitan_clone.parallel.apply import named_buffers, named_modules, named_parameters
from torchtitan_clone.parallel.forward_backward import LossFn, StepOutput
from torchtitan_clone.parallel.gradients import clipping_factor, gradient_norm
from torchtitan_clone.parallel.mesh import Mesh, build_mesh
from torchtitan_clone.parallel.runtime import set_up_compile
from torchtitan_clone.parallel.teacher import TeacherOfRows
from torchtitan_clone.run.forward_backward import build_plan_forward_backward
from torchtitan_clone.run.model_parts import build_model_parts
from torchtitan_clone.run.plan import RunPlan

if TYPE_CHECKING:
    from torchtitan_clone.models.balancing import ExpertLoads
    from torchtitan_clone.run.observing import Observer


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
        teacher: TeacherOfRows | None = None,
    ) -> None:
        config = plan.config
        self.plan = plan
        self.mesh = mesh
        self.model_parts = model_parts
        self.device = device
        self.parameters = named_parameters(model_parts)
        layout = MatrixLayout(group=mesh.stage, block_rows=_head_rows(model_parts).get)
        self.optimizer = build_optimizer(
            config.optimizer, named_parameters=self.parameters, layout=layout, seed=config.debug.seed,
            lr_factor=plan.spec.lr_factor(plan.model_args),
        )  # fmt: skip
        self.source_sums = _build_source_sums(plan, device=device)
        self.observers: list[Observer] = []
        if config.optimizer.qk_clip is not None or config.metrics.statistics_freq:
            from torchtitan_clone.run.observing import build_observers

            self.observers = build_observers(plan, mesh=mesh, model_parts=model_parts, device=device)
        self.ema = None
        if config.ema.enable:
            from torchtitan_clone.optim.ema import AveragedWeights

            self.ema = AveragedWeights(config.ema, parameters=self.parameters)
        self.forward_backward = build_plan_forward_backward(
            model_parts, plan=plan, mesh=mesh, device=device, source_sums=self.source_sums, loss_fn=loss_fn,
            teacher=teacher,
        )  # fmt: skip
        if config.compile.cuda_graph and device.type == "cuda":
            from torchtitan_clone.parallel.cuda_graph import GraphedForwardBackward

            self.forward_backward = GraphedForwardBackward(self.forward_backward, self.parameters.values())
        self._loads = _build_loads(plan, model_parts=model_parts)
        self._factors = build_factors(config.lr_scheduler, steps=config.training.steps, groups=config.optimizer.groups)

    @property
    def lr(self) -> float:
        """Learning rate of the step that `begin_step` was called for."""
        return self.optimizer.lr

    def model_tensors(self) -> dict[str, Tensor]:
        """Returns the parameters and persistent buffers by name: the tensors themselves, detached, not copies."""
        tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in self.parameters.items()}
        return tensors | named_buffers(self.model_parts)

    def state_tensors(self) -> dict[str, Tensor]:
        """Returns what checkpoints, recovery and re-meshing move: "model/NAME", "optimizer/NAME/STATE", "ema/NAME"."""
        state = {f"model/{name}": tensor for name, tensor in self.model_tensors().items()}
        state |= {f"optimizer/{name}": tensor for name, tensor in self.optimizer.state_dict().items()}
        return state if self.ema is None else self.ema.with_averages(state)

    def begin_step(self, step: int) -> None:
        """Sets learning rate, weight decay and momentum of a step, and clears what a warm-up pass has counted."""
        self.optimizer.set_factors(self._factors(step))
        for sums in (self._loads, self.source_sums):
            if sums is not None:
                sums.reset()
        for observer in self.observers:
            observer.begin_step(step)

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
        sums += [observer.own() for observer in self.observers]
        # fp64 holds fp32 and counts exactly.
        grad_norm, loss, *others = torch.cat([each.double() for each in (scalars, *sums)]).tolist()
        terms, own = others[: len(output.auxiliary)], others[len(output.auxiliary) :]
        # Ranks of the tp axis compute the same losses, and other auxiliary terms of different tokens.
        has_terms = self.mesh.pp.get_local_rank() == self.plan.loss_rank
        counts = {name: is_leader if name.startswith((MTP_LOSS, Z_LOSS)) else has_terms for name in output.auxiliary}
        auxiliary = [term if counts[name] else 0.0 for name, term in zip(output.auxiliary, terms, strict=True)]
        return [grad_norm, loss if is_leader else 0.0, *auxiliary, *own]

    def totals(self, sums: Sequence[float]) -> StepTotals:
        """Returns what the sums over all ranks of read(), less its norm, mean."""
        names = [*self.model_parts[0].auxiliary, *([Z_LOSS] if self.plan.config.training.z_loss else [])]
        names += [DIVERGENCE] if self.plan.config.distillation.is_enabled else []
        loss, *others = sums
        for observer in reversed(self.observers):
            end = len(others) - observer.size
            observer.take(others[end:])
            others = others[:end]
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
        for observer in self.observers:
            observer.before_update(grad_norm=grad_norm)
        self.optimizer.step(factor=clipping_factor(grad_norm, max_norm=self.plan.config.training.max_norm))
        for observer in self.observers:
            observer.after_update()
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


def _build_loads(plan: RunPlan, *, model_parts: Sequence[Decoder]) -> "ExpertLoads | None":
    if not any(name.endswith(".router.weight") for name in plan.parameters):
        return None
    from torchtitan_clone.models.moe import build_loads

    return build_loads(named_modules(model_parts), parameters=plan.parameters)


def build_engine(plan: RunPlan, *, device: torch.device) -> Engine:
    """Builds the engine of a phase with initial weights; a collective over all ranks."""
    prepare(device, compiles_model=plan.config.compile.compiles_model)  # first: threads compile C++
    set_up_compile(plan.config.compile, device_type=device.type)
    mesh = build_plan_mesh(plan, device_type=device.type)
    model_parts = build_model_parts(plan, mesh=mesh, device=device)
    teacher = build_teacher(plan, mesh=mesh, device=device)
    return Engine(plan, mesh=mesh, model_parts=model_parts, device=device, teacher=teacher)


def build_teacher(plan: RunPlan, *, mesh: Mesh, device: torch.device) -> TeacherOfRows | None:
    """Returns the teacher that the options ask for, on ranks that compute the loss; a collective. ConfigError."""
    if not plan.config.distillation.is_enabled:
        return None
    from torchtitan_clone.run import teacher

    return teacher.build_teacher(plan, mesh=mesh, device=device)


def build_plan_mesh(plan: RunPlan, *, device_type: str) -> Mesh:
    """Builds the mesh of a phase; a collective over all ranks."""
    return build_mesh(plan.degrees, loss_rank=plan.loss_rank, device_type=device_type)
