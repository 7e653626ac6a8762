"""Packed weights of a lowered pass: the weights of one call in one matrix, so that each worker reads one run of memory.

Weights can also be quantized, see quantization.py, grouped.py and int4.py.
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nextn.checkpoint.mapped_memory import release_pages
from nextn.model.packed_linear import StoredCodes
from nextn.runtime.native.abi import INT4, INT8, Runtime, type_of
from nextn.runtime.native.lowering import Instruction, Lowered
from nextn.runtime.native.memory import HugePages, merge_weights
from nextn.runtime.native.stored_codes import pack_stored, type_of_codes, unsupported
from nextn.runtime.native.trace import Untraceable

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


class ReplacedWeight(Protocol):
    """A weight that recorded passes have a stand-in for, see `StoredCodes`."""

    @property
    def name(self) -> str:
        """What errors call it."""

    @property
    def stand_in(self) -> Tensor:
        """A tensor [N, K] without memory that identifies the weight."""

    def dequantize(self) -> Tensor:
        """Return the weight [N, K] in the dtype of the stand-in."""


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
        """Create an empty store.

        Args:
            runtime: The native runtime.
            default: Format of quantized weights; None to pack them as they are.
            dtype: Type of the weights that are quantized.
            formats: Weights that have another format than the default, and so have views of them.
            replaced: Weights that have a stand-in. Those of a quantized checkpoint are packed as they are stored where
                a native product reads that and `formats` has no other form of them.
        """
        self._runtime, self._pages = runtime, HugePages()
        self._default, self._dtype = default, dtype
        self._ranges = sorted(
            (
                (weight.data_ptr(), weight.data_ptr() + weight.nbytes, weight_format)
                for weight, weight_format in formats
            ),
            key=itemgetter(0),
        )
        self._replaced = {each.stand_in.data_ptr(): each for each in replaced}
        self._by_address: dict[tuple[object, ...], PackedMatrix] = {}
        # Candidates of equal shapes and leading values, with their packed form.
        self._by_value: dict[tuple[object, ...], list[tuple[list[Tensor], PackedMatrix]]] = {}

    def pack(self, weights: Sequence[Tensor], parts: int = 1, columns: int | None = None) -> PackedMatrix:
        """Return weights [N, K], or [E, N, K] of experts, packed; see `merge_weights`. They must not change."""
        for weight in weights:
            if (replaced := self._replaced.get(weight.data_ptr())) and weight.shape != replaced.stand_in.shape:
                raise Untraceable(f"the pass multiplies with a part of {replaced.name}, which is quantized")
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
        if codes := [found for weight in weights if (found := self._supported_codes(weight)) is not None]:
            assert len(codes) == len(weights), "weights of one `merge_key`"
            return PackedMatrix(pack_stored(codes, parts, columns, self._pages.take), self.type_of(weights[0]))
        weight_format = self._format_of(weights[0])
        weights = [self._values(weight) for weight in weights]
        experts = list(zip(*(weight.reshape(-1, *weight.shape[-2:]) for weight in weights), strict=True))
        memory = torch.empty(0, dtype=torch.bool)
        for index, matrices in enumerate(experts):

            def take(size: int, index: int = index) -> Tensor:
                nonlocal memory
                memory = memory if index else self._pages.take(size * len(experts))
                return memory[index * size : (index + 1) * size]

            merged = merge_weights(matrices, parts, columns)
            if weight_format is None:
                self._runtime.pack(merged, take)
            else:
                weight_format.pack(merged, take, self._runtime)
        release_pages(weights)
        return PackedMatrix(memory, type_of(weights[0].dtype) if weight_format is None else weight_format.type)

    def type_of(self, weight: Tensor) -> int:
        """Return the type that a weight is packed as: `Type` of runtime.h or of product.h."""
        if (codes := self._supported_codes(weight)) is not None:
            return type_of_codes(codes)
        weight_format = self._format_of(weight)
        return type_of(weight.dtype) if weight_format is None else weight_format.type

    def merge_key(self, weight: Tensor) -> tuple[int, bool]:
        """Return what weights have in common that can be in one matrix."""
        return self.type_of(weight), self._supported_codes(weight) is not None

    def _supported_codes(self, weight: Tensor) -> StoredCodes | None:
        codes = self._replaced.get(weight.data_ptr())
        if not isinstance(codes, StoredCodes) or unsupported(codes) or self._range_of(weight) is not None:
            return None
        return codes

    def _values(self, weight: Tensor) -> Tensor:
        """The weight itself, or what it stands in for."""
        replaced = self._replaced.get(weight.data_ptr())
        return weight if replaced is None else replaced.dequantize()

    def _format_of(self, weight: Tensor) -> WeightFormat | None:
        if weight.dtype != self._dtype:
            return None
        found = self._range_of(weight)
        return self._default if found is None else found[2]

    def _range_of(self, weight: Tensor) -> tuple[int, int, WeightFormat | None] | None:
        place = bisect(self._ranges, weight.data_ptr(), key=itemgetter(0)) - 1
        found = self._ranges[place] if place >= 0 else None
        return None if found is None or weight.data_ptr() >= found[1] else found


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
    elif step.op == "embedding" and (weight_type := weights.type_of(step.tensors[1])) >= INT8:
        out, weight, ids = step.tensors
        op, more = ("grouped_embedding", (weight_type,)) if weight_type >= INT4 else ("int8_embedding", ())
        return Instruction(op, (out, weights.pack([weight]).memory, ids), ints=(*weight.shape, *more))
    else:
        return step
    packed = weights.pack(step.tensors[start : start + count], parts, columns)
    tensors = (*step.tensors[:start], packed.memory, *step.tensors[start + count :])
    return replace(step, tensors=tensors, ints=(*step.ints, packed.type))
