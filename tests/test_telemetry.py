"""Acceptance told from texts: the law of rounds against brute force, and the decoder's own figures."""

from dataclasses import asdict

import pytest
import torch
from tiny import FIXTURES, decode, refrain

from nextn.corpus.batches import Batch
from nextn.figures.acceptance import Acceptance
from nextn.model import Model
from nextn.sampling import Sampling
from nextn.training.telemetry import Foreseen, foreseen

K = 4


@pytest.fixture(scope="module")
def glm():
    return Model.load(FIXTURES / "glm")


def answered(model, *, count, length, **settings):
    """Prompts with what the decoder answered, as one batch whose answers count; and the decoder's own figures."""
    prompts = refrain(count, 24, seed=5).tolist()
    texts, log = decode(model, prompts, drafts=K, max_tokens=length, **settings)
    tokens = torch.tensor([[*prompt, *text[:length]] for prompt, text in zip(prompts, texts, strict=True)])
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, 24:] = True
    return Batch(tokens, torch.zeros_like(tokens, dtype=torch.int32), mask), Acceptance.of(log)


def within(rates, acceptance):
    """Whether all told rates lie in the 99.9 % intervals of the decoder's."""
    return all(low <= rate <= high for rate, (low, high) in zip(rates, acceptance.intervals(z=3.3), strict=True))


def test_greedy_figures_are_the_decoders(glm):
    """On the trunk's own greedy text the rounds are the decoder's, draft by draft, but for those cut by the end."""
    batch, acceptance = answered(glm, count=12, length=120)
    told = foreseen(glm.trunk, glm.head, [(batch, None)], K)
    assert told.kv == "decode"
    # At most two rounds a row are near its end, where the decoder drafts less; a tie may fall otherwise in a batch.
    assert all(abs(a - b) <= 24 for a, b in zip(acceptance.offered, told.greedy.offered, strict=True))
    assert all(abs(a - b) <= 24 for a, b in zip(acceptance.kept, told.greedy.kept, strict=True))
    assert told.greedy.length == pytest.approx(acceptance.length, rel=0.02)
    assert within(told.greedy.rates, acceptance)


def test_sampled_figures_are_the_decoders(glm):
    """On text drawn at the temperature, min(1, q/p) of its tokens foresees what rejection sampling keeps."""
    batch, acceptance = answered(glm, count=48, length=120, sampling=Sampling(1.3), block=False, seed=1)
    told = foreseen(glm.trunk, glm.head, [(batch, None)], K, temperature=1.3, drawn=True)
    assert within(told.sampled.rates, acceptance)
    assert told.sampled.length == pytest.approx(acceptance.length, rel=0.03)


def test_batches_add_up(glm):
    batch, _ = answered(glm, count=4, length=40)
    halves = [Batch(batch.tokens[rows], batch.documents[rows], batch.mask[rows]) for rows in (slice(2), slice(2, 4))]
    whole = foreseen(glm.trunk, glm.head, [(batch, None)], K)
    parts = foreseen(glm.trunk, glm.head, [(half, glm.trunk(half.tokens)) for half in halves], K)
    assert parts.columns == whole.columns
    torch.testing.assert_close(torch.tensor(parts.sampled.kept), torch.tensor(whole.sampled.kept))
    assert parts.sampled.emitted == pytest.approx(whole.sampled.emitted)


def test_a_bad_head_is_worse_and_itself_is_not(glm):
    batch, _ = answered(glm, count=8, length=40)
    good = foreseen(glm.trunk, glm.head, [(batch, None)], K)
    other = Model.load(FIXTURES / "glm")
    with torch.no_grad():
        other.head.stack[0].projection.weight.normal_()
    bad = foreseen(glm.trunk, other.head, [(batch, None)], K)
    assert bad.is_worse(good)
    assert not good.is_worse(bad)
    assert not good.is_worse(good)


def test_state_comes_back(glm):
    batch, _ = answered(glm, count=2, length=30)
    told = foreseen(glm.trunk, glm.head, [(batch, None)], K)
    assert Foreseen.from_state(asdict(told)) == told
