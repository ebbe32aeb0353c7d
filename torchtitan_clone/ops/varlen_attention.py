"""Causal attention within documents by the variable-length kernels of FlashAttention, in fp16 and bf16 on CUDA.

A *segment* is a range of queries of one span of a row that belong to one document, or to one chunk of it. All queries
of a rank attend to the keys of their own segments in one call. Of an earlier span only the first segment of a later
one sees keys, all of them without a mask. The host knows the bounds of segments, so that no kernel is launched in vain.
Legend: B batch, T queries, N heads, K kv heads, H head dim; X tokens of all rows, B T. Source: arXiv 2307.08691.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn import attention as kernels

from torchtitan_clone import torch_compat

Spans = Sequence[range]
"""Ranges of indices of a row, in memory order: a rank may hold tokens 0 to 3 and 12 to 15."""
QKV = tuple[Tensor, Tensor, Tensor]
Attention = tuple[Tensor, Tensor]  # out and lse


def copied(x: Tensor, device: torch.device) -> Tensor:
    """Returns a copy on a device: to a GPU without waiting for it."""
    if device.type == "cuda" and x.device.type == "cpu" and torch.cuda.is_available():
        x = x.pin_memory()
    return x.to(device, non_blocking=device.type == "cuda")


def has_flash_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether FlashAttention runs on GPUs like this machine's, and on a simulated device."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)


def activate_flash_attention(capability: tuple[int, int]) -> str:
    """Activates version 3 if the package flash_attn_interface is there; returns the version, and why it is not 3."""
    is_there = "FA3" in kernels.list_flash_attention_impls() and find_spec("flash_attn_interface") is not None
    if capability[0] != 9 or not is_there:
        return "2"
    try:
        kernels.activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError) as error:
        return f"2, because activating version 3 failed: {error}"
    return "3"


def supports_flash_attention(q_BTNH: Tensor) -> bool:
    """Whether FlashAttention computes attention of such queries."""
    size = q_BTNH.shape[-1]
    return has_flash_attention(q_BTNH.device, q_BTNH.dtype) and size % 8 == 0 and size <= 256


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The segments of the queries of a rank, those of each row one after another."""

    starts_BT: np.ndarray
    """Index in the row of the first token that each one attends to."""
    bounds: np.ndarray
    """int32 [segments + 1]; where they start among the tokens of all rows, and the number of these."""

    def limits(self, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
        """Returns the bounds of queries and of keys on a device, and the length of the longest segment of each."""
        bounds, longest = copied(torch.from_numpy(self.bounds), device), int(np.diff(self.bounds).max())
        return bounds, bounds, longest, longest

    def first_of(self, offset: int) -> list[tuple[slice, int, int]]:
        """Returns rows, length and start of the first segments of the span at this offset; equal ones together."""
        num_rows, num_tokens = self.starts_BT.shape
        places = np.arange(num_rows) * num_tokens + offset
        lengths = self.bounds[np.searchsorted(self.bounds, places, side="right")] - places
        firsts = list(zip(lengths.tolist(), self.starts_BT[:, offset].tolist(), strict=True))
        if len(set(firsts)) == 1:
            return [(slice(0, num_rows), *firsts[0])]
        return [(slice(row, row + 1), *first) for row, first in enumerate(firsts)]


def placed(spans: Spans) -> Iterator[tuple[int, range]]:
    """Yields each span after its position in memory."""
    return zip(accumulate(map(len, spans), initial=0), spans, strict=False)


def find_segments(queries: Spans, starts_BT: Tensor | None, *, num_rows: int) -> Segments | None:
    """Returns the segments of queries with these starts, which are on the CPU; None: a row is one document.

    Returns None if attention is limited by a window that is shorter than a document.
    """
    index_T = np.concatenate([np.arange(span.start, span.stop) for span in queries])
    shape = (num_rows, len(index_T))
    starts = np.zeros(shape, dtype=np.int32) if starts_BT is None else starts_BT.numpy()
    begins_BT = starts == index_T
    begins_BT[:, [offset for offset, _ in placed(queries)]] = True
    if not (begins_BT[:, 1:] | (starts[:, 1:] == starts[:, :-1])).all():
        return None
    bounds = np.append(np.flatnonzero(begins_BT), begins_BT.size).astype(np.int32)
    return Segments(starts_BT=starts, bounds=bounds)


@dataclass(frozen=True, kw_only=True)
class Queries:
    """Queries that a rank holds of some rows."""

    spans: Spans
    starts_BT: Tensor | None
    """Index in the row of the first key that each one sees, on the CPU; None: attention is causal only."""
    num_rows: int

    @cached_property
    def segments(self) -> Segments | None:
        """Their segments; None if a window limits attention, so that there are none."""
        return find_segments(self.spans, self.starts_BT, num_rows=self.num_rows)


def attend_within(qkv: QKV, segments: Segments) -> Attention:
    """Returns attention of queries over the earlier keys of their segments: out [B, T, N, H] and lse [B, T, N]."""
    shape = qkv[0].shape[:2]
    tokens = (x.flatten(0, 1) for x in qkv)
    limits = segments.limits(qkv[0].device)
    out_XNH, lse_NX, *_ = torch_compat.varlen_attention(*tokens, *limits, 0.0, True, False)
    return out_XNH.unflatten(0, shape), lse_NX.T.contiguous().unflatten(0, shape)


def attend_within_backward(grad_BTNH: Tensor, qkv: QKV, attention: Attention, segments: Segments) -> QKV:
    """Returns the gradients with respect to q, k and v through these keys; `attention` may be over more keys."""
    device = grad_BTNH.device
    out_BTNH, lse_BTN = attention
    tokens = (x.flatten(0, 1) for x in (grad_BTNH, *qkv, out_BTNH))
    lse_NX = lse_BTN.flatten(0, 1).T.contiguous()
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
    gradients = torch_compat.varlen_attention_backward(
        *tokens, lse_NX, *segments.limits(device), 0.0, True, *no_dropout
    )
    q_grad, k_grad, v_grad = (x.unflatten(0, grad_BTNH.shape[:2]) for x in gradients)
    return q_grad, k_grad, v_grad
