"""The drafts of a round as one native call (csrc/chain.cpp): the catch-up, then steps that feed themselves.

`drafting.py` has the same as a loop, its twin: for heads of several modules, penalties and observers.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nextn.fast.native import Runtime
from nextn.fast.passes import SIZES, Inputs, Passes
from nextn.fast.program import Replay
from nextn.fast.scratch import Scratch
from nextn.fast.slabs import Slabs
from nextn.fast.structures import ChainStruct, FeedStruct, StepsStruct, ToldStruct, WaitingStruct, type_of
from nextn.policy import RoundPlan
from nextn.sampling import Sampling

_FOUND = ("drafts", "counts", "asked", "confidences")
_PLAN = ("edges", "table", "take", "go")
# Of each row: drafts, confidences of the laws that were asked about; and how many depths ran.
Found = tuple[list[list[int]], list[list[float]], int]


class Waiting:
    """Columns that the trunk has seen and the head has not, where native code finds them: of each row the states of
    widths[r] columns, and the tokens behind them; starts[r] columns before them stand in the head."""

    @torch.inference_mode(False)  # it may be written in another mode than it was made in
    def __init__(self, rows: int, room: int, like: Tensor) -> None:
        """room: for so many columns of a row. like [.., *shape]: of the states' shape and dtype."""
        self.room = room
        self.widths, self.starts = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
        self._eaten = np.zeros((rows, room), dtype=np.int64)
        self._states = torch.zeros(rows, room, *like.shape[1:], dtype=like.dtype)
        self._native = WaitingStruct(rows=rows, room=room, bytes=self._states[0, 0].nbytes)
        self._native.widths, self._native.starts = self.widths.ctypes.data, self.starts.ctypes.data
        self._native.eaten, self._native.states = self._eaten.ctypes.data, self._states.data_ptr()

    def put(self, tokens: Sequence[Sequence[int]], states: Sequence[Tensor], starts: Sequence[int]) -> None:
        """These and no others wait; tokens: of each row as many as it has states."""
        self.starts[:] = starts
        for row, (eaten, own) in enumerate(zip(tokens, states, strict=True)):
            self.widths[row] = width = len(own)
            self._eaten[row, :width], self._states[row, :width] = eaten, own

    @property
    def pointer(self) -> int:
        """It lives as long as this object."""
        return ctypes.addressof(self._native)

    @property
    def states(self) -> list[Tensor]:
        """Of each row, copied."""
        return [states[:width].clone() for states, width in zip(self._states, self.widths.tolist(), strict=True)]


def _told(replay: Replay) -> ToldStruct:
    logits, best, confidence = replay.outputs
    assert logits.is_contiguous()
    return ToldStruct(logits.data_ptr(), type_of(logits.dtype), best.data_ptr(), confidence.data_ptr())


def _feed(inputs: Inputs, replay: Replay) -> FeedStruct:
    assert inputs.states is not None
    assert inputs.states.is_contiguous()
    assert replay.program is not None
    return FeedStruct(
        program=replay.program.handle,
        size=inputs.tokens.shape[1],
        tokens=inputs.tokens.data_ptr(),
        starts=inputs.starts.data_ptr(),
        states=inputs.states.data_ptr(),
    )


