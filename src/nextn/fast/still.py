"""Caches whose tensors stand still, for passes that are captured once: a window's place is a number on the device.

The same row-wise protocol as `rollback.Cache`: a window is written behind each row's length, `keep` closes it.
"""

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from nextn.fast.tape import Unrecordable
from nextn.kinds import Kind
from nextn.rollback import AttentionLayer, Cache, causal

_STILL = ("full_attention", "sliding_attention", "indexed_attention", "minimax_m3_sparse")
_COLUMNS = 64  # capacities are multiples of it, as attention kernels want aligned masks


class StillLayer(AttentionLayer):
    """slabs: keys and values [rows, heads, columns, size] by name, and an indexer's keys as of one head."""

    def __init__(self, room: "Room") -> None:
        super().__init__()
        self._room = room
        self.slabs: dict[str, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self._written("keys", key_states), self._written("values", value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        return self.update_index(indexer_key_states[:, None])[:, 0]

    def update_index(self, idx_k: Tensor) -> Tensor:
        """MiniMax-M3's name for it, with an axis of one head: [B, 1, m, dim]."""
        return self._written("index", idx_k)

    def _written(self, name: str, states: Tensor) -> Tensor:
        """The slab with states [B, heads, m, size] at the room's positions -> its B rows, all columns."""
        if name not in self.slabs:
            self.slabs[name] = self._room.fresh(states)
        slab, rows = self.slabs[name], torch.arange(len(states), device=states.device)[:, None]
        slab[rows, :, self._room.positions] = states.transpose(1, 2)
        return slab[: len(states)]


class Room:
    """Slabs of one stack of layers for so many rows and columns, and what was captured over them.

    positions [B, m]: where the window goes that is written now. captured: lost when the slabs move.
    """

    positions: Tensor

    def __init__(self, kinds: Sequence[Kind], rows: int, columns: int) -> None:
        for kind in kinds:
            if kind.is_recurrent or kind.goes_apart or kind.rate or kind.name not in _STILL:
                raise Unrecordable(f"layers of kind {kind.name} have no cache that stands still")
        self.layers = [StillLayer(self) for _ in kinds]
        self.rows, self.columns = rows, -(-columns // _COLUMNS) * _COLUMNS
        self.captured: dict[tuple[Hashable, ...], Any] = {}  # by name, rows, and columns

    @torch.inference_mode(False)  # it outlives the caller's mode
    def fresh(self, states: Tensor) -> Tensor:
        """A slab for what is written like states [B, heads, m, size]."""
        # Zeros, not garbage: a masked column still meets 0 * value in the weighted sum, and 0 * NaN is NaN.
        shape = (self.rows, states.shape[1], self.columns, states.shape[3])
        return torch.zeros(shape, dtype=states.dtype, device=states.device)

    def clear(self) -> None:
        """For another text."""
        for slab in self._slabs:
            slab.zero_()

    def reserve(self, columns: int) -> None:
        """Make room for so many columns; what is there moves to larger slabs if need be, and nothing stays captured."""
        if columns <= self.columns:
            return
        self.captured.clear()
        old, self.columns = self.columns, -(-max(columns, 2 * self.columns) // _COLUMNS) * _COLUMNS
        for layer in self.layers:
            for name, slab in layer.slabs.items():
                layer.slabs[name] = self.fresh(slab)
                layer.slabs[name][:, :, :old] = slab

    def forget(self, kind: str, kept: int) -> None:
        """Of what was captured under names that begin with this kind, only the last ones stay."""
        names = [key[0] for key in self.captured if isinstance(key[0], tuple) and key[0][0] == kind]
        gone = set(list(dict.fromkeys(names))[: max(0, len(set(names)) - kept)])
        self.captured = {key: value for key, value in self.captured.items() if key[0] not in gone}

    def leave(self) -> None:
        """Give the memory back, which what was captured and the layers hold in cycles."""
        self.captured.clear()
        for layer in self.layers:
            layer.slabs.clear()

    def select(self, rows: Tensor) -> None:
        """These rows move to the front."""
        for slab in self._slabs:
            slab[: len(rows)] = slab[rows]

    @property
    def _slabs(self) -> list[Tensor]:
        return [slab for layer in self.layers for slab in layer.slabs.values()]


class Window(Cache):
    """What a pass sees as its cache: all columns of a room, masked by positions [B, m] on the device."""

    def __init__(self, room: Room, positions: Tensor) -> None:
        super().__init__(room.layers, len(positions), device=positions.device)
        self._columns, self._positions = room.columns, positions
        room.positions = positions

    def begin(self, num_columns: int) -> None:
        """Nothing: the window is where the positions say."""

    def positions(self, num_columns: int) -> Tensor:
        return self._positions

    def mask(self, num_columns: int, *, window: int | None = None, always: bool = False) -> Tensor:
        return causal(self._positions, self._columns, window=window)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise Unrecordable("the model asks how long the cache is")


class StillCache(Cache):
    """The rows of one decode, in a room of their own. What stands is known to the host alone.

    rows: of its passes, the same from first to last, as idle rows cost less than capturing when some leave.
    """

    def __init__(self, room: Room, batch_size: int, *, device: torch.device) -> None:
        super().__init__([], batch_size, device=device)
        self.room, self.rows = room, padded(batch_size)
        self.chain: Any = None  # what drafts over it, weakly: the room is free as soon as nobody holds the cache

    def advance(self, counts: Sequence[int]) -> None:
        """So many columns more stand, in room that was made for them."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.room.select(torch.tensor(list(rows), device=self.device))


class Rooms:
    """The rooms of one stack. One is lent to each cache and comes back with it, so that what was captured serves the
    next text, too."""

    def __init__(self, kinds: Sequence[Kind], *, columns: int, device: torch.device) -> None:
        self._kinds, self._columns, self._device = list(kinds), columns, device
        self._lent: list[tuple[Room, weakref.ref[StillCache]]] = []

    def lend(self, batch_size: int) -> StillCache:
        """An empty cache. Raises Unrecordable for kinds of layers that keep something else."""
        rows = padded(batch_size)
        free = [room for room, holder in self._lent if holder() is None]
        room = next((room for room in free if room.rows >= rows), None)
        if room is None:
            for small in free:  # the larger one serves their batches, too
                small.leave()
            self._lent = [(each, holder) for each, holder in self._lent if each not in free]
            room = Room(self._kinds, rows, self._columns)
        room.clear()
        cache = StillCache(room, batch_size, device=self._device)
        self._lent = [pair for pair in self._lent if pair[0] is not room] + [(room, weakref.ref(cache))]
        return cache

    @property
    def in_use(self) -> list[StillCache]:
        return [cache for _, holder in self._lent if (cache := holder()) is not None]


def padded(batch_size: int) -> int:
    """Rows of the passes for so many: the next power of two, so that batches of all sizes need few captures."""
    return 1 << (batch_size - 1).bit_length()
