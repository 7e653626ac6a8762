"""The accept rule integrated exactly over every draft and both sides of every threshold; shared random numbers."""

from collections.abc import Callable
from itertools import product
from math import inf, nan

import pytest
import torch
from distributions import (
    CASES,
    LAST32,
    LAST64,
    TOKENWISE,
    Rule,
    continued,
    emitted,
    in_blocks,
    one_hot,
    p_and_q,
    random_distributions,
    rng,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import loop
from torch import Tensor
from transformers.generation import logits_process as reference

from nextn.errors import ConfigError
from nextn.settings import Sampling
from nextn.speculative import sampling
from nextn.speculative.sampling import overlap, ragged, sample_at, sample_coupled, seen_prefixes, to_probs
from nextn.speculative.verification import accept, accept_block, accept_greedy

quick = settings(deadline=None, max_examples=80, derandomize=True)
seeds = st.integers(0, 10**6)
RULES: dict[str, Rule] = {"one by one": TOKENWISE, "block": (accept_block, in_blocks)}
NUM = 6000
SMALL = torch.tensor([0.5, 0.2, 0.0, 0.15, 0.1, 0.05])


@loop(("num_draft_tokens", "vocab"), [(1, 7), (2, 5), (3, 4)])
@loop("case", CASES)
@loop("rule", RULES.values(), ids=RULES)
def test_what_is_emitted_has_the_distribution_of_the_trunk(
    rule: Rule, case: str, num_draft_tokens: int, vocab: int
) -> None:
    """Any error in the threshold, its strictness, the residual, its row, the prefix rule or the limit changes it."""
    pairs = [p_and_q(case, vocab**j, vocab, seed=10 * j) for j in range(num_draft_tokens + 1)]
    p, q = [p for p, _ in pairs], [q for _, q in pairs[:-1]]
    for limit in [None, *range(num_draft_tokens + 1)]:
        found, _ = emitted(p, q, limit, rule=rule)
        torch.testing.assert_close(found, continued(p[0], p[1:]), atol=1e-12, rtol=0, msg=f"{limit=}")


@pytest.mark.more
@loop("case", CASES)
def test_a_block_keeps_no_fewer_drafts(case: str) -> None:
    """Block verification that forgets what a draft is worth; alone, a draft is judged as ever."""
    more = 0
    for seed in range(10):
        pairs = [p_and_q(case, 4**j, 4, seed=100 * seed + 10 * j) for j in range(4)]
        p, q = [p for p, _ in pairs], [q for _, q in pairs[:-1]]
        for num_draft_tokens in range(1, 4):
            alone, block = (
                emitted(p[: num_draft_tokens + 1], q[:num_draft_tokens], None, rule=rule)[1] for rule in RULES.values()
            )
            assert block == pytest.approx(alone, abs=1e-12) if num_draft_tokens == 1 else block > alone - 1e-12
            more += block > alone + 1e-3
    if case in ("random", "p has zeros", "q has zeros"):
        assert more >= 10


def test_a_block_is_verified_as_its_paper_counts() -> None:
    """Sun et al. 2024, section 2: two tokens, two drafts; 10/9 are kept one by one and 11/9 as a block."""
    p, q = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64), torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    chains = [p.expand(2**j, 2) for j in range(3)], [q.expand(2**j, 2) for j in range(2)]
    kept = [emitted(*chains, None, rule=rule)[1] for rule in RULES.values()]
    assert kept == pytest.approx([10 / 9, 11 / 9])


@pytest.mark.parametrize("accept", [accept, accept_block])
def test_a_row_does_not_see_its_neighbors(accept: Callable) -> None:
    """Limits, kept counts and residual rows that are indexed by the wrong row of the batch."""
    p, q, u = (
        random_distributions(40, 4, 5, seed=1),
        random_distributions(40, 3, 5, seed=2),
        torch.rand(40, 3, generator=rng(3)),
    )
    drafts, limit = sample_at(q, torch.rand(40, 3, generator=rng(4))), torch.arange(40) % 4
    together = accept(p, q, drafts, u=u, limit=limit)
    assert len(together.num_accepted.unique()) == 4
    for i in range(40):
        row = slice(i, i + 1)
        alone = accept(p[row], q[row], drafts[row], u=u[row], limit=limit[row])
        assert torch.equal(alone.num_accepted, together.num_accepted[row])
        assert torch.equal(alone.next_probs, together.next_probs[row])


