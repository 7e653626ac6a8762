"""One model behind an OpenAI-compatible address: which it is, what it can tell, and its answers.

vLLM, SGLang and llama.cpp's server are told apart by nothing but what they answer.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from nextn.engines.answers import Answer, Ask, parsed, streamed, token_ids
from nextn.engines.client import KEY_ENV, Budget, Client
from nextn.engines.documents import MAX_COUNT
from nextn.errors import ConfigError, EngineError
from nextn.words import some

T = TypeVar("T")
_REFUSED = frozenset({400, 404, 405, 422, 501})  # the engine has no such thing, in its many ways of saying it
_MAX_MODELS, _MAX_NAME = 10_000, 1000
_PROBE = Ask("The quick brown fox jumps over the lazy dog, and", 4, logprobs=5)


@dataclass(frozen=True)
class Served:
    """A model that an engine offers. context: its longest text in tokens, prompt included; None if not told."""

    name: str
    context: int | None


@dataclass(frozen=True)
class Abilities:
    """What a first answer held: token ids, log-probabilities, whether fields beyond OpenAI's were taken; characters a
    prompt token."""

    ids: bool
    logprobs: bool
    extras: bool
    density: float


class Endpoint:
    """One served model. chat: prompts go through the engine's chat template, as a user message."""

    def __init__(self, client: Client, served: Served, abilities: Abilities, *, chat: bool = False) -> None:
        self.client, self.served, self.abilities, self.chat = client, served, abilities, chat

    @classmethod
    def open(
        cls, url: str, budget: Budget, *, model: str | None = None, key_env: str | None = None, chat: bool = False
    ) -> "Endpoint":
        """Find the model, and what the engine tells about its tokens: one or a few short requests.

        Raises EngineError for an absent engine, a model it does not have, or an answer that is not OpenAI's.
        """
        client = Client(url, budget, key=_key(key_env), key_env=key_env or KEY_ENV)
        served = _chosen(client, model)
        return cls(client, served, _abilities(client, served, chat=chat), chat=chat)

    @property
    def url(self) -> str:
        return self.client.url

    def close(self) -> None:
        self.client.close()

    def answer(self, ask: Ask, *, chat: bool | None = None) -> Answer:
        """The answer to one request. chat: over the endpoint's own way. Raises EngineError, BudgetError."""
        chat = self.chat if chat is None else chat
        if not self.abilities.logprobs:
            ask = replace(ask, logprobs=0)
        body = ask.body(self.served.name, chat=chat, extras=self.abilities.extras)
        return parsed(self.client.json(_path(chat), body, max_bytes=ask.max_bytes), f"{self.url}{_path(chat)}")

    def stream(self, ask: Ask) -> Answer:
        """The same, streamed: text and finish reason alone."""
        body = ask.body(self.served.name, chat=self.chat, extras=self.abilities.extras, stream=True)
        pieces = self.client.pieces(_path(self.chat), body, max_bytes=ask.max_bytes)
        return streamed(pieces, f"{self.url}{_path(self.chat)}", redacted=self.client.redacted)

    def tokens(self, text: str) -> tuple[int, ...] | None:
        """Token ids of a prompt, by the /tokenize of vLLM or llama.cpp; None where there is none."""
        body = {"model": self.served.name, "prompt": text, "content": text, "add_special": True}
        try:
            found = self.client.json("/tokenize", body, max_bytes=64 * 1024 + 32 * len(text)).get("tokens")
        except EngineError as error:
            if error.status in _REFUSED:
                return None
            raise
        try:
            return token_ids(found) or None
        except (TypeError, ValueError) as error:
            raise EngineError(f"{self.url}/tokenize: no list of token ids: {error}") from error

    def metrics(self) -> str:
        """The engine's counters as Prometheus text. Raises EngineError where there are none."""
        return _metrics(self.client)


