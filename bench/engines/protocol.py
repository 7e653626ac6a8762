"""A worker's side of the line: JSON requests on stdin, JSON answers on stdout. Needs the standard library alone.

Its first line is `{"ready": true, "versions": {...}, "flags": {...}}`, or `{"unavailable": reason}` and the end. After
it, each `{"prompt": ids, "max_tokens": n, "drafts": K, "eos": ids}` is answered by
`{"tokens": ids, "seconds": s, "rounds": n, "drafted": n, "kept": n}`, or `{"error": reason}`. seconds: from the moment
the prefill's token is there to the last one; rounds: trunk passes in this time; drafted, kept: tokens, for K = 0 none.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
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

    @classmethod
    def of(cls, parts: list[list[int]], seconds: float, request: Request) -> "Answer":
        """parts: the prefill's token, then what each round gave; the kept drafts are all but the last of a round."""
        rounds = parts[1:]
        kept = sum(len(part) - 1 for part in rounds) if request.drafts else 0
        return cls(
            [token for part in parts for token in part], seconds, len(rounds), request.drafts * len(rounds), kept
        )


@dataclass(frozen=True)
class Engine:
    """What a worker serves with: `decode` answers one request; versions and flags go into the record."""

    decode: Callable[[Request], Answer]
    versions: dict[str, str]
    flags: dict[str, object]


def serve(load: Callable[[dict[str, object]], Engine]) -> None:
    """Load the engine by the options (a JSON object, the first argument), then answer until stdin ends."""
    answers = _claim_stdout()
    try:
        engine = load(json.loads(sys.argv[1]))
    except Exception as error:  # whatever an engine raises is the reason why it cannot run
        traceback.print_exc()
        _say(answers, {"unavailable": f"{type(error).__name__}: {error}"})
        return
    _say(answers, {"ready": True, "versions": engine.versions, "flags": engine.flags})
    for line in sys.stdin:
        try:
            _say(answers, asdict(engine.decode(Request(**json.loads(line)))))
        except Exception as error:
            traceback.print_exc()
            _say(answers, {"error": f"{type(error).__name__}: {error}"})


def _claim_stdout() -> TextIO:
    """Stdout for answers alone: what an engine prints, from C++ too, goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, value: dict[str, object]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()
