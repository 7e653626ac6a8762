"""Tensors of a checkpoint as slices of a GGUF file's: dequantized, or with their codes as they are stored."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from nextn.checkpoint.gguf_blocks import take_apart
from nextn.checkpoint.gguf_file import BLOCK_TYPES, GgufTensor, blocks_name
from nextn.checkpoint.quantized_weights import QuantizedWeight, pack_codes
from nextn.checkpoint.safetensors_file import DTYPES, TensorInfo
from nextn.checkpoint.tensors import FLOATS, bytes_of
from nextn.edit.gguf_architectures import Change
from nextn.edit.plan import Piece
from nextn.edit.quantize import Rounding

GROUP = 32  # values of a block of Q8_0 and Q4_0
PACKED = {"Q8_0": Rounding(8, GROUP), "Q4_0": Rounding(4, GROUP)}
_SLICE = 2**22  # values that are dequantized at once
_UNCHANGED = Change()
Part = Literal["weight", "blocks", "weight_packed", "weight_scale", "weight_shape"]


@dataclass(frozen=True, slots=True)
class GgufPiece(Piece):
    """A tensor of the checkpoint, or one of those that a packed weight is stored as; `name` is that of the weight."""

    tensor: GgufTensor = None  # type: ignore[assignment]  # `Piece` has a field with a default
    beside: GgufTensor | None = None  # another tensor of the GGUF, whose rows follow before they change places
    expert: int | None = None  # which slice of a tensor of experts it is
    change: Change = _UNCHANGED  # from the stored values to the checkpoint's
    dtype: str = "BF16"  # of what is written
    part: Part = "weight"  # `weight` for what is not packed, `blocks` for the file's own
    is_head: bool = False  # whether it is the head's

    @property
    def stored_shape(self) -> tuple[int, ...]:
        rows, *others = reversed(self.tensor.shape)
        rows += 0 if self.beside is None else self.beside.num_rows
        return (rows, *others) if self.expert is None else tuple(others)

    @property
    def kind(self) -> str:
        """The type in the file; that of both tensors, if there are two."""
        kinds = {each.kind.name for each in (self.tensor, self.beside) if each is not None}
        return " and ".join(sorted(kinds))

    @property
    def info(self) -> TensorInfo:
        shape, dtype, suffix = self.change.shape(self.stored_shape), self.dtype, str(self.part)
        if self.part == "blocks":
            suffix, dtype, shape = blocks_name(self.tensor.kind.name), "U8", (shape[0], self.tensor.row_bytes)
        elif self.part != "weight":
            bits = PACKED[self.tensor.kind.name].bits
            dtype, shape = {
                "weight_packed": ("I32", (shape[0], shape[1] * bits // 32)),
                "weight_scale": ("F16", (shape[0], shape[1] // GROUP)),
                "weight_shape": ("I64", (2,)),
            }[self.part]
        name = self.name if self.part == "weight" else f"{self.name.removesuffix('weight')}{suffix}"
        return TensorInfo(name, dtype, shape, self.tensor.file.name, 0, prod(shape) * DTYPES[dtype] // 8)

    def chunks(self) -> Iterator[bytes]:
        return map(bytes_of, (torch.tensor(self.stored_shape),) if self.part == "weight_shape" else self._slices())

    def _slices(self) -> Iterator[Tensor]:
        """Slices of rows; in one if rows change places or values depend on others."""
        rows = prod(self.stored_shape[:-1])
        first, step = (self.expert or 0) * rows, max(1, _SLICE // self.tensor.shape[0])
        if not self.change.is_none:
            step = rows
        for begin in range(0, rows, step):
            yield self._changed(first + begin, first + min(rows, begin + step))

    def _changed(self, begin: int, end: int) -> Tensor:
        if self.part == "weight":
            values = self._read(begin, end, lambda *rows: torch.from_numpy(np.array(GgufTensor.rows(*rows))))
            values = values if self.change.is_none else values.view(self.stored_shape)
            values = values if self.change.rows is None else values[self.change.rows]
            values = values if self.change.columns is None else values[:, self.change.columns]
            values = values if self.change.values is None else self.change.values(values)
            return values.to(FLOATS[self.dtype])
        blocks, kind = self._blocks(begin, end), self.tensor.kind.name
        if self.part == "blocks":
            return blocks
        weight = take_apart(blocks, kind)
        assert isinstance(weight, QuantizedWeight), kind
        return weight.scales if self.part == "weight_scale" else pack_codes(weight)

    def _blocks(self, begin: int, end: int) -> Tensor:
        """Blocks of rows in the checkpoint's order, uint8 [rows, bytes]."""
        rows, columns = self._read(begin, end, _raw_rows), self.change.columns
        rows = rows if self.change.rows is None else rows[self.change.rows]
        if columns is None:
            return rows
        size, num_bytes, *_ = BLOCK_TYPES[self.tensor.kind.name]
        return torch.unflatten(rows, 1, (-1, num_bytes))[:, columns[::size] // size].flatten(1)

    def _read(self, begin: int, end: int, read: Callable[[GgufTensor, int, int], Tensor]) -> Tensor:
        """Read rows of the tensor, or all rows of two, which change places."""
        if self.beside is None:
            return read(self.tensor, begin, end)
        return torch.cat([read(each, 0, each.num_rows) for each in (self.tensor, self.beside)])


def _raw_rows(tensor: GgufTensor, begin: int, end: int) -> Tensor:
    data = bytearray(tensor.read(begin * tensor.row_bytes, end * tensor.row_bytes))
    return torch.frombuffer(data, dtype=torch.uint8).view(end - begin, -1)
