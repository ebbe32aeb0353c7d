"""Statistics of the whole model every metrics.statistics_freq steps, read with the other numbers of those steps.

Legend: M modules (blocks, embedding, norm, output projection), L blocks, G groups of the optimizer.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_clone.models.decoder import Decoder
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.optim.groups import resolve_groups
from torchtitan_clone.parallel.apply import named_parameters
from torchtitan_clone.parallel.gradients import norms_of, share_of_squares
from torchtitan_clone.parallel.mesh import Mesh
from torchtitan_clone.run.plan import RunPlan


class Statistics:
    """Sums squares of gradients, of the outputs of blocks, and of weights and their update in the step before.

    All are sums over ranks, of which each adds what it has. The update of a step is known only after it, so that the
    next one reads it: no step waits for the device on its own account.
    """

    def __init__(self, plan: RunPlan, *, mesh: Mesh, model_parts: Sequence[Decoder], device: torch.device) -> None:
        config = plan.config
        self._freq = config.metrics.statistics_freq
        self._max_norm = config.training.max_norm
        self._ranks = mesh.world.size() // mesh.pp.size()
        self._device = device
        own = named_parameters(model_parts)
        self._modules = _own_parameters({name: _module_of(name) for name in plan.parameters}, own=own)
        groups = resolve_groups(config.optimizer, parameters=plan.parameters)
        labels = {name: _label(group.settings.name, group.pattern) for group in groups for name in group.parameters}
        self._groups = _own_parameters(labels, own=own)
        self._blocks = [module for module in self._modules if module.startswith("layers.")]
        self._activations = torch.zeros(len(self._blocks), 2, dtype=torch.float64, device=device)
        """Sum of squares and number of elements [L, 2] of outputs."""
        self._updates = torch.zeros(2, len(self._groups), dtype=torch.float64, device=device)
        """Sums of squares [2, G] of weights before an update, and of the update."""
        self._step = 0
        self._updated_step = -1
        self._weights: dict[str, list[Tensor]] = {}
        self._is_recorded = config.compile.cuda_graph  # a graph measures in all steps or in none
        self._columns: dict[str, float] = {}
        self._was_clipped: list[bool] = []
        for name, block in ((name, block) for part in model_parts for name, block in part.layers.items()):
            # Outside of what compiles a block or recomputes it, so that each output comes once.
            block.register_forward_hook(partial(self._add_activations, self._blocks.index(f"layers.{name}")))

    @property
    def _is_due(self) -> bool:
        return self._step % self._freq == 0

    @property
    def size(self) -> int:
        """Number of summands of this step."""
        return 1 + len(self._modules) + self._activations.numel() + self._updates.numel() if self._is_due else 0

    def begin_step(self, step: int) -> None:
        """Forgets what another step than the last has measured, and after a row the steps that it counted."""
        if (step - 1) % self._freq == 0:
            self._was_clipped = []
        self._step = step
        self._columns = {}
        self._weights = {}
        if self._is_due and self._updated_step != step - 1:
            self._updates.zero_()
        if self._is_due or self._is_recorded:
            self._activations.zero_()

    def own(self) -> Tensor:
        """Returns this rank's summands [1 + M + 2 L + 2 G], of which the first counts replica groups, or none [0]."""
        if not self._is_due:
            return self._updates.new_empty(0)
        is_first = self._updates.new_full((1,), float(dist.get_rank() == 0))
        gradients = ([p.grad for p in parameters if p.grad is not None] for parameters in self._modules.values())
        squares = [self._share_of_squares(each, like=each) for each in gradients]
        return torch.cat((is_first, torch.stack(squares), self._activations.flatten(), self._updates.flatten()))

    def take(self, sums: Sequence[float]) -> None:
        """Takes the sums over all ranks and replica groups, of which each has the same gradients."""
        if not sums:
            return
        replicas, *squares = sums
        num_modules, num_groups = len(self._modules), len(self._groups)
        activations = squares[num_modules : -2 * num_groups]
        gradients = zip(self._modules, squares[:num_modules], strict=True)
        outputs = zip(self._blocks, activations[::2], activations[1::2], strict=True)
        updates = zip(self._groups, squares[-2 * num_groups : -num_groups], squares[-num_groups:], strict=True)
        self._columns = {
            **{f"grad_norm/{module}": math.sqrt(square / replicas) for module, square in gradients},
            **{f"activation_rms/{block}": math.sqrt(square / count) for block, square, count in outputs if count},
            **{f"update_ratio/{group}": math.sqrt(update / weight) for group, weight, update in updates if weight},
        }

    def before_update(self, *, grad_norm: float) -> None:
        """Notes whether gradients are clipped, and copies the weights if the next step asks for their update."""
        self._was_clipped.append(grad_norm > self._max_norm)
        if (self._step + 1) % self._freq == 0:
            self._weights = {
                group: [local_shard(parameter.detach()).clone() for parameter in parameters]
                for group, parameters in self._groups.items()
            }

    @torch.no_grad()
    def after_update(self) -> None:
        """Measures the update of weights that were copied, and frees the copies."""
        for index, (group, copies) in enumerate(self._weights.items()):
            parameters = self._groups[group]
            self._updates[0, index] = self._share_of_squares(copies, like=parameters)
            for copy, parameter in zip(copies, parameters, strict=True):
                copy.sub_(local_shard(parameter))
            self._updates[1, index] = self._share_of_squares(copies, like=parameters)
        if self._weights:
            self._updated_step, self._weights = self._step, {}

    def columns(self) -> dict[str, float]:
        """Returns the columns of the step; none in other steps than every n-th."""
        if not (self._is_due and self._was_clipped):
            return self._columns
        return self._columns | {"clipped_share": sum(self._was_clipped) / len(self._was_clipped)}

    def _share_of_squares(self, tensors: Sequence[Tensor], *, like: Sequence[Tensor]) -> Tensor:
        return share_of_squares(tensors, like=like, ranks=self._ranks, device=self._device).to(self._device)

    def _add_activations(
        self, index: int, _block: nn.Module, _inputs: object, out: Tensor | tuple[Tensor, ...]
    ) -> None:
        """Adds the output of a block in a forward that trains."""
        if not (torch.is_grad_enabled() and (self._is_due or self._is_recorded)):
            return
        hidden = local_shard((out if isinstance(out, Tensor) else out[0]).detach())
        self._activations[index, 0] += norms_of([hidden]).double().square().sum()
        self._activations[index, 1] += hidden.numel()


def _own_parameters(labels: Mapping[str, str], *, own: Mapping[str, nn.Parameter]) -> dict[str, list[nn.Parameter]]:
    """Returns by label the trained parameters of this rank, for the labels of all ranks."""
    found: dict[str, list[nn.Parameter]] = {label: [] for label in labels.values()}
    for name, parameter in own.items():
        if parameter.requires_grad:
            found[labels[name]].append(parameter)
    return found


def _module_of(name: str) -> str:
    """Returns the block of a parameter, or the module of one outside of blocks."""
    return ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])


def _label(optimizer: str, pattern: str) -> str:
    return optimizer if pattern == "*" else f"{optimizer}/{pattern}"
