"""Attention by compiled C++: against products in float64, for each kind of processor, and where it is used."""

import logging.handlers
import os
import subprocess
import sys

import pytest
import torch

from tests.ops.dense_attention import (
    assert_bits_do_not_depend_on_threads_or_on_neighbours,
    dense,
    distance,
    inputs,
    result_and_gradients,
)
from tests.support.harness import run_ranks
from tests.support.runs import options
from tests.support.trainers import open_trainer
from torchtitan_clone.cpu.attention import IS_FASTER_IN_EAGER, attend, attend_backward, attention_kernel
from torchtitan_clone.cpu.torch_compat import HAS_AMX
from torchtitan_clone.models.attention import CoreAttention
from torchtitan_clone.ops.attention import use_kernels, visible_starts
from torchtitan_clone.torch_compat import compiler_command, fake_tensors

CAPABILITY = torch.backends.cpu.get_cpu_capability()
OTHERS = {"AVX512": ["default", "avx2"], "AVX2": ["default"]}.get(CAPABILITY, [])
CASES = {
    "two tokens": (2, {}),
    "less than a block": (17, {}),
    "two blocks of keys": (600, {}),
    "short documents": (200, {"document_length": 9}),
    "long documents": (1200, {"document_length": 400}),
    "windows": (600, {"window": 37}),
    "chunks": (150, {"document_length": 60, "chunk": 16}),
}


def triple_heads(T, document_length=None):
    """Returns tensors of heads with 48 features, whose softmaxes become narrower along the row, and documents."""
    *tensors, documents = inputs(T, document_length=document_length)
    q, k, v, grad = (x.repeat(1, 1, 1, 3) for x in tensors)
    return q * torch.linspace(0.1, 4, T)[:, None, None], k, v, grad, documents


def distances(T, *, document_length=None, **limits):
    """Returns of result and gradients the distance from those in float64, after that of products in float32."""
    *tensors, documents = triple_heads(T, document_length)
    starts = visible_starts(documents, like=torch.empty(2, T), window=limits.get("window"), chunk=limits.get("chunk"))
    exact = result_and_gradients(lambda *x: dense(*x, documents, **limits), *(x.double() for x in tensors))
    usual = result_and_gradients(lambda *x: dense(*x, documents, **limits), *tensors)
    got = result_and_gradients(lambda *x: attend(*x, starts)[0], *tensors)
    return [(distance(a, c), distance(b, c)) for a, b, c in zip(usual, got, exact, strict=True)]


def check_case(case):
    T, options = CASES[case]
    for usual, got in distances(T, **options):
        assert got < 2 * usual + 1e-7


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_as_exact_as_those_of_products(case):
    check_case(case)


def test_sums_over_a_long_row_are_as_exact_as_those_of_torch():
    *tensors, _ = inputs(1500, document_length=None)
    exact = result_and_gradients(lambda *x: dense(*x, None), *(x.double() for x in tensors))
    usual = result_and_gradients(lambda *x: CoreAttention()(*x, None), *tensors)
    got = result_and_gradients(lambda *x: attend(*x, None)[0], *tensors)
    for found, other, right in zip(got, usual, exact, strict=True):
        assert distance(found, right) < 1.5 * distance(other, right)


def test_numbers_in_bfloat16_are_as_exact_as_those_of_torch():
    *tensors, _ = triple_heads(200)
    low = [x.bfloat16() for x in tensors]
    exact = result_and_gradients(lambda *x: dense(*x, None), *(x.double() for x in low))
    usual = result_and_gradients(lambda *x: CoreAttention()(*x, None), *low)
    got = result_and_gradients(lambda *x: attend(*x, None)[0], *low)
    for found, other, right in zip(got, usual, exact, strict=True):
        assert found.dtype == torch.bfloat16
        assert distance(found, right) < 1.01 * distance(other, right)


def run_python(code, **environment):
    """Runs lines of Python with these environment variables; returns what they print and log."""
    lines = ["from tests.cpu.test_attention import *", *map(str.strip, code.splitlines())]
    environment = {**os.environ, **environment}
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], check=False, capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def quick_compiler(folder, level="-O1"):
    """Returns environment variables of a user whose compiler takes less time, and whose cache is in this folder."""
    compiler = folder / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {compiler_command()} "$@" {level}\n')
    compiler.chmod(0o755)
    return {"XDG_CACHE_HOME": str(folder), "CXX": str(compiler)}


