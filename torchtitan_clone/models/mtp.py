"""Multi-token prediction: a block for each depth k predicts the token k after the next one. Source: arXiv 2412.19437.

Legend: B batch, T tokens, D model.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from torchtitan_clone.config.schema_training import Range
from torchtitan_clone.interfaces import MTP_LOSS
from torchtitan_clone.models.decoder import ModelArgs, TransformerBlock
from torchtitan_clone.models.moe import MoEModelArgs
from torchtitan_clone.models.rope import Positions
from torchtitan_clone.ops.attention import AttentionMask
from torchtitan_clone.ops.layers import RMSNorm, TokenLinear
from torchtitan_clone.ops.weight_use import REPLICATED, WeightUses


@dataclass(frozen=True, kw_only=True)
class PredictingModelArgs(MoEModelArgs):
    """Arguments of a model with a mixture of experts that may predict several tokens."""

    mtp_depth: Annotated[int, Range(0, 64)] = 0  # pyright: ignore[reportIncompatibleMethodOverride], a field here
    """Tokens after the next one that training predicts too, each with a layer of its own."""
    mtp_loss_weight: Annotated[float, Range(0.0, 1e6, above=True)] = 0.3
    """What the mean of the losses of all depths is multiplied by; the published models began with 0.3."""

    @property
    def auxiliary(self) -> dict[str, float]:
        """Coefficients of the terms that the loss of the next token is added to, by name."""
        depths = range(1, self.mtp_depth + 1)
        return {f"{MTP_LOSS}_{depth}": self.mtp_loss_weight / len(depths) for depth in depths} | self.moe.auxiliary


class PredictionBlock(TransformerBlock):
    """The block of one depth, which gets the normalized hidden states of the depth before, and returns its own."""

    WEIGHT_USES: ClassVar[WeightUses] = {"eh_proj.weight": REPLICATED}

    def __init__(self, args: ModelArgs, *, attention: nn.Module, feed_forward: nn.Module):
        super().__init__(args, attention=attention, feed_forward=feed_forward)
        self.enorm = RMSNorm(args.dim, eps=args.norm_eps)
        self.hnorm = RMSNorm(args.dim, eps=args.norm_eps)
        self.eh_proj = TokenLinear(2 * args.dim, args.dim, bias=False)
        self.norm = RMSNorm(args.dim, eps=args.norm_eps)

    def forward(
        self, x_BTD: Tensor, rope: Positions, mask: AttentionMask, is_context_BT: Tensor | None = None,
        embedded_BTD: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Returns the same as TransformerBlock; `embedded_BTD` are embeddings of the token k after each position."""
        assert embedded_BTD is not None
        # In the order of the published weights; the report has the hidden states first.
        x_BTD = self.eh_proj(torch.cat((self.enorm(embedded_BTD), self.hnorm(x_BTD)), dim=-1))
        out = super().forward(x_BTD, rope, mask, is_context_BT)
        return self.norm(out) if isinstance(out, Tensor) else (self.norm(out[0]), out[1])