@pytest.mark.parametrize("accept", [accept, accept_block])
def test_without_drafts_the_trunk_decides(accept: Callable) -> None:
    """K = 0 that crashes on the empty axis, or that takes a residual of nothing."""
    p, none = random_distributions(2, 1, 5), torch.zeros(2, 0)
    verification = accept(p, torch.zeros(2, 0, 5), none.long(), u=none)
    assert verification.num_accepted.tolist() == [0, 0]
    assert torch.equal(verification.next_probs, p[:, 0])
    assert accept_greedy([3], []) == (0, 3)


@pytest.mark.parametrize("accept", [accept, accept_block])
def test_equal_distributions_keep_every_draft_in_float32(accept: Callable) -> None:
    """u * q that rounds up to p at the largest u, so that a perfect head is refused."""
    p = to_probs(torch.randn(5000, 4, 9, generator=rng()) * 4, Sampling(temperature=1.0))
    drafts = sample_at(p, torch.rand(5000, 4, generator=rng(1)))[:, :-1]
    verification = accept(p, p[:, :-1], drafts, u=torch.full((5000, 3), LAST32))
    assert (verification.num_accepted == 3).all()
    assert torch.equal(verification.next_probs, p[:, 3])


def test_a_refusal_by_rounding_falls_back_to_p() -> None:
    """0 / 0 where q exceeds p by one unit in the last place at the draft and nowhere else falls below it."""
    p = torch.tensor([[[0.5, 0.25, 0.25]] * 2])
    q = torch.tensor([[[0.5 + 2**-24, 0.25, 0.25]]])
    verification = accept(p, q, torch.tensor([[0]]), u=torch.tensor([[LAST32]]))
    assert verification.num_accepted.tolist() == [0], "the case no longer shows the rounding"
    assert torch.equal(verification.next_probs, p[:, 0])


def test_a_block_refused_by_rounding_keeps_what_p_and_q_agree_on() -> None:
    """0 / 0 at the first draft, where p and q are the same, when the second falls to the rounding."""
    p = torch.tensor([[[0.5, 0.25, 0.25]] * 3])
    q = torch.tensor([[[0.5, 0.25, 0.25], [0.5 + 2**-24, 0.25, 0.25]]])
    verification = accept_block(p, q, torch.tensor([[0, 0]]), u=torch.full((1, 2), LAST32))
    assert verification.num_accepted.tolist() == [1]
    assert torch.equal(verification.next_probs, p[:, 1])


def by_loop(best: Tensor, drafts: Tensor, limit: Tensor) -> tuple[list[int], list[int]]:
    kept = []
    for row, tokens, bound in zip(best.tolist(), drafts.tolist(), limit.tolist(), strict=True):
        matches = [a == b for a, b in zip(row, tokens[:bound], strict=False)] + [False]
        kept.append(matches.index(False))
    return kept, [row[n] for row, n in zip(best.tolist(), kept, strict=True)]


def with_distributions(
    draw_q: Callable[[Tensor], Tensor], accept: Callable = accept
) -> Callable[..., tuple[Tensor, Tensor]]:
    def verify(best: Tensor, drafts: Tensor, *, limit: Tensor | None = None) -> tuple[Tensor, Tensor]:
        u = torch.rand(drafts.shape, generator=rng(1))
        verification = accept(one_hot(best, 3), draw_q(drafts), drafts, u=u, limit=limit)
        return verification.num_accepted, sample_at(verification.next_probs, torch.rand(len(best), generator=rng(2)))

    return verify


