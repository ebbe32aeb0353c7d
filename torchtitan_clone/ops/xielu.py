"""A feed-forward without gate, whose activation is learned. Source: arXiv 2411.13010."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_clone.ops.dtensor_shards import local_with_partial_grad
from torchtitan_clone.ops.layers import Linear
from torchtitan_clone.ops.weight_use import LAST, WeightUse, WeightUses

BETA, EPS, ALPHA = 0.5, -1e-6, 0.8
"""Constants of all releases; the last is the first value of both a."""
ALPHA_P = math.log(math.expm1(ALPHA))
"""First value of the parameter whose softplus is a_p."""
ALPHA_N = math.log(math.expm1(ALPHA - BETA))
"""First value of the parameter whose softplus, plus beta, is a_n."""


class XIELU(nn.Module):
    """a_p x^2 + beta x above zero, a_n (expm1(min(x, eps)) - x) + beta x below, with learned a_p and a_n."""

    beta: Tensor
    eps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.full((1,), ALPHA_P))
        self.alpha_n = nn.Parameter(torch.full((1,), ALPHA_N))
        self.register_buffer("beta", torch.empty(()))
        self.register_buffer("eps", torch.empty(()))
        self.init_buffers()

    def init_buffers(self, device: torch.device | None = None) -> None:
        """Sets the constants, which releases have among their weights."""
        self.beta = torch.full((), BETA, dtype=self.beta.dtype, device=device or self.beta.device)
        self.eps = torch.full((), EPS, dtype=self.eps.dtype, device=device or self.eps.device)

    def forward(self, x: Tensor) -> Tensor:
        alpha_p, alpha_n = (F.softplus(local_with_partial_grad(alpha)) for alpha in (self.alpha_p, self.alpha_n))
        below = (torch.expm1(torch.minimum(x, self.eps)) - x) * (self.beta + alpha_n)
        return torch.where(x > 0, alpha_p * x * x, below) + self.beta * x


class XieluFeedForward(nn.Module):
    """w2(xIELU(w1 x))."""

    WEIGHT_USES: ClassVar[WeightUses] = {"w1.weight": WeightUse(saved=4.0), "w2.weight": LAST}

    def __init__(self, *, dim: int, hidden_dim: int):
        super().__init__()
        self.w1 = Linear(dim, hidden_dim, bias=False)
        self.w2 = Linear(hidden_dim, dim, bias=False)
        self.activation = XIELU()

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(self.activation(self.w1(x_BTD)))
