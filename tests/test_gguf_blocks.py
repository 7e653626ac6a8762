"""Blocks of GGUF's quantized types, taken apart and put together again."""

import numpy as np
import pytest
import torch

from nextn.checkpoint.gguf_blocks import BLOCK_TYPES, K_QUANTS, KQuantWeight, take_apart

gguf = pytest.importorskip("gguf")

_HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where the float16 scales of a block begin; else at 0


def random_blocks(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Blocks of random bytes with finite scales, [rows, bytes]."""
    generator, num_bytes = np.random.default_rng(len(kind) + rows), BLOCK_TYPES[kind].num_bytes
    data = generator.integers(0, 256, (rows, blocks, num_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        data[..., 0] = generator.integers(0, 200, (rows, blocks))
    else:
        for place in _HALVES.get(kind, (0,)):
            halves = generator.normal(size=(rows, blocks, 1)).astype(np.float16)
            data[..., place : place + 2] = halves.view(np.uint8)
    return data.reshape(rows, -1)


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
