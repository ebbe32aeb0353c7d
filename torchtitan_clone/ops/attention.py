"""Masks of attention, and who computes it.

A query sees one contiguous range of its row: from its start to itself. `starts` are the indices of the first tokens
that each one sees, [B, T] int32: those of its document, window or chunk.

    documents  0 0 0 1 1 1          key  0 1 2 3 4 5
    starts     0 0 0 3 3 3      query 0  x . . . . .
                                      1  x x . . . .
                                      2  x x x . . .
                                      3  . . . x . .
                                      4  . . . x x .
                                      5  . . . x x x

Legend: B batch, T tokens, N heads, K kv heads, H head dim; in block masks Q and K blocks of queries and keys.
"""

from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from torchtitan_clone.ops.compile_cache import set_compile_cache
from torchtitan_clone.ops.varlen_attention import copied

AttentionMask = BlockMask | Tensor | None
"""FlexAttention's mask, or starts [B, T] on the CPU, or None: attention is causal only."""
BLOCK = 128
"""Number of queries and of keys in a block of FlexAttention; its kernels require this value."""


@dataclass(frozen=True)
class OnHost:
    """A tensor of the CPU as an argument of a model, all of whose tensors FSDP copies to its device."""

    tensor: Tensor


def moved(x: OnHost | Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on a device. Copying to a GPU does not wait for it, copying from it is a host sync."""
    x = x.tensor if isinstance(x, OnHost) else x
    return x if x.device == device else copied(x, device)


def document_starts(documents_BT: Tensor) -> Tensor:
    """Returns the index in the row of the first token of each token's document [B, T]."""
    index_T = torch.arange(documents_BT.shape[1], dtype=torch.int32, device=documents_BT.device)
    is_first_BT = F.pad(documents_BT.diff(dim=1) != 0, (1, 0))
    return (index_T * is_first_BT).cummax(dim=1).values


def visible_starts(
    documents_BT: Tensor | None, *, like: Tensor, window: int | None, chunk: int | None
) -> Tensor | None:
    """Returns the index in the row of the first token that each one attends to [B, T]; None: attention is causal only.

    Attention is within documents, of which None is one for each row of `like` [B, T]; within the last `window` tokens;
    and within chunks of a document.
    """
    if documents_BT is None:
        if window is None and chunk is None:
            return None
        documents_BT = torch.zeros_like(like, dtype=torch.int32)
    starts_BT = document_starts(documents_BT)
    index_T = torch.arange(starts_BT.shape[1], dtype=torch.int32, device=starts_BT.device)
    if chunk is not None:
        starts_BT = index_T - (index_T - starts_BT) % chunk
    return starts_BT if window is None else torch.maximum(starts_BT, index_T - window + 1)


def mask_from(starts_BT: Tensor) -> BlockMask | Tensor:
    """Returns the mask of tokens that attend to those from these indices of the row on, for the device's kernel."""
    return starts_BT if starts_BT.device.type == "cpu" else block_mask(starts_BT)


def block_mask(starts_BT: Tensor) -> BlockMask:
    """Returns FlexAttention's mask for tokens whose documents start at these indices of the row."""
    # Computed from the first and last token of each block of queries: create_block_mask would evaluate all T^2 pairs.
    T = starts_BT.shape[1]
    starts_BQ1 = starts_BT[:, ::BLOCK, None]
    last_BQ1 = F.pad(starts_BT, (0, -T % BLOCK), mode="replicate")[:, BLOCK - 1 :: BLOCK, None]
    index_Q = torch.arange(starts_BQ1.shape[1], dtype=torch.int32, device=starts_BT.device)
    seen_BQK = (index_Q >= starts_BQ1 // BLOCK) & (index_Q <= index_Q[:, None])
    full_BQK = (index_Q * BLOCK >= last_BQ1) & (index_Q < index_Q[:, None])

    def allowed(b: Tensor, _head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (kv >= starts_BT[b, q])

    partial, full = _counts_and_indices(seen_BQK & ~full_BQK), _counts_and_indices(full_BQK)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=allowed, seq_lengths=(T, T))


def _counts_and_indices(is_in_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of selected blocks of keys [B, 1, Q], and all blocks, selected ones first [B, 1, Q, K]."""
    order = is_in_BQK.int().argsort(dim=-1, descending=True, stable=True)
    return is_in_BQK.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


@cache
def _compiled_flex_attention():
    # Uncompiled, it materializes the full score matrix: it is compiled also where all else runs eagerly, as in traces.
    set_compile_cache("inductor")  # a run without compile.enable has not done it
    return torch.compiler.set_stance("default")(torch.compile(flex_attention))


def flex(q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask: BlockMask, sinks_N: Tensor | None) -> Tensor:
    """Returns attention [B, N, T, H] by FlexAttention."""
    attend = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    grouped = q_BNTH.shape[1] != k_BKTH.shape[1]
    if sinks_N is None:
        return attend(q_BNTH, k_BKTH, v_BKTH, block_mask=mask, enable_gqa=grouped)
    request = AuxRequest(lse=True)
    out_BNTH, aux = attend(q_BNTH, k_BKTH, v_BKTH, block_mask=mask, enable_gqa=grouped, return_aux=request)
    share_BNT = (cast("Tensor", aux.lse) - sinks_N[:, None]).sigmoid()  # of the keys in the softmax
    return out_BNTH * share_BNT[..., None].type_as(out_BNTH)
