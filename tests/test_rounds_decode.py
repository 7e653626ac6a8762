"""Rounds against plain decoding: equality for every family, forced rejections, ragged batches, ends, limits, probs."""

from collections import Counter
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from quick import case, families, loop, most_of, others_slow
from scipy.stats import chisquare
from tiny import BUILDS, CONFIGS, MOST, build, decode, prompt

from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.decoding.drafter import Drafter
from nextn.decoding.rounds import rounds
from nextn.errors import ConfigError
from nextn.model.layer_types import context_length
from nextn.model.text_interface import TextInterface
from nextn.model.trunk import Trunk
from nextn.settings import Contract, Sampling, Settings
from nextn.speculative.draft_policy import FixedLength
from nextn.speculative.sampling import to_probs
from nextn.stats.acceptance import Acceptance

LENGTHS = (1, 2, 17, 40)


@pytest.fixture(
    scope="module",
    params=[case(each, quick=each in most_of(MOST) or each == ("glm4_moe", 1)) for each in BUILDS],
    ids=lambda each: f"{each[0]}-{each[1]}",
)
def model(request):
    name, modules = request.param
    return build(name, modules=modules)


class OracleDrafter(Drafter):
    """Drafts the right token for the first `right[round]` depths of a round, then a wrong one.

    Everything else (the head's passes, caches, verification, rollback) is that of a `Drafter`.
    """

    uses_native_chain = False

    def __init__(self, head, like, batch_size, *, texts, right, **options):
        super().__init__(head, like, batch_size, **options)
        self.texts, self.right, self.round = texts, right, -1
        self.rows, self.prompts = list(range(batch_size)), None

    def draft(self, plan, limits, tokens, uniforms, seen=None):
        # The first round comes after one token of the prefill.
        self.prompts = [len(row) - 1 for row in tokens] if self.prompts is None else self.prompts
        self.round, self.depth, self.known = self.round + 1, 0, tokens
        return super().draft(plan, limits, tokens, uniforms, seen)

    def sample_drafts(self, prediction, seen, uniforms):
        q, _ = super().sample_drafts(prediction, seen, uniforms)
        drafts = []
        for index, row in enumerate(self.rows):
            at = len(self.known[index]) - self.prompts[row] + self.depth
            true = self.texts[row][at] if at < len(self.texts[row]) else 0
            wrong = self.depth >= self.right[(self.round + row) % len(self.right)]
            drafts.append((true + 1) % 64 if wrong else true)
        self.depth += 1
        return q, drafts

    def select(self, indices):
        self.rows = [self.rows[index] for index in indices]
        super().select(indices)


def oracle(texts, right):
    """A maker of drafters for `rounds`."""
    return partial(OracleDrafter, texts=texts, right=right)


@pytest.fixture(scope="module")
def plain(model):
    """plain(length, tokens): the trunk's own greedy text after a prompt of that length, decoded once for all tests."""
    return cache(
        lambda length, tokens: decode(
            model, [prompt(length, seed=length)], max_tokens=tokens, num_speculative_tokens=0
        )[0][0]
    )


@pytest.mark.one_case
@pytest.mark.parametrize("k", others_slow([1, 2, 3, 6], 1, 6))
def test_greedy_equals_plain(model, plain, k):
    """Catches any cache, position or roll-back fault that reaches the trunk's output."""
    assert decode(model, [prompt(17, seed=17)], num_speculative_tokens=k, max_tokens=14)[0][0] == plain(17, 14)


@pytest.mark.parametrize("k", others_slow([0, 1, 3, 6], 0, 3))
def test_greedy_equals_plain_in_ragged_batches(model, plain, k):
    """Rows of different lengths keep different counts, also 0 and all: a mix-up of rows or counts changes the text."""
    prompts, texts = [prompt(length, seed=length) for length in LENGTHS], [plain(length, 14) for length in LENGTHS]
    makes = {"make_drafter": oracle(texts, right=[k, 0, 1, k - 1, 2])} if k else {}
    found, log = decode(model, prompts, num_speculative_tokens=k, max_tokens=14, chunk=16, **makes)
    assert found == texts
    assert {part.num_accepted for each in log for part in each.rows if part.drafts} >= ({0, 1} if k else set())


@pytest.mark.more
@loop("kept", range(6))
def test_rejection_at_every_position(model, plain, kept):
    """Each round keeps exactly `kept` of 5 drafts: the roll-back of every length is right, and kept counts are told."""
    text = plain(17, 14)
    drafter = oracle([text], right=[kept])
    found, log = decode(model, [prompt(17, seed=17)], num_speculative_tokens=5, max_tokens=14, make_drafter=drafter)
    assert found[0] == text
    verified = [part for each in log for part in each.rows if len(part.drafts) == 5]
    assert verified
    assert all(part.num_accepted == kept and len(part.emitted) == kept + 1 for part in verified)


