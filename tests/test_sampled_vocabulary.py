"""Losses over a part of the vocabulary: exact where the part is all of it, near where the rest is drawn."""

import pytest
import torch
from quick import loop

from nextn.losses.distillation import head_loss
from nextn.losses.divergences import SampledVocabulary, Teacher
from nextn.losses.mtp_loss import Targets

VOCAB, WIDTH, DEPTHS = 600, 16, 2


def case():
    """A trunk's states, those of a head that resembles it, and tokens that are in neither end of the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    weight = 0.8 * torch.randn(VOCAB, WIDTH, generator=generator)
    final = torch.randn(2, 24, WIDTH, generator=generator)
    noise = torch.randn(DEPTHS, 2, 24, WIDTH, generator=generator)
    hiddens = [(0.8 * final + 0.4 * noise[k])[:, k + 1 :].clone().requires_grad_() for k in range(DEPTHS)]
    return weight, final, hiddens, Targets(torch.randint(100, 300, (2, 24), generator=generator))


def sampled_loss(frequent, num_drawn, *, seed=0, temperature=0.8, objective="kl"):
    weight, final, hiddens, targets = case()
    part = SampledVocabulary.of(targets.tokens, frequent, num_drawn, vocab_size=VOCAB, seed=seed)
    inputs, weights = part.inputs([final, *hiddens]), part.weights([weight] * (1 + DEPTHS), temperature)
    assert len({*map(id, weights)}) == 1
    teacher = Teacher(inputs[0], weights[0], temperature)
    loss = head_loss(inputs[1:], weights[1:], teacher, part.targets(targets), objective=objective)
    return loss, torch.autograd.grad(loss.total, hiddens)


def whole_loss(temperature=0.8, objective="kl"):
    weight, final, hiddens, targets = case()
    loss = head_loss(hiddens, weight, Teacher(final, weight, temperature), targets, objective=objective)
    return loss, torch.autograd.grad(loss.total, hiddens)


@loop("objective", ["kl", "tv", "lk-hybrid", "e2e-tv"])
def test_with_every_token_it_is_the_loss_over_the_vocabulary(objective):
    whole, gradients = whole_loss(objective=objective)
    for frequent, num_drawn in ((torch.arange(VOCAB), 0), (torch.arange(50), VOCAB)):
        part, own = sampled_loss(frequent, num_drawn, objective=objective)
        for name in ("total", "sums", "overlap", "nll", "counts", "match"):
            torch.testing.assert_close(getattr(part, name), getattr(whole, name))
        torch.testing.assert_close(own, gradients)


def test_sampled_tokens_represent_the_others():
    """Over many draws the loss and its gradient approach those of the vocabulary; without the rest they do not."""
    whole, gradients = whole_loss()
    drawn = [sampled_loss(torch.arange(300), 150, seed=seed) for seed in range(60)]
    loss = torch.stack([each.total for each, _ in drawn]).mean()
    gradient = torch.stack([own[0] for _, own in drawn]).mean(0)
    assert loss.item() == pytest.approx(whole.total.item(), rel=0.03)
    without, own = sampled_loss(torch.arange(300), 0)
    assert abs(without.total - whole.total) > 3 * abs(loss - whole.total)
    assert (gradient - gradients[0]).norm() < 0.3 * (own[0] - gradients[0]).norm()


def test_a_batch_has_one_draw_and_another_batch_another():
    tokens = torch.randint(0, VOCAB, (2, 8))

    def draw(tokens, seed):
        return SampledVocabulary.of(tokens, torch.arange(9), 50, vocab_size=VOCAB, seed=seed).ids

    assert torch.equal(draw(tokens, 0), draw(tokens, 0))
    assert not torch.equal(draw(tokens, 0), draw(tokens, 1))
    assert not torch.equal(draw(tokens, 0), draw(tokens + 1 - (tokens > 99) * 2, 0))
