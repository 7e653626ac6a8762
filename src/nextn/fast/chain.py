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
from nextn.fast.slabs import Slabs
from nextn.policy import RoundPlan
from nextn.sampling import Sampling

_POINTERS = ("edges", "table", "take", "go", "limits", "uniforms", "eaten")
_WRITTEN = ("drafts", "counts", "asked", "confidences", "laws", "survival", "ended")
_PLAN = ("edges", "table", "take", "go")


class _Told(ctypes.Structure):
    """`Told` of chain.cpp."""

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
    """`Chain` of chain.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "vocab", "depths", "draws")),
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "min_p")),
        *((name, ctypes.c_int64) for name in ("top_k", "bins")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("ran", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in _WRITTEN),
    )


class FastChain:
    """Drafts of the rows of one cache, from one way to sample. laws [K, B, V] is overwritten by the next round."""

    def __init__(
        self, runtime: Runtime, start: Passes, chained: Passes, cache: Slabs, sampling: Sampling, *, sampled: bool
    ) -> None:
        self._runtime, self._start, self._chained, self._cache = runtime, start, chained, cache
        self._plan: RoundPlan | None = None
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
        self._next_told = _Told.of(self._next)
        self.laws: Tensor | None = None

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
    ) -> tuple[list[list[int]], list[list[float]], int]:
        """tokens, states: of each row the columns that the head has not seen, which then stand in the cache, and those
        of the drafts behind them. limits, uniforms: of each row, drafts at most and a number for each.

        -> of each row its drafts and the confidences of the laws that were asked about; how many depths ran.
        """
        chain, widths = self._chain, [len(row) for row in tokens]
        if plan is not self._plan:
            self._follow(plan)
        inputs, first = self._start.bound(self._cache, columns=max(widths), room=chain.depths)
        self._chained.attach(self._cache)
        assert first.program is not None
        assert self._next.program is not None
        assert inputs.states is not None
        eaten, _, own = inputs.host
        own[:] = widths
        self._limits[:] = limits
        for row, width in enumerate(widths):
            eaten[row, :width] = tokens[row]
            inputs.states[row, :width] = states[row]
            if uniforms is not None:
                self._uniforms[row, : limits[row]] = uniforms[row]
        library, pointer = self._runtime.library, ctypes.byref
        library.nextn_chain(
            pointer(chain),
            first.program.handle,
            pointer(_Told.of(first)),
            self._next.program.handle,
            pointer(self._next_told),
            self._runtime.team,
        )
        self._cache.advance([width + chain.ran - 1 for width in widths])
        drafts = [row[:count] for row, count in zip(self._drafts.tolist(), self._counts.tolist(), strict=True)]
        told = [row[:count] for row, count in zip(self._confidences.tolist(), self._asked.tolist(), strict=True)]
        return drafts, told, chain.ran

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
            self.laws = torch.zeros(depths, rows, chain.vocab)
            chain.laws = self.laws.data_ptr()
