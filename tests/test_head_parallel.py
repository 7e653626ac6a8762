"""Head-parallel attention: the same bits as with barriers between the steps."""

from unittest.mock import patch

import pytest
import torch
from fusions import counting
from quick import others_slow
from tiny import build

from nextn.runtime.native import fusion
from nextn.runtime.native.abi import Runtime, load
from nextn.runtime.native.lowering import Instruction, Lowered
from nextn.runtime.native.session import NativeHead, NativeTrunk
from nextn.runtime.native.weight_packing import PackedWeights

# Heads of 32 channels: what each kv head has of queries, keys and values is whole blocks of columns.
SHARED = [
    ("glm4_moe", {"head_dim": 32, "use_qk_norm": True}),
    ("qwen3_5", {"head_dim": 32}),
    ("qwen3_next", {"head_dim": 32}),
]
FIT = pytest.mark.parametrize(("name", "changes"), SHARED, ids=[name for name, _ in SHARED])


def passes(model, threads):
    """Outputs of trunk and head over some blocks of two sequences of different lengths, and the ops."""
    runtime = Runtime(load().library, threads)
    weights = PackedWeights(runtime)
    trunk = NativeTrunk(model.trunk, runtime, weights)
    head = NativeHead(model.head, trunk, runtime, weights)
    cache, states, out = trunk.cache(2), head.cache(2), []
    draws = torch.Generator().manual_seed(1)
    with torch.inference_mode(), counting() as found:
        for width in (7, 1, 5, 12, 1):
            tokens = torch.randint(model.trunk.vocab_size, (2, width), generator=draws)
            hidden = trunk(tokens, cache)
            cache.commit([width, max(1, width - 2)])
            step = head.step(0, tokens, hidden.head_input, cache=states)
            states.commit([width, max(1, width - 2)])
            out += [each.clone() for each in (hidden.final_hidden, step.final_hidden, step.next_hidden)]
    return out, found.ops


@pytest.mark.more
@FIT
@pytest.mark.parametrize("threads", others_slow([1, 2, 3, 4], 3))
def test_the_same_bits(name, changes, threads):
    model = build(name, **changes)
    shared, _ = passes(model, threads)
    with patch.object(fusion, "split_by_heads", list):
        plain, _ = passes(model, threads)
    assert all(torch.equal(one, other) for one, other in zip(shared, plain, strict=True))


def shards_of(name, **changes):
    """Shards of the trunk's layers in a block of five positions."""
    found = []
    real = fusion.split_by_heads

    def noted(groups):
        out = real(groups)
        found.append(
            [[step.num_shards for step in group.instructions] for group in out if group.entry.func == "attention"]
        )
        return out

    model = build(name, **changes)
    trunk = NativeTrunk(model.trunk, load(), PackedWeights(load()))
    with patch.object(fusion, "split_by_heads", noted), torch.inference_mode():
        trunk(torch.zeros(1, 5, dtype=torch.int64), trunk.cache(1))
    return found[0]


def test_attention_is_sharded_by_kv_heads():
    assert shards_of("glm4_moe", head_dim=32, use_qk_norm=True) == [[0, 2, 2]] * 2


def test_groups_between_are_moved_after_it():
    """Qwen3.5 copies the gates of its heads before it norms them."""
    assert shards_of("qwen3_5", head_dim=32) == [[0, 2, 2]]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("glm4_moe", {"use_qk_norm": True}),  # heads of 8 channels are no whole blocks
        ("glm4_moe", {"head_dim": 32, "use_qk_norm": False}),  # nothing between is one op
        ("deepseek_v3", {}),  # keys of all heads are made of one latent row
    ],
)
def test_others_wait_for_each_other(name, changes):
    assert all(shards == [0] for shards in shards_of(name, **changes))


def native(op, tensors, ints=(), reals=(), outs=1):
    return Lowered.native(Instruction(op, tuple(tensors), tuple(ints), tuple(reals)), outs=tensors[:outs])


def layer(*, columns=64, between=None):
    """Attention of two heads of 32 channels over five tokens, whose queries are this many columns."""
    made = [torch.empty(5, columns), torch.empty(5, 64), torch.empty(5, 64)]
    heads = [each.as_strided((1, 2, 5, 32), (0, 32, each.shape[1], 1)) for each in made]
    weights = [torch.empty(each.shape[1], 48) for each in made]
    cosine, turned = torch.empty(1, 2, 5, 32), [torch.empty(1, 2, 5, 32) for _ in range(2)]
    turns = [each for out, x in zip(turned, heads, strict=False) for each in (out, x, cosine, cosine, torch.empty(32))]
    read = [torch.empty(1, 2, 5, 32), *turned, heads[2], torch.empty(1), torch.empty(3)]
    groups = [
        native("linear", [*made, torch.empty(5, 48), *weights], [columns, 64, 64, 48, 1], outs=3),
        native("norm_rope", turns, (0, 0), (1e-6, 1e-6), outs=1),
        native("attention", read, (0,), (1.0, 0.0)),
    ]
    if between:
        groups.insert(1, native("copy", [{"cosine": cosine, "other": torch.empty(3)}[between], torch.empty(3)]))
    return groups


@pytest.mark.parametrize(("choice", "count"), [({}, 1), ({"between": "other"}, 2)])
def test_a_layer_is_one_group(choice, count):
    assert len(fusion.split_by_heads(layer(**choice))) == count


@pytest.mark.parametrize("choice", [{"between": "cosine"}, {"columns": 128}], ids=str)
def test_a_layer_that_is_not_shared_by_heads(choice):
    """A group between computes the rotation angles; or the queries' columns are not those of heads alone."""
    groups = layer(**choice)
    assert fusion.split_by_heads(groups) == groups
