"""A module in memory, told apart from any other: a hash of samples of all its tensors, quick for any size.

For what is made with a model and must not be mixed with another's. `provenance` does the same for checkpoints on disk.
"""

import hashlib
import json

import torch
from torch import nn

_SAMPLES = 1024  # elements of each tensor, evenly spread


def imprint(module: nn.Module) -> str:
    """SHA-256 over name, dtype, shape and samples of every parameter and stored buffer.

    Training of any kind moves more elements than the samples miss; a change of single elements may not be seen.
    """
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        flat = value.detach().flatten()
        samples = flat[:: max(1, len(flat) // _SAMPLES)].contiguous().cpu()
        digest.update(samples.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