def by_rows(best: Tensor, drafts: Tensor, *, limit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    limits = [drafts.shape[1]] * len(best) if limit is None else limit.tolist()
    rows = zip(best.tolist(), drafts.tolist(), limits, strict=True)
    kept, following = zip(*(accept_greedy(row, draft[:bound]) for row, draft, bound in rows), strict=True)
    return torch.tensor(kept), torch.tensor(following)


TWINS = {
    "fast": by_rows,
    "distributions, argmax drafts": with_distributions(lambda drafts: one_hot(drafts, 3)),
    "distributions, sampled drafts": with_distributions(lambda drafts: random_distributions(*drafts.shape, 3)),
    "distributions, argmax drafts, as a block": with_distributions(lambda drafts: one_hot(drafts, 3), accept_block),
}


@pytest.mark.parametrize("verify", TWINS.values(), ids=TWINS)
@given(seed=seeds, num_draft_tokens=st.integers(1, 5), limited=st.booleans())
@quick
def test_greedy_twins_keep_the_leading_matches(
    verify: Callable, seed: int, num_draft_tokens: int, limited: bool
) -> None:
    """The fast path of greedy decoding that parts from the probs it stands for, in kept, next token or limit."""
    best, drafts = (torch.randint(3, (8, num_draft_tokens + extra), generator=rng(seed + extra)) for extra in (1, 0))
    drafts = torch.where(torch.rand(drafts.shape, generator=rng(seed)) < 0.7, best[:, :-1], drafts)
    limit = (
        torch.randint(num_draft_tokens + 1, (8,), generator=rng(seed))
        if limited
        else torch.full((8,), num_draft_tokens)
    )
    kept, following = verify(best, drafts, limit=limit if limited else None)
    assert (kept.tolist(), following.tolist()) == by_loop(best, drafts, limit)


def test_ragged_rows_are_padded_behind() -> None:
    """Token ids as large as float32 cannot hold stay what they are."""
    assert ragged([[5, 2**24 + 1], [], [7]], torch.long).tolist() == [[5, 2**24 + 1], [0, 0], [7, 0]]
    found = ragged([[0.5], [0.25, 1]], torch.float32)
    assert (found.dtype, found.tolist()) == (torch.float32, [[0.5, 0.0], [0.25, 1.0]])
    assert ragged([[], []], torch.long).shape == (2, 0)


def test_overlap_is_the_acceptance_rate() -> None:
    """A reported acceptance that is not the accept rule's (TV for 1 - TV, or max for min)."""
    p, q = random_distributions(2, 6, seed=5)
    u = ((torch.arange(4000) + 0.5) / 4000)[:, None]
    stands = [
        accept(p.expand(4000, 2, 6), q.expand(4000, 1, 6), torch.full((4000, 1), x), u=u).num_accepted for x in range(6)
    ]
    torch.testing.assert_close(overlap(p, q), q @ torch.stack(stands).double().mean(-1), atol=1e-3, rtol=0)


def transformers_distribution(logits: Tensor, sampling: Sampling, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What `generate` samples from, in the order of `_get_logits_processor`; and the penalized logits it began with."""
    scores = logits
    if sampling.repetition_penalty != 1:
        scores = reference.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    penalized, warpers = scores, [reference.TemperatureLogitsWarper(sampling.temperature)]
    warpers += [reference.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [reference.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    warpers += [reference.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    for warper in warpers:
        scores = warper(ids, scores)
    return scores.softmax(-1), penalized


def up_to_ties(probs: Tensor, logits: Tensor) -> Tensor:
    """Put the tokens in an order that depends on logit and probability alone: which of equals top-p keeps is free."""
    by_prob = probs.argsort(dim=-1, stable=True)
    by_logit = logits.gather(-1, by_prob).argsort(dim=-1, stable=True)
    return probs.gather(-1, by_prob).gather(-1, by_logit)


def some_logits(kind: str, rows: int, vocab: int, seed: int) -> Tensor:
    logits = torch.randn(rows, vocab, generator=rng(seed)) * 3
    if kind == "ties":
        return logits.round()
    if kind == "-inf":
        logits[:, 1:] = logits[:, 1:].masked_fill(torch.rand(rows, vocab - 1, generator=rng(seed)) < 0.6, -inf)
    return logits


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 20, 1000]),
    # none that a few equal tokens reach exactly: there the last bit decides
    top_p=st.sampled_from([0.0917, 0.317, 0.713, 0.951, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
)


@pytest.mark.more
@given(
    sampling=samplings,
    kind=st.sampled_from(["normal", "ties", "-inf"]),
    vocab=st.sampled_from([2, 7, 60, 700]),
    seed=seeds,
)
@settings(quick, max_examples=300)
def test_distribution_is_that_of_transformers(sampling: Sampling, kind: str, vocab: int, seed: int) -> None:
    """A filter out of order, a wrong sign in the penalty, top-k that cuts ties, top-p that sorts too few tokens."""
    logits = some_logits(kind, 3, vocab, seed)
    ids = torch.randint(vocab, (3, 5), generator=rng(seed))
    seen = torch.zeros(3, vocab, dtype=torch.bool).scatter_(-1, ids, True)
    theirs, penalized = transformers_distribution(logits, sampling, ids)
    ours = to_probs(logits, sampling, seen)
    torch.testing.assert_close(up_to_ties(ours, penalized), up_to_ties(theirs, penalized), atol=1e-7, rtol=1e-5)


@given(sampling=samplings, kind=st.sampled_from(["normal", "ties", "-inf"]), seed=seeds)
@quick
def test_distribution_of_a_row_is_the_same_in_any_batch(sampling: Sampling, kind: str, seed: int) -> None:
    """Candidates of top-p whose number is set by the flattest row of the batch; leading axes that get mixed."""
    logits = some_logits(kind, 6, 60, seed) * torch.tensor([0.01, 0.1, 0.5, 1, 2, 3])[:, None]
    seen = torch.rand(6, 60, generator=rng(seed)) < 0.1
    together = to_probs(logits.view(2, 3, 60), sampling, seen.view(2, 3, 60)).view(6, 60)
    alone = torch.stack([to_probs(logits[i], sampling, seen[i]) for i in range(6)])
    assert torch.equal(together > 0, alone > 0)
    torch.testing.assert_close(together, alone)


def test_greedy_distribution_is_one_hot_after_the_penalty() -> None:
    """An argmax taken before the penalty, or ties that go to another token than torch.argmax's."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-inf, -4.0, -3.0, -inf]])
    seen = torch.tensor([[False, True, True, False], [False, False, True, False]])
    assert to_probs(logits, Sampling()).tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]
    assert to_probs(logits, Sampling(repetition_penalty=2.0), seen).tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]


