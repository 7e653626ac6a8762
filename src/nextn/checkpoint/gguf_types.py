"""GGUF's quantized types whose blocks stay as they are in a checkpoint: sizes, and the names of tensors that hold them.

Source: ggml's src/ggml-common.h.
"""

from collections.abc import Mapping
from typing import NamedTuple

SUPERBLOCK = 256  # values of a block of a K-quant
_BLOCK = 32  # of the other types
_PREFIX = "weight_"


class BlockType(NamedTuple):
    """Sizes of a block of one type.

    Attributes:
        size: Values of a block.
        num_bytes: Bytes of a block.
        bits: Bits of a code after it was taken apart.
        group_size: Values with a common scale.
    """

    size: int
    num_bytes: int
    bits: int
    group_size: int


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(_BLOCK, 18, 4, 32),
    "Q4_1": BlockType(_BLOCK, 20, 4, 32),
    "Q5_0": BlockType(_BLOCK, 22, 8, 32),
    "Q5_1": BlockType(_BLOCK, 24, 8, 32),
    "Q8_0": BlockType(_BLOCK, 34, 8, 32),
    "IQ4_NL": BlockType(_BLOCK, 18, 8, 32),
    "MXFP4": BlockType(_BLOCK, 17, 8, 32),
    "IQ4_XS": BlockType(SUPERBLOCK, 136, 8, 32),
    "Q4_K": BlockType(SUPERBLOCK, 144, 4, 32),
    "Q5_K": BlockType(SUPERBLOCK, 176, 5, 32),
    "Q6_K": BlockType(SUPERBLOCK, 210, 6, 16),
}
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
WITH_MINIMA = ("Q4_1", "Q5_1")  # besides K-quants


def blocks_name(kind: str) -> str:
    """Return what the tensor with a weight's blocks is called after the module's name: `weight_q4_k`."""
    return f"{_PREFIX}{kind.lower()}"


BLOCK_NAMES = {blocks_name(kind): kind for kind in BLOCK_TYPES}


def named_kind(name: str) -> str | None:
    """Return the type that the last part of a tensor's name states, known or not; None if it states none."""
    return name.removeprefix(_PREFIX).upper() if name.startswith(_PREFIX) else None
