"""Whether half precision makes training faster on this machine."""

import torch

from nextn.devices import resolve_device


def half_pays(device: str = "") -> bool:
    """Whether products in bfloat16 are faster than in float32: on GPUs, and on processors that torch's own kernels
    have instructions for. Others convert both ways around each product: an EPYC with AVX2 takes eleven times as long.

    device: a type as torch names it; left out, the one that training takes.
    """
    device = device or resolve_device().type
    if device == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return device == "cuda" and torch.cuda.is_bf16_supported()


def training_dtype(device: str = "") -> str:
    """`bfloat16` where it pays on this type of device, else `float32`."""
    return "bfloat16" if half_pays(device) else "float32"
