"""Logits to probabilities, and sampling from them.

Pure functions over batches; every random number is passed in as a uniform in [0, 1). p is the trunk's distribution, q
the head's, as in the papers. Knows no model, cache or tokenizer.
"""

from collections.abc import Sequence
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nextn.settings import Sampling

Nested = Any  # lists of ints or floats, as deep as the prediction has dimensions before the vocabulary


class Prediction:
    """Logits [..., V], with argmax and confidence copied to the host once, and only when they are used."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    @cached_property
    def best(self) -> Nested:
        """The argmax of each position, as nested lists of ints: the lowest index among equals."""
        return self.logits.argmax(-1).tolist()

    @cached_property
    def confidence(self) -> Nested:
        """The probability of each argmax at temperature 1, as nested lists of floats."""
        return self.logits.float().softmax(-1).amax(-1).tolist()


class HeadOutput(Prediction):
    """A prediction whose best and confidence were computed with the logits."""

    def __init__(self, logits: Tensor, best: Tensor, confidence: Tensor) -> None:
        super().__init__(logits)
        self._best, self._confidence = best, confidence

    @cached_property
    def best(self) -> Nested:
        return self._best.tolist()

    @cached_property
    def confidence(self) -> Nested:
        return self._confidence.tolist()


def to_probs(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """Convert logits [..., V] to probabilities; float32, or float64 for float64 logits.

    Order and meaning are those of transformers' logits processors: repetition penalty, temperature, top-k (which keeps
    ties), top-p, min-p. Ties at the argmax and at the boundary of top-p go to the lowest index.
    seen: bool [..., V], the tokens that the repetition penalty applies to; required if `sampling.needs_seen`.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.needs_seen:
        assert seen is not None, "a repetition penalty needs the tokens seen"
        scores = torch.where(seen, _penalized(scores, sampling.repetition_penalty), scores)
    if sampling.greedy:
        return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[..., -1:], -inf)
    probs = scores.softmax(-1)
    if sampling.top_p < 1:
        probs = _nucleus(probs, sampling.top_p)
    if sampling.min_p > 0:
        probs = _normalized(probs.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), 0))
    return probs


def _penalized(scores: Tensor, penalty: float) -> Tensor:
    """CTRL's penalty (Keskar et al. 2019, section 4.1), with the sign rule that transformers added."""
    return torch.where(scores < 0, scores * penalty, scores / penalty)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keep the tokens before which less than top_p of the mass lies (Holtzman et al. 2020, section 3.1)."""
    if probs.is_cuda:  # sorting all of them takes less time than a synchronization for how many need it
        return _nucleus_among(probs, torch.arange(probs.shape[-1], device=probs.device).expand_as(probs), top_p)
    # Tokens of at most (1 - top_p) / V are out, even all of them together; half of that is a margin for rounding.
    # They are not sorted, because sorting takes 10 ms per sequence at V = 150k.
    size = int((probs > (1 - top_p) / 2 / probs.shape[-1]).sum(-1, dtype=torch.int32).max())
    return _nucleus_among(probs, probs.topk(size).indices.sort().values, top_p)


def _nucleus_among(probs: Tensor, candidates: Tensor, top_p: float) -> Tensor:
    """Compute `_nucleus` among candidates [..., N], which ascend so that the stable sort breaks ties by index."""
    weights, order = probs.gather(-1, candidates).sort(dim=-1, descending=True, stable=True)
    mass_before = F.pad(weights.cumsum(-1)[..., :-1], (1, 0))
    nucleus = _normalized(weights * (mass_before < top_p))
    return torch.zeros_like(probs).scatter_(-1, candidates.gather(-1, order), nucleus)


def _normalized(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def seen_prefixes(seen: Tensor, drafts: Tensor) -> Tensor:
    """Extend seen [B, V] by each prefix of drafts [B, K]: bool [B, K+1, V], whose row j adds drafts 1..j."""
    step = torch.arange(drafts.shape[1], device=drafts.device)
    prefixes = seen[:, None].repeat(1, len(step) + 1, 1)
    upto = torch.minimum(step[:, None], step)  # [K, K]: row j holds 1..j, then j again as filler
    prefixes[:, 1:].scatter_(-1, drafts[:, upto], True)
    return prefixes


def sample_at(probs: Tensor, u: Tensor) -> Tensor:
    """Sample from probs [..., V] by inverting the cumulative distribution at u [...] in [0, 1) -> int64 [...].

    Never returns a token of zero probability, whatever the rounding of u or of the sums.
    """
    # A GPU's scan need not be monotonic (pytorch#16075): it may step at a zero-probability token, whose sum is masked.
    cdf = probs.cumsum(-1).masked_fill(probs <= 0, 0)
    target = u[..., None] * cdf.amax(-1, keepdim=True)  # u < 1 keeps it below the largest sum, in any rounding
    return (cdf > target).byte().argmax(-1)


def sample(
    logits: Tensor, sampling: Sampling, u: Tensor, *, sampled: bool, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sample one draft per sequence from the head's logits [B, V] by u [B]; return q [B, V] and the tokens [B].

    With sampled=False the draft is the argmax, and q is one-hot.
    """
    q = to_probs(logits, sampling, seen)
    if sampled:
        return q, sample_at(q, u)
    best = q.argmax(-1)
    return torch.zeros_like(q).scatter(1, best[:, None], 1.0), best


