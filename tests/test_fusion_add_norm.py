"""Fusion of a residual sum and its RMSNorm: the same bits, and the sum is still written for later readers."""

import pytest
import torch
from fusions import both
from quick import loop

WEIGHT = 1 + torch.randn(700, generator=torch.Generator().manual_seed(3)) / 4
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def normed(x):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return WEIGHT[: x.shape[-1]].to(x.dtype) * wide.to(x.dtype)


def residual(x):
    total = x + x.flip(0)
    return normed(total) * 2 + total


def alone(x):
    return normed(x + x.flip(0))


SPELLED = {"read later": residual, "read by the norm alone": alone, "a row for all": lambda x: normed(x + x[0, 0])}
OTHERWISE = {
    "a number": lambda x: normed(x + 1),
    "a share of it": lambda x: normed(torch.add(x, x.flip(0), alpha=2)),
    "a difference": lambda x: normed(x - x.flip(0)),
    "part of the sum": lambda x: normed((x + x.flip(0))[:, 1:]),
}


@TYPES
@loop("shape", [(2, 5, 48), (1, 1, 700), (3, 5, 700)], ids=str)
@loop("name", SPELLED)
def test_sum_and_norm_are_one_op(name, shape, dtype):
    ops = both(SPELLED[name], dtype, shape).ops
    assert ops.count("add_rms_norm") == 1
    assert "rms_norm" not in ops


@TYPES
@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_no_such_sum_stays(name, dtype):
    assert "add_rms_norm" not in both(OTHERWISE[name], dtype).ops
