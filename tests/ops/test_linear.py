"""Linear layers by what this processor is given, and the products of oneDNN and of C++ on any."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from torchtitan_clone.models.spec import KEPT
from torchtitan_clone.ops.linear import Linear, has_faster_product, multiply_by_cpp
from torchtitan_clone.torch_compat import TorchDispatchMode, onednn_linear

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")


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


@needs_onednn
@pytest.mark.parametrize("transposed", [(), (0,), (1,), (0, 1)])
def test_onednn_multiplies_transposed_views(transposed):
    matrices = [torch.randn(70, 33), torch.randn(50, 33)]
    for index in transposed:
        matrices[index] = matrices[index].T.contiguous().T
    x, weight = matrices
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(onednn_linear(x, weight).double(), expected, rtol=1e-5, atol=1e-5)


SHAPES = [(70, 33, 50), (1, 1, 1), (7, 1_100, 1_030), (200, 513, 17)]


@pytest.mark.parametrize("transposed", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_cpp_multiplies_all_shapes_and_views(shape, transposed):
    rows, depth, columns = shape
    matrices = [torch.randn(rows, depth), torch.randn(columns, depth)]
    for index in transposed:
        matrices[index] = matrices[index].T.contiguous().T
    x, weight = matrices
    exact = x.double() @ weight.double().T
    found = multiply_by_cpp(x, weight)
    assert (found.double() - exact).norm() <= 1e-6 * exact.norm()
    row, column = rows // 2, columns // 2
    assert torch.equal(multiply_by_cpp(x[row:], weight[column:]), found[row:, column:])


def test_cpp_keeps_nan_and_takes_empty_matrices():
    x = torch.randn(9, 20)
    x[4, 3] = torch.nan
    assert torch.equal(multiply_by_cpp(x, torch.randn(30, 20)).isnan(), x.isnan().any(1)[:, None].expand(9, 30))
    assert multiply_by_cpp(torch.empty(0, 20), torch.randn(30, 20)).shape == (0, 30)
    assert torch.equal(multiply_by_cpp(torch.empty(2, 0), torch.empty(3, 0)), torch.zeros(2, 3))


@pytest.mark.parametrize("weight", [torch.zeros(3, 4), torch.zeros(3, 5).double(), torch.zeros(5)])
def test_cpp_rejects_what_it_would_misread(weight):
    with pytest.raises(ValueError, match="does not take"):
        multiply_by_cpp(torch.zeros(2, 5), weight)


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
    if dtype != torch.float32:
        assert torch.equal(layer(x), F.linear(x, layer.weight))


def test_selective_checkpointing_knows_the_product():
    layer, x, _ = example()
    with Operators() as operators:
        layer(x)
    products = [func for func in operators.called if func in KEPT.alternating]
    assert len(products) == 1
    assert (products[0] != torch.ops.aten.mm.default) == has_faster_product(x, layer.weight)


@needs_onednn
def test_the_processor_decides_which_library_multiplies():
    cpuinfo = Path("/proc/cpuinfo")
    of_amd = {"AVX2": "faster_linear", "AVX512": "_linear_pointwise"} if torch.backends.mkl.is_available() else {}
    is_amd = cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text()
    expected = of_amd.get(torch.backends.cpu.get_cpu_capability(), "mm") if is_amd else "mm"
    layer, x, _ = example(rows=(3,))
    with Operators() as operators:
        layer(x)
    assert expected in [func.overloadpacket.__name__ for func in operators.called]


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
    assert list(map(len, called)) == [1, 1] if has_faster_product(x, layer.weight) else [0, 0]
