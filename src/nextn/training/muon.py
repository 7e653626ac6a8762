"""Muon for processors without bfloat16 products, on which torch's own spends most of a step."""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST = 1e-7


class Muon32(torch.optim.Muon):
    """`torch.optim.Muon` whose matrices are made orthogonal in float32: torch's does that in bfloat16 on any machine.

    Rates are those of `adjust_lr_fn="match_rms_adamw"`; the state is that of torch's.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rate, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
            for value in group["params"]:
                if value.grad is None:
                    continue
                moment = self.state[value].setdefault("momentum_buffer", torch.zeros_like(value.grad))
                moment.lerp_(value.grad, 1 - momentum)
                update = orthogonal(value.grad.lerp(moment, momentum))
                value.mul_(1 - rate * decay).add_(update, alpha=-rate * 0.2 * sqrt(max(value.shape)))
        return loss


def orthogonal(
    matrix: Tensor, *, steps: int = 5, coefficients: Sequence[float] = _COEFFICIENTS, smallest: float = _SMALLEST
) -> Tensor:
    """matrix [n, m] with all singular values near 1, by Newton-Schulz steps as torch.optim.Muon does them
    (https://kellerjordan.github.io/posts/muon/), in the matrix's dtype."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    wide = wide / wide.norm().clamp(min=smallest)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide
