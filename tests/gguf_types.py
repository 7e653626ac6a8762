"""Weights of GGUF's quantized types with random codes."""

import numpy as np
import torch

from nextn.checkpoint.gguf_blocks import BLOCK_TYPES, KQuantWeight, take_apart

_HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where the float16 scales of a block begin; else at 0


def random_blocks(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Blocks of random bytes with finite scales, [rows, bytes]."""
    generator, num_bytes = np.random.default_rng(len(kind) + rows), BLOCK_TYPES[kind].num_bytes
    data = generator.integers(0, 256, (rows, blocks, num_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        data[..., 0] = generator.integers(0, 200, (rows, blocks))
    else:
        for place in _HALVES.get(kind, (0,)):
            halves = generator.normal(size=(rows, blocks, 1)).astype(np.float16)
            data[..., place : place + 2] = halves.view(np.uint8)
    return data.reshape(rows, -1)


def random_k_quant(kind: str, n: int, k: int) -> KQuantWeight:
    """A weight [N, K] of one of `K_QUANTS`."""
    data = random_blocks(kind, n, k // BLOCK_TYPES[kind].size)
    weight = take_apart(torch.from_numpy(data), kind)
    assert isinstance(weight, KQuantWeight)
    return weight
