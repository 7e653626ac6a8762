"""Several rounds as one native call (csrc/rounds.cpp): drafting, the trunk's pass over the drafts, and verification.

decoding/batch.py and decoding/drafter.py have the reference loop, which also handles observers, penalties, recurrent
state, heads of several layers and injected faults.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nextn.runtime.native.abi import BatchStruct, BlockStruct, Program, RoundOutputStruct, Runtime
from nextn.runtime.native.draft_chain import NativeDraftChain, PendingStates
from nextn.runtime.native.kv_buffers import KVBuffers
from nextn.runtime.native.memory import Scratch
from nextn.runtime.native.passes import BLOCK_SIZES, Inputs, Passes
from nextn.runtime.native.program import Replay
from nextn.runtime.protocols import RoundsStart
from nextn.settings import Sampling
from nextn.speculative.copy_choice import NO_COPIES, CopyChoice
from nextn.speculative.draft_policy import PROBE_INTERVAL, RoundPlan
from nextn.speculative.sampling import Uniforms
from nextn.speculative.verification import VerifiedRound, Verifier

_MAX_PROGRAMS = 32  # cached; logits and distributions mostly have the addresses of an earlier round


class NativeVerifier(Verifier):
    """`Verifier` for sampling without a repetition penalty at a temperature above 0."""

    def __init__(
        self, runtime: Runtime, sampling: Sampling, *, block_verification: bool, scratch: Scratch | None = None
    ) -> None:
        """`scratch`: memory shared with other verifiers; None for memory of its own."""
        super().__init__(sampling, block_verification=block_verification)
        self._runtime, self._scratch = runtime, scratch or Scratch()
        self._verifications: dict[tuple[object, ...], NativeVerification] = {}

    def __call__(
        self,
        logits: Tensor,
        q: Tensor | None,
        drafts: Sequence[Sequence[int]],
        u: Sequence[Sequence[float]],
        *,
        seen: Tensor | None = None,
    ) -> list[tuple[int, int]]:
        """Verify drafts as `Verifier.__call__` does, except for the order of sums."""
        return self.verification(logits, q).run(drafts, u)

    def verification(self, logits: Tensor, q: Tensor | None) -> "NativeVerification":
        """Return the program that verifies drafts with logits and distributions at these addresses."""
        key = tuple(part for tensor in (logits, q) if tensor is not None for part in _address(tensor))
        if key not in self._verifications:
            if len(self._verifications) >= _MAX_PROGRAMS:
                self._verifications.clear()
            self._verifications[key] = NativeVerification.of(
                self._runtime, self._scratch, logits, q, self.sampling, block_verification=self.block_verification
            )
        return self._verifications[key]


@dataclass(frozen=True, eq=False)
class NativeVerification:
    """A program that verifies drafts, with its input and output buffers."""

    program: Program
    num_accepted: Tensor  # [B]
    next_tokens: Tensor  # [B]
    drafts: np.ndarray  # [B, K + 1]
    limits: np.ndarray  # [B]: number of drafts
    u: np.ndarray  # [B, K + 1]

    @classmethod
    def of(
        cls,
        runtime: Runtime,
        scratch: Scratch,
        logits: Tensor,
        q: Tensor | None,
        sampling: Sampling,
        *,
        block_verification: bool,
    ) -> "NativeVerification":
        """Build the program for logits [B, K + 1, V] and q [B, K, V] at fixed addresses."""
        batch_size, num_positions, vocab = logits.shape
        memory = scratch.take(4 * batch_size * (num_positions + 1) * vocab).view(torch.float32)
        p = memory[: batch_size * num_positions * vocab].view(batch_size, num_positions, vocab)
        residual = memory[-batch_size * vocab :].view(batch_size, vocab)
        num_accepted, next_tokens, limits = (torch.zeros(batch_size, dtype=torch.int64) for _ in range(3))
        drafts = torch.zeros(batch_size, num_positions, dtype=torch.int64)
        u = torch.zeros(batch_size, num_positions)
        program, distributions = Program(runtime), torch.zeros(batch_size, 0, vocab) if q is None else q
        reals = [sampling.temperature, sampling.top_p, sampling.min_p]
        assert program.add("to_probs", [p, logits], [sampling.top_k], reals)
        views = [num_accepted, next_tokens, residual, p, distributions, drafts, limits, u]
        assert program.add("verify", views, [int(block_verification)])
        return cls(program, num_accepted, next_tokens, drafts.numpy(), limits.numpy(), u.numpy())

    def run(self, drafts: Sequence[Sequence[int]], u: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
        """Verify drafts and return (num_accepted, next token) of each sequence."""
        for row, (tokens, uniforms) in enumerate(zip(drafts, u, strict=True)):
            self.limits[row] = len(tokens)
            self.drafts[row, : len(tokens)] = tokens
            self.u[row, : len(uniforms)] = uniforms
        self.program.run()
        return list(zip(self.num_accepted.tolist(), self.next_tokens.tolist(), strict=True))


def _address(tensor: Tensor) -> tuple[object, ...]:
    """What identifies a view in memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


