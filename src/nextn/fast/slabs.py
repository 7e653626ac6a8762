"""What a decode on the fast path remembers, in slabs that native ops write and read in place.

The same row-wise protocol as `rollback.Cache`: a window is written behind each row's length, `keep` closes it.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from nextn.errors import RollbackError
from nextn.fast.native import Program, Runtime
from nextn.fast.recurrent import ROOM, StateShape
from nextn.rollback import Cache

_COLUMNS = 32  # capacities are multiples of what native attention takes at once
_TYPES = {torch.float32: 0, torch.bfloat16: 1}
# (kv heads, key size, value size) of a layer that attends
Shape = tuple[int, int, int]


class Slabs(Cache):
    """headers [layers, 3] int64: addresses of a layer's slabs, and the columns that they have room for. placement:
    another object whenever they changed.

    The slabs of a layer that attends: keys and values [B, heads, columns, size]; how 32 columns lie is attention's own
    matter (csrc/attention_*.cpp). Of a recurrent one: states
    [B, ROOM + 1, heads, key size, value size] fp32 before the window and after each of its columns, and histories
    [B, channels, ROOM + K - 1], what the convolution ate.
    """

    def __init__(
        self, shapes: Sequence[Shape | StateShape], batch_size: int, *, dtype: torch.dtype, runtime: Runtime
    ) -> None:
        super().__init__([], batch_size)
        self._runtime, self._dtype, self._shapes, self._room = runtime, dtype, list(shapes), 0
        self.headers = torch.zeros(len(shapes), 3, dtype=torch.int64)
        self._place([self._fresh(shape) for shape in self._shapes])

    @cached_property
    def is_recurrent(self) -> bool:
        return any(isinstance(shape, StateShape) for shape in self._shapes)

    def begin(self, num_columns: int) -> None:
        if self.is_recurrent and num_columns > ROOM:
            raise RollbackError(f"a window of {num_columns} columns; a recurrent layer can be put back behind {ROOM}")
        super().begin(num_columns)
        self.reserve(max(self.lengths) + num_columns)

    def keep(self, counts: Sequence[int]) -> None:
        super().keep(counts)
        if self.is_recurrent:
            self._counts.copy_(torch.tensor(counts))
            self._keep.run()

    def advance(self, counts: Sequence[int]) -> None:
        """So many columns more stand, in room that was made for them: those that native code wrote by itself."""
        assert not self.is_recurrent
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def truncate(self, lengths: Sequence[int]) -> None:
        if self.is_recurrent and list(lengths) != self.lengths:
            raise RollbackError("recurrent state cannot be truncated; keep fewer columns of the last window instead")
        super().truncate(lengths)

    def reserve(self, columns: int) -> None:
        """Make room for so many columns; what is there moves to larger slabs if need be."""
        if columns <= self._room:
            return
        old, self._room = self._room, -(-max(columns, 2 * self._room, 256) // _COLUMNS) * _COLUMNS
        slabs = []
        for shape, known in zip(self._shapes, self._slabs, strict=True):
            slabs.append(known if isinstance(shape, StateShape) else self._fresh(shape))
            for grown, slab in zip(slabs[-1], known, strict=True):
                if grown is not slab:
                    grown[:, :, :old] = slab
        self._place(slabs)

    def select(self, rows: Sequence[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows]
        index = torch.tensor(list(rows))
        self._place([(first[index], second[index]) for first, second in self._slabs])

    def _fresh(self, shape: Shape | StateShape) -> tuple[Tensor, Tensor]:
        rows = len(self.lengths)
        if isinstance(shape, StateShape):
            history = torch.zeros(rows, shape.channels, ROOM + shape.kernel - 1, dtype=self._dtype)
            return torch.zeros(rows, ROOM + 1, *shape.state), history
        heads, *sizes = shape
        keys, values = (torch.zeros(rows, heads, self._room, size, dtype=self._dtype) for size in sizes)
        return keys, values

    def _place(self, slabs: list[tuple[Tensor, Tensor]]) -> None:
        self._slabs = slabs
        places = [(first.data_ptr(), second.data_ptr(), self._room) for first, second in slabs]
        self.headers.copy_(torch.tensor(places))
        self.placement = object()
        self._counts, self._keep = torch.zeros(len(self.lengths), dtype=torch.int64), Program(self._runtime)
        for shape, header in zip(self._shapes, self.headers, strict=True):
            if isinstance(shape, StateShape):
                self._add_keep(shape, header)

    def _add_keep(self, shape: StateShape, header: Tensor) -> None:
        """Of one layer: the state after the columns that a row keeps, and the inputs before it, move to the front."""
        rows, size = len(self.lengths), shape.state[0] * shape.state[1] * shape.state[2]
        history = [ROOM, shape.kernel, shape.channels, rows, _TYPES[self._dtype]]
        assert self._keep.add("keep_state", [self._counts, header[:1]], [ROOM, size, rows])
        assert self._keep.add("keep_history", [self._counts, header[1:2]], history)
