"""Queries, keys, values and attention by the owners of heads: the bits of workers that wait for each other."""

from unittest.mock import patch

import pytest
import torch
from fusions import counting
from tiny import build

from nextn.fast import fuse
from nextn.fast.engine import FastHead, FastTrunk
from nextn.fast.lower import Instruction, Lowered
from nextn.fast.native import Runtime, load
from nextn.fast.weights import Weights

# Heads of 32 channels: what each kv head has of queries, keys and values are whole blocks of columns.
SHARED = [
    ("glm4_moe", {"head_dim": 32, "use_qk_norm": True}),
    ("qwen3_5", {"head_dim": 32}),
    ("qwen3_next", {"head_dim": 32}),
]
FIT = pytest.mark.parametrize(("name", "changes"), SHARED, ids=[name for name, _ in SHARED])


def passes(model, threads):
    """What trunk and head make of some windows, of two rows of unlike lengths -> the tensors, and the ops' owners."""
    runtime = Runtime(load().library, threads)
    weights = Weights(runtime)
    trunk = FastTrunk(model.trunk, runtime, weights)
    head = FastHead(model.head, trunk, runtime, weights)
    cache, states, out = trunk.cache(2), head.cache(2), []
    draws = torch.Generator().manual_seed(1)
    with torch.inference_mode(), counting() as found:
        for width in (7, 1, 5, 12, 1):
            tokens = torch.randint(model.trunk.vocab_size, (2, width), generator=draws)
            hidden = trunk(tokens, cache)
            cache.keep([width, max(1, width - 2)])
            step = head.step(0, tokens, hidden.eaten, cache=states)
            states.keep([width, max(1, width - 2)])
            out += [each.clone() for each in (hidden.normed, step.normed, step.recycled)]
    return out, found.ops


@FIT
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_the_same_bits(name, changes, threads):
    model = build(name, **changes)
    shared, _ = passes(model, threads)
    with patch.object(fuse.owners, "apart", list):
        plain, _ = passes(model, threads)
    assert all(torch.equal(one, other) for one, other in zip(shared, plain, strict=True))


def owners_of(name, **changes):
    """Of the trunk's layers in a window of five columns."""
    found = []
    real = fuse.owners.apart

    def noted(groups):
        out = real(groups)
        found.append([[step.owners for step in group.instructions] for group in out if group.entry.func == "attend"])
        return out

    model = build(name, **changes)
    trunk = FastTrunk(model.trunk, load(), Weights(load()))
    with patch.object(fuse.owners, "apart", noted), torch.inference_mode():
        trunk(torch.zeros(1, 5, dtype=torch.int64), trunk.cache(1))
    return found[0]


def test_heads_are_the_owners():
    assert owners_of("glm4_moe", head_dim=32, use_qk_norm=True) == [[0, 2, 2]] * 2


def test_others_go_behind_it():
    """Qwen3.5 copies the gates of its heads before it norms them."""
    assert owners_of("qwen3_5", head_dim=32) == [[0, 2, 2]]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("glm4_moe", {"use_qk_norm": True}),  # heads of 8 channels are no whole blocks
        ("glm4_moe", {"head_dim": 32, "use_qk_norm": False}),  # nothing between is one op
        ("deepseek_v3", {}),  # keys of all heads are made of one latent row
    ],
)
def test_others_wait_for_each_other(name, changes):
    assert all(owners == [0] for owners in owners_of(name, **changes))


def native(op, tensors, ints=(), reals=(), outs=1):
    return Lowered.native(Instruction(op, tuple(tensors), tuple(ints), tuple(reals)), outs=tensors[:outs])


def layer(*, columns=64, between=None):
    """Attention of two heads of 32 channels over five tokens, whose queries come out of so many columns."""
    made = [torch.empty(5, columns), torch.empty(5, 64), torch.empty(5, 64)]
    heads = [each.as_strided((1, 2, 5, 32), (0, 32, each.shape[1], 1)) for each in made]
    weights = [torch.empty(each.shape[1], 48) for each in made]
    cosine, turned = torch.empty(1, 2, 5, 32), [torch.empty(1, 2, 5, 32) for _ in range(2)]
    turns = [each for out, x in zip(turned, heads, strict=False) for each in (out, x, cosine, cosine, torch.empty(32))]
    read = [torch.empty(1, 2, 5, 32), *turned, heads[2], torch.empty(1), torch.empty(3)]
    groups = [
        native("linear", [*made, torch.empty(5, 48), *weights], [columns, 64, 64, 48, 1], outs=3),
        native("norm_rotate", turns, (0, 0), (1e-6, 1e-6), outs=1),
        native("attend", read, (0,), (1.0, 0.0)),
    ]
    if between:
        groups.insert(1, native("copy", [{"cosine": cosine, "other": torch.empty(3)}[between], torch.empty(3)]))
    return groups


@pytest.mark.parametrize(("choice", "count"), [({}, 1), ({"between": "other"}, 2)])
def test_a_layer_is_one_group(choice, count):
    assert len(fuse.owners.apart(layer(**choice))) == count


@pytest.mark.parametrize("choice", [{"between": "cosine"}, {"columns": 128}], ids=str)
def test_a_layer_that_is_not_shared_by_heads(choice):
    """What stands between makes what is turned by; the columns of queries are not those of heads alone."""
    groups = layer(**choice)
    assert fuse.owners.apart(groups) == groups
