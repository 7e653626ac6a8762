"""Blocks of GGUF's quantized types, taken apart and put together again."""

import numpy as np
import pytest
import torch
from gguf_types import random_blocks

from nextn.checkpoint.gguf_blocks import BLOCK_TYPES, K_QUANTS, KQuantWeight, take_apart

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_values_have_the_bits_of_the_gguf_package(kind: str) -> None:
    data = random_blocks(kind, 5, 3)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    weight = take_apart(torch.from_numpy(data.copy()), kind)
    assert isinstance(weight, KQuantWeight) == (kind in K_QUANTS)
    assert np.array_equal(weight.dequantize().numpy(), expected)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_sizes_are_those_of_the_gguf_package(kind: str) -> None:
    size, num_bytes, bits, group_size = BLOCK_TYPES[kind]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == (size, num_bytes)
    weight = take_apart(torch.from_numpy(random_blocks(kind, 2, 4)), kind)
    assert weight.codes.shape == (2, 4 * size)
    assert int(weight.codes.max()) < 2**bits
    groups = weight.group_scales if isinstance(weight, KQuantWeight) else weight.scales
    assert groups.shape == (2, 4 * size // group_size)
