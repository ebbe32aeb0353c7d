"""Tests of ops/delta_rule.py: the gated delta rule in chunks equals the one token by token in fp64."""

import resource

import pytest
import torch

from tests.ops.dense_attention import distance
from tests.ops.recurrences import recurrence
from torchtitan_clone.ops import delta_rule
from torchtitan_clone.ops.attention import document_starts
from torchtitan_clone.ops.delta_rule import gated_delta_rule


def inputs(B=2, T=150, H=2, N=2, K=16, V=12, *, fastest=1.0, dtype=torch.float32, by_channel=False):
    """Returns q, k, v, decays down to exp(-fastest) of every second token, of heads or dimensions of keys, and beta."""
    torch.manual_seed(T)
    q, k, v = (torch.randn(B, T, heads, size) for heads, size in ((H, K), (H, K), (N, V)))
    shape = (B, T, N, K) if by_channel else (B, T, N)
    decay = -fastest * torch.rand(shape) * (torch.rand(shape) < 0.5)
    return [x.to(dtype) for x in (q, k, v, decay, torch.rand(B, T, N))]


def starts_of(T, *, share, B=2, begins_before=False):
    """Returns the starts of documents that begin at a share of the tokens."""
    starts = document_starts((torch.rand(B, T) < share).int().cumsum(1))
    return torch.where(starts == 0, -3, starts) if begins_before else starts


def results(function, tensors, starts, state, **options):
    """Returns out, the last state, and the gradients of a random function of both."""
    leaves = [x.detach().clone().requires_grad_() for x in (*tensors, state)]
    out, last, *_ = function(*leaves[:5], starts, leaves[5], **options)
    random = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=random).to(x.dtype) for x in (out, last)]
    return out, last, *torch.autograd.grad([out, last], leaves, grads)


def assert_equal(tensors, *, starts=None, chunk):
    B, N, K, V = len(tensors[2]), tensors[2].shape[2], tensors[1].shape[3], tensors[2].shape[3]
    state = torch.randn(B, N, K, V).to(tensors[2].dtype)
    got = results(gated_delta_rule, tensors, starts, state, chunk=chunk)
    right = results(recurrence, [x.double() for x in tensors], starts, state.double())
    assert all(bool(x.isfinite().all()) for x in got)
    limits = (1e-6, 1e-6, *[1e-5] * 6) if tensors[2].dtype == torch.float32 else [1e-13] * 8
    names = ("out", "state", "q", "k", "v", "g", "beta", "first")
    for name, x, y, limit in zip(names, got, right, limits, strict=True):
        assert distance(x, y) < limit or (x - y).abs().max() < limit / 10, name  # where it is zero


by_channel = pytest.mark.parametrize("by_channel", [False, True])


@by_channel
@pytest.mark.parametrize("chunk", [1, 16, 64])
@pytest.mark.parametrize("T", [1, 16, 63, 150])
def test_chunks_equal_the_recurrence(T, chunk, by_channel):
    assert_equal(inputs(T=T, by_channel=by_channel), chunk=chunk)


@by_channel
@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("begins_before", [False, True])
def test_documents_begin_anywhere_in_a_chunk(share, chunk, begins_before, by_channel):
    tensors = inputs(by_channel=by_channel)
    assert_equal(tensors, starts=starts_of(150, share=share, begins_before=begins_before), chunk=chunk)


@by_channel
@pytest.mark.parametrize("chunk", [16, 64])
def test_value_heads_share_a_key_head(chunk, by_channel):
    assert_equal(inputs(N=6, by_channel=by_channel), starts=starts_of(150, share=0.05), chunk=chunk)


@by_channel
@pytest.mark.parametrize("fastest", [60.0, 1e4])
def test_fast_decays_do_not_overflow(fastest, by_channel):
    assert_equal(inputs(fastest=fastest, by_channel=by_channel), chunk=64)


def test_equal_decays_of_dimensions_of_keys_are_that_of_a_head():
    q, k, v, decay, beta = inputs()
    starts = starts_of(150, share=0.05)
    out, last, _ = gated_delta_rule(q, k, v, decay[..., None].expand(k.shape), beta, starts)
    right, end, _ = gated_delta_rule(q, k, v, decay, beta, starts)
    assert distance(out, right) < 1e-6
    assert distance(last, end) < 1e-6


def test_what_has_decayed_is_zero():
    """Products below 2^-126 would slow a CPU down."""
    q, k, v, _, beta = inputs(T=192)
    for rate in (0.45, 1.5):  # of a state, and within a chunk
        tensors = [q, k, v * 0, torch.full((2, 192, 2), -rate), beta]
        chunks = delta_rule._prepare(tensors, None, span=slice(192), chunk=64)
        state = gated_delta_rule(*tensors, None, torch.eye(16, 12).expand(2, 2, 16, 12), 64)[1]
        for x in (*vars(chunks.decay).values(), chunks.inverse, state):
            assert not ((x != 0) & (x.abs() < 2.0**-63)).any()


def test_chunks_of_several_groups_equal_the_recurrence():
    tensors = inputs(T=300, H=8, N=16, K=64, V=4)
    assert [len(range(x.start, x.stop)) for x in delta_rule._spans(tensors, 64)] == [128, 128, 64]
    assert_equal(tensors, starts=starts_of(300, share=0.01, begins_before=True), chunk=64)


@by_channel
def test_fp64_stays_fp64(by_channel):
    assert_equal(inputs(dtype=torch.float64, by_channel=by_channel), starts=starts_of(150, share=0.05), chunk=16)


def test_equal_keys_that_are_written_over_and_over_stay_exact():
    """Powers of M grow without bound here; its inverse does not."""
    q, k, v, decay, beta = inputs()
    assert_equal([q, k[:, :1].expand_as(k), v, decay * 0, torch.ones_like(beta)], chunk=64)


@by_channel
def test_states_may_change_their_sign(by_channel):
    """Where beta is up to 2."""
    q, k, v, decay, beta = inputs(by_channel=by_channel)
    assert_equal([q, k, v, decay, 2 * beta], starts=starts_of(150, share=0.05), chunk=64)


def test_a_packed_document_is_the_same_alone():
    """To the rounding of its place in a chunk; none of its gradients reach another document."""
    tensors = [x.requires_grad_() for x in inputs(B=1)]
    starts = torch.tensor([[0] * 37 + [37] + [38] * 112])
    out, _, _ = gated_delta_rule(*tensors, starts)
    for part in (slice(37), slice(37, 38), slice(38, 150)):
        alone, *_ = gated_delta_rule(*(x[:, part] for x in tensors))
        assert distance(out[:, part], alone) < 1e-6
        grads = torch.autograd.grad(out[:, part].square().sum(), tensors, retain_graph=True)
        for grad in grads:
            outside = torch.cat((grad[:, : part.start or 0], grad[:, part.stop :]), dim=1)
            assert outside.abs().max() < 1e-6 * grad.abs().max().clamp_min(1.0)


def test_a_row_in_two_parts_is_the_row():
    tensors, starts = inputs(), starts_of(150, share=0.05)
    out, last, _ = gated_delta_rule(*tensors, starts)
    first, state, _ = gated_delta_rule(*(x[:, :70] for x in tensors), starts[:, :70])
    second, end, _ = gated_delta_rule(*(x[:, 70:] for x in tensors), starts[:, 70:] - 70, state)
    assert distance(torch.cat((first, second), dim=1), out) < 1e-6
    assert distance(end, last) < 1e-6


def test_bfloat16_is_rounded_once():
    exact = inputs()
    rounded = [x.bfloat16() for x in exact[:3]] + exact[3:]
    out, state, _ = gated_delta_rule(*rounded)
    right, last, _ = gated_delta_rule(*(x.float() for x in rounded))
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, right.bfloat16())
    assert torch.equal(state, last)


@by_channel
def test_operators_are_right_for_tracing(by_channel):
    tensors = [x.requires_grad_() for x in inputs(T=20, by_channel=by_channel)]
    arguments = (*tensors, starts_of(20, share=0.2), torch.randn(2, 2, 16, 12, requires_grad=True), 16)
    torch.library.opcheck(gated_delta_rule, arguments)
    torch.library.opcheck(gated_delta_rule, (*tensors, None, None, 16))


def test_memory_grows_linearly_with_the_row():
    """A tensor of all pairs of these tokens would take 16 GiB."""
    tensors = [x.requires_grad_() for x in inputs(B=1, T=65536, H=1, N=1, K=8, V=8)]
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gated_delta_rule(*tensors)[0].sum().backward()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib * 1024 < 65536 * 8 * 4 * 60
