"""A worker's side of the line: JSON requests on stdin, JSON answers on stdout. Needs the standard library alone.

Its first line is `{"ready": true, "versions": {...}, "flags": {...}, "counts": bool}`, or `{"unavailable": reason}` and
the end. After it, each `{"prompt": ids, "max_tokens": n, "drafts": K, "eos": ids}` is answered by
`{"tokens": ids, "seconds": s, "rounds": n, "drafted": n, "kept": n, "lengths": [n, ...]}`, or `{"error": reason}`.
counts: whether it has counters; seconds: from the moment the prefill's token is there to the last one; rounds: trunk
passes in this time; drafted, kept: tokens, for K = 0 none; lengths: tokens of each round, none where the engine does
not tell them.

`{"load": {...}}` ends the engine and loads it with other options; the answer is a first line again. `{"metrics": true}`
is answered by `{"text": the engine's counters as Prometheus text}`.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TextIO


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    max_tokens: int
    drafts: int
    eos: list[int]


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    seconds: float
    rounds: int
    drafted: int
    kept: int
    lengths: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, parts: list[list[int]], seconds: float, request: Request) -> "Answer":
        """parts: the prefill's token, then what each round gave; the kept drafts are all but the last of a round."""
        rounds = parts[1:]
        kept = sum(len(part) - 1 for part in rounds) if request.drafts else 0
        tokens, lengths = [token for part in parts for token in part], list(map(len, rounds))
        return cls(tokens, seconds, len(rounds), request.drafts * len(rounds), kept, lengths)


@dataclass(frozen=True)
class Engine:
    """What a worker serves with: `decode` answers one request; versions and flags go into the record.

    metrics: its counters as Prometheus text. close: gives back what it holds, before another is loaded.
    """

    decode: Callable[[Request], Answer]
    versions: dict[str, str]
    flags: dict[str, object]
    metrics: Callable[[], str] | None = None
    close: Callable[[], None] = lambda: None


def serve(load: Callable[[dict[str, object]], Engine]) -> None:
    """Load the engine by the options (a JSON object, the first argument), then answer until stdin ends."""
    answers = _claim_stdout()
    engine = _loaded(load, json.loads(sys.argv[1]), answers)
    for line in sys.stdin if engine is not None else ():
        asked = json.loads(line)
        if "load" in asked:
            if engine is not None:
                engine.close()
            engine = None  # what it held goes before the next one is loaded
            engine = _loaded(load, asked["load"], answers)
        else:
            _say(answers, _answer(engine, asked))


def _loaded(load: Callable[[dict[str, object]], Engine], options: dict[str, object], answers: TextIO) -> Engine | None:
    """The engine, and the line that says so; None, and its reason, where it cannot run."""
    try:
        engine = load(options)
    except Exception as error:  # whatever an engine raises is the reason why it cannot run
        traceback.print_exc()
        _say(answers, {"unavailable": f"{type(error).__name__}: {error}"})
        return None
    _say(
        answers,
        {"ready": True, "versions": engine.versions, "flags": engine.flags, "counts": engine.metrics is not None},
    )
    return engine


def _answer(engine: Engine | None, asked: dict) -> dict[str, object]:
    try:
        if engine is None:
            raise RuntimeError("no engine is loaded")
        if "metrics" not in asked:
            return asdict(engine.decode(Request(**asked)))
        if engine.metrics is None:
            raise NotImplementedError("this engine has no counters")
        return {"text": engine.metrics()}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _claim_stdout() -> TextIO:
    """Stdout for answers alone: what an engine prints, from C++ too, goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, value: dict[str, object]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()
