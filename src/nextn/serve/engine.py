"""The engine: a thread that runs the scheduler."""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from nextn.checkpoint.mapped_memory import return_freed_memory
from nextn.decoding.rounds import check_prompt
from nextn.decoding.text_stream import TextStream
from nextn.errors import ConfigError, QueueFullError
from nextn.evaluate.decoding_costs import measure_costs
from nextn.model.model import Model
from nextn.runtime.backend import Backend, backend_for
from nextn.serve.options import EngineOptions
from nextn.serve.prefix_cache import has_blocks, sized_caches
from nextn.serve.request import EngineStats, GenerationChunk, GenerationRequest
from nextn.serve.round_costs import MAX_COPY_ROWS, measure_round_costs
from nextn.serve.scheduler import CHUNKS, DraftPolicies, Group, Scheduler, SchedulerLimits, request_of
from nextn.serve.served_batch import ServedSequence
from nextn.speculative.draft_policy import candidate_lengths
from nextn.stats.speedup import Costs

_LOG = logging.getLogger(__name__)
_COST_CONTEXT, _COST_REPEATS = 128, 3


class ServingEngine:
    """Runs generations of one model in a thread of its own. See `request.Engine`."""

    def __init__(self, model: Model, options: EngineOptions | None = None) -> None:
        """Load the backend and start the thread; raise ConfigError if options do not fit the model or memory."""
        self.model, self.options = model, options or EngineOptions()
        self.backend = backend_for(model, self.options.backend)
        self.limits = limits_within(self.backend, self.options)
        self._costs: Costs | None = None
        self._warm_up = self._warm_up_steps() if self.options.warmup else iter(())
        self._arrivals: deque[ServedSequence] = deque()
        self._policies = DraftPolicies()
        self._scheduler = Scheduler(
            self.backend, self.limits, has_arrivals=lambda: bool(self._arrivals), policies=self._policies
        )
        self._changed = threading.Condition()
        self._open: dict[int, ServedSequence] = {}  # submitted sequences that have not ended
        self._number = 0
        self._last_parent: object | None = None  # API request of the last sequence that was submitted
        self._is_closing = self._is_closed = self._has_noted_length = self._is_warm = False
        self._stats = self._scheduler.stats()
        self._thread = threading.Thread(target=self._run, name="nextn-engine", daemon=True)
        self._thread.start()

    @property
    def max_model_len(self) -> int:
        return self.limits.max_model_len

    @property
    def context_note(self) -> str | None:
        """What to do if the memory for caches shortens the model's context; None if it does not."""
        return reduced_context_note(self.backend, self.options, self.limits.max_model_len)

    def submit(self, request: GenerationRequest, emit: Callable[[GenerationChunk], None]) -> Callable[[], None]:
        """Queue a request whose chunks `emit` gets in the engine's thread; see `Engine.submit`."""
        self._check(request)
        with self._changed:
            if self._is_closing:
                raise QueueFullError("the server is shutting down; try another one")
            self._check_queue(request.parent)
            self._number += 1
            text = TextStream(self.model.tokenizer, request.stop, skip_special_tokens=request.skip_special_tokens)
            sequence = ServedSequence.of(request, partial(self._emit, self._number, emit), text, self._number)
            room = self.limits.max_model_len - len(request.prompt)
            sequence.max_tokens = min(sequence.max_tokens, room)
            self._open[self._number] = sequence
            self._arrivals.append(sequence)
            self._changed.notify()
        return partial(self._cancel, sequence)

    def _cancel(self, sequence: ServedSequence) -> None:
        sequence.is_cancelled = True
        with self._changed:
            self._changed.notify()

    def stats(self) -> EngineStats:
        stats, costs = replace(self._stats, is_measuring=not self._is_warm), self._costs
        return stats if costs is None else replace(stats, cost_curve=tuple(costs.v), draft_cost=costs.c)

    def close(self, *, grace_s: float) -> None:
        """Stop accepting; let running sequences end within this time, then cancel them."""
        with self._changed:
            self._is_closing = True
            self._changed.wait_for(lambda: not self._open, timeout=grace_s)
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _check(self, request: GenerationRequest) -> None:
        check_prompt(self.backend.trunk, request.prompt, "the prompt")
        if len(request.prompt) >= self.limits.max_model_len:
            raise ConfigError(
                f"the prompt has {len(request.prompt)} tokens; the server's context holds {self.limits.max_model_len}, "
                "of which at least one must be new"
            )
        k = request.num_speculative_tokens
        if k is not None and not 0 <= k <= (most := self.limits.num_speculative_tokens):
            raise ConfigError(f"num_speculative_tokens = {k}; expected 0 to {most}, the K of this engine")

    def _check_queue(self, parent: object | None) -> None:
        """Raise QueueFullError for the first sequence of an API request if too many requests wait for a first place."""
        sequences = list(self._open.values())
        if parent is not None and any(parent is known for known in (self._last_parent, *map(request_of, sequences))):
            return
        placed = [sequence for sequence in sequences if sequence.has_place]
        requests = set(map(request_of, sequences))
        num_waiting = len(requests - set(map(request_of, placed)))
        num_free = max(0, self.options.max_num_seqs - len(placed))
        if num_waiting >= self.options.max_queue + num_free:
            message = f"{len(requests)} requests are running or waiting, which is the limit; try again later"
            raise QueueFullError(message)
        self._last_parent = parent

    def _emit(self, number: int, emit: Callable[[GenerationChunk], None], chunk: GenerationChunk) -> None:
        if chunk.finish is not None:
            with self._changed:
                sequence = self._open.pop(number)
                self._changed.notify_all()
            self._note_length(len(sequence.tokens))
        emit(chunk)

    def _note_length(self, num_positions: int) -> None:
        """Log the first sequence that is longer than the texts that the head was trained on."""
        note = self.model.length_note(num_positions, what="a request reached")
        if note is not None and not self._has_noted_length:
            self._has_noted_length = True
            _LOG.warning("note: %s. Later requests are not noted", note)

    def _run(self) -> None:
        while not self._is_closed:
            self._take_arrivals()
            try:
                if not self._scheduler.is_idle:
                    self._scheduler.step()
                elif next(self._warm_up, "over") == "over":
                    self._is_warm = True
                    self._wait()
            except Exception as error:  # of no particular request or batch; it must not end the server
                self._fail(error)
            self._stats = self._scheduler.stats()
        for sequence in list(self._open.values()):
            sequence.flush("cancelled")

    def _take_arrivals(self) -> None:
        with self._changed:
            for sequence in self._arrivals:
                if not sequence.is_over:
                    self._scheduler.waiting.append(sequence)
            self._arrivals.clear()

    def _wait(self) -> None:
        with self._changed:
            if not self._arrivals and not self._is_closed:
                self._changed.wait()

    def _fail(self, error: Exception) -> None:
        """End every sequence with the error, and start again with an idle scheduler."""
        _LOG.error("all generations failed", exc_info=error)
        for sequence in list(self._open.values()):
            sequence.fail(error)
        self._scheduler = self._scheduler.restarted()

    def _warm_up_steps(self) -> Iterator[None]:
        """Record the passes of rounds, and measure the costs of rounds.

        A request that arrives waits for at most one step, or, while rounds are measured, for one pass.
        """
        trunk, head, k = self.backend.trunk, self.backend.head, self.limits.num_speculative_tokens
        # The last chunk of a prompt can have any size; chunks below the smallest size run on passes of that size. After
        # rounds without drafts, the head processes up to two chunks of deferred positions at once.
        chunks = *range(CHUNKS[-1], CHUNKS[0] + 1, CHUNKS[-1] // 2), 2 * CHUNKS[0]
        for num_sequences in _warmup_order(self.limits.max_num_seqs):
            # Prompts are processed one by one. Passes over deferred positions of several sequences are recorded when
            # needed: these sizes for all batch sizes would take minutes.
            copies = [num + 1 for num in candidate_lengths(self.limits.num_copy_tokens)]
            copies = [size for size in copies if num_sequences * size <= MAX_COPY_ROWS]
            sizes = [*range(1, k + 2), *copies, *(chunks if num_sequences == 1 else ())]
            for size in sizes:
                with torch.inference_mode(), trunk.pass_context():
                    trunk.prepare(num_sequences, [size], exact=False)
                yield
            for size in sizes if head is not None and k else ():
                assert head is not None
                with torch.inference_mode(), trunk.pass_context():
                    head.prepare(num_sequences, [size])
                yield
            if k and num_sequences == 1:
                self._costs = self._measured_costs()
                yield
            yield from self._measure_rounds(num_sequences, is_argmax=True)
        for num_sequences in _warmup_order(self.limits.max_num_seqs):
            yield from self._measure_rounds(num_sequences, is_argmax=False)
        return_freed_memory()

    def _measure_rounds(self, num_sequences: int, *, is_argmax: bool) -> Iterator[None]:
        """Measure rounds if the batch size is a power of two or the largest; repeat if a request interrupts it."""
        limits, group = self.limits, Group.of(self.limits, is_argmax=is_argmax)
        if not group.adaptive or (num_sequences & (num_sequences - 1) and num_sequences != limits.max_num_seqs):
            return
        is_done = False
        while not is_done:
            costs = measure_round_costs(
                self.backend,
                num_sequences,
                group,
                max_model_len=limits.max_model_len,
                is_interrupted=self._has_other_work,
            )
            if costs is not None:
                policy = self._policies.measured(group)
                policy.costs.set(num_sequences, costs.head)
                policy.copy_costs.set(num_sequences, costs.copies)
            is_done = costs is not None or not self._has_other_work()
            yield

    def _has_other_work(self) -> bool:
        """Return whether the engine's thread has more urgent work than the warm-up."""
        return bool(self._arrivals) or self._is_closed

    def _measured_costs(self) -> Costs:
        k = self.limits.num_speculative_tokens
        return measure_costs(
            self.model,
            num_speculative_tokens=k,
            context=max(1, min(_COST_CONTEXT, self.limits.max_model_len - k - 1)),
            repeats=_COST_REPEATS,
            backend=self.options.backend,
        )


def _warmup_order(max_num_seqs: int) -> list[int]:
    """Powers of two, then the other batch sizes."""
    sizes = range(1, max_num_seqs + 1)
    return sorted(sizes, key=lambda size: (bool(size & (size - 1)), size))


_PREFIX_SHARE = 0.25  # of the cache memory, if there is a prefix cache
_DEFAULT_LENGTH = 4096  # positions per sequence, if neither the model nor the memory sets a limit


def limits_within(backend: Backend, options: EngineOptions) -> SchedulerLimits:
    """Divide the memory for caches. Raises ConfigError if it is too small."""
    total, most = int(options.cache_gb * 1e9), backend.trunk.max_length or 2**31
    per_position, per_sequence = bytes_per_sequence(backend)
    k = 0 if backend.head is None else options.num_speculative_tokens
    prefix_bytes = int(total * _prefix_share(backend))
    padding = _padding(backend, options)
    available = (total - prefix_bytes) // _rows(options) - per_sequence
    fitting = available // per_position - padding if per_position else most if available >= 0 else 0
    length = min(options.max_model_len or backend.trunk.max_length or _DEFAULT_LENGTH, most, fitting)
    if length < max(2, options.max_model_len or 2):
        raise ConfigError(
            f"{options.max_num_seqs} sequences of {options.max_model_len or 2} positions do not fit "
            f"{options.cache_gb:g} GB of caches and the model's context; {max(0, length)} positions would: use "
            "--cache-gb, --max-num-seqs or --max-model-len"
        )
    return SchedulerLimits(
        max_num_seqs=options.max_num_seqs,
        max_model_len=length,
        num_speculative_tokens=k,
        num_copy_tokens=options.num_copy_tokens,
        adaptive=options.adaptive,
        prefix_bytes=prefix_bytes,
        cache_bytes=total - prefix_bytes,
    )


def reduced_context_note(backend: Backend, options: EngineOptions, length: int) -> str | None:
    """Return a note if `length` is shorter than the model's context, with the memory that all of it takes."""
    context = options.max_model_len or backend.trunk.max_length or length
    if length >= context:
        return None
    per_position, per_sequence = bytes_per_sequence(backend)
    sequence = (context + _padding(backend, options)) * per_position + per_sequence
    needed = _rows(options) * sequence / (1 - _prefix_share(backend)) / 1e9
    return (
        f"{options.cache_gb:g} GB of caches hold {options.max_num_seqs} sequences of {length} tokens, the model's "
        f"context is {context}: --cache-gb {math.ceil(100 * needed) / 100:g} holds it, or fewer --max-num-seqs"
    )


def _prefix_share(backend: Backend) -> float:
    return _PREFIX_SHARE if has_blocks(backend) else 0.0


def _padding(backend: Backend, options: EngineOptions) -> int:
    """Return the positions by which a sequence that no longer drafts is padded to others; native buffers need none."""
    k = 0 if backend.head is None else options.num_speculative_tokens
    return 0 if backend.name == "native" else max(k, options.num_copy_tokens) + 1


def _rows(options: EngineOptions) -> int:
    """Return the number of sequences that caches must hold: one more, as it is in two caches while it joins a batch."""
    return options.max_num_seqs + 1


def bytes_per_sequence(backend: Backend) -> tuple[int, int]:
    """Return the bytes per position, and per sequence whatever its length, of the caches of trunk and MTP layers."""
    caches = sized_caches(backend)
    return sum(cache.bytes_per_position for cache in caches), sum(cache.bytes_per_state for cache in caches)
