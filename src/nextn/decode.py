"""Rounds: draft K tokens with the head, verify them in one trunk pass, keep a prefix, emit kept + 1 tokens.

Token ids inside: no tokenizer, chat template or stop string is known here. Every other way to decode folds `rounds`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nextn.errors import ConfigError
from nextn.fast.engine import FastHead, FastRecursion, FastTrunk
from nextn.head import Head, Recursion, Step
from nextn.policy import Chain, DraftLength, Fixed, RoundPlan
from nextn.rollback import Cache
from nextn.sampling import Prediction, Sampling, accept, accept_block, accept_greedy, law, pick, seen_prefixes
from nextn.trunk import Trunk


@dataclass(frozen=True)
class Contract:
    """What an engine must get right besides the family's facts. The defaults are right; each change plants one fault.

    prefill: the head's cache is filled over the whole prompt. rerun: kept columns run again with the trunk's true
    hidden states. offset: the pair at column i is (t_{i+1}, h_{i+offset}); 0 or -1.
    """

    prefill: bool = True
    rerun: bool = True
    offset: int = 0


@dataclass(frozen=True)
class Settings:
    """drafts: K, 0 = plain decoding. p_min: a round drafts on only while the head is that sure. sampled_drafts: draw
    drafts from q, else take its argmax. block: judge the drafts of a round together, which keeps more of them.

    max_tokens: new tokens per row. eos: token ids that end a row; None: the checkpoint's in `generate` and `stream`,
    none in `rounds`. chunk: columns per prefill pass. Raises ConfigError on values out of range.
    """

    drafts: int = 4
    p_min: float = 0.0
    sampling: Sampling = field(default_factory=Sampling)
    sampled_drafts: bool = True
    block: bool = True
    max_tokens: int = 256
    eos: tuple[int, ...] | None = None
    seed: int = 0
    chunk: int = 512
    contract: Contract = field(default_factory=Contract)

    def __post_init__(self) -> None:
        for name, least in (("drafts", 0), ("max_tokens", 1), ("chunk", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)}; expected a whole number >= {least}")
        if self.contract.offset not in (0, -1):
            raise ConfigError(f"contract.offset = {self.contract.offset}; expected 0 or -1")


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
    trunk: Trunk | FastTrunk,
    head: Head | FastHead | None,
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
    batch = _Batch(trunk, head, prompts, settings, length, stop=stop, observer=observer, numbers=numbers)
    with torch.inference_mode():
        with trunk.alone():
            first = batch.prefill()
        yield first
        while batch.rows:
            with trunk.alone():
                found = batch.round()
            yield found


def _check(
    trunk: Trunk | FastTrunk, head: Head | FastHead | None, prompts: Sequence[Sequence[int]], settings: Settings
) -> None:
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


class _Drafted:
    """What a round drafts. chains: the policy's word for each row. drafts: per row; a row whose chain has ended goes on
    with the others, but its tokens are no drafts. laws: per depth q [B, V], none in greedy decoding. ran: depths that
    ran, also one from whose laws nothing was drawn."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        self.chains = chains
        self.drafts: list[list[int]] = [[] for _ in chains]
        self.laws: list[Tensor] = []
        self.ran = 0
        self._takes: list[bool] = []

    @property
    def further(self) -> bool:
        return any(chain.further for chain in self.chains)

    def take(self, confidences: Sequence[float]) -> bool:
        """Whether any row drafts from the laws of these confidences."""
        pairs = zip(self.chains, confidences, strict=True)
        self._takes = [chain.further and chain.more(confidence) for chain, confidence in pairs]
        return any(self._takes)

    def add(self, tokens: Sequence[int], q: Tensor | None) -> None:
        for draft, token, taken in zip(self.drafts, tokens, self._takes, strict=True):
            if taken:
                draft.append(token)
        if q is not None:
            self.laws.append(q)

    @property
    def limits(self) -> list[int]:
        return [len(draft) for draft in self.drafts]


def _last(states: Tensor, widths: Sequence[int]) -> Tensor:
    """states [B, T, H] -> [B, H]: each row's last column."""
    if len(widths) == 1:
        return states[:, widths[0] - 1]
    return states[torch.arange(len(widths), device=states.device), torch.tensor(widths, device=states.device) - 1]