@pytest.mark.parametrize("capability", OTHERS)
def test_narrower_vectors_compute_the_same(capability, tmp_path):
    code = """
        from tests.cpu.test_products import SHAPES, check_product
        [check_product(shape, transposed) for shape in SHAPES for transposed in ((), (0, 1))]
        [check_case(case) for case in CASES]; print(CAPABILITY)
    """
    user = {"ATEN_CPU_CAPABILITY": capability, **quick_compiler(tmp_path)}
    assert run_python(code, **user).strip().lower() == capability
    assert list(tmp_path.glob("torchtitan_clone/cpp/*/*.so"))


def test_bits_do_not_depend_on_threads_or_on_neighbours():
    *tensors, _ = triple_heads(90)
    assert_bits_do_not_depend_on_threads_or_on_neighbours(
        lambda *x: result_and_gradients(lambda *y: attend(*y, None)[0], *x), *tensors
    )


def test_values_that_are_no_numbers_stay_visible():
    q, k, v, _, _ = triple_heads(40)
    k[:, 7, 0, 0] = torch.nan
    out, lse = attend(q, k, v, None)
    wrong = torch.zeros(2, 40, 8, dtype=torch.bool)
    wrong[:, 7:, :2] = True  # heads 0 and 1 share the first key
    assert torch.equal(out.isnan(), wrong[..., None].expand_as(out))
    assert torch.equal(lse.isnan(), wrong.transpose(1, 2))


