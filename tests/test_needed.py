"""What a pass leaves out when nobody reads it, and what it never may."""

import pytest
import torch
from fusions import counting
from replays import Replayed, fast_of
from tiny import build

GIVEN = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def ops_of(function) -> list[str]:
    with counting() as found:
        out = Replayed(function, [torch.ones_like(GIVEN)])(GIVEN)
    assert torch.equal(out[0], function(GIVEN.clone()))
    return found.ops


def test_what_nobody_reads_is_not_made():
    def two(x):
        _ = torch.exp(x * 3)
        return x + 1

    assert ops_of(two) == ["add"]


def test_what_is_read_through_a_view_or_written_in_place_is_made():
    def through(x):
        both = torch.zeros_like(x)
        both[:2] = torch.exp(x[:2])
        both.add_(torch.neg(x))
        return both.t()

    assert {"exp", "neg", "add"} <= set(ops_of(through))


def test_inputs_that_are_written_stand_behind_the_pass():
    def counts(x):
        y = x * 2
        x.add_(1)
        return y

    with counting() as found:
        replayed = Replayed(counts, [torch.ones_like(GIVEN)])
    assert set(found.ops) == {"mul", "add"}
    replayed(GIVEN)
    assert torch.equal(replayed.inputs[0], GIVEN + 1)


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "exaone_moe", "ernie4_5_moe"])
def test_a_head_that_only_fills_its_cache_leaves_what_a_step_leaves(name):
    """Bit for bit, with experts, queries, attention and readout left out of it."""
    model = build(name)
    fast = fast_of(model)
    tokens = torch.randint(model.trunk.vocab_size, (2, 5), generator=torch.Generator().manual_seed(1))
    states = torch.randn(2, 5, *model.trunk.hidden_shape, generator=torch.Generator().manual_seed(2))
    caches = fast.head.cache(2), fast.head.cache(2)
    with torch.inference_mode():
        fast.head.step(0, tokens, states, cache=caches[0])
        with counting() as found:
            assert fast.head._fed.run(tokens, caches[1], states=states) == []
    assert found.ops.count("store") == 1
    assert not {"attend", "expert_linear", "silu_mul", "topk", "softmax"} & set(found.ops)
    for one, other in zip(*([slab for pair in cache._slabs for slab in pair] for cache in caches), strict=True):
        assert torch.equal(one, other)
