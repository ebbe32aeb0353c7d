"""Attention of a context group whose ranks are computed one after another in one process."""

import torch

from torchtitan_clone.ops.attention import document_starts
from torchtitan_clone.ops.blockwise_attention import Gradients, attend_, attend_backward_, empty_attention
from torchtitan_clone.parallel.context import local_tokens


def attention_of_all_ranks(q, k, v, grad, documents, *, degree, segments_of, starts_of=document_starts):
    """Returns result and gradients; `documents` are on the CPU, `segments_of` is called as flash_segments()."""
    ranks = [local_tokens(q.shape[1], rank=rank, degree=degree, method="ring") for rank in range(degree)]
    places = [torch.cat([torch.arange(p.start, p.stop) for p in pieces]) for pieces in ranks]
    on_device = [place.to(q.device) for place in places]
    total_out, gradients = torch.zeros_like(q), Gradients.zeros(q, k)
    for pieces, place, own in zip(ranks, places, on_device, strict=True):
        starts = None if documents is None else starts_of(documents)[:, place]
        limits = {"queries": pieces, "starts_BT": starts}
        limits["segments"] = segments_of(q[:, own], **limits)
        out, lse = empty_attention(q[:, own])
        sources = [
            (keys, (q[:, own], k[:, others], v[:, others]), others)
            for keys, others in zip(ranks, on_device, strict=True)
        ]
        for keys, qkv, _ in sources:
            attend_((out, lse), qkv, keys=keys, **limits)
        total_out[:, own] = out.to(q.dtype)
        for keys, qkv, others in sources:
            more_gradients = Gradients.zeros(*qkv[:2])
            attend_backward_(more_gradients, grad[:, own], qkv, (out.to(q.dtype), lse), keys=keys, **limits)
            for total, more, place in zip(gradients, more_gradients, (own, others, others), strict=True):
                total[:, place] += more
    return [total_out, *gradients]