class Late:
    """A plan for the first twenty rounds, and four drafts in all others."""

    reason = "a test"

    def __init__(self, early):
        self.early, self.num_rounds = early.plan(), 0

    def plan(self):
        return self.early if self.num_rounds < 20 else FixedLength(4).plan()

    def observe(self, num_tokens, seconds):
        self.num_rounds += 1

    def learn(self, *_, **__):
        pass


@pytest.mark.more
@pytest.mark.parametrize(("name", "modules"), [("glm4_moe", 2), ("deepseek_v3", 3)])
def test_modules_that_do_not_run_do_not_fall_behind(name, modules):
    """No probs is sure enough, so only the first module runs in a round: what waits for the others stays short, and in
    the end they draft what they draft behind twenty baseline rounds."""
    model, waiting = build(name, modules=modules), []

    class Watched(Drafter):
        def draft(self, *args):
            waiting.append(max(map(len, self.pending)))
            return super().draft(*args)

    prompts, settings = [prompt(9, seed=1), prompt(4, seed=2)], Settings(num_speculative_tokens=4, max_tokens=40)
    plain = list(rounds(model.trunk, model.head, prompts, settings, length=Late(FixedLength(0))))
    late = Late(FixedLength(4, p_min=1.0))
    shy = list(rounds(model.trunk, model.head, prompts, settings, length=late, make_drafter=Watched))
    assert shy[20].rows == plain[20].rows
    assert not any(part.drafts for part in shy[20].rows)
    assert any(part.drafts for part in shy[21].rows)
    assert [each.rows for each in shy] == [each.rows for each in plain]
    assert max(waiting) <= modules + settings.num_speculative_tokens


@pytest.mark.more
@pytest.mark.parametrize("name", families(CONFIGS))
def test_long_prompt_in_chunks(name):
    """500 tokens through chunks of 96 give what one pass gives, for the trunk and for the head's drafts."""
    model = build(name)
    texts = [decode(model, [prompt(500)], num_speculative_tokens=3, max_tokens=8, chunk=chunk) for chunk in (96, 2000)]
    assert texts[0][0] == texts[1][0] == decode(model, [prompt(500)], num_speculative_tokens=0, max_tokens=8)[0]
    drafted = [[part.drafts for each in log for part in each.rows] for _, log in texts]
    assert drafted[0] == drafted[1]


@pytest.mark.more
def test_cached_equals_uncached(model):
    """Texts and drafts are those of trunk and head run over the whole text without a cache.

    Catches a head cache that was not prefilled, not refreshed, or rolled back to the wrong position, and a mask or
    window that differs with a cache. Equality of the output shows none of these.
    """
    start, modules = prompt(12), model.head.num_modules
    texts, log = decode(model, [start], num_speculative_tokens=modules, max_tokens=12)
    known, compared = start + texts[0][:1], 0
    with torch.inference_mode():
        whole = model.trunk(torch.tensor([start + texts[0]]))
        assert model.trunk.logits(whole.final_hidden)[0, len(start) - 1 : -1].argmax(-1).tolist() == texts[0]
        for each in log[1:]:
            drafted = list(each.rows[0].drafts)
            if len(drafted) == modules:
                tokens = torch.tensor([known + drafted])
                states = whole.head_input[:, : len(known) - 1]
                hidden = torch.cat([states, states.new_zeros(1, modules + 1, *states.shape[2:])], dim=1)
                logits = model.head(tokens, hidden, depths=modules)
                assert logits[0, len(known) - 2].argmax(-1).tolist() == drafted
                compared += 1
            known += each.rows[0].emitted
    assert compared


@pytest.mark.more
def test_batch_draws_what_a_single_row_draws():
    """A row's random numbers do not depend on its neighbors: row 0 alone decodes the same text."""
    model = build("glm4_moe")
    sampling = Sampling(temperature=1.0, top_p=0.9)
    both = decode(model, [prompt(8), prompt(20, seed=3)], num_speculative_tokens=3, max_tokens=16, sampling=sampling)[0]
    assert decode(model, [prompt(8)], num_speculative_tokens=3, max_tokens=16, sampling=sampling)[0][0] == both[0]
    assert (
        decode(model, [prompt(8)], num_speculative_tokens=3, max_tokens=16, sampling=sampling, seed=1)[0][0] != both[0]
    )