def test_top_p_gives_ties_to_the_lowest_index() -> None:
    """A nucleus that an unstable sort decides, that a tiny top_p empties, or that goes on after it reached top_p."""
    flat = torch.zeros(1000)
    assert to_probs(flat, Sampling(temperature=1.0, top_p=0.3995)).nonzero()[:, 0].tolist() == list(range(400))
    assert to_probs(flat, Sampling(temperature=1.0, top_p=1e-12)).nonzero()[:, 0].tolist() == [0]
    assert to_probs(flat[:4], Sampling(temperature=1.0, top_p=0.5)).tolist() == [0.5, 0.5, 0, 0]


@pytest.mark.parametrize(
    ("given_type", "distribution_type"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 5, 0.9, 0.1)], ids=["greedy", "sampled"])
def test_distribution_widens_its_logits_and_leaves_them_alone(
    given_type: torch.dtype, distribution_type: torch.dtype, sampling: Sampling
) -> None:
    """Sums of probabilities in bfloat16, or a filter that writes into the trunk's logits."""
    logits = torch.randn(4, 50, generator=rng()).to(given_type)
    before = logits.clone()
    probs = to_probs(logits, sampling)
    assert probs.dtype == distribution_type
    assert torch.equal(probs, to_probs(logits.to(distribution_type), sampling))
    assert torch.equal(logits, before)


def test_the_lowest_temperature_is_greedy_not_nan() -> None:
    """inf - inf in the softmax of large logits at a temperature that Sampling lets through."""
    logits = torch.randn(4, 50, generator=rng()) * 1e4
    assert torch.equal(to_probs(logits, Sampling(temperature=1e-4)), to_probs(logits, Sampling()))


def test_sample_at_inverts_the_distribution_function() -> None:
    """An inverse that is off by one token, or that forgets a row's own sum; over [B, K] at once."""
    probs = torch.tensor([[0.0, 0.1, 0.3, 0.0, 0.6, 0.0], [0.5, 0.0, 0.0, 0.25, 0.0, 0.25]], dtype=torch.float64)
    u = (torch.arange(4000) + 0.5).expand(2, 4000) / 4000
    tokens = sample_at(probs[:, None].expand(2, 4000, 6), u)
    assert tokens.dtype == torch.int64
    torch.testing.assert_close(one_hot(tokens, 6).mean(1), probs, atol=1e-9, rtol=0)
    assert (tokens.diff() >= 0).all()


