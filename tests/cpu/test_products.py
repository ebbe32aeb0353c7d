"""Products of C++ on any processor, and which of this one are computed by it."""

import re
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from tests.ops.test_layers import Operators
from torchtitan_clone.cpu.products import MIN_PRODUCTS, add_product_, faster_linear
from torchtitan_clone.ops.layers import Linear
from torchtitan_clone.torch_compat import OUT_TAGS

SHAPES = [(70, 33, 50), (1, 1, 1), (7, 1_100, 1_030), (200, 513, 17)]


@pytest.mark.parametrize("transposed", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("shape", [*SHAPES, (64, 96, 64)])
def test_cpp_multiplies_all_shapes_and_views(shape, transposed):
    check_product(shape, transposed)


def check_product(shape, transposed):
    """Compares C++ with double precision; `transposed` are the indices of matrices that are transposed views."""
    rows, depth, columns = shape
    matrices = [torch.randn(rows, depth), torch.randn(columns, depth)]
    for index in transposed:
        matrices[index] = matrices[index].T.contiguous().T
    x, weight = matrices
    exact = x.double() @ weight.double().T
    found = faster_linear(x, weight)
    assert (found.double() - exact).norm() <= 1e-6 * exact.norm()
    row, column = rows // 2, columns // 2
    assert torch.equal(faster_linear(x[row:], weight[column:]), found[row:, column:])


def test_cpp_multiplies_what_is_far_apart():
    x, weight = torch.randn(40, 8_800), torch.randn(70, 8_800)
    x, weight = x[::2, ::2], weight[:, ::2]
    exact = x.double() @ weight.double().T
    total = torch.zeros(20, 70)
    add_product_(total, x, weight)
    assert (total.double() - exact).norm() <= 1e-6 * exact.norm()
    assert torch.equal(faster_linear(x, weight), total)


@pytest.mark.parametrize("shape", SHAPES)
def test_cpp_adds_a_product_and_writes_one_into_a_given_result(shape):
    rows, depth, columns = shape
    x, weight = torch.randn(rows, depth), torch.randn(columns, depth)
    total, out = torch.randn(rows, columns), torch.empty(rows, columns)
    exact = total.double() + x.double() @ weight.double().T
    terms = total.abs() + x.float().abs() @ weight.float().abs().T
    add_product_(total, x, weight)
    assert (total.double() - exact).norm() <= 1e-6 * terms.norm()
    assert torch.ops.torchtitan_clone.faster_linear.out(x, weight, out=out) is out
    assert torch.equal(out, faster_linear(x, weight))


def test_bits_of_a_product_do_not_depend_on_threads():
    """Of several blocks of columns, of which a thread packs the next one while others multiply."""
    torch.manual_seed(0)
    x, weight, threads = torch.randn(150, 96), torch.randn(4_000, 96), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = faster_linear(x, weight)
        torch.set_num_threads(4)
        assert all(torch.equal(faster_linear(x, weight), expected) for _ in range(400))
    finally:
        torch.set_num_threads(threads)


def test_cpp_keeps_nan_and_takes_empty_matrices():
    x, weight = torch.randn(9, 20), torch.randn(30, 20)
    x[4, 3] = torch.nan
    assert torch.equal(faster_linear(x, weight).isnan(), x.isnan().any(1)[:, None].expand(9, 30))
    assert faster_linear(torch.empty(0, 20), weight).shape == (0, 30)
    assert torch.equal(faster_linear(torch.empty(2, 0), torch.empty(3, 0)), torch.zeros(2, 3))
    total = torch.ones(2, 3)
    add_product_(total, torch.empty(2, 0), torch.empty(3, 0))
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


def test_the_processor_decides_which_library_multiplies():
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    has_vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    expected = "faster_linear" if "AuthenticAMD" in cpuinfo and has_vectors else "mm"
    layer, rows = Linear(512, 256, bias=False), MIN_PRODUCTS // (512 * 256)
    assert expected in operators_of(layer, torch.ones(rows, 512))
    assert "mm" in operators_of(layer, torch.ones(rows - 1, 512))  # takes less time than the call of C++
    assert "mm" in operators_of(layer.bfloat16(), torch.ones(rows, 512, dtype=torch.bfloat16))


def operators_of(layer, x):
    with Operators() as operators:
        layer(x)
    return [func.overloadpacket.__name__ for func in operators.called]


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
