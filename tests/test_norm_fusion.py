"""Fusion of RMSNorms, alone, with a residual sum, and with a rotary embedding: the same bits; other operations stay."""

import pytest
import torch
from fusions import both
from quick import loop

EPS = 1e-6


def rms(x, *, eps=EPS):
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def squared(wide):
    return wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + EPS)


def root(wide):
    return torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * wide


def fourth(wide):
    return wide * torch.rsqrt(wide.pow(4).mean(-1, keepdim=True) + EPS)


def rows_eps(eps, wide):
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def other_products(wide):
    return wide * torch.rsqrt((wide * WEIGHT).mean(-1, keepdim=True) + 100)


WEIGHT = torch.randn(48, generator=torch.Generator().manual_seed(3))
SPELLED = {
    "llama": lambda x: WEIGHT.to(x.dtype) * rms(x).to(x.dtype),
    "weight in float": lambda x: (rms(x) * WEIGHT).to(x.dtype),
    "one plus": lambda x: (rms(x) * (1 + WEIGHT.to(x.dtype).float())).to(x.dtype),
    "no weight": lambda x: rms(x, eps=0.25).to(x.dtype),
    "stays float": lambda x: rms(x) * WEIGHT,
    "nothing behind": lambda x: rms(x, eps=1e-5),
    "float weight on a rounded row": lambda x: WEIGHT * rms(x).to(x.dtype),
    "squares as products": lambda x: squared(x.float()),
    "root first": lambda x: root(x.float()) * WEIGHT,
    "per head": lambda x: (WEIGHT[:16].to(x.dtype) * rms(x.view(2, 5, 3, 16)).to(x.dtype)).transpose(1, 2),
    "twice": lambda x: WEIGHT.to(x.dtype) * rms(WEIGHT.to(x.dtype) * rms(x).to(x.dtype)).to(x.dtype),
    "gated": lambda x: WEIGHT.to(x.dtype) * rms(x).to(x.dtype) * torch.sigmoid(x),
    "a weight for each row": lambda x: rms(x) * WEIGHT[:5, None],
    "then a gate": lambda x: rms(x) * x[0, 0],
}
# Operations left after the norms; a weight that follows a rounding to another type is not fused.
BEHIND = {
    "twice": ["rms_norm"],
    "gated": ["sigmoid", "mul"],
    "a weight for each row": ["mul"],
    "then a gate": ["mul"],
    ("float weight on a rounded row", torch.bfloat16): ["mul"],
}
# What is no norm of the last dim, or whose middle is read elsewhere.
OTHERWISE = {
    "mean of columns": lambda x: x.float() * torch.rsqrt(x.float().pow(2).mean(1, keepdim=True) + EPS),
    "of another": lambda x: x.float() * torch.rsqrt((x.float() + 1).pow(2).mean(-1, keepdim=True) + EPS),
    "fourth powers": lambda x: fourth(x.float()),
    "products of two": lambda x: other_products(x.float()),
    "root is kept": lambda x: (lambda root: (x.float() * root, root))(
        torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    ),
    "mean is kept": lambda x: (lambda mean: x.float() * torch.rsqrt(mean + EPS) + mean)(
        x.float().pow(2).mean(-1, keepdim=True)
    ),
    "rows that are not dense": lambda x: WEIGHT[:5] * rms(x.transpose(1, 2)),
    "a float row of its own": lambda x: x.double().float() * torch.rsqrt(x.float().pow(2).mean(-1, True) + EPS),
    "a row's eps": lambda x: rows_eps(x[..., :1].float().abs(), x.float()),
}


@loop("dtype", [torch.float32, torch.bfloat16], ids=str)
@loop("name", SPELLED)
def test_spellings(name, dtype):
    behind = BEHIND.get(name, BEHIND.get((name, dtype), []))
    assert both(SPELLED[name], dtype).ops == ["rms_norm", *behind]


@loop("dtype", [torch.float32, torch.bfloat16], ids=str)
@loop("name", OTHERWISE)
def test_what_is_no_norm_stays(name, dtype):
    assert both(OTHERWISE[name], dtype).num_norms == 0


WIDE_WEIGHT = 1 + torch.randn(700, generator=torch.Generator().manual_seed(3)) / 4
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def normalized(x):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return WIDE_WEIGHT[: x.shape[-1]].to(x.dtype) * wide.to(x.dtype)


def residual(x):
    total = x + x.flip(0)
    return normalized(total) * 2 + total


def alone(x):
    return normalized(x + x.flip(0))


