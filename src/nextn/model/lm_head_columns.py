"""The lm_heads of trunk and head with their inputs, as losses take them: a bias is a column of both."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nextn.model.head import Head
from nextn.model.trunk import Trunk

_BIAS_COLUMNS = 8


def lm_head_weights(trunk: Trunk, head: Head | None, depths: int) -> list[Tensor]:
    """Return the lm_head weights [V, H] of the trunk and of depths 1, 2, ..., for losses on `lm_head_inputs`.

    A trunk whose lm_head has a bias, such as Phi-2, has [V, H + 8]: the bias is the first of eight further columns, so
    that losses and their gradients need no case of their own. The others are zeros, because products with an odd
    number of columns are slow.
    """
    shared, bias = trunk.lm_head, trunk.lm_head_bias  # read once: losses group depths whose weight is the same tensor
    if bias is not None:
        shared = torch.cat([shared, nn.functional.pad(bias[:, None].to(shared.dtype), (0, _BIAS_COLUMNS - 1))], dim=1)
    if head is None or "output" not in head.family.own:
        return [shared] * (1 + (depths if head is not None else 0))
    return [shared, *(head.output(head.layer_index(depth)).weight for depth in range(1, depths + 1))]


def lm_head_inputs(trunk: Trunk, head: Head | None, states: Sequence[Tensor]) -> list[Tensor]:
    """Return the final_hidden [..., H] of the trunk and of each depth as the inputs of `lm_head_weights`."""
    if trunk.lm_head_bias is None:
        return list(states)
    shares = 1 if head is not None and "output" in head.family.own else len(states)
    extended = [
        torch.cat([state, nn.functional.pad(torch.ones_like(state[..., :1]), (0, _BIAS_COLUMNS - 1))], dim=-1)
        for state in states[:shares]
    ]
    return [*extended, *states[shares:]]
