"""Sampling with shared random numbers: the exact distribution, and trunk and head agree as often as they should."""

import pytest
import torch

from nextn.speculative import sampling
from nextn.speculative.sampling import sample_coupled

NUM = 6000
SMALL = torch.tensor([0.5, 0.2, 0.0, 0.15, 0.1, 0.05])


def counts(probs, *, seed=3):
    tokens = torch.tensor(sample_coupled(probs.expand(NUM, -1), [seed] * NUM, range(NUM)))
    return tokens.bincount(minlength=len(probs))


def chi_square(found, probs):
    expected = probs.double() * NUM
    likely = expected >= 5
    rest = torch.stack([found[~likely].sum(), expected[~likely].sum()])
    value = ((found[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    return float(value + ((rest[0] - rest[1]) ** 2 / rest[1] if rest[1] >= 5 else 0)), int(likely.sum())


@pytest.mark.parametrize("racers", [512, 3, 1], ids=lambda num: f"{num} racers")
def test_tokens_follow_the_distribution(monkeypatch, racers):
    """With few racers, most samples come from the tokens that do not race one by one."""
    monkeypatch.setattr(sampling, "_RACERS", racers)
    found = counts(SMALL)
    value, bins = chi_square(found, SMALL)
    assert found[2] == 0
    assert value < 3 * bins + 12, found  # p < 1e-4 at these degrees of freedom


def test_large_vocabulary():
    """More tokens than race one by one, with much of the mass among the others."""
    probs = (torch.randn(3000, generator=torch.Generator().manual_seed(1))).softmax(-1)
    found = counts(probs)
    value, bins = chi_square(found, probs)
    assert value < bins + 4 * (2 * bins) ** 0.5
    racing = probs.topk(512).indices
    assert abs(float(found[racing].sum()) / NUM - float(probs[racing].sum())) < 0.03


def test_agreement_is_that_of_the_paper():
    """P(a = b) = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i); without a common seed it would be sum p q."""
    p, q = SMALL, torch.tensor([0.3, 0.35, 0.1, 0.1, 0.05, 0.1])
    sampled = (sample_coupled(probs.expand(NUM, -1), [7] * NUM, range(NUM)) for probs in (p, q))
    agree = sum(a == b for a, b in zip(*sampled, strict=True)) / NUM
    pairs = [(i, torch.maximum(p / p[i], q / q[i]).sum()) for i in range(6) if p[i] > 0]
    expected = float(sum(1 / total for _, total in pairs))
    distance = 1 - float(torch.minimum(p, q).sum())
    assert (1 - distance) / (1 + distance) <= expected <= 1 - distance
    assert abs(agree - expected) < 4 * (expected * (1 - expected) / NUM) ** 0.5


def test_seeds_and_positions_are_independent():
    """Equal arguments give equal tokens; neighbors in seed or position do not move together."""
    half = torch.tensor([0.5, 0.5])
    flips = torch.tensor([sample_coupled(half.expand(60, -1), [seed] * 60, range(60)) for seed in range(60)])
    alone = [[sample_coupled(half[None], [seed], [position])[0] for position in range(60)] for seed in range(60)]
    assert flips.tolist() == alone
    signs = flips.double() * 2 - 1
    assert abs(float(signs.mean())) < 0.07
    for first, second in ((signs[1:], signs[:-1]), (signs[:, 1:], signs[:, :-1])):
        assert abs(float((first * second).mean())) < 0.07
