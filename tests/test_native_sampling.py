"""Native probabilities, sampling and verification: the emitted distribution, enumerated, and sampling.py's results."""

from collections.abc import Callable

import pytest
import torch
from distributions import (
    CASES,
    LAST32,
    TOKENWISE,
    Rule,
    continued,
    emitted,
    in_blocks,
    normalized,
    p_and_q,
    random_distributions,
    rng,
)
from quick import loop
from torch import Tensor

from nextn.errors import ConfigError
from nextn.runtime.native.abi import load
from nextn.runtime.native.rounds import NativeVerifier
from nextn.settings import Sampling
from nextn.speculative.sampling import sample_at, to_probs
from nextn.speculative.verification import Verification, Verifier, accept, accept_block

SAMPLINGS = {
    "temperature": Sampling(0.7),
    "one": Sampling(1.0),
    "hot": Sampling(3.0),
    "top-k": Sampling(1.0, top_k=7),
    "top-k of one": Sampling(1.0, top_k=1),
    "top-k of more than there are": Sampling(1.0, top_k=10**6),
    "top-p": Sampling(1.0, top_p=0.8),
    "small top-p": Sampling(1.0, top_p=1e-6),
    "top-p near one": Sampling(1.0, top_p=1 - 1e-6),
    "min-p": Sampling(1.0, min_p=0.1),
    "all": Sampling(0.8, top_k=20, top_p=0.9, min_p=0.05),
}


def native_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    out = torch.full(logits.shape, torch.nan)
    reals = [sampling.temperature, sampling.top_p, sampling.min_p]
    load().call("to_probs", [out, logits], [sampling.top_k], reals)
    return out


def native_sample(distributions: Tensor, u: Tensor) -> Tensor:
    out = torch.full(u.shape, -1)
    load().call("sample", [out, u, distributions])
    return out


def native_rule(block: bool) -> Callable[..., Verification]:
    """The native rule with the signature of `accept`; its residual weights are normalized."""

    def rule(p: Tensor, q: Tensor, drafts: Tensor, *, u: Tensor, limit: Tensor | None = None) -> Verification:
        rows, depths = drafts.shape
        kept, following, rest = torch.zeros(rows).long(), torch.zeros(rows).long(), torch.zeros(rows, p.shape[-1])
        limit = torch.full((rows,), depths) if limit is None else limit
        numbers = torch.cat([u.float().clamp_max(LAST32), torch.zeros(rows, 1)], 1)
        views = [
            kept,
            following,
            rest,
            p.float().contiguous(),
            q.float().contiguous(),
            drafts.contiguous(),
            limit,
            numbers,
        ]
        load().call("verify", views, [int(block)])
        return Verification(kept, normalized(rest.double()))

    return rule


RULES: dict[str, Rule] = {
    "one by one": (native_rule(block=False), TOKENWISE[1]),
    "block": (native_rule(block=True), in_blocks),
}


@pytest.mark.more
@loop(("num_draft_tokens", "vocab"), [(1, 7), (2, 5), (3, 4)])
@loop("case", CASES)
@loop("rule", RULES.values(), ids=RULES)
def test_emitted_tokens_have_the_trunks_distribution(rule: Rule, case: str, num_draft_tokens: int, vocab: int) -> None:
    """Any error in the threshold, the residual, its row, the prefix rule or the limit changes the distribution."""
    pairs = [p_and_q(case, vocab**j, vocab, seed=10 * j) for j in range(num_draft_tokens + 1)]
    p, q = [p.float().double() for p, _ in pairs], [q.float().double() for _, q in pairs[:-1]]
    for limit in [None, *range(num_draft_tokens + 1)]:
        found, _ = emitted(p, q, limit, rule=rule, gap=1e-5)
        torch.testing.assert_close(found, continued(p[0], p[1:]), atol=1e-4, rtol=0, msg=f"{limit=}")


