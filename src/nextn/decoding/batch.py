"""Sequences that decode together: prefill, rounds in torch or native, joining and leaving between rounds."""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nextn.cache.kv_cache import KVCache
from nextn.decoding.drafter import Drafter
from nextn.decoding.records import BatchSequence, DraftResult, Observer, Round, SequenceRound
from nextn.decoding.torch_rounds import TorchRounds
from nextn.model.trunk import TrunkOutput
from nextn.runtime.protocols import DecodingHead, DecodingTrunk, DraftChain, RoundsStart, WholeRounds
from nextn.settings import Settings
from nextn.speculative.copy_choice import CopyChoice, CopyRun
from nextn.speculative.copy_drafts import CopyDrafts
from nextn.speculative.draft_policy import NO_DRAFTS, DraftLength
from nextn.speculative.sampling import ragged
from nextn.speculative.verification import VerifiedRound

_MAX_AHEAD_S = 0.04  # seconds of rounds that may be computed before the caller reads them: streams still look smooth
# While nothing is drafted, the head leaves positions for later: the trunk's states there are kept, at most for
# MAX_DEFERRED of a sequence. A round that drafts begins with at most MAX_PENDING, which fit one pass of the head.
MAX_PENDING, MAX_DEFERRED = 64, 512
_FINISH = ("eos", "stop", "length", "context")  # the reason that is given where several apply


