"""Windows through a stack of layers: a replay for each number of rows and size of window.

A window is padded to the next size that has a replay; padded columns are overwritten by the next window.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nextn.fast.hooks import RecordingCache
from nextn.fast.native import Runtime
from nextn.fast.program import Replay
from nextn.fast.recurrent import ROOM, StateShape
from nextn.fast.scratch import Scratch
from nextn.fast.slabs import Shape, Slabs
from nextn.fast.tape import RecordingTape
from nextn.fast.weights import Weights
from nextn.kinds import Kind

# Columns of a window: the last token and usual numbers of drafts, 16 as products take 16 rows at once, then what
# prompts go through in.
SIZES = (1, 2, 3, 5, 7, 9, 11, 12, 14, 16, 17, 24, 32, 64, 128)
_PADDED = 17  # a window runs on any replay up to this size that there is, rather than have one made for it

Array = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a replay reads. tokens [B, m]; starts [B]; widths [B]: how many columns are a row's own, where a replay
    asks; states [B, m, ...] of a head. positions [B, m]: its own, from the starts."""

    tokens: Tensor
    positions: Tensor
    starts: Tensor
    widths: Tensor
    states: Tensor | None

    @classmethod
    def of(cls, rows: int, size: int, states: Tensor | None) -> "Inputs":
        tokens, positions = (torch.zeros(rows, size, dtype=torch.int64) for _ in range(2))
        starts, widths = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.int64)
        return cls(tokens, positions, starts, widths, states)

    @property
    def all(self) -> list[Tensor]:
        return [self.tokens, self.positions, self.starts, self.widths, *([] if self.states is None else [self.states])]

    def place(self) -> None:
        """Positions from starts, as the first thing of a recording."""
        self.positions.copy_(self.starts[:, None] + torch.arange(self.positions.shape[1]))

    @cached_property
    def host(self) -> tuple[Array, Array, Array]:
        """tokens, starts and widths, to be written from Python: a tensor takes ten times as long."""
        return self.tokens.numpy(), self.starts.numpy(), self.widths.numpy()


Call = Callable[[Inputs, RecordingCache], Iterable[Tensor]]


