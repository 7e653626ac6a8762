"""Sampling by random numbers that depend on a sequence's seed and position alone, shared by trunk and head."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nextn.speculative.sampling import sample_at

_RACERS = 512  # tokens that race one by one


_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


_REST, _WITHIN_REST = np.uint64(2**63), np.uint64(2**63 + 1)  # no token ids


def sample_coupled(probs: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Sample one token per row; a row's token depends on nothing but the row, its seed and its position.

    Trunk and head sample with the same random numbers, and a draft is accepted if it is the trunk's own sample. The
    text then depends on the seed alone: not on the drafts, their number, or what else is in the batch, and drafting
    changes nothing but speed. Daliri et al. 2024 (arXiv 2408.07978), section 4: each token has an exponential race
    time E_i / p_i, and the smallest wins. Trunk and head agree with probability of at least (1 - TV) / (1 + TV), where
    `accept` reaches 1 - TV.

    Only the most likely tokens race one by one. All others together are one more competitor, as the minimum of
    exponential times with rates p_i is exponential with rate sum p_i; if they win, one of them is sampled in proportion
    to p_i.

    Args:
        probs: [N, V] float32, on any device.
        seeds: Of the sequence that each row belongs to.
        positions: Of each row, the index of its token within the generated text.
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
