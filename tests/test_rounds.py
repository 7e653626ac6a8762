"""Native rounds against the reference loop where they could differ: sequences, sizes, many pending positions."""

from dataclasses import replace
from itertools import product

import pytest
from quick import case, each_once
from replays import PlanPerRound, fast_of
from tiny import build, prompt, refrain

import nextn.runtime.native.rounds as native_rounds
from nextn.decoding import batch as batch_module
from nextn.decoding.drafter import Drafter
from nextn.decoding.rounds import rounds
from nextn.runtime.native.draft_chain import NativeDraftChain
from nextn.runtime.native.rounds import MAX_ROUNDS, NativeRounds
from nextn.runtime.native.session import NativeTrunk
from nextn.settings import Contract, Sampling, Settings
from nextn.speculative.draft_policy import PROBE_INTERVAL, AdaptiveLength, FixedLength
from nextn.stats.speedup import Costs, Spread

WAYS = [Sampling(), Sampling(1.0), Sampling(0.8, top_k=7)]


@pytest.fixture(scope="module")
def model():
    return fast_of(build("glm4_moe"))


class Now(PlanPerRound):
    """The number of drafts of each round, again and again."""

    def __init__(self, *numbers):
        self.numbers, self.at = numbers, -1

    def plan(self):
        self.at += 1
        return FixedLength(self.numbers[self.at % len(self.numbers)]).plan()


def both(model, prompts, settings, make=lambda: None, **given):
    """The results of all rounds, native and by the loop, and how many rounds each native call ran."""
    found, calls, run = [], [], NativeRounds.run

    def counted(*given, **named):
        made = run(*given, **named)
        calls.append(len(made))
        return made

    for observer in (None, lambda event: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NativeRounds, "run", counted)
            patch.setattr(batch_module, "_MAX_AHEAD_S", 1e9)  # whatever the machine's pace
            stream = rounds(model.trunk, model.head, prompts, settings, length=make(), observer=observer, **given)
            found.append([each.rows for each in stream])
    return *found, calls


@pytest.mark.more
@pytest.mark.parametrize("sampling", WAYS)
@pytest.mark.parametrize("numbers", [(0, 3), (3, 0, 0, 1), (*[0] * (3 * PROBE_INTERVAL), 2), (0,)], ids=len)
def test_pending_positions_of_the_head(model, numbers, sampling):
    """Also more of them than the capacity."""
    prompts = [prompt(29), prompt(40, seed=4)]
    settings = Settings(num_speculative_tokens=3, max_tokens=110, sampling=sampling)
    native, loop, calls = both(model, prompts, settings, lambda: Now(*numbers))
    assert native == loop
    assert calls == [1] * (len(native) - 1)


@pytest.mark.parametrize("sampling", WAYS)
def test_plain_decoding(model, sampling):
    """Without a head in it; rows end at different times."""
    prompts = [prompt(length, seed=length) for length in (3, 50, 11)]
    settings = Settings(num_speculative_tokens=0, max_tokens=40, sampling=sampling)
    whole, _, _ = both(model, prompts, settings)
    end = next(row.emitted[0] for row in whole[9] if row.row == 1)
    native, loop, calls = both(model, prompts, replace(settings, eos=(end,)))
    assert native == loop
    assert {len(rows) for rows in native} > {3}
    assert sum(calls) == len(native) - 1


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("sampling", "k", "count"),
    [
        case(*each, quick=each[1:] in ((3, 1), (0, 2)) or each == (WAYS[1], 3, 2))
        for each in product(WAYS, (0, 3), (1, 2))
    ],
)
def test_rounds_run_ahead(model, k, count, sampling):
    """Up to the last token, the end of the context, or the round in which a row ends."""
    prompts = [prompt(17), prompt(40, seed=4)][:count]
    settings = Settings(num_speculative_tokens=k, max_tokens=90, sampling=sampling)
    native, loop, calls = both(model, prompts, settings)
    assert native == loop
    assert MAX_ROUNDS in calls
    tokens = [token for rows in native for row in rows for token in row.emitted]
    for end in (tokens[7], tokens[len(tokens) // 2]):
        ended, loop, calls = both(model, prompts, replace(settings, eos=(end, 1000)))
        assert ended == loop
        assert sum(calls) == len(ended) - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.trunk, "max_length", 77)
        native, loop, _ = both(model, prompts, replace(settings, max_tokens=77))
    assert native == loop
    assert native[-1][-1].finish == "context"


def adaptive():
    cheap = Spread(1.0, 1.0, 1.0, 1)
    return AdaptiveLength(Costs(1, 64, (cheap,) * 5, replace(cheap, median=0.01)))


@pytest.mark.more
@pytest.mark.parametrize(("sampling", "make"), each_once(WAYS, [adaptive, lambda: FixedLength(4, 0.004)]))
def test_rounds_ahead_by_confidence(model, make, sampling):
    """Of other sizes each, by a rule that changes now and then."""
    for count in (1, 3):
        prompts = [prompt(17 + each, seed=each) for each in range(count)]
        native, loop, calls = both(
            model, prompts, Settings(num_speculative_tokens=4, max_tokens=120, sampling=sampling), make
        )
        assert native == loop
        assert max(calls) > 2
        assert len({len(row.drafts) for rows in native for row in rows}) > 1


def test_nobody_is_asked_too_late(model):
    """A text that may stop at any token is checked after each round."""
    settings = Settings(num_speculative_tokens=3, max_tokens=60)
    stop = lambda row, new: 21 if len(new) > 21 else None  # noqa: E731
    native, loop, calls = both(model, [prompt(20)], settings, stop=stop)
    assert native == loop
    assert calls == [1] * (len(native) - 1)


def test_rounds_ahead_are_soon_over(model):
    """What one round takes decides how many are run at once."""
    found, run = [], NativeRounds.run

    def noted(*given, max_rounds, **named):
        found.append(max_rounds)
        return run(*given, max_rounds=max_rounds, **named)

    for seconds in (1e-9, 1e9):
        found.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch_module, "_MAX_AHEAD_S", seconds)
            patch.setattr(NativeRounds, "run", noted)
            list(rounds(model.trunk, model.head, [prompt(20)], Settings(num_speculative_tokens=1, max_tokens=40)))
        assert (max(found) == 1) == (seconds < 1)


