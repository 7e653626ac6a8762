"""Weights of seven bits: how far they are from what they were, and products with them."""

import pytest
import torch
from torch import Tensor

from nextn.runtime.native import weight_packing
from nextn.runtime.native.abi import BYTES, Runtime, load
from nextn.runtime.native.memory import HugePages
from nextn.runtime.native.weight_packing import MAX_CODE, PackedMatrix, PackedWeights, dequantize


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def packed(weight: Tensor) -> Tensor:
    return weight_packing.pack_quantized(weight, HugePages().take)


def test_a_weight_is_off_by_half_a_step_of_its_row():
    weight = drawn(50, 70) * torch.logspace(-6, 6, 50)[:, None].bfloat16()
    codes, scales = weight_packing.quantize(weight)
    assert codes.dtype == torch.int8
    assert codes.abs().amax(1).eq(MAX_CODE).all()
    steps = weight.float().abs().amax(1, keepdim=True) / MAX_CODE
    assert ((dequantize(codes, scales) - weight.float()).abs() <= steps * 0.5001).all()


def test_zeros_stay_zeros():
    codes, scales = weight_packing.quantize(torch.zeros(3, 4).bfloat16())
    assert torch.equal(dequantize(codes, scales), torch.zeros(3, 4))


def test_experts_are_matrices_one_by_one():
    weight = drawn(3, 20, 40)
    assert torch.equal(packed(weight), torch.cat([packed(each) for each in weight]))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 32), (17, 33), (264, 384)])
def test_the_size_is_the_kernels(n, k):
    assert len(packed(drawn(n, k))) == load().library.nextn_packed_bytes(BYTES, n, k)


def test_only_bfloat16_is_rounded_and_each_weight_packed_once():
    weights, plain = PackedWeights(load(), quantize_bf16=True), PackedWeights(load())
    half = drawn(20, 40)
    assert weights.pack([half]).type == BYTES
    assert weights.pack([half]).memory.data_ptr() == weights.pack([half.clone()]).memory.data_ptr()
    assert weights.pack([half.float()]).type == plain.pack([half.float()]).type == 0
    assert plain.pack([half]).type == 1
    assert isinstance(plain.pack([half]), PackedMatrix)


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
    native = weight_packing.pack_quantized(weight, HugePages().take, load().pack_bytes)
    assert torch.equal(native, packed(weight))


def test_weights_of_several_slices_are_packed_as_one(monkeypatch):
    runtime, weight = load(), drawn(200, 96)
    whole, quantized = runtime.pack(weight), packed(weight)
    monkeypatch.setattr("nextn.runtime.native.memory._SLICE", 64 * 96 * 2)
    assert torch.equal(runtime.pack(weight), whole)
    assert torch.equal(packed(weight), quantized)
    assert torch.equal(weight_packing.pack_quantized(weight, HugePages().take, runtime.pack_bytes), quantized)
