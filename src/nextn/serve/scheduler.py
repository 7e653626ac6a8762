"""Continuous batching: between rounds, prompts are prefilled in chunks, and sequences join and leave batches.

Sequences with the same `Group` form one batch. Batches that need only the argmax use native rounds. The text of a
sequence does not depend on the others: native kernels give a row the same bits whatever other rows there are, and each
sequence has its own random numbers.
"""

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from nextn.runtime.backend import Backend
from nextn.serve.prefix_cache import PrefixCache
from nextn.serve.request import EngineStats
from nextn.serve.served_batch import ServedBatch, ServedSequence
from nextn.serve.token_sampler import TokenSampler
from nextn.speculative.draft_policy import DraftLength, FixedLength
from nextn.speculative.measured_length import MeasuredLength

CHUNKS = (64, 32, 16)  # positions of a prefill pass; all divide a block of the prefix cache
_CHUNK_TIME_DECAY = 0.98  # of the measured time of a chunk size, with each later chunk
_AHEAD_S, _AHEAD_PER_SEQUENCE_S = 0.008, 0.002  # seconds of rounds that run before their tokens are sent


class Group(NamedTuple):
    """The settings that all sequences of a batch share."""

    is_argmax: bool  # whether tokens are chosen by argmax alone
    num_speculative_tokens: int  # K
    adaptive: bool  # whether the number of drafts adapts
    num_copy_tokens: int  # the most copied tokens of a round

    @classmethod
    def of(cls, limits: "SchedulerLimits", *, is_argmax: bool) -> "Group":
        """Return the group of requests that do not set K; the limits' K is 0 without a head."""
        k, copies = limits.num_speculative_tokens, limits.num_copy_tokens
        return cls(is_argmax, k, limits.adaptive and (k > 0 or copies > 0), copies)


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits that are fixed at startup."""

    max_num_seqs: int = 16  # sequences that are prefilled or decoded at once
    max_model_len: int = 4096  # positions of a sequence, including the prompt
    num_speculative_tokens: int = 4  # K of requests that do not set it
    num_copy_tokens: int = 0  # the most tokens that a round of such requests copies from a sequence's own text
    adaptive: bool = True  # draft fewer tokens for such requests if that is faster
    prefix_bytes: int = 0  # memory for the prefix cache; 0: no prefix cache
    cache_bytes: float = math.inf  # memory for the caches of sequences


class WaitingQueue:
    """Sequences in the order in which they are admitted.

    A request with many choices or prompts must not delay the others: a new one waits for at most one sequence of each
    earlier request. The sequences of one request keep their order.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[object, deque[ServedSequence]] = OrderedDict()  # the next one first

    def __len__(self) -> int:
        return sum(map(len, self._requests.values()))

    def append(self, sequence: ServedSequence) -> None:
        self._requests.setdefault(request_of(sequence), deque()).append(sequence)

    def pop(self) -> ServedSequence:
        """Remove and return the sequence whose turn it is."""
        request, sequences = self._requests.popitem(last=False)
        sequence = sequences.popleft()
        if sequences:
            self._requests[request] = sequences  # after all others
        return sequence

    def pop_cancelled(self) -> list[ServedSequence]:
        """Remove and return the sequences whose clients have disconnected."""
        cancelled = [each for sequences in self._requests.values() for each in sequences if each.is_cancelled]
        for sequence in cancelled:
            sequences = self._requests[request_of(sequence)]
            sequences.remove(sequence)
            if not sequences:
                del self._requests[request_of(sequence)]
        return cancelled


def request_of(sequence: ServedSequence) -> object:
    """Return what identifies the API request of a sequence."""
    parent = sequence.request.parent
    return sequence if parent is None else parent


class DraftPolicies:
    """The number of drafts of each group: K, or, if it adapts, the one that is expected to be the fastest."""

    def __init__(self) -> None:
        self._measured: dict[Group, MeasuredLength] = {}

    def policy(self, group: Group, num_sequences: int) -> DraftLength:
        """Return the policy of a group that has this many sequences."""
        return self.measured(group).at(num_sequences) if group.adaptive else FixedLength(group.num_speculative_tokens)

    def expected(self, group: Group, num_sequences: int) -> FixedLength:
        """Return the fastest number of drafts so far, for a group that will have this many sequences."""
        best = self.measured(group).best(num_sequences) if group.adaptive else group.num_speculative_tokens
        return FixedLength(best)

    def measured(self, group: Group) -> MeasuredLength:
        """Return the policy, with all measurements, of a group whose number of drafts adapts."""
        if group not in self._measured:
            self._measured[group] = MeasuredLength(group.num_speculative_tokens, group.num_copy_tokens)
        return self._measured[group]


