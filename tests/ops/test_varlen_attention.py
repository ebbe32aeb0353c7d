"""Attention within documents by FlashAttention: equal to dense attention, and the kernels that CUDA would launch.

On the CPU the variable-length kernels are loops over segments.
"""

import itertools
from functools import partial

import pytest
import torch
from torch.distributed.utils import _to_kwargs
from torch.nn import attention as kernels
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode

from tests.ops.context_ranks import attention_of_all_ranks
from tests.ops.dense_attention import dense, distance, inputs, result_and_gradients
from torchtitan_clone.models.attention import DocumentMask
from torchtitan_clone.ops.attention import OnHost, describe_kernels, visible_starts
from torchtitan_clone.ops.blockwise_attention import (
    BLOCKWISE,
    BlockwiseAttention,
    document_attention,
    empty_attention,
)
from torchtitan_clone.ops.varlen_attention import (
    Queries,
    activate_flash_attention,
    attend_within,
    attend_within_backward,
    find_segments,
    supports_flash_attention,
)
from torchtitan_clone.parallel.mesh import local_tokens
from torchtitan_clone.torch_compat import (
    TorchDispatchMode,
    cpu_flash_attention,
    cpu_flash_attention_backward,
    fake_tensors,
)


def of_segments(cu_q, cu_k, longest):
    """Yields the places of queries and keys of each segment."""
    assert torch.equal(cu_q, cu_k)
    assert cu_q.dtype == torch.int32
    assert longest == cu_q.diff().max()
    assert cu_q.diff().min() > 0
    return [slice(start, stop) for start, stop in zip(cu_q.tolist(), cu_q.tolist()[1:], strict=False)]


def batched(*tensors):
    return [x.transpose(0, 1)[None] for x in tensors]


def varlen_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, debug, **_):
    """aten::_flash_attention_forward for CPU tensors: q [X, N, H], k and v [X, K, H]; lse [N, X]."""
    assert is_causal
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for place in of_segments(cu_q, cu_k, max_q):
        found, found_lse = cpu_flash_attention(*batched(q[place], k[place], v[place]), is_causal=True)
        out[place], lse[:, place] = found[0].transpose(0, 1), found_lse[0]
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def varlen_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, is_causal, state, unused, **_):
    """aten::_flash_attention_backward for CPU tensors."""
    assert is_causal
    assert lse.is_contiguous()
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    for place in of_segments(cu_q, cu_k, max_q):
        cut = batched(*(x[place] for x in (grad, q, k, v, out)))
        found = cpu_flash_attention_backward(*cut, lse[None, :, place], 0.0, True)
        for total, gradient in zip(gradients, found, strict=True):
            total[place] = gradient[0].transpose(0, 1)
    return tuple(gradients)


