"""Adam and AdamW on the shards of a rank, with kernels for large weights on a GPU."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from torchtitan_clone.config.schema_training import Optimizer
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.torch_compat import converted, foreach_add_, foreach_mul_, has_triton, is_fake, simulates_gpu

logger = logging.getLogger("torchtitan_clone")

ParamGroup = dict[str, object]
_LARGE = 2**22
"""Elements of the smallest weights that the kernel of this package updates, one a launch.

The update of a smaller weight takes a GPU less time than the launch takes the host.
"""
_MOST_CONVERTED = 2**24
"""Elements of gradients that are converted to the data type of weights at a time."""


class _Shards(NamedTuple):
    """This rank's shards of a parameter and of what its update reads."""

    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


def _takes_kernel(x: _Shards) -> bool:
    """Whether a kernel of this package updates a weight: a large one in fp32 on a GPU, or a simulated one there."""
    is_large = x.weight.numel() >= _LARGE
    if is_fake(x.weight):
        return is_large and simulates_gpu(x.weight) and x.gradient.dtype != x.weight.dtype
    is_taken = is_large and x.weight.is_cuda and x.weight.dtype == torch.float32
    return is_taken and all(tensor.is_contiguous() for tensor in x) and _has_kernel()


@cache
def _has_kernel() -> bool:
    """Whether this machine compiles and runs the kernel: Triton needs a compiler of C, and not all GPUs have it."""
    if not has_triton():
        return False
    weight, step = torch.zeros(8, device="cuda"), torch.ones((), device="cuda")
    options = {"factor": 1.0, "lr": 1.0, "beta1": 0.9, "beta2": 0.9, "eps": 1.0, "weight_decay": 0.0}
    shards = _Shards(weight, weight.clone(), weight.clone(), weight.clone(), step)
    try:
        _update_by_kernel([shards], decoupled_weight_decay=True, **options)
    except Exception as error:  # noqa: BLE001, whatever a compiler raises
        logger.warning("Triton cannot compile the kernel of Adam (%s): torch updates all weights", error)
        return False
    return True


StateDtype = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class AdamArgs:
    """Options of Adam and AdamW, in `[optimizer.args]` or the `args` of a group."""

    state_dtype: StateDtype = "auto"
    """Data type of both moments; auto: that of weights. bfloat16 takes half the memory and rounds at random, by draws
    that follow from seed, step, name and position; then optimizer.implementation has no effect."""


def state_dtype_of(parameter: Tensor, choice: StateDtype) -> torch.dtype:
    """Returns the data type of a parameter's state."""
    return parameter.dtype if choice == "auto" else getattr(torch, choice)


def rounds_state(parameter: Tensor, choice: StateDtype) -> bool:
    """Whether the state of a parameter is rounded to its data type after each step, which torch does not do."""
    return choice == "bfloat16" or state_dtype_of(parameter, choice) != parameter.dtype


def adam_arguments(settings: Optimizer, args: AdamArgs) -> ParamGroup:
    """Returns the arguments of a param group by torch's names, and `state_dtype`."""
    return {
        "lr": settings.lr,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "fused": settings.implementation == "fused",
        "foreach": settings.implementation == "foreach",
        "state_dtype": args.state_dtype,
    }


def adam_state(parameter: Tensor, *, fused: bool, choice: StateDtype = "auto") -> dict[str, Tensor]:
    """Returns the state of a parameter before its first step."""
    # Only the fused kernel reads the step on the device; elsewhere it would cost a host sync per parameter.
    on_device, dtype = fused and not rounds_state(parameter, choice), state_dtype_of(parameter, choice)
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu"),
        "exp_avg": torch.zeros_like(parameter, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype),
    }


class Adam(torch.optim.Adam):
    """torch's Adam and AdamW, on this rank's shards: of each DTensor torch would derive how the results are sharded.

    Large weights on a GPU are updated by a kernel of this package, which takes gradients in bfloat16 too.
    `seed` is that of the run, for state that is rounded.
    """

    def __init__(self, param_groups: list[ParamGroup], *, seed: int = 0, **options: Any) -> None:
        super().__init__(param_groups, **options)
        self._seed = seed

    @torch.no_grad()
    def step(self, closure: None = None, *, factor: float = 1.0) -> None:
        """Updates the parameters by their gradients times `factor`; what gradients are afterwards is not defined."""
        for group in self.param_groups:
            if rounds_state(group["params"][0], group.get("state_dtype", "auto")):
                self._update_rounded(group, factor=factor)
                continue
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter].update(adam_state(parameter.detach(), fused=group["fused"]))
            states = [self.state[parameter] for parameter in parameters]
            shards = [
                _Shards(*map(local_shard, (p, p.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])))
                for p, state in zip(parameters, states, strict=True)
            ]
            by_kernel = [group["fused"] and _takes_kernel(x) for x in shards]
            by_torch = [not taken for taken in by_kernel]
            options = {key: group[key] for key in ("lr", "eps", "weight_decay", "decoupled_weight_decay")}
            options |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
            _update_by_kernel([*compress(shards, by_kernel)], factor=factor, **options)
            options |= {"foreach": group["foreach"], "fused": group["fused"], "amsgrad": False, "maximize": False}
            for some in _converted_together([*compress(shards, by_torch)]):
                weights, gradients, exp_avgs, exp_avg_sqs, steps = map(list, zip(*some, strict=True))
                gradients = converted(gradients, weights[0].dtype)
                if factor != 1.0:
                    foreach_mul_(gradients, factor)
                adam(weights, gradients, exp_avgs, exp_avg_sqs, [], steps, **options)

    def _update_rounded(self, group: dict[str, Any], *, factor: float) -> None:
        from torchtitan_clone.optim.rounded_adam import update_

        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if parameter.grad is None:
                continue
            if not (state := self.state[parameter]):
                state.update(adam_state(parameter.detach(), fused=False, choice=group["state_dtype"]))
            update_(parameter, parameter.grad, state, name=name, seed=self._seed, factor=factor, group=group)


def _converted_together(shards: Sequence[_Shards]) -> Iterator[Sequence[_Shards]]:
    """Yields the shards in their order, as many at once as may be in memory in two data types."""
    first = elements = 0
    for index, x in enumerate(shards):
        converted_here = x.gradient.numel() * (x.gradient.dtype != x.weight.dtype)
        elements += converted_here
        if elements > _MOST_CONVERTED and index > first:
            yield shards[first:index]
            first, elements = index, converted_here
    if shards:
        yield shards[first:]


def _update_by_kernel(shards: Sequence[_Shards], **options: float) -> None:
    if shards and not is_fake(shards[0].weight):
        from torchtitan_clone.ops.adam_kernel import update_

        foreach_add_([x.step for x in shards], 1)
        for x in shards:
            update_(*x, **options)
