"""Fusion of the norm of each head with its rotary embedding: the same bits, queries and keys in one call, and only if
nothing else reads the intermediate result."""

import pytest
import torch
from fusions import both
from quick import loop

ANGLES = torch.randn(1, 1, 5, 16, generator=torch.Generator().manual_seed(2))
WEIGHT = 1 + torch.randn(2, 16, generator=torch.Generator().manual_seed(3)) / 4
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def normed(x, which=0):
    """[2, heads, 5, 16]"""
    rows = x.reshape(2, 5, -1, 16)
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (WEIGHT[which].to(x.dtype) * wide.to(x.dtype)).transpose(1, 2)


def angles(x, count=16):
    """Of the input's type, and no constants: their positions are an input, too."""
    moved = x.flatten()[0] * 0 + ANGLES[..., :count].to(x.dtype)
    return moved.cos(), moved.sin()


def turned(x, cosine, sine):
    lower, upper = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-upper, lower), dim=-1) * sine


def whole(x):
    cosine, sine = angles(x)
    return turned(normed(x), cosine, sine)


def part(x):
    cosine, sine = angles(x, 8)
    heads = normed(x)
    return torch.cat((turned(heads[..., :8], cosine, sine), heads[..., 8:]), dim=-1)


def queries_and_keys(x):
    cosine, sine = angles(x)
    queries, keys = normed(x), normed(x[..., :16], 1)
    return turned(queries, cosine, sine), turned(keys, cosine, sine)


def parts_of_both(x):
    cosine, sine = angles(x, 8)
    queries, keys = normed(x), normed(x[..., 16:], 1)
    out = turned(queries[..., :8], cosine, sine), turned(keys[..., :8], cosine, sine)
    return tuple(torch.cat((one, all_[..., 8:]), dim=-1) for one, all_ in zip(out, (queries, keys), strict=True))


def unlike_norms(x):
    """Of another eps, and with the norm weight before the one rounding."""
    cosine, sine = angles(x)
    queries, wide = normed(x), x[..., :16].reshape(2, 5, 1, 16).float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 0.25)
    keys = (wide * (1 + WEIGHT[1].to(x.dtype).float())).to(x.dtype).transpose(1, 2)
    return turned(queries, cosine, sine), turned(keys, cosine, sine)


def beside_a_gate(x):
    """As Qwen3.5 has it: each head's queries and its gate come out of one product, side by side."""
    cosine, sine = angles(x)
    queries, gate = x.view(2, 5, -1, 32).chunk(2, dim=-1)
    return turned(normed(queries), cosine, sine) * torch.sigmoid(gate.transpose(1, 2))


def kept(x):
    cosine, sine = angles(x)
    heads = normed(x)
    return turned(heads, cosine, sine), heads


def read_again(x):
    cosine, sine = angles(x)
    heads = normed(x)
    return turned(heads, cosine, sine) + heads


def rest_elsewhere(x):
    cosine, sine = angles(x, 8)
    heads = normed(x)
    return turned(heads[..., :8], cosine, sine), heads[..., 8:] * 1


def rest_first(x):
    cosine, sine = angles(x, 8)
    heads = normed(x)
    return torch.cat((heads[..., 8:], turned(heads[..., :8], cosine, sine)), dim=-1)


def other_channels(x):
    cosine, sine = angles(x, 8)
    heads = normed(x)
    return torch.cat((turned(heads[..., 8:], cosine, sine), heads[..., :8]), dim=-1)


def keys_of_queries(x):
    """The second reads what the first writes."""
    cosine, sine = angles(x)
    queries = turned(normed(x), cosine, sine)
    return turned(normed(queries.transpose(1, 2), 1), cosine, sine)


def its_input_changes(x):
    cosine, sine = angles(x)
    given = x * 1
    heads = normed(given)
    given += 1
    return turned(heads, cosine, sine), given


@TYPES
@pytest.mark.parametrize("function", [whole, part, beside_a_gate])
def test_norm_and_rotation_are_one_op(function, dtype):
    ops = both(function, dtype, (2, 5, 64)).ops
    assert ops.count("norm_rope") == 1
    assert not {"rms_norm", "rope", "copy"} & set(ops[ops.index("cos") :])


@TYPES
@pytest.mark.parametrize("function", [queries_and_keys, parts_of_both, unlike_norms])
def test_queries_and_keys_are_one_call(function, dtype):
    ops = both(function, dtype).ops
    assert ops.count("norm_rope") == 1
    assert not {"rms_norm", "rope"} & set(ops)


@TYPES
@loop("function", [kept, read_again, rest_elsewhere, rest_first, other_channels, its_input_changes])
def test_what_others_read_stays(function, dtype):
    ops = both(function, dtype).ops
    assert "norm_rope" not in ops
    assert {"rms_norm", "rope"} <= set(ops)


@TYPES
def test_one_behind_the_other_are_two_calls(dtype):
    assert both(keys_of_queries, dtype).ops.count("norm_rope") == 2


@TYPES
def test_workers_share_rows_of_both(dtype):
    assert "norm_rope" in both(parts_of_both, dtype, (2, 5, 64 * 16)).ops
