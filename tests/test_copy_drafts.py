"""Copies: which are chosen, against all choices; texts with them, against those without; the index against a search."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import each_once
from replays import fast_of
from test_rounds import both
from tiny import build, prompt, refrain

from nextn.decoding import batch as batch_module
from nextn.decoding.records import DraftResult
from nextn.decoding.rounds import rounds
from nextn.errors import ConfigError
from nextn.settings import Sampling, Settings
from nextn.speculative import copy_drafts
from nextn.speculative.copy_choice import CopyChoice, CopyRun, RoundValues, choose_alone, choose_copies
from nextn.speculative.copy_drafts import MAX_MATCH, CopyDrafts, CopyIndex, CopyMatch, copied_rounds
from nextn.speculative.draft_policy import AdaptiveLength, FixedLength
from nextn.stats.speedup import Costs, Spread

# Dense; three MTP layers; recurrent layers; windows.
MODELS = [("glm4_moe", 1), ("deepseek_v3", 3), ("qwen3_5", 1), ("mimo_v2", 3)]


def run_of(rate, count=16):
    return CopyRun(tuple(range(count)), tuple(rate ** (index + 1) for index in range(count)))


def test_the_choice_is_the_best_of_all():
    """Over every length, with and without the head, and every set of sequences that copy."""
    costs = {count: 1 + 0.1 * count for count in (0, 1, 2, 4, 8, 16)}
    runs = [run_of(0.9), CopyRun(), run_of(0.3), run_of(0.97)]
    for size, (k, expected, rate) in product((1, 2, 4), [(0, 1.0, 1.0), (4, 2.2, 1.2), (2, 2.9, 2.0), (4, 4.8, 3.5)]):
        chosen = choose_copies(runs[:size], RoundValues(rate * size, costs, k, expected))
        best, found = 0.0, None
        for uses_head, length, copying in product((False, True), costs, product((False, True), repeat=size)):
            if not length or not any(copying) or (uses_head and (length < k or not k)):
                continue
            others = expected if uses_head else 1.0
            pairs = list(zip(runs[:size], copying, strict=True))
            tokens = sum(1 + sum(run.reach[:length]) if copies else others for run, copies in pairs)
            # A round with the head and K positions brings `rate` in its time.
            time = size * expected / (rate * size) + costs[length] - costs[k] if uses_head else costs[length]
            value = tokens - rate * size * time
            if value > best + 1e-9:
                best, found = value, (uses_head, length, copying)
        if found is None:
            assert chosen == CopyChoice(((),) * size)
        else:
            uses_head, length, copying = found
            assert chosen.uses_head == uses_head
            assert chosen.num_draft_tokens == length
            assert tuple(map(bool, chosen.drafts)) == copying


def test_sequences_that_choose_alone_do_not_see_each_other():
    values = RoundValues(1.5, {0: 1.0, 2: 1.2, 8: 1.8})
    runs = [run_of(0.95), CopyRun(), run_of(0.5)]
    together = choose_alone(runs, values)
    assert together.uses_head
    assert together.drafts == tuple(choose_alone([run], values).drafts[0] for run in runs)
    assert not choose_alone(runs[:1], values).uses_head
    assert FixedLength(4).choose(runs).drafts[0] == runs[0].tokens
    flat = Costs(1, 64, tuple(Spread(1 + 0.01 * num, 0, 0, 1) for num in range(17)), Spread(0.2, 0, 0, 1))
    assert AdaptiveLength(flat, limit=4).choose(runs).drafts[0] == runs[0].tokens
    steep = Costs(1, 64, tuple(Spread(1 + 2 * num, 0, 0, 1) for num in range(17)), Spread(0.2, 0, 0, 1))
    assert not any(AdaptiveLength(steep, limit=4).choose(runs).drafts)


def test_a_sequence_learns_how_often_its_copies_are_accepted():
    tokens = prompt(20) * 2
    for accepted in (0, 8):
        copies = CopyDrafts(tokens)
        before = copies.run(8)
        assert before.tokens == tuple(tokens[:8])
        for _ in range(20):
            copies.run(8)
            copies.learn(8, accepted)
        after = copies.run(8)
        assert (after.reach[0] < before.reach[0]) == (accepted == 0)
    assert copies.run(0) == CopyRun()
    assert CopyDrafts(tokens[:20]).run(8) == CopyRun()


def test_rounds_of_a_text_that_is_known():
    """A copy of the prompt with one other token in it: two tokens must agree before the next ones are copied."""
    text = prompt(20)
    new = [*text[:7], 63, *text[8:12]]
    assert copied_rounds([*text], new, 8) == [(0, 0), (8, 5), (0, 0), (0, 0), (1, 1)]
    assert copied_rounds([*text], new[:1], 8) == []
    assert copied_rounds([1], [2, 3], 8) == [(0, 0)]
    assert copied_rounds([1], Sliced(range(2, 1002)), 8) == [(0, 0)] * 999


class Sliced(list):
    """A text of which no rest is copied: that would take time by its length in each round."""

    def __getitem__(self, place):
        found = super().__getitem__(place)
        assert not isinstance(place, slice) or len(found) <= 8
        return found


class Oracle:
    """Copies of the text that will be, up to a token that is wrong, in most rounds."""

    texts = ()

    def __init__(self, tokens):
        self._tokens, self._calls = tokens, 0

    def run(self, most):
        self._calls += 1
        coming = next(text for text in self.texts if text[: len(self._tokens)] == self._tokens)[len(self._tokens) :]
        right = 3 * self._calls % 11
        wrong = [(token + 1) % 64 for token in coming[right : right + 1]]
        tokens = (*coming[:right], *wrong, *coming[right + 1 :])[:most]
        return CopyRun(tokens, (0.95,) * len(tokens)) if self._calls % 3 else CopyRun()

    def learn(self, num_draft_tokens, num_accepted):
        pass


def texts_of(model, prompts, **settings):
    stream = list(rounds(model.trunk, model.head, prompts, Settings(max_tokens=40, **settings)))
    parts = [part for each in stream for part in each.rows]
    return [
        [token for part in parts if part.row == row for token in part.emitted] for row in range(len(prompts))
    ], parts


@pytest.mark.one_case
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("name", "modules"), MODELS)
def test_greedy_texts_are_those_without_copies(name, modules, native, monkeypatch):
    """Where copies are right, partly right and wrong, beside a head and without."""
    model = build(name, modules=modules)
    model = fast_of(model) if native else model
    prompts = [prompt(9), prompt(14, seed=1)]
    plain, _ = texts_of(model, prompts, num_speculative_tokens=0)
    monkeypatch.setattr(batch_module, "CopyDrafts", Oracle)
    monkeypatch.setattr(Oracle, "texts", [[*a, *b] for a, b in zip(prompts, plain, strict=True)])
    for k, some in ((3, prompts), (0, prompts), (3, prompts[:1])):
        texts, parts = texts_of(model, some, num_speculative_tokens=k, num_copy_tokens=9)
        assert texts == plain[: len(some)]
        copied = [part for part in parts if part.copied]
        assert 0 < sum(part.num_accepted for part in copied) < sum(len(part.drafts) for part in copied)
        assert {part.num_accepted for part in copied} >= {3, 6}
        assert any(part.drafts and not part.copied for part in parts) == (k > 0)


@pytest.mark.parametrize(("sampling", "k"), each_once([Sampling(), Sampling(0.3), Sampling(0.4, top_k=2)], [0, 3]))
def test_native_rounds_are_those_of_the_loop(sampling, k):
    """With the index itself: refrains are copied, at other times in each sequence. One text is what it is alone."""
    model = fast_of(build("glm4_moe"))
    prompts = [row.tolist() for row in refrain(3, 40, seed=2)]
    settings = Settings(num_speculative_tokens=k, num_copy_tokens=12, max_tokens=50, sampling=sampling)
    native, loop, calls = both(model, prompts, settings)
    assert native == loop
    assert set(calls) == {1}
    parts = [part for rows in native for part in rows]
    assert any(part.copied for part in parts)
    assert any(part.num_accepted for part in parts if part.copied)
    alone, _, _ = both(model, prompts[1:2], settings, seed_offsets=[1])
    ours = [(part.drafts, part.emitted) for part in parts if part.row == 1]
    assert [(part.drafts, part.emitted) for rows in alone for part in rows] == ours


@pytest.mark.parametrize("num_copy_tokens", [120, 130])
def test_more_copies_than_one_pass_of_the_head_takes(num_copy_tokens):
    """In a text of one token every copy is right, and what the head puts off grows by as many positions."""
    model = build("glm4_moe")
    model.trunk.output.weight.data.zero_()
    settings = Settings(num_speculative_tokens=3, num_copy_tokens=num_copy_tokens, max_tokens=600)
    native, loop, _ = both(fast_of(model), [[0] * 40], settings)
    assert native == loop
    assert max(part.num_accepted for rows in native for part in rows if part.copied) == num_copy_tokens


def test_distributions_of_copies_take_no_new_memory():
    """Blocks that verify are kept, each with the memory of its distributions, for the next texts."""
    model, counts = fast_of(build("glm4_moe")), []
    for seed in range(3):
        settings = {"num_copy_tokens": 4, "sampling": Sampling(0.3), "seed": seed}
        _, parts = texts_of(model, [refrain(1, 40, seed=2)[0].tolist()], num_speculative_tokens=0, **settings)
        assert any(part.copied for part in parts)
        counts.append(len({key[3] for key in model.trunk._blocks if key[3]}))
    assert counts == [1, 1, 1]


@pytest.mark.more
def test_sampled_texts_follow_the_trunks_distribution(monkeypatch):
    """The second and third token against their exact distribution, where copies are often right and often wrong."""
    model, count, sampling = build("glm4_moe"), 3000, Sampling(1.0, top_k=3)
    start = prompt(8, seed=5)

    def distribution(tokens):
        with torch.inference_mode():
            logits = model.trunk.logits(model.trunk(torch.tensor([tokens])).final_hidden[0, -1]).float()
        best = logits.topk(3)
        return dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))

    first = distribution(start)
    exact = {(a, b, c): p * q * r for a, p in first.items() for b, q in distribution([*start, a]).items()
             for c, r in distribution([*start, a, b]).items()}  # fmt: skip
    likely = max(exact, key=lambda each: exact[each])

    class Fixed(Oracle):
        def run(self, most):
            return CopyRun(likely[len(self._tokens) - len(start) :][:most], (0.99,) * min(most, 2))

    monkeypatch.setattr(batch_module, "CopyDrafts", Fixed)
    settings = Settings(num_speculative_tokens=2, num_copy_tokens=2, max_tokens=3, sampling=sampling)
    stream = list(rounds(model.trunk, model.head, [start] * count, settings))
    parts = [part for each in stream for part in each.rows]
    assert any(part.copied and not part.num_accepted for part in parts)
    texts = dict.fromkeys(range(count), ())
    for part in parts:
        texts[part.row] += part.emitted
    seen = dict.fromkeys(exact, 0)
    for text in texts.values():
        seen[text] += 1
    expected = {text: count * p for text, p in exact.items() if count * p >= 5}
    chi_square = sum((seen[text] - number) ** 2 / number for text, number in expected.items())
    assert chi_square < len(expected) + 4 * (2 * len(expected)) ** 0.5


def test_copies_beside_the_heads_drafts():
    """Their q is one-hot whatever the head computed for the sequence; the others' is the head's, then zero."""
    own = torch.rand(2, 2, 6)
    both = DraftResult([[], [4, 1]], [[], [0.5, 0.5]], own).with_copies([(3, 0, 5), ()], torch.empty(0, 6))
    assert both.drafts == [[3, 0, 5], [4, 1]]
    assert torch.equal(both.distributions[0], torch.eye(6)[[3, 0, 5]])
    assert torch.equal(both.distributions[1], torch.cat([own[1], torch.zeros(1, 6)]))


def test_settings_for_copies_are_checked():
    with pytest.raises(ConfigError, match="num_copy_tokens"):
        Settings(num_copy_tokens=-1)


def searched(tokens):
    """The match by its definition: every place, compared token by token."""
    end, places = len(tokens), []
    for place in range(1, end):
        length = next((n for n in range(place) if tokens[place - 1 - n] != tokens[end - 1 - n]), place)
        if length >= 2:
            places.append(CopyMatch(place, min(length, MAX_MATCH)))
    latest = places[::-1][: copy_drafts._MAX_PLACES]
    return max(latest, key=lambda match: match.length, default=None)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=12))
def test_the_index_finds_what_a_search_of_the_whole_text_finds(parts):
    tokens = []
    index = CopyIndex(tokens)
    for part in parts:  # it grows by several tokens between searches
        tokens += part
        match = index.find()
        assert match == searched(tokens)
        if match is not None:
            longer = list(tokens)
            for token in index.copy(match, 9):  # of each token the one that a longer text has there
                assert token == longer[match.start + len(longer) - len(tokens)]
                longer.append(token)


def test_long_and_repeated_texts_cost_a_bounded_number_of_comparisons(monkeypatch):
    compared = 0
    common = CopyIndex._common

    def counted(self, place):
        nonlocal compared
        length = common(self, place)
        compared += length
        return length

    monkeypatch.setattr(CopyIndex, "_common", counted)
    tokens = [7] * 100_000
    index = CopyIndex(tokens)
    assert index.find() == CopyMatch(99_999, MAX_MATCH)
    assert index.copy(CopyMatch(99_999, MAX_MATCH), 3) == [7, 7, 7]
    assert compared <= MAX_MATCH * copy_drafts._MAX_PLACES
    assert len(index._latest) == 1
    assert len(index._before) == len(tokens)


def test_texts_without_a_match():
    for tokens in ([], [1], [1, 1], [1, 2, 3], [1, 2, 3, 1]):
        assert CopyIndex(tokens).find() is None, tokens
