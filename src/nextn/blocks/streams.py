"""Hyper-connection streams: a state [B, T, S, H] of S residual streams for each token (arXiv 2409.19606).

It does not know the layers that mix the streams: those are transformers'.
"""

import torch
from torch import Tensor
from torch.nn import functional


def spread(states: Tensor, hidden: Tensor) -> Tensor:
    """states [B, T, H], to be added to hidden [B, T, H] or [B, T, S, H]: the same for every stream."""
    return states if hidden.ndim == states.ndim else states[:, :, None]


def collapse(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, norm_eps: float) -> Tensor:
    """streams [B, T, S, H] -> their sum [B, T, H], with weights in (eps, 1 + eps) that all of them decide.

    fn [S, S * H], base [S], scale [1]: fp32, as in DeepSeek-V4's checkpoints and its inference code.
    """
    flat = streams.flatten(2).float()
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    weights = torch.sigmoid(functional.linear(flat, fn) * scale + base) + eps
    return (weights[..., None] * streams).sum(dim=2).to(streams.dtype)
