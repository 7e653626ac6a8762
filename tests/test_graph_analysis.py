"""Copy and dead-code elimination: what they remove, and what they must keep; one packed copy of each weight."""

import pytest
import torch
from fusions import both, counting
from quick import loop
from replays import Replayed, fast_of
from tiny import build

from nextn.decoding.batch import DecodingBatch
from nextn.decoding.records import BatchSequence
from nextn.runtime.native.abi import load
from nextn.runtime.native.weight_packing import PackedWeights
from nextn.settings import Settings
from nextn.speculative.draft_policy import FixedLength
from nextn.speculative.sampling import Uniforms

GIVEN = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def shared(x):
    part = x + 1
    return torch.cat((x * 2, part), dim=-1), part


def twice(x):
    part = x + 1
    return torch.cat((part, part), dim=-1)


# -> the ops that are left
SPELLED = {
    "parts of the last dim": (lambda x: torch.cat((x + 1, -x, x * x), dim=-1), ["add", "neg", "mul"]),
    "parts of another dim": (lambda x: torch.cat((x + 1, x * x), dim=1), ["add", "mul"]),
    "a part that was there": (lambda x: torch.cat((x + 1, x), dim=-1), ["add", "copy"]),
    "a part that is kept": (shared, ["add", "mul", "copy"]),
    "the same part twice": (twice, ["add", "copy", "copy"]),
}


@TYPES
@loop("name", SPELLED)
def test_parts_of_a_concatenation_are_written_in_place(name, dtype):
    function, ops = SPELLED[name]
    assert sorted(both(function, dtype).ops) == sorted(ops)


def test_a_target_that_is_read_before_the_copy_is_not_written_early():
    def function(x):
        target = x * 2
        part = x + 1
        total = target.sum()
        target.copy_(part)
        return target + total

    assert both(function, torch.float32).ops.count("copy") == 1


def test_a_copy_to_another_type_stays():
    assert both(lambda x: torch.cat(((x + 1).bfloat16(), (x * 2).bfloat16()), dim=-1), torch.float32).ops.count("copy")


def ops_of(function) -> list[str]:
    with counting() as found:
        out = Replayed(function, [torch.ones_like(GIVEN)])(GIVEN)
    assert torch.equal(out[0], function(GIVEN.clone()))
    return found.ops


def test_unused_results_are_eliminated():
    def two(x):
        _ = torch.exp(x * 3)
        return x + 1

    assert ops_of(two) == ["add"]


def test_results_used_through_views_or_in_place_are_kept():
    def through(x):
        both = torch.zeros_like(x)
        both[:2] = torch.exp(x[:2])
        both.add_(torch.neg(x))
        return both.t()

    assert {"exp", "neg", "add"} <= set(ops_of(through))


def test_writes_to_inputs_are_kept():
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
def test_a_refresh_leaves_the_same_cache_as_a_step(name):
    """Bit for bit, without experts, queries, attention and LM head."""
    model = build(name)
    fast = fast_of(model)
    tokens = torch.randint(model.trunk.vocab_size, (2, 5), generator=torch.Generator().manual_seed(1))
    states = torch.randn(2, 5, *model.trunk.hidden_shape, generator=torch.Generator().manual_seed(2))
    caches = fast.head.cache(2), fast.head.cache(2)
    with torch.inference_mode():
        fast.head.step(0, tokens, states, cache=caches[0])
        with counting() as found:
            fast.head.refresh(0, tokens, states, cache=caches[1])
    assert found.ops.count("store_kv") == 1
    assert not {"attention", "expert_linear", "silu_mul", "topk", "softmax"} & set(found.ops)
    for one, other in zip(*([buffer for pair in cache._buffers for buffer in pair] for cache in caches), strict=True):
        assert torch.equal(one, other)


@pytest.mark.more
def test_a_prompt_only_refreshes_the_head(monkeypatch):
    fast = fast_of(build("glm4_moe"))
    monkeypatch.setattr(fast.head, "step", None)  # whose outputs nobody needs
    sequence = BatchSequence(row=0, tokens=list(range(1, 12)), max_tokens=4, eos=(), uniforms=Uniforms(0))
    with torch.inference_mode():
        batch = DecodingBatch(fast.trunk, fast.head, [sequence], Settings(num_speculative_tokens=2), FixedLength(2))
        batch.prefill()
    assert batch.drafter.caches[0].lengths == [10]  # the last position needs the token after it


def test_one_copy_of_what_is_the_same():
    weights = PackedWeights(load())
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    first = weights.pack([weight])
    assert weights.pack([weight]) is first
    assert weights.pack([weight.clone()]) is first, "made anew in another recording"
    wide = weights.pack([weight.double().float().to(torch.bfloat16)])
    assert wide.memory.data_ptr() != first.memory.data_ptr()


def test_weights_that_begin_alike_are_distinguished():
    """Also one at the address of an earlier one that is known by its values."""
    weights, runtime = PackedWeights(load()), load()
    weight = torch.ones(64, 32)
    weights.pack([weight])
    for value in (2.0, 3.0):
        other = weight.clone()
        other[-1, -1] = value
        assert weights.pack([other.clone()]).memory.equal(runtime.pack(other))
    passing = weight.clone()
    weights.pack([passing])
    passing[0, 20] = 5.0
    assert weights.pack([passing]).memory.equal(runtime.pack(passing))


def test_several_in_one_matrix():
    """Part by part, each filled up to whole blocks; distinguished by how they are merged."""
    weights, runtime = PackedWeights(load()), load()
    one, other = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)), torch.ones(96, 32)
    parted = weights.pack([one, other], 2, 32)
    whole = torch.cat([one[:32], other[:64], one[32:], other[64:], torch.zeros(32, 32)])
    assert parted.memory.equal(runtime.pack(whole))
    assert weights.pack([one.clone(), other.clone()], 2, 32) is parted
    beside = weights.pack([one, other], 1, 32)
    assert beside.memory.equal(runtime.pack(torch.cat([one, other])))
    assert weights.pack([other, one], 1, 32).memory.equal(runtime.pack(torch.cat([other, one])))
