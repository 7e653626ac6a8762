"""The worker's side of the protocol: JSON requests on stdin, JSON answers on stdout. Uses only the standard library.

Its first line is `{"ready": true, "versions": {...}, "flags": {...}, "counts": bool}`, or `{"unavailable": reason}`,
after which it exits. Then each `{"prompt": ids, "max_tokens": n, "num_speculative_tokens": K, "eos": ids}` is answered
by `{"tokens": ids, "seconds": s, "rounds": n, "drafted": n, "num_accepted": n, "lengths": [n, ...]}` or
`{"error": text}`.

- counts: whether it has counters
- seconds: from the prefill's token to the last one
- rounds: trunk passes in this time
- drafted, num_accepted: draft tokens, 0 for K = 0
- lengths: tokens of each round, [] if the engine does not report them

`{"load": {...}}` closes the engine and loads it with other options, answered as the first line. `{"metrics": true}` is
answered by `{"text": the engine's counters as Prometheus text}`.
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
    num_speculative_tokens: int
    eos: list[int]


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    seconds: float
    rounds: int
    drafted: int
    num_accepted: int
    lengths: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, parts: list[list[int]], seconds: float, request: Request) -> "Answer":
        """Count from the tokens of the prefill and of each round, of which all but the last are accepted drafts."""
        rounds = parts[1:]
        num_accepted = sum(len(part) - 1 for part in rounds) if request.num_speculative_tokens else 0
        tokens, lengths = [token for part in parts for token in part], list(map(len, rounds))
        return cls(tokens, seconds, len(rounds), request.num_speculative_tokens * len(rounds), num_accepted, lengths)


@dataclass(frozen=True)
class Engine:
    """What a worker serves.

    Attributes:
        decode: Answers one request.
        versions: For the record.
        flags: For the record.
        metrics: Returns the counters as Prometheus text.
        close: Frees its resources before another engine is loaded.
    """

    decode: Callable[[Request], Answer]
    versions: dict[str, str]
    flags: dict[str, object]
    metrics: Callable[[], str] | None = None
    close: Callable[[], None] = lambda: None


def serve(load: Callable[[dict[str, object]], Engine]) -> None:
    """Load the engine with the options (first argument, a JSON object), then answer until stdin ends."""
    answers = _claim_stdout()
    engine = _loaded(load, json.loads(sys.argv[1]), answers)
    for line in sys.stdin if engine is not None else ():
        message = json.loads(line)
        if "load" in message:
            if engine is not None:
                engine.close()
            engine = None  # freed before the next one is loaded
            engine = _loaded(load, message["load"], answers)
        else:
            _write(answers, _answer(engine, message))


def _loaded(load: Callable[[dict[str, object]], Engine], options: dict[str, object], answers: TextIO) -> Engine | None:
    """Load the engine and write the first line; None if it cannot run."""
    try:
        engine = load(options)
    except Exception as error:  # whatever an engine raises is the reason why it cannot run
        traceback.print_exc()
        _write(answers, {"unavailable": f"{type(error).__name__}: {error}"})
        return None
    _write(
        answers,
        {"ready": True, "versions": engine.versions, "flags": engine.flags, "counts": engine.metrics is not None},
    )
    return engine


def _answer(engine: Engine | None, message: dict) -> dict[str, object]:
    try:
        if engine is None:
            raise RuntimeError("no engine is loaded")
        if "metrics" not in message:
            return asdict(engine.decode(Request(**message)))
        if engine.metrics is None:
            raise NotImplementedError("this engine has no counters")
        return {"text": engine.metrics()}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _claim_stdout() -> TextIO:
    """Reserve stdout for answers: what the engine prints, also from C++, goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _write(answers: TextIO, value: dict[str, object]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()
