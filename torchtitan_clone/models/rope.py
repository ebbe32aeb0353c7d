"""Rotary position embedding, in the half-rotation layout of Hugging Face. Source: arXiv 2104.09864.

Legend: B batch, T tokens, N heads, H head dim.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from torchtitan_clone.config.schema import Range, Size

Factor = Annotated[float, Range(0.0, 1e6, above=True)]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Stretches the long wavelengths by `factor`, for contexts longer than in pretraining (Llama 3.1)."""

    factor: Factor = 8.0
    low_freq_factor: Factor = 1.0
    high_freq_factor: Factor = 4.0
    original_max_seq_len: Size = 8192


def inverse_frequencies(head_dim: int, *, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Returns the angle per position of each pair of features [H/2], fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    inv_freq = 1.0 / (theta**exponents)
    if scaling is None:
        return inv_freq
    wavelength = 2 * math.pi / inv_freq
    old = scaling.original_max_seq_len
    smooth = (old / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    is_long = wavelength > old / scaling.low_freq_factor
    is_short = wavelength < old / scaling.high_freq_factor
    return torch.where(is_long, inv_freq / scaling.factor, torch.where(is_short, inv_freq, blended))


def cos_sin(positions_BT: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the cosine and sine of every position's angles, each [B, T, 1, H], fp32."""
    angles_BTH = positions_BT[..., None].float() * inv_freq
    angles_BTH = torch.cat((angles_BTH, angles_BTH), dim=-1)[:, :, None, :]
    return angles_BTH.cos(), angles_BTH.sin()


def rotate(x_BTNH: Tensor, cos_BT1H: Tensor, sin_BT1H: Tensor) -> Tensor:
    """Rotates each pair (i, i + H/2) of features by its position's angle; computed in fp32, returned in x's dtype."""
    first, second = x_BTNH.chunk(2, dim=-1)
    half_rotated = torch.cat((-second, first), dim=-1)
    return (x_BTNH * cos_BT1H + half_rotated * sin_BT1H).type_as(x_BTNH)
