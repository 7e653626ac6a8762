"""Blocks of GGUF's quantized types, taken apart and put together again."""

import numpy as np
import pytest
import torch
from packed import random_blocks
from quick import loop

from nextn.checkpoint.gguf_blocks import KQuantWeight, block_scales, take_apart
from nextn.checkpoint.gguf_file import BLOCK_TYPES, K_QUANTS

gguf = pytest.importorskip("gguf")

ENDS = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (2, 4)),
    "Q6_K": (210,),
    "MXFP4": (1,),
}  # of the scales in a block; else 2


@loop("kind", BLOCK_TYPES)
def test_values_have_the_bits_of_the_gguf_package(kind: str) -> None:
    data = random_blocks(kind, 5, 3)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    weight = take_apart(torch.from_numpy(data.copy()), kind)
    assert isinstance(weight, KQuantWeight) == (kind in K_QUANTS)
    assert np.array_equal(weight.dequantize().numpy(), expected)


@loop("kind", BLOCK_TYPES)
def test_sizes_are_those_of_the_gguf_package(kind: str) -> None:
    size, num_bytes, bits, group_size = BLOCK_TYPES[kind]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == (size, num_bytes)
    weight = take_apart(torch.from_numpy(random_blocks(kind, 2, 4)), kind)
    assert weight.codes.shape == (2, 4 * size)
    assert int(weight.codes.max()) < 2**bits
    groups = weight.group_scales if isinstance(weight, KQuantWeight) else weight.scales
    assert groups.shape == (2, 4 * size // group_size)


@loop(("kind", "end"), [(kind, end) for kind in BLOCK_TYPES for end in ENDS.get(kind, (2,))])
def test_scales_show_values_that_are_not_finite(kind: str, end: int) -> None:
    data = torch.from_numpy(random_blocks(kind, 5, 2))
    assert block_scales(data, kind).isfinite().all()
    data[3, end - 1] = 0xFF
    finite = take_apart(data, kind).dequantize().isfinite().all(1)
    assert torch.equal(block_scales(data, kind).isfinite().all(1), finite)
    assert finite.tolist() == [True, True, True, False, True]


def test_every_exponent_of_mxfp4() -> None:
    data = torch.full((256, 17), 0x77, dtype=torch.uint8)  # the largest value
    data[:, 0] = torch.arange(256)
    finite = take_apart(data, "MXFP4").dequantize().isfinite().all(1)
    assert torch.equal(block_scales(data, "MXFP4").isfinite().all(1), finite)
    assert 0 < finite.sum() < 256
