"""One model behind an OpenAI-compatible address: what its engine returns, and its metrics.

vLLM, SGLang and llama.cpp's server are treated alike: only what they return makes a difference.
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from nextn.bounded_json import MAX_COUNT, JsonObject
from nextn.engines.answers import EngineAnswer, EngineRequest, parse_answer, parse_stream, token_ids
from nextn.engines.client import Budget, Client
from nextn.errors import BudgetError, ConfigError, EngineError
from nextn.text_format import some

_REFUSED = frozenset({400, 404, 405, 422, 501})  # how engines answer what they do not support
_MAX_MODELS, _MAX_NAME = 10_000, 1000
_PROBE = EngineRequest("The quick brown fox jumps over the lazy dog, and", 4, logprobs=5)
_IDS_PROBE = replace(_PROBE, prompt=(1, 2, 3, 4))  # of an engine without a tokenizer


@dataclass(frozen=True)
class ServedModel:
    """A model that an engine serves."""

    name: str
    context: int | None  # its longest text in tokens, prompt included; None where not reported


@dataclass(frozen=True)
class Capabilities:
    """What the first answer of an engine showed."""

    logprobs: bool
    extra_fields: bool  # fields beyond OpenAI's are accepted
    chars_per_token: float  # of the prompt


class Endpoint:
    """One served model. chat: prompts go through the engine's chat template, as a user message."""

    def __init__(self, client: Client, served: ServedModel, capabilities: Capabilities, *, chat: bool = False) -> None:
        self.client, self.served, self.capabilities, self.chat = client, served, capabilities, chat

    @classmethod
    def open(cls, address: str, budget: Budget, *, chat: bool = False) -> "Endpoint":
        """Find the model and the engine's capabilities, by a few short requests; the address is of `split_address`.

        Raises EngineError for an engine that is down, a model it does not serve, or an answer unlike OpenAI's.
        """
        url, model = split_address(address)
        client = Client(url, budget)
        served = _select_model(client, model)
        return cls(client, served, _probe_capabilities(client, served, chat=chat), chat=chat)

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def address(self) -> str:
        """The URL with the name of the model, as `open` takes it."""
        return f"{self.url}#{self.served.name}"

    def close(self) -> None:
        self.client.close()

    def answer(self, request: EngineRequest, *, chat: bool | None = None) -> EngineAnswer:
        """Answer one request. chat: overrides the endpoint's own. Raises EngineError, BudgetError."""
        chat = self.chat if chat is None else chat
        if not self.capabilities.logprobs:
            request = replace(request, logprobs=0)
        body = request.body(self.served.name, chat=chat, extra_fields=self.capabilities.extra_fields)
        document = self.client.json(_path(chat), body, max_bytes=request.max_bytes)
        return parse_answer(document, f"{self.url}{_path(chat)}")

    def stream(self, request: EngineRequest) -> EngineAnswer:
        """Answer one request by a stream: text and finish reason only."""
        extra_fields = self.capabilities.extra_fields
        body = request.body(self.served.name, chat=self.chat, extra_fields=extra_fields, stream=True)
        chunks = self.client.iter_bytes(_path(self.chat), body, max_bytes=request.max_bytes)
        return parse_stream(chunks, f"{self.url}{_path(self.chat)}", redact=self.client.redacted)

    def tokenize(self, text: str) -> tuple[int, ...] | None:
        """Return a prompt's token ids by the /tokenize of vLLM or llama.cpp; None where there is none."""
        body = {"model": self.served.name, "prompt": text, "content": text, "add_special": True}
        try:
            tokens = self.client.json("/tokenize", body, max_bytes=64 * 1024 + 32 * len(text)).get("tokens")
        except EngineError as error:
            if error.status in _REFUSED:
                return None
            raise
        try:
            return token_ids(tokens) or None
        except (TypeError, ValueError) as error:
            raise EngineError(f"{self.url}/tokenize: not a list of token ids: {error}") from error

    def is_measuring(self) -> bool:
        """Return whether it is a server of nextn that measures costs of its own while it is idle."""
        try:
            return self.client.json("/health").get("is_measuring") is True
        except BudgetError:
            raise
        except EngineError:  # without such a document
            return False

    def metrics(self) -> str:
        """Return the engine's metrics as Prometheus text. Raises EngineError where there are none."""
        return _metrics(self.client)


