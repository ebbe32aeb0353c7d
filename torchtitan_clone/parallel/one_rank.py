"""Data parallelism on a mesh of one rank of a CPU: FSDP's parameters and gradients, without its copies of them."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.torch_compat import after_backward


def apply_one_rank(model: nn.Module, *, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Makes the parameters DTensors on a mesh of one rank, in place; forward and backward compute in `dtype`.

    From the start of a forward to the end of its backward modules hold plain parameters: the same memory if `dtype` is
    that of the parameters, else copies. Gradients are added to those of the DTensors, in their type.
    """
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for module, name, parameter in list(_parameters(model)):
        if parameter not in sharded:
            local = DTensor.from_local(parameter.detach(), mesh, [Shard(0)], run_check=False)
            sharded[parameter] = nn.Parameter(local, requires_grad=parameter.requires_grad)
        module._parameters[name] = sharded[parameter]
    exchange = _Exchange(dtype)
    model.register_forward_pre_hook(exchange.begin)
    model.register_forward_hook(exchange.end_forward)


class _Exchange:
    """Exchanges the DTensors of a model with plain parameters and back."""

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype
        self._kept: list[tuple[nn.Module, str, nn.Parameter]] = []

    def begin(self, model: nn.Module, _inputs: object) -> None:
        """Gives modules the plain parameters of a forward."""
        self._restore()  # after a forward without a backward
        plain: dict[nn.Parameter, nn.Parameter] = {}
        for module, name, parameter in list(_parameters(model)):
            if parameter not in plain:
                plain[parameter] = self._plain(parameter)
            self._kept.append((module, name, parameter))
            module._parameters[name] = plain[parameter]

    def end_forward(self, _model: nn.Module, _inputs: object, output: Tensor) -> None:
        """Lets modules keep the plain parameters until the end of backward, which may run a forward again."""
        if output.requires_grad:
            output.register_hook(lambda _: after_backward(self._restore))
        else:
            self._restore()

    def _plain(self, parameter: nn.Parameter) -> nn.Parameter:
        local = local_shard(parameter.detach()).to(self._dtype)
        plain = nn.Parameter(local, requires_grad=parameter.requires_grad)
        if parameter.requires_grad:
            plain.register_post_accumulate_grad_hook(partial(_move_gradient, parameter))
        return plain

    def _restore(self) -> None:
        for module, name, parameter in self._kept:
            module._parameters[name] = parameter
        self._kept.clear()


@torch.no_grad()
def _move_gradient(parameter: nn.Parameter, plain: Tensor) -> None:
    """Adds the gradient of a plain parameter to that of its DTensor."""
    assert isinstance(parameter, DTensor)
    assert plain.grad is not None
    if parameter.grad is None:
        local = plain.grad.to(parameter.dtype)
        parameter.grad = DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)
    else:
        local_shard(parameter.grad).add_(plain.grad)
    plain.grad = None


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield module, name, parameter