@loop("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@loop("vocab", [1, 3, 64, 264, 1500])
def test_probs_equal_torch(sampling: Sampling, vocab: int) -> None:
    """Within a few units in the last place; where rounding decides about the last token of top-p, by that token."""
    for dtype, seed in ((torch.float32, 1), (torch.bfloat16, 2)):
        logits = (torch.randn(6, vocab, generator=rng(seed)) * 4).to(dtype)
        found, wanted = native_probs(logits, sampling), to_probs(logits, sampling)
        same = ((found > 0) == (wanted > 0)).all(-1)
        assert same.all() or sampling is SAMPLINGS["top-p near one"]
        assert ((found - wanted).abs().sum(-1) < 3e-6).all()
        torch.testing.assert_close(found[same], wanted[same], rtol=2e-6, atol=1e-12)
        torch.testing.assert_close(found.sum(-1), torch.ones(6))


def test_ties() -> None:
    """Top-k keeps all that equal its last; top-p takes the lowest of equals first."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    assert (native_probs(logits, Sampling(1.0, top_k=2)) > 0).tolist() == [[False, True, True, True, True, False]]
    even = torch.zeros(1, 8)
    assert native_probs(even, Sampling(1.0, top_p=0.5)).tolist() == [[0.25] * 4 + [0.0] * 4]
    assert native_probs(even, Sampling(1.0, top_p=0.5)).tolist() == to_probs(even, Sampling(1.0, top_p=0.5)).tolist()


def test_tokens_that_have_no_logit_have_no_chance() -> None:
    """A head with a shortlist gives -inf to all others."""
    logits = torch.full((2, 700), -torch.inf)
    logits[:, 13::50] = torch.randn(2, 14, generator=rng())
    for sampling in (*SAMPLINGS.values(), Sampling(1.0, top_k=30), Sampling(1.0, top_p=0.99)):
        found = native_probs(logits, sampling)
        torch.testing.assert_close(found, to_probs(logits, sampling), rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("vocab", [1, 5, 512, 513, 3000])
def test_sampling_inverts_the_cdf(vocab: int) -> None:
    distributions = random_distributions(50, vocab, seed=vocab).float()
    distributions = distributions * (torch.rand(50, vocab, generator=rng(1)) < 0.5)
    distributions[:, vocab // 2] += 0.1
    u = torch.rand(50, generator=rng(2))
    found = native_sample(distributions, u)
    sums = distributions.double().cumsum(-1)
    target = u.double() * sums[:, -1]
    at = found[:, None]
    assert (distributions.gather(-1, at) > 0).all()
    slack = 1e-6 * sums[:, -1]
    assert (sums.gather(-1, at)[:, 0] > target - slack).all()
    assert ((sums - distributions).gather(-1, at)[:, 0] <= target + slack).all()
    if vocab < 1000:
        assert (found == sample_at(distributions, u)).float().mean() > 0.97


def test_sampling_at_the_ends() -> None:
    """Never a token of probability zero, whatever the rounding."""
    for vocab in (7, 512, 1024, 1500):
        distributions = normalized(torch.rand(200, vocab, generator=rng(vocab)))
        distributions[:, 0] = distributions[:, -1] = 0
        for u in (0.0, LAST32):
            found = native_sample(distributions, torch.full((200,), u))
            assert (found == (1 if u == 0 else vocab - 2)).all()


def rounds(rows: int, depths: int, vocab: int, seed: int) -> tuple[Tensor, Tensor, list[list[int]], list[list[float]]]:
    """Logits of trunk and head that are alike, drafts from the head, of different numbers a row."""
    p_logits = torch.randn(rows, depths + 1, vocab, generator=rng(seed)) * 3
    q_logits = p_logits[:, :depths] + torch.randn(rows, depths, vocab, generator=rng(seed + 1)) * 0.5
    q = to_probs(q_logits, Sampling(1.0))
    drafts = sample_at(q, torch.rand(rows, depths, generator=rng(seed + 2)))
    limits = [depths - row % 3 if row and depths > 2 else depths for row in range(rows)]
    u = torch.rand(rows, depths + 1, generator=rng(seed + 3)).tolist()
    numbers = [row[: limit + 1] for row, limit in zip(u, limits, strict=True)]
    return p_logits, q, [row[:limit] for row, limit in zip(drafts.tolist(), limits, strict=True)], numbers


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("name", ["one", "top-p", "all"])
def test_verification_equals_torch(name: str, block: bool) -> None:
    """All sequences at once, q from a transposed buffer; results differ only where rounding decides, which is rare."""
    sampling = SAMPLINGS[name]
    torch_verifier, native = (
        Verifier(sampling, block_verification=block),
        NativeVerifier(load(), sampling, block_verification=block),
    )
    same, total, kept = 0, 0, set()
    for seed in range(60):
        p, q, drafts, u = rounds(4, 1 + seed % 6, 40, 10 * seed)
        turned = q.transpose(0, 1).contiguous().transpose(0, 1)
        wanted, found = torch_verifier(p, q, drafts, u), native(p, turned, drafts, u)
        same, total = same + sum(a == b for a, b in zip(wanted, found, strict=True)), total + 4
        kept |= {count for count, _ in found}
    assert same >= total - 1
    assert len(kept) > 4


def test_a_sequence_is_verified_as_it_is_alone() -> None:
    native = NativeVerifier(load(), Sampling(1.0), block_verification=True)
    p, q, drafts, u = rounds(5, 6, 500, 3)
    together = native(p, q, drafts, u)
    for row in range(5):
        assert native(p[row : row + 1], q[row : row + 1], drafts[row : row + 1], u[row : row + 1]) == [together[row]]


def test_without_drafts() -> None:
    native, p = NativeVerifier(load(), Sampling(1.0), block_verification=True), torch.randn(3, 1, 9, generator=rng())
    u = [[0.1], [0.5], [0.9]]
    assert native(p, None, [[], [], []], u) == Verifier(Sampling(1.0), block_verification=True)(
        p, None, [[], [], []], u
    )


@pytest.mark.parametrize("rule", [accept, accept_block])
def test_refusals_by_rounding(rule: Callable) -> None:
    """0 / 0 where p and q differ by one unit in the last place only: p itself follows."""
    p = torch.tensor([[[0.5, 0.25, 0.25]] * 3])
    q = torch.tensor([[[0.5, 0.25, 0.25], [0.5 + 2**-24, 0.25, 0.25]]])
    drafts, u = torch.tensor([[0, 0]]), torch.full((1, 2), LAST32)
    wanted, found = rule(p, q, drafts, u=u), native_rule(rule is accept_block)(p, q, drafts, u=u)
    assert found.num_accepted.tolist() == wanted.num_accepted.tolist() == [1]
    assert found.next_probs.tolist() == wanted.next_probs.tolist()


def test_many_rounds_keep_few_programs() -> None:
    native = NativeVerifier(load(), Sampling(1.0), block_verification=True)
    for seed in range(70):
        p, q, drafts, u = rounds(1, 2, 10, seed)
        native(p, q, drafts, u)
    assert len(native._verifications) <= 32


def test_what_no_kernel_takes() -> None:
    logits = torch.zeros(2, 4)
    with pytest.raises(ConfigError):
        native_probs(logits, Sampling(0.0))
    with pytest.raises(ConfigError):
        load().call("to_probs", [logits.double(), logits], [0], [1.0, 1.0, 0.0])
    with pytest.raises(ConfigError):
        load().call("sample", [torch.zeros(3).long(), torch.zeros(2), torch.zeros(2, 4)])