def split_address(address: str) -> tuple[str, str | None]:
    """Return an engine's URL and, if the address has `#MODEL` at its end, which of the served models is meant."""
    url, _, model = address.partition("#")
    return url, model or None


def fetch_metrics(url: str, budget: Budget) -> str:
    """Return the metrics at an address, without any other request to it."""
    with closing(Client(url, budget)) as client:
        return _metrics(client)


def _metrics(client: Client) -> str:
    try:
        text = client.text("/metrics")
    except EngineError as error:
        if error.status in _REFUSED:
            raise _no_metrics(client.url, f"HTTP {error.status}", error.status) from error
        raise
    if text.lstrip()[:1] in ("<", "{", ""):
        raise _no_metrics(client.url, "the answer is not Prometheus text")
    return text


def is_refusal(error: EngineError) -> bool:
    """Whether the engine does not support a request, as opposed to failing at it."""
    return error.status in _REFUSED


def _path(chat: bool) -> str:
    return "/v1/chat/completions" if chat else "/v1/completions"


def _select_model(client: Client, model: str | None) -> ServedModel:
    data = client.json("/v1/models").get("data")
    entries = [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
    served = [ServedModel(entry["id"], _context(entry)) for entry in entries if isinstance(entry.get("id"), str)]
    if len(served) > _MAX_MODELS or any(len(candidate.name) > _MAX_NAME for candidate in served):
        bounds = f"more than {_MAX_MODELS} models, or a name of more than {_MAX_NAME} characters"
        raise EngineError(f"{client.url}/v1/models: lists {bounds}; not an inference engine, check the address")
    if not served and model:
        return ServedModel(
            model, None
        )  # `transformers serve` lists only the hub's cache, and loads what a request names
    if not served:
        raise EngineError(
            f"{client.url}/v1/models: lists no model; not an OpenAI-compatible engine, or none is loaded. If it loads "
            f"models when they are asked for, name one, as in {client.url}#MODEL"
        )
    names = [candidate.name for candidate in served]
    if model is None and len(served) > 1:
        raise ConfigError(f"{client.url} serves {some(names, 10)}: choose one, as in {client.url}#{names[0]}")
    for candidate in served:
        if model in (None, candidate.name):
            return candidate
    raise EngineError(f"{client.url} has no model {model!r}; it serves {some(names, 10)}")


def _context(entry: JsonObject) -> int | None:
    """vLLM and SGLang report max_model_len, llama.cpp meta.n_ctx."""
    meta = entry.get("meta")
    lengths = [entry.get("max_model_len"), meta.get("n_ctx") if isinstance(meta, Mapping) else None]
    return next((length for length in lengths if type(length) is int and 0 < length <= MAX_COUNT), None)


def _probe_capabilities(client: Client, served: ServedModel, *, chat: bool) -> Capabilities:
    """Send a request with all fields, then with fewer, and one of token ids, until the engine does not refuse."""
    refusal: EngineError | None = None
    attempts = [(_PROBE, True, True), (_PROBE, True, False), (_PROBE, False, False), (_IDS_PROBE, True, True)]
    for probe, logprobs, extra_fields in attempts[:3] if chat else attempts:
        try:
            answer = Endpoint(client, served, Capabilities(logprobs, extra_fields, 1.0), chat=chat).answer(probe)
        except EngineError as error:
            if not is_refusal(error):
                raise
            refusal = refusal or error
            continue
        has_logprobs = any(token.logprob is not None and token.top_logprobs for token in answer.tokens)
        num_chars = len(probe.prompt)
        return Capabilities(has_logprobs, extra_fields, num_chars / (answer.prompt_tokens or num_chars))
    assert refusal is not None
    if chat and "template" in str(refusal):
        raise EngineError(f"{refusal} (--no-chat sends prompts as plain text)", status=refusal.status) from refusal
    raise refusal


def _no_metrics(url: str, reason: str, status: int | None = None) -> EngineError:
    how = "SGLang needs --enable-metrics, llama.cpp --metrics, and a proxy in front may hide it"
    return EngineError(f"{url}/metrics: no metrics ({reason}); {how}", status=status)