class Passes:
    """Windows of any size through one stack of layers. call(inputs, cache) -> the outputs of a pass; what is not read
    for them is not made, but for what stands in the cache."""

    def __init__(
        self,
        runtime: Runtime,
        weights: Weights,
        kinds: Sequence[Kind],
        call: Call,
        *,
        dtype: torch.dtype,
        state_shape: tuple[int, ...] | None = None,
    ) -> None:
        self._runtime, self._weights, self._kinds, self._call = runtime, weights, list(kinds), call
        self._dtype, self._state_shape = dtype, state_shape
        self._scratch = Scratch()
        self._attached: object = None
        self.last: tuple[Replay, int] | None = None  # what ran last, and how many of its columns were asked for
        self._headers = torch.zeros(len(kinds), 3, dtype=torch.int64)
        self._replays: dict[tuple[int, int], tuple[Inputs, Replay]] = {}
        self._chosen: dict[tuple[int, int], tuple[Inputs, Replay]] = {}  # by columns of the window
        self._shapes: list[Shape | StateShape | None] = []
        # What has no limit goes in several pieces; recurrent state would have to be put back into one before the last.
        self.max_window = ROOM if any(kind.is_recurrent for kind in kinds) else None
        self._sizes = [size for size in SIZES if size <= (self.max_window or size)]

    def shapes(self, batch_size: int) -> list[Shape | StateShape | None]:
        """What each layer of the stack keeps of a column; None: the pass leaves it out. Raises Unrecordable."""
        if not self._shapes:
            self.replay(batch_size, 1)  # a recording tells the layers' sizes
        return self._shapes

    def run(self, tokens: Tensor, cache: Slabs, *, states: Tensor | None = None) -> list[Tensor]:
        """tokens [B, m], states [B, m, ...] -> the outputs, [B, m, ...]; overwritten by the next pass."""
        cache.begin(tokens.shape[1])
        if tokens.shape[1] <= self._sizes[-1]:
            return self._piece(tokens, states, cache, 0)
        pieces = []
        for start in range(0, tokens.shape[1], self._sizes[-1]):
            part = slice(start, start + self._sizes[-1])
            outs = self._piece(tokens[:, part], None if states is None else states[:, part], cache, start)
            pieces.append([out.clone() for out in outs])
        self.last = None
        return [torch.cat(outs, dim=1) for outs in zip(*pieces, strict=True)]

    def bound(self, cache: Slabs, *, columns: int = 1, offset: int = 0, room: int = 0) -> tuple[Inputs, Replay]:
        """The replay for such a window, made ready for this cache, `offset` columns behind what stands in it.

        room: columns behind the window that will be written, too.
        """
        inputs, replay = self.replay(len(cache.lengths), columns)
        cache.reserve(max(cache.lengths) + offset + inputs.tokens.shape[1] + room)
        self.attach(cache)
        _, starts, _ = inputs.host
        starts[:] = [length + offset for length in cache.lengths] if offset else cache.lengths
        return inputs, replay

    def attach(self, cache: Slabs) -> None:
        """Replays read and write this cache from now on, where its slabs are now."""
        if self._attached is not cache.placement:
            self._headers.copy_(cache.headers)
            self._attached = cache.placement

    def _piece(self, tokens: Tensor, states: Tensor | None, cache: Slabs, offset: int) -> list[Tensor]:
        columns = tokens.shape[1]
        inputs, replay = self.bound(cache, columns=columns, offset=offset)
        size = inputs.tokens.shape[1]
        inputs.host[0][:, :columns] = tokens.numpy()
        if inputs.states is not None and states is not None:
            inputs.states[:, :columns] = states
        replay.run()
        self.last = replay, columns
        return replay.outputs if columns == size else [out[:, :columns] for out in replay.outputs]

    def replay(self, rows: int, columns: int) -> tuple[Inputs, Replay]:
        """A replay for a window of so many columns, and what it reads. Raises Unrecordable."""
        if (rows, columns) not in self._chosen:
            usual = self._size(columns)
            known = min((size for batch, size in self._replays if batch == rows and size >= columns), default=usual)
            self._chosen[rows, columns] = self._made(rows, known if known <= max(usual, _PADDED) else usual)
        return self._chosen[rows, columns]

    def prepare(self, rows: int, windows: Iterable[int], *, exact: bool) -> list[Replay]:
        """The replays for windows of so many columns, made now rather than in the middle of a text.

        exact: of just these sizes, not of the next usual ones.
        """
        windows = [columns for columns in windows if columns <= self._sizes[-1]]
        for columns in windows:
            self._made(rows, columns if exact else self._size(columns))
        return [self.replay(rows, columns)[1] for columns in windows]

    def _made(self, rows: int, size: int) -> tuple[Inputs, Replay]:
        if (rows, size) not in self._replays:
            self._replays[rows, size] = self._recorded(rows, size)
            self._chosen.clear()
        return self._replays[rows, size]

    def _size(self, columns: int) -> int:
        return next(size for size in self._sizes if size >= columns)

    @torch.inference_mode(False)
    def _recorded(self, rows: int, size: int) -> tuple[Inputs, Replay]:
        states = None if self._state_shape is None else torch.zeros(rows, size, *self._state_shape, dtype=self._dtype)
        inputs = Inputs.of(rows, size, states)
        cache = RecordingCache(self._kinds, self._headers, inputs.starts, inputs.positions)
        tape = RecordingTape(inputs.all, cache.layers)
        replay = Replay.of(self._runtime, tape, partial(self._pass, inputs, cache), self._weights.pack, self._scratch)
        self._shapes = [layer.shape for layer in cache.layers]
        return inputs, replay

    def _pass(self, inputs: Inputs, cache: RecordingCache) -> Iterable[Tensor]:
        inputs.place()
        return self._call(inputs, cache)
