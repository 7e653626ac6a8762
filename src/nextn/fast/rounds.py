"""Rounds as native calls (csrc/rounds.cpp), of several at once: drafts, a pass of the trunk over them, and the verdict.

`decode.py` and `drafting.py` have the same in Python, their twin: for observers, penalties, recurrent state, heads of
several modules and planted faults.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nextn.fast.chain import FastChain, Waiting
from nextn.fast.judge import NativeVerdict
from nextn.fast.native import Runtime
from nextn.fast.passes import SIZES, Inputs, Passes
from nextn.fast.program import Replay
from nextn.fast.slabs import Slabs
from nextn.fast.structures import FoundStruct, RowsStruct, WindowStruct
from nextn.policy import PROBE, RoundPlan
from nextn.sampling import Judged, Uniforms

MOST = 32  # rounds of a call
_ANY = 2**62  # tokens
_SOON = 1024  # columns that a cache gets room for at once: it grows by copying
_COUNTED = ("drafts", "counts", "kept", "next", "asked")
_REAL = ("confidences", "seconds")


@dataclass(frozen=True, eq=False)
class Window:
    """A pass of the trunk over `size` columns with what is read from it. parts: what `native` points to."""

    native: WindowStruct
    size: int
    parts: tuple[object, ...]

    @classmethod
    def of(
        cls, inputs: Inputs, replay: Replay, readout: Replay | None, verdict: NativeVerdict | None
    ) -> "Window | None":
        """verdict: None in greedy decoding. None where a part is not native."""
        if replay.program is None or readout is None or readout.program is None:
            return None
        states, best = replay.outputs[1], readout.outputs[1]
        assert states.is_contiguous()
        window = WindowStruct(
            passed=replay.program.handle,
            readout=readout.program.handle,
            size=inputs.tokens.shape[1],
            tokens=inputs.tokens.data_ptr(),
            starts=inputs.starts.data_ptr(),
            best=best.data_ptr(),
            states=states.data_ptr(),
        )
        if verdict is not None:
            window.judge, window.columns = verdict.program.handle, verdict.drafts.shape[1]
            window.drafts, window.limits = verdict.drafts.ctypes.data, verdict.limits.ctypes.data
            window.uniforms = verdict.u.ctypes.data
            window.kept, window.next = verdict.kept.data_ptr(), verdict.following.data_ptr()
        return cls(window, inputs.tokens.shape[1], (inputs, replay, readout, verdict))


# (columns, laws of the drafts [K, B, V] or None) -> where such a round is verified
Windows = Callable[[int, Tensor | None], Window | None]


class FastRounds:
    """The rounds of the rows of one cache, until a row leaves. What the head has not seen stays where native code left
    it."""

    def __init__(
        self,
        runtime: Runtime,
        windows: Windows,
        passes: Passes,
        cache: Slabs,
        *,
        chain: FastChain | None,
        tokens: Sequence[Sequence[int]],
        pending: Sequence[Tensor],
        drafts: int,
        missing: Sequence[int],
        context: int | None,
        ends: Sequence[int],
    ) -> None:
        """tokens: all that are known of each row. pending: of each row the states of the columns that the head has not
        seen, where there is a chain. drafts: at most in a round. missing: of each row, tokens that it may still get.
        context: tokens of a row; None: any number. ends: tokens that end a row."""
        self._runtime, self._windows, self._passes, self._cache, self._chain = runtime, windows, passes, cache, chain
        count = len(tokens)
        self._last = np.array([row[-1] for row in tokens], dtype=np.int64)
        self._lengths = np.array(cache.lengths, dtype=np.int64)
        self._missing, self._ends = np.array(missing, dtype=np.int64), np.array(ends, dtype=np.int64)
        self._used = np.zeros(count, dtype=np.int64)
        self._rows = RowsStruct(count=count, num_ends=len(ends), context=context or _ANY)
        for name in ("last", "lengths", "missing", "ends"):
            setattr(self._rows, name, getattr(self, f"_{name}").ctypes.data)
        self._waiting: Waiting | None = None
        self._columns = [(cache, self._lengths)]  # that stand in each cache, of each row
        if chain is not None:
            room = min(max(map(len, pending)) + drafts + 1 + PROBE, SIZES[-1])  # plain rounds leave columns, too
            known = zip(tokens, cache.lengths, map(len, pending), strict=True)
            eaten = [row[length + 1 - width : length + 1] for row, length, width in known]
            self._waiting = Waiting(count, room, pending[0])
            self._waiting.put(eaten, pending, chain.cache.lengths)
            self._rows.waiting = self._waiting.pointer
            self._columns.append((chain.cache, self._waiting.starts))
            chain.make_room(drafts)
        for each, lengths in self._columns:
            each.reserve(int(lengths.max()) + min(max(missing), _SOON))
        self._laws: Tensor | None = None
        self._known: dict[int, Window] = {}
        self._table = (ctypes.c_void_p * (drafts + 2))()
        self._make_found(count, 0 if chain is None else drafts)

    @classmethod
    def fits(cls, pending: Sequence[Tensor], drafts: int) -> bool:
        """Whether what waits for the head in a round is no more than one pass takes."""
        return max(map(len, pending), default=0) + drafts + 1 <= SIZES[-1]

    def run(self, plan: RoundPlan, drafts: int, uniforms: Sequence[Uniforms] | None, *, most: int = 1) -> list[Judged]:
        """Rounds by this plan, up to the first in which a row ends, `most` of them at most. drafts: of a row, at most,
        and no more than it may still get. uniforms: None in greedy decoding."""
        most, chain = min(most, MOST), self._chain if drafts else None
        behind = min((most - 1) * (drafts + 1), int(self._missing.max()))
        if chain is not None:
            assert self._waiting is not None
            chain.begin(plan, drafts, columns=max(int(self._waiting.widths.max()), drafts + 1), behind=behind)
        elif self._waiting is not None and self._waiting.widths.max() + most > self._waiting.room:
            self._feed()
        for columns in range(1, drafts + 2):
            window = self._window(columns)
        self._cache.reserve(max(self._cache.lengths) + behind + window.size)
        self._passes.attach(self._cache)
        self._rows.drafts = drafts
        self._take_numbers(uniforms, most * (2 * drafts + 1))
        pointers = (None, None) if chain is None else chain.pointers
        rows, found, runtime = ctypes.byref(self._rows), ctypes.byref(self._found), self._runtime
        with runtime.lock:
            count = runtime.library.nextn_rounds(*pointers, self._table, rows, found, most, runtime.team)
        for each, used in zip(uniforms or (), self._used.tolist(), strict=uniforms is not None):
            each.drop(used)
        self._settle()
        return self._told(count)

    def pending(self) -> list[Tensor]:
        """What the head has not seen: the states of each row's columns, copied."""
        return [] if self._waiting is None else self._waiting.states

    def _make_found(self, rows: int, depths: int) -> None:
        """Room for what rounds leave."""
        shapes = {"drafts": (MOST, rows, depths), "confidences": (MOST, rows, depths), "seconds": (MOST, 2)}
        self._arrays = {
            name: np.zeros(shapes.get(name, (MOST, rows)), dtype=np.float64 if name in _REAL else np.int64)
            for name in (*_COUNTED, *_REAL)
        }
        self._found = FoundStruct(depths=depths)
        for name, array in self._arrays.items():
            setattr(self._found, name, array.ctypes.data)

    def _take_numbers(self, uniforms: Sequence[Uniforms] | None, count: int) -> None:
        """So many random numbers of each row, where native code reads them."""
        if uniforms is None:
            return
        self._numbers = np.array([each.ahead(count) for each in uniforms], dtype=np.float32)
        self._used[:] = 0
        self._rows.numbers, self._rows.used = count, self._used.ctypes.data
        self._rows.uniforms = self._numbers.ctypes.data

    def _settle(self) -> None:
        """The caches are as long as native code left them."""
        for cache, lengths in self._columns:
            cache.advance([now - before for now, before in zip(lengths.tolist(), cache.lengths, strict=True)])

    def _told(self, count: int) -> list[Judged]:
        drafts, counts, kept, following, asked, confidences, seconds = (
            self._arrays[name][:count].tolist() for name in (*_COUNTED, *_REAL)
        )
        return [
            Judged(
                [row[:num] for row, num in zip(drafts[at], counts[at], strict=True)],
                [row[:num] for row, num in zip(confidences[at], asked[at], strict=True)],
                list(zip(kept[at], following[at], strict=True)),
                *seconds[at],
            )
            for at in range(count)
        ]

    def _feed(self) -> None:
        """Rounds without a draft leave a column each; the head sees them when there is no room for more."""
        assert self._chain is not None
        assert self._waiting is not None
        self._chain.feed(self._waiting)
        self._settle()

    def _window(self, columns: int) -> Window:
        """Where so many columns are verified, which native code finds in the table from then on."""
        laws = None if self._chain is None else self._chain.laws
        if laws is not self._laws:  # they have moved
            self._laws, self._known = laws, {}
            self._table = (ctypes.c_void_p * len(self._table))()
        if columns not in self._known:
            window = self._windows(columns, laws)
            assert window is not None
            self._known[columns], self._table[columns] = window, ctypes.addressof(window.native)
        return self._known[columns]