SUMS = {"read later": residual, "read by the norm alone": alone, "a row for all": lambda x: normalized(x + x[0, 0])}
OTHER_SUMS = {
    "a number": lambda x: normalized(x + 1),
    "a share of it": lambda x: normalized(torch.add(x, x.flip(0), alpha=2)),
    "a difference": lambda x: normalized(x - x.flip(0)),
    "part of the sum": lambda x: normalized((x + x.flip(0))[:, 1:]),
}


@TYPES
@loop("shape", [(2, 5, 48), (1, 1, 700), (3, 5, 700)], ids=str)
@loop("name", SUMS)
def test_sum_and_norm_are_one_op(name, shape, dtype):
    ops = both(SUMS[name], dtype, shape).ops
    assert ops.count("add_rms_norm") == 1
    assert "rms_norm" not in ops


@TYPES
@pytest.mark.parametrize("name", OTHER_SUMS)
def test_what_is_no_such_sum_stays(name, dtype):
    assert "add_rms_norm" not in both(OTHER_SUMS[name], dtype).ops


ANGLES = torch.randn(1, 1, 5, 16, generator=torch.Generator().manual_seed(2))
HEAD_WEIGHT = 1 + torch.randn(2, 16, generator=torch.Generator().manual_seed(3)) / 4


def normed_heads(x, which=0):
    """[2, heads, 5, 16]"""
    rows = x.reshape(2, 5, -1, 16)
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (HEAD_WEIGHT[which].to(x.dtype) * wide.to(x.dtype)).transpose(1, 2)


def angles(x, count=16):
    """Of the input's type, and no constants: their positions are an input, too."""
    moved = x.flatten()[0] * 0 + ANGLES[..., :count].to(x.dtype)
    return moved.cos(), moved.sin()


def turned(x, cosine, sine):
    lower, upper = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-upper, lower), dim=-1) * sine


def whole(x):
    cosine, sine = angles(x)
    return turned(normed_heads(x), cosine, sine)


def part(x):
    cosine, sine = angles(x, 8)
    heads = normed_heads(x)
    return torch.cat((turned(heads[..., :8], cosine, sine), heads[..., 8:]), dim=-1)


def queries_and_keys(x):
    cosine, sine = angles(x)
    queries, keys = normed_heads(x), normed_heads(x[..., :16], 1)
    return turned(queries, cosine, sine), turned(keys, cosine, sine)


def parts_of_both(x):
    cosine, sine = angles(x, 8)
    queries, keys = normed_heads(x), normed_heads(x[..., 16:], 1)
    out = turned(queries[..., :8], cosine, sine), turned(keys[..., :8], cosine, sine)
    return tuple(torch.cat((one, all_[..., 8:]), dim=-1) for one, all_ in zip(out, (queries, keys), strict=True))


def unlike_norms(x):
    """Of another eps, and with the norm weight before the one rounding."""
    cosine, sine = angles(x)
    queries, wide = normed_heads(x), x[..., :16].reshape(2, 5, 1, 16).float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 0.25)
    keys = (wide * (1 + HEAD_WEIGHT[1].to(x.dtype).float())).to(x.dtype).transpose(1, 2)
    return turned(queries, cosine, sine), turned(keys, cosine, sine)


def beside_a_gate(x):
    """As Qwen3.5 has it: each head's queries and its gate come out of one product, side by side."""
    cosine, sine = angles(x)
    queries, gate = x.view(2, 5, -1, 32).chunk(2, dim=-1)
    return turned(normed_heads(queries), cosine, sine) * torch.sigmoid(gate.transpose(1, 2))


def kept(x):
    cosine, sine = angles(x)
    heads = normed_heads(x)
    return turned(heads, cosine, sine), heads


def read_again(x):
    cosine, sine = angles(x)
    heads = normed_heads(x)
    return turned(heads, cosine, sine) + heads


def rest_elsewhere(x):
    cosine, sine = angles(x, 8)
    heads = normed_heads(x)
    return turned(heads[..., :8], cosine, sine), heads[..., 8:] * 1


def rest_first(x):
    cosine, sine = angles(x, 8)
    heads = normed_heads(x)
    return torch.cat((heads[..., 8:], turned(heads[..., :8], cosine, sine)), dim=-1)


def other_channels(x):
    cosine, sine = angles(x, 8)
    heads = normed_heads(x)
    return torch.cat((turned(heads[..., 8:], cosine, sine), heads[..., :8]), dim=-1)


def keys_of_queries(x):
    """The second reads what the first writes."""
    cosine, sine = angles(x)
    queries = turned(normed_heads(x), cosine, sine)
    return turned(normed_heads(queries.transpose(1, 2), 1), cosine, sine)


def its_input_changes(x):
    cosine, sine = angles(x)
    given = x * 1
    heads = normed_heads(given)
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
