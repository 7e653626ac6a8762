"""Drafting as one native call (csrc/chain.cpp): a refresh of the head's KV cache, then steps that feed themselves.

decoding/drafter.py has the reference loop, which also handles heads of several layers, penalties and observers.
"""

import ctypes
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from nextn.runtime.native.abi import (
    ChainStruct,
    HeadOutputStruct,
    PendingStruct,
    RefreshStruct,
    Runtime,
    StepsStruct,
    type_of,
)
from nextn.runtime.native.kv_buffers import KVBuffers
from nextn.runtime.native.memory import Scratch
from nextn.runtime.native.passes import BLOCK_SIZES, Inputs, Passes
from nextn.runtime.native.program import Replay
from nextn.settings import Sampling
from nextn.speculative.draft_policy import RoundPlan

# Only rounds without drafts leave more than K + 1 positions pending. Each size has to be recorded, so there are only a
# few.
_RARE_SIZES = tuple(size for size in BLOCK_SIZES if size >= 32)

# Drafts of each sequence, confidences of the distributions that the plan was asked about, and the number of head steps.
ChainResult = tuple[list[list[int]], list[list[float]], int]


class DraftMode(IntEnum):
    """How native code drafts from logits; the values are those of `DraftMode` in csrc/chain.h."""

    GREEDY = 0
    SAMPLED = 1
    ARGMAX = 2

    @classmethod
    def of(cls, sampling: Sampling, *, sampled: bool) -> "DraftMode":
        """Return the mode for these sampling parameters; `sampled` as in `Settings.sampled_drafts`."""
        if sampling.greedy:
            return cls.GREEDY
        return cls.SAMPLED if sampled else cls.ARGMAX


class PendingStates:
    """Positions that the trunk has processed and the head has not, in memory that native code reads: of each sequence
    the states of counts[row] positions and the tokens after them. The head's cache holds starts[row] positions."""

    @torch.inference_mode(False)  # they may be written in another mode than they are created in
    def __init__(self, batch_size: int, capacity: int, like: Tensor) -> None:
        """`capacity`: positions per sequence. `like` [.., *shape]: a tensor of the states' shape and dtype."""
        self.capacity = capacity
        self.counts, self.starts = np.zeros(batch_size, dtype=np.int64), np.zeros(batch_size, dtype=np.int64)
        self._tokens = np.zeros((batch_size, capacity), dtype=np.int64)
        self._states = torch.zeros(batch_size, capacity, *like.shape[1:], dtype=like.dtype)
        self._native = PendingStruct(batch_size=batch_size, capacity=capacity, state_bytes=self._states[0, 0].nbytes)
        self._native.counts, self._native.starts = self.counts.ctypes.data, self.starts.ctypes.data
        self._native.tokens, self._native.states = self._tokens.ctypes.data, self._states.data_ptr()

    def put(self, tokens: Sequence[Sequence[int]], states: Sequence[Tensor], starts: Sequence[int]) -> None:
        """Replace all pending positions. Each sequence has as many tokens as states."""
        self.starts[:] = starts
        for row, (row_tokens, row_states) in enumerate(zip(tokens, states, strict=True)):
            self.counts[row] = count = len(row_states)
            self._tokens[row, :count], self._states[row, :count] = row_tokens, row_states

    @property
    def pointer(self) -> int:
        """Address of the native structure, valid as long as this object."""
        return ctypes.addressof(self._native)

    @property
    def states(self) -> list[Tensor]:
        """Copies of each sequence's states."""
        return [states[:count].clone() for states, count in zip(self._states, self.counts.tolist(), strict=True)]


def _head_output(replay: Replay) -> HeadOutputStruct:
    logits, best, confidence = replay.outputs
    assert logits.is_contiguous()
    return HeadOutputStruct(logits.data_ptr(), type_of(logits.dtype), best.data_ptr(), confidence.data_ptr())


def _refresh(inputs: Inputs, replay: Replay) -> RefreshStruct:
    assert inputs.states is not None
    assert inputs.states.is_contiguous()
    assert replay.program is not None
    return RefreshStruct(
        program=replay.program.handle,
        size=inputs.size,
        tokens=inputs.tokens.data_ptr(),
        starts=inputs.starts.data_ptr(),
        states=inputs.states.data_ptr(),
    )