@pytest.mark.more
def test_ways_to_sample_do_not_disturb_one_another(model):
    """Verify blocks are shared by all texts: other sizes, batch sizes and sampling parameters."""
    for sampling in (*WAYS, *reversed(WAYS)):
        for count, k in ((1, 4), (2, 3), (3, 4), (2, 7)):
            prompts = refrain(count, 30, seed=k).tolist()
            native, loop, _ = both(model, prompts, Settings(num_speculative_tokens=k, max_tokens=14, sampling=sampling))
            assert native == loop


def test_two_decodes_take_turns(model):
    """A way to sample of their own each; neither finds what the other left."""

    def stream(seed, sampling):
        settings = Settings(num_speculative_tokens=3, max_tokens=30, sampling=sampling, seed=seed)
        return rounds(model.trunk, model.head, [prompt(20, seed=seed)], settings)

    alone = [[each.rows for each in stream(seed, WAYS[seed])] for seed in (1, 2)]
    one, other = stream(1, WAYS[1]), stream(2, WAYS[2])
    found = [[], []]
    for _ in range(max(map(len, alone))):
        for rows, each in zip(found, (one, other), strict=True):
            rows += [part.rows for part in [next(each, None)] if part is not None]
    assert found == alone


REFUSED = {
    "a penalty": ({"sampling": Sampling(1.0, repetition_penalty=1.2)}, "glm4_moe"),
    "a fault between rounds": ({"contract": Contract(refresh=False)}, "glm4_moe"),
    "recurrent state": ({}, "qwen3_next"),
    "more drafts than one pass takes": ({"num_speculative_tokens": 130}, "glm4_moe"),
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", REFUSED)
def test_others_run_from_python(name):
    given, family = REFUSED[name]
    settings = Settings(**{"num_speculative_tokens": 3, "max_tokens": 12} | given)
    native, loop, calls = both(fast_of(build(family)), [prompt(20)], settings)
    assert native == loop
    assert not calls


def test_the_loop_is_not_run_beside_it(model):
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Drafter, "draft"), (Drafter, "add"), (NativeDraftChain, "run"), (NativeTrunk, "__call__")):
            before = getattr(owner, name)
            patch.setattr(owner, name, _counted(calls := [], before))
        stream = rounds(model.trunk, model.head, [prompt(20)], Settings(num_speculative_tokens=3, max_tokens=12))
        next(stream)
        calls.clear()
        assert len(list(stream)) > 2
    assert not calls


def _counted(calls, function):
    def counted(*given, **named):
        calls.append(function)
        return function(*given, **named)

    return counted


@pytest.mark.parametrize("k", [0, 3])
def test_rounds_ahead_have_capacity(model, monkeypatch, k):
    """A cache of minimal capacity grows before rounds run ahead, not during them."""
    settings = Settings(num_speculative_tokens=k, max_tokens=90)
    texts = []
    for observer in (None, lambda event: None):  # who looks gets rounds one by one
        monkeypatch.setattr(native_rounds, "_RESERVED", 1)
        log = rounds(model.trunk, model.head, [prompt(240)], settings, observer=observer)
        texts.append([token for each in log for token in each.rows[0].emitted])
    assert texts[0] == texts[1]
    assert len(texts[0]) == 90
