"""Distributions over tiny vocabularies, and what a rule of verification emits, summed over every draft and threshold.

A chain is a list of conditional probs: entry j, [V^j, V], is the probs of token j after each prefix of j tokens.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nextn.speculative.verification import Verification, accept

LAST32, LAST64 = 1 - 2**-24, 1 - 2**-53  # the largest uniforms that torch.rand returns

Limit = int | Callable[[Tensor], Tensor] | None
Rule = tuple[Callable[..., Verification], Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normalized(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def random_distributions(*shape: int, seed: int = 0) -> Tensor:
    """Uneven distributions over the last axis, nowhere zero, float64."""
    return normalized(torch.rand(*shape, generator=rng(seed), dtype=torch.float64).pow(3) + 1e-3)


def one_hot(tokens: Tensor, vocab: int) -> Tensor:
    return F.one_hot(tokens, vocab).double()


def p_and_q(case: str, prefixes: int, vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    p, q = random_distributions(prefixes, vocab, seed=seed), random_distributions(prefixes, vocab, seed=seed + 1)
    even = torch.arange(vocab) % 2 == 0
    best, worst = one_hot(p.argmax(-1), vocab), one_hot(p.argmin(-1), vocab)
    return {
        "random": (p, q),
        "equal": (p, p),
        "disjoint": (normalized(p * even), normalized(q * ~even)),
        "p has zeros": (normalized(p * even), q),
        "q has zeros": (p, normalized(q * even)),
        "q one-hot": (p, one_hot(q.argmax(-1), vocab)),
        "q one-hot where p is zero": (normalized(p * (1 - worst)), worst),
        "p one-hot": (best, q),
        "both one-hot": (best, one_hot(q.argmax(-1), vocab)),
    }[case]


CASES = ["random", "equal", "disjoint", "p has zeros", "q has zeros", "q one-hot", "q one-hot where p is zero"]
CASES += ["p one-hot", "both one-hot"]


def along(chain: list[Tensor], drafts: Tensor) -> Tensor:
    """The distributions met along the prefixes of each row: drafts [N, K] -> [N, len(chain), V]."""
    vocab = chain[0].shape[-1]
    return torch.stack([table[number(drafts[:, :j], vocab)] for j, table in enumerate(chain)], 1)


def number(prefix: Tensor, vocab: int) -> Tensor:
    """Prefixes [N, j] as numbers to the base V: the row of a chain's table."""
    return (prefix * vocab ** torch.arange(prefix.shape[1] - 1, -1, -1)).sum(-1)


def sides(chance: Tensor, side: Tensor, gap: float) -> tuple[Tensor, Tensor]:
    """A uniform at an end of what lets a draft stand (side 0, 1) or not (2, 3) by this chance, and its probability.

    gap: how near a threshold they come; more than the rule's rounding."""
    ends = [torch.zeros_like(chance), chance * (1 - gap), chance * (1 + gap), torch.full_like(chance, LAST64)]
    weights = torch.stack([chance, chance, 1 - chance, 1 - chance]) / 2
    return torch.stack(ends).clamp_max(LAST64).gather(0, side[None])[0], weights.gather(0, side[None])[0]


def tokenwise(p: Tensor, q: Tensor, drafts: Tensor, limits: Tensor) -> Tensor:
    """[N, K]: the chance of each draft by itself."""
    at = drafts[..., None]
    return (p[:, :-1].gather(-1, at) / q.gather(-1, at))[..., 0].nan_to_num().clamp_max(1)


def in_blocks(p: Tensor, q: Tensor, drafts: Tensor, limits: Tensor) -> Tensor:
    """[N, K]: h_1..h_limit of Sun et al. 2024, algorithm 2, line by line."""
    found, worth = [], torch.ones(len(drafts), dtype=p.dtype)
    for i, token in enumerate(drafts.unbind(1), start=1):
        p_token, q_token = (probs[:, i - 1].gather(-1, token[:, None])[:, 0] for probs in (p, q))
        worth = torch.minimum(worth * (p_token / q_token), torch.ones_like(worth)).nan_to_num()
        chance = worth
        if i < drafts.shape[1]:
            left = (worth[:, None] * p[:, i] - q[:, i]).clamp_min(0).sum(-1)
            inside = torch.where(worth == 1, 1.0, left / (left + 1 - worth))
            chance = torch.where(limits > i, inside, worth)
        found.append(torch.where(limits >= i, chance, 0.0))
    return torch.stack(found, 1)


TOKENWISE: Rule = (accept, tokenwise)


def emitted(
    p: list[Tensor], q: list[Tensor], limit: Limit, *, rule: Rule = TOKENWISE, gap: float = 1e-9
) -> tuple[Tensor, float]:
    """The joint probs [V^(K+1)] of K + 1 tokens of which the first come from a round and the others straight from p.

    Exact: sums over every draft sequence with its probability under q, and both sides of every threshold with theirs.
    limit: of every row, or what a row's drafts [N, K] set it to. -> the probs, and how many drafts are kept on average.
    """
    judge, chances = rule
    num_draft_tokens, vocab = len(q), p[0].shape[-1]
    grid = torch.cartesian_prod(*[torch.arange(vocab)] * num_draft_tokens, *[torch.arange(4)] * num_draft_tokens)
    grid = grid.view(-1, 2 * num_draft_tokens)
    drafts, side = grid[:, :num_draft_tokens], grid[:, num_draft_tokens:]
    p_rows, q_rows = along(p, drafts), along(q, drafts)
    q_draft = q_rows.gather(-1, drafts[..., None])[..., 0]
    limits = limit(drafts) if callable(limit) else None if limit is None else torch.full((len(grid),), limit)
    bounds = torch.full((len(grid),), num_draft_tokens) if limits is None else limits
    u, weight = sides(chances(p_rows, q_rows, drafts, bounds), side, gap)
    weight = (q_draft * weight).prod(-1)
    verification = judge(p_rows, q_rows, drafts, u=u, limit=limits)
    total = torch.zeros(vocab ** (num_draft_tokens + 1), dtype=torch.float64)
    for kept in range(num_draft_tokens + 1):
        rows = (verification.num_accepted == kept) & (weight > 0)
        tokens = torch.zeros(vocab**kept, vocab, dtype=torch.float64)
        tokens.index_add_(0, number(drafts[rows, :kept], vocab), weight[rows, None] * verification.next_probs[rows])
        total += continued(tokens, p[kept + 1 :])
    return total, float(weight @ verification.num_accepted.double())


def continued(tokens: Tensor, chain: list[Tensor]) -> Tensor:
    for table in chain:
        tokens = tokens.reshape(-1, 1) * table
    return tokens.flatten()
