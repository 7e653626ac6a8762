"""Held-out figures and acceptance against brute force and the decoder; the best evaluation and early stopping."""

import json
from dataclasses import asdict

import pytest
import torch
from tiny import FIXTURES, build, decode, refrain

from nextn.data.batches import Batch
from nextn.family_table import generic
from nextn.losses.distillation import head_loss
from nextn.losses.divergences import Teacher
from nextn.losses.mtp_loss import Targets, mtp_loss
from nextn.model.lm_head_columns import lm_head_inputs, lm_head_weights
from nextn.model.model import Model
from nextn.model.trunk import Trunk
from nextn.settings import Sampling, Settings
from nextn.stats.acceptance import Acceptance
from nextn.train.evaluation import (
    BestTracker,
    ExpectedAcceptance,
    HeldOutAcceptance,
    decoded_figures,
    heldout_acceptance,
    survival,
    teacher_forced_figures,
)
from nextn.train.init_head import init_head

K = 4


def test_forced_figures_by_hand():
    """Loss, match and overlap equal a loop over positions and depths; conditional rates multiply survivors."""
    model = build("glm4_moe")
    tokens = torch.randint(0, 64, (2, 13))
    batch = Batch(tokens, torch.zeros(2, 13, dtype=torch.int32))
    got = teacher_forced_figures(model, [batch], 2)
    with torch.no_grad():
        hidden = model.trunk(tokens)
        trunk = model.trunk.logits(hidden.final_hidden).double()
        drafts = [
            model.trunk.logits(state).double()
            for state in model.head.teacher_forced_hidden(tokens, hidden.head_input, 2)
        ]
    alive, survived = {"match": [], "overlap": []}, {}
    for row in range(2):
        for position in range(13 - 3):
            match = overlap = 1.0
            for depth in (1, 2):
                p, q = trunk[row, position + depth].softmax(-1), drafts[depth - 1][row, position].softmax(-1)
                match *= float(p.argmax() == q.argmax())
                overlap *= torch.minimum(p, q).sum().item()
                alive["match"].append((depth, match))
                alive["overlap"].append((depth, overlap))
    for name, values in alive.items():
        survived[name] = [20.0, *(sum(value for depth, value in values if depth == k) for k in (1, 2))]
    for name in ("match", "overlap"):
        first, second = survived[name][1] / 20, survived[name][2] / max(survived[name][1], 1e-9)
        assert getattr(got, name) == pytest.approx((first, second), abs=1e-5)
    labels = [tokens[:, depth + 1 :] for depth in range(3)]
    for depth, logits in enumerate([trunk, *drafts]):
        nll = torch.nn.functional.cross_entropy(
            logits[:, : labels[depth].shape[1]].flatten(0, 1), labels[depth].flatten()
        )
        assert got.loss[depth] == pytest.approx(nll.item(), abs=1e-4)


def test_decoded_counts_and_flags_repetitive_texts(trained):
    """The decoder's figures on the fixture, with the degeneracy check of the texts beside them."""
    prompts = [row.tolist() for row in refrain(4, 33, seed=7)]
    figures = decoded_figures(trained["glm"], prompts, Settings(num_speculative_tokens=3, max_tokens=20))
    assert figures.acceptance.num_rounds > 0
    assert len(figures.checks) == 4
    assert 0 <= figures.repetitive <= 1


@pytest.fixture(scope="module")
def glm():
    return Model.load(FIXTURES / "glm")


def answered(model, *, count, length, **settings):
    """Prompts with what the decoder answered, as one batch whose answers count; and the decoder's own figures."""
    prompts = refrain(count, 24, seed=5).tolist()
    texts, log = decode(model, prompts, num_speculative_tokens=K, max_tokens=length, **settings)
    tokens = torch.tensor([[*prompt, *text[:length]] for prompt, text in zip(prompts, texts, strict=True)])
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, 24:] = True
    return Batch(tokens, torch.zeros_like(tokens, dtype=torch.int32), mask), Acceptance.of(log)


def within(rates, acceptance):
    """Whether all rates lie in the 99.9 % intervals of the decoder's."""
    return all(low <= rate <= high for rate, (low, high) in zip(rates, acceptance.intervals(z=3.3), strict=True))


@pytest.mark.more
def test_greedy_figures_are_the_decoders(glm):
    """On the trunk's own greedy text the rounds are the decoder's, draft by draft, but for those cut by the end."""
    batch, acceptance = answered(glm, count=12, length=120)
    figures = heldout_acceptance(glm.trunk, glm.head, [(batch, None)], K)
    assert figures.kv == "decode"
    # At most two rounds a row are near its end, where the decoder drafts less; a tie may fall otherwise in a batch.
    assert all(abs(a - b) <= 24 for a, b in zip(acceptance.num_drafted, figures.greedy.num_drafted, strict=True))
    assert all(abs(a - b) <= 24 for a, b in zip(acceptance.num_accepted, figures.greedy.num_accepted, strict=True))
    assert figures.greedy.length == pytest.approx(acceptance.length, rel=0.02)
    assert within(figures.greedy.rates, acceptance)