def metrics_of(url: str, budget: Budget, *, key_env: str | None = None) -> str:
    """The same of an address, and nothing else is asked of it."""
    client = Client(url, budget, key=_key(key_env), key_env=key_env or KEY_ENV)
    try:
        return _metrics(client)
    finally:
        client.close()


def _metrics(client: Client) -> str:
    try:
        text = client.text("/metrics")
    except EngineError as error:
        if error.status in _REFUSED:
            raise _no_metrics(client.url, f"HTTP {error.status}", error.status) from error
        raise
    if text.lstrip()[:1] in ("<", "{", ""):
        raise _no_metrics(client.url, "what is there is no Prometheus text")
    return text


def is_refusal(error: EngineError) -> bool:
    """Whether the engine says that it does not do such a thing, rather than fails at it."""
    return error.status in _REFUSED


def together(calls: Sequence[Callable[[], T]]) -> list[T | EngineError]:
    """Results of calls made at the same time, in order; an EngineError stands for its call, all else is raised.

    Threads are daemons: an interrupt does not wait for answers.
    """
    results: list[T | BaseException | None] = [None] * len(calls)

    def work(place: int) -> None:
        try:
            results[place] = calls[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, EngineError):
            raise result
    return results  # type: ignore[return-value]  # no other exception is left


def _path(chat: bool) -> str:
    return "/v1/chat/completions" if chat else "/v1/completions"


def _key(name: str | None) -> str | None:
    key = os.environ.get(name or KEY_ENV, "").strip()
    if name and not key:
        raise ConfigError(f"--key-env {name}: that variable is not set; export the key under this name")
    return key or None


def _chosen(client: Client, model: str | None) -> Served:
    found = client.json("/v1/models").get("data")
    rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    served = [Served(row["id"], _context(row)) for row in rows if isinstance(row.get("id"), str)]
    if len(served) > _MAX_MODELS or any(len(each.name) > _MAX_NAME for each in served):
        bounds = f"more than {_MAX_MODELS} models, or a name of more than {_MAX_NAME} characters"
        raise EngineError(f"{client.url}/v1/models: lists {bounds}; not an engine that can be asked")
    if not served:
        raise EngineError(f"{client.url}/v1/models: lists no model; not an OpenAI-compatible engine, or none is loaded")
    names = [each.name for each in served]
    if model is None and len(served) > 1:
        raise ConfigError(f"{client.url} serves {some(names, 10)}: choose one with --model")
    for each in served:
        if model in (None, each.name):
            return each
    raise EngineError(f"{client.url} has no model {model!r}; it serves {some(names, 10)}")


def _context(row: Mapping) -> int | None:
    """vLLM and SGLang tell max_model_len, llama.cpp meta.n_ctx."""
    meta = row.get("meta")
    found = [row.get("max_model_len"), meta.get("n_ctx") if isinstance(meta, Mapping) else None]
    return next((each for each in found if type(each) is int and 0 < each <= MAX_COUNT), None)


def _abilities(client: Client, served: Served, *, chat: bool) -> Abilities:
    """Ask with everything, then with less, until the engine does not refuse."""
    refused: EngineError | None = None
    for ask, extras in ((_PROBE, True), (_PROBE, False), (replace(_PROBE, logprobs=0), False)):
        try:
            body = ask.body(served.name, chat=chat, extras=extras)
            answer = parsed(client.json(_path(chat), body, max_bytes=ask.max_bytes), f"{client.url}{_path(chat)}")
        except EngineError as error:
            if not is_refusal(error):
                raise
            refused = refused or error
            continue
        told = any(token.logprob is not None and token.best for token in answer.tokens)
        density = len(str(ask.prompt)) / (answer.prompt_tokens or len(str(ask.prompt)))
        return Abilities(answer.ids is not None, told, extras, density)
    assert refused is not None
    raise refused


def _no_metrics(url: str, reason: str, status: int | None = None) -> EngineError:
    how = "SGLang needs --enable-metrics, llama.cpp --metrics, and a proxy in front may hide it"
    return EngineError(f"{url}/metrics: no metrics ({reason}); {how}", status=status)
