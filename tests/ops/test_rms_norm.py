"""RMSNorm against torch's: the same bits forward, gradients as exact."""

import pytest
import torch
import torch.nn.functional as F

from torchtitan_clone.ops.rms_norm import RMSNorm
from torchtitan_clone.planner.memory_trace import MemoryTrace
from torchtitan_clone.torch_compat import fake_tensors

EPS = 1e-5


def example(size, *, dtype=torch.float32):
    torch.manual_seed(0)
    norm = RMSNorm(size, eps=EPS).to(dtype)
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    x = 3 * torch.randn(2, 9, 4, size)
    return norm, x.to(dtype).requires_grad_(), torch.randn(2, 9, 4, size).to(dtype)


@pytest.mark.parametrize("size", [1, 3, 64, 100, 768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_is_the_one_of_torch_to_the_bit(size, dtype):
    norm, x, _ = example(size, dtype=dtype)
    assert torch.equal(norm(x), F.rms_norm(x, (size,), norm.weight, EPS))


@pytest.mark.parametrize("size", [3, 100, 768])
def test_gradients_are_those_of_double_precision(size):
    norm, x, grad = example(size)
    exact = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    expected = torch.autograd.grad(F.rms_norm(exact[0], (size,), exact[1], EPS), exact, grad.double())
    for ours, theirs in zip(torch.autograd.grad(norm(x), (x, norm.weight), grad), expected, strict=True):
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


def test_compiled_it_has_the_same_gradients():
    norm, x, grad = example(64)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(x), (x, norm.weight), grad)
    torch.testing.assert_close(found, torch.autograd.grad(norm(x), (x, norm.weight), grad))


def test_simulated_it_allocates_what_the_kernel_of_a_gpu_does():
    """Results and a scale of each row; for the backward the gradients."""
    with fake_tensors(of_gpu=True), MemoryTrace() as trace:
        norm = RMSNorm(64, eps=EPS, dtype=torch.bfloat16)
        x = torch.empty(2, 9, 64, dtype=torch.bfloat16, requires_grad=True)
        start = len(trace.events)
        out = norm(x)
        kept = [event.size for event in trace.events[start:]]
        out.backward(torch.empty_like(out))
        sizes = [event.size for event in trace.events[start:] if event.size]
    assert kept == [2 * 9 * 4, 2 * 9 * 64 * 2]
    assert sorted(sizes[2:]) == [64 * 2, 2 * 9 * 64 * 2, 2 * 9 * 64 * 2]  # of the weight, the input and the result
