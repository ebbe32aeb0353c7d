"""Feed-forward layers. Legend: B batch, T tokens, D model."""

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_clone.ops.linear import Linear


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x). Source: arXiv 2002.05202."""

    def __init__(self, *, dim: int, hidden_dim: int):
        super().__init__()
        self.w1 = Linear(dim, hidden_dim, bias=False)
        self.w2 = Linear(hidden_dim, dim, bias=False)
        self.w3 = Linear(dim, hidden_dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))
