"""Data parallelism where no parameter is sharded over it: what FSDP does, without its copies."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchtitan_clone.comm.collectives import StartedSum
from torchtitan_clone.comm.tracing import COPIES_OF_WEIGHTS
from torchtitan_clone.interfaces import KeepsDtype
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.ops.layers import Linear
from torchtitan_clone.torch_compat import after_backward, converted, with_shard

_ALONE = 2**16
"""Elements of a gradient that is summed over replicas by itself, during backward; smaller ones are summed together."""
_PENDING = 2
"""Gradients of which a rank keeps parts that it has not summed, until the next one: they take memory."""
_KEEPS_DTYPE = torch.__version__ >= "2.15"
"""Whether FSDP takes gradients in the data type that autograd computes, not in that of weights.

Those of the first of several backwards are in the data type of the sum, also while those of tied weights are added.
"""
_unsharded: "WeakKeyDictionary[nn.Module, UnshardedParameters]" = WeakKeyDictionary()


def apply_unsharded(
    model: nn.Module, *, mesh: DeviceMesh, parameter_mesh: DeviceMesh, dtype: torch.dtype, keeps_gradients: bool
) -> None:
    """Makes the parameters DTensors as FSDP does, in place; forward and backward compute in `dtype`.

    `mesh` is [1] or [replicas, 1], and `parameter_mesh` has the axis tp after that. From the start of a forward to the
    end of its backward, or inside unwrapped_parameters(), modules hold parameters that are tensors, or DTensors on the
    axis tp only where they compute with those: the same memory if `dtype` is that of the parameters, else copies.
    Gradients are summed over replicas and added to those of the DTensors, in their data type; with `keeps_gradients`
    those of a single backward stay in `dtype`.
    """
    distributed: dict[nn.Parameter, nn.Parameter] = {}
    outer = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    tp = None
    for module, name, parameter in list(_parameters(model)):
        if parameter not in distributed:
            inner = parameter.placements if isinstance(parameter, DTensor) else ()
            tp = parameter.device_mesh if isinstance(parameter, DTensor) else tp
            both = _distributed(
                local_shard(parameter.detach()), like=parameter, mesh=parameter_mesh if inner else mesh,
                placements=[*outer, *inner],
            )  # fmt: skip
            distributed[parameter] = nn.Parameter(both, requires_grad=parameter.requires_grad)
        module._parameters[name] = distributed[parameter]
    unsharded = _unsharded[model] = UnshardedParameters(dtype, mesh=mesh, tp=tp, keeps_gradients=keeps_gradients)
    model.register_forward_pre_hook(unsharded.begin_forward)
    model.register_forward_hook(unsharded.end_forward)


def unsharded_parameters(model: nn.Module) -> "UnshardedParameters | None":
    """Returns what apply_unsharded() gave a model; None for a model of FSDP, or one whose parameters are plain."""
    return _unsharded.get(model)


@contextmanager
def unwrapped_parameters(models: Iterable[nn.Module]) -> Iterator[None]:
    """Lets models that apply_unsharded() changed hold plain parameters through several forwards and backwards."""
    unsharded = [(model, of_model) for model in models if (of_model := _unsharded.get(model)) is not None]
    for model, of_model in unsharded:
        of_model.begin(model, is_held=True)
    try:
        yield
    except BaseException:
        for _, of_model in unsharded:  # without collectives, in which other ranks may not take part
            of_model.restore()
        raise
    for _, of_model in unsharded:
        of_model.end()


class UnshardedParameters:
    """Replaces the DTensors of a model by plain parameters while it computes, and sums their gradients.

    step    begin()    forward, backward ...    end()
    holds   DTensors | plain parameters        | DTensors with gradients
    """

    def __init__(self, dtype: torch.dtype, *, mesh: DeviceMesh, tp: DeviceMesh | None, keeps_gradients: bool):
        self.is_last = True
        self._keeps_gradients = keeps_gradients
        self._dtype = dtype
        self._mesh = mesh
        self._tp = tp
        self._is_held = False
        self._places: list[tuple[nn.Module, str]] = []  # of the parameters: modules of a model stay the same
        self._kept: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._parts: set[nn.Parameter] = set()  # whose sums are parts of a sum over the ranks of tp
        self._started: dict[nn.Parameter, StartedSum] = {}  # over replicas
        self._pending = deque[StartedSum]()  # those that are not gathered

    def set_last(self, is_last: bool) -> None:
        """Says whether the next backward is the last of a step."""
        self.is_last = is_last
        if is_last and _KEEPS_DTYPE:
            for _, _, _, plain in self._kept:
                plain.grad_dtype = None

    def begin_forward(self, model: nn.Module, _inputs: object) -> None:
        """Gives modules the plain parameters of a forward."""
        if not self._is_held:
            self.begin(model, is_held=False)

    def end_forward(self, _model: nn.Module, _inputs: object, output: Tensor) -> None:
        """Lets modules keep the plain parameters until the end of backward, which may run a forward again."""
        if self._is_held:
            return
        if output.requires_grad:
            output.register_hook(lambda _: after_backward(self.end))
        else:
            self.restore()

    def begin(self, model: nn.Module, *, is_held: bool) -> None:
        """Gives modules plain parameters: for one forward and backward, or held until end() for several."""
        self.restore()  # after a forward without a backward
        self._is_held = is_held
        self.is_last = not is_held
        self._places = self._places or [(module, name) for module, name, _ in _parameters(model)]
        parameters = [(module, name, cast("nn.Parameter", module._parameters[name])) for module, name in self._places]
        with torch.no_grad():  # else each shard would be the result of a function of autograd
            shards = {parameter: local_shard(parameter) for _, _, parameter in parameters}
        kept = {parameter for module, _, parameter in parameters if isinstance(module, KeepsDtype)}
        cast_shards = {parameter: shard for parameter, shard in shards.items() if parameter not in kept}
        with COPIES_OF_WEIGHTS:
            shards |= zip(cast_shards, converted([*cast_shards.values()], self._dtype), strict=True)
        plain: dict[nn.Parameter, nn.Parameter] = {}
        for module, name, parameter in parameters:
            if parameter not in plain:
                is_local = isinstance(module, Linear) and module.holds_shard
                plain[parameter] = self._plain(parameter, shards[parameter], is_local=is_local)
            self._kept.append((module, name, parameter, plain[parameter]))
            module._parameters[name] = plain[parameter]

    def end(self) -> None:
        """Completes the sums of gradients, and gives them and the modules back to the DTensors."""
        self.collect()
        with_sums = [p for p in dict.fromkeys(p for _, _, p, _ in self._kept) if p in self._sums]
        if self._tp is not None:
            parts = [p for p in with_sums if p in self._parts]
            if parts:
                StartedSum(self._joined(parts), group=self._tp.get_group()).wait()
        if self._mesh.ndim > 1:
            remaining = [p for p in with_sums if p not in self._started]
            for parameter in remaining:
                if parameter.numel() >= _ALONE:
                    self._start(parameter)
            small = [p for p in remaining if p not in self._started]
            if small:
                self._started[small[0]] = StartedSum(self._joined(small), group=self._mesh.get_group(0))
        for started in self._started.values():
            started.start_gather()
        for started in self._started.values():
            started.wait()
        for parameter, total in self._sums.items():
            _add_gradient(parameter, total)
        self.restore()

    def restore(self) -> None:
        """Gives the modules back to the DTensors, without the gradients."""
        for module, name, parameter, _ in self._kept:
            module._parameters[name] = parameter
        for each in (self._kept, self._sums, self._parts, self._started, self._pending):
            each.clear()
        self._is_held = False

    def collect(self) -> None:
        """Takes the gradients that plain parameters have."""
        for _, _, parameter, plain in self._kept:
            if plain.grad is not None:
                self._add(parameter, plain)

    def _plain(self, parameter: nn.Parameter, local: Tensor, *, is_local: bool) -> nn.Parameter:
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > self._mesh.ndim and not is_local:
            assert self._tp is not None
            local = _distributed(local, like=parameter, mesh=self._tp, placements=parameter.placements[-1:])
        plain = nn.Parameter(local, requires_grad=parameter.requires_grad)
        if _KEEPS_DTYPE:
            plain.grad_dtype = None if self.is_last else parameter.dtype
        if parameter.requires_grad:
            plain.register_post_accumulate_grad_hook(partial(self._add, parameter))
        return plain

    @torch.no_grad()
    def _add(self, parameter: nn.Parameter, plain: Tensor) -> None:
        """Adds the gradient of a plain parameter to its sum; starts to sum a complete one over replicas."""
        gradient, plain.grad = plain.grad, None
        assert gradient is not None
        if isinstance(gradient, DTensor) and isinstance(plain, DTensor) and gradient.placements != plain.placements:
            if gradient.placements == (Partial(),) and plain.placements == (Replicate(),):
                self._parts.add(parameter)
            else:
                gradient = gradient.redistribute(placements=plain.placements)
        if (total := self._sums.get(parameter)) is not None:
            total.add_(local_shard(gradient))
        else:
            # Pipelines assign gradients that may be transposed; optimizers take all for contiguous.
            is_complete = self.is_last and parameter.grad is None and parameter not in self._parts
            keeps = self._keeps_gradients and is_complete
            (total,) = converted([local_shard(gradient)], gradient.dtype if keeps else parameter.dtype)
            self._sums[parameter] = total.contiguous()
            if _KEEPS_DTYPE:
                plain.grad_dtype = None
        if self.is_last and self._mesh.ndim > 1 and parameter not in self._parts and parameter.numel() >= _ALONE:
            self._start(parameter)

    def _start(self, parameter: nn.Parameter) -> None:
        """Starts to sum a gradient over replicas, and gathers an earlier sum, whose parts have likely arrived."""
        self._started[parameter] = StartedSum(self._sums[parameter], group=self._mesh.get_group(0))
        self._pending.append(self._started[parameter])
        if len(self._pending) > _PENDING:
            self._pending.popleft().start_gather()

    def _joined(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Returns the gradients of several parameters as one tensor, of which they are parts from now on."""
        totals = [self._sums[parameter] for parameter in parameters]
        together = torch.cat([total.reshape(-1) for total in totals])
        parts = together.split([total.numel() for total in totals])
        for parameter, total, part in zip(parameters, totals, parts, strict=True):
            self._sums[parameter] = part.view_as(total)
        return together


def _distributed(local: Tensor, *, like: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Returns a DTensor of the global shape of another; its shards may differ in size."""
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def _add_gradient(parameter: nn.Parameter, local: Tensor) -> None:
    """Adds this rank's shard of a gradient to that of a DTensor."""
    assert isinstance(parameter, DTensor)
    if parameter.grad is None:
        if local.dtype != parameter.dtype:
            parameter.grad_dtype = None  # any
        parameter.grad = with_shard(parameter, local)
    else:
        local_shard(parameter.grad).add_(local)


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield module, name, parameter
