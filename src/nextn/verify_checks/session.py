"""What the checks share: endpoints, prompts, and answers that several of them need."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from nextn.engines.answers import EngineAnswer, EngineRequest
from nextn.engines.ask import CounterSpan, ask
from nextn.engines.endpoint import Endpoint
from nextn.errors import require, require_at_least
from nextn.evaluate.workload import Prompt

NUM_LOGPROBS = 5  # of the likeliest tokens per position; OpenAI's completions give no more


@dataclass(frozen=True)
class VerifySettings:
    """How much a run of `verify` sends, and what it tolerates. Raises ConfigError for invalid values.

    Attributes:
        max_tokens: Of a greedy text.
        tie_gap: Nats between two tokens up to which rounding may choose either.
        samples: Texts per prompt and endpoint at temperature 1; half as many at 0.2.
        sampled_prompts: Prompts that are sampled.
        sampled_tokens: Of each sampled text.
        false_alarm: Chance that a check of sampled text fails on a correct engine, over all its tests.
        concurrency: Requests at once.
        context: Tokens of the long-context check, at most the model's own limit.
        seed: Of the first request.

    Example:
        >>> nextn.VerifySettings(max_tokens=16).samples
        64
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
        require_at_least(self, max_tokens=8, samples=8, sampled_prompts=1, sampled_tokens=2, concurrency=2, context=256)
        require(
            self,
            false_alarm=(0 < self.false_alarm < 0.5, "a probability below 0.5, such as 0.01"),
            tie_gap=(self.tie_gap >= 0, "0 or more (nats)"),
        )


@dataclass
class VerifySession:
    """One run of checks."""

    target: Endpoint  # with MTP on
    against: Endpoint | None  # the same model without MTP, if there is one
    prompts: Sequence[Prompt]
    settings: VerifySettings
    sampled: dict[tuple[str, int, float], list[EngineAnswer]] = field(default_factory=dict)
    _greedy: dict[str, list[EngineAnswer]] = field(default_factory=dict)
    _prompt_ids: dict[tuple[str, str], tuple[int, ...] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counters = {endpoint.address: CounterSpan(endpoint) for endpoint in self.endpoints}

    def without_mtp(self, against: Endpoint) -> "VerifySession":
        """Return a session that checks the server without MTP alone, with what it has answered."""
        return VerifySession(against, None, self.prompts, self.settings, self.sampled, self._greedy, self._prompt_ids)

    @property
    def endpoints(self) -> list[Endpoint]:
        return [endpoint for endpoint in (self.target, self.against) if endpoint is not None]

    def greedy(self, endpoint: Endpoint) -> list[EngineAnswer]:
        """Return the greedy answers to all prompts, requested one at a time and only once."""
        if endpoint.address not in self._greedy:
            requests = [self.greedy_request(prompt) for prompt in self.prompts]
            self._greedy[endpoint.address] = list(ask(endpoint, requests))
        return self._greedy[endpoint.address]

    def greedy_request(self, prompt: Prompt) -> EngineRequest:
        """Return a greedy request that bypasses any prefix cache, which has a check of its own."""
        return EngineRequest(prompt.text, self.settings.max_tokens, logprobs=NUM_LOGPROBS, use_cache=False)

    def next_token(
        self, endpoint: Endpoint, prompt: str | tuple[int, ...], answer: EngineAnswer, position: int
    ) -> EngineAnswer | None:
        """Request the one token after a prompt and the first `position` tokens of its answer.

        They are sent as a new prompt, so that nothing is drafted. Returns None where the engine returns no token ids,
        or prompts go through a chat template.
        """
        ids = prompt if not isinstance(prompt, str) else answer.prompt_ids or self._tokenize(endpoint, prompt)
        if endpoint.chat or ids is None or answer.ids is None:
            return None
        context = (*ids, *answer.ids[:position])
        return endpoint.answer(EngineRequest(context, 1, logprobs=NUM_LOGPROBS, use_cache=False))

    def _tokenize(self, endpoint: Endpoint, prompt: str) -> tuple[int, ...] | None:
        key = (endpoint.address, prompt)
        if key not in self._prompt_ids:
            self._prompt_ids[key] = endpoint.tokenize(prompt)
        return self._prompt_ids[key]

    def answer_all(self, endpoint: Endpoint, requests: Sequence[EngineRequest]) -> list[EngineAnswer]:
        """Answer requests in order, `concurrency` at a time. Raises the first EngineError."""
        return list(ask(endpoint, requests, concurrency=self.settings.concurrency))
