"""Balances the load of experts: counts of tokens, a bias without auxiliary loss, auxiliary losses and statistics.

Legend: B rows, T tokens of a row, E experts, K experts of a token, L layers, A auxiliary terms.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from torchtitan_clone.interfaces import RowShards

BATCH, SEQUENCE, Z = "batch_balance", "sequence_balance", "router_z"
"""Names of the auxiliary terms."""


class Balanced(Protocol):
    """A router, as seen from here: `counts_E` since it was last set to zero, its bias, and the load of a step."""

    counts_E: Tensor
    expert_bias: Tensor | None
    expert_load: Tensor | None
    bias_update_rate: float


# ---------------------------------------------------------------- counts


@torch.library.custom_op("torchtitan_clone::count_experts", mutates_args={"counts_E"})
def _count(counts_E: Tensor, experts_BTK: Tensor, is_context_BT: Tensor | None) -> None:
    is_counted_N = _is_counted(experts_BTK, is_context_BT).flatten()
    counts_E += count_experts(experts_BTK.flatten(), num_experts=len(counts_E), is_counted=is_counted_N)


@_count.register_fake
def _(counts_E: Tensor, experts_BTK: Tensor, is_context_BT: Tensor | None) -> None: ...


def _is_counted(experts_BTK: Tensor, is_context_BT: Tensor | None) -> Tensor:
    """Returns 1 for the experts [B, T, K] of tokens that count and 0 for others, int64."""
    if is_context_BT is None:
        return torch.ones_like(experts_BTK)
    return is_context_BT[..., None].expand_as(experts_BTK).to(experts_BTK.dtype)


def count_experts(experts: Tensor, *, num_experts: int, is_counted: Tensor | None = None) -> Tensor:
    """Returns how often each expert is among the last dimension of `experts` [*, N]: [*, E], int64.

    `is_counted` [*, N] is 1 for those that count and 0 for others; None: all do.
    """
    counts = experts.new_zeros(*experts.shape[:-1], num_experts)
    is_counted = torch.ones_like(experts) if is_counted is None else is_counted
    return counts.scatter_add_(-1, experts, is_counted)  # bincount has no kernel for the meta device


class TokenCounter(torch.autograd.Function):
    """Returns the scores, and counts the chosen experts when their gradient is computed.

    Backward runs exactly once for each token that is trained: recomputed forwards and validation do not count. Nor do
    tokens that are no context of a target.
    """

    @staticmethod
    def forward(
        ctx: Any, scores_BTK: Tensor, experts_BTK: Tensor, is_context_BT: Tensor | None, counts_E: Tensor
    ) -> Tensor:
        ctx.save_for_backward(experts_BTK, is_context_BT)
        ctx.counts_E = counts_E  # not saved: other micro-batches change it before backward
        return scores_BTK.view_as(scores_BTK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        _count(ctx.counts_E, *ctx.saved_tensors)
        return grads[0], None, None, None


class ExpertLoads:
    """Tokens per expert of all layers of a model, of which this rank has some.

    `routers` are those of this rank, `sizes` the numbers of experts of all routers of the model, by name.
    """

    def __init__(self, *, routers: Mapping[str, Balanced], sizes: Mapping[str, int]):
        self._routers = routers
        self._sizes = sizes

    def reset(self) -> None:
        """Sets the counts of this rank to zero."""
        for router in self._routers.values():
            router.counts_E.zero_()

    def own(self, device: torch.device) -> Tensor:
        """Returns the counts of this rank [sum of E], router by router; zeros for those of other ranks."""
        counts = {name: router.counts_E for name, router in self._routers.items()}
        zeros = partial(torch.zeros, dtype=torch.int64, device=device)
        own = [counts[name] if name in counts else zeros(size) for name, size in self._sizes.items()]
        return torch.cat(own) if own else zeros(0)

    def by_router(self, counts: Sequence[float]) -> dict[str, Tensor]:
        """Returns [E] of each router, fp64, of counts in the order of own()."""
        parts = torch.tensor(counts, dtype=torch.float64).split(list(self._sizes.values()))
        return dict(zip(self._sizes, parts, strict=True))

    def update(self, loads: Mapping[str, Tensor]) -> None:
        """Updates bias and load of this rank's routers with the counts [E] of a step's global batch."""
        for name, router in self._routers.items():
            update_router(router, loads[name])


def update_router(router: Balanced, counts_E: Tensor) -> None:
    """Adds to the bias the rate times sign(mean - count), less its mean over the experts; keeps the load.

    Computed in fp64 on the CPU, so that the bits are the same on every rank. Source: arXiv 2408.15664. A router whose
    layer is frozen has no counts and stays as it is.
    """
    if not counts_E.any():
        return
    if router.expert_bias is not None:
        change_E = (counts_E.mean() - counts_E).sign() * router.bias_update_rate
        router.expert_bias += (change_E - change_E.mean()).to(router.expert_bias)
    if router.expert_load is not None:
        router.expert_load.copy_(counts_E / counts_E.mean())


# ---------------------------------------------------------------- auxiliary losses


def auxiliary_sums(
    logits_BTE: Tensor, scores_BTE: Tensor, experts_BTK: Tensor, is_context_BT: Tensor | None, *, terms: Sequence[str],
    load_E: Tensor | None, rows: RowShards | None,
) -> Tensor | None:  # fmt: skip
    """Returns the sums [A] over this rank's tokens of each of the `terms`, fp32; None if there are none.

    Of the tokens those that are context of a target; without `is_context_BT` all.
    With p the scores of a token divided by their sum, and f the tokens of each expert over the mean of the experts,
    a token has the sum over the experts of f * p, which is 1 if either is balanced:
    batch_balance with f of the global batch of the last step that was committed, ones before the first. The load of the
    batch itself would need another forward; that of a micro-batch would depend on its size. Sources: arXiv 2101.03961,
    and for the global batch 2501.11873, which uses the micro-batches so far.
    sequence_balance with f of the token's row. Source: arXiv 2412.19437.
    router_z is the square of the logarithm of the sum of the exponentials of its logits. Source: arXiv 2202.08906.
    """
    if not terms:
        return None
    probs_BTE = scores_BTE / (scores_BTE.sum(dim=-1, keepdim=True) + 1e-20)
    probs_BTE = probs_BTE if is_context_BT is None else probs_BTE * is_context_BT[..., None]
    sums: dict[str, Tensor] = {}
    if BATCH in terms:
        assert load_E is not None
        sums[BATCH] = (probs_BTE * load_E).sum()
    if SEQUENCE in terms:
        load_BE = _row_load(experts_BTK, is_context_BT, num_experts=logits_BTE.shape[-1], rows=rows)
        sums[SEQUENCE] = (probs_BTE * load_BE[:, None]).sum()
    if Z in terms:
        squares_BT = logits_BTE.logsumexp(dim=-1).square()
        sums[Z] = (squares_BT if is_context_BT is None else squares_BT * is_context_BT).sum()
    return torch.stack([sums[name] for name in terms])


def _row_load(experts_BTK: Tensor, is_context_BT: Tensor | None, *, num_experts: int, rows: RowShards | None) -> Tensor:
    """Returns [B, E]: the tokens of each expert in complete rows, over the mean of the experts; 0 without context."""
    is_counted_BN = _is_counted(experts_BTK, is_context_BT).flatten(1)
    counts_BE = count_experts(experts_BTK.flatten(1), num_experts=num_experts, is_counted=is_counted_BN)
    counts_BE = counts_BE if rows is None else rows.sum(counts_BE)
    return counts_BE * num_experts / counts_BE.sum(dim=-1, keepdim=True).clamp_min(1)


# ---------------------------------------------------------------- statistics


def load_statistics(loads: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns numbers about the counts [E] of all routers, by the names of metrics; none without routers.

    The largest load of an expert over the mean, of the worst layer; the entropy of the load, 1 if balanced, and the
    share of experts without tokens, each as the mean over the layers.
    """
    trained = [counts_E for counts_E in loads.values() if counts_E.any()]
    if not trained:
        return {}
    shares_LE = torch.stack(trained) / torch.stack(trained).sum(dim=1, keepdim=True)
    entropy_L = torch.special.entr(shares_LE).sum(dim=1) / math.log(max(2, shares_LE.shape[1]))
    return {
        "load_max_over_mean": (shares_LE.amax(dim=1) * shares_LE.shape[1]).max().item(),
        "load_entropy": entropy_L.mean().item(),
        "dead_experts": (shares_LE == 0).double().mean().item(),
    }