@loop(("dtype", "last"), [(torch.float32, LAST32), (torch.float32, LAST64), (torch.float64, LAST64)])
@loop("scale", [1.0, 0.9999999, 1.0000001])
@loop("vocab", [3, 5, 40_000])
def test_sample_at_never_takes_a_token_of_no_probability(
    dtype: torch.dtype, last: float, scale: float, vocab: int
) -> None:
    """u at its ends with zeros at the ends of the distribution, whose sum is 1 only roughly."""
    probs = random_distributions(20, vocab).to(dtype) * scale
    probs[:, 0] = probs[:, -1] = 0
    first, final = torch.zeros(20), torch.full((20,), last, dtype=torch.float64 if last == LAST64 else dtype)
    assert (sample_at(probs, first) == 1).all()
    tokens = sample_at(probs, final)
    assert (probs.gather(-1, tokens[:, None]) > 0).all()
    assert vocab > 5 or (tokens == vocab - 2).all()


def test_sample_at_with_a_scan_that_is_not_monotonic(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's scan, whose neighboring sums come from different trees: it may step at a token of no probability."""
    exact = torch.Tensor.cumsum
    wobble = torch.tensor([3.0, -1.0, -2.0, 4.0, -2.0, 5.0]) * 1e-3
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda self, dim: exact(self, dim) + wobble)
    probs = torch.tensor([0.0, 0.4, 0.0, 0.0, 0.6, 0.0]).expand(1001, 6)
    u = torch.linspace(0, LAST32, 1001)
    assert set(sample_at(probs, u).tolist()) == {1, 4}


@given(seed=seeds, num_draft_tokens=st.integers(0, 4))
@quick
def test_seen_prefixes_add_the_drafts_one_by_one(seed: int, num_draft_tokens: int) -> None:
    """A penalty that sees a draft too early or too late, or a mask that leaks into the caller's."""
    seen = torch.rand(3, 6, generator=rng(seed)) < 0.2
    before, drafts = seen.clone(), torch.randint(6, (3, num_draft_tokens), generator=rng(seed))
    prefixes = seen_prefixes(seen, drafts)
    assert prefixes.shape == (3, num_draft_tokens + 1, 6)
    for row, j in product(range(3), range(num_draft_tokens + 1)):
        expected = {*before[row].nonzero()[:, 0].tolist(), *drafts[row, :j].tolist()}
        assert set(prefixes[row, j].nonzero()[:, 0].tolist()) == expected
    assert torch.equal(seen, before)


@loop(
    ("name", "value"),
    [
        *[("temperature", x) for x in (-1.0, 1e-9, inf, nan)],
        *[("top_k", x) for x in (-1, 2.5, inf)],
        *[("top_p", x) for x in (0.0, 1.1, nan)],
        *[("min_p", x) for x in (-0.1, 1.1, nan)],
        *[("repetition_penalty", x) for x in (0.0, -1.0, inf, nan)],
    ],
)
def test_sampling_refuses_what_has_no_distribution(name: str, value: float) -> None:
    """A setting that would divide by zero or select nothing, found at the first token and not where it was written."""
    with pytest.raises(ConfigError, match=f"^{name}={value} must be "):
        Sampling(**{name: value})


def test_sampling_names_every_mistake_at_once() -> None:
    """A message that stops at the first bad setting."""
    with pytest.raises(ConfigError, match=r"top_k=-2 must be .*; top_p=3 must be .*at most 1"):
        Sampling(top_k=-2, top_p=3)


def test_sampling_says_what_it_needs() -> None:
    """A decoder that samples at temperature 0, or that keeps the seen mask for nothing."""
    assert (Sampling().greedy, Sampling(temperature=0.5).greedy) == (True, False)
    assert (Sampling().needs_seen, Sampling(repetition_penalty=1.1).needs_seen) == (False, True)


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
