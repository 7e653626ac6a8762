"""Whether bfloat16 makes training faster on this machine."""

import torch

from nextn.devices import resolve_device


def half_precision_pays(device: str = "") -> bool:
    """Return whether matmuls in bfloat16 are faster than in float32.

    They are on GPUs that support it, and on processors with bfloat16 instructions that torch's kernels use. Other
    processors convert around each matmul: an EPYC with AVX2 takes eleven times as long.

    device: a torch device type; empty = the one that training uses.
    """
    device = device or resolve_device().type
    if device == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return device == "cuda" and torch.cuda.is_bf16_supported()


def training_dtype(device: str = "") -> str:
    """Return `bfloat16` if it is faster on this type of device, else `float32`."""
    return "bfloat16" if half_precision_pays(device) else "float32"
