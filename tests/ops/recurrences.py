"""The gated delta rule token by token in fp64, which the one in chunks is compared with."""

import torch


def recurrence(q, k, v, decay, beta, starts=None, state=None):
    """Returns out [B, T, N, V] and the last state, as gated_delta_rule() does."""
    q, k, v, decay, beta = (x.double() for x in (q, k, v, decay, beta))
    repeats = v.shape[2] // k.shape[2]
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(repeats, dim=2) for x in (q, k))
    decay = decay if decay.ndim == 4 else decay[..., None]
    S = torch.zeros(*v.shape[:1], *v.shape[2:3], k.shape[3], v.shape[3], dtype=torch.float64)
    S = S if state is None else state.double()
    outs = []
    for t in range(q.shape[1]):
        if starts is not None:
            S = S * (starts[:, t] != t)[:, None, None, None]
        S = S * decay[:, t, :, :, None].exp()
        error = v[:, t] - torch.einsum("bnkv,bnk->bnv", S, k[:, t])
        S = S + k[:, t, :, :, None] * (beta[:, t, :, None] * error)[:, :, None]
        outs.append(torch.einsum("bnkv,bnk->bnv", S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, dim=1), S
