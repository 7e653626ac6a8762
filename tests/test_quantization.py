"""Weights of seven, eight and four bits: how far they are from what they were, and how they are packed."""

import pytest
import torch
from quick import loop
from reference_products import pack_in_torch, round_rows
from torch import Tensor

from nextn.checkpoint.quantized_weights import round_to_nearest
from nextn.errors import ConfigError
from nextn.runtime.native.abi import BYTES, INT4, Runtime, load
from nextn.runtime.native.grouped import (
    EIGHT_BITS,
    FOUR_BITS,
    GroupedFormat,
    GroupedWeight,
    group_size,
    quantize_groups,
)
from nextn.runtime.native.memory import HugePages
from nextn.runtime.native.weight_packing import (
    SEVEN_BITS,
    PackedMatrix,
    PackedWeights,
    dequantize,
    pack_quantized,
    quantize,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def packed(weight: Tensor) -> Tensor:
    return pack_quantized(weight, HugePages().take, load())


def test_a_weight_is_off_by_half_a_step_of_its_row():
    weight = drawn(50, 70) * torch.logspace(-6, 6, 50)[:, None].bfloat16()
    codes, scales = quantize(weight)
    assert codes.dtype == torch.int8
    assert codes.abs().amax(1).eq(63).all()
    steps = weight.float().abs().amax(1, keepdim=True) / 63
    assert ((dequantize(codes, scales) - weight.float()).abs() <= steps * 0.5001).all()


def test_zeros_stay_zeros():
    codes, scales = quantize(torch.zeros(3, 4).bfloat16())
    assert torch.equal(dequantize(codes, scales), torch.zeros(3, 4))


def test_activations_are_off_by_half_a_step_of_their_group():
    x = drawn(3, 300) * torch.logspace(-3, 3, 300).bfloat16()
    x[2, 128:] = 0
    codes, scales = round_rows(x)
    assert codes.shape == (3, 3, 128)
    assert codes.abs().amax(-1)[:2].eq(32767).all()
    near = (codes * scales[..., None]).flatten(1)[:, :300]
    steps = scales.repeat_interleave(128, dim=1)[:, :300]
    in_float32 = 4 * 32767 * 2**-24  # four operations on codes of up to 32767
    assert ((near - x.float()).abs() <= steps * (0.5 + in_float32)).all()


def test_experts_are_matrices_one_by_one():
    weight = drawn(3, 20, 40)
    assert torch.equal(packed(weight), torch.cat([packed(each) for each in weight]))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 32), (17, 33), (264, 384)])
def test_the_size_is_the_kernels(n, k):
    assert len(packed(drawn(n, k))) == load().library.nextn_packed_bytes(SEVEN_BITS.type, n, k)


def test_only_bfloat16_is_rounded_and_each_weight_packed_once():
    weights, plain = PackedWeights(load(), SEVEN_BITS), PackedWeights(load())
    half = drawn(20, 40)
    assert weights.pack([half]).type == BYTES
    assert weights.pack([half]).memory.data_ptr() == weights.pack([half.clone()]).memory.data_ptr()
    assert weights.pack([half.float()]).type == plain.pack([half.float()]).type == 0
    assert plain.pack([half]).type == 1
    assert isinstance(plain.pack([half]), PackedMatrix)


def test_some_weights_are_kept_as_they_are():
    """A router's, and what is not of the model's type."""
    wide, router = drawn(20, 40).float(), drawn(4, 40).float()
    weights = PackedWeights(load(), EIGHT_BITS, torch.float32, [(router, None)])
    assert weights.pack([wide]).type == EIGHT_BITS.type
    assert weights.pack([router]).type == 0
    assert weights.pack([wide.bfloat16()]).type == 1


def test_bytes_lie_as_kernels_read_them():
    weight = torch.zeros(16, 32).bfloat16()
    weight[3, 5] = 63
    weight[3, 0] = -63
    whole = packed(weight).view(torch.uint8)
    blocks = whole[: 16 * 32].view(8, 16, 4)
    assert blocks[1, 3, 2] == 64 + 63  # k = 5: the second of its four lies third
    assert blocks[0, 3, 0] == 64 - 63
    scales = whole[16 * 32 :].view(torch.float32)
    assert scales.tolist() == [1.0] * 16
    x, out = drawn(2, 32, seed=1), torch.empty(2, 16)
    Runtime(load().library, 1).call("linear", [out, x, packed(weight)], [16, 32, 1, BYTES])
    assert torch.allclose(out[:, 3], 63 * (x[:, 5].float() - x[:, 0].float()), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 32), (17, 33), (264, 384)])
