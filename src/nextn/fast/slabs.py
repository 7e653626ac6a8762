"""Keys and values of a decode on the fast path, in slabs that native attention writes and reads in place.

The same row-wise protocol as `rollback.Cache`: a window is written behind each row's length, `keep` closes it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nextn.rollback import Cache

_COLUMNS = 32  # capacities are multiples of what native attention takes at once
# (kv heads, key size, value size) of a layer
Shape = tuple[int, int, int]


class Slabs(Cache):
    """headers [layers, 3] int64: addresses of a layer's keys and values, and the columns that they have room for."""

    def __init__(self, shapes: Sequence[Shape], batch_size: int, *, dtype: torch.dtype) -> None:
        super().__init__([], batch_size)
        self._dtype, self._shapes, self._room = dtype, list(shapes), 0
        self._slabs: list[tuple[Tensor, Tensor]] = []
        self.headers = torch.zeros(len(shapes), 3, dtype=torch.int64)

    def begin(self, num_columns: int) -> None:
        super().begin(num_columns)
        self.reserve(max(self.lengths) + num_columns)

    def reserve(self, columns: int) -> None:
        """Make room for so many columns; what is there moves to larger slabs if need be."""
        if columns <= self._room:
            return
        old, self._room = self._room, -(-max(columns, 2 * self._room, 256) // _COLUMNS) * _COLUMNS
        slabs = [self._fresh(shape) for shape in self._shapes]
        for new, known in zip(slabs, self._slabs, strict=False):
            for grown, slab in zip(new, known, strict=True):
                grown[:, :, :old] = slab
        self._place(slabs)

    def select(self, rows: Sequence[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows]
        index = torch.tensor(list(rows))
        self._place([(keys[index], values[index]) for keys, values in self._slabs])

    def _fresh(self, shape: Shape) -> tuple[Tensor, Tensor]:
        heads, *sizes = shape
        keys, values = (torch.zeros(len(self.lengths), heads, self._room, size, dtype=self._dtype) for size in sizes)
        return keys, values

    def _place(self, slabs: list[tuple[Tensor, Tensor]]) -> None:
        self._slabs = slabs
        self.headers.copy_(torch.tensor([(keys.data_ptr(), values.data_ptr(), self._room) for keys, values in slabs]))
