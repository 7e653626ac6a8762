"""What an engine did with a canary's prompts: asked over HTTP one after the other, or read from files. No torch."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nextn.canary.kit import Canary
from nextn.engines import sources
from nextn.engines.answers import Answer, Ask, token_ids
from nextn.engines.counters import Counters, counted, summed
from nextn.engines.documents import loads, shown, string
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


@dataclass(frozen=True)
class Drawn:
    """What an engine did above temperature 0. texts: [passes][prompts], new tokens. counters: over all of them."""

    texts: tuple[tuple[tuple[int, ...], ...], ...]
    counters: Counters | None
    without: str = ""

    def as_record(self) -> dict[str, object]:
        told = None if self.counters is None else self.counters.as_record()
        return {"passes": len(self.texts), "seen": told}


def driven(endpoint: Endpoint, canary: Canary, *, on_prompt: Callable[[], None] = lambda: None) -> Seen:
    """Ask for every prompt's greedy text, with the engine's counters before and after each.

    Counters come from /metrics, else from the answer itself. Raises EngineError, BudgetError.
    """
    texts: list[tuple[int, ...]] = []
    counts: list[tuple[tuple[int, ...], Counters]] = []
    run, without = uuid.uuid4().hex, ""
    for place, asked in enumerate(canary.prompts):
        ask = Ask(asked.ids, canary.max_tokens, cold=f"canary {run} {place}")
        (text,), found, without = _asked(endpoint, [ask], on_prompt)
        texts.append(text)
        if found is not None:
            counts.append(((place,), found))
    return Seen(tuple(texts), tuple(counts), without)


def drawn(endpoint: Endpoint, canary: Canary, passes: int, *, on_prompt: Callable[[], None] = lambda: None) -> Drawn:
    """Ask for texts of every prompt at the canary's temperature, each with a seed of its own, that go on behind an end
    of text; counters before the first and after the last. Raises EngineError, BudgetError."""
    run, count = uuid.uuid4().hex, len(canary.prompts)
    asks = [
        Ask(
            asked.ids,
            canary.max_tokens,
            canary.sampled.temperature,
            seed=turn * count + place,
            cold=f"canary {run} {turn} {place}",
            endless=True,
        )
        for turn in range(passes)
        for place, asked in enumerate(canary.prompts)
    ]
    texts, found, without = _asked(endpoint, asks, on_prompt)
    return Drawn(tuple(tuple(texts[turn * count : (turn + 1) * count]) for turn in range(passes)), found, without)


def _asked(
    endpoint: Endpoint, asks: Sequence[Ask], on_prompt: Callable[[], None]
) -> tuple[list[tuple[int, ...]], Counters | None, str]:
    """-> texts, what was counted over all of them, and why nothing was."""
    before, without = _settled(endpoint)
    texts, own = [], []
    for ask in asks:
        answer = endpoint.answer(ask, chat=False)
        texts.append(_tokens(answer))
        if (found := sources.from_json(answer.raw)) is not None:
            own.append(found)
        on_prompt()
    if before is None:
        gained = summed(own)
    else:
        after, without = _settled(endpoint, moved=before)
        gained = None if after is None else sources.less_first(after.minus(before), len(asks))
    return texts, None if gained is None else counted(gained), without


def from_files(canary: Canary, answers: Path, counters: Path | None) -> Seen:
    """answers: a JSON line a prompt, in their order: {"tokens": [...]} or {"text": "..."}, with counters of its own (as
    llama.cpp's `timings`) or none. counters: of all of them together, see `sources.read`.

    Raises ConfigError for other files, EngineError for counters that cannot be read.
    """
    try:
        lines = [loads(line) for line in answers.read_text().splitlines() if line.strip()]
        texts = tuple(_told(each) for each in lines)
    except OSError as error:
        raise ConfigError(f"{answers}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        expected = '{"tokens": [...]} or {"text": "..."} a line'
        raise ConfigError(f"{answers}: expected {expected}, found {shown(str(error))}") from error
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


def _told(line: object) -> tuple[int, ...]:
    if not isinstance(line, dict):
        raise TypeError(f"a line is {shown(line)}, no object")
    return token_ids(line["tokens"]) if "tokens" in line else tuple(string(line["text"], "text").encode())
