"""Rounds: draft K tokens with the head, verify them in one trunk pass, emit the accepted ones and one bonus token.

Works on token ids and knows no tokenizer, chat template or stop string. Every other way to decode is built on `rounds`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.cache.kv_cache import KVCache
from nextn.decoding.drafter import Drafter, DraftResult
from nextn.errors import ConfigError
from nextn.model.head import Head
from nextn.model.trunk import Trunk
from nextn.runtime.native.locks import LOCK
from nextn.runtime.native.rounds import NativeRounds
from nextn.runtime.protocol import DecodingHead, DecodingTrunk
from nextn.runtime.torch_backend import TorchHead, TorchTrunk
from nextn.settings import Contract as Contract
from nextn.settings import Settings as Settings
from nextn.speculative.draft_policy import NO_DRAFTS, PROBE_INTERVAL, DraftLength, FixedLength
from nextn.speculative.sampling import Prediction, Uniforms, VerifiedRound, accept_greedy, ragged

_MAX_AHEAD_S = 0.04  # seconds of rounds that may be computed before the caller reads them


@dataclass(frozen=True)
class SequenceRound:
    """One sequence's share of a round."""

    row: int  # index of its prompt
    drafts: tuple[int, ...]
    num_accepted: int
    emitted: tuple[int, ...]  # the accepted drafts, then the bonus token, cut where the sequence ended
    finish: str | None = None  # None while the sequence continues, else `eos`, `stop`, `length` or `context`


@dataclass(frozen=True)
class Round:
    """One round of the batch. Times are wall seconds, for all sequences together."""

    rows: tuple[SequenceRound, ...]  # of the sequences that took part
    draft_s: float
    verify_s: float


@dataclass(frozen=True)
class Event:
    """One forward pass over a block of positions of one sequence, for `trace`."""

    phase: str  # prefill, draft or verify
    module: int | None  # index in the head; None: the trunk
    row: int  # index of the prompt
    start: int  # position of the first token
    tokens: tuple[int, ...]
    hidden: str  # the head's hidden input: `h` the trunk's true states, `g<k>` the next_hidden of depth k


Stop = Callable[[int, Sequence[int]], int | None]
Observer = Callable[[Event], None]


def rounds(
    trunk: Trunk | DecodingTrunk,
    head: Head | DecodingHead | None,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    length: DraftLength | None = None,
    stop: Stop | None = None,
    observer: Observer | None = None,
    seed_offsets: Sequence[int] | None = None,
    make_drafter: Callable[..., Drafter] = Drafter,
) -> Iterator[Round]:
    """Decode all prompts as one batch; yield one Round per trunk pass, the first after the prefill (without drafts).

    Args:
        trunk: That of a backend (`backend_for`), or the module, which then runs in torch.
        head: The same; may be None if settings.drafts is 0.
        prompts: Token ids.
        settings: How to decode.
        length: Policy for the number of drafts per round, at most settings.drafts; None: always settings.drafts,
            ended early only by settings.p_min.
        stop: stop(row, new_tokens) -> the number of new tokens to keep, or None to continue.
        observer: Called with an Event for each pass and sequence.
        seed_offsets: Per prompt, what is added to the seed of its random numbers; None: its index.
        make_drafter: Makes what drafts, with the arguments of `Drafter`.

    Raises:
        ConfigError: for an empty prompt, one that does not fit the context, token ids outside the vocabulary, or drafts
            without a head.
    """
    passes: DecodingTrunk = TorchTrunk(trunk) if isinstance(trunk, Trunk) else trunk
    head_passes: DecodingHead | None = TorchHead(head) if isinstance(head, Head) else head
    _check(passes, head_passes, prompts, settings)
    length = length or FixedLength(settings.drafts, settings.p_min)
    seed_offsets = range(len(prompts)) if seed_offsets is None else seed_offsets
    with LOCK:
        # A thread's first use of torch adopts the current thread count, and a native round in another thread sets it.
        torch.get_num_threads()
    with passes.single_threaded_torch():
        batch = _Batch(
            passes,
            head_passes,
            prompts,
            settings,
            length,
            stop=stop,
            observer=observer,
            seed_offsets=seed_offsets,
            make_drafter=make_drafter,
        )
    # Not across a yield: the mode is thread-local, and several decodes may interleave in one thread and the runtime.
    with torch.inference_mode(), passes.single_threaded_torch():
        fixed = isinstance(length, FixedLength) and not length.p_min
        prepare(passes, head_passes, len(prompts), settings.drafts, fixed=fixed)
        first = batch.prefill()
    yield first
    while batch.rows:
        with torch.inference_mode(), passes.single_threaded_torch():
            result = batch.round()
        yield result


