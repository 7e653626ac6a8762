"""Run a canary's prompts through an engine over HTTP, or read the answers from files. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nextn.bounded_json import loads, short_repr, string
from nextn.conformance.record import Canary
from nextn.engines import counter_formats
from nextn.engines.answers import EngineAnswer, EngineRequest, token_ids
from nextn.engines.ask import ask_counted
from nextn.engines.counters import Counters
from nextn.engines.endpoint import Endpoint
from nextn.engines.json_formats import from_json
from nextn.errors import ConfigError


@dataclass(frozen=True)
class ConformanceRun:
    """An engine's greedy texts and counts."""

    texts: tuple[tuple[int, ...], ...]  # [prompts], new tokens
    counts: tuple[tuple[tuple[int, ...], Counters], ...]  # indices of prompts, and the counters over them
    no_counts_reason: str = ""


@dataclass(frozen=True)
class SampledRun:
    """An engine's texts and counts above temperature 0."""

    texts: tuple[tuple[tuple[int, ...], ...], ...]  # [passes][prompts], new tokens
    counters: Counters | None  # over all texts
    no_counts_reason: str = ""

    def as_record(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"passes": len(self.texts), "seen": None if self.counters is None else self.counters.as_record()}


def run_greedy(endpoint: Endpoint, canary: Canary, *, on_prompt: Callable[[], None] = lambda: None) -> ConformanceRun:
    """Request the greedy text of every prompt, one at a time, with the engine's counters before and after each.

    Counters come from /metrics, or else from the answers themselves. Raises EngineError, BudgetError.
    """
    texts: list[tuple[int, ...]] = []
    counts: list[tuple[tuple[int, ...], Counters]] = []
    reason = ""
    for index, prompt in enumerate(canary.prompts):
        request = EngineRequest(prompt.ids, canary.max_tokens, use_cache=False)
        found = ask_counted(endpoint, [request], on_answer=on_prompt)
        texts.append(_tokens(found.answers[0]))
        reason = found.no_counters
        if found.counters is not None:
            counts.append(((index,), found.counters))
    return ConformanceRun(tuple(texts), tuple(counts), reason)


def run_sampled(
    endpoint: Endpoint, canary: Canary, passes: int, *, on_prompt: Callable[[], None] = lambda: None
) -> SampledRun:
    """Request texts of every prompt at the canary's temperature, with counters before the first and after the last.

    Each has its own seed, and continues after an end of text. Raises EngineError, BudgetError.
    """
    count = len(canary.prompts)
    requests = [
        EngineRequest(
            prompt.ids,
            canary.max_tokens,
            canary.sampled.temperature,
            seed=number * count + index,
            use_cache=False,
            ignore_eos=True,
        )
        for number in range(passes)
        for index, prompt in enumerate(canary.prompts)
    ]
    found = ask_counted(endpoint, requests, on_answer=on_prompt)
    texts = [_tokens(answer) for answer in found.answers]
    by_pass = tuple(tuple(texts[start : start + count]) for start in range(0, len(texts), count))
    return SampledRun(by_pass, found.counters, found.no_counters)


def from_files(canary: Canary, answers: Path, counters: Path | None) -> ConformanceRun:
    """Read a run from files.

    answers: one JSON line per prompt, in order: {"tokens": [...]} or {"text": "..."}, with or without its own counts,
    such as llama.cpp's `timings`. counters: counts over all prompts, in a format of `counter_formats.read`.
    Raises ConfigError for other answers, EngineError for counts that cannot be read.
    """
    try:
        lines = [loads(line) for line in answers.read_text(encoding="utf-8").splitlines() if line.strip()]
        texts = tuple(_tokens_in_line(line) for line in lines)
    except OSError as error:
        raise ConfigError(f"{answers}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        expected = '{"tokens": [...]} or {"text": "..."} per line'
        raise ConfigError(f"{answers}: expected {expected}, found {short_repr(str(error))}") from error
    if len(texts) != len(canary.prompts):
        raise ConfigError(f"{answers}: {len(texts)} answers; the canary has {len(canary.prompts)} prompts")
    if counters is not None:
        return ConformanceRun(texts, ((tuple(range(len(texts))), counter_formats.read(counters)),))
    counts = [((index,), from_json(line)) for index, line in enumerate(lines)]
    known = tuple((indices, line_counts) for indices, line_counts in counts if line_counts is not None)
    return ConformanceRun(texts, known, "" if known else f"{answers} has no counters; give --counters")


def _tokens(answer: EngineAnswer) -> tuple[int, ...]:
    """Token ids; where an engine returns text only, its bytes, which are a canary's token ids."""
    return answer.ids or tuple(answer.text.encode())


def _tokens_in_line(line: object) -> tuple[int, ...]:
    if not isinstance(line, dict):
        raise TypeError(f"a line is {short_repr(line)}, not an object")
    return token_ids(line["tokens"]) if "tokens" in line else tuple(string(line["text"], "text").encode())