def test_the_native_packing_gives_the_bits_of_the_one_in_torch(n, k):
    weight = drawn(n, k) * torch.logspace(-6, 6, n)[:, None].bfloat16()
    weight[n // 2] = 0
    weight[0, :: k // 2 + 1] *= 0.5  # halfway between two codes
    assert torch.equal(packed(weight), pack_in_torch(weight))


def test_weights_of_several_slices_are_packed_as_one(monkeypatch):
    runtime, weight = load(), drawn(200, 96)
    whole, quantized = runtime.pack(weight), packed(weight)
    four = FOUR_BITS.pack(weight, HugePages().take, runtime)
    monkeypatch.setattr("nextn.runtime.native.memory._SLICE", 64 * 96 * 2)
    assert torch.equal(FOUR_BITS.pack(weight, HugePages().take, runtime), four)
    assert torch.equal(runtime.pack(weight), whole)
    assert torch.equal(packed(weight), quantized)


groups = pytest.mark.parametrize("group", [32, 64, 128])


@groups
def test_four_bits_are_nearer_than_rounding_over_the_whole_range(group):
    """Groups are off by less in sum. At the finest scale, a ninth of the largest value, one of 9 scales has code 7."""
    weight = drawn(50, 300).float() * torch.logspace(-6, 6, 50)[:, None]
    weight[7, :50], weight[8], weight[9] = 0, 0, weight[9].abs() + 1e3
    found = quantize_groups(weight, 4, group, load())
    split = lambda values: torch.nn.functional.pad(values, (0, -300 % group)).unflatten(1, (-1, group))  # noqa: E731
    values, off = split(weight), split(found.dequantized - weight)
    steps = (values.abs().amax(2, keepdim=True) / 7).clamp_min(1e-30)
    whole = (values / steps).round() * steps - values
    assert (off.abs() <= 2 * 7 / 9 * steps).all()
    assert (off.norm(dim=2) <= whole.norm(dim=2) * 1.005 + 1e-2 * steps[..., 0]).all()  # scales are rounded, too
    assert off[1:7].norm() < 0.9 * whole[1:7].norm()
    assert torch.equal(found.dequantized[8], torch.zeros(300))
    assert int(found.codes.max()) == 15


@groups
@loop("bits", [4, 8])
@loop("scale_type", [torch.float16, torch.bfloat16])
def test_codes_are_packed_as_they_are(group, bits, scale_type):
    """With any zero points, and scales of sixteen bits."""
    draws = torch.Generator().manual_seed(0)
    codes = torch.randint(2**bits, (70, 300), generator=draws, dtype=torch.uint8)
    scales = (torch.rand(70, -(-300 // group), generator=draws) * 0.01).to(scale_type)
    # Version 1 of GPTQ's format has a zero point of 16, too.
    zeros = torch.randint(17 if bits == 4 else 256, scales.shape, generator=draws, dtype=torch.uint8)
    weight, layout = GroupedWeight(codes, scales, zeros), GroupedFormat(bits, group)
    memory = layout.pack_rows(weight, HugePages().take)
    assert len(memory) == load().library.nextn_packed_bytes(layout.type, 70, 300)
    rows = torch.empty(70, 300)
    load().call("grouped_embedding", [rows, memory, torch.arange(70)], [70, 300, layout.type])
    assert torch.equal(rows, weight.dequantized)


def test_groups_of_four_bits_have_sizes_that_the_kernels_know():
    assert [group_size(300, count) for count in (10, 5, 3)] == [32, 64, 128]
    with pytest.raises(ConfigError, match=r"3 groups of 128 values .* expected groups of 32, 64 or 128"):
        group_size(128, 3)
    with pytest.raises(ConfigError, match="quantize_groups"):
        quantize_groups(drawn(4, 128), 4, 48, load())


def test_some_weights_have_four_bits_and_so_have_their_parts():
    layer, other, router = drawn(20, 64), drawn(20, 64, seed=1), drawn(4, 64, seed=2)
    weights = PackedWeights(load(), EIGHT_BITS, formats=[(router, None), (layer, FOUR_BITS)])
    types = [weights.pack([weight]).type for weight in (layer, layer[10:], other, router, layer.float())]
    assert types == [INT4, INT4, EIGHT_BITS.type, 1, 0]


@groups
def test_eight_bits_are_off_by_half_a_step_of_their_group(group):
    """Steps differ by a factor of ten from group to group, so that those of another group, or of a row, are seen."""
    weight = drawn(50, 300).float() * torch.logspace(-6, 6, 50)[:, None]
    weight *= 10.0 ** (torch.arange(300) // group % 2)
    found = quantize_groups(weight, 8, group, load())
    padded = torch.nn.functional.pad(weight, (0, -300 % group)).unflatten(1, (-1, group))
    steps = (padded.abs().amax(2) / 127).repeat_interleave(group, 1)[:, :300]
    sixteen_bits = 128 * 2**-16  # of the scale, times the largest code
    assert ((found.dequantized - weight).abs() <= steps * (0.5 + sixteen_bits)).all()
    assert found.zeros.eq(128).all()
    assert torch.equal(quantize_groups(torch.zeros(3, 300), 8, group, load()).dequantized, torch.zeros(3, 300))


@groups
@pytest.mark.parametrize("bits", [4, 8])
def test_the_native_rounding_gives_the_bits_of_the_one_in_torch(bits, group):
    """Of `nextn quantize`: codes and scales; scales of float32 keep sixteen bits when they are packed."""
    weight = drawn(50, 4 * group) * torch.logspace(-6, 6, 50)[:, None].bfloat16()
    weight[7, :50], weight[8], weight[9] = 0, 0, weight[9].abs() + 1e3
    for each in (weight, weight.float() * 1.001):
        found, expected = quantize_groups(each, bits, group, load()), round_to_nearest(each, bits, group)
        assert torch.equal(found.codes, expected.codes)
        near = 2.0**-16 if each.dtype == torch.float32 else 0.0
        torch.testing.assert_close(found.scales, expected.scales.float(), rtol=near, atol=0)
        assert found.zeros.eq(2 ** (bits - 1)).all()
