"""Estimated acceptance against decoding; the choice by made-up costs; the option."""

import inspect
import json
import token

import pytest
import torch

from nextn.decoding.generate import encode, generate
from nextn.decoding.records import Round
from nextn.demo import SHIPPED
from nextn.errors import ConfigError
from nextn.evaluate import draft_vocabulary_size
from nextn.evaluate.draft_vocabulary_size import choose_draft_vocabulary
from nextn.model.model import Model
from nextn.settings import Settings
from nextn.speculative.draft_vocabulary import DraftVocabulary
from nextn.stats.acceptance import Acceptance
from nextn.stats.speedup import Costs, Spread

HELD_OUT = inspect.getsource(token)  # other bytes are frequent here than in the rest
TEXT = inspect.getsource(inspect)[: 7 * len(HELD_OUT)] + HELD_OUT
K = 3


@pytest.fixture(scope="module")
def model():
    return Model.load(SHIPPED, dtype=torch.float32)


@pytest.fixture
def tokens(model):
    return encode(model, TEXT)


@pytest.fixture(autouse=True)
def restored(model, monkeypatch):
    monkeypatch.setattr(draft_vocabulary_size, "_SMALLEST", 8)
    yield
    model.head.draft_vocabulary = None


def with_costs(monkeypatch, per_token):
    """A draft step of `per_token` baseline steps for each token of the vocabulary."""

    def costs(model, *, num_speculative_tokens, backend):
        vocabulary = model.head.draft_vocabulary
        size = model.trunk.vocab_size if vocabulary is None else len(vocabulary)
        return Costs(
            1, 1, tuple(Spread.of([1.0]) for _ in range(num_speculative_tokens + 1)), Spread.of([per_token * size])
        )

    monkeypatch.setattr(draft_vocabulary_size, "measure_costs", costs)
    monkeypatch.setattr(
        draft_vocabulary_size, "draft_bytes", lambda head, bits, *, num_tokens, lm_head_bits: num_tokens
    )


def decoded(model, tokens):
    """The acceptance of decoding the same continuations."""
    split = len(tokens) - len(tokens) // 8
    scored = draft_vocabulary_size._score_continuations(model, tokens[split:], K, "auto")
    prompts = [list(each.text.prompt) for each in scored]
    results = generate(model, prompts, Settings(num_speculative_tokens=K, max_tokens=draft_vocabulary_size._NEW))
    assert [result.tokens for result in results] == [each.text.new for each in scored]
    return Acceptance.of(Round((part,), 0.0, 0.0) for result in results for part in result.rounds)


@pytest.mark.slow
def test_rates_of_the_whole_vocabulary_are_those_of_decoding(model, tokens, monkeypatch):
    """Starts that are off by one; a vocabulary that is left on the head; rates over all positions alike."""
    with_costs(monkeypatch, 0.0)
    model.head.draft_vocabulary = DraftVocabulary.of([tokens], 40, vocab_size=model.trunk.vocab_size)
    choice = choose_draft_vocabulary(model, tokens, num_speculative_tokens=K)
    assert choice.vocabulary is None
    assert model.head.draft_vocabulary is None
    assert [each.size for each in choice.estimates] == [8, 16, 32, 64, 128, 256, model.trunk.vocab_size]
    assert choice.estimates[-1].rates == pytest.approx(decoded(model, tokens).rates, abs=1e-9)


@pytest.mark.more
def test_a_smaller_vocabulary_where_draft_steps_cost(model, tokens, monkeypatch):
    """Tokens of the held-out part counted, or drafts outside counted as right; a choice that is not set."""
    with_costs(monkeypatch, 1 / model.trunk.vocab_size)
    choice = choose_draft_vocabulary(model, tokens, num_speculative_tokens=K, always=(7,))
    best = max(choice.estimates, key=lambda each: each.speedup)
    assert len(choice.vocabulary) == best.size < model.trunk.vocab_size
    assert choice.speedup == pytest.approx(best.speedup)
    counted, whole = tokens[: len(tokens) - len(tokens) // 8], model.trunk.vocab_size
    wanted = DraftVocabulary.of([counted], best.size, vocab_size=whole, always=(7,))
    assert model.head.draft_vocabulary is choice.vocabulary
    assert choice.vocabulary.ids.tolist() == wanted.ids.tolist()
    model.head.draft_vocabulary = None
    scored = draft_vocabulary_size._score_continuations(model, tokens[len(counted) :], K, "auto")
    for each in choice.estimates:
        ids = set(DraftVocabulary.of([counted], each.size, vocab_size=whole, always=(7,)).ids.tolist())
        assert each.rates == pytest.approx(rates_of_rounds(scored, ids), abs=1e-9)
    assert choice.estimates[0].rates[0] < choice.estimates[-1].rates[0]


def rates_of_rounds(scored, ids):
    """The slow twin: rounds one after the other, drafts right where the head is and its token is one of the ids."""
    drafted, accepted = [0] * K, [0] * K
    for each in scored:
        start = 0
        while start < len(each.remaining):
            depth = 0
            while depth < min(K, each.remaining[start]):
                drafted[depth] += 1
                if not each.survivals["greedy"].given[start, depth + 1] or each.text.new[start + depth + 1] not in ids:
                    break
                accepted[depth] += 1
                depth += 1
            start += depth + 1
    return [right / all_ for right, all_ in zip(accepted, drafted, strict=True)]


def test_a_draft_step_that_is_measured_to_be_no_faster(model, tokens, monkeypatch):
    """A choice by bytes that is not measured."""
    with_costs(monkeypatch, 1 / model.trunk.vocab_size)
    same = Costs(1, 1, tuple(Spread.of([1.0]) for _ in range(K + 1)), Spread.of([1.0]))
    monkeypatch.setattr(draft_vocabulary_size, "measure_costs", lambda *args, **options: same)
    assert choose_draft_vocabulary(model, tokens, num_speculative_tokens=K).vocabulary is None
    assert model.head.draft_vocabulary is None


@pytest.mark.parametrize(
    ("text", "says"), [("x" * 100, "has 100 tokens"), ("a" * 8192, "repeat themselves")], ids=["short", "repetitive"]
)
def test_texts_that_nothing_can_be_chosen_by(model, text, says):
    with pytest.raises(ConfigError, match=says):
        choose_draft_vocabulary(model, encode(model, text), num_speculative_tokens=K)


def test_the_option(here, tmp_path, monkeypatch):
    """A note that is not printed, another text with it than without, wrong values that are guessed at."""
    with_costs(monkeypatch, 1.0)
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    arguments = [
        "generate",
        str(SHIPPED),
        "def f(",
        "--max-tokens",
        "8",
        "--backend",
        "torch",
        "--dtype",
        "float32",
        "--json",
    ]
    code, out, err = here(*arguments, "--draft-vocab", str(file))
    assert code == 0
    assert "of 264 tokens" in err
    assert json.loads(out)["text"] == json.loads(here(*arguments)[1])["text"]
    for wrong in (["--draft-vocab", "few"], ["--draft-vocab", f"{file}:0"], ["--draft-vocab", f"{file}:few"]):
        code, _, err = here(*arguments, *wrong)
        assert code == 2
        assert "--draft-vocab" in err
