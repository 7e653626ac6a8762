"""fp8: blocks, scales and names as published."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIGS, build

from nextn.checkpoint import quantized_weights
from nextn.checkpoint.quantization import scale_of
from nextn.families import by_name
from nextn.model.load_head import head_tensors

BLOCK = (4, 8)


def bits(tensor):
    return tensor.view(torch.uint8)


def slow(weight):
    """weight_quant of kernel.py, one block after the other."""
    out, scales = (
        torch.empty(weight.shape, dtype=torch.float8_e4m3fn),
        torch.empty(quantized_weights.scale_shape(weight.shape, BLOCK)),
    )
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scales[i, j] = weight[place].float().abs().max() / 448.0
            out[place] = (weight[place].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return out, scales


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 13), columns=st.integers(1, 19), experts=st.sampled_from([(), (3,)]),
    exponent=st.integers(-30, 10), dtype=st.sampled_from([torch.bfloat16, torch.float32]), seed=st.integers(0, 999),
)  # fmt: skip
def test_there_and_back(rows, columns, experts, exponent, dtype, seed):
    """A block edge that is cut off wrongly, a scale of the wrong block, or bits that wander at each saving."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(*experts, rows, columns, generator=generator) * 2.0**exponent).to(dtype)
    small, scale = quantized_weights.quantize_fp8(weight, BLOCK)
    assert scale.shape == quantized_weights.scale_shape(weight.shape, BLOCK)
    back = quantized_weights.dequantize_fp8(small, scale, BLOCK)
    # e4m3 has 3 bits after the point: half a unit of the last place, or of the smallest subnormal, 2 ** -9.
    largest = weight.float().abs().max().item()
    gap = (back - weight.float()).abs()
    assert bool(
        (gap <= torch.maximum(weight.float().abs() * 2**-4, torch.tensor(largest / 448 * 2**-10)) * 1.001).all()
    )
    again, same = quantized_weights.quantize_fp8(back.to(dtype), BLOCK)
    assert torch.equal(bits(again), bits(small))
    assert torch.equal(same, scale)
    if not experts:
        expected, scales = slow(weight)
        assert torch.equal(bits(small), bits(expected))
        assert torch.equal(scale, scales)


def test_a_block_of_zeros():
    """Divided by its scale of 0, it would be NaN for ever."""
    weight = torch.zeros(8, 8)
    weight[:4] = 1.0
    back = quantized_weights.dequantize_fp8(*quantized_weights.quantize_fp8(weight, BLOCK), BLOCK)
    assert torch.equal(back, weight)


def test_scales_that_are_exponents():
    """MXFP8 keeps exponents as bytes, DeepSeek-V4 as e8m0: taken for numbers, weights are off by powers of two."""
    weight = torch.ones(2, 64).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[126, 128], [127, 130]], dtype=torch.uint8)
    expected = torch.tensor([[0.5, 2.0], [1.0, 8.0]]).repeat_interleave(32, dim=1)
    assert torch.equal(quantized_weights.dequantize_fp8(weight, exponents, (1, 32)), expected)
    assert torch.equal(
        quantized_weights.dequantize_fp8(weight, exponents.view(torch.float8_e8m0fnu), (1, 32)), expected
    )


@pytest.mark.parametrize(
    ("shape", "scale", "block"),
    [
        ((576, 7168), (5, 56), (128, 128)),  # kv_a_proj_with_mqa of DeepSeek-V3: the last block has 64 rows
        ((160, 256), (2, 2), (128, 128)),  # not blocks of 80
        ((8, 300, 200), (8, 3, 2), (128, 128)),
        ((300, 200), (300, 1), (1, 200)),
        ((300, 200), (), (128, 128)),
        ((300, 200), (1,), (128, 128)),
        ((300, 200), (2, 2), None),
        ((300, 200), (300,), None),
        ((200,), (2,), None),
    ],
)
def test_which_block_scales_stand_for(shape, scale, block):
    """A grid that does not fit must not be stretched over the weight."""
    assert quantized_weights.implied_block(shape, scale, (128, 128)) == block


@pytest.mark.parametrize(
    ("config", "block"),
    [
        ({}, (128, 128)),
        ({"weight_block_size": [1, 32]}, (1, 32)),
        ({"weight_block_size": "wide"}, (128, 128)),
        ({"config_groups": {"group_0": {"weights": {"block_structure": [64, 32]}}}}, (64, 32)),
    ],
)
def test_declared_block(config, block):
    """Blocks that the config declares are overlooked."""
    assert quantized_weights.declared_block(config, by_name("deepseek_v3")) == block


def test_where_scales_stand():
    """Each publisher's name for the scales, of a weight and of experts in one tensor."""
    for weight, scale in {
        "a.weight": "a.weight_scale_inv", "b.weight": "b.weight_scale", "c.weight": "c.scale",
        "experts.down_proj": "experts.down_proj_scale_inv",
    }.items():  # fmt: skip
        assert scale_of(weight, {weight, scale}) == scale
    assert scale_of("a.weight", {"a.weight", "b.weight_scale"}) is None


PLAIN = {
    "deepseek_v3": {"eh_proj", "head", "embed_tokens", "gate"},
    "qwen3_next": {"fc", "gate", "shared_expert_gate"},
    "deepseek_v4": {"head", "tok_emb", "gate"},
}


@pytest.mark.parametrize("name", [name for name in PLAIN if name in CONFIGS])
def test_what_stays_plain(name):
    """A router or the projection in fp8 is a head that engines read without its scales."""
    family = by_name(name)
    head = build(name).head
    tensors = head_tensors(head)
    packed = quantized_weights.quantize_tensors(tensors, family, head.trunk.num_layers)
    plain = {each for each, value in packed.items() if value.ndim > 1 and value.itemsize > 1} & tensors.keys()
    assert {each.split(".")[-2] for each in plain if each.endswith(".weight")} == PLAIN[name]
    small = {each for each, value in packed.items() if value.itemsize == 1}
    assert small == {fp8_weight(each) for each in packed.keys() - tensors.keys()}


def fp8_weight(scale):
    return scale.removesuffix("_scale_inv") if scale.endswith("_scale_inv") else scale.removesuffix("scale") + "weight"
