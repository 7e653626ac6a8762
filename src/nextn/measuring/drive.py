"""The reference's own prompts asked of a live engine, its counters read before and after: the same work for both."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nextn.benchmarking.workload import Prompt
from nextn.engines.answers import Answer, Ask
from nextn.engines.client import Budget
from nextn.engines.counters import Counters
from nextn.engines.endpoint import Endpoint, metrics_of, together
from nextn.engines.sources import from_metrics, less_first, read
from nextn.errors import ConfigError, EngineError
from nextn.measuring.plan import Plan
from nextn.measuring.texts import tokens_of
from nextn.model import Model

_AT_ONCE = 8
_LONG = 3.0  # prompts are asked in two parts, short and long, where the long ones are so many times as long


@dataclass(frozen=True)
class Seen:
    """What an engine counted over some prompts. places: which of the reference's; None: others, nobody knows which.

    answers: one for each place. alone: nothing but these prompts was counted.
    """

    temperature: float
    counters: Counters
    places: tuple[int, ...] | None = None
    answers: tuple[Answer, ...] = ()
    alone: bool = True


def halves(ids: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Places of the shorter and of the longer prompts, or of all where they are about as long."""
    order = sorted(range(len(ids)), key=lambda place: (len(ids[place]), place))
    cut = len(order) // 2
    short, long = order[:cut], order[cut:]
    if len(short) < 2 or sum(len(ids[p]) for p in long) / len(long) < _LONG * sum(len(ids[p]) for p in short) / cut:
        return [tuple(range(len(ids)))]
    return [tuple(sorted(short)), tuple(sorted(long))]


def counters_of(engine: str, budget: Budget, *, served: str | None = None, key_env: str | None = None) -> Counters:
    """What an engine has counted so far: of a file (metrics, log, JSON), or of a running one's /metrics.

    Raises ConfigError for what is neither, EngineError for an engine or a file that tells nothing of drafts.
    """
    if Path(engine).exists():
        return read(Path(engine), model=served)
    if "://" not in engine and not re.fullmatch(r"[\w.-]+:\d+(/.*)?|localhost", engine):
        raise ConfigError(f"--engine {engine}: no such file, and no address such as localhost:8000")
    return from_metrics(metrics_of(engine, budget, key_env=key_env), model=served)


def driven(
    endpoint: Endpoint,
    model: Model,
    prompts: Sequence[Prompt],
    plan: Plan,
    *,
    on_answer: Callable[[], None] = lambda: None,
) -> list[Seen]:
    """Every prompt at every temperature of the plan; short and long ones apart. The reference's own tokens are sent, or
    text where the endpoint has a template to put it through. Raises as `drive`; ConfigError for prompts without text.
    """
    ids = [tokens_of(model, prompt, plan.chat) for prompt in prompts]
    asked: list[str | tuple[int, ...]] = list(ids)
    if endpoint.chat:
        asked = [prompt.text for prompt in prompts]
        if not all(isinstance(each, str) for each in asked):
            raise ConfigError("prompts of token ids go through no template; leave --own-template out")
    return [
        drive(endpoint, asked, places, temperature, plan.max_tokens, seed=plan.seed, on_answer=on_answer)
        for temperature in plan.temperatures
        for places in halves(ids)
    ]


def drive(
    endpoint: Endpoint,
    prompts: Sequence[str | tuple[int, ...]],
    places: Sequence[int],
    temperature: float,
    max_tokens: int,
    *,
    seed: int = 0,
    on_answer: Callable[[], None] = lambda: None,
) -> Seen:
    """Ask the prompts at these places and take what the counters gained.

    Raises EngineError for an engine that counts no drafts, whose counters are set back in mid-run, or that refuses a
    prompt.
    """
    before = _counters(endpoint)
    answers: list[Answer] = []
    for start in range(0, len(places), _AT_ONCE):
        # A text of its own for the prefix cache: what an earlier run left there is not this run's.
        asks = [
            Ask(prompts[place], max_tokens, temperature, seed=seed + place, cold=f"{seed}-{temperature:g}-{place}")
            for place in places[start : start + _AT_ONCE]
        ]
        for answer in together([partial(endpoint.answer, ask) for ask in asks]):
            if isinstance(answer, EngineError):
                raise answer
            answers.append(answer)
            on_answer()
    gained = less_first(_counters(endpoint).minus(before), len(places))
    return Seen(temperature, gained, tuple(places), tuple(answers), _alone(gained, answers))


def _counters(endpoint: Endpoint) -> Counters:
    return from_metrics(endpoint.metrics(), model=endpoint.served.name)


def _alone(counters: Counters, answers: Sequence[Answer]) -> bool:
    """Whether the rounds gave no more tokens than the answers hold; the last round of each may give K too many."""
    told = [len(each.ids) if each.ids else each.completion_tokens for each in answers]
    if counters.drafts is None or counters.accepted is None or None in told:
        return True
    slack = len(answers) * (1 + -(-(counters.draft_tokens or 0) // max(1, counters.drafts)))
    return counters.drafts + counters.accepted <= sum(each or 0 for each in told) + slack
