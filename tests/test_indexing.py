"""Native ops that move elements by index, against torch; no index reads or writes outside its tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import empty, operand, seeds, strided, values
from torch import Tensor

from nextn.errors import ConfigError
from nextn.runtime.native.abi import Runtime, load

few = settings(max_examples=60, deadline=None)
dtypes = st.sampled_from((torch.float32, torch.bfloat16, torch.int64, torch.bool))
small = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


def run(op: str, out: Tensor, *inputs: Tensor, ints=(), reals=()) -> Tensor:
    load().call(op, [out, *inputs], ints, reals)
    return out


@few
@given(seed=seeds, rows=st.integers(1, 20), width=st.integers(1, 300), count=st.integers(1, 9), dtype=dtypes)
def test_embedding(seed, rows, width, count, dtype):
    generator = torch.Generator().manual_seed(seed)
    weight = strided(values((rows, width), dtype, generator), generator)
    ids = torch.randint(rows, (count,), generator=generator)
    assert torch.equal(run("embedding", empty((count, width), dtype, generator), weight, ids), weight[ids])
    if dtype == torch.bfloat16:
        assert torch.equal(run("embedding", torch.empty(count, width), weight, ids), weight[ids].float())


@pytest.mark.more
@few
@given(seed=seeds, shape=small, place=st.integers(0, 3), count=st.integers(1, 9), dtype=dtypes)
def test_index_select(seed, shape, place, count, dtype):
    generator = torch.Generator().manual_seed(seed)
    dim = place % len(shape)
    src = operand(shape, dtype, generator)
    ids = strided(torch.randint(shape[dim], (count,), generator=generator), generator)
    expected = src.index_select(dim, ids)
    assert torch.equal(run("index_select", empty(expected.shape, dtype, generator), src, ids, ints=[dim]), expected)


@pytest.mark.more
@few
@given(seed=seeds, shape=small, place=st.integers(0, 3), length=st.integers(1, 9), dtype=dtypes, smaller=st.booleans())
def test_gather(seed, shape, place, length, dtype, smaller):
    generator = torch.Generator().manual_seed(seed)
    dim = place % len(shape)
    src = operand(shape, dtype, generator)
    chosen = tuple(length if i == dim else max(1, size - smaller) for i, size in enumerate(shape))
    index = strided(torch.randint(shape[dim], chosen, generator=generator), generator)
    assert torch.equal(run("gather", empty(chosen, dtype, generator), src, index, ints=[dim]), src.gather(dim, index))


@pytest.mark.more
@few
@given(seed=seeds, shape=small, place=st.integers(0, 3), dtype=dtypes)
def test_scatter(seed, shape, place, dtype):
    """Distinct indices, as torch leaves the winner among equal ones open."""
    generator = torch.Generator().manual_seed(seed)
    dim = place % len(shape)
    out = strided(values(shape, dtype, generator), generator)
    chosen = tuple(max(1, size - 1) for size in shape)
    index = torch.rand(*chosen[:dim], shape[dim], *chosen[dim + 1 :], generator=generator).argsort(dim)
    index = index.narrow(dim, 0, chosen[dim])
    src = operand(chosen, dtype, generator)
    expected, filled = out.scatter(dim, index, src), out.scatter(dim, index, 1)
    value = run("scatter_value", out.clone(), index, ints=[dim], reals=[1.0])
    assert torch.equal(value, filled)
    assert torch.equal(run("scatter", out, index, src, ints=[dim]), expected)


def test_the_last_of_equal_indices_stays():
    index, src = torch.tensor([[2, 0, 2, 2]]), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert run("scatter", torch.zeros(1, 3), index, src, ints=[1]).tolist() == [[2.0, 0.0, 4.0]]


def test_indices_outside_read_zeros_and_write_nothing():
    """The tensors are the middle of larger ones: what lies around must neither show nor change."""
    around = torch.full((30, 4), 5.0)
    src = around[10:20].zero_().add_(1)
    ids = torch.tensor([0, -1, 10, 9, 2**62, -(2**63)])
    for op, ints in (("embedding", ()), ("index_select", (0,))):
        assert run(op, torch.full((6, 4), 9.0), src, ids, ints=ints)[:, 0].tolist() == [1, 0, 0, 1, 0, 0]
    widened = run("embedding", torch.full((6, 4), 9.0), around.bfloat16()[10:20], ids)
    assert widened[:, 0].tolist() == [1, 0, 0, 1, 0, 0]
    index = ids[:, None].expand(6, 4)
    assert run("gather", torch.full((6, 4), 9.0), src, index, ints=[0])[:, 3].tolist() == [1, 0, 0, 1, 0, 0]
    run("scatter", src, index, torch.full((6, 4), 7.0), ints=[0])
    run("scatter_value", src, index, ints=[0], reals=[8.0])
    assert src[:, 0].tolist() == [8, 1, 1, 1, 1, 1, 1, 1, 1, 8]
    assert (around[:10] == 5).all()
    assert (around[20:] == 5).all()


def test_shares_of_all_workers_cover_large_tensors():
    team = Runtime(load().library, 3)
    weight = torch.randn(50, 9000, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(50, (11,), generator=torch.Generator().manual_seed(1))
    out = torch.empty(11, 9000)
    team.call("embedding", [out, weight, ids])
    assert torch.equal(out, weight[ids])


@pytest.mark.parametrize(
    ("op", "shapes", "ints"),
    [
        ("embedding", [(2, 4), (5, 3), (2,)], []),
        ("embedding", [(3, 4), (5, 4), (2,)], []),
        ("index_select", [(2, 4), (2, 5), (3,)], [1]),
        ("gather", [(2, 4), (2, 4), (2, 3)], [1]),
        ("gather", [(3, 4), (2, 4), (3, 4)], [1]),
        ("gather", [(2, 4), (2, 4), (2, 4)], [2]),
        ("scatter", [(2, 4), (2, 4), (2, 3)], [1]),
        ("scatter", [(2, 4), (3, 4), (3, 4)], [1]),
    ],
)
def test_refused(op, shapes, ints):
    place = {"scatter": 1}.get(op, 2)
    tensors = [torch.zeros(shape, dtype=torch.int64 if i == place else torch.float32) for i, shape in enumerate(shapes)]
    with pytest.raises(ConfigError, match=op):
        load().call(op, tensors, ints)
