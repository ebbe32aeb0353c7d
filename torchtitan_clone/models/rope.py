"""Rotary position embedding, in the half-rotation layout of Hugging Face. Source: arXiv 2104.09864.

Legend: B batch, T tokens, N heads, K kv heads, H head dim, R rotated features of a head,
r = R/2 pairs of them.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from torchtitan_clone.config.schema_training import Range, Size

Factor = Annotated[float, Range(1e-6, 1e6)]
Positions = tuple[Tensor, ...] | Tensor | None
"""What attention does with positions: rotates q and k by cosines and sines [B, T, 1, R], then multiplies q by a factor
[B, T, 1, 1] if one follows them; or multiplies q only; or nothing."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Stretches the long wavelengths by `factor`, for contexts longer than in pretraining.

    "linear" stretches all by `factor`. "llama3" reads the fields with freq in their name, "yarn" those from `beta_fast`
    on, "default" none: it unsets the scaling of a flavor. Source: arXiv 2306.15595, arXiv 2407.21783, arXiv 2309.00071.
    """

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "llama3"
    factor: Factor = 8.0
    low_freq_factor: Factor = 1.0
    high_freq_factor: Factor = 4.0
    original_max_seq_len: Size = 8192
    beta_fast: Factor = 32.0
    """Rotations within `original_max_seq_len` from which a pair of features is not stretched."""
    beta_slow: Factor = 1.0
    """Rotations up to which it is stretched completely."""
    truncate: bool = True
    """Whether the range between both is extended to complete pairs of features."""
    mscale: Annotated[float, Range(0.0, 1000.0)] = 1.0
    mscale_all_dim: Annotated[float, Range(0.0, 1000.0)] = 0.0
    attention_factor: Annotated[float, Range(0.0, 1e6)] = 0.0
    """Factor of cosines and sines; 0: computed from `factor` and both of mscale."""

    def magnitude(self) -> float:
        """Returns the factor of cosines and sines."""
        if self.rope_type != "yarn":
            return 1.0
        return self.attention_factor or self.growth(self.mscale) / self.growth(self.mscale_all_dim)

    def growth(self, mscale: float) -> float:
        """Returns 1 + 0.1 mscale ln(factor), by which YaRN scales what queries and keys contribute to the logits."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0