MAX_ROUNDS = 32  # per call
_UNLIMITED = 2**62  # tokens
_MOST_PENDING = BLOCK_SIZES[-1]  # states of a sequence, which the head processes in one pass
_RESERVED = 1024  # positions that a cache reserves at once: it grows by copying
_INT_OUTPUTS = ("drafts", "num_draft_tokens", "num_accepted", "next_tokens", "num_confidences")
_REAL_OUTPUTS = ("confidences", "seconds")


@dataclass(frozen=True, eq=False)
class VerifyBlock:
    """Native programs that run the trunk over a block, predict and verify."""

    native: BlockStruct
    size: int  # positions
    owners: tuple[object, ...]  # keeps alive what `native` points to

    @classmethod
    def of(
        cls, inputs: Inputs, replay: Replay, lm_head: Replay | None, verification: NativeVerification | None
    ) -> "VerifyBlock | None":
        """Return the block; None if a part is not fully native. `verification`: None in greedy decoding."""
        if replay.program is None or lm_head is None or lm_head.program is None:
            return None
        states, best = replay.outputs[1], lm_head.outputs[1]
        assert states.is_contiguous()
        native = BlockStruct(
            forward=replay.program.handle,
            lm_head=lm_head.program.handle,
            size=inputs.size,
            tokens=inputs.tokens.data_ptr(),
            starts=inputs.starts.data_ptr(),
            best=best.data_ptr(),
            states=states.data_ptr(),
        )
        if verification is not None:
            native.verify, native.num_positions = verification.program.handle, verification.drafts.shape[1]
            native.drafts, native.limits = verification.drafts.ctypes.data, verification.limits.ctypes.data
            native.uniforms = verification.u.ctypes.data
            native.num_accepted = verification.num_accepted.data_ptr()
            native.next_tokens = verification.next_tokens.data_ptr()
        return cls(native, inputs.size, (inputs, replay, lm_head, verification))


# (number of positions, distributions of the drafts [K, B, V] or None) -> the block that verifies such a round
BlockFactory = Callable[[int, Tensor | None], VerifyBlock | None]