def prepare(trunk: DecodingTrunk, head: DecodingHead | None, rows: int, drafts: int, *, fixed: bool = False) -> None:
    """Record the block sizes of rounds of up to `drafts` drafts (fixed: mostly exactly so many), so that none waits."""
    trunk.prepare(rows, [1, drafts + 1] if fixed else range(1, drafts + 2), exact=fixed)
    if head is not None and drafts:
        # Plain rounds between two that draft leave their positions for the head to refresh.
        head.prepare(rows, range(1, drafts + 2 + (0 if fixed else PROBE_INTERVAL)))


def _check(
    trunk: DecodingTrunk, head: DecodingHead | None, prompts: Sequence[Sequence[int]], settings: Settings
) -> None:
    if not prompts:
        raise ConfigError("no prompt was given; expected at least one")
    if settings.drafts and head is None:
        raise ConfigError(f"drafts = {settings.drafts}, but the checkpoint has no head; use drafts = 0 or add a head")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {row} is empty; expected at least one token")
        if trunk.max_length is not None and len(prompt) >= trunk.max_length:
            raise ConfigError(
                f"prompt {row} has {len(prompt)} tokens; the context holds {trunk.max_length}, of which at least one "
                "must be new"
            )
        if not 0 <= min(prompt) <= max(prompt) < trunk.vocab_size:
            raise ConfigError(
                f"prompt {row} has token ids {min(prompt)}..{max(prompt)}; "
                f"the model's vocabulary is 0..{trunk.vocab_size - 1}: use this model's tokenizer"
            )