class Scheduler:
    """Waiting, prefilling and running sequences. Not thread-safe: everything runs in the engine's thread."""

    def __init__(
        self,
        backend: Backend,
        limits: SchedulerLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        has_arrivals: Callable[[], bool] = lambda: False,
        policies: DraftPolicies | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        """Create an idle scheduler, with the policies of earlier measurements and an empty prefix cache, if given.

        `has_arrivals` returns whether sequences have arrived that are not in `waiting` yet; rounds then end early.
        """
        self.limits = limits if backend.head is not None else replace(limits, num_speculative_tokens=0)
        self._backend, self._clock, self._has_arrivals = backend, clock, has_arrivals
        self._policies = policies or DraftPolicies()
        self.waiting = WaitingQueue()
        self._prefilling: deque[ServedBatch] = deque()
        self._running: dict[Group, ServedBatch] = {}
        self._takes_oldest = False  # whether the last chunk belonged to the oldest prompt
        self._round_s = 0.0  # time of the last step's rounds
        with torch.inference_mode(), backend.trunk.pass_context():
            self.prefix_cache = prefix_cache or PrefixCache.of(backend, limits.prefix_bytes)
        largest = backend.trunk.max_block_size or CHUNKS[0]
        self._chunk_s = {size: 0.0 for size in CHUNKS if size <= largest}  # seconds of a pass over this many positions

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + sum(len(batch.sequences) for batch in self._running.values())

    @property
    def num_cache_bytes(self) -> int:
        """Upper bound of the bytes that the caches of sequences take."""
        return sum(batch.num_cache_bytes for batch in self._batches)

    @property
    def _batches(self) -> list[ServedBatch]:
        return [*self._prefilling, *self._running.values()]

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self._prefilling or self._running)

    def step(self) -> None:
        """Run rounds of every group, then prefill prompts; emit the new tokens."""
        with torch.inference_mode(), self._backend.trunk.pass_context():
            self._drop_cancelled()
            self._admit()
            started = self._clock()
            for group, batch in list(self._running.items()):
                self._run(group, batch)
            self._bound_memory()
            self._round_s = self._clock() - started
            self._prefill()

    def restarted(self) -> "Scheduler":
        """Return an idle scheduler with the same backend, limits and policies; its prefix cache starts empty."""
        return Scheduler(
            self._backend,
            self.limits,
            clock=self._clock,
            has_arrivals=self._has_arrivals,
            policies=self._policies,
            prefix_cache=None if self.prefix_cache is None else self.prefix_cache.emptied(),
        )

    def stats(self) -> EngineStats:
        limits, prefix = self.limits, self.prefix_cache
        return EngineStats(
            num_running=self.num_running,
            num_waiting=len(self.waiting),
            cache_positions=sum(sum(batch.cache.lengths) for batch in self._batches),
            max_cache_positions=limits.max_num_seqs * limits.max_model_len,
            prefix_positions=0 if prefix is None else prefix.num_positions,
            max_prefix_positions=0 if prefix is None else prefix.max_positions,
            prefix_queries=0 if prefix is None else prefix.num_queries,
            prefix_hits=0 if prefix is None else prefix.num_hits,
        )

    def _drop_cancelled(self) -> None:
        for sequence in self.waiting.pop_cancelled():
            sequence.flush("cancelled")
        for batch in self._batches:
            batch.drop_cancelled()
        self._drop_empty()

    def _drop_empty(self) -> None:
        self._prefilling = deque(batch for batch in self._prefilling if batch.sequences)
        self._running = {group: batch for group, batch in self._running.items() if batch.sequences}

    def _bound_memory(self) -> None:
        """Let batches free the memory of finished sequences if all caches together exceed the limit."""
        if self.num_cache_bytes > self.limits.cache_bytes:
            for batch in self._batches:
                with batch.isolated():
                    batch.shrink()
            self._drop_empty()

    def _admit(self) -> None:
        while self.waiting and self.num_running < self.limits.max_num_seqs:
            sequence = self.waiting.pop()
            sequence.has_place = True
            group = self._group(sequence)
            # If batches of the coming size do not draft, the head defers the prompt.
            num_soon = min(self.num_running + 1 + len(self.waiting), self.limits.max_num_seqs)
            length = self._policies.expected(group, num_soon)
            batch = ServedBatch(
                self._backend.trunk,
                self._backend.head,
                sequence,
                num_speculative_tokens=group.num_speculative_tokens,
                num_copy_tokens=group.num_copy_tokens,
                length=length,
            )
            batch.limit_caches(self.limits.max_model_len)
            # Positions that are not processed again would have no log probabilities.
            if self.prefix_cache is not None and not sequence.request.prompt_logprobs:
                with batch.isolated():
                    sequence.cached_tokens = self.prefix_cache.restore(batch)
            if batch.sequences:
                self._prefilling.append(batch)

    def _run(self, group: Group, batch: ServedBatch) -> None:
        batch.draft_length = self._draft_length(group, len(batch.sequences))
        extra_s = 0.0 if self._prefilling else _AHEAD_PER_SEQUENCE_S * self.num_running
        batch.run(_AHEAD_S + extra_s, is_interrupted=self._has_arrivals)
        if not batch.sequences:
            del self._running[group]

    def _draft_length(self, group: Group, num_sequences: int) -> DraftLength:
        """Return the policy of a batch; no drafts while it grows to a size that does not draft.

        Each sequence that joins would let the head process a prompt that it need not process later.
        """
        joining = [batch for batch in self._prefilling if batch.sequences and self._group(batch.sequences[0]) == group]
        if joining and not group.num_copy_tokens:
            later = self._policies.expected(group, num_sequences + len(joining))
            if later.num_speculative_tokens == 0:
                return later
        return self._policies.policy(group, num_sequences)

    def _prefill(self) -> None:
        """Process chunks of the prompts, for about as long per prompt as the last rounds took.

        With more prompts, running sequences wait longer, because the first token of a request matters more.
        """
        started, budget = self._clock(), len(self._prefilling) * max(self._round_s, _AHEAD_S)
        while self._prefilling:
            batch = self._next_prefill()
            if self._chunk(batch, budget - (self._clock() - started)):
                self._prefilling.remove(batch)
                self._start(batch)
            if self._clock() - started + min(self._chunk_s.values()) > budget:
                break

    def _next_prefill(self) -> ServedBatch:
        """Alternate between the oldest prompt and the one with the fewest tokens left, so that none starves."""
        self._takes_oldest = not self._takes_oldest
        if self._takes_oldest:
            return self._prefilling[0]
        return min(self._prefilling, key=lambda batch: len(batch.sequences[0].tokens) - batch.num_prefilled)

    def _chunk(self, batch: ServedBatch, budget: float) -> bool:
        """Process the next chunk of a prompt, as large as the time permits; return whether the prefill is over."""
        sizes = [size for size in self._chunk_s if not batch.num_prefilled % size]  # chunks end at block boundaries
        fitting = [size for size in sizes if not self._running or self._chunk_s[size] <= budget]
        size = max(fitting, default=min(sizes))
        started, is_last = self._clock(), batch.num_prefilled + size <= len(batch.sequences[0].tokens)
        is_over = False
        with batch.isolated():
            is_over = batch.prefill_chunk(size)
            if self.prefix_cache is not None:
                self.prefix_cache.store(batch)
        if is_last:
            # Times of other sizes decay, so that a size that was slow once is tried again later.
            self._chunk_s = {each: seconds * _CHUNK_TIME_DECAY for each, seconds in self._chunk_s.items()}
            self._chunk_s[size] = self._clock() - started
        return is_over or not batch.sequences  # a sequence that failed has left its batch

    def _start(self, batch: ServedBatch) -> None:
        """Emit the first token, then let the sequence join the batch of its group."""
        if batch.sequences:
            batch.start()
        if not batch.sequences:
            return
        group = self._group(batch.sequences[0])
        if group in self._running:
            with self._running[group].isolated(batch):
                self._running[group].join(batch)
            self._drop_empty()
        else:
            self._running[group] = batch
        self._bound_memory()

    def _group(self, sequence: ServedSequence) -> Group:
        is_argmax, requested = TokenSampler.is_argmax(sequence.request), sequence.request.num_speculative_tokens
        if requested is None:
            return Group.of(self.limits, is_argmax=is_argmax)
        return Group(is_argmax, 0 if self._backend.head is None else requested, False, 0)
