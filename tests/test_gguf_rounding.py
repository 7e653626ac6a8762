"""Rounding to blocks of GGUF, read back by what reads the blocks of files."""

import pytest
import torch

from nextn.checkpoint.gguf_blocks import round_to_blocks, take_apart
from nextn.checkpoint.quantized_weights import round_to_nearest


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
