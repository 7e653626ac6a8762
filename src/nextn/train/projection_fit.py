"""Fit an MTP layer's projection to the states that its decoder layer had in the trunk, in closed form.

The layer is a copy of one of the trunk's. At position i it gets the embedding of token i + 1 and the trunk's state at
i, and should do what the original does at i + 1. So the projection is the ridge regression from the two to the
original's input at i + 1, each position's divided by its RMS. The plain sum of the two would, with tied embeddings,
predict token i + 1 itself.
"""

import torch
from torch import Tensor, nn

from nextn.model.head import Head
from nextn.model.mtp_layer import MTPLayer

_RIDGE = 0.03  # of the inputs' mean square; from 0.01 to 0.1, held-out loss hardly changed


def fit_projection(head: Head, index: int, tokens: Tensor, hidden: Tensor, target: Tensor, scale: float) -> None:
    """Set the projection of MTP layer `index`, whose norms pass normalized values as they are.

    Args:
        head: The head; the layer's parameters may be deferred.
        index: Of the MTP layer.
        tokens: [B, T].
        hidden: [B, T, H], the trunk's head_input.
        target: [B, T, H], the input of the trunk layer that the block is a copy of.
        scale: RMS of the block's input.
    """
    module = head.stack[index]
    assert isinstance(module, MTPLayer)
    ahead = index + 1 if head.family.order == "unchained" else 1  # else it takes the state of the layer before it
    embedded = head.trunk.embed(tokens, raw=head.family.embedded == "raw")
    parts = {"token_projection": _normalized(head, embedded)[:, 1 + ahead :]}
    # Position 0 is left out: many trunks have states of another size there.
    parts["hidden_projection"] = _normalized(head, hidden)[:, 1:-ahead]
    names = [*parts]
    if head.family.concat == "hidden_first":
        names.reverse()
    inputs = torch.cat([parts[name].flatten(0, 1) for name in names], dim=-1)
    outputs = target[:, 1 + ahead :].flatten(0, 1).double().cpu()
    outputs = outputs * (scale / outputs.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12))
    weight = _ridge(inputs.double().cpu(), outputs)
    blocks = {"projection": weight}
    if not hasattr(module, "projection"):
        blocks = dict(zip(names, weight.split(len(weight), dim=1), strict=True))
    for name, block in blocks.items():
        getattr(module, name).weight.copy_(block)


def can_fit(module: MTPLayer, hidden: Tensor, target: Tensor) -> bool:
    """Whether the projection takes one embedding and one state and returns one; not with several streams."""
    roles = ("projection", "token_projection", "hidden_projection")
    is_linear = all(isinstance(getattr(module, role), nn.Linear) for role in roles if hasattr(module, role))
    return is_linear and hidden.ndim == target.ndim == 3 and hidden.shape[-1] == target.shape[-1]


def _normalized(head: Head, states: Tensor) -> Tensor:
    normalized: Tensor = head.new_norm().to(states.device, torch.float32)(states.float())
    return normalized


def _ridge(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Return the weight [H, N] that maps inputs [n, N] to outputs [n, H], of least squares with a penalty."""
    gram = inputs.T @ inputs
    gram.diagonal().add_(_RIDGE * inputs.square().mean().clamp_min(1e-12) * len(inputs))
    return torch.cholesky_solve(inputs.T @ outputs, torch.linalg.cholesky(gram)).T
