"""Quantized tensors in the files of releases, of which regions are read in fp32.

Legend of MXFP4: E experts, R and C rows and columns of a matrix; each group of 32 values of a row has one scale.
"""

import torch
from torch import Tensor

from torchtitan_clone.checkpoint.tensor_file import Entry
from torchtitan_clone.documents import shorten
from torchtitan_clone.ops.tensor_slices import Sliceable

SCALES = "_scale_inv"
"""End of the name of a quantized matrix's scales, of which each block of its rows and columns has one."""
BLOCK = 128
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
"""Ends of the names of both parts of a tensor in MXFP4."""
GROUP = 32
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class BlockScaled:
    """A matrix in 8 bits with a scale for each block of 128 x 128, of which regions can be read in fp32."""

    def __init__(self, values: Sliceable, *, scales: Sliceable) -> None:
        self._values = values
        self._scales = scales

    def __getitem__(self, region: tuple[slice, ...]) -> Tensor:
        values = self._values[region].float()
        scales = self._scales[tuple(slice(dim.start // BLOCK, -(-dim.stop // BLOCK)) for dim in region)]
        for axis, dim in enumerate(region):  # which may end beyond the values
            scales = scales.repeat_interleave(BLOCK, axis).narrow(axis, dim.start % BLOCK, values.shape[axis])
        return values * scales


class Mxfp4:
    """Stacked matrices [E, C, R] in 4 bits: values [E, R, C/32, 16], two in a byte, and exponents [E, R, C/32].

    Source: OCP Microscaling Formats (MX) 1.0.
    """

    def __init__(self, values: Sliceable, *, scales: Sliceable) -> None:
        self._values = values
        self._scales = scales

    def __getitem__(self, region: tuple[slice, ...]) -> Tensor:
        experts, columns, rows = region
        groups = slice(columns.start // GROUP, -(-columns.stop // GROUP))
        bytes_ERGb = self._values[experts, rows, groups, slice(0, GROUP // 2)]
        exponents_ERG = self._scales[experts, rows, groups]
        # One expert at a time: indices need many times the memory of the bytes.
        pairs = zip(bytes_ERGb, exponents_ERG, strict=True)
        values_ERC = torch.stack([_matrix(*pair) for pair in pairs])
        first = columns.start % GROUP
        return values_ERC[..., first : first + columns.stop - columns.start].transpose(1, 2)


def _matrix(bytes_RGb: Tensor, exponents_RG: Tensor) -> Tensor:
    """Returns the values of one expert [R, C], fp32; the first of two values is in the low bits."""
    table = torch.cat((_FP4, -_FP4))
    values_RG32 = table[torch.stack((bytes_RGb & 15, bytes_RGb >> 4), dim=-1).int()].flatten(-2)
    return torch.ldexp(values_RG32, exponents_RG[..., None].int() - 127).flatten(-2)


def find_scaling_error(values: Entry, scales: Entry, *, shape: tuple[int, ...]) -> str | None:
    """Returns how the parts of a quantized tensor of that shape differ from what is supported."""
    if values.torch_dtype == torch.uint8:
        return _mxfp4_error(values, scales, shape=shape)
    blocks = tuple(-(-size // BLOCK) for size in shape)
    if (scales.torch_dtype, scales.shape) == (torch.float32, blocks):
        return None
    wanted = f"blocks of {BLOCK} x {BLOCK} have F32 and {list(blocks)}"
    return f"{scales.name} has {_described(scales)}, and {wanted}; convert the weights to bfloat16"


def _mxfp4_error(values: Entry, scales: Entry, *, shape: tuple[int, ...]) -> str | None:
    if len(shape) != 3 or shape[1] % GROUP:
        return f"{values.name}: MXFP4 is supported for stacked matrices with rows of a multiple of {GROUP} values only"
    groups = (shape[0], shape[2], shape[1] // GROUP)
    for entry, wanted in ((values, (*groups, GROUP // 2)), (scales, groups)):
        if (entry.torch_dtype, entry.shape) != (torch.uint8, wanted):
            return f"{entry.name} has {_described(entry)}, and the model's in MXFP4 has U8 and {list(wanted)}"
    return None


def _described(entry: Entry) -> str:
    return f"type {entry.dtype} and shape {shorten(str(list(entry.shape)))}"
