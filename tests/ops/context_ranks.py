"""Attention of a context group whose ranks are computed one after another in one process."""

import torch

from torchtitan_clone.ops.attention import document_starts
from torchtitan_clone.ops.varlen_attention import Queries
from torchtitan_clone.parallel.mesh import local_tokens


def attention_of_all_ranks(q, k, v, grad, documents, *, degree, kernel, starts_of=document_starts):
    """Returns result and gradients; `documents` are on the CPU, `kernel` is a PartialKernel."""
    ranks = [local_tokens(q.shape[1], rank=rank, degree=degree, method="ring") for rank in range(degree)]
    places = [torch.cat([torch.arange(span.start, span.stop) for span in spans]) for spans in ranks]
    on_device = [place.to(q.device) for place in places]
    total_out, kv_totals = torch.zeros_like(q), [torch.zeros_like(x, dtype=torch.float32) for x in (k, v)]
    q_total = torch.zeros_like(q, dtype=torch.float32)
    for spans, place, own in zip(ranks, places, on_device, strict=True):
        starts = None if documents is None else starts_of(documents)[:, place]
        queries = Queries(spans=spans, starts_BT=starts, num_rows=len(q))
        sources = [
            (keys, (q[:, own], k[:, others], v[:, others]), others)
            for keys, others in zip(ranks, on_device, strict=True)
        ]
        attention, q_grad = None, None
        for keys, qkv, _ in sources:
            attention = kernel.attend(qkv, queries=queries, keys=keys, merge_into=attention)
        out = attention[0].to(q.dtype)
        total_out[:, own] = out
        for keys, qkv, others in sources:
            kv_grads = [torch.empty_like(x, dtype=torch.float32) for x in qkv[1:]]
            options = {"queries": queries, "keys": keys, "q_grad": q_grad, "kv_grads": kv_grads}
            q_grad = kernel.attend_backward(grad[:, own], qkv, (out, attention[1]), **options)
            for total, gradient in zip(kv_totals, kv_grads, strict=True):
                total[:, others] += gradient
        q_total[:, own] = q_grad
    return [total_out, q_total, *kv_totals]