def ragged(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Stack rows of different lengths as [B, longest], left-aligned and padded with 0; on the host by default."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device, dtype=dtype)


class Uniforms:
    """The random numbers of one sequence, from its own generator, so that they do not depend on the batch."""

    _BATCH = 256  # numbers generated at a time
    _MODULUS = 2**64 - 59  # the largest prime below 2**64, torch's limit: multiples of large seeds stay distinct

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed % self._MODULUS)
        self._ready: list[float] = []

    def take(self, count: int) -> list[float]:
        """Return and consume the next `count` numbers in [0, 1), of float32's grid."""
        numbers = self.peek(count)
        self.skip(count)
        return numbers

    def skip(self, count: int) -> None:
        """Consume `count` numbers that were returned by `peek`."""
        del self._ready[:count]

    def peek(self, count: int) -> list[float]:
        """Return the next `count` numbers without consuming them."""
        while len(self._ready) < count:
            self._ready += torch.rand(self._BATCH, generator=self._generator).tolist()
        return self._ready[:count]


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """The acceptance probability [...] of a draft from q [..., V] under p [..., V]: sum min(p, q) = 1 - TV(p, q)."""
    return torch.minimum(p, q).sum(-1)


_RACERS = 512  # tokens that race one by one
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_REST, _WITHIN_REST = np.uint64(2**63), np.uint64(2**63 + 1)  # no token ids


def sample_coupled(probs: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Sample one token per row of probs [N, V], by nothing but the row, its sequence's seed and its position.

    Trunk and head sample with the same random numbers, and a draft is accepted if it is the trunk's own sample. The
    text then depends on the seed alone: not on the drafts, their number, or what else is in the batch, and drafting
    changes nothing but speed. Daliri et al. 2024 (arXiv 2408.07978), section 4: each token has an exponential race time
    E_i / p_i, and the smallest wins. Trunk and head agree with probability of at least (1 - TV) / (1 + TV), where
    `accept` reaches 1 - TV.

    Only the most likely tokens race one by one. All others together are one more competitor, as the minimum of
    exponential times with rates p_i is exponential with rate sum p_i; if they win, one of them is sampled in proportion
    to p_i.
    """
    keys = _keys(seeds, positions)
    weights, tokens = probs.topk(min(_RACERS, probs.shape[-1]))
    racers = tokens.cpu().numpy()
    with np.errstate(divide="ignore"):
        # Infinite at rate 0.
        times = -np.log(_uniforms(keys, racers.astype(np.uint64))) / weights.cpu().double().numpy()
    best = times.argmin(-1)
    rows = np.arange(len(best))
    winners: list[int] = racers[rows, best].tolist()
    if racers.shape[-1] < probs.shape[-1]:
        rest = probs.scatter(-1, tokens, 0.0)
        # Summed where float64 exists: not on Apple's GPUs.
        summed = rest if rest.device.type in ("cpu", "cuda") else rest.cpu()
        rates = summed.sum(-1, dtype=torch.float64).cpu().numpy()
        u_times, u_tokens = _uniforms(keys, np.array([[_REST, _WITHIN_REST]])).T
        with np.errstate(divide="ignore"):
            is_beaten = -np.log(u_times) / rates < times[rows, best]
        for row in np.flatnonzero(is_beaten):
            u = torch.tensor(min(float(u_tokens[row]), 1 - 2**-24), dtype=torch.float32, device=probs.device)
            winners[row] = int(sample_at(rest[row], u))
    return winners


def _keys(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.uint64]:
    """Hash seeds and positions: [N, 1]."""
    hashed = _mixed(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64))
    return _mixed(hashed + np.array(positions, dtype=np.uint64) * _GOLDEN)[:, None]


def _uniforms(keys: NDArray[np.uint64], ids: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in (0, 1) for each key and id: SplitMix64 (Steele et al. 2014) as a hash."""
    bits = _mixed(keys + ids * _GOLDEN)
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + _GOLDEN  # arrays of uint64 wrap around
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
