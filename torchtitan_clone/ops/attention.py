"""Masks of attention, and who computes it: choose_attention().

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

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from torchtitan_clone.ops.blockwise_attention import BLOCKWISE, document_attention
from torchtitan_clone.ops.compile_cache import set_compile_cache
from torchtitan_clone.ops.kernels import CPU, PartialKernel
from torchtitan_clone.ops.varlen_attention import activate_flash_attention, copied, has_flash_attention
from torchtitan_clone.torch_compat import (
    cpu_flash_attention,
    cudnn_attention,
    efficient_attention,
    flash_attention,
    is_fake,
)

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


# ---------------------------------------------------------------- who computes


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What computes attention."""

    name: str
    attend: Callable[[Tensor, Tensor, Tensor, AttentionMask, Tensor | None], Tensor]
    """Returns attention [B, T, N, H] of q, k, v with a mask and sinks [N], with its gradients.

    A sink is a logit of a head that is in the softmax, with a value of zero.
    """
    over_keys: PartialKernel | None = None
    """The same for some keys of a row after others, where it can."""


@cache
def _compiled_flex_attention():
    # Uncompiled, it materializes the full score matrix: it is compiled also where all else runs eagerly, as in traces.
    set_compile_cache("inductor")  # a run without compile.enable has not done it
    return torch.compiler.set_stance("default")(torch.compile(flex_attention))


def _flex(
    q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: AttentionMask, sinks_N: Tensor | None
) -> Tensor:  # fmt: skip
    assert isinstance(mask, BlockMask)
    attend = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    q_BNTH, k_BKTH, v_BKTH = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
    grouped = q_BNTH.shape[1] != k_BKTH.shape[1]
    if sinks_N is None:
        return attend(q_BNTH, k_BKTH, v_BKTH, block_mask=mask, enable_gqa=grouped).transpose(1, 2)
    request = AuxRequest(lse=True)
    out_BNTH, aux = attend(q_BNTH, k_BKTH, v_BKTH, block_mask=mask, enable_gqa=grouped, return_aux=request)
    share_BNT = (cast("Tensor", aux.lse) - sinks_N[:, None]).sigmoid()  # of the keys in the softmax
    return (out_BNTH * share_BNT[..., None].type_as(out_BNTH)).transpose(1, 2)


def _causal(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: AttentionMask, sinks_N: Tensor | None) -> Tensor:
    assert mask is None
    assert sinks_N is None
    q_BNTH, k_BKTH, v_BKTH = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
    grouped = q_BNTH.shape[1] != k_BKTH.shape[1]
    out_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BKTH, is_causal=True, enable_gqa=grouped)
    return out_BNTH.transpose(1, 2)


def _documents(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: AttentionMask, sinks_N: Tensor | None) -> Tensor:
    assert isinstance(mask, Tensor)
    return document_attention(q_BTNH, k_BTKH, v_BTKH, mask, sinks_N)[0]


def _ranges(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: AttentionMask, sinks_N: Tensor | None) -> Tensor:
    assert CPU is not None
    assert not isinstance(mask, BlockMask)
    assert sinks_N is None
    return CPU.attend(q_BTNH, k_BTKH, v_BTKH, mask)[0]


_FLEX = Kernel(name="flex", attend=_flex)
_CAUSAL = Kernel(name="torch", attend=_causal, over_keys=BLOCKWISE)
_DOCUMENTS = Kernel(name="torch", attend=_documents, over_keys=BLOCKWISE)
_CPU = Kernel(name="cpu", attend=_ranges, over_keys=None if CPU is None else CPU.OVER_KEYS)
KERNELS = {kernel.name: kernel for kernel in (_CAUSAL, _CPU) if kernel.over_keys is not None}
"""Those that context parallelism can use."""


def choose_attention(
    q_BTNH: Tensor, mask: AttentionMask, *, in_eager: bool, has_sinks: bool = False, over_keys: bool = False
) -> Kernel:
    """Returns the kernel for these queries: the only place that decides.

    | device | mask      |                                                                                        |
    |--------|-----------|----------------------------------------------------------------------------------------|
    | CPU    | all       | kernels behind the door `cpu` where they are faster; `in_eager`: in eager training too |
    | any    | None      | torch's attention                                                                      |
    | any    | starts    | torch's kernels in blocks, on GPUs FlashAttention within documents                     |
    | GPU    | BlockMask | FlexAttention; mask_from() builds one where FlashAttention does not do                 |

    All ranks decide alike: run/kernel_record.py settles before the first step what all of them can use. Kernels for
    whole rows have no sinks; those `over_keys` have.
    """
    if isinstance(mask, BlockMask):
        return _FLEX
    if CPU is not None and q_BTNH.device.type == "cpu" and (over_keys or not has_sinks):
        in_eager = in_eager and (torch.compiler.is_compiling() or not is_fake(q_BTNH))
        if CPU.has_faster_attention(q_BTNH.dtype, head_dim=q_BTNH.shape[-1], in_eager=in_eager):
            return _CPU
    return _CAUSAL if mask is None else _DOCUMENTS


def mask_device(device: torch.device, *, dtype: torch.dtype, window: int | None) -> torch.device:
    """Returns where mask_from() needs starts: on the CPU, except for FlexAttention."""
    by_flash = device.type == "cuda" and window is None and has_flash_attention(device, dtype)
    return torch.device("cpu") if by_flash else device


def mask_from(starts_BT: Tensor) -> BlockMask | Tensor:
    """Returns the mask of tokens that attend to those from these indices of the row on, for the device's kernel."""
    return starts_BT if starts_BT.device.type == "cpu" else block_mask(starts_BT)


class AttentionModule(nn.Module):
    """Base of modules that attend by a kernel: faster ones in compiled blocks and, after use_kernels(), in training.

    Without gradients eager attention is torch's.
    """

    _in_eager = False

    def choose(
        self, q_BTNH: Tensor, mask: AttentionMask, *, has_sinks: bool = False, over_keys: bool = False
    ) -> Kernel:
        """Returns the kernel for these queries."""
        return choose_attention(q_BTNH, mask, in_eager=self._in_eager, has_sinks=has_sinks, over_keys=over_keys)


def use_kernels(model: nn.Module) -> None:
    """Lets attention of a model use faster kernels in eager training; results differ by rounding."""
    for module in model.modules():
        if isinstance(module, AttentionModule):
            module._in_eager = True


_TORCH = (flash_attention, efficient_attention, cudnn_attention, cpu_flash_attention)
OPERATORS = frozenset(
    {
        *(attention.default for attention in _TORCH), torch.ops.higher_order.flex_attention,
        torch.ops.torchtitan_clone.document_attention.default, *(CPU.KEPT if CPU is not None else ()),
    }
)  # fmt: skip
"""Operators of attention, which selective activation checkpointing keeps."""


def describe_kernels(device: torch.device, *, dtype: str) -> str:
    """Activates FlashAttention 3 on GPUs that it is for; returns a line about the kernels of a GPU, "" for a CPU."""
    if device.type == "cpu":
        return ""
    others = "FlexAttention, with rotated keys by memory-efficient attention"
    if not has_flash_attention(device, getattr(torch, dtype)):
        return f"attention within documents, in {dtype}: by {others}"
    version = activate_flash_attention(torch.cuda.get_device_capability(device))
    return f"attention: by FlashAttention {version}; within windows by {others}"
