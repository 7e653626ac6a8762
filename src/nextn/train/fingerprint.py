"""A fingerprint of a module in memory: a hash of samples of all its tensors, fast for any size.

It identifies the model that data were generated with. `provenance` does the same for checkpoints on disk.
"""

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_SAMPLES = 1024  # elements of each tensor, evenly spread


def fingerprint(module: nn.Module) -> str:
    """Return the SHA-256 of name, dtype, shape and samples of every parameter and persistent buffer.

    Any training changes enough elements to be detected; a change of single elements may not be.
    """
    return fingerprint_of(sorted(module.state_dict().items()))


def fingerprint_of(state: Iterable[tuple[str, Tensor]]) -> str:
    """Return the `fingerprint` of a module with this state, given in the order of names."""
    digest = hashlib.sha256()
    for name, value in state:
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        flat = value.detach().flatten()
        samples = flat[:: max(1, len(flat) // _SAMPLES)].contiguous().cpu()
        digest.update(samples.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
