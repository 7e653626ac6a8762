"""Activation checkpointing: decoder layers store only their input and recompute the rest in the backward pass.

It applies to forward passes that record gradients and use no cache; all others are unchanged.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nextn.cache.kv_cache import CACHE_ARGUMENT


def checkpoint_layers(layers: Iterable[nn.Module]) -> None:
    """Make each layer recompute its activations in the backward pass; gradients are unchanged.

    Call it before compiling layers. Layers that are already wrapped are skipped.
    """
    for layer in layers:
        if not isinstance(layer.forward, _Checkpointed):
            layer.forward = _Checkpointed(layer.forward)


class _Checkpointed:
    """Replaces the `forward` of one layer."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or kwargs.get(CACHE_ARGUMENT) is not None:
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
