"""The orthogonal factor of matrices by Newton-Schulz iterations: products of matrices only, without an SVD.

For u = U S V^T the result is close to U V^T: an odd polynomial, applied several times, keeps U and V and brings each
singular value close to 1. Legend: B matrices, M rows, N columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Coefficients = Sequence[tuple[float, float, float]]

COEFFICIENTS: dict[str, Coefficients] = {
    "quintic": ((3.4445, -4.7750, 2.0315),),
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}
"""Coefficients (a, b, c) of the polynomial a x + b x^3 + c x^5 of each iteration; the last ones are repeated.

Sources: "quintic" https://kellerjordan.github.io/posts/muon, "polar_express" arXiv 2505.16932.
"""
_SAFETY = {"quintic": 1.0, "polar_express": 1.02}
"""What the norm is multiplied by: the first polynomial of Polar Express diverges for singular values above 1."""
_EPS = 1e-7


def orthogonalize(u_BMN: Tensor, *, coefficients: str, iterations: int, dtype: torch.dtype) -> Tensor:
    """Returns the approximate orthogonal factor [B, M, N] of each matrix in `dtype`; zeros for a matrix of zeros.

    Singular values of the result are about 0.7 to 1.2 after five iterations, unless they were below 1e-4 of the norm.
    """
    x = u_BMN.to(dtype)
    # The product with itself is cheaper on the shorter side.
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    # Summed in fp32. Rounding the scale to bfloat16 changes all values alike, which the iterations correct.
    norm_B11 = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    scale_B11 = (norm_B11 * _SAFETY[coefficients]).clamp(min=_EPS).reciprocal()
    x = iterate(x * scale_B11.to(dtype), coefficients=coefficients, iterations=iterations)
    return x.mT if is_tall else x


def iterate(x_BMN: Tensor, *, coefficients: str, iterations: int) -> Tensor:
    """Returns matrices, whose norm is at most about 1, after the iterations of orthogonalize(): products alone."""
    triples = COEFFICIENTS[coefficients]
    x = x_BMN
    for iteration in range(iterations):
        a, b, c = triples[min(iteration, len(triples) - 1)]
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def orthogonalize_flops(rows: int, cols: int, *, iterations: int) -> int:
    """Returns the floating-point operations of orthogonalize() for one matrix: products of 2 m^2 n and 2 m^3 each."""
    m, n = sorted((rows, cols))
    return iterations * (4 * m * m * n + 2 * m**3)
