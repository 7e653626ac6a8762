"""Merging of linear layers with one input: the same bits, and only if the input does not change between them."""

import pytest
import torch
import torch.nn.functional as F
from fusions import both
from quick import loop

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
DRAWS = torch.Generator().manual_seed(2)
WEIGHTS = {
    dtype: [torch.randn(rows, 48, generator=DRAWS).to(dtype) for rows in (40, 16, 7, 130)]
    for dtype in (torch.float32, torch.bfloat16)
}
BIASES = {dtype: [each[:, 0].clone() for each in weights] for dtype, weights in WEIGHTS.items()}


def layer(x, at, *, bias=False):
    return F.linear(x, WEIGHTS[x.dtype][at], BIASES[x.dtype][at] if bias else None)


def queries_keys_values(x):
    return layer(x, 0), layer(x, 1), layer(x, 2)


def something_between(x):
    """A norm of the queries before the keys are computed, as in Qwen3's layers."""
    queries = layer(x, 0) * 2
    return queries, layer(x, 1)


def mlp(x):
    return F.linear(F.silu(layer(x, 0)) * layer(x, 0).neg(), WEIGHTS[x.dtype][0].t().contiguous())


def two_inputs(x):
    other = x + 1
    return layer(x, 0), layer(other, 1), layer(x, 2), layer(other, 3)


TOGETHER = {
    "queries, keys, values": (queries_keys_values, 1),
    "with biases": (lambda x: [layer(x, at, bias=True) for at in range(4)], 1),
    "something between": (something_between, 1),
    "a gate and its other half": (mlp, 2),
    "two inputs": (two_inputs, 2),
}
APART = {
    "another input": lambda x: (layer(x, 0), layer(x.flip(0), 1)),
    "another part of one input": lambda x: (layer(x[:1], 0), layer(x[1:], 1)),
    "one has a bias": lambda x: (layer(x, 0), layer(x, 1, bias=True)),
    "read by something else between": lambda x: (layer(x, 0), x + 1, layer(x, 1)),
    "one of the other": lambda x: layer(layer(x, 0)[..., :1] + x, 1),
}


@TYPES
@loop("name", TOGETHER)
def test_layers_of_one_input_are_one_op(name, dtype):
    function, count = TOGETHER[name]
    assert both(function, dtype).ops.count("linear") == count


@TYPES
@loop("name", APART)
def test_others_stay_apart(name, dtype):
    assert both(APART[name], dtype).ops.count("linear") == 2


@TYPES
def test_a_changed_input_parts_them(dtype):
    def changed(x):
        a = x + 1
        first = layer(a, 0)
        a.mul_(2)
        return first, layer(a, 1)

    assert both(changed, dtype).ops.count("linear") == 2


@TYPES
@pytest.mark.parametrize("shape", [(1, 1, 48), (1, 13, 48), (3, 17, 48)], ids=str)
def test_any_number_of_rows(shape, dtype):
    assert both(queries_keys_values, dtype, shape).ops.count("linear") == 1