@pytest.fixture(scope="module")
def varlen_kernels_of_the_cpu():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", varlen_forward, "CPU")
    library.impl("_flash_attention_backward", varlen_backward, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("varlen_kernels_of_the_cpu")
@pytest.mark.parametrize(("T", "degree"), [(64, 2), (840, 4), (600, 1)])
@pytest.mark.parametrize("document_length", [None, 3, 50, 3000])
@pytest.mark.parametrize("chunk", [None, 37])
def test_segments_of_all_ranks_equal_dense_attention(T, degree, document_length, chunk):
    q, k, v, grad, documents = inputs(T, document_length=document_length)
    right = result_and_gradients(lambda *x: dense(*x, documents, chunk=chunk), q, k, v, grad)

    def starts_of(documents):
        return visible_starts(documents, like=documents, window=None, chunk=chunk)

    if documents is None and chunk is not None:
        documents = torch.zeros(2, T, dtype=torch.int32)
    options = {"kernel": BlockwiseAttention(uses_segments=lambda _: True), "starts_of": starts_of}
    found = attention_of_all_ranks(q, k, v, grad, documents, degree=degree, **options)
    assert max(map(distance, found, right)) < 1e-6


@pytest.mark.usefixtures("varlen_kernels_of_the_cpu")
def test_one_call_computes_rows_of_one_rank():
    q, k, v, grad, documents = inputs(300, document_length=20)
    right = result_and_gradients(lambda *x: dense(*x, documents), q, k, v, grad)
    starts = visible_starts(documents, like=documents, window=None, chunk=None)
    segments = find_segments([range(300)], starts, num_rows=2)
    attention = attend_within((q, k, v), segments)
    gradients = attend_within_backward(grad, (q, k, v), attention, segments)
    assert max(map(distance, (attention[0], *gradients), right)) < 1e-6
    assert distance(attention[1], document_attention(q, k, v, starts)[1]) < 1e-6


def test_fsdp_leaves_documents_on_the_cpu():
    documents, device = OnHost(torch.zeros(2, 3)), torch.device("meta")
    (args,), (kwargs,) = _to_kwargs((documents.tensor,), {"documents_BT": documents}, device, False)
    assert args[0].device == device
    assert kwargs["documents_BT"] is documents


def test_windows_within_documents_have_no_segments():
    documents = torch.tensor([[0] * 5 + [1] * 3 + [2]])

    def found(window):
        starts = visible_starts(documents, like=documents, window=window, chunk=None)
        return find_segments([range(9)], starts, num_rows=1)

    assert found(2) is None
    for window, bounds in ((None, [0, 5, 8, 9]), (5, [0, 5, 8, 9]), (1, list(range(10)))):
        assert found(window).bounds.tolist() == bounds


class Launched(TorchDispatchMode):
    """Lists the operators on fake tensors of a GPU, with their arguments. What needs a value raises an error."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func.name().removeprefix("aten::"), args))
        return func(*args, **(kwargs or {}))

    def of(self, name):
        """Returns the arguments of each call of an operator."""
        return [args for called, args in self.calls if called == name]

    def like(self, *words):
        """Returns the names of the operators that have one of these words in their names."""
        return {name for name, _ in self.calls if any(word in name for word in words)}


class Methods(TorchFunctionMode):
    """Runs the methods that torch for CPUs refuses for fake tensors of a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return self._cut(*args)
        if func is torch.Tensor.__setitem__:
            x, index, value = args
            if isinstance(index[0], torch.Tensor):
                return x.index_put_(index, value)
            func, args = torch.Tensor.copy_, (self._cut(x, index), value)
        other = {
            torch.Tensor.__invert__: torch.bitwise_not,
            torch.Tensor.copy_: torch.ops.aten.copy_,
            torch.Tensor.contiguous: torch.ops.aten.contiguous,
        }.get(func, func)
        return other(*args, **(kwargs or {}))

    def _cut(self, x, index):
        index = index if isinstance(index, tuple) else (index,)
        if ... in index:
            at = index.index(...)
            index = (
                *index[:at],
                *[slice(None)] * (x.dim() - sum(isinstance(i, slice) for i in index)),
                *index[at + 1 :],
            )
        for dim, item in enumerate(index):
            if item is None:
                x = x.unsqueeze(dim)
            else:
                x = torch.ops.aten.slice(x, dim, item.start, item.stop, item.step or 1)
        return x


T, RANKS = 16384, 4
DOCUMENTS = (torch.arange(2 * T).view(2, T) % 900 == 0).cumsum(1)


def launched(dtype, *, rank, source, window=None):
    """Returns what CUDA would launch forward and backward for the keys of one other rank, with grouped queries."""
    starts = visible_starts(DOCUMENTS, like=DOCUMENTS, window=window, chunk=None)
    pieces, keys = (local_tokens(T, rank=each, degree=RANKS, method="ring") for each in (rank, source))
    starts = torch.cat([starts[:, piece.start : piece.stop] for piece in pieces], dim=1)
    queries = Queries(spans=pieces, starts_BT=starts, num_rows=2)
    assert (queries.segments is None) is (window is not None)  # read here, since fake tensors have no values
    with fake_tensors(), Methods():
        q, k = (torch.empty(2, T // RANKS, heads, 64, dtype=dtype, device="cuda") for heads in (8, 2))
        limits = {"queries": queries, "keys": keys}
        attention = empty_attention(q)
        q_grad, *kv_grads = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, k))
        with Launched() as found:
            BLOCKWISE.attend((q, k, k), merge_into=attention, **limits)
            gradients = {"q_grad": q_grad, "kv_grads": kv_grads}
            BLOCKWISE.attend_backward(q, (q, k, k), (q, attention[1]), **gradients, **limits)
    return found


def test_flash_attention_computes_documents_without_masks():
    own, earlier = (launched(torch.bfloat16, rank=2, source=source) for source in (2, 1))
    for found, calls in ((own, 1), (earlier, 0)):
        assert len(found.of("_flash_attention_forward")) == len(found.of("_flash_attention_backward")) == calls
        assert not found.like("efficient", "masked_fill", "repeat", "index", "where")
        # Of an earlier piece, each row sees the end of the one document that goes on into the next piece.
        blocks = found.of("_scaled_dot_product_flash_attention")
        assert len(blocks) == (0 if calls else 2)
        for q, k, *_ in blocks:
            assert q.shape[2] + k.shape[2] <= 900
            assert q.shape[1] == 4 * k.shape[1]


def test_blocks_in_fp32_and_windows_skip_and_do_not_repeat():
    for dtype, window, source in itertools.product((torch.float32, torch.bfloat16), (None, 500), (2, 1)):
        if dtype == torch.bfloat16 and window is None:
            continue
        found = launched(dtype, rank=2, source=source, window=window)
        blocks = found.of("_scaled_dot_product_efficient_attention")
        assert blocks
        assert not found.like("repeat", "_flash_attention_forward")
        for _, k, v, bias, *_ in blocks:
            assert k.shape[:2] == (2, 4)
            assert k.stride(1) == v.stride(1) == 0  # one key for all heads of a group
            assert bias.stride()[:2] == (0, 0)
            assert bias.stride(2) % 16 == 0
            assert k.shape[2] <= 2048
        # Documents do not reach over the pieces of 2,048 tokens in between.
        assert not launched(dtype, rank=3, source=0, window=window).like("attention")


def test_the_kernel_follows_type_size_and_window():
    documents = DOCUMENTS[:, :1024].int()
    starts = visible_starts(documents, like=documents, window=None, chunk=None)
    with fake_tensors(), Methods():
        q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16, device="cuda")
        assert supports_flash_attention(q)
        others = (q.float(), q.to("cpu"), q.new_empty(1, 8, 2, 60), q.new_empty(1, 8, 2, 264))
        assert not any(map(supports_flash_attention, others))
        positions = torch.empty(2, 1024, dtype=torch.int64, device="cuda")
        build = partial(DocumentMask(), OnHost(documents), positions)
        mask = build(dtype=torch.bfloat16)
        assert mask.device.type == "cpu"
        assert mask.shape == starts.shape
        for options in ({"dtype": torch.float32}, {"dtype": torch.bfloat16, "window": 100}):
            assert isinstance(build(**options), BlockMask)


def test_the_kernels_follow_device_and_type():
    assert describe_kernels(torch.device("cpu"), dtype="bfloat16") == ""
    assert "in float32: by FlexAttention" in describe_kernels(torch.device("cuda"), dtype="float32")


FLASH_ATTENTION_3 = """
import torch
library = torch.library.Library("flash_attn_3", "DEF")
library.define("fwd(Tensor q) -> Tensor")
library.define("bwd(Tensor q) -> Tensor")
"""


def test_flash_attention_3_is_activated_where_it_is_installed(tmp_path, monkeypatch):
    hopper, ampere = (9, 0), (8, 0)
    assert activate_flash_attention(hopper) == "2"
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "flash_attn_interface.py"
    package.write_text("raise ImportError('built for another torch')")
    assert activate_flash_attention(ampere) == "2"
    assert activate_flash_attention(hopper).endswith("failed: built for another torch")
    package.write_text(FLASH_ATTENTION_3)
    assert activate_flash_attention(hopper) == "3"
    assert kernels.current_flash_attention_impl() == "FA3"
    kernels.restore_flash_attention_impl()
