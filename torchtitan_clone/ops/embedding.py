"""The embedding of tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_clone.torch_compat import is_fake


class Embedding(nn.Embedding):
    """Looks up in float32 where a CPU trains in bfloat16, with the same results.

    torch's backward adds the gradient of one token after another to a total in the weight's type there, in which the
    gradients of frequent tokens are lost.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or is_fake(weight):
            return super().forward(input)
        return F.embedding(input, weight.float()).to(weight.dtype)
