"""Rounds as one native call each (csrc/rounds.cpp): drafts, a pass of the trunk over them, and the verdict.

`decode.py` and `drafting.py` have the same in Python, their twin: for observers, penalties, recurrent state, heads of
several modules and planted faults.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nextn.fast.chain import FastChain, Found, bits
from nextn.fast.judge import NativeVerdict
from nextn.fast.native import Runtime
from nextn.fast.passes import SIZES, Inputs, Passes
from nextn.fast.program import Replay
from nextn.fast.slabs import Slabs
from nextn.policy import PROBE, RoundPlan
from nextn.sampling import Uniforms


class _Window(ctypes.Structure):
    """`Window` of rounds.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("passed", "readout", "judge")),
        ("size", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("tokens", "starts", "best", "states")),
        ("columns", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("drafts", "limits", "uniforms", "kept", "next")),
    )


class _Rows(ctypes.Structure):
    """`Rows` of rounds.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("count", "depths", "numbers", "room", "bytes")),
        *((name, ctypes.c_void_p) for name in ("drafts", "counts", "uniforms", "last", "lengths")),
        *((name, ctypes.c_void_p) for name in ("widths", "eaten", "states", "kept", "next")),
    )


@dataclass(frozen=True, eq=False)
class Window:
    """A pass of the trunk over `size` columns with what is read from it. parts: what `native` points to."""

    native: _Window
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
        window = _Window(
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
    it: of each row so many columns, their states and the tokens behind them."""

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
    ) -> None:
        """tokens: all that are known of each row. pending: of each row the states of the columns that the head has not
        seen, where there is a chain. drafts: at most in a round."""
        self._runtime, self._windows, self._passes, self._cache, self._chain = runtime, windows, passes, cache, chain
        count, longest = len(tokens), max(map(len, pending), default=0)
        self._room = min(longest + drafts + 1 + PROBE, SIZES[-1])  # plain rounds leave their columns, too
        self._none, self._kept, self._next = (np.zeros(count, dtype=np.int64) for _ in range(3))
        self._last = np.array([row[-1] for row in tokens], dtype=np.int64)
        self._lengths = np.array(cache.lengths, dtype=np.int64)
        self._widths = np.array([len(states) for states in pending] or [0] * count, dtype=np.int64)
        self._eaten = np.zeros((count, self._room), dtype=np.int64)
        self._uniforms = np.zeros((count, drafts + 1), dtype=np.float32)
        self._laws: Tensor | None = None
        self._known: dict[int, Window] = {}
        self._table, self._seconds = (ctypes.c_void_p * (drafts + 2))(), ctypes.c_double()
        none = self._none.ctypes.data
        self._rows = _Rows(count=count, numbers=drafts + 1, room=self._room, drafts=none, counts=none)
        for name in ("uniforms", "last", "lengths", "widths", "eaten", "kept", "next"):
            setattr(self._rows, name, getattr(self, f"_{name}").ctypes.data)
        if chain is not None:
            self._wait(tokens, pending)

    @classmethod
    def fits(cls, pending: Sequence[Tensor], drafts: int) -> bool:
        """Whether what waits for the head in a round is no more than one pass takes."""
        return max(map(len, pending), default=0) + drafts + 1 <= SIZES[-1]

    def run(
        self, plan: RoundPlan, limits: Sequence[int], uniforms: Sequence[Uniforms] | None
    ) -> tuple[Found, list[tuple[int, int]], float]:
        """limits: of each row, drafts at most. uniforms: None in greedy decoding -> what `FastChain.run` finds, of each
        row (kept, next token), and the seconds that the drafts took."""
        chain, cache = self._chain if any(limits) else None, self._cache
        widths = self._begin(chain, plan, limits, uniforms)
        cache.reserve(max(cache.lengths) + self._window(1 + max(limits)).size)
        self._passes.attach(cache)
        library, rows, team = self._runtime.library, ctypes.byref(self._rows), self._runtime.team
        pointers = (None, None) if chain is None else chain.pointers
        columns = library.nextn_round(*pointers, self._table, rows, team, ctypes.byref(self._seconds))
        if columns:
            library.nextn_verify(ctypes.byref(self._window(columns).native), rows, team)
        found: Found = ([[] for _ in limits], [[] for _ in limits], 0)
        if chain is not None:
            chain.cache.advance(widths)
            found = chain.found()
        for each, limit, drafts in zip(uniforms or (), limits, found[0], strict=uniforms is not None):
            each.take(limit + len(drafts) + 1)
        kept = self._kept.tolist()
        cache.advance([count + 1 for count in kept])
        return found, list(zip(kept, self._next.tolist(), strict=True)), self._seconds.value

    def pending(self) -> list[Tensor]:
        """What the head has not seen: the states of each row's columns, copied."""
        return [states[:width].clone() for states, width in zip(self._states, self._widths.tolist(), strict=True)]

    def _wait(self, tokens: Sequence[Sequence[int]], pending: Sequence[Tensor]) -> None:
        like = pending[0]
        self._states = torch.zeros(len(pending), self._room, *like.shape[1:], dtype=like.dtype)
        self._bits = bits(self._states)
        self._rows.states, self._rows.bytes = self._states.data_ptr(), self._states[0, 0].nbytes
        for row, states in enumerate(pending):
            self._states[row, : len(states)] = states
            end = int(self._lengths[row]) + 1
            self._eaten[row, : len(states)] = tokens[row][end - len(states) : end]

    def _begin(
        self, chain: FastChain | None, plan: RoundPlan, limits: Sequence[int], uniforms: Sequence[Uniforms] | None
    ) -> list[int]:
        """All that native code reads of this round -> how many columns of each row the head has not seen."""
        widths: list[int] = self._widths.tolist()
        numbers = [
            each.ahead(2 * limit + 1) for each, limit in zip(uniforms or (), limits, strict=uniforms is not None)
        ]
        for row, (each, limit) in enumerate(zip(numbers, limits, strict=uniforms is not None)):
            self._uniforms[row, : limit + 1] = each[limit:]
        if chain is not None:
            draws = None if uniforms is None else [each[:limit] for each, limit in zip(numbers, limits, strict=True)]
            chain.begin(widths, self._eaten, self._bits, plan, limits=limits, uniforms=draws)
        else:
            self._rows.counts = self._none.ctypes.data
            self._make_room(widths)
        return widths

    def _make_room(self, widths: Sequence[int]) -> None:
        """Rounds without a draft leave a column each; the head sees them when there is no room for one more."""
        if self._chain is not None and max(widths) == self._room:
            self._chain.feed(widths, self._eaten, self._bits)
            self._chain.cache.advance(widths)
            self._widths[:] = 0

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
