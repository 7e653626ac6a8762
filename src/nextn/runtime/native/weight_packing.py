"""Packed weights of a lowered pass: the weights of one call in one matrix, so that each worker reads one run of memory.

Weights can also be quantized to seven bits, one byte each. That is for a head, whose drafts are verified anyway:
rounding its weights cannot change the text and halves the memory that drafting reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from nextn.checkpoint.mapped_memory import release_pages, slices_released_after_use
from nextn.runtime.native.abi import BYTES, Runtime, type_of
from nextn.runtime.native.lowering import Instruction, Lowered
from nextn.runtime.native.memory import HugePages, rows_per_slice, untouched_zeros

GATE_ROWS = 16  # gated ops read the rows of their two weights in alternating runs of this many (csrc/product.h)
MAX_BLOCK_COLUMNS = 32  # output channels that are packed together, at most (csrc/product.h)
BITS = 7
_ZERO = 2 ** (BITS - 1)  # bytes are offset by this, and below 128: the low byte of a bf16 number (csrc/rows.h)
MAX_CODE = _ZERO - 1
_BYTE_COLUMNS, _BYTE_DEPTH = 16, 32  # a block's output channels, and the multiple that K is padded to (csrc/product.h)
_BYTE_ORDER = (0, 2, 1, 3)  # of each four values along K
_NUM_LEADING = 16  # leading values that distinguish most weights


class PackedMatrix(NamedTuple):
    """Packed weights: their bytes, and `Type` of runtime.h or `BYTES` of product.h."""

    memory: Tensor
    type: int


# (weights [N, K] or [E, N, K] of equal K, parts, columns of a block or None for the kernels' own), see `merge_weights`
Pack = Callable[[Sequence[Tensor], int, int | None], PackedMatrix]


class PackedWeights:
    """One packed copy of each weight, shared by all replays.

    Weights are identified by address. Those that a model computes as it runs (a router's in float32, some rows of an
    LM head) are new tensors in each recording and are identified by value.
    """

    def __init__(self, runtime: Runtime, *, quantize_bf16: bool = False) -> None:
        """If `quantize_bf16`, bf16 weights are stored in seven bits, see `quantize`."""
        self._runtime, self._pages, self._quantize_bf16 = runtime, HugePages(), quantize_bf16
        self._by_address: dict[tuple[object, ...], PackedMatrix] = {}
        # Candidates of equal shapes and leading values, with their packed form.
        self._by_value: dict[tuple[object, ...], list[tuple[list[Tensor], PackedMatrix]]] = {}

    def pack(self, weights: Sequence[Tensor], parts: int = 1, columns: int | None = None) -> PackedMatrix:
        """Return weights [N, K], or [E, N, K] of experts, packed; see `merge_weights`. They must not change."""
        views = [(weight.data_ptr(), weight.shape, weight.stride(), weight.dtype) for weight in weights]
        address = (parts, columns, *views)
        if address not in self._by_address:
            leading = [tuple(weight[(0,) * (weight.ndim - 1)][:_NUM_LEADING].tolist()) for weight in weights]
            shapes = [(weight.shape, weight.dtype) for weight in weights]
            candidates = self._by_value.setdefault((parts, columns, *shapes, *leading), [])
            for known, packed in candidates:
                if all(map(torch.equal, known, weights)):
                    return packed  # not stored by address, which the next recording may reuse for another tensor
            columns = columns or self._runtime.block_columns(self._type_of(weights[0]))
            self._by_address[address] = self._pack_new(weights, parts, columns)
            candidates.append((list(weights), self._by_address[address]))  # kept alive, so the address is not reused
        return self._by_address[address]

    def _pack_new(self, weights: Sequence[Tensor], parts: int, columns: int) -> PackedMatrix:
        """Merge and pack one expert after the other. Packed weights take the place of those in mapped files."""
        experts = list(zip(*(weight.reshape(-1, *weight.shape[-2:]) for weight in weights), strict=True))
        weight_type, memory = self._type_of(weights[0]), torch.empty(0, dtype=torch.bool)
        for index, matrices in enumerate(experts):

            def take(size: int, index: int = index) -> Tensor:
                nonlocal memory
                memory = memory if index else self._pages.take(size * len(experts))
                return memory[index * size : (index + 1) * size]

            merged = merge_weights(matrices, parts, columns)
            if weight_type == BYTES:
                pack_quantized(merged, take, self._runtime.pack_bytes)
            else:
                self._runtime.pack(merged, take)
        release_pages(weights)
        return PackedMatrix(memory, weight_type)

    def _type_of(self, weight: Tensor) -> int:
        return BYTES if self._quantize_bf16 and weight.dtype == torch.bfloat16 else type_of(weight.dtype)


def pack_weights(groups: Sequence[Lowered], pack: Pack) -> list[Lowered]:
    """Replace the weights of linear ops by packed ones; the type of the packed weights is appended to the ints."""
    return [replace(group, instructions=[_with_packed(step, pack) for step in group.instructions]) for group in groups]


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


def _with_packed(step: Instruction, pack: Pack) -> Instruction:
    if step.op == "linear":
        count, parts, columns = len(step.ints) - 2, step.ints[-1], None
        start = count + 1
    elif step.op in ("expert_linear", "gated_linear", "gated_expert_linear"):
        start, count = (2 if step.op == "gated_linear" else 3), (1 if step.op == "expert_linear" else 2)
        parts, columns = (1, None) if count == 1 else (-(-step.ints[0] // GATE_ROWS), GATE_ROWS)
    else:
        return step
    packed = pack(step.tensors[start : start + count], parts, columns)
    tensors = (*step.tensors[:start], packed.memory, *step.tensors[start + count :])
    return replace(step, tensors=tensors, ints=(*step.ints, packed.type))


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize weight [..., N, K] symmetrically, rounding to nearest, with one scale per output channel.

    Returns:
        int8 codes of the same shape, from -63 to 63, and float32 scales [..., N].
    """
    wide = weight.float()
    scales = wide.abs().amax(-1) / MAX_CODE
    scales = scales.masked_fill(scales == 0, 1.0)
    return (wide / scales[..., None]).round().clamp(-MAX_CODE, MAX_CODE).to(torch.int8), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 weight that products with these codes and scales use."""
    return codes.float() * scales[..., None]


# (weight [n, K], blocks [ceil(n / 16) * 16 * padded K] and scales [ceil(n / 16) * 16] to fill)
PackRows = Callable[[Tensor, Tensor, Tensor], None]


@torch.no_grad()
def pack_quantized(weight: Tensor, take: Callable[[int], Tensor], pack_rows: PackRows | None = None) -> Tensor:
    """Quantize weight [N, K] or [E, N, K] into the layout of the native products.

    Args:
        weight: The weight.
        take: Allocates so many bytes.
        pack_rows: Packs some of the rows; by default `pack_rows_torch`, the native op gives the same bits.
    """
    *_, n, k = weight.shape
    columns, depth = n + -n % _BYTE_COLUMNS, k + -k % _BYTE_DEPTH
    matrices = weight.reshape(-1, n, k)
    memory = take(columns * (depth + 4) * len(matrices))
    num_rows = rows_per_slice(weight, _BYTE_COLUMNS)
    for matrix, packed in zip(matrices, memory.view(len(matrices), -1), strict=True):
        scales = packed[columns * depth :].view(torch.float32)
        for start, rows in slices_released_after_use(matrix, num_rows):
            end = min(start + num_rows, columns)
            (pack_rows or pack_rows_torch)(rows, packed[start * depth : end * depth], scales[start:end])
    return memory


def pack_rows_torch(weight: Tensor, blocks: Tensor, scales: Tensor) -> None:
    """Quantize some rows of a weight into blocks of 16 output channels, each [K / 4, 16, 4], and their scales."""
    n, k = weight.shape
    codes, scales[:n] = quantize(weight)
    padded = torch.nn.functional.pad(codes, (0, -k % _BYTE_DEPTH, 0, -n % _BYTE_COLUMNS)) + _ZERO
    values = padded.view(-1, _BYTE_COLUMNS, padded.shape[1] // 4, 4)[..., _BYTE_ORDER].transpose(1, 2)
    blocks.view(torch.int8).copy_(values.flatten())
