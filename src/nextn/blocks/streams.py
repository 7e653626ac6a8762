"""Hyper-connection streams: a state [B, T, S, H] of S residual streams for each token (arXiv 2409.19606).

It does not know the layers that mix the streams: those are transformers'.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


def joined(token: Tensor, hidden: Tensor) -> Tensor:
    """token [B, T, H] and hidden [B, T, H] or [B, T, S, H] -> their sum, the token's part in each stream."""
    return hidden + (token if hidden.ndim == token.ndim else token[:, :, None])


class Collapse(nn.Module):
    """Streams [B, T, S, H] -> [B, T, H]: a sum whose weights all streams together decide, each in (eps, 1 + eps).

    As DeepSeek-V4's inference code has it; fp32 whatever the model's dtype, as in its checkpoints.
    """

    def __init__(self, num_streams: int, hidden_size: int, *, eps: float, norm_eps: float) -> None:
        super().__init__()
        self.eps, self.norm_eps = eps, norm_eps
        self.fn = nn.Parameter(torch.empty(num_streams, num_streams * hidden_size, dtype=torch.float32))
        self.base = nn.Parameter(torch.zeros(num_streams, dtype=torch.float32))
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float32))

    def forward(self, streams: Tensor) -> Tensor:
        flat = streams.flatten(2).float()
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
        weights = torch.sigmoid(functional.linear(flat, self.fn) * self.scale + self.base) + self.eps
        return (weights[..., None] * streams).sum(dim=2).to(streams.dtype)