class NativeDraftChain:
    """Drafting for the sequences of one cache with one set of sampling parameters.

    `distributions` [K, B, V] (q of the drafts, None in greedy decoding) are overwritten by the next round of any chain
    that shares the scratch memory.
    """

    def __init__(
        self,
        runtime: Runtime,
        refresh_passes: Passes,
        step_passes: Passes,
        cache: KVBuffers,
        sampling: Sampling,
        *,
        sampled: bool,
        scratch: Scratch,
    ) -> None:
        """Create a chain of passes that only write keys and values, and of passes over one position (`NativeHead`)."""
        self.cache = cache
        self._runtime, self._scratch = runtime, scratch
        self._refresh_passes, self._step_passes = refresh_passes, step_passes
        self._plan: RoundPlan | None = None
        self._pending: PendingStates | None = None  # of `run`
        self._refreshes: dict[int, RefreshStruct] = {}  # by the largest number of positions
        self._table = (ctypes.c_void_p * (BLOCK_SIZES[-1] + 1))()
        inputs, replay = step_passes.replay(len(cache.lengths), 1)
        self._chain = ChainStruct(
            batch_size=len(cache.lengths),
            vocab_size=replay.outputs[0].shape[-1],
            mode=DraftMode.of(sampling, sampled=sampled),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            top_k=sampling.top_k,
            next_tokens=inputs.tokens.data_ptr(),
        )
        step = _refresh(inputs, replay)
        self._output = _head_output(replay)
        self._steps = StepsStruct(
            refreshes=ctypes.addressof(self._table),
            draft_step=step.program,
            output=ctypes.addressof(self._output),
            starts=step.starts,
            states=step.states,
        )
        self.distributions: Tensor | None = None

    @property
    def pointers(self) -> tuple[object, object]:
        """The structures that native code drafts with, valid after `begin`."""
        return ctypes.byref(self._chain), ctypes.byref(self._steps)

    def run(
        self,
        tokens: Sequence[Sequence[int]],
        states: Sequence[Tensor],
        plan: RoundPlan,
        *,
        limits: Sequence[int],
        uniforms: Sequence[Sequence[float]] | None,
    ) -> ChainResult:
        """Refresh the head's cache with the pending positions, then draft up to `limits` tokens of each sequence.

        Of each sequence, `tokens` are those after its pending positions, `states` the trunk's at these positions, and
        `uniforms` one random number per draft (None in greedy decoding).
        """
        longest = max(map(len, tokens))
        if self._pending is None or self._pending.capacity < longest:
            self._pending = PendingStates(len(tokens), longest, states[0])
        self._pending.put(tokens, states, self.cache.lengths)
        self.begin(plan, max(limits), num_pending=longest)
        self._limits[:] = limits
        chain = self._chain
        chain.drafts, chain.confidences = self._drafts.ctypes.data, self._confidences.ctypes.data
        chain.num_draft_tokens = self._num_draft_tokens.ctypes.data
        chain.num_confidences = self._num_confidences.ctypes.data
        for row, numbers in enumerate(uniforms or ()):
            self._uniforms[row, : len(numbers)] = numbers
        with self._runtime.lock:
            self._runtime.library.nextn_chain(*self.pointers, self._pending.pointer, self._runtime.team)
        self.cache.advance([len(row) + chain.num_steps - 1 for row in tokens])
        drafts = [row[:count] for row, count in zip(self._drafts.tolist(), self._num_draft_tokens, strict=True)]
        rows = zip(self._confidences.tolist(), self._num_confidences, strict=True)
        return drafts, [row[:count] for row, count in rows], chain.num_steps

    def begin(self, plan: RoundPlan, max_speculative_tokens: int, *, num_pending: int, num_later: int = 0) -> None:
        """Prepare for native code that drafts by this plan, at most `max_speculative_tokens` of a sequence per round.

        A sequence has at most `num_pending` pending positions in any of these rounds; those before the last one add
        `num_later`.
        """
        if max_speculative_tokens > self._chain.max_speculative_tokens:
            self.allocate(max_speculative_tokens)
        if plan is not self._plan:
            self._set_plan(plan)
        self._reserve(num_pending, num_later + max_speculative_tokens)

    def allocate(self, max_speculative_tokens: int) -> None:
        """Allocate buffers for this many drafts of each sequence."""
        chain, batch_size = self._chain, self._chain.batch_size
        chain.max_speculative_tokens = max_speculative_tokens
        self._limits, self._num_draft_tokens, self._num_confidences, self._ended = (
            np.zeros(batch_size, dtype=np.int64) for _ in range(4)
        )
        self._survival, self._confidences = np.zeros(batch_size), np.zeros((batch_size, max_speculative_tokens))
        self._drafts = np.zeros((batch_size, max_speculative_tokens), dtype=np.int64)
        self._uniforms = np.zeros((batch_size, max_speculative_tokens), np.float32)
        chain.limits, chain.uniforms = self._limits.ctypes.data, self._uniforms.ctypes.data
        chain.survival, chain.ended = self._survival.ctypes.data, self._ended.ctypes.data
        if chain.mode != DraftMode.GREEDY:
            memory = self._scratch.take(4 * max_speculative_tokens * batch_size * chain.vocab_size)
            self.distributions = memory.view(torch.float32).view(max_speculative_tokens, batch_size, chain.vocab_size)
            chain.distributions = self.distributions.data_ptr()

    def _reserve(self, num_pending: int, num_later: int) -> None:
        """Ensure refresh passes for up to `num_pending` positions, and capacity for them and later ones."""
        num_usual = min(num_pending, self._chain.max_speculative_tokens + 1)
        rare = next(size for size in (num_usual, *_RARE_SIZES) if size >= num_pending)
        if missing := {*range(1, num_usual + 1), rare} - set(self._refreshes):
            for count in missing:
                self._refreshes[count] = _refresh(*self._refresh_passes.replay(len(self.cache.lengths), count))
            for count in range(1, max(self._refreshes) + 1):
                least = min(each for each in self._refreshes if each >= count)
                self._table[count] = ctypes.addressof(self._refreshes[least])
        size = max(refresh.size for count, refresh in self._refreshes.items() if count <= rare)
        self.cache.reserve(max(self.cache.lengths) + size + num_later)
        self._refresh_passes.attach(self.cache)
        self._step_passes.attach(self.cache)

    def _set_plan(self, plan: RoundPlan) -> None:
        self._plan, chain = plan, self._chain
        chain.num_bins = len(plan.edges)
        numbers = (plan.edges, plan.table, plan.take, plan.go)
        self._plan_arrays = [np.array(values, dtype=np.float64) for values in numbers]
        chain.edges, chain.table, chain.take, chain.go = (array.ctypes.data for array in self._plan_arrays)
