"""Linear layers by what this processor is given, and the products of C++ on any."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code

from torchtitan_clone.models.spec import KEPT
from torchtitan_clone.ops.linear import (
    MIN_WEIGHTS_FOR_CPP_GRAD,
    MIN_WEIGHTS_FOR_TILES,
    Linear,
    add_product_,
    faster_linear,
    has_faster_product,
)
from torchtitan_clone.torch_compat import OUT_TAGS, TorchDispatchMode


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


SHAPES = [(70, 33, 50), (1, 1, 1), (7, 1_100, 1_030), (200, 513, 17)]
DTYPES = [torch.float32, torch.bfloat16]
EXACT = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


def check_product(shape, transposed, dtype):
    """Compares C++ with double precision; `transposed` are the indices of matrices that are transposed views."""
    rows, depth, columns = shape
    matrices = [torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype)]
    for index in transposed:
        matrices[index] = matrices[index].T.contiguous().T
    x, weight = matrices
    exact = x.double() @ weight.double().T
    found = faster_linear(x, weight)
    assert found.dtype == dtype
    assert (found.double() - exact).norm() <= EXACT[dtype] * exact.norm()
    row, column = rows // 2, columns // 2
    assert torch.equal(faster_linear(x[row:], weight[column:]), found[row:, column:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("shape", [*SHAPES, (64, 96, 64)])
def test_cpp_multiplies_all_shapes_and_views(shape, transposed, dtype):
    check_product(shape, transposed, dtype)


def test_cpp_multiplies_in_bfloat16_what_is_far_apart_and_sums_parts():
    x, weight = torch.randn(40, 8_800).bfloat16(), torch.randn(70, 8_800).bfloat16()
    x, weight = x[::2, ::2], weight[:, ::2]
    exact = x.double() @ weight.double().T
    total = torch.zeros(20, 70)
    add_product_(total, x, weight)
    assert (total.double() - exact).norm() <= 1e-6 * exact.norm()
    assert torch.equal(faster_linear(x, weight), total.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_cpp_adds_a_product_and_writes_one_into_a_given_result(shape, dtype):
    rows, depth, columns = shape
    x, weight = torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype)
    total, out = torch.randn(rows, columns), torch.empty(rows, columns, dtype=dtype)
    exact = total.double() + x.double() @ weight.double().T
    terms = total.abs() + x.float().abs() @ weight.float().abs().T
    add_product_(total, x, weight)
    assert (total.double() - exact).norm() <= 1e-6 * terms.norm()
    assert torch.ops.torchtitan_clone.faster_linear.out(x, weight, out=out) is out
    assert torch.equal(out, faster_linear(x, weight))


@pytest.mark.parametrize(("dtype", "times"), [(torch.float32, 400), (torch.bfloat16, 10)], ids=str)
def test_bits_of_a_product_do_not_depend_on_threads(dtype, times):
    """Of several blocks of columns, of which a thread packs the next one while others multiply."""
    torch.manual_seed(0)
    x, weight, threads = torch.randn(150, 96).to(dtype), torch.randn(4_000, 96).to(dtype), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = faster_linear(x, weight)
        torch.set_num_threads(4)
        assert all(torch.equal(faster_linear(x, weight), expected) for _ in range(times))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpp_keeps_nan_and_takes_empty_matrices(dtype):
    def empty(*shape):
        return torch.empty(shape, dtype=dtype)

    x, weight = torch.randn(9, 20).to(dtype), torch.randn(30, 20).to(dtype)
    x[4, 3] = torch.nan
    assert torch.equal(faster_linear(x, weight).isnan(), x.isnan().any(1)[:, None].expand(9, 30))
    assert faster_linear(empty(0, 20), weight).shape == (0, 30)
    assert torch.equal(faster_linear(empty(2, 0), empty(3, 0)), torch.zeros(2, 3, dtype=dtype))
    total = torch.ones(2, 3)
    add_product_(total, empty(2, 0), empty(3, 0))
    assert torch.equal(total, torch.ones(2, 3))


@pytest.mark.parametrize(
    "weight", [torch.zeros(3, 4), torch.zeros(3, 5).double(), torch.zeros(3, 5).bfloat16(), torch.zeros(5)]
)
def test_cpp_rejects_what_it_would_misread(weight):
    with pytest.raises(ValueError, match="does not take"):
        faster_linear(torch.zeros(2, 5), weight)
    with pytest.raises(ValueError, match="does not take"):
        add_product_(torch.zeros(2, 3), torch.zeros(2, 5), weight)
    with pytest.raises(ValueError, match="contiguous result"):
        add_product_(torch.zeros(3, 2).T, torch.zeros(2, 5), torch.zeros(3, 5))
    low = [torch.zeros(*shape).bfloat16() for shape in ((2, 3), (2, 5), (3, 5))]
    with pytest.raises(ValueError, match="does not take"):
        add_product_(*low)  # the total must be in fp32


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


def test_gradients_of_large_weights_are_products_of_cpp_where_it_is_faster():
    torch.manual_seed(0)
    layer = Linear(MIN_WEIGHTS_FOR_CPP_GRAD // 256, 256, bias=False)
    x, grad = torch.randn(9, layer.in_features), torch.randn(9, 256)
    out = layer(x)
    with Operators() as operators:
        out.backward(grad)
    names = [func.overloadpacket.__name__ for func in operators.called]
    assert ("faster_linear" in names) == has_faster_product(x, layer.weight)
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
    if not has_faster_product(x, layer.weight):
        assert torch.equal(layer(x), F.linear(x, layer.weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_selective_checkpointing_knows_the_product(dtype):
    layer, x, _ = example(dtype=dtype)
    with Operators() as operators:
        layer(x)
    products = [func for func in operators.called if func in KEPT.alternating]
    assert len(products) == 1
    assert (products[0] != torch.ops.aten.mm.default) == has_faster_product(x, layer.weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_processor_decides_which_library_multiplies(dtype):
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    has_vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    is_faster = "AuthenticAMD" in cpuinfo and has_vectors if dtype == torch.float32 else "amx_bf16" in cpuinfo
    expected = "faster_linear" if is_faster else "mm"
    layer, x = Linear(512, MIN_WEIGHTS_FOR_TILES // 512, bias=False).to(dtype), torch.ones(3, 512, dtype=dtype)
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


@pytest.mark.skipif(not OUT_TAGS, reason="this torch knows no overloads with a given result")
def test_inductor_computes_an_input_once_and_plans_the_memory_of_results():
    def products(x, first, second):
        doubled = x * 2
        return faster_linear(doubled, first) + faster_linear(doubled, second).exp()

    x, first, second = torch.randn(6, 24), torch.randn(40, 24), torch.randn(40, 24)
    # A cache does not notice when the operator loses a tag.
    compiled = torch.compile(products, fullgraph=True, options={"fx_graph_cache": False})
    found, (code,) = run_and_get_code(compiled, x, first, second)
    torch.testing.assert_close(found, products(x, first, second))
    assert "faster_linear.default(" not in code
    inputs = re.findall(r"faster_linear\.out\((\w+), ", code)
    assert len(inputs) == 2
    assert inputs[0] == inputs[1]
