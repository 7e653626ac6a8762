"""K by load: what drafts cost and gain on a live engine at each number of streams, and K in the engine's own syntax.

Two servers of one model answer the same prompts, one of them without drafts. Counters give AL, clocks the speedup, and
the two together what a round with K drafts costs in plain rounds: AL / speedup. Imports no torch.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from nextn.engines.answers import EngineRequest
from nextn.engines.ask import CounterSpan, ask, ask_counted
from nextn.engines.counters import Counters, sum_counters
from nextn.engines.endpoint import Endpoint
from nextn.errors import ConfigError, EngineError
from nextn.stats.acceptance import expected_length, length_of_drafts, rates_record
from nextn.stats.speedup import Spread, uniform_rate
from nextn.text_format import counted, joined

DEFINITIONS = {
    "speedup": "tokens/s with MTP over tokens/s without, same prompts, one after the other; median over repeats",
    "middle_repeat": "tokens/s without and with MTP in the repeat of the median speedup, which is their ratio",
    "mean_acceptance_length": "AL by the engine's counters over the answers at this number of streams",
    "round_cost": "AL / speedup: the time of a round with K drafts in plain ones; MTP is faster where AL is above it",
    "draft_cost": "(AL of the rates of all loads / speedup - 1) / K, or (round_cost - 1) / mean drafts in a round if "
    "the engine chooses K itself, at least 0: each draft is assumed to cost the same",
    "expected": "speedup at k = 0 .. K: AL(k) / (1 + k draft_cost)",
    "best_num_speculative_tokens": "the best k; 0 where the low quartile of the speedup is below 1",
}
REPEATS = 3  # pairs of passes at each load
_PROMPTS = 16  # asked at every load, if there are as many: AL of other texts would not compare
_FIXED = 0.9  # of K are drafted in a round on average, at least, by an engine that does not choose K itself
_MOST_WAIT_S = 900.0  # for a server of nextn to measure its own costs
_NO_LIMIT = 1024  # the end of vLLM's last range, which it extends to its largest batch


@dataclass(frozen=True)
class LoadPoint:
    """What was measured at one number of streams."""

    streams: int  # requests under way all the time
    plain: Spread  # tokens/s of all streams together, without MTP
    drafted: Spread  # the same with MTP
    speedup: Spread  # drafted / plain, of each repeat
    length: float  # AL, by the engine's counters
    drafts: float  # mean number of drafts in a round
    middle: tuple[float, float] | None = None  # tokens/s without and with MTP, in the repeat of the median speedup

    @property
    def round_cost(self) -> float:
        return self.length / self.speedup.median

    def expected(self, rates: Sequence[float], *, cautious: bool = False) -> list[float]:
        """Return the speedup at k = 0 .. K. cautious: with the low quartile of what was measured."""
        measured = self.speedup.low if cautious else self.speedup.median
        # With a fixed K, the AL of the rates counts: what is expected of K is then what was measured at it, though the
        # rates are of all loads, and though rounds that the end of a text cuts short lower the AL of this one.
        is_fixed = self.drafts > _FIXED * len(rates)
        length, drafts = (expected_length(rates), len(rates)) if is_fixed else (self.length, self.drafts)
        draft_cost = max(0.0, (length / measured - 1) / drafts)
        return [expected_length(rates[:k]) / (1 + k * draft_cost) for k in range(len(rates) + 1)]

    def best(self, rates: Sequence[float]) -> int:
        """Return the best k; 0 where none is surely faster."""
        speeds = self.expected(rates)
        k = max(range(len(speeds)), key=speeds.__getitem__)
        return k if self.expected(rates, cautious=True)[k] > 1 else 0


@dataclass(frozen=True)
class LoadAdvice:
    """K for each number of streams."""

    engine: str  # the engine's name, by its counters
    temperature: float  # of the requests
    rates: tuple[float, ...]  # a_1 .. a_K over all loads; equal at all depths where the engine counts no positions
    points: tuple[LoadPoint, ...]  # one per number of streams, in rising order

    @property
    def schedule(self) -> list[tuple[int, int | None, int]]:
        """(first, last, k) over numbers of streams; between two measured ones, k is that of the larger."""
        ranges: list[tuple[int, int | None, int]] = []
        for point in self.points:
            first, k = (ranges[-1][1] or 0) + 1 if ranges else 1, point.best(self.rates)
            if ranges and ranges[-1][2] == k:
                ranges[-1] = (ranges[-1][0], point.streams, k)
            else:
                ranges.append((first, point.streams, k))
        return [*ranges[:-1], (ranges[-1][0], None, ranges[-1][2])]

    @property
    def summary(self) -> str:
        """The advice, in one sentence."""
        tested = f"(measured up to {self.points[-1].streams})"
        parts = [f"K = {k} {_streams(first, last)}" if k else f"off {_streams(first, last)}"
                 for first, last, k in self.schedule]  # fmt: skip
        return f"{', '.join(parts)} {tested}"

    @property
    def notes(self) -> list[str]:
        """What makes the figures uncertain."""
        k, least = len(self.rates), min(point.drafts for point in self.points)
        doubtful = [point.streams for point in self.points if point.speedup.low > point.length]
        unsure = [point.streams for point in self.points if point.speedup.low < 1 < point.speedup.high]
        estimated = [f"K = {best} at {counted(point.streams, 'stream')}" for point in self.points
                     if (best := point.best(self.rates)) not in (0, k)]  # fmt: skip
        notes = {
            f"at {joined(map(str, doubtful))} streams MTP was faster than its AL allows: a round took less time with "
            "drafts than without: something slowed the server without MTP; repeat it on an idle machine": doubtful,
            f"at {joined(map(str, unsure))} streams MTP was faster in some passes and slower in others: use an "
            "idle machine, more --prompts or more --max-tokens": unsure,
            f"the engine drafted {least:.1f} of {k} tokens in a round: it chooses K itself, so the expected speedups "
            "are uncertain; measure it at a fixed K": least <= _FIXED * k,
            f"{joined(estimated)}: an estimate from rounds of {k} drafts; measure it at this K, too": estimated,
        }
        return [note for note, applies in notes.items() if applies]

    @property
    def settings(self) -> dict[str, str]:
        """The schedule as the measured engine takes it: a round costs something else in others. {} without drafts."""
        ranges = [[first, last or max(_NO_LIMIT, first), k] for first, last, k in self.schedule]
        largest, first_k = max(k for _, _, k in ranges), ranges[0][2]
        if not largest:
            return {}
        vllm = {"method": "mtp", "num_speculative_tokens": largest, "num_speculative_tokens_per_batch_size": ranges}
        sglang = {str(first): {"candidate_steps": [k]} for first, _, k in ranges}
        one = f", best {_streams(*self.schedule[0][:2])}: it has one K for all loads" if len(ranges) > 1 else ""
        known = {
            "vLLM": f"--speculative-config '{json.dumps(vllm)}'",
            "SGLang": f"--speculative-adaptive --speculative-adaptive-config FILE, with FILE: {json.dumps(sglang)}",
            "llama.cpp": (f"--spec-type draft-mtp --spec-draft-n-max {first_k}" if first_k else "no --spec-type") + one,
            "nextn": f"-k {largest}: it drafts fewer, or none, by the load",
        }
        return {name: text for name, text in known.items() if name == self.engine}

    def as_record(self) -> dict[str, object]:
        """Return the JSON document."""
        return {
            "engine": self.engine,
            "temperature": self.temperature,
            "definitions": DEFINITIONS,
            "acceptance": rates_record(self.rates),
            "summary": self.summary,
            "schedule": self.schedule,
            "notes": self.notes,
            "settings": self.settings,
            "forecasts": [self._record(point) for point in self.points],
        }

    def _record(self, point: LoadPoint) -> dict[str, object]:
        return {
            "batch": point.streams,
            "plain_tokens_per_s": point.plain.as_record(),
            "tokens_per_s": point.drafted.as_record(),
            "speedup": point.speedup.as_record(),
            "middle_repeat": point.middle,
            "mean_acceptance_length": point.length,
            "mean_drafts": point.drafts,
            "round_cost": point.round_cost,
            "expected": point.expected(self.rates),
            "best_num_speculative_tokens": point.best(self.rates),
            "summary": self.summary,
        }


def measure_loads(
    engine: Endpoint,
    plain: Endpoint,
    prompts: Sequence[str | tuple[int, ...]],
    loads: Sequence[int],
    *,
    temperature: float = 0.0,
    max_tokens: int = 256,
    on_answer: Callable[[], None] = lambda: None,
) -> LoadAdvice:
    """Time both servers at each number of streams, in turn, on the same prompts.

    Each load asks 16 prompts or twice as many as it has streams, repeating them from the start. Raises ConfigError if
    the plain server drafts, or the other does not; EngineError as `CounterSpan`, or if an engine refuses a request.
    """
    points, counted = [], []
    for streams in sorted(set(loads)):
        asked = list(islice(cycle(prompts), num_requests(len(prompts), streams)))
        speeds: dict[Endpoint, list[float]] = {engine: [], plain: []}
        span = CounterSpan(engine, required=True)
        for turn in range(REPEATS):
            for server in (plain, engine) if turn % 2 == 0 else (engine, plain):
                speeds[server].append(_tokens_per_s(server, asked, streams, temperature, max_tokens, on_answer))
        gained = span.gained(num_requests=REPEATS * len(asked))
        if gained is None:
            raise EngineError(span.no_counters)
        counted.append(gained)
        ratios = [one / other for one, other in zip(speeds[engine], speeds[plain], strict=True)]
        without, with_mtp, speedup = map(Spread.of, (speeds[plain], speeds[engine], ratios))
        middle = sorted(zip(ratios, speeds[plain], speeds[engine], strict=True))[REPEATS // 2][1:]
        points.append(LoadPoint(streams, without, with_mtp, speedup, _length(gained), _drafts(gained), middle))
    total = sum_counters(counted)
    assert total is not None
    return LoadAdvice(total.engine, temperature, _rates(total), tuple(points))


def wait_until_measured(servers: Sequence[Endpoint], *, interval_s: float = 1.0) -> Iterator[str]:
    """Wait until servers of nextn have measured costs of their own, which they do whenever they are idle.

    While one is asked, the other would take its processor. Yields the URL each time that it waits. Raises EngineError
    for one that does not end.
    """
    for server in servers:
        until = time.monotonic() + _MOST_WAIT_S
        while server.is_measuring():
            if time.monotonic() > until:
                raise EngineError(
                    f"{server.url} still measures its own costs after {_MOST_WAIT_S / 60:.0f} minutes, which it does "
                    "while it is idle: send it no other requests, and try again"
                )
            yield server.url
            time.sleep(interval_s)


def total_requests(num_prompts: int, loads: Sequence[int]) -> int:
    """How many answers `measure_loads` takes from both servers."""
    return 2 * REPEATS * sum(num_requests(num_prompts, streams) for streams in set(loads))


def num_requests(num_prompts: int, streams: int) -> int:
    """How many requests a pass at this number of streams makes."""
    return max(2 * streams, min(num_prompts, _PROMPTS))


def refuse_drafts(plain: Endpoint, prompt: str | tuple[int, ...]) -> None:
    """Ask one prompt. Raises ConfigError if the server that should be without MTP counts drafts for it."""
    counters = ask_counted(plain, [EngineRequest(prompt, 16, use_cache=False)]).counters
    if counters is not None and counters.has_drafts:
        raise ConfigError(f"--against {plain.url}: this server drafts, too; start it without MTP")


def _tokens_per_s(
    server: Endpoint,
    prompts: Sequence[str | tuple[int, ...]],
    streams: int,
    temperature: float,
    most: int,
    on_answer: Callable[[], None],
) -> float:
    requests = [
        EngineRequest(prompt, most, temperature, seed=place, use_cache=False) for place, prompt in enumerate(prompts)
    ]
    tokens, start = [], time.perf_counter()
    for answer in ask(server, requests, concurrency=streams):
        tokens.append(answer.completion_tokens)
        on_answer()
    seconds = time.perf_counter() - start
    if None in tokens or not sum(filter(None, tokens)):
        raise EngineError(f"{server.url}: answers without usage.completion_tokens, so their speed is not known")
    return sum(filter(None, tokens)) / seconds


def _length(counters: Counters) -> float:
    """AL over the rounds that drafted."""
    if not counters.num_drafts or counters.accepted is None:
        message = f"--engine: {counters.engine} counted no drafts; start it with MTP, at the largest K to consider"
        raise ConfigError(message)
    return length_of_drafts(counters.accepted, counters.num_drafts)


def _drafts(counters: Counters) -> float:
    """Mean number of drafts in a round."""
    tokens = counters.draft_tokens or (counters.num_drafts or 0) * len(counters.per_position)
    return max(1.0, tokens / (counters.num_drafts or 1))


def _rates(counters: Counters) -> tuple[float, ...]:
    """a_1 .. a_K; where positions are not counted, the rate that gives the AL at every depth."""
    if counters.per_position:
        return counters.acceptance().rates
    length = _length(counters)
    k = counters.k or round(_drafts(counters))
    rate = uniform_rate(length, k)
    return (1.0 if rate is None else rate,) * k


def _streams(first: int, last: int | None) -> str:
    if last is None:
        return f"from {first} streams on" if first > 1 else "at any number of streams"
    return f"at {first} to {last} streams" if first < last else f"at {counted(first, 'stream')}"
