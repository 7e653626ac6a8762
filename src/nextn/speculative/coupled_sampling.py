"""Drafter-invariant sampling: trunk and head sample with the same random numbers, and a draft is accepted if it is the
trunk's own sample.

The text then depends on the seed alone: not on the drafts, their number, or what else is in the batch, and drafting
changes nothing but speed. Daliri et al. 2024 (arXiv 2408.07978), section 4: each token has an exponential race time
E_i / p_i, and the smallest wins. Trunk and head agree with probability of at least (1 - TV) / (1 + TV), where `accept`
reaches 1 - TV.

Only the most likely tokens race one by one. All others together are one more competitor, as the minimum of exponential
times with rates p_i is exponential with rate sum p_i; if they win, one of them is sampled in proportion to p_i.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nextn.speculative.sampling import sample_at

_RACERS = 256  # tokens that race one by one
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_REST, _WITHIN_REST = np.uint64(2**63), np.uint64(2**63 + 1)  # no token ids


def sample_coupled(probs: Tensor, seed: int, position: int) -> int:
    """Sample from probs [V] with the random numbers of a position; equal for equal arguments.

    Args:
        probs: [V] float32, on any device.
        seed: Of the sequence.
        position: Index of the token within the generated text.
    """
    weights, tokens = probs.topk(min(_RACERS, len(probs)))
    racers = tokens.cpu().numpy().astype(np.uint64)
    rates = weights.double().cpu().numpy()
    with np.errstate(divide="ignore"):
        times = -np.log(_uniforms(seed, position, racers)) / rates  # infinite where the rate is 0
    best = int(times.argmin())
    if len(racers) < len(probs):
        rest = probs.scatter(0, tokens, 0.0)
        rate = float(rest.sum(dtype=torch.float64))
        u_time, u_token = _uniforms(seed, position, np.array([_REST, _WITHIN_REST]))
        if rate > 0 and -np.log(u_time) / rate < times[best]:
            u = torch.tensor(min(float(u_token), 1 - 2**-24), dtype=torch.float32, device=probs.device)
            return int(sample_at(rest, u))
    return int(racers[best])


def _uniforms(seed: int, position: int, ids: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in (0, 1) for each id: SplitMix64 (Steele et al. 2014) as a hash of seed, position and id."""
    with np.errstate(over="ignore"):
        key = _mixed(_mixed(np.array([seed % 2**64], dtype=np.uint64)) + np.uint64(position) * _GOLDEN)
        bits = _mixed(key + ids * _GOLDEN)
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
