"""Send many requests to one endpoint, and read what the engine counted meanwhile."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import TypeVar

from nextn.engines.answers import EngineAnswer, EngineRequest
from nextn.engines.counter_formats import from_json, from_metrics
from nextn.engines.counters import Counters, sum_counters
from nextn.engines.endpoint import Endpoint
from nextn.errors import EngineError

T = TypeVar("T")
_POLL_S, _MAX_POLLS = 0.05, 20  # for counters that an engine may update late
_AHEAD = 4  # times as many answers as requests at a time may wait for an earlier one


def run_concurrently(calls: Sequence[Callable[[], T]]) -> list[T | EngineError]:
    """Make calls at the same time; return their results in order, an EngineError as a result. Others are raised.

    Threads are daemons: an interrupt does not wait for answers.
    """
    results: list[T | BaseException | None] = [None] * len(calls)

    def work(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, EngineError):
            raise result
    return results  # type: ignore[return-value]  # no other exception is left


def answer_all(
    endpoint: Endpoint,
    requests: Sequence[EngineRequest],
    *,
    concurrency: int = 1,
    chat: bool | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> list[EngineAnswer]:
    """Answer requests in order, `concurrency` at a time (1: without threads). chat: overrides the endpoint's own.

    Raises the first EngineError, and BudgetError when no requests or no time are left.
    """
    answers: list[EngineAnswer] = []
    for start in range(0, len(requests), concurrency):
        calls = [partial(endpoint.answer, request, chat=chat) for request in requests[start : start + concurrency]]
        for result in run_concurrently(calls) if concurrency > 1 else (call() for call in calls):
            if isinstance(result, EngineError):
                raise result
            answers.append(result)
            on_answer()
    return answers


def iter_answers(
    endpoint: Endpoint,
    requests: Sequence[EngineRequest],
    *,
    concurrency: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[EngineAnswer]:
    """Yield the answers in order, with `concurrency` requests under way all the time; end early if `should_stop`.

    Raises the first EngineError, and BudgetError when no requests or no time are left; answers before it were yielded.
    """
    numbers, results = count(), [SimpleQueue[EngineAnswer | BaseException]() for _ in requests]
    ahead, has_ended = threading.Semaphore(_AHEAD * concurrency), threading.Event()

    def work() -> None:
        while (index := next(numbers)) < len(requests):
            ahead.acquire()
            if has_ended.is_set():
                return
            try:
                results[index].put(endpoint.answer(requests[index]))
            except BaseException as error:
                results[index].put(error)

    # Daemons: an interrupt does not wait for answers.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(concurrency)]
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
        ahead.release(len(threads))


def read_counters(endpoint: Endpoint) -> Counters:
    """Read the served model's counters from /metrics. Raises EngineError where there are none."""
    return from_metrics(endpoint.metrics(), model=endpoint.served.name)


def settled_counters(endpoint: Endpoint, *, before: Counters | None = None) -> Counters:
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
    return sum_counters(part for part in counts if part is not None)