class NativeRounds:
    """Rounds for the sequences of one cache, until one of them ends. States that the head has not processed stay in
    native memory between calls."""

    def __init__(
        self,
        runtime: Runtime,
        blocks: BlockFactory,
        passes: Passes,
        cache: KVBuffers,
        start: RoundsStart,
        scratch: Scratch,
        *,
        max_length: int | None,
        vocab_size: int | None,
    ) -> None:
        """Take over decoding from Python; `blocks` returns the block that verifies a round.

        `scratch` has the distributions of copies without a head, at one address for all texts. `max_length` is in
        tokens of a sequence; `vocab_size` is that of the distributions that drafts are verified with, None in greedy
        decoding.
        """
        chain: NativeDraftChain | None = start.chain
        self._runtime, self._blocks, self._passes, self._cache, self._chain = runtime, blocks, passes, cache, chain
        batch_size = len(start.tokens)
        width = max(0 if chain is None else start.max_speculative_tokens, start.max_copy_tokens)
        self._batch = BatchStruct(size=batch_size, num_eos=len(start.eos), max_length=max_length or _UNLIMITED)
        self._set_sequences(start)
        self._pending = self._pending_states(start, width)
        self._caches = [(cache, self._lengths)]  # each cache with the lengths that native code maintains
        if chain is not None:
            assert self._pending is not None
            self._caches.append((chain.cache, self._pending.starts))
            chain.allocate(width)
        for each_cache, lengths in self._caches:
            each_cache.reserve(int(lengths.max()) + min(max(start.remaining), _RESERVED))
        self._distributions: Tensor | None = None
        self._own_distributions: Tensor | None = None
        if vocab_size is not None and chain is None:
            memory = scratch.take(4 * width * batch_size * vocab_size).view(torch.float32)
            self._own_distributions = memory.view(width, batch_size, vocab_size)
        self._verify_blocks: dict[int, VerifyBlock] = {}
        self._table = (ctypes.c_void_p * (width + 2))()
        self._allocate_output(batch_size, width)

    def _set_sequences(self, start: RoundsStart) -> None:
        """Pass the state of each sequence to native code, which maintains it."""
        self._last_tokens = np.array([row[-1] for row in start.tokens], dtype=np.int64)
        self._lengths = np.array(self._cache.lengths, dtype=np.int64)
        self._remaining, self._eos = np.array(start.remaining, dtype=np.int64), np.array(start.eos, dtype=np.int64)
        self._num_used = np.zeros(len(start.tokens), dtype=np.int64)
        self._batch.last_tokens, self._batch.lengths = self._last_tokens.ctypes.data, self._lengths.ctypes.data
        self._batch.remaining, self._batch.eos = self._remaining.ctypes.data, self._eos.ctypes.data

    def _pending_states(self, start: RoundsStart, width: int) -> PendingStates | None:
        """Pass the states that the head has not processed to native code; None without any."""
        if not start.pending:
            return None
        # Rounds without drafts of the head leave pending positions, too.
        capacity = max(map(len, start.pending)) + width + 1 + PROBE_INTERVAL
        capacity = _MOST_PENDING if self._chain is None else min(capacity, _MOST_PENDING)
        states = PendingStates(len(start.tokens), capacity, start.pending[0])
        self._batch.pending = states.pointer
        if self._chain is not None:
            counts = zip(start.tokens, self._cache.lengths, map(len, start.pending), strict=True)
            tokens = [row[length + 1 - count : length + 1] for row, length, count in counts]
            states.put(tokens, start.pending, self._chain.cache.lengths)
        return states

    @classmethod
    def fits(cls, pending: Sequence[Tensor], num_draft_tokens: int) -> bool:
        """Return whether the head can process these pending positions and those of the next round, which drafts or
        copies at most so many tokens, in one pass."""
        return max(map(len, pending), default=0) + num_draft_tokens + 1 <= _MOST_PENDING

    @property
    def can_draft(self) -> bool:
        return self._chain is not None

    def has_room(self, num_positions: int) -> bool:
        """Return whether there is room for the states that a round of so many positions without the head leaves."""
        return self._pending is None or int(self._pending.counts.max()) + num_positions <= self._pending.capacity

    def run(
        self,
        plan: RoundPlan,
        max_speculative_tokens: int,
        uniforms: Sequence[Uniforms] | None,
        *,
        max_rounds: int = 1,
        choice: CopyChoice = NO_COPIES,
    ) -> list[VerifiedRound]:
        """Run at most `max_rounds` rounds by this plan (1 with copies), until one in which a sequence ends.

        The head drafts at most `max_speculative_tokens` per round; each sequence also stays within its remaining
        tokens, as do the copies. `uniforms` are None in greedy decoding.
        """
        max_rounds, chain = min(max_rounds, MAX_ROUNDS), self._chain if max_speculative_tokens else None
        num_later = min((max_rounds - 1) * (max_speculative_tokens + 1), int(self._remaining.max()))
        if chain is None and self._pending is not None:
            max_rounds = min(max_rounds, self._pending.capacity - int(self._pending.counts.max()))
        longest = max(max_speculative_tokens, choice.num_draft_tokens)
        self._ensure_blocks([*range(1, max_speculative_tokens + 2), longest + 1])
        largest = self._verify_blocks[longest + 1]
        self._cache.reserve(max(self._cache.lengths) + num_later + largest.size)
        if chain is not None:
            assert self._pending is not None
            num_pending = max(int(self._pending.counts.max()), max_speculative_tokens + 1)
            chain.begin(plan, max_speculative_tokens, num_pending=num_pending, num_later=num_later)
        self._passes.attach(self._cache)  # now: a head that reads this cache may have let it grow
        self._batch.max_speculative_tokens = max_speculative_tokens
        self._set_uniforms(uniforms, max_rounds * (max_speculative_tokens + longest + 1))
        self._set_copies(choice)
        pointers = (None, None) if chain is None else chain.pointers
        batch, output, runtime = ctypes.byref(self._batch), ctypes.byref(self._output), self._runtime
        with runtime.lock:
            count = runtime.library.nextn_rounds(*pointers, self._table, batch, output, max_rounds, runtime.team)
        if uniforms is not None:
            for row_uniforms, used in zip(uniforms, self._num_used.tolist(), strict=True):
                row_uniforms.skip(used)
        self._update_lengths()
        return self._results(count, choice)

    def pending(self) -> list[Tensor]:
        """Return copies of each sequence's states that the head has not processed."""
        return [] if self._pending is None else self._pending.states

    def _allocate_output(self, batch_size: int, max_speculative_tokens: int) -> None:
        per_draft = (MAX_ROUNDS, batch_size, max_speculative_tokens)
        shapes = {"drafts": per_draft, "confidences": per_draft, "seconds": (MAX_ROUNDS, 2)}
        outputs = [(name, np.int64) for name in _INT_OUTPUTS] + [(name, np.float64) for name in _REAL_OUTPUTS]
        self._arrays = {name: np.zeros(shapes.get(name, (MAX_ROUNDS, batch_size)), dtype) for name, dtype in outputs}
        self._output = RoundOutputStruct(max_speculative_tokens=max_speculative_tokens)
        for name, array in self._arrays.items():
            setattr(self._output, name, array.ctypes.data)

    def _set_uniforms(self, uniforms: Sequence[Uniforms] | None, count: int) -> None:
        """Pass `count` random numbers of each sequence to native code."""
        if uniforms is None:
            return
        self._uniforms = np.array([row.peek(count) for row in uniforms], dtype=np.float32)
        self._num_used[:] = 0
        self._batch.num_uniforms, self._batch.num_used = count, self._num_used.ctypes.data
        self._batch.uniforms = self._uniforms.ctypes.data

    def _set_copies(self, choice: CopyChoice) -> None:
        """Pass the copied tokens of the next round to native code."""
        self._batch.num_copied = self._batch.copied = None
        if choice.num_draft_tokens:
            self._num_copied = np.array([len(tokens) for tokens in choice.drafts], dtype=np.int64)
            self._copied = np.zeros((len(choice.drafts), self._output.max_speculative_tokens), dtype=np.int64)
            for row, tokens in enumerate(choice.drafts):
                self._copied[row, : len(tokens)] = tokens
            self._batch.num_copied, self._batch.copied = self._num_copied.ctypes.data, self._copied.ctypes.data

    def _update_lengths(self) -> None:
        """Set the caches' lengths to those that native code left."""
        for cache, lengths in self._caches:
            cache.advance([new - old for new, old in zip(lengths.tolist(), cache.lengths, strict=True)])

    def _results(self, count: int, choice: CopyChoice) -> list[VerifiedRound]:
        drafts, num_draft_tokens, num_accepted, next_tokens, num_confidences, confidences, seconds = (
            self._arrays[name][:count].tolist() for name in (*_INT_OUTPUTS, *_REAL_OUTPUTS)
        )
        return [
            VerifiedRound(
                [row[:num] for row, num in zip(drafts[index], num_draft_tokens[index], strict=True)],
                [row[:num] for row, num in zip(confidences[index], num_confidences[index], strict=True)],
                list(zip(num_accepted[index], next_tokens[index], strict=True)),
                seconds[index][0],
                seconds[index][1],
                choice,
            )
            for index in range(count)
        ]

    def _ensure_blocks(self, sizes: Iterable[int]) -> None:
        """Make the missing blocks of so many positions, and enter them into the table for native code."""
        distributions = self._own_distributions if self._chain is None else self._chain.distributions
        if distributions is not self._distributions:  # they were reallocated
            self._distributions, self._verify_blocks = distributions, {}
            self._table = (ctypes.c_void_p * len(self._table))()
        if distributions is not None:
            self._batch.distributions, self._batch.vocab_size = distributions.data_ptr(), distributions.shape[-1]
        for num_positions in sizes:
            if num_positions not in self._verify_blocks:
                block = self._blocks(num_positions, distributions)
                assert block is not None
                self._verify_blocks[num_positions], self._table[num_positions] = block, ctypes.addressof(block.native)
