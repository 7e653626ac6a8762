"""Fusion of silu(a) * b: the same bits, wherever the product is, and only if nothing else reads the gate."""

import pytest
import torch
import torch.nn.functional as F
from fusions import both
from quick import loop

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def gated(x):
    up = x.flip(0)
    return F.silu(x) * up


def later(x):
    up = x.flip(0)
    gate = F.silu(x)
    return gate * (up + 1)


def read_again(x):
    gate = F.silu(x)
    return gate * x.flip(0)


def halves(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


SPELLED = {
    "gate first": gated,
    "gate last": lambda x: x.flip(0) * F.silu(x),
    "something between": later,
    "halves of one product": halves,
    "one row for all": lambda x: F.silu(x) * x[0, 0],
    "a width of no whole registers": lambda x: F.silu(x[..., :21]) * x[..., 21:42],
}
OTHERWISE = {
    "read twice": lambda x: (lambda gate: gate * x.flip(0) + gate)(F.silu(x)),
    "kept": lambda x: (lambda gate: (gate * x.flip(0), gate))(F.silu(x)),
    "its input is read before the product": read_again,
    "another function": lambda x: torch.sigmoid(x) * x.flip(0),
    "a number": lambda x: F.silu(x) * 2,
    "its square": lambda x: (lambda gate: gate * gate)(F.silu(x)),
}


@TYPES
@loop("name", SPELLED)
def test_a_gate_is_one_op(name, dtype):
    ops = both(SPELLED[name], dtype).ops
    assert ops.count("silu_mul") == 1
    assert "silu" not in ops


@TYPES
@loop("name", OTHERWISE)
def test_what_is_no_gate_stays(name, dtype):
    assert "silu_mul" not in both(OTHERWISE[name], dtype).ops


def test_a_gate_that_changes_before_its_product_stays():
    def changed(x):
        a = x + 1
        gate = F.silu(a)
        a.mul_(2)
        return gate * a

    assert "silu_mul" not in both(changed, torch.float32).ops
