"""Which kernels update weights on a GPU, on fake tensors of one, and gradients in another data type than weights."""

import pytest
import torch

from torchtitan_clone.config.schema_training import Optimizer
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


@pytest.mark.parametrize(
    ("of_gpu", "rows", "by_torch"), [(True, 2**12 - 1, True), (True, 2**12, False), (False, 2**12, True)]
)
def test_a_gpu_updates_large_weights_by_the_kernel_and_others_together(of_gpu, rows, by_torch):
    with fake_tensors(of_gpu=of_gpu):
        weight = torch.nn.Parameter(torch.empty(rows, 2**10))
        weight.grad_dtype = None
        weight.grad = torch.empty(rows, 2**10, dtype=torch.bfloat16)
        optimizer = build_optimizer(Optimizer(), named_parameters={"a.weight": weight})
        with Operators() as operators:
            optimizer.step()
    assert ({"_foreach_copy_", "_fused_adamw_"} <= operators.called) is by_torch


@pytest.mark.parametrize(("of_gpu", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_muon_iterates_in_bfloat16_on_a_gpu_only(of_gpu, dtype):
    dtypes = set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ in ("bmm", "baddbmm"):
                dtypes.add(out.dtype)
            return out

    with fake_tensors(of_gpu=of_gpu):
        weight = torch.nn.Parameter(torch.empty(64, 32))
        weight.grad = torch.empty(64, 32)
        optimizer = build_optimizer(Optimizer(name="Muon"), named_parameters={"a.weight": weight})
        with Products():
            optimizer.step()
    assert dtypes == {dtype}


class ConvertedElements(TorchDispatchMode):
    """Notes how many elements are converted at a time, and counts updates by torch's fused kernel."""

    def __init__(self):
        super().__init__()
        self.counts, self.updates = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "_foreach_copy_":
            self.counts.append(sum(x.numel() for x in args[0]))
        self.updates += name == "_fused_adamw_"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_gradients_in_bf16_are_converted_some_at_a_time_and_to_the_same_bits(implementation):
    sizes = [2**24 + 1, 2**22, 3, 2**24 - 2**22 - 3, 5, 7]
    values = torch.randn(max(sizes), generator=torch.Generator().manual_seed(0)).bfloat16()
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        weights = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
        for weight in weights:
            weight.grad_dtype = None
            weight.grad = values[: len(weight)].to(dtype, copy=True)
        named = {f"layers.{index}.weight": weight for index, weight in enumerate(weights)}
        with ConvertedElements() as converted:
            build_optimizer(Optimizer(implementation=implementation), named_parameters=named).step(factor=0.5)
        found[dtype] = weights
        pieces = [2**24 + 1, 2**24, 12]
        assert converted.counts == (pieces if dtype == torch.bfloat16 else [])
        if implementation == "fused":
            assert converted.updates == (len(pieces) if dtype == torch.bfloat16 else 1)
    for weight, expected in zip(*found.values(), strict=True):
        assert torch.equal(weight, expected)
        assert (weight != 1).any()
