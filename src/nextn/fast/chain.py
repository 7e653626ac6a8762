"""The drafts of a round as one native call (csrc/chain.cpp): the catch-up, then steps that feed themselves.

`drafting.py` has the same as a loop, its twin: for heads of several modules, penalties and observers.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nextn.fast.native import Runtime, type_of
from nextn.fast.passes import Passes
from nextn.fast.program import Replay
from nextn.fast.scratch import Scratch
from nextn.fast.slabs import Slabs
from nextn.policy import RoundPlan
from nextn.sampling import Sampling

_POINTERS = ("edges", "table", "take", "go", "limits", "uniforms", "eaten")
_WRITTEN = ("drafts", "counts", "asked", "confidences", "laws", "survival", "ended")
_PLAN = ("edges", "table", "take", "go")
# Of each row: drafts, confidences of the laws that were asked about; and how many depths ran.
Found = tuple[list[list[int]], list[list[float]], int]


def bits(states: Tensor) -> np.ndarray:
    """The same memory as whole numbers: numpy knows no bfloat16, and copies small pieces faster than torch."""
    return states.view({2: torch.int16, 4: torch.int32}[states.itemsize]).numpy()


class _Told(ctypes.Structure):
    """`Told` of chain.h."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("type", ctypes.c_int64),
        ("best", ctypes.c_void_p),
        ("confidence", ctypes.c_void_p),
    )

    @classmethod
    def of(cls, replay: Replay) -> "_Told":
        logits, best, confidence = replay.outputs
        assert logits.is_contiguous()
        return cls(logits.data_ptr(), type_of(logits.dtype), best.data_ptr(), confidence.data_ptr())


class _Chain(ctypes.Structure):
    """`Chain` of chain.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "vocab", "depths", "draws")),
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "min_p")),
        *((name, ctypes.c_int64) for name in ("top_k", "bins")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("ran", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in _WRITTEN),
    )


class _Steps(ctypes.Structure):
    """`Steps` of chain.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("first", "first_told", "next", "next_told"))


class FastChain:
    """Drafts of the rows of one cache, from one way to sample. laws [K, B, V]: overwritten by the next round of any."""

    def __init__(
        self,
        runtime: Runtime,
        start: Passes,
        chained: Passes,
        cache: Slabs,
        sampling: Sampling,
        *,
        sampled: bool,
        scratch: Scratch,
    ) -> None:
        """scratch: where laws are written."""
        self.cache = cache
        self._runtime, self._start, self._chained, self._scratch = runtime, start, chained, scratch
        self._plan: RoundPlan | None = None
        self._firsts: dict[Replay, tuple[_Told, np.ndarray]] = {}
        inputs, self._next = chained.replay(len(cache.lengths), 1)
        self._chain = _Chain(
            rows=len(cache.lengths),
            vocab=self._next.outputs[0].shape[-1],
            draws=0 if sampling.greedy else 1 if sampled else 2,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            top_k=sampling.top_k,
            eaten=inputs.tokens.data_ptr(),
        )
        assert self._next.program is not None
        self._next_told = _Told.of(self._next)
        self._steps = _Steps(next=self._next.program.handle, next_told=ctypes.addressof(self._next_told))
        self.laws: Tensor | None = None

    @property
    def pointers(self) -> tuple[object, object]:
        """What native code drafts by, after `begin`."""
        return ctypes.byref(self._chain), ctypes.byref(self._steps)

    def follows(self, plan: RoundPlan, columns: int) -> bool:
        """Whether `run` can do what the plan says behind so many columns."""
        return True

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
        widths = [len(row) for row in tokens]
        eaten = np.zeros((len(widths), max(widths)), dtype=np.int64)
        for row, width in enumerate(widths):
            eaten[row, :width] = tokens[row]
        stacked = torch.nn.utils.rnn.pad_sequence(list(states), batch_first=True)
        self.begin(widths, eaten, bits(stacked), plan, limits=limits, uniforms=uniforms)
        self._runtime.library.nextn_chain(*self.pointers, self._runtime.team)
        self.cache.advance([width + self._chain.ran - 1 for width in widths])
        return self.found()

    def begin(
        self,
        widths: Sequence[int],
        eaten: np.ndarray,
        states: np.ndarray,
        plan: RoundPlan,
        *,
        limits: Sequence[int],
        uniforms: Sequence[Sequence[float]] | None,
    ) -> None:
        """All of `run` that comes before the native call, of the first widths[row] columns of eaten [B, m] and of the
        states' bits [B, m, ...]. The call writes behind the columns that stand in the cache, and no more stand then."""
        if plan is not self._plan:
            self._follow(plan)
        first, told = self._filled(widths, eaten, states)
        assert first.program is not None
        self._steps.first, self._steps.first_told = first.program.handle, ctypes.addressof(told)
        self._limits[:] = limits
        for row, numbers in enumerate(uniforms or ()):
            self._uniforms[row, : len(numbers)] = numbers

    def found(self) -> Found:
        """What the native call has left."""
        drafts = [row[:count] for row, count in zip(self._drafts.tolist(), self._counts.tolist(), strict=True)]
        asked = [row[:count] for row, count in zip(self._confidences.tolist(), self._asked.tolist(), strict=True)]
        return drafts, asked, self._chain.ran

    def feed(self, widths: Sequence[int], eaten: np.ndarray, states: np.ndarray) -> None:
        """Only what comes before the drafts."""
        first, _ = self._filled(widths, eaten, states)
        first.run()

    def _filled(self, widths: Sequence[int], eaten: np.ndarray, states: np.ndarray) -> tuple[Replay, _Told]:
        """The replay of the head's first pass, which has these columns as its inputs now."""
        longest = max(widths)
        inputs, first = self._start.bound(self.cache, columns=longest, room=self._chain.depths)
        self._chained.attach(self.cache)
        if first not in self._firsts:
            assert inputs.states is not None
            self._firsts[first] = _Told.of(first), bits(inputs.states)
        told, own_states = self._firsts[first]
        own_eaten, _, own_widths = inputs.host
        own_widths[:] = widths
        own_eaten[:, :longest], own_states[:, :longest] = eaten[:, :longest], states[:, :longest]
        return first, told

    def _follow(self, plan: RoundPlan) -> None:
        self._plan, chain = plan, self._chain
        if plan.max_drafts > chain.depths:
            self._make_room(plan.max_drafts)
        chain.bins = len(plan.edges)
        self._numbers = [np.array(getattr(plan, name), dtype=np.float64) for name in _PLAN]
        for name, numbers in zip(_PLAN, self._numbers, strict=True):
            setattr(chain, name, numbers.ctypes.data)

    def _make_room(self, depths: int) -> None:
        chain, rows = self._chain, self._chain.rows
        chain.depths = depths
        self._limits, self._counts, self._asked, self._ended = (np.zeros(rows, dtype=np.int64) for _ in range(4))
        self._survival, self._confidences = np.zeros(rows), np.zeros((rows, depths))
        self._drafts, self._uniforms = np.zeros((rows, depths), dtype=np.int64), np.zeros((rows, depths), np.float32)
        for name in ("limits", "uniforms", "drafts", "counts", "asked", "confidences", "survival", "ended"):
            setattr(chain, name, getattr(self, f"_{name}").ctypes.data)
        if chain.draws:
            memory = self._scratch.take(4 * depths * rows * chain.vocab)
            self.laws = memory.view(torch.float32).view(depths, rows, chain.vocab)
            chain.laws = self.laws.data_ptr()