def tokens_first(x):
    """Returns a tensor of heads whose tokens are in memory before its rows."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def test_tokens_may_be_before_rows_in_memory():
    *tensors, _ = triple_heads(90)
    wide = [torch.cat((x, x), dim=2)[:, :, : x.shape[2]] for x in tensors]
    far = [torch.stack((x, x), dim=-1)[..., 0] for x in tensors]
    right = result_and_gradients(lambda *x: attend(*x, None)[0], *tensors)
    for others in (map(tokens_first, tensors), wide, map(tokens_first, wide), far):
        *qkv, grad = others
        out, lse = attend(*qkv, None)
        found = [out, *attend_backward(grad, *qkv, None, None, out, lse)]
        assert all(map(torch.equal, found, right))
        dense = [torch.empty_like(x) for x in (qkv[0], *qkv)]
        assert [x.stride() for x in found] == [x.stride() for x in dense]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_attention_accumulates_over_parts_of_the_keys(order):
    """Queries of the first keys see none of the second ones."""
    q, k, v, grad, _ = triple_heads(700)
    ends = torch.arange(1, 701, dtype=torch.int32).expand(2, -1)
    parts = [(slice(333), ends.clamp(max=333)), (slice(333, None), (ends - 333).clamp(min=0))]
    kernel, kv_grads = attention_kernel(q), [torch.empty_like(k), torch.empty_like(v)]
    attention = torch.zeros(q.shape), torch.full((2, 8, 700), -torch.inf)  # over no keys
    q_grad = None
    for keys, of_part in (parts[index] for index in order):
        attention = kernel.attend(q, k[:, keys], v[:, keys], None, of_part, accumulate_into=attention)
    for keys, of_part in (parts[index] for index in order):
        written = [x[:, keys] for x in kv_grads]
        qkv = (q, k[:, keys], v[:, keys])
        q_grad, *_ = kernel.attend_backward(grad, *qkv, None, of_part, *attention, q_grad=q_grad, kv_grads=written)
    out, lse = attention
    exact = result_and_gradients(lambda *x: dense(*x, None), *(x.double() for x in (q, k, v, grad)))
    whole = result_and_gradients(lambda *x: attend(*x, None)[0], q, k, v, grad)
    for found, at_once, right in zip((out, q_grad, *kv_grads), whole, exact, strict=True):
        assert distance(found, right) < 1.2 * distance(at_once, right)
    assert distance(lse, attend(q, k, v, None)[1]) < 1e-7


WRONG = ["dtype", "head size", "heads", "values", "keys", "starts", "dtype of starts", "ends", "end", "start"]


@pytest.mark.parametrize("change", WRONG)
def test_tensors_that_it_does_not_take_are_an_error(change):
    q, k, v, *_ = triple_heads(8)
    starts = torch.zeros(2, 8, dtype=torch.int32)
    tensors = {
        "dtype": (q, k.double(), v, None),
        "head size": (q[..., :3], k[..., :3], v[..., :3], None),
        "heads": (q[:, :, :7], k, v, None),
        "values": (q, k, v[..., :16], None),
        "keys": (q, k[:, :7], v[:, :7], None),
        "starts": (q, k, v, starts[:, :7]),
        "dtype of starts": (q, k, v, starts.long()),
        "ends": (q, k[:, :7], v[:, :7], starts, starts[:, :7]),
        "end": (q, k[:, :7], v[:, :7], starts, starts + 8),
        "start": (q, k, v, starts - 1),
    }[change]
    with pytest.raises(ValueError, match=r"attention by C\+\+.*(does not take|has the bound (-1|8); 0 to [78] exist)"):
        attend(*tensors)


def test_the_operator_can_be_compiled():
    *qkv, _, documents = triple_heads(40, document_length=10)
    starts = visible_starts(documents, like=torch.empty(2, 40), window=None, chunk=None)
    for other in (None, starts):
        torch.library.opcheck(attend, [*(x.requires_grad_() for x in qkv), other])


def operators_of(*tensors, mask=None, sinks=None):
    """Returns the operators of compiled attention."""
    found = []

    def record(module, _inputs):
        found.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module

    torch.compile(CoreAttention(), backend=record, fullgraph=True)(*tensors, mask, sinks)
    return found


def uses(*tensors, **options):
    return "torchtitan_clone.attend.default" in operators_of(*tensors, **options)


def test_it_computes_attention_of_compiled_blocks():
    q, k, v, _, documents = triple_heads(30, document_length=10)
    starts = visible_starts(documents, like=torch.empty(2, 30), window=None, chunk=None)
    assert uses(q, k, v)
    assert uses(q, k, v, mask=starts)
    assert not uses(q, k, v, sinks=torch.zeros(8))
    assert uses(*(x.bfloat16() for x in (q, k, v))) is not HAS_AMX
    assert not uses(*(x.half() for x in (q, k, v)))
    assert not uses(*(x[..., :18] for x in (q, k, v)))


def eager_kernel(core, *tensors, mask=None):
    return type(core(*(x.requires_grad_() for x in tensors), mask).grad_fn).__name__


def test_eager_training_uses_it_where_it_is_faster():
    q, k, v, _, documents = triple_heads(30, document_length=10)
    starts = visible_starts(documents, like=torch.empty(2, 30), window=None, chunk=None)
    alone, trained = CoreAttention(), CoreAttention()
    use_kernels(trained)
    for mask in (None, starts):
        name = "_attend_" if IS_FASTER_IN_EAGER else eager_kernel(alone, q, k, v, mask=mask)
        assert name in eager_kernel(trained, q, k, v, mask=mask)
        assert "_attend_" not in eager_kernel(alone, q, k, v, mask=mask)
        with torch.no_grad():
            assert torch.equal(trained(q, k, v, mask), alone(q, k, v, mask))
    with fake_tensors():
        fake = [torch.empty(2, 30, 8, 48) for _ in range(3)]
        assert "_attend_" not in eager_kernel(trained, *fake)


def test_attention_of_a_run_may_use_it(corpus, tmp_path):
    with open_trainer(options(corpus, tmp_path)) as trainer:
        cores = [x for x in trainer.engine.model_parts[0].modules() if isinstance(x, CoreAttention)]
    assert cores
    names = {core.choose(torch.empty(2, 8, 4, 32), None).name for core in cores}
    assert names == {"cpu" if IS_FASTER_IN_EAGER else "torch"}


def attention_without_cpp():
    """Checks that eager, compiled and trained blocks compute the same; returns what the package logs meanwhile."""
    log = logging.handlers.BufferingHandler(100)
    logging.getLogger("torchtitan_clone").addHandler(log)
    q, k, v, grad, _ = triple_heads(30)
    trained = CoreAttention()
    use_kernels(trained)
    cores = (CoreAttention(), torch.compile(CoreAttention(), backend="aot_eager", fullgraph=True), trained)
    results = [result_and_gradients(lambda *x, core=core: core(*x, None), q, k, v, grad) for core in cores]
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(*results, strict=True))
    return [record.getMessage() for record in log.buffer]


def test_torch_computes_attention_where_there_is_no_compiler(tmp_path):
    for compiler, reason in (
        ("no-such-compiler", "no-such-compiler is not on $PATH"),
        ("false", "false ended with status 1"),
    ):
        user = {"CXX": compiler, "XDG_CACHE_HOME": str(tmp_path)}
        (messages,) = run_ranks(attention_without_cpp, 1, env=user)
        (found,) = [message for message in messages if "C++ was not compiled" in message]
        assert reason in found
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
