"""Attention in tiles of bfloat16 (cpu/attention.py): against products in float64; loops compute it without AMX."""

import pytest
import torch

from tests.cpu.test_attention import CASES, eager_kernel, quick_compiler, run_python, tokens_first, uses
from tests.ops.dense_attention import (
    assert_bits_do_not_depend_on_threads_or_on_neighbours,
    dense,
    distance,
    inputs,
    result_and_gradients,
)
from torchtitan_clone.cpu.attention import IS_FASTER_IN_EAGER, LibraryAttention
from torchtitan_clone.cpu.library import has_tiles, tile_library
from torchtitan_clone.cpu.torch_compat import HAS_AMX
from torchtitan_clone.models.attention import CoreAttention
from torchtitan_clone.ops.attention import use_kernels, visible_starts


def products_one_by_one(q, k, v):
    """Returns causal attention whose scores and probabilities are in bfloat16."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bnts,bsnh->btnh", scores.softmax(-1), v)


def low_heads(T, *, features=32, document_length=None):
    """Returns tensors of heads in bfloat16, whose softmaxes become narrower along the row, and documents."""
    *tensors, documents = inputs(T, document_length=document_length)
    q, k, v, grad = (x.repeat(1, 1, 1, features // 16) for x in tensors)
    q = q * torch.linspace(0.1, 4, T)[:, None, None]
    return *(x.bfloat16() for x in (q, k, v, grad)), documents


def in_tiles(q, k, v, grad, starts=None, ends=None):
    """Returns the result, its logarithms and the gradients."""
    kernel = LibraryAttention(tile_library(), torch.bfloat16)
    out, lse = kernel.attend(q, k, v, starts, ends)
    return [out, lse, *kernel.attend_backward(grad, q, k, v, starts, ends, out, lse)]


def starts_of(documents, T, **limits):
    return visible_starts(documents, like=torch.empty(2, T), window=limits.get("window"), chunk=limits.get("chunk"))


@pytest.mark.parametrize(
    ("case", "features"), [*((case, 32) for case in CASES), ("short documents", 96), ("two blocks of keys", 96)]
)
def test_results_and_gradients_round_less_than_those_of_products(case, features):
    T, limits = CASES[case]
    limits = dict(limits)
    *tensors, documents = low_heads(T, features=features, document_length=limits.pop("document_length", None))
    exact = result_and_gradients(lambda *x: dense(*x, documents, **limits), *(x.double() for x in tensors))
    usual = result_and_gradients(lambda *x: dense(*x, documents, **limits), *tensors)
    out, _, *gradients = in_tiles(*tensors, starts_of(documents, T, **limits))
    for found, other, right in zip((out, *gradients), usual, exact, strict=True):
        assert found.dtype == torch.bfloat16
        assert distance(found, right) < 1.05 * distance(other, right)


def test_causal_rows_round_less_than_products_one_by_one():
    *tensors, _ = low_heads(300, features=64)
    exact = result_and_gradients(lambda *x: dense(*x, None), *(x.double() for x in tensors))
    usual = result_and_gradients(products_one_by_one, *tensors)
    out, _, *gradients = in_tiles(*tensors)
    for found, other, right in zip((out, *gradients), usual, exact, strict=True):
        assert distance(found, right) < distance(other, right)


def test_parts_of_the_keys_merge_to_the_whole():
    q, k, v, grad, _ = low_heads(700, features=64)
    whole, lse, *gradients = in_tiles(q, k, v, grad)
    own = torch.arange(1, 701, dtype=torch.int32).expand(2, -1)
    first = [torch.zeros(2, 700, dtype=torch.int32), own.clamp(max=333).contiguous()]
    second = [torch.zeros(2, 700, dtype=torch.int32), (own - 333).clamp(min=0).contiguous()]
    kernel = LibraryAttention(tile_library(), torch.bfloat16)
    out, grads = 0, []
    for keys, ranges in ((slice(333), first), (slice(333, None), second)):
        part, part_lse = kernel.attend(q, k[:, keys], v[:, keys], *ranges)
        out = out + (part_lse - lse).exp().transpose(1, 2)[..., None] * part
        grads.append(kernel.attend_backward(grad, q, k[:, keys], v[:, keys], *ranges, whole, lse))
    assert distance(out, whole) < 4e-3
    (q_first, *kv_first), (q_second, *kv_second) = grads
    assert distance(q_first.float() + q_second, gradients[0]) < 5e-3
    for first_part, second_part, all_keys in zip(kv_first, kv_second, gradients[1:], strict=True):
        assert distance(torch.cat((first_part, second_part), 1), all_keys) < 5e-3


def test_tokens_may_be_before_rows_in_memory():
    *tensors, _ = low_heads(90)
    found = in_tiles(*map(tokens_first, tensors))
    assert all(map(torch.equal, found, in_tiles(*tensors)))
    assert [x.stride() for x in found if x.dim() == 4] == [tokens_first(x).stride() for x in (tensors[0], *tensors[:3])]


def test_queries_without_keys_are_zero():
    q, k, v, grad, _ = low_heads(70)
    none = torch.zeros(2, 70, dtype=torch.int32)
    out, lse, *gradients = in_tiles(q, k, v, grad, none, none)
    assert not any(x.any() for x in (out, *gradients))
    assert (lse == -1e30).all()


def test_bits_do_not_depend_on_threads_or_on_neighbours():
    *tensors, _ = low_heads(90)
    assert_bits_do_not_depend_on_threads_or_on_neighbours(in_tiles, *tensors)


def test_values_that_are_no_numbers_stay_visible():
    q, k, v, grad, _ = low_heads(40)
    k[:, 7, 0, 0] = torch.nan
    out, lse, *_ = in_tiles(q, k, v, grad)
    wrong = torch.zeros(2, 40, 8, dtype=torch.bool)
    wrong[:, 7:, :2] = True  # heads 0 and 1 share the first key
    assert torch.equal(out.isnan(), wrong[..., None].expand_as(out))
    assert torch.equal(lse.isnan(), wrong.transpose(1, 2))


def check_cases():
    for case in CASES:
        test_results_and_gradients_round_less_than_those_of_products(case, 32)


def test_narrower_vectors_compute_the_same(tmp_path):
    code = """
        from tests.cpu.test_tile_attention import *
        # Else torch's kernel of attention fails where there are AMX and narrow vectors.
        with torch.backends.mkldnn.flags(enabled=False): check_cases()
    """
    run_python(code, ATEN_CPU_CAPABILITY="default", **quick_compiler(tmp_path))


def test_compiled_blocks_take_no_break_of_the_graph():
    q, k, v, *_ = low_heads(30)
    assert uses(q, k, v) is (has_tiles() or not HAS_AMX)


def test_it_is_used_in_bfloat16_where_the_processor_has_tiles():
    with open("/proc/cpuinfo") as file:
        assert ("amx_tile" in file.read()) == HAS_AMX
    assert has_tiles() is HAS_AMX
    q, k, v, *_ = low_heads(30)
    trained = CoreAttention()
    use_kernels(trained)
    assert ("_attend_" in eager_kernel(trained, q, k, v)) is (has_tiles() or (IS_FASTER_IN_EAGER and not HAS_AMX))
    assert "_attend_" not in eager_kernel(trained, *(x[..., :24] for x in (q, k, v))) or not HAS_AMX
    with torch.no_grad():
        assert torch.equal(trained(q, k, v, None), CoreAttention()(q, k, v, None))
