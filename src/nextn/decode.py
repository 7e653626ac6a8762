"""Rounds: draft K tokens with the head, verify them in one trunk pass, keep a prefix, emit kept + 1 tokens.

Token ids inside: no tokenizer, chat template or stop string is known here. Every other way to decode folds `rounds`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.drafting import Drafted, Drafter
from nextn.errors import ConfigError
from nextn.fast.choose import AnyHead, AnyTrunk
from nextn.fast.locks import LOCK
from nextn.fast.rounds import FastRounds
from nextn.policy import NONE, PROBE, DraftLength, Fixed
from nextn.rollback import Cache
from nextn.sampling import Judged, Prediction, Uniforms, accept_greedy, ragged
from nextn.settings import Contract as Contract
from nextn.settings import Settings as Settings

_AHEAD = 0.04  # seconds that rounds may be run ahead of who reads them


@dataclass(frozen=True)
class RowRound:
    """One row's share of a round. emitted: kept drafts, then the trunk's own token, cut where the row ended.

    finish: None while the row goes on, else `eos`, `stop`, `length` or `context`.
    """

    row: int
    drafts: tuple[int, ...]
    kept: int
    emitted: tuple[int, ...]
    finish: str | None = None


@dataclass(frozen=True)
class Round:
    """rows: the rows that took part. draft_s, verify_s: wall seconds, for all rows together."""

    rows: tuple[RowRound, ...]
    draft_s: float
    verify_s: float


@dataclass(frozen=True)
class Event:
    """One pass over columns of one row, for `trace`.

    phase: prefill, draft, verify or rerun. module: index in the head, None = the trunk. hidden: `h` true states, or
    `g<k>` the states that depth k recycled. tokens: what column `start + i` ate.
    """

    phase: str
    module: int | None
    row: int
    start: int
    tokens: tuple[int, ...]
    hidden: str


Stop = Callable[[int, Sequence[int]], int | None]
Observer = Callable[[Event], None]


def rounds(
    trunk: AnyTrunk,
    head: AnyHead | None,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    length: DraftLength | None = None,
    stop: Stop | None = None,
    observer: Observer | None = None,
    numbers: Sequence[int] | None = None,
) -> Iterator[Round]:
    """Decode all prompts as one batch; yields one Round per trunk pass, the first after the prefill (no drafts yet).

    length: how many tokens each round drafts, settings.drafts at most; None = as many, but for settings.p_min.
    stop(row, new_tokens) -> number of new tokens to keep, or None to go on. numbers: with the seed, what each prompt's
    random numbers hang on; None = its place. Raises ConfigError for an empty prompt,
    one that does not fit the context, token ids outside the vocabulary, or drafts without a head.
    """
    _check(trunk, head, prompts, settings)
    length = length or Fixed(settings.drafts, settings.p_min)
    numbers = range(len(prompts)) if numbers is None else numbers
    with LOCK:
        # A thread's first use of torch takes the number of threads set then, and a native round elsewhere sets one.
        torch.get_num_threads()
    with trunk.alone():
        batch = _Batch(trunk, head, prompts, settings, length, stop=stop, observer=observer, numbers=numbers)
    # Not across a yield: the mode is the thread's, and several decodes may take turns in it and in the runtime.
    with torch.inference_mode(), trunk.alone():
        prepare(trunk, head, len(prompts), settings.drafts, fixed=isinstance(length, Fixed) and not length.p_min)
        first = batch.prefill()
    yield first
    while batch.rows:
        with torch.inference_mode(), trunk.alone():
            found = batch.round()
        yield found


def prepare(trunk: AnyTrunk, head: AnyHead | None, rows: int, drafts: int, *, fixed: bool = False) -> None:
    """Make what rounds of up to `drafts` drafts run on, so that none waits for it. fixed: mostly of just so many."""
    trunk.prepare(rows, [1, drafts + 1] if fixed else range(1, drafts + 2), exact=fixed)
    if head is not None and drafts:
        # Plain rounds between two that draft leave their columns to the head.
        head.prepare(rows, range(1, drafts + 2 + (0 if fixed else PROBE)))


def _check(trunk: AnyTrunk, head: AnyHead | None, prompts: Sequence[Sequence[int]], settings: Settings) -> None:
    if not prompts:
        raise ConfigError("no prompt was given; expected at least one")
    if settings.drafts and head is None:
        raise ConfigError(f"drafts = {settings.drafts}, but the checkpoint has no head; use drafts = 0 or add a head")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {row} is empty; expected at least one token")
        if trunk.max_length is not None and len(prompt) >= trunk.max_length:
            raise ConfigError(f"prompt {row} has {len(prompt)} tokens; the context holds {trunk.max_length}, one new")
        if not 0 <= min(prompt) <= max(prompt) < trunk.vocab_size:
            raise ConfigError(
                f"prompt {row} has token ids {min(prompt)}..{max(prompt)}; "
                f"the model's vocabulary is 0..{trunk.vocab_size - 1}: tokenizer and model do not belong together"
            )


class _Batch:
    """The state of one decode. Row r of every list and tensor belongs to prompt `self.rows[r]`; finished rows leave.

    tokens[r]: all known tokens; the trunk has seen all but the last. drafter: the head's half, None without drafts.
    """

    def __init__(
        self,
        trunk: AnyTrunk,
        head: AnyHead | None,
        prompts: Sequence[Sequence[int]],
        settings: Settings,
        length: DraftLength,
        *,
        stop: Stop | None,
        observer: Observer | None,
        numbers: Sequence[int],
    ) -> None:
        self.trunk, self.settings, self.stop, self.observer = trunk, settings, stop, observer
        self.length = length
        self.rows = list(range(len(prompts)))
        self.tokens = [list(prompt) for prompt in prompts]
        self.new: list[list[int]] = [[] for _ in prompts]
        self.cache = trunk.cache(len(prompts))
        # One generator a row: a row draws the same numbers whatever else is in the batch.
        self.uniforms = [Uniforms(settings.seed * 2**20 + each) for each in numbers]
        self.seen = self._seen() if settings.sampling.needs_seen else None
        self.judge = trunk.judge(settings.sampling, block=settings.block)
        self.drafter = None if head is None or not settings.drafts else self._drafter(head)
        self.native: FastRounds | None = None
        self.ahead: deque[Judged] = deque()  # native rounds that were run and not yet told
        self.pace = _AHEAD  # seconds of the last of them

    def prefill(self) -> Round:
        started = time.perf_counter()
        normed = self._prefill()
        nothing = Drafted.nothing(len(self.rows))
        verdict = self._verdict(self.trunk.predict(normed[:, None]), nothing)
        return self._emit(Judged(nothing.drafts, nothing.confidences, verdict, 0.0, time.perf_counter() - started))

    def round(self) -> Round:
        judged = self._by_loop() if self.native is None else self._by_call(self.native)
        for confidences, drafts, (kept, _) in zip(judged.confidences, judged.drafts, judged.verdict, strict=True):
            self.length.learn(confidences, drafts=len(drafts), kept=kept)
        return self._emit(judged)

    def _by_call(self, native: FastRounds) -> Judged:
        """As `_by_loop`, natively, and some rounds ahead where nothing depends on what was told of the last."""
        if not self.ahead:
            plan = NONE if self.drafter is None else self.length.plan()
            most = int(_AHEAD / self.pace) if self.stop is None else 1
            if self.drafter is not None:
                most = min(most, self.length.holds(len(self.rows)))
            drafts, uniforms = min(plan.max_drafts, self._room), None if self._is_greedy else self.uniforms
            self.ahead.extend(native.run(plan, drafts, uniforms, most=max(1, most)))
            self.pace = self.ahead[-1].draft_s + self.ahead[-1].verify_s
        return self.ahead.popleft()

    def _by_loop(self) -> Judged:
        """Drafts, then one pass of the trunk over them."""
        started = time.perf_counter()
        drafted = self._draft()
        drafted_at = time.perf_counter()
        window = [[tokens[-1], *draft] for tokens, draft in zip(self.tokens, drafted.drafts, strict=True)]
        self._watch("verify", None, window, self.cache, "")
        hidden = self.trunk(ragged(window, torch.long), self.cache)
        verdict = self._verdict(self.trunk.read(hidden), drafted)
        kept = [count for count, _ in verdict]
        stand = [count + 1 for count in kept]
        self.cache.keep(stand)
        if self.drafter is not None:
            self.drafter.add(hidden.eaten, stand, skip=self.drafter.settle(drafted.ran, kept))
            if 0 < drafted.ran < self.drafter.head.num_modules:
                self.drafter.feed(self.tokens)  # modules that did not run fall behind, and all columns would wait
        seconds = drafted_at - started, time.perf_counter() - drafted_at
        return Judged(drafted.drafts, drafted.confidences, verdict, *seconds)

    def _drafter(self, head: AnyHead) -> Drafter:
        settings, trunk = self.settings, self.trunk
        like = torch.empty(0, *trunk.hidden_shape, dtype=trunk.dtype, device=trunk.device)
        return Drafter(
            head,
            like,
            len(self.rows),
            sampling=settings.sampling,
            sampled=settings.sampled_drafts,
            contract=settings.contract,
            watch=None if self.observer is None else self._watch,
        )

    def _draft(self) -> Drafted:
        if self.drafter is None:
            return Drafted.nothing(len(self.rows))
        uniforms = None if self._is_greedy else self.uniforms
        return self.drafter.draft(self.length.plan(), self._rooms(), self.tokens, uniforms, self.seen)

    def _prefill(self) -> Tensor:
        """Run the prompts through the trunk in chunks, feeding the head meanwhile -> normed [B, H], last columns."""
        last: dict[int, Tensor] = {}
        chunk = min(self.settings.chunk, self.trunk.max_window or self.settings.chunk)
        for start in range(0, max(map(len, self.tokens)), chunk):
            parts = [tokens[start : start + chunk] for tokens in self.tokens]
            counts = list(map(len, parts))
            self._watch("prefill", None, parts, self.cache, "")
            hidden = self.trunk(ragged(parts, torch.long), self.cache)
            self.cache.keep(counts)
            for row, tokens in enumerate(self.tokens):
                if counts[row] and start + counts[row] == len(tokens):
                    last[row] = hidden.normed[row, counts[row] - 1].clone()  # the next pass may write there
            if self.drafter is not None:
                self.drafter.add(hidden.eaten, counts)
                self.drafter.prefill(self.tokens)
        return torch.stack([last[row] for row in range(len(self.rows))])

    def _rooms(self) -> list[int]:
        """The largest K of this round, per row: no more than its missing tokens; none may leave the context."""
        limit = self._room
        if self.trunk.max_length is not None:
            limit = min(limit, self.trunk.max_length - max(map(len, self.tokens)))
        return [max(0, min(limit, missing - 1)) for missing in self._missing]

    @property
    def _room(self) -> int:
        """The largest K of any round."""
        window = self.trunk.max_window
        return self.settings.drafts if window is None else min(self.settings.drafts, window - 1)

    @property
    def _missing(self) -> list[int]:
        """Tokens that each row may still get."""
        return [self.settings.max_tokens - len(new) for new in self.new]

    @property
    def _is_greedy(self) -> bool:
        return self.settings.sampling.greedy and self.seen is None

    def _verdict(self, predicted: Prediction, drafted: Drafted) -> list[tuple[int, int]]:
        """The trunk's prediction [B, K+1] -> (kept, next token) per row."""
        if self._is_greedy:
            return [accept_greedy(best, drafts) for best, drafts in zip(predicted.best, drafted.drafts, strict=True)]
        numbers = [row.take(len(drafts) + 1) for row, drafts in zip(self.uniforms, drafted.drafts, strict=True)]
        return self.judge(predicted.logits, drafted.laws, drafted.drafts, numbers, seen=self.seen)

    def _native_rounds(self) -> FastRounds | None:
        """Rounds as native calls from here on, where nobody looks between them."""
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
            drafts=self.settings.drafts,
            missing=self._missing,
            ends=self.settings.eos or (),
        )

    def _emit(self, judged: Judged) -> Round:
        out, drafts = [], judged.drafts
        for row, (kept, following) in enumerate(judged.verdict):
            emitted = [*drafts[row][:kept], following]
            self.tokens[row] += emitted
            emitted, finish = self._finish(row, emitted)
            if len(emitted) <= kept:  # cut: depths beyond the end were never judged
                kept, drafts[row] = len(emitted), drafts[row][: len(emitted)]
            out.append(RowRound(self.rows[row], tuple(drafts[row]), kept, tuple(emitted), finish))
        if self.seen is not None:
            self.seen = self._seen()
        self._leave([row for row, part in enumerate(out) if part.finish is None])
        if self.native is None and self.rows:
            self.native = self._native_rounds()
        return Round(tuple(out), judged.draft_s, judged.verify_s)

    def _finish(self, row: int, emitted: list[int]) -> tuple[list[int], str | None]:
        """Cut the row's new tokens where it ends -> (tokens of this round, reason or None)."""
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

    def _leave(self, stay: list[int]) -> None:
        """Only the rows at these places stay in the batch."""
        if len(stay) == len(self.rows):
            return
        if self.native is not None and self.drafter is not None:
            self.drafter.follow(self.native.pending(), self.cache.lengths)
        self.native = None
        for name in ("rows", "tokens", "new", "uniforms"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in stay])
        if stay:
            self.cache.select(stay)
            if self.drafter is not None:
                self.drafter.select(stay)
            self.seen = None if self.seen is None else self.seen[stay]

    def _seen(self) -> Tensor:
        """[B, V] bool: the tokens of each row so far, for penalties."""
        seen = torch.zeros(len(self.rows), self.trunk.vocab_size, dtype=torch.bool)
        for row, tokens in enumerate(self.tokens):
            seen[row, tokens] = True
        return seen.to(self.trunk.device)

    def _watch(
        self, phase: str, module: int | None, tokens: Sequence[Sequence[int]], cache: Cache, hidden: str
    ) -> None:
        if self.observer is not None:
            for row, part in enumerate(tokens):
                if part:
                    self.observer(Event(phase, module, self.rows[row], cache.lengths[row], tuple(part), hidden))