class _Batch:
    """The state of one decode. Row r of every list and tensor is prompt `self.rows[r]`; finished sequences leave."""

    def __init__(
        self,
        trunk: DecodingTrunk,
        head: DecodingHead | None,
        prompts: Sequence[Sequence[int]],
        settings: Settings,
        length: DraftLength,
        *,
        stop: Stop | None,
        observer: Observer | None,
        seed_offsets: Sequence[int],
        make_drafter: Callable[..., Drafter],
    ) -> None:
        self.trunk, self.settings, self.stop, self.observer = trunk, settings, stop, observer
        self.length = length
        self.rows = list(range(len(prompts)))
        self.tokens = [list(prompt) for prompt in prompts]  # all known; the trunk has seen all but the last of each
        self.new: list[list[int]] = [[] for _ in prompts]
        self.cache = trunk.cache(len(prompts))
        # One generator per sequence: its random numbers do not depend on what else is in the batch.
        self.uniforms = [Uniforms(settings.seed * 2**20 + offset) for offset in seed_offsets]
        self.seen = self._seen() if settings.sampling.needs_seen else None
        self.verifier = trunk.verifier(settings.sampling, block=settings.block)
        self.drafter = None if head is None or not settings.drafts else self._drafter(make_drafter, head)
        self.native: NativeRounds | None = None
        self.queued: deque[VerifiedRound] = deque()  # native rounds that were computed and not yet emitted
        self.round_s = _MAX_AHEAD_S  # seconds of the last of them

    def prefill(self) -> Round:
        started = time.perf_counter()
        final_hidden = self._prefill()
        empty = DraftResult.empty(len(self.rows))
        verification = self._verify(self.trunk.predict(final_hidden[:, None]), empty)
        return self._emit(
            VerifiedRound(empty.drafts, empty.confidences, verification, 0.0, time.perf_counter() - started)
        )

    def round(self) -> Round:
        verified = self._torch_round() if self.native is None else self._native_round(self.native)
        rows = zip(verified.confidences, verified.drafts, verified.verification, strict=True)
        for confidences, drafts, (num_accepted, _) in rows:
            self.length.learn(confidences, drafts=len(drafts), num_accepted=num_accepted)
        return self._emit(verified)

    def _native_round(self, native: NativeRounds) -> VerifiedRound:
        """Do the same natively; several rounds at once where none depends on what the caller does with the last."""
        if not self.queued:
            plan = NO_DRAFTS if self.drafter is None else self.length.plan()
            num_rounds = int(_MAX_AHEAD_S / self.round_s) if self.stop is None else 1
            if self.drafter is not None:
                num_rounds = min(num_rounds, self.length.rounds_unchanged(len(self.rows)))
            drafts, uniforms = min(plan.max_drafts, self._max_drafts), None if self._is_greedy else self.uniforms
            self.queued.extend(native.run(plan, drafts, uniforms, max_rounds=max(1, num_rounds)))
            self.round_s = self.queued[-1].draft_s + self.queued[-1].verify_s
        return self.queued.popleft()

    def _torch_round(self) -> VerifiedRound:
        """Draft, then verify the drafts in one pass of the trunk."""
        started = time.perf_counter()
        drafted = self._draft()
        draft_end = time.perf_counter()
        block = [[tokens[-1], *draft] for tokens, draft in zip(self.tokens, drafted.drafts, strict=True)]
        self._notify("verify", None, block, self.cache, "")
        hidden = self.trunk(ragged(block, torch.long), self.cache)
        verification = self._verify(self.trunk.read(hidden), drafted)
        num_accepted = [count for count, _ in verification]
        num_committed = [count + 1 for count in num_accepted]
        self.cache.commit(num_committed)
        if self.drafter is not None:
            num_final = self.drafter.commit(drafted.num_steps, num_accepted)
            self.drafter.add(hidden.head_input, num_committed, skip=num_final)
            if 0 < drafted.num_steps < self.drafter.head.num_modules:
                self.drafter.refresh(self.tokens)  # else the layers that did not run would fall behind
        seconds = draft_end - started, time.perf_counter() - draft_end
        return VerifiedRound(drafted.drafts, drafted.confidences, verification, *seconds)

    def _drafter(self, make_drafter: Callable[..., Drafter], head: DecodingHead) -> Drafter:
        settings, trunk = self.settings, self.trunk
        like = torch.empty(0, *trunk.hidden_shape, dtype=trunk.dtype, device=trunk.device)
        return make_drafter(
            head,
            like,
            len(self.rows),
            sampling=settings.sampling,
            sampled=settings.sampled_drafts,
            contract=settings.contract,
            on_pass=None if self.observer is None else self._notify,
        )

    def _draft(self) -> DraftResult:
        if self.drafter is None:
            return DraftResult.empty(len(self.rows))
        uniforms = None if self._is_greedy else self.uniforms
        return self.drafter.draft(self.length.plan(), self._draft_limits(), self.tokens, uniforms, self.seen)

    def _prefill(self) -> Tensor:
        """Run the prompts through trunk and head in chunks; return final_hidden [B, H] of their last positions."""
        last: dict[int, Tensor] = {}
        chunk = min(self.settings.chunk, self.trunk.max_block_size or self.settings.chunk)
        for start in range(0, max(map(len, self.tokens)), chunk):
            parts = [tokens[start : start + chunk] for tokens in self.tokens]
            counts = list(map(len, parts))
            self._notify("prefill", None, parts, self.cache, "")
            hidden = self.trunk(ragged(parts, torch.long), self.cache)
            self.cache.commit(counts)
            for row, tokens in enumerate(self.tokens):
                if counts[row] and start + counts[row] == len(tokens):
                    last[row] = hidden.final_hidden[row, counts[row] - 1].clone()  # the next pass may write there
            if self.drafter is not None:
                self.drafter.add(hidden.head_input, counts)
                self.drafter.prefill(self.tokens)
        return torch.stack([last[row] for row in range(len(self.rows))])

    def _draft_limits(self) -> list[int]:
        """The largest K of this round, per sequence, within its remaining tokens and the context."""
        limit = self._max_drafts
        if self.trunk.max_length is not None:
            limit = min(limit, self.trunk.max_length - max(map(len, self.tokens)))
        return [max(0, min(limit, remaining - 1)) for remaining in self._remaining]

    @property
    def _max_drafts(self) -> int:
        """The largest K of any round."""
        size = self.trunk.max_block_size
        return self.settings.drafts if size is None else min(self.settings.drafts, size - 1)

    @property
    def _remaining(self) -> list[int]:
        """Tokens that each sequence may still get."""
        return [self.settings.max_tokens - len(new) for new in self.new]

    @property
    def _is_greedy(self) -> bool:
        return self.settings.sampling.greedy and self.seen is None

    def _verify(self, predicted: Prediction, drafted: DraftResult) -> list[tuple[int, int]]:
        """Return (number of accepted drafts, next token) per sequence, by the trunk's prediction [B, K+1]."""
        if self._is_greedy:
            return [accept_greedy(best, drafts) for best, drafts in zip(predicted.best, drafted.drafts, strict=True)]
        uniforms = [row.take(len(drafts) + 1) for row, drafts in zip(self.uniforms, drafted.drafts, strict=True)]
        return self.verifier(predicted.logits, drafted.distributions, drafted.drafts, uniforms, seen=self.seen)

    def _native_rounds(self) -> NativeRounds | None:
        """Native rounds from here on, where nothing needs to be observed or changed between them."""
        drafter = self.drafter
        if self.observer is not None or self.seen is not None or (drafter is not None and drafter.chain is None):
            return None
        return self.trunk.rounds(
            self.cache,
            self.settings.sampling,
            block=self.settings.block,
            chain=None if drafter is None else drafter.chain,
            tokens=self.tokens,
            pending=() if drafter is None else drafter.pending,
            max_drafts=self.settings.drafts,
            remaining=self._remaining,
            eos=self.settings.eos or (),
        )

    def _emit(self, verified: VerifiedRound) -> Round:
        out, drafts = [], verified.drafts
        for row, (num_accepted, next_token) in enumerate(verified.verification):
            emitted = [*drafts[row][:num_accepted], next_token]
            self.tokens[row] += emitted
            emitted, finish = self._finish(row, emitted)
            if len(emitted) <= num_accepted:  # cut: drafts beyond the end do not count
                num_accepted, drafts[row] = len(emitted), drafts[row][: len(emitted)]
            out.append(SequenceRound(self.rows[row], tuple(drafts[row]), num_accepted, tuple(emitted), finish))
        if self.seen is not None:
            self.seen = self._seen()
        self._select([row for row, sequence in enumerate(out) if sequence.finish is None])
        if self.native is None and self.rows:
            self.native = self._native_rounds()
        return Round(tuple(out), verified.draft_s, verified.verify_s)

    def _finish(self, row: int, emitted: list[int]) -> tuple[list[int], str | None]:
        """Cut the new tokens where the sequence ends; return (tokens of this round, reason or None)."""
        before, settings = len(self.new[row]), self.settings
        ends = [(index + 1, "eos") for index, token in enumerate(emitted) if token in (settings.eos or ())]
        new = self.new[row]
        new += emitted
        ends.append((settings.max_tokens - before, "length"))
        if self.trunk.max_length is not None and len(self.tokens[row]) >= self.trunk.max_length:
            ends.append((len(emitted) - (len(self.tokens[row]) - self.trunk.max_length), "context"))
        if self.stop is not None and (count := self.stop(self.rows[row], new)) is not None:
            ends.append((count - before, "stop"))
        end, reason = min(ends)
        if end > len(emitted):
            return emitted, None
        del new[before + end :]
        return emitted[: max(end, 0)], reason

    def _select(self, indices: list[int]) -> None:
        """Keep only these sequences in the batch."""
        if len(indices) == len(self.rows):
            return
        if self.native is not None and self.drafter is not None:
            self.drafter.resume(self.native.pending(), self.cache.lengths)
        self.native = None
        for name in ("rows", "tokens", "new", "uniforms"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in indices])
        if indices:
            self.cache.select(indices)
            if self.drafter is not None:
                self.drafter.select(indices)
            self.seen = None if self.seen is None else self.seen[indices]

    def _seen(self) -> Tensor:
        """[B, V] bool: the tokens of each sequence so far, for penalties."""
        seen = torch.zeros(len(self.rows), self.trunk.vocab_size, dtype=torch.bool)
        for row, tokens in enumerate(self.tokens):
            seen[row, tokens] = True
        return seen.to(self.trunk.device)

    def _notify(
        self, phase: str, module: int | None, tokens: Sequence[Sequence[int]], cache: KVCache, hidden: str
    ) -> None:
        if self.observer is not None:
            for row, block in enumerate(tokens):
                if block:
                    self.observer(Event(phase, module, self.rows[row], cache.lengths[row], tuple(block), hidden))
