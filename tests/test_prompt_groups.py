"""Prompts of several lengths are prefilled without much padding, and every sequence gets what it gets alone."""

import gc

import pytest
from quick import families, most_of
from replays import fast_of
from tiny import BUILDS, MOST, build, decode, prompt

from nextn.decoding.batch import DecodingBatch
from nextn.decoding.prompt_groups import prompt_groups
from nextn.decoding.rounds import rounds
from nextn.model.trunk import Trunk
from nextn.settings import Sampling, Settings

LENGTHS = (5, 60, 33, 7, 58, 110)


@pytest.mark.parametrize(
    ("lengths", "options", "groups"),
    [
        ([100] * 4, {}, [[0, 1, 2, 3]]),
        ([90, 104, 100], {"one_by_one": True}, [[0, 1, 2]]),  # padding that costs less than passes
        ([10, 200, 100, 12, 195], {}, [[1, 4], [2], [3, 0]]),
        ([10, 200, 100, 12, 195], {"one_by_one": True}, [[1], [4], [2], [3], [0]]),
        ([10, 200, 100, 12, 195], {"on_cpu": False}, [[0, 1, 2, 3, 4]]),
        ([50, 8000, 60, 40], {"on_cpu": False}, [[1], [2, 0, 3]]),
        ([40, 3, 3, 3], {"chunk": 1}, [[0], [1, 2, 3]]),  # a pass per position, whatever the group
        ([7], {}, [[0]]),
    ],
)
def test_groups(lengths, options, groups):
    assert prompt_groups(lengths, **({"chunk": 512, "on_cpu": True, "one_by_one": False} | options)) == groups


def logs_of(log, count):
    return [[part for each in log for part in each.rows if part.row == row] for row in range(count)]


def alone(model, prompts, **settings):
    """The rounds of each prompt by itself, with the random numbers of its place in the batch."""
    found = []
    for row, tokens in enumerate(prompts):
        log = list(rounds(model.trunk, model.head, [tokens], Settings(**settings), seed_offsets=[row]))
        found.append(
            [(part.drafts, part.num_accepted, part.emitted, part.finish) for each in log for part in each.rows]
        )
    return found


def compare(model, **settings):
    """Also the drafts: a head whose caches lack a prompt's positions, or hold another's, drafts others."""
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    _, log = decode(model, prompts, max_tokens=12, **settings)
    assert all(list(each.rows) == sorted(each.rows, key=lambda part: part.row) for each in log)
    parts = [
        [(part.drafts, part.num_accepted, part.emitted, part.finish) for part in own]
        for own in logs_of(log, len(prompts))
    ]
    assert parts == alone(model, prompts, max_tokens=12, **settings)


@pytest.mark.more
@pytest.mark.parametrize(("name", "modules"), families(BUILDS, most_of(MOST)), ids=lambda value: str(value))
def test_a_batch_decodes_what_each_prompt_gives_alone(name, modules):
    compare(build(name, modules=modules), num_speculative_tokens=3)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "settings",
    [
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 3, "sampling": Sampling(0.9, top_p=0.9)},
        {"num_speculative_tokens": 3, "chunk": 16},
        {"num_speculative_tokens": 2, "sampling": Sampling(0.8, repetition_penalty=1.3)},
    ],
    ids=["plain", "sampled", "chunks", "penalty"],
)
@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5"])
def test_in_native_rounds_too(name, settings):
    compare(fast_of(build(name)), **settings)


@pytest.mark.parametrize("native", [False, True])
def test_little_is_padded(native, monkeypatch):
    model, sizes = build("glm4_moe"), []
    model = fast_of(model) if native else model
    kind = type(model.trunk) if native else Trunk
    run = kind.__call__ if native else kind.forward

    def counted(self, tokens, *given, **named):
        sizes.append(tokens.numel())
        return run(self, tokens, *given, **named)

    monkeypatch.setattr(kind, "__call__" if native else "forward", counted)
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    next(rounds(model.trunk, None, prompts, Settings(num_speculative_tokens=0)))
    assert sum(LENGTHS) <= sum(sizes) <= 1.15 * sum(LENGTHS) < 0.6 * len(LENGTHS) * max(LENGTHS)


def test_caches_of_groups_that_joined_are_given_back():
    """Else the decode would hold every prompt's cache twice."""
    model = build("glm4_moe")
    log = rounds(model.trunk, model.head, [prompt(5), prompt(110), prompt(60)], Settings(max_tokens=4))
    next(log)
    gc.collect()
    batches = [each for each in gc.get_objects() if type(each) is DecodingBatch]
    assert len([each for each in batches if getattr(each.trunk, "module", None) is model.trunk]) == 1
