"""Logits to a law, picks from it, and the accept / residual rule of speculative sampling.

Pure functions over batches; every random number comes in as a uniform in [0, 1). p is the trunk's law, q the head's.
Knows no model, cache or tokenizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nextn.settings import Sampling as Sampling


class Prediction:
    """logits [..., V] and what greedy decoding wants of them, on the host: each is read once, and only if asked for."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    @cached_property
    def best(self) -> Any:
        """The argmax of each place, as nested lists of ints: the lowest index where several are equal."""
        return self.logits.argmax(-1).tolist()

    @cached_property
    def confidence(self) -> Any:
        """The probability of each argmax at temperature 1, as nested lists of floats."""
        return self.logits.float().softmax(-1).amax(-1).tolist()


class Told(Prediction):
    """A prediction whose best and confidence were computed with the logits."""

    def __init__(self, logits: Tensor, best: Tensor, confidence: Tensor) -> None:
        super().__init__(logits)
        self._best, self._confidence = best, confidence

    @cached_property
    def best(self) -> Any:
        return self._best.tolist()

    @cached_property
    def confidence(self) -> Any:
        return self._confidence.tolist()


@dataclass(frozen=True, eq=False)
class Verdict:
    """What became of the drafts of each row: how many stand, and the law of the token after them."""

    kept: Tensor  # [B] int64
    rest: Tensor  # [B, V]


