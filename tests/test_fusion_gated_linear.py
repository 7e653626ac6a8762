"""Fusion of SwiGLU with its linear layers: the same bits, and only if nothing else reads the layers."""

import pytest
import torch
import torch.nn.functional as F
from fusions import both
from quick import loop

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
DRAWS = torch.Generator().manual_seed(2)
WIDE = [torch.randn(40, 48, generator=DRAWS) for _ in range(2)]
WHOLE, BIAS = torch.randn(80, 48, generator=DRAWS), torch.randn(40, generator=DRAWS)


@pytest.fixture(autouse=True)
def weights():
    """Constants of each type, the same tensors in every recording."""
    for dtype in (torch.float32, torch.bfloat16):
        CONSTANT[dtype] = [each.to(dtype) for each in (*WIDE, WHOLE, BIAS)]


CONSTANT: dict[torch.dtype, list[torch.Tensor]] = {}


def layer(x, at, bias=None):
    return F.linear(x, CONSTANT[x.dtype][at], bias)


def mlp(x):
    return F.silu(layer(x, 0)) * layer(x, 1)


def other_way_round(x):
    up = layer(x, 1)
    return up * F.silu(layer(x, 0))


def one_matrix(x):
    gate, up = layer(x, 2).chunk(2, dim=-1)
    return F.silu(gate) * up


def upper_half(x):
    up, gate = layer(x, 2).chunk(2, dim=-1)
    return F.silu(gate) * up


TOGETHER = {"two layers": mlp, "the product last": other_way_round, "halves": one_matrix, "upper half": upper_half}


def read_again(x):
    gate, up = layer(x, 0), layer(x, 1)
    return F.silu(gate) * up + up


def kept(x):
    gate, up = layer(x, 0), layer(x, 1)
    return F.silu(gate) * up, gate


def with_biases(x):
    bias = CONSTANT[x.dtype][3]
    return F.silu(layer(x, 0, bias)) * layer(x, 1, bias)


def its_input_changes(x):
    a = x + 1
    gate, up = layer(a, 0), layer(a, 1)
    a.mul_(2)
    return F.silu(gate) * up, a


def other_rows(x):
    gate, up = layer(x, 0), layer(x, 1)
    return F.silu(gate) * up.flip(0)


def part_of_it(x):
    out = layer(x, 2)
    return F.silu(out[..., :20]) * out[..., 40:60]


def itself(x):
    out = layer(x, 0)
    return F.silu(out[..., :20]) * out[..., 20:]


APART = {
    "read again": read_again,
    "kept": kept,
    "with biases": with_biases,
    "other rows": other_rows,
    "part of it": part_of_it,
}


@TYPES
@pytest.mark.parametrize("name", TOGETHER)
def test_a_gate_and_its_layers_are_one_op(name, dtype):
    ops = both(TOGETHER[name], dtype).ops
    assert ops.count("gated_linear") == 1
    assert not {"linear", "silu_mul"} & set(ops)


@TYPES
@loop("name", APART)
def test_others_stay_apart(name, dtype):
    assert "gated_linear" not in both(APART[name], dtype).ops


@TYPES
def test_halves_of_no_whole_blocks(dtype):
    assert both(itself, dtype).ops.count("gated_linear") == 1


@TYPES
def test_a_changed_input_parts_them(dtype):
    assert "gated_linear" not in both(its_input_changes, dtype).ops


@TYPES
@pytest.mark.parametrize("shape", [(1, 1, 48), (1, 13, 48), (3, 17, 48)], ids=str)
def test_any_number_of_rows(shape, dtype):
    assert both(mlp, dtype, shape).ops.count("gated_linear") == 1
