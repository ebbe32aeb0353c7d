"""Linear layers, whoever multiplies on this processor; RMSNorm against torch's; embeddings in bfloat16."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from torchtitan_clone.models.spec import KEPT
from torchtitan_clone.ops.layers import Embedding, Linear, RMSNorm, ZeroCenteredRMSNorm, faster_product
from torchtitan_clone.planner.memory_trace import MemoryTrace
from torchtitan_clone.torch_compat import TorchDispatchMode, fake_tensors


def example(*, bias=False, dtype=torch.float32, rows=(3, 5)):
    torch.manual_seed(0)
    layer = Linear(24, 40, bias=bias).to(dtype)
    return layer, torch.randn(*rows, 24).to(dtype).requires_grad_(), torch.randn(*rows, 40).to(dtype)


class Operators(TorchDispatchMode):
    """Notes what is called."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.append(func)
        return func(*args, **(kwargs or {}))


DTYPES = [torch.float32, torch.bfloat16]
MIN_WEIGHTS = 2**18
"""Of a gradient that the kernels compute."""


@pytest.mark.parametrize("rows", [(3, 5), ()])
@pytest.mark.parametrize("bias", [False, True])
def test_value_and_gradients_are_those_of_double_precision(bias, rows):
    layer, x, grad = example(bias=bias, rows=rows)
    exact, exact_x = example(bias=bias)[0].double(), x.detach().double().requires_grad_()
    out, expected = layer(x), exact(exact_x)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(out, [x, *layer.parameters()], grad)
    exact_grads = torch.autograd.grad(expected, [exact_x, *exact.parameters()], grad.double())
    for ours, theirs in zip(found, exact_grads, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_gradients_of_large_weights_are_products_of_kernels_where_they_are_faster():
    torch.manual_seed(0)
    layer = Linear(MIN_WEIGHTS // 256, 256, bias=False)
    x, grad = torch.randn(9, layer.in_features), torch.randn(9, 256)
    out = layer(x)
    with Operators() as operators:
        out.backward(grad)
    names = [func.overloadpacket.__name__ for func in operators.called]
    assert ("faster_linear" in names) == (faster_product(x, layer.weight) is not None)
    exact = grad.double().T @ x.double()
    assert (layer.weight.grad.double() - exact).norm() <= 1e-6 * exact.norm()


def test_frozen_weights_and_inputs_get_no_gradients():
    layer, x, grad = example()
    layer.weight.requires_grad_(False)
    layer(x).backward(grad)
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, grad @ layer.weight)
    layer, x, grad = example()
    layer(x.detach()).backward(grad)
    torch.testing.assert_close(layer.weight.grad, torch.einsum("bto,bti->oi", grad, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_without_gradients_it_is_the_linear_of_torch(dtype):
    layer, x, _ = example(dtype=dtype)
    with torch.no_grad():
        assert torch.equal(layer(x), F.linear(x, layer.weight))
    if faster_product(x, layer.weight) is None:
        assert torch.equal(layer(x), F.linear(x, layer.weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_selective_checkpointing_knows_the_product(dtype):
    layer, x, _ = example(dtype=dtype)
    with Operators() as operators:
        layer(x)
    products = [func for func in operators.called if func in KEPT.alternating]
    assert len(products) == 1
    assert (products[0] != torch.ops.aten.mm.default) == (faster_product(x, layer.weight) is not None)


def test_compiled_it_has_the_same_gradients():
    layer, x, grad = example()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(x), [x, layer.weight], grad)
    torch.testing.assert_close(found, torch.autograd.grad(layer(x), [x, layer.weight], grad))


def test_compiled_both_directions_call_the_same_library():
    layer, x, grad = example()
    called = []

    def note(graph, _inputs):
        called.append([str(node.target) for node in graph.graph.nodes if "faster_linear" in str(node.target)])
        return make_boxed_func(graph.forward)

    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=note), fullgraph=True)
    compiled(x).backward(grad)
    assert list(map(len, called)) == [1, 1] if faster_product(x, layer.weight) else [0, 0]


EPS = 1e-5


def norm_example(size, *, dtype=torch.float32):
    torch.manual_seed(0)
    norm = RMSNorm(size, eps=EPS).to(dtype)
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    x = 3 * torch.randn(2, 9, 4, size)
    return norm, x.to(dtype).requires_grad_(), torch.randn(2, 9, 4, size).to(dtype)


@pytest.mark.parametrize("size", [1, 3, 64, 100, 768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_value_of_a_norm_is_the_one_of_torch_to_the_bit(size, dtype):
    norm, x, _ = norm_example(size, dtype=dtype)
    assert torch.equal(norm(x), F.rms_norm(x, (size,), norm.weight, EPS))


@pytest.mark.parametrize("size", [3, 100, 768])
def test_gradients_of_a_norm_are_those_of_double_precision(size):
    norm, x, grad = norm_example(size)
    exact = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    expected = torch.autograd.grad(F.rms_norm(exact[0], (size,), exact[1], EPS), exact, grad.double())
    for ours, theirs in zip(torch.autograd.grad(norm(x), (x, norm.weight), grad), expected, strict=True):
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


def test_a_compiled_norm_has_the_same_gradients():
    norm, x, grad = norm_example(64)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(x), (x, norm.weight), grad)
    torch.testing.assert_close(found, torch.autograd.grad(norm(x), (x, norm.weight), grad))


def test_a_simulated_norm_allocates_what_the_kernel_of_a_gpu_does():
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


def test_gradients_of_frequent_tokens_in_bfloat16_are_those_of_float32():
    """A total in bfloat16 stops growing at 256 times what is added."""
    embedding = Embedding(8, 16).to(torch.bfloat16)
    tokens = torch.zeros(4096, dtype=torch.int64)
    out = embedding(tokens)
    assert torch.equal(out, embedding.weight[tokens])
    out.backward(torch.ones_like(out))
    assert embedding.weight.grad[0].tolist() == [4096.0] * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_centered_norm_multiplies_by_one_more_than_its_weight(dtype):
    torch.manual_seed(0)
    norm = ZeroCenteredRMSNorm(64, eps=1e-6)
    assert not norm.weight.any()
    torch.nn.init.normal_(norm.weight, std=0.3)
    x = torch.randn(5, 64).to(dtype)
    exact = F.rms_norm(x.double(), (64,), eps=1e-6) * (1.0 + norm.weight.to(dtype).double())
    torch.testing.assert_close(norm.to(dtype)(x), exact.to(dtype))
