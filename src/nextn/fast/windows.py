"""Windows of any size through one stack of layers, as captured passes over the room of the cache that they are for.

A window is padded to the next size that there is, a batch to a power of two; what is written beyond either is
overwritten by the next window or is never looked at. Prompts go through in larger windows, which are not captured.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nextn.fast.graph import Captured, Recorder
from nextn.fast.still import Room, StillCache, Window

SIZES = (1, 4, 8, 16, 32, 64)  # columns of captured windows, beside those that are asked for exactly
_PADDED = 8  # a window runs on any size up to this that there is, rather than have one captured for it


@dataclass(frozen=True, eq=False)
class Fed:
    """What a pass reads. numbers [R, m + 2] int64, one thing so that the host sends it at once: a row's tokens, the
    column where it starts, how many columns are its own. states [R, m, ...] of a head."""

    numbers: Tensor
    states: Tensor | None

    @classmethod
    def of(cls, rows: int, size: int, device: torch.device, like: Tensor | None) -> "Fed":
        """like [0, ...]: of what the states of a column are like, if it has any."""
        numbers = torch.zeros(rows, size + 2, dtype=torch.int64, device=device)
        return cls(numbers, None if like is None else like.new_zeros(rows, size, *like.shape[1:]))

    @property
    def tokens(self) -> Tensor:
        return self.numbers[:, :-2].contiguous()

    @property
    def starts(self) -> Tensor:
        return self.numbers[:, -2]

    @property
    def widths(self) -> Tensor:
        return self.numbers[:, -1]

    @property
    def positions(self) -> Tensor:
        """[R, m]: the columns that the tokens go to."""
        return self.starts[:, None] + torch.arange(self.numbers.shape[1] - 2, device=self.numbers.device)

    @property
    def all(self) -> list[Tensor]:
        return [self.numbers, *([] if self.states is None else [self.states])]

    def tell(self, tokens: Tensor, starts: Sequence[int], widths: Sequence[int] | None = None) -> None:
        """tokens [B, columns], on the host, B <= R and columns <= m."""
        batch, columns = tokens.shape
        told = torch.zeros(self.numbers.shape, dtype=torch.int64)
        told[:batch, :columns] = tokens
        told[:batch, -2] = torch.tensor(starts)
        told[:batch, -1] = columns if widths is None else torch.tensor(widths)
        # From memory that is not pinned, CUDA takes its copy before this returns, and does not wait for the device.
        self.numbers.copy_(told, non_blocking=True)

    def follow(self, tokens: Tensor, starts: Tensor, states: Tensor) -> None:
        """One column is next, told on the device: tokens, starts [R], states [R, ...]."""
        assert self.states is not None
        self.numbers[:, 0], self.numbers[:, 1] = tokens, starts
        self.states[:, 0] = states


Call = Callable[[Fed, Window], Iterable[Tensor]]


class Windows:
    """call(fed, window) -> the outputs [R, m, ...] of a pass; more(those) -> further ones, of captured passes alone.

    name: tells these passes from others over the same rooms. like [0, ...]: of what a head's states are like. changed:
    what a pass changes beside what it is fed.
    """

    def __init__(
        self,
        name: Hashable,
        call: Call,
        record: Recorder,
        *,
        device: torch.device,
        like: Tensor | None = None,
        more: Callable[[Sequence[Tensor]], Iterable[Tensor]] = lambda outs: (),
        changed: Sequence[Tensor] = (),
    ) -> None:
        self._name, self._call, self._more, self._record, self._changed = name, call, more, record, list(changed)
        self._device, self._like = device, like
        self._sizes: dict[int, set[int]] = {}  # by rows

    def run(self, tokens: Tensor, cache: StillCache, *, states: Tensor | None = None) -> list[Tensor]:
        """tokens [B, m], states [B, m, ...] -> the outputs, [B, m, ...]; overwritten by the next pass of this size."""
        batch, columns = tokens.shape
        cache.begin(columns)
        if columns > SIZES[-1]:
            return self._whole(tokens, cache, states)
        fed, captured = self.bound(cache, columns)
        fed.tell(tokens, cache.lengths)
        if fed.states is not None and states is not None:
            fed.states[:batch, :columns] = states
        return [out[:batch, :columns] for out in captured.run()]

    def bound(self, cache: StillCache, columns: int, *, behind: int = 0) -> tuple[Fed, Captured]:
        """The captured pass for such a window of this cache, and what it reads. Raises Unrecordable.

        behind: columns behind the window that will be written, too.
        """
        rows = cache.rows
        size = self._size(rows, columns)
        cache.room.reserve(max(cache.lengths) + size + behind)
        known, key = cache.room.captured, (self._name, rows, size)
        if key not in known:
            known[key] = self._captured(cache, rows, size)
        found: tuple[Fed, Captured] = known[key]
        return found

    def prepare(self, cache: StillCache, windows: Iterable[int], *, exact: bool) -> None:
        """Capture what windows of so many columns need. exact: of just these sizes, not of the next usual ones."""
        windows = [columns for columns in windows if columns <= SIZES[-1]]
        if exact:
            self._sizes.setdefault(cache.rows, set()).update(windows)
        for columns in windows:
            self.bound(cache, columns)

    def _size(self, rows: int, columns: int) -> int:
        usual = next(size for size in SIZES if size >= columns)
        known = self._sizes.setdefault(rows, set())
        fits = min((size for size in known if size >= columns), default=usual)
        size = fits if fits <= max(usual, _PADDED) else usual
        known.add(size)
        return size

    @torch.inference_mode(False)  # what is made here outlives the caller's mode
    def _captured(self, cache: StillCache, rows: int, size: int) -> tuple[Fed, Captured]:
        fed = Fed.of(rows, size, self._device, self._like)
        fed.tell(torch.zeros(len(cache.lengths), size), cache.lengths)  # capturing runs it, behind what stands
        return fed, Captured(partial(self._pass, cache.room, fed), self._record, fed=[*fed.all, *self._changed])

    def _pass(self, room: Room, fed: Fed) -> list[Tensor]:
        outs = list(self._call(fed, Window(room, fed.positions)))
        return [*outs, *self._more(outs)]

    @torch.no_grad()
    def _whole(self, tokens: Tensor, cache: StillCache, states: Tensor | None) -> list[Tensor]:
        cache.room.reserve(max(cache.lengths) + tokens.shape[1])
        fed = Fed.of(len(tokens), tokens.shape[1], self._device, self._like)
        fed.tell(tokens, cache.lengths)
        if fed.states is not None and states is not None:
            fed.states.copy_(states)
        return list(self._call(fed, Window(cache.room, fed.positions)))