@dataclass(frozen=True, kw_only=True)
class QueryScale:
    """Factor of queries: 1 + scale ln(1 + floor((position + first) / floor)).

    Source: arXiv 2501.19399.
    """

    scale: float = 0.1
    floor: int = 8192
    first: int = 1
    """Number of a document's first token."""

    def factors(self, positions_BT: Tensor) -> Tensor:
        """Returns [B, T, 1, 1], fp32."""
        steps_BT = ((positions_BT + self.first) // self.floor).float()
        return (1 + self.scale * steps_BT.log1p())[..., None, None]


@dataclass(frozen=True, kw_only=True)
class RopeArgs:
    """Rotary positions of a kind of layers."""

    dim: int
    """Rotated features of each head, the first ones: even, and at most the head's."""
    theta: float
    scaling: RopeScaling | None = None
    query_scale: QueryScale | None = None


class Rotary(nn.Module):
    """Computes what layers of a kind need to know of positions; None: nothing."""

    inv_freq: Tensor

    def __init__(self, args: RopeArgs | QueryScale | None):
        super().__init__()
        self.args = args
        if isinstance(args, RopeArgs):
            self.register_buffer("inv_freq", torch.empty(args.dim // 2, dtype=torch.float32), persistent=False)

    def init_buffers(self, device: torch.device | None = None) -> None:
        """Computes the frequencies, on `device` or where they are."""
        if isinstance(args := self.args, RopeArgs):
            at = device or self.inv_freq.device
            self.inv_freq = inverse_frequencies(args.dim, theta=args.theta, scaling=args.scaling, device=at)

    def forward(self, positions_BT: Tensor) -> Positions:
        if self.args is None:
            return None
        if isinstance(self.args, QueryScale):
            return self.args.factors(positions_BT)
        scaling, query_scale = self.args.scaling, self.args.query_scale
        rope = cos_sin(positions_BT, self.inv_freq, magnitude=scaling.magnitude() if scaling is not None else 1.0)
        return rope if query_scale is None else (*rope, query_scale.factors(positions_BT))


def inverse_frequencies(dim: int, *, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Returns the angle per position of each pair of features [dim/2], fp32."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
    inv_freq = 1.0 / (theta**exponents)
    if scaling is None:
        return inv_freq
    if scaling.rope_type == "linear":
        return inv_freq / scaling.factor
    if scaling.rope_type == "yarn":
        stretched = _stretched_share(dim, theta=theta, scaling=scaling).to(device)
        return inv_freq / scaling.factor * stretched + inv_freq * (1 - stretched)
    wavelength = 2 * math.pi / inv_freq
    old = scaling.original_max_seq_len
    smooth = (old / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    is_long = wavelength > old / scaling.low_freq_factor
    is_short = wavelength < old / scaling.high_freq_factor
    return torch.where(is_long, inv_freq / scaling.factor, torch.where(is_short, inv_freq, blended))


def _stretched_share(dim: int, *, theta: float, scaling: RopeScaling) -> Tensor:
    """Returns how much YaRN stretches each pair of features [dim/2], from 0 to 1."""

    def index_of(rotations: float) -> float:
        """Index of the pair that makes as many rotations within the original length; negative if none does."""
        return dim * math.log(scaling.original_max_seq_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if last == first or last < 0:  # a step; negative where even the fastest pair rotates less than beta_slow times
        last = first + 0.001
    return ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)


def cos_sin(positions_BT: Tensor, inv_freq: Tensor, *, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine of every position's angles, each [B, T, 1, R] times `magnitude`, fp32.

    The sines of the first r features are negated: rotate() adds the exchanged halves times the sines.
    """
    angles_BT1r = (positions_BT[..., None].float() * inv_freq)[:, :, None, :]
    cos, sin = angles_BT1r.cos(), angles_BT1r.sin()
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return (cos, sin) if magnitude == 1.0 else (cos * magnitude, sin * magnitude)


def rotate(x_BTNH: Tensor, cos_BT1R: Tensor, sin_BT1R: Tensor) -> Tensor:
    """Rotates each pair (i, i + R/2) of the first R features by its position's angle; in fp32, result in x's dtype.

    Takes cosines and sines of cos_sin(), whose first r sines are negated.
    """
    rotated = cos_BT1R.shape[-1]
    if rotated < x_BTNH.shape[-1]:
        return torch.cat((rotate(x_BTNH[..., :rotated], cos_BT1R, sin_BT1R), x_BTNH[..., rotated:]), dim=-1)
    if not torch.compiler.is_compiling():
        return _Rotation.apply(x_BTNH, cos_BT1R, sin_BT1R)
    exchanged_BTNH = x_BTNH.unflatten(-1, (2, -1)).flip(-2).flatten(-2)  # one pass, where torch.cat would take two
    return (x_BTNH * cos_BT1R + exchanged_BTNH * sin_BT1R).type_as(x_BTNH)


class _Rotation(torch.autograd.Function):
    """Rotates with the same bits in four operators; its gradient is the opposite rotation, rounded once."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_BTNR: Tensor, cos_BT1R: Tensor, sin_BT1R: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BT1R, sin_BT1R)
        return _rotated(x_BTNR, cos_BT1R, sin_BT1R, sign=1)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        return _rotated(*grad_outputs, *ctx.saved_tensors, sign=-1), None, None


def _rotated(x_BTNR: Tensor, cos_BT1R: Tensor, sin_BT1R: Tensor, *, sign: int) -> Tensor:
    """Returns x rotated by the angles, or with sign -1 by the opposite ones."""
    out_BTNR, exchanged_BTNR = x_BTNR * cos_BT1R, x_BTNR.roll(x_BTNR.shape[-1] // 2, dims=-1)
    if x_BTNR.dtype == torch.float32:
        return out_BTNR.add_(exchanged_BTNR.mul_(sin_BT1R), alpha=sign)
    return torch.add(out_BTNR, exchanged_BTNR * sin_BT1R, alpha=sign, out=torch.empty_like(x_BTNR))


def apply_positions(q_BTNH: Tensor, k_BTKH: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
    """Returns queries and keys with their positions."""
    if positions is None:
        return q_BTNH, k_BTKH
    if isinstance(positions, Tensor):
        return scale_queries(q_BTNH, positions), k_BTKH
    cos_BT1R, sin_BT1R, *factors = positions
    return scale_queries(rotate(q_BTNH, cos_BT1R, sin_BT1R), *factors), rotate(k_BTKH, cos_BT1R, sin_BT1R)


def scale_queries(q_BTNH: Tensor, *factors_BT11: Tensor) -> Tensor:
    """Returns queries times the factor of their positions, if there is one."""
    for factor_BT11 in factors_BT11:
        q_BTNH = (q_BTNH * factor_BT11).type_as(q_BTNH)
    return q_BTNH