@pytest.mark.more
def test_sampled_figures_are_the_decoders(glm):
    """On text sampled at the temperature, min(1, q/p) of its tokens predicts what rejection sampling accepts."""
    batch, acceptance = answered(glm, count=48, length=120, sampling=Sampling(1.3), block_verification=False, seed=1)
    figures = heldout_acceptance(glm.trunk, glm.head, [(batch, None)], K, temperature=1.3, on_policy=True)
    assert within(figures.sampled.rates, acceptance)
    assert figures.sampled.length == pytest.approx(acceptance.length, rel=0.03)
    how = {"sampling": Sampling(1.3), "block_verification": False, "sampled_drafts": False}
    batch, acceptance = answered(glm, count=48, length=120, seed=1, **how)
    figures = heldout_acceptance(glm.trunk, glm.head, [(batch, None)], K, temperature=1.3, on_policy=True)
    assert within(figures.argmax.rates, acceptance)
    assert figures.argmax not in (figures.greedy, figures.sampled)
    averaged = heldout_acceptance(glm.trunk, glm.head, [(batch, None)], K, temperature=1.3).argmax
    assert averaged.length == pytest.approx(figures.argmax.length, rel=0.05)


@pytest.mark.parametrize("temperature", [0.05, 0.001])
def test_prompts_of_impossible_tokens_do_not_count(glm, temperature):
    """At a low temperature a prompt's tokens have probability 0 under trunk and head, and 0 / 0 is no number."""
    batch, _ = answered(glm, count=3, length=40)
    mask = torch.zeros_like(batch.tokens, dtype=torch.bool)
    mask[:, 20:] = True
    tokens = batch.tokens.clone()
    tokens[:, 4:10] = (tokens[:, 4:10] + 7) % 40
    figures = heldout_acceptance(
        glm.trunk, glm.head, [(Batch(tokens, batch.documents, mask), None)], K, temperature=temperature, on_policy=True
    )
    assert 1 <= figures.sampled.length <= K + 1
    assert figures.score == figures.score  # not NaN
    assert figures.noise() >= 0


@pytest.mark.more
def test_batches_add_up(glm):
    batch, _ = answered(glm, count=4, length=40)
    halves = [Batch(batch.tokens[rows], batch.documents[rows], batch.mask[rows]) for rows in (slice(2), slice(2, 4))]
    whole = heldout_acceptance(glm.trunk, glm.head, [(batch, None)], K)
    parts = heldout_acceptance(glm.trunk, glm.head, [(half, glm.trunk(half.tokens)) for half in halves], K)
    assert parts.num_positions == whole.num_positions
    torch.testing.assert_close(torch.tensor(parts.sampled.num_accepted), torch.tensor(whole.sampled.num_accepted))
    assert parts.sampled.emitted == pytest.approx(whole.sampled.emitted)


@pytest.mark.more
def test_a_bad_head_is_worse_and_itself_is_not(glm):
    batch, _ = answered(glm, count=8, length=40)
    good = heldout_acceptance(glm.trunk, glm.head, [(batch, None)], K)
    other = Model.load(FIXTURES / "glm")
    with torch.no_grad():
        other.head.stack[0].projection.weight.normal_()
    bad = heldout_acceptance(glm.trunk, other.head, [(batch, None)], K)
    assert bad.is_worse(good)
    assert not good.is_worse(bad)
    assert not good.is_worse(good)


def test_state_comes_back(glm):
    batch, _ = answered(glm, count=2, length=30)
    figures = heldout_acceptance(glm.trunk, glm.head, [(batch, None)], K)
    assert HeldOutAcceptance.from_state(asdict(figures)) == figures


def evaluation(*lengths):
    """An evaluation over as many rows of text, each of ten rounds of these lengths; its score is their mean."""
    emitted = tuple(10.0 * length for length in lengths)
    counts = ExpectedAcceptance((1.0,), (0.5,), emitted, (10.0,) * len(lengths))
    return HeldOutAcceptance(counts, counts, counts, 100, "decode", 1.0)


def tracker_after(*scores, patience=0, baseline=None):
    """After evaluations with these scores, behind 10, 20, ... steps."""
    tracker = BestTracker(patience)
    if baseline is not None:
        tracker.update(0, baseline)
    for place, score in enumerate(scores, 1):
        tracker.update(10 * place, evaluation(score, score))
    return tracker


def test_the_best_is_saved():
    """Catches a later one that takes the place of a better, and one as good that does: the earlier one stays."""
    tracker = BestTracker()
    updates = [(10, 1.5), (20, 1.4), (30, 1.5), (40, 1.6)]
    assert [tracker.update(step, evaluation(score)) for step, score in updates] == [True, False, False, True]
    assert (tracker.best_step, tracker.best.score, tracker.since) == (40, 1.6, 0)
    tracker = tracker_after(1.5, 1.4, 1.5)
    assert (tracker.best_step, tracker.since) == (10, 2)