DISTRIBUTIONS = {
    "plain": (Sampling(temperature=1.0), True),
    "argmax-drafts": (Sampling(temperature=1.0), False),
    "top-p": (Sampling(temperature=0.7, top_p=0.8), True),
    "penalty": (Sampling(temperature=1.3, top_k=3, min_p=0.05, repetition_penalty=1.5), True),
}


# What a distribution does with a state that cannot be cropped, two of them tell.
@pytest.mark.one_case
@pytest.mark.parametrize(
    ("name", "probs"),
    [
        *product(["glm4_moe"], DISTRIBUTIONS),
        *(case("qwen3_5", distribution, quick=False) for distribution in ("plain", "penalty")),
    ],
)
def test_whole_decodes_follow_the_distribution(name, probs):
    """Chi-square of 4-token texts over a vocabulary of 3 against the distribution enumerated from the trunk alone.

    Catches q of other settings than p, a penalty that misses the drafts before, a lost residual.
    """
    sampling, sampled = DISTRIBUTIONS[probs]
    model = build(name, vocab_size=3, hidden_size=16, seed=5, initializer_range=0.2)
    start, count = [1, 2, 0], 2400 if name == "glm4_moe" else 900
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(3):
        texts, _ = decode(
            model,
            [start] * (count // 3),
            num_speculative_tokens=2,
            max_tokens=4,
            sampling=sampling,
            sampled_drafts=sampled,
            seed=seed,
        )
        counts.update(map(tuple, texts))
    expected = {text: count * _probability(model, start, text, sampling) for text in product(range(3), repeat=4)}
    assert sum(expected.values()) == pytest.approx(count, rel=1e-3)
    assert all(expected[text] > 0 for text in counts)
    common = [text for text, number in expected.items() if number >= 5]
    rare = count - sum(expected[text] for text in common), count - sum(counts[text] for text in common)
    observed = [counts[text] for text in common] + [rare[1]]
    wanted = [expected[text] for text in common] + [rare[0]]
    keep = np.array(wanted) > 1e-6
    distributions, found = np.array(wanted)[keep], np.array(observed)[keep]
    assert chisquare(found, distributions / distributions.sum() * found.sum()).pvalue > 1e-3


def _probability(model, start, text, sampling):
    probability, known = 1.0, list(start)
    with torch.inference_mode():
        for token in text:
            logits = model.trunk.logits(model.trunk(torch.tensor([known])).final_hidden[0, -1])
            seen = torch.zeros(3, dtype=torch.bool)
            seen[known] = True
            probability *= to_probs(logits, sampling, seen if sampling.needs_seen else None)[token].item()
            known.append(token)
    return probability


def test_eos_ends_a_row_inside_a_round():
    """Kept drafts behind an eos are not emitted, and do not count as verified."""
    model = build("glm4_moe")
    text = decode(model, [prompt(9)], num_speculative_tokens=0, max_tokens=20)[0][0]
    at = next(index for index in range(3, 20) if text[index] not in text[:index])
    drafter = oracle([text], right=[5])
    found, log = decode(
        model, [prompt(9)], num_speculative_tokens=5, max_tokens=20, eos=(text[at],), make_drafter=drafter
    )
    assert found[0] == text[: at + 1]
    last = log[-1].rows[0]
    assert last.finish == "eos"
    assert len(last.emitted) in (last.num_accepted, last.num_accepted + 1)
    assert len(last.drafts) >= last.num_accepted


@pytest.mark.more
def test_rows_leave_when_they_end():
    """A row that ends early does not change the others."""
    model = build("qwen3_5")
    prompts = [prompt(5, seed=1), prompt(9, seed=2), prompt(3, seed=3)]
    alone = [decode(model, [each], num_speculative_tokens=0, max_tokens=16)[0][0] for each in prompts]
    eos = (alone[1][2],)
    expected = [text[: text.index(eos[0]) + 1] if eos[0] in text else text for text in alone]
    assert decode(model, prompts, num_speculative_tokens=4, max_tokens=16, eos=eos)[0] == expected


@pytest.mark.more
def test_the_context_ends_a_row():
    """Decoding stops at max_position_embeddings, never beyond, and says so."""
    model = build("glm4_moe", max_position_embeddings=32)
    texts, log = decode(model, [prompt(20)], num_speculative_tokens=6, max_tokens=32)
    assert len(texts[0]) == 12
    assert log[-1].rows[0].finish == "context"
    assert texts == decode(model, [prompt(20)], num_speculative_tokens=0, max_tokens=32)[0]


@pytest.mark.more
@pytest.mark.parametrize("length", [5, 40])
def test_frequencies_that_depend_on_the_text_limit_the_context(length, tmp_path):
    """A text in `longrope` is that of transformers, which computes cached keys again beyond the first frequencies."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None, "eos_token_id": None}
    original = {"max_position_embeddings": 128, "original_max_position_embeddings": 24}
    torch.manual_seed(0)
    trunk = Trunk.from_config({"model_type": "phi3", **sizes, **heads, **original, "rope_parameters": rope | original})
    trunk.model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)  # the architecture's own needs a file
    assert trunk.max_length == TextInterface.read(str(tmp_path)).max_length == 24
    of_layers = {"full_attention": rope | original, "sliding_attention": {"rope_type": "default"}}
    assert context_length(SimpleNamespace(max_position_embeddings=128, rope_parameters=of_layers)) == 24
    settings = Settings(num_speculative_tokens=0, num_copy_tokens=4, max_tokens=24, chunk=4)
    if length >= 24:
        with pytest.raises(ConfigError, match="context holds 24"):
            next(rounds(trunk, None, [prompt(length)], settings))
        return
    log = list(rounds(trunk, None, [prompt(length)], settings))
    ids = torch.tensor([prompt(length)])
    mask = torch.ones_like(ids)
    expected = trunk.model.generate(ids, attention_mask=mask, max_new_tokens=24 - length, do_sample=False)
    assert [token for each in log for token in each.rows[0].emitted] == expected[0, length:].tolist()
    assert log[-1].rows[0].finish == "context"


def test_max_tokens_is_exact():
    model = build("glm4_moe")
    for count in range(1, 8):
        texts, log = decode(model, [prompt(4)], num_speculative_tokens=4, max_tokens=count)
        assert len(texts[0]) == count
        assert log[-1].rows[0].finish == "length"


def test_no_head_work_without_drafts(monkeypatch):
    """K = 0 is plain decoding through the same loop: the head is not run over the prompt for nothing."""
    model = build("glm4_moe")
    monkeypatch.setattr(model.head, "step", lambda *_, **__: pytest.fail("the head ran"))
    decode(model, [prompt(30)], num_speculative_tokens=0, max_tokens=4)


@pytest.mark.parametrize(
    ("prompts", "settings", "words"),
    [
        ([], {}, "no prompt"),
        ([[]], {}, "prompt 0 is empty"),
        ([[1] * 2048], {}, "context holds 2048"),
        ([[1, 64]], {}, "vocabulary is 0..63"),
        ([[1, -1]], {}, "vocabulary is 0..63"),
    ],
)
def test_bad_prompts(prompts, settings, words):
    model = build("glm4_moe")
    with pytest.raises(ConfigError, match=words):
        next(rounds(model.trunk, model.head, prompts, Settings(**settings)))


@pytest.mark.parametrize(
    "values", [{"num_speculative_tokens": -1}, {"max_tokens": 0}, {"chunk": 0}, {"contract": Contract(offset=2)}]
)
def test_bad_settings(values):
    with pytest.raises(ConfigError, match=f"{next(iter(values))}"):
        Settings(**values)


def test_any_valid_seed_can_be_used():
    """The seeds of a batch are multiples of it, beyond what a generator takes; all of them give texts of their own."""
    model, how = build("glm4_moe"), {"sampling": Sampling(5.0), "max_tokens": 12}
    seeds = [-(2**63), -1, 0, 2**44, 2**45, 2**63 - 1]
    texts = [decode(model, [prompt(5)], num_speculative_tokens=0, seed=seed, **how)[0][0] for seed in seeds]
    assert len(set(map(tuple, texts))) == len(seeds)


def test_drafts_need_a_head():
    model = build("glm4_moe")
    with pytest.raises(ConfigError, match="no head"):
        next(rounds(model.trunk, None, [[1]], Settings(num_speculative_tokens=2)))


@pytest.mark.more
def test_acceptance_counts_conditionally():
    """a_k counts only rounds in which every shallower draft was kept."""
    model = build("glm4_moe")
    text = decode(model, [prompt(9)], num_speculative_tokens=0, max_tokens=21)[0]
    drafter = oracle(text, right=[0, 1, 3])
    figures = Acceptance.of(
        decode(model, [prompt(9)], num_speculative_tokens=3, max_tokens=21, make_drafter=drafter)[1]
    )
    assert figures.num_drafted[1] == figures.num_accepted[0]
    assert figures.rates[0] == pytest.approx(figures.num_accepted[0] / figures.num_drafted[0])
    assert figures.length == pytest.approx(1 + sum(figures.num_accepted) / figures.num_rounds)
    low, high = figures.intervals()[0]
    assert low < figures.rates[0] < high
