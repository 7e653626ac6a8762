"""Blocks of GGUF's quantized types: taken apart, put together again, and rounded to."""

import numpy as np
import pytest
import torch
from packed import random_blocks
from quick import loop

from nextn.checkpoint.gguf_blocks import KQuantWeight, block_scales, round_to_blocks, take_apart
from nextn.checkpoint.gguf_file import BLOCK_TYPES, K_QUANTS
from nextn.checkpoint.quantized_weights import round_to_nearest

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


def values_of(weight: torch.Tensor, kind: str, importance=None) -> torch.Tensor:
    return take_apart(round_to_blocks(weight, kind, importance), kind).dequantize()


def drawn(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def test_weights_on_the_grid_of_a_type_stay_as_they_are():
    codes = torch.stack([torch.randperm(32, generator=torch.Generator().manual_seed(row)) % 16 for row in range(6)])
    scales, minima = torch.rand(6, 1).half().float() + 0.01, -torch.rand(6, 1).half().float()
    grid = scales.half().float() * codes + minima
    assert torch.allclose(values_of(grid, "Q4_1"), grid, rtol=0, atol=2e-3)
    symmetric = drawn(5, 64).sign() * 0.25
    assert torch.allclose(values_of(symmetric, "Q8_0"), symmetric, rtol=1e-3)


def test_errors_are_below_those_of_symmetric_codes():
    weight = drawn(40, 96) + 0.5
    error = (values_of(weight, "Q4_1") - weight).square().mean()
    assert error < 0.8 * (round_to_nearest(weight, 4, 32).dequantize() - weight).square().mean()
    assert (values_of(weight, "Q8_0") - weight).abs().max() <= 1.01 * weight.abs().max() / 127 / 2


def test_channels_that_count_more_err_less():
    weight, importance = drawn(40, 96), torch.ones(96)
    importance[::8] = 100
    errors = [(values_of(weight, "Q4_1", each) - weight).square() * importance for each in (None, importance)]
    assert errors[1].mean() < 0.7 * errors[0].mean()


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_extreme_values(kind):
    for value in (0.0, 1e-9, 3.0, -1e4):
        weight = torch.full((2, 32), value)
        assert torch.allclose(values_of(weight, kind), weight, rtol=1e-3, atol=1e-6), value
    packed = pytest.importorskip("gguf", reason="the gguf package checks the blocks")
    rows, weight = round_to_blocks(drawn(3, 64), kind), drawn(3, 64)
    found = packed.quants.dequantize(rows.numpy(), packed.GGMLQuantizationType[kind])
    assert torch.equal(torch.from_numpy(found), values_of(weight, kind))