def test_what_training_started_from_is_no_result():
    """Catches a baseline that is taken for the best head, which would then never be written."""
    tracker = BestTracker(patience=1)
    assert not tracker.update(0, evaluation(9.0))
    assert (tracker.best, tracker.since, tracker.is_done) == (None, 0, False)
    assert tracker.update(10, evaluation(1.0))
    assert tracker.baseline.score == 9.0


def test_patience():
    """Catches an end one evaluation too early or too late, and patience 0 that ends at once."""
    assert [tracker_after(1.5, *[1.4] * more, patience=2).is_done for more in range(4)] == [False, False, True, True]
    assert not tracker_after(1.5, 1.4, 1.4, 1.45, 1.6, patience=3).is_done
    assert not tracker_after(1.5, *[1.4] * 50).is_done


def test_the_best_step_seen_again_is_not_a_worse_one():
    """A run that resumes at its best checkpoint evaluates it again; that is no lost evaluation."""
    tracker = tracker_after(1.5, 1.6)
    tracker.update(20, evaluation(1.6, 1.6))
    assert tracker.since == 0
    tracker.update(30, evaluation(1.6, 1.6))
    assert tracker.since == 1


@pytest.mark.parametrize(
    ("trained", "worse"),
    [((1.0, 1.2, 1.1, 1.3), True), ((1.9, 1.6, 1.5, 1.8), False), ((2.5, 2.6, 2.7, 2.8), False)],
    ids=["all rows", "within noise", "better"],
)
def test_worse_is_beyond_noise(trained, worse):
    baseline = evaluation(1.8, 1.7, 1.6, 1.9)
    tracker = BestTracker()
    tracker.update(0, baseline)
    assert not tracker.is_worse
    tracker.update(10, evaluation(*trained))
    assert tracker.is_worse == worse
    alone = BestTracker()
    alone.update(10, evaluation(*trained))
    assert not alone.is_worse


def test_in_words():
    """Both scores, and twice the standard error of their difference: rows differ by 0.2 and 0.4, so 0.1 is one."""
    assert str(tracker_after(1.5)) == "no head to compare with"
    tracker = BestTracker()
    tracker.update(0, evaluation(1.4, 1.6))
    assert str(tracker) == "no head to compare with"
    tracker.update(10, evaluation(1.6, 2.0))
    assert str(tracker) == (
        "held-out AL greedy 1.800 (was 1.500), T = 1 1.800 (was 1.500), T = 1 argmax drafts (vLLM, llama.cpp) 1.800 "
        "(was 1.500); compared by the mean of the first two: +0.300 +-0.200"
    )


def test_state_and_record():
    """A checkpoint's JSON gives the same tracker back; the record names what a reader looks for."""
    tracker = tracker_after(1.5, 1.4, patience=3, baseline=evaluation(1.2, 1.4))
    again = BestTracker(patience=3)
    again.load_state(json.loads(json.dumps(tracker.as_state())))
    assert again == tracker
    empty = BestTracker(patience=3)
    empty.load_state(json.loads(json.dumps(BestTracker().as_state())))
    assert empty == BestTracker(patience=3)
    record = tracker.as_record()
    assert (record["baseline"]["score"], record["best"]["score"], record["best_step"]) == (1.3, 1.5, 10)
    assert BestTracker().as_record() == {"baseline": None, "best": None, "best_step": 0}


def test_a_bias_of_the_lm_head_counts():
    """Phi-2's: a perfect head is scored as one, and losses and their gradients are transformers'. Without the bias,
    the head would be trained for other logits than the trunk has."""
    torch.manual_seed(0)
    config = build("deepseek_v3").trunk.config.to_dict() | {"model_type": "phi", "num_hidden_layers": 1}
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "initializer_range", "model_type")
    trunk = Trunk.from_config({name: config[name] for name in (*sizes, "num_hidden_layers")})
    with torch.no_grad():
        trunk.output.bias.normal_(std=3)
    tokens = torch.randint(trunk.vocab_size, (2, 12))
    head, _ = init_head(generic(trunk.config.to_dict()), trunk, tokens)
    final = trunk(tokens).final_hidden
    states, weights = lm_head_inputs(trunk, head, [final, final[:, 1:]]), lm_head_weights(trunk, head, 1)
    report = mtp_loss(states, weights, Targets(tokens), lam=0.5)
    report.total.backward(retain_graph=True)
    own = trunk.output.bias.grad.clone()
    trunk.output.bias.grad = None
    loss = trunk.model(tokens, labels=tokens).loss
    depth = torch.nn.functional.cross_entropy(trunk.output(final[:, 1:-1]).flatten(0, 1), tokens[:, 2:].flatten())
    (loss + 0.5 * depth).backward()
    torch.testing.assert_close(report.total, loss + 0.5 * depth)
    torch.testing.assert_close(own, trunk.output.bias.grad)
    perfect = survival(Model(trunk, head, head.family), [final, final[:, 1:]], torch.ones(2, 11, dtype=torch.bool))
    torch.testing.assert_close(perfect, torch.full((2, 2), 22.0, dtype=torch.float64))
    teacher = head_loss(states[1:], weights[1:], Teacher(states[0], weights[0]), Targets(tokens))
    torch.testing.assert_close(teacher.overlap, teacher.counts.float())
