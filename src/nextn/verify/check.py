"""What a check says, and what the checks share: the endpoints, the prompts, the answers that several of them need."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Literal

from nextn.benchmarking.workload import Prompt
from nextn.engines.answers import Answer, Ask
from nextn.engines.counters import Counters
from nextn.engines.endpoint import Endpoint, together
from nextn.errors import ConfigError, EngineError, need_whole

Outcome = Literal["passed", "failed", "unclear"]
TOP = 5  # best tokens asked for per position; OpenAI's completions give no more


@dataclass(frozen=True)
class Check:
    """unclear: it could not be told. evidence: what was seen. advice: what to do; "" for nothing. figures: for JSON."""

    name: str
    outcome: Outcome
    evidence: str
    advice: str = ""
    figures: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """max_tokens: of a greedy text. tie_gap: nats between two tokens up to which either may come out.

    samples: texts per prompt and endpoint at temperature 1, of sampled_tokens each, for sampled_prompts prompts.
    false_alarm: chance that a check of sampled text fails on a correct engine, all its tests together.
    concurrency: requests at once. context: tokens of the long-context check, at most the model's own.
    """

    max_tokens: int = 48
    tie_gap: float = 0.25
    samples: int = 64
    sampled_prompts: int = 4
    sampled_tokens: int = 8
    false_alarm: float = 0.01
    concurrency: int = 8
    context: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        need_whole(self, max_tokens=8, samples=8, sampled_prompts=1, sampled_tokens=2, concurrency=2, context=256)
        if not 0 < self.false_alarm < 0.5:
            raise ConfigError(f"false_alarm = {self.false_alarm}; expected a chance such as 0.01")
        if self.tie_gap < 0:
            raise ConfigError(f"tie_gap = {self.tie_gap}; expected nats, 0 or more")


@dataclass
class Session:
    """One run. target: MTP on. against: the same model without MTP, if there is one.

    readings: an endpoint's counters before the first check and after each, or why there are none.
    """

    target: Endpoint
    against: Endpoint | None
    prompts: Sequence[Prompt]
    settings: Settings
    run: str = field(default_factory=lambda: secrets.token_hex(4))
    readings: dict[str, list[Counters | str]] = field(default_factory=dict)
    sampled: dict[tuple[str, int], list[Answer]] = field(default_factory=dict)
    _greedy: dict[str, list[Answer]] = field(default_factory=dict)
    _tokens: dict[tuple[str, str], tuple[int, ...] | None] = field(default_factory=dict)
    _salts: count = field(default_factory=count)

    @property
    def endpoints(self) -> list[Endpoint]:
        return [each for each in (self.target, self.against) if each is not None]

    def greedy(self, endpoint: Endpoint) -> list[Answer]:
        """Greedy answers to all prompts, one at a time; asked for once."""
        if endpoint.url not in self._greedy:
            self._greedy[endpoint.url] = [endpoint.answer(self.ask(prompt)) for prompt in self.prompts]
        return self._greedy[endpoint.url]

    def ask(self, prompt: Prompt) -> Ask:
        """Greedy and past any prefix cache, which has a check of its own."""
        return Ask(prompt.text, self.settings.max_tokens, logprobs=TOP, cold=self.salt())

    def behind(self, endpoint: Endpoint, prompt: str | tuple[int, ...], answer: Answer, place: int) -> Answer | None:
        """The one token that comes behind a prompt and the first `place` tokens of its answer, as a fresh prompt, so
        that nothing is drafted; None where the engine tells no token ids, or prompts go through a chat template."""
        told = prompt if not isinstance(prompt, str) else answer.prompt_ids or self._ids(endpoint, prompt)
        if endpoint.chat or told is None or answer.ids is None:
            return None
        return endpoint.answer(Ask((*told, *answer.ids[:place]), 1, logprobs=TOP, cold=self.salt()))

    def _ids(self, endpoint: Endpoint, prompt: str) -> tuple[int, ...] | None:
        key = (endpoint.url, prompt)
        if key not in self._tokens:
            self._tokens[key] = endpoint.tokens(prompt)
        return self._tokens[key]

    def salt(self) -> str:
        """A text that no run has sent before."""
        return f"{self.run}-{next(self._salts)}"

    def at_once(self, endpoint: Endpoint, asks: Sequence[Ask]) -> list[Answer]:
        """Answers in order, `concurrency` requests at a time. Raises the first EngineError."""
        answers: list[Answer] = []
        size = self.settings.concurrency
        for start in range(0, len(asks), size):
            for found in together([partial(endpoint.answer, ask) for ask in asks[start : start + size]]):
                if isinstance(found, EngineError):
                    raise found
                answers.append(found)
        return answers
