"""Activation checkpointing: decoder layers keep their input and compute the rest again in the backward pass.

It holds for a layer's passes that record gradients and write no cache; all others run as before.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_layers(layers: Iterable[nn.Module]) -> None:
    """From now on each layer's activations are made anew in the backward pass; gradients stay the same.

    Compile layers afterwards. A layer that is here already is left as it is.
    """
    for layer in layers:
        if not isinstance(layer.forward, _Checkpointed):
            layer.forward = _Checkpointed(layer.forward)


class _Checkpointed:
    """Stands in for one layer's `forward`."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or kwargs.get("past_key_values") is not None:
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