def law(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """The law that `sampling` makes of logits [..., V]; float32, or float64 for float64 logits.

    Order and meaning are those of transformers' logits processors: repetition penalty, temperature, top-k (which keeps
    ties), top-p, min-p. Ties at the argmax and at the rim of top-p go to the lowest index.
    seen: bool [..., V], the tokens that the penalty falls on; required when `sampling.needs_seen`.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.needs_seen:
        assert seen is not None, "a repetition penalty needs the tokens seen"
        scores = torch.where(seen, _penalised(scores, sampling.repetition_penalty), scores)
    if sampling.greedy:
        return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[..., -1:], -inf)
    probs = scores.softmax(-1)
    if sampling.top_p < 1:
        probs = _nucleus(probs, sampling.top_p)
    if sampling.min_p > 0:
        probs = _normalised(probs.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), 0))
    return probs


def _penalised(scores: Tensor, penalty: float) -> Tensor:
    """CTRL, Keskar et al. 2019, section 4.1, with the sign rule that transformers added."""
    return torch.where(scores < 0, scores * penalty, scores / penalty)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The law on the tokens whose betters weigh less than top_p together (Holtzman et al. 2020, section 3.1)."""
    if probs.is_cuda:  # sorting them all takes less than telling the host how many need it
        return _cut(probs, torch.arange(probs.shape[-1], device=probs.device).expand_as(probs), top_p)
    # Tokens of at most (1 - top_p) / V are out, even all of them together; half of that leaves room for rounding.
    # They are not sorted, because sorting takes 10 ms a row at V = 150k.
    size = int((probs > (1 - top_p) / 2 / probs.shape[-1]).sum(-1, dtype=torch.int32).max())
    return _cut(probs, probs.topk(size).indices.sort().values, top_p)


def _cut(probs: Tensor, inside: Tensor, top_p: float) -> Tensor:
    """`_nucleus` of which only the tokens `inside` [..., N] can be part, in ascending order, so that the stable sort
    breaks ties by index."""
    weights, order = probs.gather(-1, inside).sort(dim=-1, descending=True, stable=True)
    betters = F.pad(weights.cumsum(-1)[..., :-1], (1, 0))
    kept = _normalised(weights * (betters < top_p))
    return torch.zeros_like(probs).scatter_(-1, inside.gather(-1, order), kept)


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def seen_prefixes(seen: Tensor, drafts: Tensor) -> Tensor:
    """seen [B, V] on each hypothetical prefix: bool [B, K+1, V], whose row j adds drafts 1..j of drafts [B, K]."""
    step = torch.arange(drafts.shape[1], device=drafts.device)
    prefixes = seen[:, None].repeat(1, len(step) + 1, 1)
    upto = torch.minimum(step[:, None], step)  # [K, K]: row j holds 1..j, then j again as filler
    prefixes[:, 1:].scatter_(-1, drafts[:, upto], True)
    return prefixes


def pick(law: Tensor, u: Tensor) -> Tensor:
    """Invert the distribution function of law [..., V] at u [...] in [0, 1) -> int64 [...].

    Never a token of zero probability, whatever the rounding of u or of the sums.
    """
    # A GPU's scan need not be monotonic (pytorch#16075): it may step at a token of zero probability, which gets no sum.
    cdf = law.cumsum(-1).masked_fill(law <= 0, 0)
    target = u[..., None] * cdf.amax(-1, keepdim=True)  # u < 1 keeps it below the largest sum, in any rounding
    return (cdf > target).byte().argmax(-1)


def draw(
    logits: Tensor, sampling: Sampling, u: Tensor, *, sampled: bool, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The head's logits [B, V] -> q [B, V] and one token a row: drawn from the law by u [B], or else its argmax, which
    comes from a law with one token."""
    q = law(logits, sampling, seen)
    if sampled:
        return q, pick(q, u)
    best = q.argmax(-1)
    return torch.zeros_like(q).scatter(1, best[:, None], 1.0), best


def accept(p: Tensor, q: Tensor, drafts: Tensor, *, u: Tensor, limit: Tensor | None = None) -> Verdict:
    """Speculative sampling, Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1: what is emitted has the law p.

    p [B, K+1, V], q [B, K, V]; drafts [B, K], draft k drawn from q[:, k]; u [B, K] in [0, 1); K may be 0.
    limit [B]: how many drafts of the row count; when they all stand, rest is p[row, limit] itself. It must not depend
    on the value of a draft that it leaves out.
    """
    at = drafts[..., None]
    kept = _leading(u * q.gather(-1, at)[..., 0] < p[:, :-1].gather(-1, at)[..., 0], limit)
    return Verdict(kept, _rest(p, q, kept, limit=limit))


def accept_block(p: Tensor, q: Tensor, drafts: Tensor, *, u: Tensor, limit: Tensor | None = None) -> Verdict:
    """Block verification, Sun et al. 2024 (arXiv 2403.10444), algorithm 2: `accept` that judges drafts together.

    What is emitted has the law p, and no fewer drafts are kept on average: one that p likes better than q makes up for
    one before it that q likes better. Arguments and limit as for `accept`; a draft may stand over one that would not
    stand alone, so that shares kept by depth are those of this rule.
    """
    num_drafts = drafts.shape[1]
    if not num_drafts:
        return accept(p, q, drafts, u=u, limit=limit)
    worth = _worth(p, q, drafts)
    depth = torch.arange(1, num_drafts + 1, device=drafts.device)
    last = torch.full_like(drafts[:, 0], num_drafts) if limit is None else limit
    # What of p is left for another token after drafts 1..i; none is needed behind the last.
    left = (worth[:, 1:-1, None] * p[:, 1:-1] - q[:, 1:]).clamp_min(0).sum(-1)
    chance = torch.where(depth == last[:, None], worth[:, 1:], F.pad(left, (0, 1)))
    doubt = torch.where(depth == last[:, None], 1.0, F.pad(left, (0, 1)) + 1 - worth[:, 1:])
    # The longest prefix that stands is kept, whatever the shorter ones do. At worth 1 the rule is 0 / 0 where p = q.
    stands = (depth <= last[:, None]) & ((u * doubt < chance) | (worth[:, 1:] == 1))
    kept = (stands * depth).amax(-1)
    return Verdict(kept, _rest(p, q, kept, limit=limit, scale=worth))


def _worth(p: Tensor, q: Tensor, drafts: Tensor) -> Tensor:
    """[B, K+1]: 1, then min(1, worth before * p / q) at each draft: the chance that this prefix is part of the text."""
    at = drafts[..., None]
    p_draft, q_draft = p[:, :-1].gather(-1, at)[..., 0], q.gather(-1, at)[..., 0]
    worth = [torch.ones_like(p_draft[:, 0])]
    for depth in range(drafts.shape[1]):
        worth.append((worth[-1] * p_draft[:, depth] / q_draft[:, depth]).clamp_max(1))
    return torch.stack(worth, 1)


def _rest(p: Tensor, q: Tensor, kept: Tensor, *, limit: Tensor | None, scale: Tensor | None = None) -> Tensor:
    """The law [B, V] of the token behind the kept drafts: what q leaves of p, times scale [B, K+1], or p behind all."""
    row, num_drafts = torch.arange(len(kept), device=kept.device), q.shape[1]
    p_next = p[row, kept]
    if not num_drafts:
        return p_next
    refused = kept < (num_drafts if limit is None else limit)
    wanted = p_next if scale is None else scale[row, kept][:, None] * p_next
    residual = (wanted - q[row, kept.clamp_max(num_drafts - 1)]).clamp_min(0)
    total = residual.sum(-1, keepdim=True)
    # total is 0 where p and q differ by a rounding only
    return torch.where(refused[:, None] & (total > 0), residual / total, p_next)


class Judge:
    """Drafts and the trunk's logits of a round -> how many drafts stand, and the token behind them."""

    def __init__(self, sampling: Sampling, *, block: bool) -> None:
        """block: judge a row's drafts together, see `accept_block`."""
        self.sampling, self.block = sampling, block

    def __call__(
        self,
        logits: Tensor,
        q: Tensor | None,
        drafts: Sequence[Sequence[int]],
        u: Sequence[Sequence[float]],
        *,
        seen: Tensor | None = None,
    ) -> list[tuple[int, int]]:
        """logits [B, K+1, V]; q [B, K, V], None where no row has drafts; drafts, u: of each row up to K, and one number
        more than drafts; seen [B, V] for a penalty -> of each row (kept, next token).
        """
        proposed, limits = ragged(drafts, torch.int64, logits.device), list(map(len, drafts))
        uniforms, limit = ragged(u, torch.float32, logits.device), torch.tensor(limits, device=logits.device)
        found = self.decide(logits, logits[:, :0] if q is None else q, proposed, uniforms, limit, seen=seen)
        return [(kept, following) for kept, following in found.tolist()]

    def decide(
        self, logits: Tensor, q: Tensor, drafts: Tensor, u: Tensor, limit: Tensor, *, seen: Tensor | None = None
    ) -> Tensor:
        """The same over tensors alone: drafts [B, K], u [B, K + 1], limit [B] -> [B, 2] int64: kept, next token."""
        p = law(logits, self.sampling, None if seen is None else seen_prefixes(seen, drafts))
        rule = accept_block if self.block else accept
        verdict = rule(p, q, drafts, u=u[:, : drafts.shape[1]], limit=limit)
        return torch.stack([verdict.kept, pick(verdict.rest, u.gather(1, limit[:, None])[:, 0])], dim=1)


@dataclass(frozen=True)
class Judged:
    """A round of some rows: their drafts with what `DraftLength.learn` is told of them, and of each row (kept, next
    token). draft_s, verify_s: wall seconds, for all rows together."""

    drafts: list[list[int]]
    confidences: list[list[float]]
    verdict: Sequence[tuple[int, int]]
    draft_s: float
    verify_s: float


def ragged(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """[B, largest length]: rows of different lengths, left-aligned, 0 behind; on the host unless told otherwise."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device, dtype=dtype)


class Uniforms:
    """The random numbers of one row, in order; a generator of its own, so that its neighbours change none."""

    _MANY = 256

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._ready: list[float] = []

    def take(self, count: int) -> list[float]:
        """The next `count` numbers in [0, 1), of float32's grid."""
        taken = self.ahead(count)
        self.drop(count)
        return taken

    def drop(self, count: int) -> None:
        """So many of those that were looked at ahead are taken."""
        del self._ready[:count]

    def ahead(self, count: int) -> list[float]:
        """The same, which are then still the next ones."""
        while len(self._ready) < count:
            self._ready += torch.rand(self._MANY, generator=self._generator).tolist()
        return self._ready[:count]


def accept_greedy(best: Sequence[int], drafts: Sequence[int]) -> tuple[int, int]:
    """`accept` and `pick` of one row at temperature 0, from the trunk's argmax best [K+1] -> kept, next token."""
    kept = 0
    while kept < len(drafts) and best[kept] == drafts[kept]:
        kept += 1
    return kept, best[kept]


def _leading(stands: Tensor, limit: Tensor | None) -> Tensor:
    """How many drafts stand before the first that does not: bool [B, K] -> int64 [B]."""
    if limit is not None:
        stands = stands & (torch.arange(stands.shape[1], device=stands.device) < limit[:, None])
    return stands.long().cumprod(-1).sum(-1)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """The probability that a draft from q [..., V] stands against p [..., V]: sum min(p, q) = 1 - TV(p, q) -> [...]."""
    return torch.minimum(p, q).sum(-1)
