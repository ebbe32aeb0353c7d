"""The softmax of logits, some rows at a time where they are to stay in the cache of a CPU.

Legend: D model, V vocabulary (this rank's rows of it), C tokens of a chunk, R ranks that share the vocabulary.
"""

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from torchtitan_clone.ops.layers import linear
from torchtitan_clone.torch_compat import simulates_gpu

_CACHED_LOGITS = 2**17
"""Logits that a thread of a CPU takes at a time, so that they stay in its cache."""


def logits_and_lse(hidden_CD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
    """Returns this rank's logits, and the logarithms of the sums of their exponentials (lse) [C, 1], fp32."""
    logits_CV = linear(hidden_CD, weight_VD)
    lse = [torch.logsumexp(logits.float(), dim=-1, keepdim=True) for logits, _ in rows_in_cache(logits_CV, None)]
    return logits_CV, torch.cat(lse)


def is_overwritten(logits_CV: Tensor) -> bool:
    """Whether results are written over these logits: new memory would cost a CPU more than the computation."""
    if logits_CV.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not simulates_gpu(logits_CV)


def rows_in_cache(logits_CV: Tensor, lse_RC1: Tensor | None, *others: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yields the rows that softmax takes at a time: on a CPU so many as stay in the cache of each thread."""
    size = len(logits_CV)
    if is_overwritten(logits_CV):
        size = torch.get_num_threads() * max(1, _CACHED_LOGITS // logits_CV.shape[1])
    lse = repeat(None) if lse_RC1 is None else lse_RC1.split(size, dim=1)
    yield from zip(logits_CV.split(size), lse, *(x.split(size) for x in others), strict=False)


def log_softmax(logits_CV: Tensor, lse_RC1: Tensor | None) -> Tensor:
    """Returns this rank's log-probabilities [C, V], fp32; in the memory of fp32 logits if they may be overwritten."""
    logits_CV = logits_CV.float() if is_overwritten(logits_CV) else logits_CV
    out = logits_CV if is_overwritten(logits_CV) else None
    if lse_RC1 is None:  # The kernel has read a row before it writes it.
        return torch.log_softmax(logits_CV, dim=-1, dtype=torch.float32, out=out)
    return torch.sub(logits_CV, lse_RC1.logsumexp(dim=0), out=out)
