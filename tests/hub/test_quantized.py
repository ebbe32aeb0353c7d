"""Regions of quantized tensors: those of the tensor that transformers dequantizes."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from torchtitan_clone.hub.quantized import BlockScaled, Mxfp4


@pytest.mark.parametrize(
    "region", [(0, 3, 0, 96, 0, 10), (1, 2, 31, 33, 7, 10), (2, 3, 64, 65, 0, 1), (0, 1, 40, 96, 3, 4)], ids=str
)
def test_regions_in_4_bits_are_those_of_transformers(region):
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 3, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(0, 254, (3, 10, 3), generator=random, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    index = tuple(slice(*region[axis : axis + 2]) for axis in (0, 2, 4))
    assert torch.equal(Mxfp4(blocks, scales=scales)[index], expected[index])


@pytest.mark.parametrize("region", [(0, 200, 0, 130), (127, 129, 128, 130), (5, 6, 0, 1)], ids=str)
def test_regions_in_8_bits_are_multiplied_by_their_scales(region):
    values, scales = torch.randn(200, 130).to(torch.float8_e4m3fn), torch.rand(2, 2)
    expected = values.float() * scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :130]
    index = (slice(*region[:2]), slice(*region[2:]))
    assert torch.equal(BlockScaled(values, scales=scales)[index], expected[index])
