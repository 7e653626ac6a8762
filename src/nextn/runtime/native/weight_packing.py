"""Packed weights of a lowered pass: the weights of one call in one matrix, so that each worker reads one run of memory.

Weights can also be quantized, see quantization.py and grouped.py.
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import itemgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from nextn.checkpoint.mapped_memory import release_pages, slices_released_after_use
from nextn.model.packed_linear import StoredCodes
from nextn.runtime.native.abi import BYTES, INT4, Runtime, type_of
from nextn.runtime.native.lowering import Instruction, Lowered
from nextn.runtime.native.memory import HugePages, merge_weights, rows_per_slice
from nextn.runtime.native.stored_codes import pack_stored, type_of_codes, unsupported
from nextn.runtime.native.trace import Untraceable

# Of packed weights (csrc/product.h): K is padded to a multiple of _DEPTH; _COLUMNS output channels are a block.
_DEPTH, _COLUMNS = 32, 16
_LARGEST_WEIGHT = 63  # code


@dataclass(frozen=True)
class SevenBits:
    """The packed form of weights that are quantized as they are packed (csrc/product.h).

    For a head beside a trunk in bf16: its drafts are verified, so rounding its weights cannot change the text.
    """

    type: int = BYTES
    bits: int = 7

    def pack(self, weight: Tensor, take: Callable[[int], Tensor], runtime: Runtime) -> Tensor:
        return pack_quantized(weight, take, runtime)

    def values(self, weight: Tensor, runtime: Runtime) -> Tensor:
        return dequantize(*quantize(weight))


SEVEN_BITS = SevenBits()


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize weight [..., N, K] to int8 codes from -63 to 63, rounded to nearest, with one float32 scale per
    output channel."""
    wide = weight.float()
    scales = wide.abs().amax(-1) / _LARGEST_WEIGHT
    scales = scales.masked_fill(scales == 0, 1.0)
    return (wide / scales[..., None]).round().clamp(-_LARGEST_WEIGHT, _LARGEST_WEIGHT).to(torch.int8), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 weight that products with these codes and scales use."""
    return codes.float() * scales[..., None]


@torch.no_grad()
def pack_quantized(weight: Tensor, take: Callable[[int], Tensor], runtime: Runtime) -> Tensor:
    """Quantize weight [N, K] or [E, N, K] into the layout of the native products. `take` allocates bytes."""
    *_, n, k = weight.shape
    columns, depth = n + -n % _COLUMNS, k + -k % _DEPTH
    matrices = weight.reshape(-1, n, k)
    memory = take(columns * (depth + 4) * len(matrices))
    num_rows = rows_per_slice(weight, _COLUMNS)
    for matrix, packed in zip(matrices, memory.view(len(matrices), -1), strict=True):
        scales = packed[columns * depth :].view(torch.float32)
        for start, rows in slices_released_after_use(matrix, num_rows):
            end = min(start + num_rows, columns)
            blocks = packed[start * depth : end * depth]
            runtime.call("pack_bytes", [blocks, scales[start:end], rows.contiguous()])
    return memory


GATE_ROWS = 16  # gated ops read the rows of their two weights in alternating runs of this many (csrc/product.h)
MAX_BLOCK_COLUMNS = 32  # output channels that are packed together, at most (csrc/product.h)
_NUM_LEADING = 16  # leading values that distinguish most weights


class PackedMatrix(NamedTuple):
    """Packed weights: their bytes, and `Type` of runtime.h or of product.h."""

    memory: Tensor
    type: int


class WeightFormat(Protocol):
    """A packed form of quantized weights."""

    @property
    def type(self) -> int:
        """A type of product.h."""

    def pack(self, weight: Tensor, take: Callable[[int], Tensor], runtime: Runtime) -> Tensor:
        """Quantize weight [N, K] or [E, N, K] into bytes that `take` allocates."""

    def values(self, weight: Tensor, runtime: Runtime) -> Tensor:
        """Return the float32 values that products use of a weight [..., K]."""


class ReplacedMatrix(Protocol):
    """A matrix [N, K] that a stand-in takes the place of."""

    def dequantize(self) -> Tensor:
        """Return the matrix in the dtype of the stand-in."""


class ReplacedWeight(Protocol):
    """A weight that recorded passes have a stand-in for, see `StoredCodes` and `StackedCodes`."""

    @property
    def name(self) -> str:
        """What errors call it."""

    @property
    def memory(self) -> Tensor:
        """The memory of the stand-in."""

    def parts(self, weight: Tensor, /) -> Sequence[Sequence[ReplacedMatrix]] | None:
        """Return the matrices of each expert in a part of the stand-in; None if it divides one."""


T = TypeVar("T")


class _ByAddress(Generic[T]):
    """Values of separate ranges of memory, by the address at which a tensor begins."""

    def __init__(self, values: Iterable[tuple[Tensor, T]]) -> None:
        ranges = [(memory.data_ptr(), memory.data_ptr() + memory.nbytes, value) for memory, value in values]
        self._ranges = sorted(ranges, key=itemgetter(0))

    def find(self, tensor: Tensor) -> tuple[T] | None:
        """Return the value of the range in which a tensor begins, alone in a tuple."""
        place = bisect(self._ranges, tensor.data_ptr(), key=itemgetter(0)) - 1
        _, end, value = self._ranges[place] if place >= 0 else (0, 0, None)
        return (value,) if tensor.data_ptr() < end else None  # type: ignore[return-value]


class PackedWeights:
    """One packed copy of each weight, shared by all replays.

    Weights are identified by address. Those that a model computes as it runs (a router's in float32, some rows of an
    LM head) are new tensors in each recording and are identified by value.
    """

    def __init__(
        self,
        runtime: Runtime,
        default: WeightFormat | None = None,
        dtype: torch.dtype = torch.bfloat16,
        formats: Iterable[tuple[Tensor, WeightFormat | None]] = (),
        replaced: Iterable[ReplacedWeight] = (),
    ) -> None:
        """Create an empty store of a default format and dtype; weights in `formats` have others (None: as they are).

        `replaced` are weights that have a stand-in. Those of a quantized checkpoint are packed as they are stored where
        a native product reads that and `formats` has no other form of them.
        """
        self._runtime, self._pages = runtime, HugePages()
        self._default, self._dtype = default, dtype
        self._formats = _ByAddress(formats)
        self._replaced = _ByAddress((each.memory, each) for each in replaced)
        self._by_address: dict[tuple[object, ...], PackedMatrix] = {}
        # Candidates of equal shapes and leading values, with their packed form.
        self._by_value: dict[tuple[object, ...], list[tuple[list[Tensor], PackedMatrix]]] = {}

    def pack(self, weights: Sequence[Tensor], parts: int = 1, columns: int | None = None) -> PackedMatrix:
        """Return weights [N, K], or [E, N, K] of experts, packed; see `merge_weights`. They must not change."""
        for weight in weights:
            if (found := self._replaced.find(weight)) is not None and found[0].parts(weight) is None:
                raise Untraceable(f"the pass multiplies with a part of {found[0].name}, which is quantized")
        views = [(weight.data_ptr(), weight.shape, weight.stride(), weight.dtype) for weight in weights]
        address = (parts, columns, *views)
        if address not in self._by_address:
            leading = [tuple(weight[(0,) * (weight.ndim - 1)][:_NUM_LEADING].tolist()) for weight in weights]
            shapes = [(weight.shape, weight.dtype) for weight in weights]
            candidates = self._by_value.setdefault((parts, columns, *shapes, *leading), [])
            for known, packed in candidates:
                if all(map(torch.equal, known, weights)):
                    return packed  # not stored by address, which the next recording may reuse for another tensor
            columns = columns or self._runtime.block_columns(self.type_of(weights[0]))
            self._by_address[address] = self._pack_new(weights, parts, columns)
            candidates.append((list(weights), self._by_address[address]))  # kept alive, so the address is not reused
        return self._by_address[address]

    def _pack_new(self, weights: Sequence[Tensor], parts: int, columns: int) -> PackedMatrix:
        """Merge and pack one expert after the other. Packed weights take the place of those in mapped files."""
        stored = [found for weight in weights if (found := self._supported_codes(weight)) is not None]
        assert len(stored) in (0, len(weights)), "weights of one `merge_key`"
        weight_format = self._format_of(weights[0])
        memory, num_experts = torch.empty(0, dtype=torch.bool), prod(weights[0].shape[:-2])
        for index in range(num_experts):

            def take(size: int, index: int = index) -> Tensor:
                nonlocal memory
                memory = memory if index else self._pages.take(size * num_experts)
                return memory[index * size : (index + 1) * size]

            if stored:
                pack_stored([matrix for experts in stored for matrix in experts[index]], parts, columns, take)
                continue
            merged = merge_weights([self._values(weight, index) for weight in weights], parts, columns)
            if weight_format is None:
                self._runtime.pack(merged, take)
            else:
                weight_format.pack(merged, take, self._runtime)
        release_pages(weights)
        return PackedMatrix(memory, self.type_of(weights[0]))

    def type_of(self, weight: Tensor) -> int:
        """Return the type that a weight is packed as: `Type` of runtime.h or of product.h."""
        if (stored := self._supported_codes(weight)) is not None:
            return type_of_codes(stored[0][0])
        weight_format = self._format_of(weight)
        return type_of(weight.dtype) if weight_format is None else weight_format.type

    def packs_embedding(self, weight: Tensor) -> bool:
        """Return whether an embedding reads the packed weight; the others read the rows as they are stored."""
        return self.type_of(weight) >= INT4

    def rounded(self, weight: Tensor, rows: Tensor) -> Tensor | None:
        """Return in float32 what products use of rows [..., K] of a weight; None if packing does not round it."""
        weight_format = self._format_of(weight)
        return None if weight_format is None else weight_format.values(rows, self._runtime)

    def merge_key(self, weight: Tensor) -> tuple[int, bool]:
        """Return what weights have in common that can be in one matrix."""
        return self.type_of(weight), self._supported_codes(weight) is not None

    def _supported_codes(self, weight: Tensor) -> list[list[StoredCodes]] | None:
        """The stored matrices of a weight, for each expert, if it is packed as they are."""
        if (found := self._replaced.find(weight)) is None or self._formats.find(weight) is not None:
            return None
        parts = found[0].parts(weight) or []
        experts = [[matrix for matrix in expert if isinstance(matrix, StoredCodes)] for expert in parts]
        codes = [matrix for expert in experts for matrix in expert]
        if (
            len(codes) < sum(map(len, parts))
            or any(map(unsupported, codes))
            or len(set(map(type_of_codes, codes))) != 1
        ):
            return None
        # Matrices of one expert are merged without padding if all but the last one are whole blocks.
        return None if any(len(matrix.stand_in) % MAX_BLOCK_COLUMNS for matrix in experts[0][:-1]) else experts

    def _values(self, weight: Tensor, expert: int) -> Tensor:
        """The weight [N, K] of an expert, or of all if there are none, or what it stands in for."""
        if (found := self._replaced.find(weight)) is None:
            return weight.reshape(-1, *weight.shape[-2:])[expert]
        matrices = [matrix.dequantize() for matrix in (found[0].parts(weight) or [])[expert]]
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices)

    def _format_of(self, weight: Tensor) -> WeightFormat | None:
        if weight.dtype != self._dtype:
            return None
        found = self._formats.find(weight)
        return self._default if found is None else found[0]


def pack_weights(groups: Sequence[Lowered], weights: PackedWeights) -> list[Lowered]:
    """Replace the weights of linear ops by packed ones; the type of the packed weights is appended to the ints."""
    return [
        replace(group, instructions=[_with_packed(step, weights) for step in group.instructions]) for group in groups
    ]


def _with_packed(step: Instruction, weights: PackedWeights) -> Instruction:
    if step.op == "linear":
        count, parts, columns = len(step.ints) - 2, step.ints[-1], None
        start = count + 1
    elif step.op in ("expert_linear", "gated_linear", "gated_expert_linear"):
        start, count = (2 if step.op == "gated_linear" else 3), (1 if step.op == "expert_linear" else 2)
        parts, columns = (1, None) if count == 1 else (-(-step.ints[0] // GATE_ROWS), GATE_ROWS)
    elif step.op == "embedding" and weights.packs_embedding(step.tensors[1]):
        out, weight, ids = step.tensors
        packed = weights.pack([weight])
        return Instruction("grouped_embedding", (out, packed.memory, ids), ints=(*weight.shape, packed.type))
    else:
        return step
    packed = weights.pack(step.tensors[start : start + count], parts, columns)
    tensors = (*step.tensors[:start], packed.memory, *step.tensors[start + count :])
    return replace(step, tensors=tensors, ints=(*step.ints, packed.type))
