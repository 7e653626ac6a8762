"""Rounding of weights to blocks of GGUF: Q4_1, codes of four bits with a scale and a minimum, and Q8_0. No files."""

import torch
from torch import Tensor

from nextn.checkpoint.gguf_file import BLOCK_TYPES

_LARGEST = 15  # code of four bits
# Shares of a group's range that the codes leave out at each end to begin with; the best result of each group is taken.
_MARGINS = (0.0, 0.06, 0.12)
_STEPS = 2  # of fitting scale and minimum to the codes, and choosing the codes again
_MAX_HALF = torch.finfo(torch.float16).max


def round_to_blocks(weight: Tensor, kind: str, importance: Tensor | None = None) -> Tensor:
    """Round a weight to blocks of 32 input channels with scales in float16.

    Args:
        weight: [N, K], K a multiple of 32.
        kind: Q4_1: of the scales and minima that are tried, those with the least squared error of each group. Q8_0: the
            largest value of a group has code 127 or -127.
        importance: [K], how much the squared error of each input channel counts in Q4_1; None: all the same.

    Returns:
        uint8 [N, bytes of a row].
    """
    # Values of a group first: torch sums much faster over the outer dimension.
    groups = weight.float().unflatten(1, (-1, BLOCK_TYPES[kind].size)).permute(2, 0, 1).contiguous()
    if kind == "Q8_0":
        scales = _halves(groups.abs().amax(0) / 127)
        codes = (groups / scales.float().masked_fill(scales == 0, 1)).round_().clamp_(-127, 127)
        parts = [_bytes(scales), codes.to(torch.int8).view(torch.uint8).permute(1, 2, 0)]
    else:
        assert kind == "Q4_1", kind
        counts = None if importance is None else importance.float().clamp_min(1e-12).view(-1, len(groups)).T[:, None]
        scales, minima = _fitted(groups, counts)
        first, second = _codes(groups, scales, minima).to(torch.uint8).permute(1, 2, 0).chunk(2, dim=-1)
        parts = [_bytes(_halves(scales)), _bytes(_halves(minima)), first | second << 4]
    return torch.cat(parts, dim=-1).flatten(1)


def _fitted(groups: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return scales and minima [N, groups], rounded to float16, with the least squared error of groups [32, N, groups].

    counts: [32, 1, groups], how much the error of each value counts.
    """
    least, largest = groups.amin(0), groups.amax(0)
    least_error = torch.full_like(least, torch.inf)
    best = torch.zeros_like(least), least
    for margin in _MARGINS:
        cut = (largest - least) * margin
        scales, minima = (largest - least - 2 * cut) / _LARGEST, least + cut
        for _ in range(_STEPS):
            scales, minima = _regression(groups, _codes(groups, scales, minima), counts)
        error = _codes(groups, scales, minima).mul_(scales).add_(minima).sub_(groups).square_()
        total = (error if counts is None else error.mul_(counts)).sum(0)
        is_better = total < least_error
        least_error = torch.where(is_better, total, least_error)
        best = torch.where(is_better, scales, best[0]), torch.where(is_better, minima, best[1])
    return best


def _regression(groups: Tensor, codes: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the line through the values over their codes with the least squared error, rounded to float16."""
    weights = groups.new_ones(len(groups), 1, 1) if counts is None else counts
    total = weights.sum(0)
    mean_code, mean_value = ((part * weights).sum(0) / total for part in (codes, groups))
    from_mean = codes - mean_code
    weighted = from_mean * weights
    slope = (weighted * groups).sum(0) / (weighted * from_mean).sum(0).clamp_min(1e-30)
    scales = _halves(slope.clamp_min(0)).float()
    return scales, _halves(mean_value - scales * mean_code).float()


def _codes(groups: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    return (groups - minima).div_(scales.masked_fill(scales == 0, 1)).round_().clamp_(0, _LARGEST)


def _halves(values: Tensor) -> Tensor:
    return values.clamp(-_MAX_HALF, _MAX_HALF).half()


def _bytes(halves: Tensor) -> Tensor:
    return halves[..., None].view(torch.uint8)
