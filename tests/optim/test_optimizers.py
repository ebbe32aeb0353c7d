"""Which kernels update weights on a GPU, on fake tensors of one."""

import pytest
import torch

from torchtitan_clone.config.schema import Optimizer
from torchtitan_clone.optim import build_optimizer
from torchtitan_clone.torch_compat import TorchDispatchMode, fake_tensors


class Operators(TorchDispatchMode):
    """Notes what is called."""

    def __init__(self):
        super().__init__()
        self.called = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("rows", "by_torch"), [(2**12 - 1, True), (2**12, False)])
def test_small_weights_are_updated_together_and_large_ones_by_the_kernel(rows, by_torch):
    with fake_tensors(of_gpu=True):
        weight = torch.nn.Parameter(torch.empty(rows, 2**10))
        weight.grad_dtype = None
        weight.grad = torch.empty(rows, 2**10, dtype=torch.bfloat16)
        optimizer = build_optimizer(Optimizer(), named_parameters={"a.weight": weight})
        with Operators() as operators:
            optimizer.step()
    assert ({"_foreach_copy_", "_fused_adamw_"} <= operators.called) is by_torch
