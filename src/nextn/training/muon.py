"""Muon for processors without bfloat16 products, on which torch's own spends most of a step."""

from math import sqrt
from typing import Any

import torch
from torch import Tensor

_STEPS, _COEFFICIENTS, _SMALLEST = 5, (3.4445, -4.7750, 2.0315), 1e-7  # torch.optim.Muon's


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
                if "momentum_buffer" not in self.state[value]:
                    self.state[value]["momentum_buffer"] = torch.zeros_like(value.grad)
                moment = self.state[value]["momentum_buffer"]
                moment.lerp_(value.grad, 1 - momentum)
                update = orthogonal(value.grad.lerp(moment, momentum))
                value.mul_(1 - rate * decay).add_(update, alpha=-rate * 0.2 * sqrt(max(value.shape)))
        return loss


def orthogonal(matrix: Tensor) -> Tensor:
    """matrix [n, m] with all singular values near 1, by Newton-Schulz steps as torch.optim.Muon does them
    (https://kellerjordan.github.io/posts/muon/), in the matrix's dtype."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    wide = wide / wide.norm().clamp(min=_SMALLEST)
    for _ in range(_STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide
