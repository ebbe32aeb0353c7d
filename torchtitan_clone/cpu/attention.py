"""Attention to ranges of keys on a CPU, by C++ that is compiled when a run starts: in fp32, or with AMX in bfloat16.

torch's kernels of a CPU spend most of their time between the products of short rows, and know no documents.
Legend: B batch, T queries, S keys, N heads, K kv heads, H head dim.
"""

import ctypes
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx

from torchtitan_clone.cpu.library import (
    FLOATS_OF_VECTOR,
    has_tiles,
    is_loaded,
    loaded_library,
    tile_library,
)
from torchtitan_clone.cpu.products import IS_AMD
from torchtitan_clone.cpu.torch_compat import HAS_AMX
from torchtitan_clone.ops.varlen_attention import QKV, Attention, Queries, Spans

IS_FASTER_IN_EAGER = FLOATS_OF_VECTOR == 16 or (IS_AMD and FLOATS_OF_VECTOR == 8)
"""With AVX-512, and with AVX2 on AMD's processors: with AVX2 torch's kernel can be faster on those of Intel."""
_TAKEN = {("cpu", torch.float32), ("cpu", torch.bfloat16)}
HEAD_MULTIPLES = {"cpp": FLOATS_OF_VECTOR, "tiles": 32}
"""What must divide the features of a head for each library."""
_chosen: dict[torch.dtype, tuple[str, int]] = {}
"""What use_attention() has chosen; other data types have their preferred library."""


def preferred_attention(dtype: torch.dtype, *, is_compiled: bool) -> str:
    """Returns the library whose attention is the fastest here: "cpp", "tiles", or "torch".

    In bfloat16 torch's kernels use AMX too, so that only tiles are faster there. In eager mode torch's kernels call MKL
    for each block.
    """
    if dtype == torch.bfloat16 and HAS_AMX:
        return "tiles" if has_tiles() else "torch"
    is_faster = dtype in (torch.float32, torch.bfloat16) and (is_compiled or IS_FASTER_IN_EAGER)
    return "cpp" if is_faster and is_loaded() else "torch"


def use_attention(dtype: torch.dtype, *, library: str, multiple: int) -> None:
    """Computes attention in a data type by this library, or "torch", in heads of multiples of so many features.

    Ranks of one run must choose alike: with context parallelism libraries receive keys in collectives of their own.
    """
    _chosen[dtype] = library, multiple


def _library_for(dtype: torch.dtype, *, is_compiled: bool) -> tuple[str, int]:
    """Returns the library for such queries, and the number that must divide the features of a head; 0 for torch."""
    library = preferred_attention(dtype, is_compiled=is_compiled)
    library, multiple = _chosen.get(dtype, (library, HEAD_MULTIPLES.get(library, 0)))
    return library, 0 if library == "torch" else multiple


@torch.compiler.assume_constant_result
def _head_multiple(dtype_name: str, is_compiled: bool) -> int:
    return _library_for(getattr(torch, dtype_name), is_compiled=is_compiled)[1]


def has_faster_attention(dtype: torch.dtype, *, head_dim: int, in_eager: bool) -> bool:
    """Whether C++ computes attention of these queries: in compiled blocks, and in training if `in_eager` allows it.

    Without gradients the result is that of torch's kernel.
    """
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and not (in_eager and torch.is_grad_enabled()):
        return False
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    multiple = _head_multiple("bfloat16" if dtype == torch.bfloat16 else "float32", is_compiling)
    return multiple > 0 and head_dim % multiple == 0


class _Heads(ctypes.Structure):
    """What attention.h declares: a tensor [B, T, heads, H] whose heads are consecutive."""

    _fields_ = (("data", ctypes.c_void_p), ("batch_stride", ctypes.c_int64), ("token_stride", ctypes.c_int64))


def _consecutive(x: Tensor) -> Tensor:
    """Returns a tensor [B, T, heads, H] whose heads are consecutive: itself, or a contiguous copy."""
    return x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous()


class LibraryAttention:
    """A library's attention, which reads and writes queries, keys, values and their gradients in one dtype.

    Rows and tokens can have any strides. Results are in the memory order of queries, gradients in that of the tensors
    that they belong to, unless memory for them is given.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype):
        self._library = library
        self._dtype = dtype

    def attend(
        self, *inputs: Tensor | None, accumulate_into: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns what attend() does, in the dtype of the library.

        `accumulate_into` is attention over other keys, in fp32: it becomes attention over those and these keys.
        """
        assert accumulate_into is None or self._dtype == torch.float32
        B, T, _, N, *_ = sizes = _sizes(*inputs, accumulate=accumulate_into is not None)
        out_BTNH, lse_BNT = accumulate_into or (self._empty_like(inputs[0]), torch.empty(B, N, T, dtype=torch.float32))
        self._call("attend", *inputs, results=(out_BTNH, lse_BNT), sizes=sizes)
        return out_BTNH, lse_BNT

    def attend_backward(
        self, grad_BTNH: Tensor, *saved: Tensor | None, q_grad: Tensor | None = None, kv_grads: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Returns what attend_backward() does, in the dtype of the library.

        Adds to `q_grad`, in fp32, and writes to `kv_grads` where these are given.
        """
        *inputs, _out, _lse = saved
        sizes = _sizes(*inputs, accumulate=q_grad is not None)
        q_grad = self._empty_like(inputs[0]) if q_grad is None else q_grad
        results = [q_grad, *(kv_grads or map(self._empty_like, inputs[1:3]))]
        self._call("attend_backward", grad_BTNH, *saved, results=results, sizes=sizes)
        return results

    def _empty_like(self, x: Tensor | None) -> Tensor:
        return _empty_like(cast("Tensor", x), dtype=self._dtype)

    def _call(
        self, name: str, *inputs: Tensor | None, results: Sequence[Tensor], sizes: ctypes.Array[ctypes.c_int64]
    ) -> None:
        converted = [
            x if x is None else _consecutive(x.to(self._dtype)) if x.dim() == 4 else x.contiguous() for x in inputs
        ]
        assert all(x.dtype == self._dtype and _consecutive(x) is x for x in results if x.dim() == 4)
        pointers = [x if x is None else _argument(x) for x in (*converted, *results)]
        if not getattr(self._library, name)(*pointers, sizes, ctypes.c_float(sizes[5] ** -0.5)):
            bounds = [int(bound) for x in inputs if x is not None and x.dtype == torch.int32 for bound in x.aminmax()]
            wrong = next(bound for bound in bounds if not 0 <= bound <= sizes[2])
            rule = f"0 to {sizes[2]} exist; give starts and ends of keys that are in these tensors"
            raise ValueError(f"attention by C++: a range of keys has the bound {wrong}; {rule}")


def _argument(x: Tensor) -> object:
    return ctypes.byref(_Heads(x.data_ptr(), *x.stride()[:2])) if x.dim() == 4 else ctypes.c_void_p(x.data_ptr())


def _empty_like(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    return _consecutive(torch.empty_like(_consecutive(x), dtype=dtype))


def attention_kernel(q_BTNH: Tensor) -> LibraryAttention:
    """Returns the attention that computes in the type of these queries, for which has_faster_attention() is true."""
    library, multiple = _library_for(q_BTNH.dtype, is_compiled=True)
    if library == "tiles" and q_BTNH.shape[-1] % multiple == 0:
        return LibraryAttention(tile_library(), torch.bfloat16)
    return LibraryAttention(loaded_library(), torch.float32)


class RangeAttention:
    """Attention over some keys after others: ops.kernels.PartialKernel. It computes in fp32."""

    takes_whole_rows = True

    def attend(self, qkv: QKV, *, queries: Queries, keys: Spans, merge_into: Attention | None) -> Attention:
        """Returns attention over these keys and those of `merge_into`, in place."""
        q, k, v = qkv[0].float(), *qkv[1:]
        if merge_into is not None:  # [B, T, N], of which the library has [B, N, T]
            merge_into = merge_into[0], merge_into[1].transpose(1, 2).contiguous()
        ranges = ranges_of_keys(queries, keys)
        out_BTNH, lse_BNT = attention_kernel(q).attend(q, k, v, *ranges, accumulate_into=merge_into)
        return out_BTNH, lse_BNT.transpose(1, 2)

    def attend_backward(
        self, grad_BTNH: Tensor, qkv: QKV, attention: Attention, *, queries: Queries, keys: Spans,
        q_grad: Tensor | None, kv_grads: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        """Returns the gradient with respect to queries added to `q_grad`, and writes those to keys and values."""
        q, k, v = qkv[0].float(), *qkv[1:]
        saved = (q, k, v, *ranges_of_keys(queries, keys), attention[0], attention[1].transpose(1, 2))
        q_grad, *_ = attention_kernel(q).attend_backward(grad_BTNH, *saved, q_grad=q_grad, kv_grads=kv_grads)
        return q_grad


OVER_KEYS = RangeAttention()


def ranges_of_keys(queries: Queries, keys: Spans) -> list[Tensor | None]:
    """Returns starts and ends [B, T], int32, of the keys that each query sees, in memory order; starts may be None."""
    spans = (queries.spans, keys)
    q_T, k_S = (torch.cat([torch.arange(x.start, x.stop, dtype=torch.int32) for x in of]) for of in spans)
    starts_BT = queries.starts_BT
    starts = None if starts_BT is None else torch.searchsorted(k_S, starts_BT.contiguous(), out_int32=True)
    return [starts, torch.searchsorted(k_S, q_T, right=True, out_int32=True).expand(queries.num_rows, -1)]


def _sizes(*inputs: Tensor | None, accumulate: bool) -> ctypes.Array[ctypes.c_int64]:
    """Returns the library's Sizes; ValueError if it would read other memory than that of these tensors."""
    q_BTNH, k_BSKH, v_BSKH = cast("Sequence[Tensor]", inputs[:3])
    ranges = inputs[3:]
    (B, T, N, H), (S, K) = q_BTNH.shape, k_BSKH.shape[1:3]
    fits = k_BSKH.shape == v_BSKH.shape == (B, S, K, H) and N % K == 0 and H % FLOATS_OF_VECTOR == 0
    kinds = {(x.device.type, x.dtype) for x in (q_BTNH, k_BSKH, v_BSKH)}
    given = [x for x in ranges if x is not None]
    are_ranges = all(x.shape == (B, T) and x.dtype == torch.int32 for x in given) and (S == T or ranges[1] is not None)
    if not (fits and are_ranges and kinds <= _TAKEN):
        shapes = [tuple(x.shape) for x in (q_BTNH, k_BSKH, v_BSKH, *given)]
        raise ValueError(f"attention by C++ does not take these tensors: {kinds}, {shapes}")
    return (ctypes.c_int64 * 7)(B, T, S, N, K, H, accumulate)


@torch.library.custom_op("torchtitan_clone::attend", mutates_args=())
def attend(
    q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, starts_BT: Tensor | None, ends_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns attention of each query over the keys from its start to its end: out [B, T, N, H], lse [B, N, T].

    Starts and ends are int32. Without starts a row is seen from its first key on, and without ends, of as many keys as
    queries, until the query itself. Sums are in fp32, as is lse, of which there is no gradient.
    """
    out_BTNH, lse_BNT = attention_kernel(q_BTNH).attend(q_BTNH, k_BSKH, v_BSKH, starts_BT, ends_BT)
    return out_BTNH.to(q_BTNH.dtype), lse_BNT


@attend.register_fake
def _fake_results(q_BTNH: Tensor, *_others: Tensor | None) -> tuple[Tensor, Tensor]:
    B, T, N, _ = q_BTNH.shape
    return _empty_like(q_BTNH, dtype=q_BTNH.dtype), q_BTNH.new_empty(B, N, T, dtype=torch.float32)


@torch.library.custom_op("torchtitan_clone::attend_backward", mutates_args=())
def attend_backward(
    grad_BTNH: Tensor, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, starts_BT: Tensor | None,
    ends_BT: Tensor | None, out_BTNH: Tensor, lse_BNT: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients with respect to q, k and v of attend(), whose results may be merged with others."""
    saved = (q_BTNH, k_BSKH, v_BSKH, starts_BT, ends_BT, out_BTNH, lse_BNT)
    q_grad, k_grad, v_grad = (x.to(q_BTNH.dtype) for x in attention_kernel(q_BTNH).attend_backward(grad_BTNH, *saved))
    return q_grad, k_grad, v_grad


@attend_backward.register_fake
def _fake_gradients(_grad: Tensor, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (_empty_like(x, dtype=x.dtype) for x in cast("Sequence[Tensor]", tensors[:3]))
    return q, k, v


def _save_for_backward(ctx: FunctionCtx, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*cast("Sequence[Tensor]", inputs), *output)  # which takes None too
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: BackwardCFunction, grad_BTNH: Tensor, _grad_of_lse: Tensor) -> tuple[Tensor | None, ...]:
    return *attend_backward(grad_BTNH, *cast("Sequence[Tensor]", ctx.saved_tensors)), None, None


attend.register_autograd(_backward, setup_context=_save_for_backward)