class DecodingBatch(TorchRounds):
    """The state of one decode. Row r of every tensor is `sequences[r]`; finished sequences leave by themselves."""

    def __init__(
        self,
        trunk: DecodingTrunk,
        head: DecodingHead | None,
        sequences: Sequence[BatchSequence],
        settings: Settings,
        draft_length: DraftLength,
        *,
        observer: Observer | None = None,
        make_drafter: Callable[..., Drafter] = Drafter,
    ) -> None:
        """Create a batch of sequences, whose tokens are the prompts, which are not processed yet.

        The head may be None if settings.num_speculative_tokens is 0. Of max_tokens, eos and seed, those of each
        sequence count. `observer` is called with an Event for each pass and sequence, `make_drafter` like `Drafter`.
        """
        self.trunk, self.settings, self.draft_length, self.observer = trunk, settings, draft_length, observer
        self.sequences = list(sequences)
        for sequence in self.sequences:
            sequence.copies = CopyDrafts(sequence.tokens) if settings.num_copy_tokens else None
        self.cache = trunk.cache(len(sequences))
        self.seen = self._seen() if settings.sampling.needs_seen else None
        self.verifier = trunk.verifier(settings.sampling, block_verification=settings.block_verification)
        self.drafter = (
            None if head is None or not settings.num_speculative_tokens else self._drafter(make_drafter, head)
        )
        self.native: WholeRounds | None = None
        self.queued: deque[VerifiedRound] = deque()  # native rounds that were computed and not yet emitted
        self.max_ahead_s = _MAX_AHEAD_S  # seconds of rounds that may be computed before the caller reads them
        self._round_s = self.max_ahead_s  # seconds of the last round; at first so long that a call runs one round
        self._overhead_s = 0.0  # of Python, per native round
        self.num_prefilled = 0  # where the next chunk of the prompts starts; may be beyond the end of one
        # Per sequence, the trunk's states at the last D positions of the last chunk, for D MTP layers. Layer k needs
        # the token k positions later, so the head's caches cannot hold these positions yet.
        self.tails: list[Tensor] = []
        self._last: dict[int, Tensor] = {}  # final_hidden of the last position of prompts that are complete

    def prefill(self) -> Round:
        """Process the prompts and return the first round, which has no drafts."""
        started = time.perf_counter()
        self.prefill_prompts()
        return self.first_round(started)

    def prefill_prompts(self) -> None:
        """Process all of the prompts; `first_round` or `join` is next."""
        while not self.prefill_chunk(self.settings.chunk):
            pass

    def prefill_chunk(self, num_positions: int) -> bool:
        """Run the next positions of the prompts through trunk and head; return whether all prompts are complete."""
        num_positions = min(num_positions, self.trunk.max_block_size or num_positions)
        start = self.num_prefilled
        parts = [sequence.tokens[start : start + num_positions] for sequence in self.sequences]
        counts = list(map(len, parts))
        self._notify("prefill", None, parts, self.cache, "")
        hidden = self.trunk(ragged(parts, torch.long), self.cache)
        self.cache.commit(counts)
        self._on_prompt(hidden, parts)
        for row, sequence in enumerate(self.sequences):
            if counts[row] and start + counts[row] == len(sequence.tokens):
                self._last[row] = hidden.final_hidden[row, counts[row] - 1].clone()  # the next pass may write there
        if self.drafter is not None:
            size = self.drafter.head.num_modules
            self.tails = [
                states[max(0, count - size) : count].clone()
                for states, count in zip(hidden.head_input, counts, strict=True)
            ]
            self.drafter.add(hidden.head_input, counts)
            if self.draft_length.plan().max_speculative_tokens or self.drafter.num_pending >= MAX_DEFERRED:
                self.drafter.prefill(self._tokens)
        self.num_prefilled = start + num_positions
        return len(self._last) == len(self.sequences)

    def resume_prefill(self, num_positions: int, tails: Sequence[Tensor]) -> None:
        """Continue after prompt positions that the caches hold already, with the trunk's states at the last of them."""
        self.num_prefilled = num_positions
        if self.drafter is not None:
            self.drafter.resume(tails, [num_positions] * len(tails))
            for cache in self.drafter.caches:
                cache.rollback_to([num_positions - len(tail) for tail in tails])

    def first_round(self, started: float) -> Round:
        """Sample the first token of each sequence, after its last prompt position."""
        final_hidden = torch.stack([self._last.pop(row) for row in range(len(self.sequences))])
        empty = DraftResult.empty(len(self.sequences))
        verification = self._verify(self.trunk.predict(final_hidden[:, None]), empty)
        return self._emit(
            VerifiedRound(empty.drafts, empty.confidences, verification, 0.0, time.perf_counter() - started)
        )

    def round(self) -> Round:
        """Draft and verify once, for all sequences."""
        started = time.perf_counter()
        if not self.queued:
            choice = self._choose()
            self._prepare_rounds(choice)
            if self.native is None:
                self.queued.append(self.torch_round(choice))
            else:
                self._run_native(self.native, choice, started)
        verified = self.queued.popleft()
        self._learn(verified)
        return self._emit(verified)

    def join(self, other: "DecodingBatch") -> None:
        """Take over the sequences of another batch with the same settings; the prompts of both are complete.

        Both have had their first round, or neither.
        """
        assert self.sequences
        assert not self.queued
        assert not other.queued
        self._leave_native()
        other._leave_native()
        self._last |= {len(self.sequences) + row: state for row, state in other._last.items()}
        self.sequences += other.sequences
        self.cache = self.cache.joined(other.cache)
        if self.drafter is not None and other.drafter is not None:
            self.drafter.append(other.drafter)
        if self.seen is not None and other.seen is not None:
            self.seen = torch.cat([self.seen, other.seen])

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these sequences (indices), in any order: the last ones take the places of those that leave."""
        if len(rows) == len(self.sequences):
            return
        self._leave_native()
        rows = _compacted(rows)
        self.sequences = [self.sequences[row] for row in rows]
        if rows:
            self.cache.select(rows)
            if self.drafter is not None:
                self.drafter.select(rows)
            self.seen = None if self.seen is None else self.seen[list(rows)]

    @property
    def num_cache_bytes(self) -> int:
        """Bytes of memory that its caches take at most."""
        return sum(cache.num_bytes for cache in self._caches)

    def limit_caches(self, num_positions: int) -> None:
        """Reserve no memory beyond this many positions per sequence."""
        for cache in self._caches:
            cache.limit(num_positions)

    def shrink(self) -> None:
        """Give back the cache memory of sequences that left."""
        assert not self.queued
        self._leave_native()
        for cache in self._caches:
            cache.shrink()

    @property
    def _caches(self) -> list[KVCache]:
        return [self.cache, *(() if self.drafter is None else self.drafter.caches)]

    def _on_prompt(self, hidden: TrunkOutput, parts: Sequence[Sequence[int]]) -> None:
        """Called after each pass over the prompts' next positions, while the trunk can still predict from them."""

    def _choose(self) -> CopyChoice:
        """Choose what the next round drafts: copies of each sequence's own text, or what the head drafts."""
        if not self.settings.num_copy_tokens:
            return CopyChoice(((),) * len(self.sequences))
        limits = self._draft_limits(self.settings.num_copy_tokens)
        copies = [sequence.copies for sequence in self.sequences]
        runs = [CopyRun() if own is None else own.run(limit) for own, limit in zip(copies, limits, strict=True)]
        return self.draft_length.choose(runs)

    def _learn(self, verified: VerifiedRound) -> None:
        seconds = verified.draft_s + verified.verify_s + self._overhead_s
        counts = [num_accepted for num_accepted, _ in verified.verification]
        copied = verified.choice.drafts or ((),) * len(counts)
        parts = zip(self.sequences, verified.confidences, verified.drafts, copied, counts, strict=True)
        for sequence, confidences, drafts, copy, num_accepted in parts:
            if copy and sequence.copies is not None:
                sequence.copies.learn(len(copy), num_accepted)
            elif confidences:  # else a sequence at its last token, which had nothing to draft
                self.draft_length.learn(confidences, num_draft_tokens=len(drafts), num_accepted=num_accepted)
        longest = verified.choice.num_draft_tokens
        if longest and not any(verified.confidences):
            self.draft_length.observe_copies(longest, seconds)
        elif longest <= max(map(len, verified.confidences), default=0):
            if not any(verified.confidences):  # a baseline round of any batch size
                self.draft_length.learn([], num_draft_tokens=0, num_accepted=0)
            self.draft_length.observe(sum(counts) + len(counts), seconds)

    def _prepare_rounds(self, choice: CopyChoice) -> None:
        """Enter native rounds where possible; before rounds that draft, let the head process what it has put off."""
        drafter = self.drafter
        is_drafting = drafter is not None and choice.uses_head and self.draft_length.plan().max_speculative_tokens > 0
        num_positions = 1 + choice.num_draft_tokens
        if self.native is not None and (
            not self.native.has_room(num_positions) or (is_drafting and not self.native.can_draft)
        ):
            self._leave_native()
        if self.native is None:
            if drafter is not None and (is_drafting or drafter.num_pending >= MAX_DEFERRED):
                drafter.catch_up(self._tokens, MAX_PENDING)
            self.native = self._native_rounds(is_drafting)

    def _leave_native(self) -> None:
        if self.native is not None and self.drafter is not None:
            pending = self.native.pending()
            if not self.native.can_draft:  # they are those of its rounds only
                pending = [torch.cat(both) for both in zip(self.drafter.pending, pending, strict=True)]
            self.drafter.resume(pending, self.cache.lengths)
        self.native = None

    def _run_native(self, native: WholeRounds, choice: CopyChoice, started: float) -> None:
        """Run as many native rounds as fit `max_ahead_s` and queue them.

        Only one at a time with stop strings, because a stop string may end its sequence, and where each round may copy.
        """
        plan = NO_DRAFTS if self.drafter is None or not choice.uses_head else self.draft_length.plan()
        is_single = self.settings.num_copy_tokens or any(sequence.stop is not None for sequence in self.sequences)
        num_rounds = 1 if is_single else int(self.max_ahead_s / self._round_s)
        if self.drafter is not None:
            num_rounds = min(num_rounds, self.draft_length.rounds_unchanged(len(self.sequences)))
        k = self._within_block(min(plan.max_speculative_tokens, self.settings.num_speculative_tokens))
        uniforms = None if self._is_greedy else self._uniforms
        self.queued.extend(native.run(plan, k, uniforms, max_rounds=max(1, num_rounds), choice=choice))
        self._round_s = self.queued[-1].draft_s + self.queued[-1].verify_s
        native_s = sum(each.draft_s + each.verify_s for each in self.queued)
        self._overhead_s = max(0.0, time.perf_counter() - started - native_s) / len(self.queued)

    def _native_rounds(self, is_drafting: bool) -> WholeRounds | None:
        """Native rounds from here on, where nothing needs to be observed or changed between them."""
        drafter = self.drafter
        if self.observer is not None or self.seen is not None or (drafter is not None and drafter.chain is None):
            return None
        if len({sequence.eos for sequence in self.sequences}) > 1:
            return None
        if drafter is None:
            return self._rounds_of(None, ())
        rounds = self._rounds_of(drafter.chain, drafter.pending)
        if rounds is None and not is_drafting:  # too many positions for the head now: rounds that only collect states
            rounds = self._rounds_of(None, [states[:0] for states in drafter.pending])
        return rounds

    def _rounds_of(self, chain: DraftChain | None, pending: Sequence[Tensor]) -> WholeRounds | None:
        settings = self.settings
        start = RoundsStart(
            chain=chain,
            tokens=self._tokens,
            pending=pending,
            max_speculative_tokens=0 if chain is None else settings.num_speculative_tokens,
            max_copy_tokens=settings.num_copy_tokens,
            remaining=[sequence.remaining for sequence in self.sequences],
            eos=self.sequences[0].eos,
        )
        return self.trunk.rounds(self.cache, settings.sampling, start, block_verification=settings.block_verification)

    def _emit(self, verified: VerifiedRound) -> Round:
        out, drafts, copied = [], verified.drafts, verified.choice.drafts or ((),) * len(verified.drafts)
        for row, (num_accepted, next_token) in enumerate(verified.verification):
            sequence = self.sequences[row]
            emitted = [*drafts[row][:num_accepted], next_token]
            sequence.tokens += emitted
            emitted, finish = self._append(sequence, emitted)
            if len(emitted) <= num_accepted:  # cut: drafts beyond the end do not count
                num_accepted, drafts[row] = len(emitted), drafts[row][: len(emitted)]
            part = tuple(drafts[row]), num_accepted, tuple(emitted), finish, bool(copied[row])
            out.append(SequenceRound(sequence.row, *part))
        if self.seen is not None:
            self.seen = self._seen()
        self.keep([row for row, sequence_round in enumerate(out) if sequence_round.finish is None])
        return Round(tuple(out), verified.draft_s, verified.verify_s)

    def _append(self, sequence: BatchSequence, emitted: list[int]) -> tuple[list[int], str | None]:
        """Append the new tokens to `sequence.new`, cut where the sequence ends; return (those kept, reason or None)."""
        before = len(sequence.new)
        ends = [(index + 1, "eos") for index, token in enumerate(emitted) if token in sequence.eos]
        new = sequence.new
        new += emitted
        ends.append((sequence.max_tokens - before, "length"))
        if self.trunk.max_length is not None and len(sequence.tokens) >= self.trunk.max_length:
            ends.append((len(emitted) - (len(sequence.tokens) - self.trunk.max_length), "context"))
        if sequence.stop is not None and (count := sequence.stop(new)) is not None:
            ends.append((count - before, "stop"))
        end, reason = min(ends, key=lambda each: (each[0], _FINISH.index(each[1])))
        if end > len(emitted):
            return emitted, None
        del new[before + end :]
        return emitted[: max(end, 0)], reason


def _compacted(rows: Sequence[int]) -> list[int]:
    """Order these indices so that as few as possible move, and each to a place before its own."""
    kept = {row for row in rows if row < len(rows)}
    moved = iter(sorted(set(rows) - kept))
    return [row if row in kept else next(moved) for row in range(len(rows))]