class _Batch:
    """The state of one decode. Row r of every list and tensor belongs to prompt `self.rows[r]`; finished rows leave.

    tokens[r]: all known tokens; the trunk has seen all but the last. pending[r] [n, *hidden_shape]: the true hidden
    states of the last n columns that the trunk has seen and that are not yet final in the head's caches.
    """

    def __init__(
        self,
        trunk: Trunk | FastTrunk,
        head: Head | FastHead | None,
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
        self.head = head if settings.drafts else None
        self.rows = list(range(len(prompts)))
        self.tokens = [list(prompt) for prompt in prompts]
        self.new: list[list[int]] = [[] for _ in prompts]
        self.cache = trunk.cache(len(prompts))
        self.caches = [] if self.head is None else [self.head.cache(len(prompts)) for _ in self.head.stack]
        empty = torch.empty(0, *trunk.hidden_shape, dtype=trunk.dtype, device=trunk.device)
        self.pending = [empty for _ in prompts]
        self.before = [empty for _ in prompts]
        self.bases: list[int] = []
        # One generator a row: a row draws the same numbers whatever else is in the batch.
        self.generators = [torch.Generator().manual_seed(settings.seed * 2**20 + each) for each in numbers]
        self.seen = self._seen() if settings.sampling.needs_seen else None

    def prefill(self) -> Round:
        started = time.perf_counter()
        normed = self._prefill()
        nothing = _Drafted([RoundPlan(0).begin() for _ in self.rows])
        verdict = self._verdict(self.trunk.predict(normed[:, None]), nothing)
        return self._emit(nothing.drafts, verdict, started, started)

    def round(self) -> Round:
        started = time.perf_counter()
        drafted = self._draft()
        drafted_at = time.perf_counter()
        window = [[tokens[-1], *draft] for tokens, draft in zip(self.tokens, drafted.drafts, strict=True)]
        self._watch("verify", None, window, self.cache, "")
        hidden = self.trunk(self._tensor(window), self.cache)
        verdict = self._verdict(self.trunk.predict(hidden.normed), drafted)
        kept = [count for count, _ in verdict]
        self.cache.keep([count + 1 for count in kept])
        if self.head is not None:
            stale = self._settle(drafted.ran, kept)
            self._add_pending(hidden.eaten, [count + 1 for count in kept], skip=stale)
        for chain, count in zip(drafted.chains, kept, strict=True):
            self.length.learn(chain.confidences, drafts=chain.drafts, kept=count)
        return self._emit(drafted.drafts, verdict, started, drafted_at)

    def _prefill(self) -> Tensor:
        """Run the prompts through the trunk in chunks, feeding the head meanwhile -> normed [B, H], last columns."""
        last: dict[int, Tensor] = {}
        chunk = min(self.settings.chunk, self.trunk.max_window or self.settings.chunk)
        for start in range(0, max(map(len, self.tokens)), chunk):
            parts = [tokens[start : start + chunk] for tokens in self.tokens]
            counts = list(map(len, parts))
            self._watch("prefill", None, parts, self.cache, "")
            hidden = self.trunk(self._tensor(parts), self.cache)
            self.cache.keep(counts)
            for row, tokens in enumerate(self.tokens):
                if counts[row] and start + counts[row] == len(tokens):
                    last[row] = hidden.normed[row, counts[row] - 1].clone()  # the next pass may write there
            if self.head is not None:
                self._add_pending(hidden.eaten, counts)
                self._feed()
        return torch.stack([last[row] for row in range(len(self.rows))])

    def _feed(self) -> None:
        """Run every module over the pending columns whose tokens are known up to the deepest module."""
        assert self.head is not None
        depths = range(1, self.head.num_modules + 1)
        known = [len(tokens) - self.head.num_modules - self._start(row) for row, tokens in enumerate(self.tokens)]
        widths = [max(0, min(len(pending), num)) for pending, num in zip(self.pending, known, strict=True)]
        states = self._states([pending[:width] for pending, width in zip(self.pending, widths, strict=True)])
        for depth in depths if max(widths) and self.settings.contract.prefill else ():
            step = self._window("prefill", depth, widths, states, [[] for _ in self.rows])
            states = step.recycled if self.head.eats_recycled(depth + 1) else states
        self.pending = [pending[width:] for pending, width in zip(self.pending, widths, strict=True)]

    def _draft(self) -> "_Drafted":
        """Chain drafts while the policy wants more; asked before a draft is drawn, of how sure its law is."""
        plan, rooms = self.length.plan(), self._rooms()
        out = _Drafted([plan.begin(room) for room in rooms])
        if self.head is None or not out.further:
            return out
        self.bases = list(self.caches[0].lengths)
        uniforms = None if self._is_greedy else self._uniforms([min(plan.max_drafts, room) for room in rooms])
        widths, tokens = list(map(len, self.pending)), [0] * len(self.rows)
        states, seen, recursion = self._states(self.pending), self.seen, None
        while out.further:
            depth = out.ran = out.ran + 1
            if depth <= self.head.num_modules:
                step = self._window("draft", depth, widths, states, out.drafts)
                states = step.recycled if self.head.eats_recycled(depth + 1) else states
                guess = self.head.predict(self.head.module(depth), _last(step.normed, widths))
            else:
                if recursion is None:
                    recursion = self.head.recursion(self.caches[-1], _last(step.recycled, widths))
                guess = self._recurse(recursion, depth, tokens)
            if not out.take([1.0] * len(self.rows) if plan.is_blind else guess.confidence):
                break
            q, tokens = self._pick(guess, seen, None if uniforms is None else uniforms[:, depth - 1])
            out.add(tokens, q)
            seen = None if seen is None else seen.scatter(1, self._tensor([[token] for token in tokens]), True)
        return out

    def _window(
        self, phase: str, depth: int, widths: Sequence[int], states: Tensor, drafts: Sequence[Sequence[int]]
    ) -> Step:
        """The module of `depth` over each row's first widths[row] pending columns: column i eats token i + depth."""
        assert self.head is not None
        index = self.head.module(depth)
        tokens = []
        for row, width in enumerate(widths):
            start = self._start(row) + depth
            known = [*self.tokens[row], *drafts[row]][start : start + width]
            tokens.append(known + [0] * (width - len(known)))  # a row that drafts no further; its column is dropped
        self._watch(
            phase, index, tokens, self.caches[index], f"g{depth - 1}" if self.head.eats_recycled(depth) else "h"
        )
        step = self.head.step(index, self._tensor(tokens), states, cache=self.caches[index])
        self.caches[index].keep(widths)
        return step

    def _recurse(self, recursion: Recursion | FastRecursion, depth: int, tokens: Sequence[int]) -> Prediction:
        assert self.head is not None
        self._watch("draft", self.head.num_modules - 1, [[token] for token in tokens], self.caches[-1], f"g{depth - 1}")
        return recursion.step(tokens)

    def _settle(self, ran: int, kept: Sequence[int]) -> list[int]:
        """After verification: the head's caches go back to the columns that saw true states and true tokens only.

        -> per row, how many of the kept columns need no re-run: none, unless that fault is planted.
        """
        assert self.head is not None
        if not ran:
            return [0] * len(kept)
        num_modules, rerun = self.head.num_modules, self.settings.contract.rerun
        finals = list(map(len, self.pending))
        stale = [0 if rerun or num_modules > 1 else min(count, ran - 1) for count in kept]
        if rerun:
            # Column i is final in module k once token i + k is known; modules that did not run have nothing to keep.
            finals = [max(0, final - num_modules + 1) if ran >= num_modules else 0 for final in finals]
        for cache in self.caches:
            cache.truncate([base + final + more for base, final, more in zip(self.bases, finals, stale, strict=True)])
        self.pending = [pending[final:] for pending, final in zip(self.pending, finals, strict=True)]
        return stale

    def _add_pending(self, eaten: Tensor, counts: Sequence[int], *, skip: Sequence[int] | None = None) -> None:
        """eaten [B, T, H]: the first counts[row] columns are true; all but the first skip[row] wait for the head."""
        for row, count in enumerate(counts):
            states = eaten[row, :count]
            if self.settings.contract.offset and count:
                before = self.before[row] if len(self.before[row]) else torch.zeros_like(states[:1])
                self.before[row], states = states[-1:], torch.cat([before, states[:-1]])
            self.pending[row] = torch.cat([self.pending[row], states[0 if skip is None else skip[row] :]])

    def _start(self, row: int) -> int:
        """The first column that is not final in the head."""
        return self.cache.lengths[row] - len(self.pending[row])

    def _rooms(self) -> list[int]:
        """The largest K of this round, per row: no more than its missing tokens; none may leave the context."""
        limits = [self.settings.drafts]
        if self.trunk.max_length is not None:
            limits.append(self.trunk.max_length - max(map(len, self.tokens)))
        if self.trunk.max_window is not None:
            limits.append(self.trunk.max_window - 1)
        return [max(0, min(*limits, self.settings.max_tokens - len(new) - 1)) for new in self.new]

    @property
    def _is_greedy(self) -> bool:
        return self.settings.sampling.greedy and self.seen is None

    def _verdict(self, predicted: Prediction, drafted: _Drafted) -> list[tuple[int, int]]:
        """The trunk's prediction [B, K+1] -> (kept, next token) per row."""
        if self._is_greedy:
            return [accept_greedy(best, drafts) for best, drafts in zip(predicted.best, drafted.drafts, strict=True)]
        proposed = self._tensor(drafted.drafts)
        seen = None if self.seen is None else seen_prefixes(self.seen, proposed)
        p = law(predicted.logits, self.settings.sampling, seen)
        q = torch.stack(drafted.laws, dim=1) if drafted.laws else p[:, :0]
        uniforms = self._uniforms([limit + 1 for limit in drafted.limits])
        limits = torch.tensor(drafted.limits, device=self.trunk.device)
        judge = accept_block if self.settings.block else accept
        verdict = judge(p, q, proposed, u=uniforms[:, : proposed.shape[1]], limit=limits)
        following = pick(verdict.rest, uniforms.gather(1, limits[:, None])[:, 0])
        return list(zip(verdict.kept.tolist(), following.tolist(), strict=True))

    def _pick(self, guess: Prediction, seen: Tensor | None, uniforms: Tensor | None) -> tuple[Tensor | None, list[int]]:
        """-> q [B, V] and one token a row from it. An argmax draft comes from a law with one token; greedily, no law is
        needed."""
        if uniforms is None:
            return None, guess.best
        q = law(guess.logits, self.settings.sampling, seen)
        if self.settings.sampled_drafts:
            return q, pick(q, uniforms).tolist()
        best = q.argmax(-1)
        return torch.zeros_like(q).scatter(1, best[:, None], 1.0), best.tolist()

    def _emit(
        self, drafts: list[list[int]], verdict: Sequence[tuple[int, int]], started: float, drafted: float
    ) -> Round:
        out = []
        for row, (kept, following) in enumerate(verdict):
            emitted = [*drafts[row][:kept], following]
            self.tokens[row] += emitted
            emitted, finish = self._finish(row, emitted)
            if len(emitted) <= kept:  # cut: depths beyond the end were never judged
                kept, drafts[row] = len(emitted), drafts[row][: len(emitted)]
            out.append(RowRound(self.rows[row], tuple(drafts[row]), kept, tuple(emitted), finish))
        if self.seen is not None:
            self.seen = self._seen()
        self._leave([row for row, part in enumerate(out) if part.finish is None])
        return Round(tuple(out), drafted - started, time.perf_counter() - drafted)

    def _finish(self, row: int, emitted: list[int]) -> tuple[list[int], str | None]:
        """Cut the row's new tokens where it ends -> (tokens of this round, reason or None)."""
        before, settings = len(self.new[row]), self.settings
        ends = [(index + 1, "eos") for index, token in enumerate(emitted) if token in (settings.eos or ())]
        new = self.new[row] = self.new[row] + emitted
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
        for name in ("rows", "tokens", "new", "pending", "before", "generators"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in stay])
        if stay:
            for cache in (self.cache, *self.caches):
                cache.select(stay)
            self.seen = None if self.seen is None else self.seen[stay]

    def _seen(self) -> Tensor:
        """[B, V] bool: the tokens of each row so far, for penalties."""
        seen = torch.zeros(len(self.rows), self.trunk.vocab_size, dtype=torch.bool)
        for row, tokens in enumerate(self.tokens):
            seen[row, tokens] = True
        return seen.to(self.trunk.device)

    def _uniforms(self, counts: Sequence[int]) -> Tensor:
        """[B, largest count]: as many numbers of each row's own as it needs, so that its neighbours change none."""
        pairs = zip(counts, self.generators, strict=True)
        return self._states([torch.rand(count, generator=generator) for count, generator in pairs]).to(
            self.trunk.device
        )

    def _tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Rows of different lengths, left-aligned; the cache never keeps the padding."""
        width = max(map(len, rows))
        return torch.tensor(
            [[*row, *[0] * (width - len(row))] for row in rows], device=self.trunk.device, dtype=torch.long
        )

    def _states(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

    def _watch(
        self, phase: str, module: int | None, tokens: Sequence[Sequence[int]], cache: Cache, hidden: str
    ) -> None:
        if self.observer is not None:
            for row, part in enumerate(tokens):
                if part:
                    self.observer(Event(phase, module, self.rows[row], cache.lengths[row], tuple(part), hidden))
