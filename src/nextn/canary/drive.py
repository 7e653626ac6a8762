"""What an engine did with a canary's prompts: asked over HTTP one after the other, or read from files. No torch."""

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nextn.canary.kit import Canary
from nextn.engines import sources
from nextn.engines.answers import Answer, Ask
from nextn.engines.counters import Counters, counted
from nextn.engines.endpoint import Endpoint
from nextn.errors import ConfigError, EngineError

_SETTLE_S, _LOOKS = 0.05, 20  # between two readings of counters that an engine may bring up to date late


@dataclass(frozen=True)
class Seen:
    """texts: new tokens of each prompt. counts: counters, and the places of the prompts that they are of. without: why
    there are none."""

    texts: tuple[tuple[int, ...], ...]
    counts: tuple[tuple[tuple[int, ...], Counters], ...]
    without: str = ""


def driven(endpoint: Endpoint, canary: Canary, *, on_prompt: Callable[[], None] = lambda: None) -> Seen:
    """Ask for every prompt's greedy text, with the engine's counters before and after each.

    Counters come from /metrics, else from the answer itself. Raises EngineError, BudgetError.
    """
    texts: list[tuple[int, ...]] = []
    counts: list[tuple[tuple[int, ...], Counters]] = []
    run, without = uuid.uuid4().hex, ""
    for place, asked in enumerate(canary.prompts):
        before, without = _settled(endpoint)
        ask = Ask(asked.ids, canary.max_tokens, cold=f"canary {run} {place}")
        answer = endpoint.answer(ask, chat=False)
        texts.append(_tokens(answer))
        if before is not None:
            after, without = _settled(endpoint, moved=before)
            found = None if after is None else counted(after.minus(before))
        else:
            found = sources.from_json(answer.raw)
        if found is not None:
            counts.append(((place,), found))
        on_prompt()
    return Seen(tuple(texts), tuple(counts), without)


def from_files(canary: Canary, answers: Path, counters: Path | None) -> Seen:
    """answers: a JSON line a prompt, in their order: {"tokens": [...]} or {"text": "..."}, with counters of its own (as
    llama.cpp's `timings`) or none. counters: of all of them together, see `sources.read`.

    Raises ConfigError for other files, EngineError for counters that cannot be read.
    """
    try:
        lines = [json.loads(line) for line in answers.read_text().splitlines() if line.strip()]
        texts = tuple(_told(each) for each in lines)
    except OSError as error:
        raise ConfigError(f"{answers}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        expected = '{"tokens": [...]} or {"text": "..."} a line'
        raise ConfigError(f"{answers}: expected {expected}, found {error!r}") from error
    if len(texts) != len(canary.prompts):
        raise ConfigError(f"{answers}: {len(texts)} answers; the canary has {len(canary.prompts)} prompts")
    if counters is not None:
        return Seen(texts, ((tuple(range(len(texts))), sources.read(counters)),))
    own = [((place,), found) for place, each in enumerate(lines) if (found := sources.from_json(each)) is not None]
    return Seen(texts, tuple(own), "" if own else f"{answers} holds no counters; give --counters")


def _settled(endpoint: Endpoint, *, moved: Counters | None = None) -> tuple[Counters | None, str]:
    """Counters once two readings agree (and differ from `moved`, if they ever do), or why there are none."""
    last: Counters | None = None
    for _ in range(_LOOKS):
        try:
            now = sources.from_metrics(endpoint.metrics(), model=endpoint.served.name)
        except EngineError as error:
            return None, str(error)
        if now == last and now != moved:
            break
        last = now
        if moved is not None:
            time.sleep(_SETTLE_S)
    return last, ""


def _tokens(answer: Answer) -> tuple[int, ...]:
    """Ids; where an engine tells text alone, its bytes, which are a canary's ids."""
    return answer.ids or tuple(answer.text.encode())


def _told(line: dict[str, Any]) -> tuple[int, ...]:
    if "tokens" in line:
        return tuple(int(token) for token in line["tokens"])
    return tuple(line["text"].encode())
