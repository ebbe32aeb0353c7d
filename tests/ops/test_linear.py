"""Linear layers, whoever multiplies on this processor."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from torchtitan_clone.models.spec import KEPT
from torchtitan_clone.ops.kernels import faster_product
from torchtitan_clone.ops.linear import Linear
from torchtitan_clone.torch_compat import TorchDispatchMode


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
