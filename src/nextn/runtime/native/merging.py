"""Several weights as one matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nextn.runtime.native.memory import untouched_zeros


@torch.no_grad()
def merge_weights(weights: Sequence[Tensor], parts: int, columns: int) -> Tensor:
    """Merge weights into one matrix: part 0 of every weight, then part 1 of every weight, and so on, each padded to
    whole blocks of `columns` output channels."""
    if len(weights) == parts == 1:
        return weights[0]
    missing = [-weight.shape[-2] % (parts * columns) for weight in weights]
    padded = [torch.nn.functional.pad(w, (0, 0, 0, n)) if n else w for w, n in zip(weights, missing, strict=True)]
    split = [weight.unflatten(-2, (parts, -1)) for weight in padded]
    *before, _, k = split[0].shape
    # Not from the heap, which would keep the memory: the matrix is only needed until it is packed.
    merged = untouched_zeros(*before, sum(part.shape[-2] for part in split), k, dtype=weights[0].dtype)
    return torch.cat(split, dim=-2, out=merged).flatten(-3, -2)