class FastChain:
    """Drafts of the rows of one cache, from one way to sample. laws [K, B, V]: overwritten by the next round of any."""

    def __init__(
        self,
        runtime: Runtime,
        fed: Passes,
        chained: Passes,
        cache: Slabs,
        sampling: Sampling,
        *,
        sampled: bool,
        scratch: Scratch,
    ) -> None:
        """fed: leaves keys and values alone; chained: one column, see `FastHead`. scratch: where laws are written."""
        self.cache = cache
        self._runtime, self._fed, self._chained, self._scratch = runtime, fed, chained, scratch
        self._plan: RoundPlan | None = None
        self._waiting: Waiting | None = None  # of `run`
        self._feeds: list[FeedStruct] = []  # by columns, from 1 on
        self._table = (ctypes.c_void_p * (SIZES[-1] + 1))()
        inputs, self._next = chained.replay(len(cache.lengths), 1)
        self._chain = ChainStruct(
            rows=len(cache.lengths),
            vocab=self._next.outputs[0].shape[-1],
            draws=0 if sampling.greedy else 1 if sampled else 2,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            top_k=sampling.top_k,
            eaten=inputs.tokens.data_ptr(),
        )
        one = _feed(inputs, self._next)
        self._told = _told(self._next)
        self._steps = StepsStruct(
            next=one.program, told=ctypes.addressof(self._told), starts=one.starts, states=one.states
        )
        self._steps.feeds = ctypes.addressof(self._table)
        self.laws: Tensor | None = None

    @property
    def pointers(self) -> tuple[object, object]:
        """What native code drafts by, after `begin`."""
        return ctypes.byref(self._chain), ctypes.byref(self._steps)

    def run(
        self,
        tokens: Sequence[Sequence[int]],
        states: Sequence[Tensor],
        plan: RoundPlan,
        *,
        limits: Sequence[int],
        uniforms: Sequence[Sequence[float]] | None,
    ) -> Found:
        """tokens, states: of each row the columns that the head has not seen, which then stand in the cache, and those
        of the drafts behind them. limits, uniforms: of each row, drafts at most and a number for each.

        -> of each row its drafts and the confidences of the laws that were asked about; how many depths ran.
        """
        columns = max(map(len, tokens))
        if self._waiting is None or self._waiting.room < columns:
            self._waiting = Waiting(len(tokens), columns, states[0])
        self._waiting.put(tokens, states, self.cache.lengths)
        self.begin(plan, max(limits), columns=columns)
        self._limits[:] = limits
        for name in _FOUND:
            setattr(self._chain, name, getattr(self, f"_{name}").ctypes.data)
        for row, numbers in enumerate(uniforms or ()):
            self._uniforms[row, : len(numbers)] = numbers
        with self._runtime.lock:
            self._runtime.library.nextn_chain(*self.pointers, self._waiting.pointer, self._runtime.team)
        self.cache.advance([len(row) + self._chain.ran - 1 for row in tokens])
        drafts = [row[:count] for row, count in zip(self._drafts.tolist(), self._counts.tolist(), strict=True)]
        asked = [row[:count] for row, count in zip(self._confidences.tolist(), self._asked.tolist(), strict=True)]
        return drafts, asked, self._chain.ran

    def begin(self, plan: RoundPlan, drafts: int, *, columns: int, behind: int = 0) -> None:
        """Before native code drafts by this plan. columns: at most so many of a row wait for the head. behind: so many
        more that stand by then."""
        if drafts > self._chain.depths:
            self.make_room(drafts)
        if plan is not self._plan:
            self._follow(plan)
        self._reach(columns, behind + drafts)

    def feed(self, waiting: Waiting) -> None:
        """Only what comes before the drafts."""
        self._reach(int(waiting.widths.max()), 0)
        _, steps = self.pointers
        with self._runtime.lock:
            self._runtime.library.nextn_feed(steps, waiting.pointer, self._runtime.team)

    def make_room(self, depths: int) -> None:
        """For so many drafts of each row."""
        chain, rows = self._chain, self._chain.rows
        chain.depths = depths
        self._limits, self._counts, self._asked, self._ended = (np.zeros(rows, dtype=np.int64) for _ in range(4))
        self._survival, self._confidences = np.zeros(rows), np.zeros((rows, depths))
        self._drafts, self._uniforms = np.zeros((rows, depths), dtype=np.int64), np.zeros((rows, depths), np.float32)
        for name in ("limits", "uniforms", "survival", "ended"):
            setattr(chain, name, getattr(self, f"_{name}").ctypes.data)
        if chain.draws:
            memory = self._scratch.take(4 * depths * rows * chain.vocab)
            self.laws = memory.view(torch.float32).view(depths, rows, chain.vocab)
            chain.laws = self.laws.data_ptr()

    def _reach(self, columns: int, behind: int) -> None:
        """There are passes over up to so many columns, and room for them and for what follows."""
        rows = len(self.cache.lengths)
        for width in range(len(self._feeds) + 1, columns + 1):
            self._feeds.append(_feed(*self._fed.replay(rows, width)))
            self._table[width] = ctypes.addressof(self._feeds[-1])
        size = max(feed.size for feed in self._feeds[:columns])
        self.cache.reserve(max(self.cache.lengths) + size + behind)
        self._fed.attach(self.cache)
        self._chained.attach(self.cache)

    def _follow(self, plan: RoundPlan) -> None:
        self._plan, chain = plan, self._chain
        chain.bins = len(plan.edges)
        self._numbers = [np.array(getattr(plan, name), dtype=np.float64) for name in _PLAN]
        for name, numbers in zip(_PLAN, self._numbers, strict=True):
            setattr(chain, name, numbers.ctypes.data)
