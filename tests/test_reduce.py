"""Reductions, softmax, norms and topk against torch; a row's bits do not depend on the other rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import FLOATS, empty, operand, same, seeds, shapes, values
from quick import loop
from torch import Tensor

from nextn.errors import ConfigError
from nextn.runtime.native.abi import Runtime, load

few = settings(max_examples=40, deadline=None)
floats = st.sampled_from(FLOATS)
NEAR = {torch.float32: 2e-5, torch.bfloat16: 2**-7}


def run(op: str, outs: Tensor | list[Tensor], a: Tensor, *more: Tensor, ints=(), reals=()):
    load().call(op, [*(outs if isinstance(outs, list) else [outs]), a, *more], ints, reals)
    return outs


def close(actual: Tensor, expected: Tensor, near: float | None = None) -> None:
    near = near or NEAR[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=near, atol=near, equal_nan=True)


@pytest.mark.more
@pytest.mark.parametrize("op", ["sum", "mean", "amax"])
@few
@given(shape=shapes, seed=seeds, dtype=floats, chosen=st.sets(st.integers(0, 3), min_size=1))
def test_reductions(op, shape, seed, dtype, chosen):
    generator = torch.Generator().manual_seed(seed)
    a = operand(shape, dtype, generator)
    dims = sorted({dim % len(shape) for dim in chosen})
    mask = sum(1 << dim for dim in dims)
    expected = getattr(a.double(), op)(dims, keepdim=True)
    out = run(op, empty(expected.shape, dtype, generator), a, ints=[mask])
    close(out, expected, NEAR[dtype] * 10 if op == "sum" else None)
    dropped = run(op, torch.empty(expected.squeeze(dims).shape, dtype=dtype), a, ints=[mask])
    assert torch.equal(dropped, out.squeeze(dims))


@few
@given(shape=shapes, seed=seeds, dtype=st.sampled_from((torch.int64, torch.bool)))
def test_reductions_of_whole_numbers(shape, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    a = operand(shape, dtype, generator)
    last = 1 << (len(shape) - 1)
    total = run("sum", torch.empty((*shape[:-1], 1), dtype=torch.int64), a, ints=[last])
    assert torch.equal(total, a.sum(-1, keepdim=True))
    largest = run("amax", torch.empty((*shape[:-1], 1), dtype=dtype), a, ints=[last])
    assert torch.equal(largest, a.amax(-1, keepdim=True))


@few
@given(seed=seeds, length=st.integers(1, 400), rows=st.integers(1, 40), dtype=floats)
def test_the_order_of_a_sum_depends_on_its_length_alone(seed, length, rows, dtype):
    """Any layout, any number of rows: the same bits."""
    generator = torch.Generator().manual_seed(seed)
    a = values((rows, length), dtype, generator)
    alone = [run("sum", torch.empty(1, 1), a[row : row + 1], ints=[2])[0] for row in range(rows)]
    for layout in (a, a.T.contiguous().T, torch.stack((a, a), -1)[..., 1]):
        assert torch.equal(run("sum", torch.empty(rows, 1), layout, ints=[2]), torch.stack(alone))
        assert torch.equal(run("sum", torch.empty(1, rows), layout.T, ints=[1])[0], torch.cat(alone))


@pytest.mark.more
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@few
@given(shape=shapes, seed=seeds, dtype=floats)
def test_softmax(op, shape, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    a = operand(shape, dtype, generator).clone()
    a[..., 1::3] = -math.inf
    out = run(op, empty(shape, dtype, generator), a)
    close(out, getattr(torch, op)(a.double(), -1))
    if op == "softmax":
        assert (out[..., 1::3] == 0).all()


@pytest.mark.more
@few
@given(shape=shapes, seed=seeds, dtype=floats)
def test_logsumexp_argmax_and_cumsum(shape, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    a = operand(shape, dtype, generator)
    close(run("logsumexp", torch.empty(shape[:-1], dtype=dtype), a), a.double().logsumexp(-1))
    best = run("argmax", torch.empty(shape[:-1], dtype=torch.int64), a)
    assert torch.equal(best, (a == a.amax(-1, keepdim=True)).int().argmax(-1))
    close(run("cumsum", empty(shape, dtype, generator), a), a.double().cumsum(-1))
    whole = operand(shape, torch.int64, generator)
    assert torch.equal(run("cumsum", empty(shape, torch.int64, generator), whole), whole.cumsum(-1))


def test_rows_of_special_values():
    inf, nan = math.inf, math.nan
    a = torch.tensor([[-inf, -inf, -inf], [0.0, inf, 1.0], [nan, 0.0, 1.0], [1e30, -1e30, 1e30]])
    out = torch.empty_like(a)
    close(run("softmax", out, a), torch.softmax(a, -1))
    close(run("logsumexp", torch.empty(4), a), torch.logsumexp(a, -1))
    close(run("amax", torch.empty(4, 1), a, ints=[2]), a.amax(-1, keepdim=True))
    best = run("argmax", torch.empty(4, dtype=torch.int64), a)
    assert best.tolist() == [0, 1, 0, 0]


@few
@given(
    seed=seeds,
    rows=st.integers(1, 4),
    length=st.integers(1, 3000),
    k=st.integers(1, 100),
    dtype=floats,
)
def test_topk_is_sorted_and_takes_the_lowest_of_equals(seed, rows, length, k, dtype):
    generator = torch.Generator().manual_seed(seed)
    k = min(k, length)
    a = (values((rows, length), dtype, generator) * 4).round()
    a[:, ::7] = -0.0
    outs = [torch.empty(rows, k, dtype=dtype), torch.empty(rows, k, dtype=torch.int64)]
    run("topk", outs, a, ints=[k])
    expected = torch.sort(a, dim=-1, descending=True, stable=True)
    assert torch.equal(outs[1], expected.indices[:, :k])
    assert torch.equal(outs[0], expected.values[:, :k])


def test_topk_counts_nan_as_the_largest():
    a = torch.tensor([[1.0, math.nan, 3.0, -math.inf, math.nan, 2.0]])
    outs = [torch.empty(1, 4), torch.empty(1, 4, dtype=torch.int64)]
    run("topk", outs, a, ints=[4])
    assert outs[1].tolist() == [[1, 4, 2, 5]]


@few
@given(seed=seeds, rows=st.integers(1, 5), length=st.integers(1, 2000), dtype=floats)
def test_confidence_is_the_probability_of_the_argmax(seed, rows, length, dtype):
    logits = values((rows, length), dtype, torch.Generator().manual_seed(seed))
    best, prob = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    run("confidence", [best, prob], logits)
    assert torch.equal(best, (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))
    soft = run("softmax", torch.empty(rows, length), logits)
    assert torch.equal(prob, soft.gather(1, best[:, None])[:, 0])
    close(prob, torch.softmax(logits.double(), -1).amax(-1))


def unfused_rms_norm(a: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The ops that rms_norm replaces, one native call each, in float32 until the last."""
    wide, mean, out = torch.empty(a.shape), torch.empty(*a.shape[:-1], 1), torch.empty_like(a)
    run("copy", wide, a)
    run("mean", mean, run("pow", torch.empty_like(wide), wide, reals=(2.0,)), ints=[1 << (a.ndim - 1)])
    scale = run("rsqrt", torch.empty_like(mean), run("add", torch.empty_like(mean), mean, reals=(eps, 1.0)))
    scaled = run("mul", torch.empty_like(wide), wide, scale.expand_as(wide))
    return run("copy", out, scaled) if weight is None else run("mul", out, scaled, weight.expand_as(a))


