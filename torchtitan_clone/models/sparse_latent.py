"""Latent attention to the keys that a small indexer selects, which learns from attention itself.

Legend: B batch, T tokens, t tokens of this rank in sequence parallelism, D model, L latent, N heads, H head dim,
V dimensions of a value, R rotary dimensions, M heads of the indexer, I their size. Source: arXiv 2512.02556.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_clone.models.decoder import TransformerBlock
from torchtitan_clone.models.mla import LatentAttention, LatentSizes, Rotation
from torchtitan_clone.models.mtp import PredictionBlock
from torchtitan_clone.models.rope import Positions, rotate
from torchtitan_clone.ops.attention import AttentionMask
from torchtitan_clone.ops.dtensor_shards import local_with_partial_grad
from torchtitan_clone.ops.layers import LayerNorm, TokenLinear
from torchtitan_clone.ops.sparse_attention import Index, SparseCore
from torchtitan_clone.ops.weight_use import REPLICATED, WeightUse, WeightUses

INDEXER_KL = "indexer_kl"
"""Name of the auxiliary term of indexers."""
KEY_NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class IndexSizes:
    """Sizes of an indexer."""

    heads: int
    head_dim: int
    top_k: int
    """Keys that a query attends to; 0: all that it sees."""


class Indexer(nn.Module):
    """Computes what scores of keys follow from; every tensor-parallel rank has all of its heads."""

    WEIGHT_USES: ClassVar[WeightUses] = {
        "wq_b.weight": WeightUse(is_replicated=True, saved=1.0), "wk.weight": WeightUse(is_replicated=True, saved=2.0),
        "weights_proj.weight": REPLICATED,
    }  # fmt: skip

    def __init__(self, sizes: IndexSizes, *, dim: int, q_latent: int):
        super().__init__()
        self.wq_b = TokenLinear(q_latent, sizes.heads * sizes.head_dim, bias=False)
        self.wk = TokenLinear(dim, sizes.head_dim, bias=False)
        self.k_norm = LayerNorm(sizes.head_dim, eps=KEY_NORM_EPS)
        self.weights_proj = nn.Linear(dim, sizes.heads, bias=False)
        self.gathered = nn.Identity()  # a module, so that tensor parallelism can gather the tokens of all ranks

    def forward(self, x_BtD: Tensor, q_BtL: Tensor, rope: Rotation) -> Index:
        """Returns the index of all tokens, from hidden states and latents of queries."""
        weight_MD = local_with_partial_grad(self.weights_proj.weight)
        weights_BtM = F.linear(x_BtD.float(), weight_MD.float()) * len(weight_MD) ** -0.5
        found = self.wq_b(q_BtL), self.k_norm(self.wk(x_BtD)), weights_BtM
        q_BTI, k_BTI, weights_BTM = map(self.gathered, found)
        assert rope is not None
        q_BTMI = rotate(q_BTI.unflatten(-1, (-1, k_BTI.shape[-1])), *rope[:2])
        return q_BTMI, rotate(k_BTI[:, :, None], *rope[:2])[:, :, 0], weights_BTM


class SparseLatentAttention(LatentAttention):
    """LatentAttention to selected keys. Its gradients do not reach the indexer, whose own reach nothing else."""

    def __init__(
        self, sizes: LatentSizes, *, index_sizes: IndexSizes, dim: int, n_heads: int, score_scale: float = 1.0
    ):
        super().__init__(sizes, dim=dim, n_heads=n_heads, score_scale=score_scale)
        self.indexer = Indexer(index_sizes, dim=dim, q_latent=sizes.q_latent)
        self.core = SparseCore(top_k=index_sizes.top_k)
        self.loss = nn.Identity()  # a module, so that tensor parallelism can sum and shard it

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride], also with a loss
        self, x_BtD: Tensor, rope: Rotation, mask: AttentionMask
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns [B, t, D], and with gradients the loss of the indexer at each token [B, t]."""
        q_BtL = self.query_latent(x_BtD)
        index = self.indexer(x_BtD.detach(), q_BtL.detach(), rope)
        return self.attend(self.queries(q_BtL, rope), *self.latents(x_BtD, rope), mask, index)

    def attend(  # pyright: ignore[reportIncompatibleMethodOverride], also with a loss
        self, q_BTNH: Tensor, latent_BtL: Tensor, key_BT1R: Tensor, mask: AttentionMask, index: Index | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        assert index is not None
        k_BTNH, v_BTNV = self.keys_and_values(latent_BtL, key_BT1R)
        out_BTNV, loss_BT = self.core(q_BTNH, k_BTNH, v_BTNV, index, mask)
        out_BtD = self.wo(out_BTNV.flatten(-2))
        return (out_BtD, self.loss(loss_BT)) if torch.is_grad_enabled() else out_BtD


class IndexedBlock(TransformerBlock):
    """A block with the loss of its indexer, which is the last of its auxiliary terms."""

    def forward(
        self, x_BTD: Tensor, rope: Positions, mask: AttentionMask, is_context_BT: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns [B, T, D], and with gradients sums [A] of auxiliary terms, of context if it is given."""
        terms: list[Tensor] = []
        out = self.attention(self.attention_norm(x_BTD), rope, mask)
        if not isinstance(out, Tensor):
            out, loss_BT = out
            terms = [(loss_BT if is_context_BT is None else loss_BT * is_context_BT).sum()[None]]
        x_BTD = x_BTD + out
        out = self.feed_forward(self.ffn_norm(x_BTD), is_context_BT)
        if not isinstance(out, Tensor):
            out, sums_A = out
            terms = [sums_A, *(terms or [sums_A.new_zeros(1)])]
        return (x_BTD + out, torch.cat(terms)) if terms else x_BTD + out


class IndexedPredictionBlock(PredictionBlock, IndexedBlock):
    """The block of one depth of multi-token prediction, around an IndexedBlock."""
