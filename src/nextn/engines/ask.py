"""The one way to send an engine many requests, and to learn how much its draft counters grow meanwhile."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, pairwise
from queue import Empty, SimpleQueue

from nextn.engines.answers import EngineAnswer, EngineRequest
from nextn.engines.counters import Counters, fill_in_derived, sum_counters
from nextn.engines.endpoint import Endpoint
from nextn.engines.json_formats import from_json
from nextn.engines.metrics_formats import from_metrics, without_first_tokens
from nextn.errors import EngineError

_POLL_S, _MAX_POLLS = 0.05, 20  # for counters that an engine may update late
_AHEAD = 4  # times as many answers as requests at a time may wait for an earlier one


def ask(
    endpoint: Endpoint,
    requests: Sequence[EngineRequest],
    *,
    concurrency: int = 1,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[EngineAnswer]:
    """Yield the answers in order, with `concurrency` requests under way all the time; end early if `should_stop`.

    Raises the first EngineError, and BudgetError when no requests or no time are left; answers before it were yielded,
    and no further request is sent.
    """
    numbers, results = count(), [SimpleQueue[EngineAnswer | BaseException]() for _ in requests]
    ahead, has_ended = threading.Semaphore(_AHEAD * concurrency), threading.Event()

    def work() -> None:
        while True:
            ahead.acquire()
            # A number is taken last: whoever has one puts a result, for which the loop below waits.
            if has_ended.is_set() or (index := next(numbers)) >= len(requests):
                return
            try:
                results[index].put(endpoint.answer(requests[index]))
            except BaseException as error:
                has_ended.set()
                results[index].put(error)

    # Daemons: an interrupt does not wait for answers.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(concurrency, len(requests)))]
    for thread in threads:
        thread.start()
    try:
        for result in results:
            while True:
                if should_stop():
                    return
                with suppress(Empty):
                    answer = result.get(timeout=_POLL_S)
                    break
            ahead.release()
            if isinstance(answer, BaseException):
                raise answer
            yield answer
    finally:
        has_ended.set()
        ahead.release(len(threads) or 1)


@dataclass(frozen=True)
class CountedAnswers:
    """Answers of an engine, and what it counted meanwhile."""

    answers: tuple[EngineAnswer, ...]
    counters: Counters | None  # of /metrics, else those in the answers
    no_counters: str  # why /metrics has none; "" where it has


def ask_counted(
    endpoint: Endpoint,
    requests: Sequence[EngineRequest],
    *,
    concurrency: int = 1,
    required: bool = False,
    on_answer: Callable[[], None] = lambda: None,
) -> CountedAnswers:
    """Ask, between two readings of the engine's counters.

    required: an engine without /metrics, or without draft counters there, is not asked, which is an EngineError.
    Raises EngineError as `ask`, and where the counters were reset meanwhile.
    """
    span, answers = CounterSpan(endpoint, required=required), []
    for answer in ask(endpoint, requests, concurrency=concurrency):
        answers.append(answer)
        on_answer()
    return CountedAnswers(tuple(answers), span.gained(answers, num_requests=len(requests)), span.no_counters)


class CounterSpan:
    """How much an engine's counters grow from now on.

    Attributes:
        no_counters: Why /metrics has none; "" where it has.
    """

    def __init__(self, endpoint: Endpoint, *, required: bool = False) -> None:
        """Read the counters. Raises EngineError where there are none that are `required`."""
        self.endpoint, self.no_counters = endpoint, ""
        self._readings: list[Counters] = []
        try:
            self._readings.append(_settled(endpoint))
        except EngineError as error:
            if required:
                raise
            self.no_counters = str(error)

    def read(self) -> None:
        """Read the counters in between, so that `gained` notices a restart of the engine that later rounds hide."""
        if self._readings:
            with suppress(EngineError):
                self._readings.append(read_counters(self.endpoint))

    def gained(self, answers: Iterable[EngineAnswer] = (), *, num_requests: int = 0) -> Counters | None:
        """Return the counts since the first reading; without metrics, those that the answers hold, None if none does.

        num_requests: Whose first tokens are left out where the engine counts them, as they come from no round.
        Raises EngineError where the counters were reset.
        """
        if not self._readings:
            return counters_in_answers(answers)
        try:
            self._readings.append(_settled(self.endpoint, before=self._readings[0]))
        except EngineError as error:
            if len(self._readings) < 2:
                self.no_counters = str(error)
                return None
        for earlier, later in pairwise(self._readings):
            later.minus(earlier)
        return without_first_tokens(self._readings[-1].minus(self._readings[0]), num_requests)


def read_counters(endpoint: Endpoint) -> Counters:
    """Read the served model's counters from /metrics. Raises EngineError where there are none."""
    return from_metrics(endpoint.metrics(), model=endpoint.served.name)


def _settled(endpoint: Endpoint, *, before: Counters | None = None) -> Counters:
    """Read the counters until two readings agree, and differ from those of `before`, if they ever do."""
    last: Counters | None = None
    for _ in range(_MAX_POLLS):
        current = read_counters(endpoint)
        if current == last and current != before:
            break
        last = current
        if before is not None:
            time.sleep(_POLL_S)
    assert last is not None
    return last


def counters_in_answers(answers: Iterable[EngineAnswer]) -> Counters | None:
    """Sum the counts that the answers themselves hold, such as llama.cpp's `timings`; None where none does."""
    counts = (from_json(answer.raw) for answer in answers)
    total = sum_counters(part for part in counts if part is not None)
    return None if total is None else fill_in_derived(total)