@few
@given(seed=seeds, rows=st.integers(1, 16), length=st.integers(1, 700), dtype=floats, has=st.booleans())
def test_rms_norm_gives_the_bits_of_its_parts(seed, rows, length, dtype, has):
    generator = torch.Generator().manual_seed(seed)
    a, weight = values((rows, length), dtype, generator), values((length,), dtype, generator) if has else None
    weights = [] if weight is None else [weight]
    out = run("rms_norm", torch.empty_like(a), a, *weights, reals=[1e-6])
    assert torch.equal(out, unfused_rms_norm(a, weight, 1e-6))
    exact = a.double() * (a.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    close(out, exact if weight is None else exact * weight.double(), NEAR[dtype])


@few
@given(seed=seeds, rows=st.integers(1, 16), length=st.integers(2, 700), dtype=floats)
def test_layer_norm(seed, rows, length, dtype):
    generator = torch.Generator().manual_seed(seed)
    a, weight, bias = (values(shape, dtype, generator) for shape in ((rows, length), (length,), (length,)))
    out = run("native_layer_norm", torch.empty_like(a), a, weight, bias, reals=[1e-5])
    expected = torch.nn.functional.layer_norm(a.double(), (length,), weight.double(), bias.double(), 1e-5)
    close(out, expected, 4 * NEAR[dtype])


@loop("dtype", FLOATS, ids=str)
@loop("op", ["softmax", "log_softmax", "cumsum", "rms_norm", "native_layer_norm"])
def test_a_row_does_not_depend_on_the_others(op, dtype):
    a = values((16, 333), dtype, torch.Generator().manual_seed(3))
    weight = values((333,), dtype, torch.Generator().manual_seed(4))
    more, ints, reals = {
        "rms_norm": ([weight], [], [1e-6]),
        "native_layer_norm": ([weight, weight], [], [1e-6]),
    }.get(op, ([], [], []))
    whole = run(op, torch.empty_like(a), a, *more, ints=ints, reals=reals)
    for row in range(16):
        alone = run(op, torch.empty_like(a[:1]), a[row : row + 1], *more, ints=ints, reals=reals)
        assert torch.equal(alone[0], whole[row])


def test_shares_of_all_workers_cover_large_tensors():
    team = Runtime(load().library, 3)
    a = torch.randn(7, 20_000, generator=torch.Generator().manual_seed(5))
    for op, ints in (("softmax", []), ("cumsum", [])):
        many, one = torch.empty_like(a), run(op, torch.empty_like(a), a, ints=ints)
        team.call(op, [many, a], ints)
        assert same(many, one)
    many, one = torch.empty(1, 20_000), run("sum", torch.empty(1, 20_000), a, ints=[1])
    team.call("sum", [many, a], [1])
    assert torch.equal(many, one)


@loop(
    ("op", "shapes", "ints"),
    [
        ("sum", [(2, 3), (2, 3)], [2]),
        ("sum", [(2, 1), (2, 3)], []),
        ("sum", [(2, 1), (2, 3)], [4]),
        ("amax", [(2, 1), (2, 0)], [2]),
        ("softmax", [(2, 3), (2, 4)], []),
        ("logsumexp", [(3,), (2, 4)], []),
        ("argmax", [(2,), (2, 4)], []),
        ("topk", [(2, 5), (2, 5), (2, 4)], [5]),
        ("rms_norm", [(2, 3), (2, 3), (4,)], []),
        ("rms_norm", [(2, 3), (2, 3), (3,)], [3]),
        ("confidence", [(2,), (2,), (2, 3)], []),
    ],
)
def test_refused(op, shapes, ints):
    with pytest.raises(ConfigError, match=op):
        load().call(op, [torch.zeros(shape) for shape in shapes], ints, [1e-6] if op == "rms_norm" else [])
