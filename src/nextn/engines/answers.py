"""Requests to an OpenAI-compatible engine, and its parsed answers, streamed or not.

Log-probabilities come in three shapes. OpenAI's completions: parallel lists; its chat: a list under `content`;
llama.cpp's completions: the shape of chat, with token ids.
"""

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nextn.bounded_json import JsonObject, loads, logprob, optional_count, short_repr, string, token_id
from nextn.errors import EngineError

_ID = "token_id:"  # vLLM's return_tokens_as_token_ids
_MAX_EVENT = 1024 * 1024  # bytes of one event of a stream
_MAX_EVENTS = 100_000
_MAX_NAME = 200  # characters of a finish reason, and of a function's name


@dataclass(frozen=True)
class EngineRequest:
    """One request for a completion."""

    prompt: str | tuple[int, ...]  # text or token ids
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int = 0  # how many of the likeliest tokens to list per position; 0 for none
    schema: Mapping[str, object] | None = None  # a JSON schema that the text must fit
    tools: tuple[Mapping[str, object], ...] = ()  # OpenAI's function tools
    tool_choice: str | None = None  # the name of a tool that must be called
    # Whether a prefix cache may hold a part of the prompt; else a unique salt keeps all that was sent before out of it
    # (vLLM, SGLang), or the cache is off (llama.cpp).
    use_cache: bool = True
    template_variables: Mapping[str, object] = field(default_factory=dict)  # of the engine's own chat template
    ignore_eos: bool = False  # continue after an end-of-text token, up to max_tokens (vLLM, SGLang, llama.cpp)

    @property
    def max_bytes(self) -> int:
        """Upper limit of an answer's size: text and listed tokens of each token, the prompt's ids, and overhead."""
        return 256 * 1024 + 4096 * self.max_tokens + 16 * len(self.prompt)

    def body(self, model: str, *, chat: bool, extra_fields: bool, stream: bool = False) -> dict[str, object]:
        """Return the JSON to post. extra_fields: also those beyond OpenAI's (token ids, sampling filters off).

        -1 turns top-k off in vLLM, SGLang and llama.cpp alike; without it a model's generation_config may turn it on.
        """
        prompt = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        body: dict[str, object] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        body |= {"model": model, "max_tokens": self.max_tokens, "temperature": self.temperature, "top_p": 1.0}
        body |= {"stream": True} if stream else {}
        body |= {"chat_template_kwargs": dict(self.template_variables)} if chat and self.template_variables else {}
        body |= {"seed": self.seed} if self.seed is not None else {}
        body |= {"stop": list(self.stop)} if self.stop else {}
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": self.logprobs} if chat else {"logprobs": self.logprobs}
        if self.schema is not None:
            json_schema = {"name": "answer", "schema": dict(self.schema), "strict": True}
            body |= {"response_format": {"type": "json_schema", "json_schema": json_schema}}
        if self.tools:
            body |= {"tools": [dict(tool) for tool in self.tools]}
        if self.tool_choice is not None:
            body |= {"tool_choice": {"type": "function", "function": {"name": self.tool_choice}}}
        if extra_fields:
            body |= {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
            body |= {"return_token_ids": True}
            body |= {"return_tokens_as_token_ids": True} if self.logprobs else {}
            body |= {} if self.use_cache else {"cache_salt": unique_salt(), "cache_prompt": False}
            body |= {"ignore_eos": True} if self.ignore_eos else {}
        return body


def unique_salt() -> str:
    """Return a text that no request has begun with: nothing of an earlier run is in a prefix cache under it."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class TopLogprob:
    """One entry of the list of the likeliest tokens at a position."""

    text: str
    id: int | None
    logprob: float  # nats

    @property
    def name(self) -> str | int:
        return self.text if self.id is None else self.id


@dataclass(frozen=True)
class AnswerToken:
    """One generated token."""

    text: str
    id: int | None = None
    logprob: float | None = None  # nats; None where the engine returns none
    top_logprobs: tuple[TopLogprob, ...] = ()  # the likeliest tokens at this position, in descending order

    @property
    def name(self) -> str | int:
        return self.text if self.id is None else self.id

    def listed(self, name: str | int) -> float | None:
        """Return the log-probability of a token in the list of the likeliest; None if it is not there."""
        return next((entry.logprob for entry in self.top_logprobs if entry.name == name), None)


@dataclass(frozen=True)
class ToolCall:
    """A tool call; arguments as the engine wrote them."""

    name: str
    arguments: str


@dataclass(frozen=True)
class EngineAnswer:
    """An engine's answer to one request; None or () for what the engine does not return."""

    text: str
    finish_reason: str | None
    tokens: tuple[AnswerToken, ...] = ()  # empty where the engine returns neither ids nor log-probabilities
    prompt_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # prompt tokens that came from the prefix cache
    tool_calls: tuple[ToolCall, ...] = ()
    raw: Mapping[str, object] = field(default_factory=dict, repr=False, compare=False)  # for `timings`, `meta_info`

    @property
    def ids(self) -> tuple[int, ...] | None:
        ids = tuple(token.id for token in self.tokens if token.id is not None)
        return ids if ids and len(ids) == len(self.tokens) else None

    @property
    def names(self) -> tuple[str | int, ...]:
        """What can be compared: token ids or texts; without either, the characters of the text."""
        return tuple(token.name for token in self.tokens) or tuple(self.text)


def common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many tokens or characters two texts have in common before the first difference."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((position for position, (a, b) in pairs if a != b), min(len(one), len(other)))


def parse_answer(document: Mapping[str, object], url: str) -> EngineAnswer:
    """Parse an answer of /v1/completions or /v1/chat/completions. Raises EngineError for other JSON."""
    try:
        return _answer(document)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        message = f"{url}: not an OpenAI-compatible answer ({_reason(error)}): {short_repr(document)}"
        raise EngineError(message) from error


def _reason(error: Exception) -> str:
    """Short, as a KeyError or a TypeError may hold a name of any length."""
    return f"{type(error).__name__}: {error}"[:200]


def _answer(document: Mapping[str, object]) -> EngineAnswer:
    choice = _first_choice(document)
    message = _object(choice.get("message"), "message")
    text = message.get("content") if "message" in choice else choice["text"]
    usage = _object(document.get("usage"), "usage")
    details = _object(usage.get("prompt_tokens_details"), "prompt_tokens_details")
    return EngineAnswer(
        text="" if text is None else string(text, "text"),
        finish_reason=_finish_reason(choice),
        tokens=_tokens(choice),
        prompt_ids=token_ids(choice.get("prompt_token_ids") or document.get("prompt_token_ids")) or None,
        prompt_tokens=optional_count(usage.get("prompt_tokens"), "prompt_tokens"),
        completion_tokens=optional_count(usage.get("completion_tokens"), "completion_tokens"),
        cached_tokens=optional_count(details.get("cached_tokens"), "cached_tokens"),
        tool_calls=tuple(_tool_call(call) for call in _list(message.get("tool_calls"), "tool_calls")),
        raw=document,
    )


def _finish_reason(choice: JsonObject) -> str | None:
    reason = choice.get("finish_reason")
    return None if reason is None else string(reason, "finish_reason", maximum=_MAX_NAME)


def _object(value: object, name: str) -> JsonObject:
    """An object, or an empty one for null. Raises TypeError for anything else."""
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{name} = {short_repr(value)}; expected an object")
    return value or {}


def _list(value: object, name: str) -> list[Any]:
    """A list, or an empty one for null. Raises TypeError for anything else."""
    if value is not None and not isinstance(value, list):
        raise TypeError(f"{name} = {short_repr(value)}; expected a list")
    return value or []


def token_ids(value: object) -> tuple[int, ...]:
    """Check a list of token ids; () for None. Raises TypeError or ValueError for other values."""
    return tuple(map(token_id, _list(value, "token ids")))


def _first_choice(document: Mapping[str, object]) -> JsonObject:
    choices = document["choices"]
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise TypeError("choices is no list of objects")
    return choices[0]


def _tool_call(call: JsonObject) -> ToolCall:
    function = call["function"]
    return ToolCall(string(function["name"], "name", maximum=_MAX_NAME), string(function["arguments"], "arguments"))


def _tokens(choice: JsonObject) -> tuple[AnswerToken, ...]:
    logprobs, ids = _object(choice.get("logprobs"), "logprobs"), token_ids(choice.get("token_ids"))
    if not logprobs:
        tokens: list[AnswerToken] = []
    elif logprobs.get("content") is not None:
        tokens = [_chat_token(entry) for entry in _list(logprobs["content"], "content")]
    else:
        names = _list(logprobs["tokens"], "tokens")
        lists = _list(logprobs.get("top_logprobs"), "top_logprobs") or [None] * len(names)
        rows = zip(names, _list(logprobs["token_logprobs"], "token_logprobs"), lists, strict=True)
        tokens = [_completion_token(text, value, _object(top, "top_logprobs")) for text, value, top in rows]
    # Where both are returned, names are those of the list of the likeliest tokens, as the two are compared.
    return tuple(tokens) or tuple(AnswerToken(f"{_ID}{token}", token) for token in ids)


def _chat_token(entry: JsonObject) -> AnswerToken:
    top = [
        TopLogprob(string(other["token"], "token"), _id(other), logprob(other["logprob"]))
        for other in _list(entry.get("top_logprobs"), "top_logprobs")
    ]
    return AnswerToken(string(entry["token"], "token"), _id(entry), _nats(entry.get("logprob")), _sorted(top))


def _completion_token(text: object, value: object, top: Mapping[str, object]) -> AnswerToken:
    entries = [TopLogprob(name, _id_in_name(name), logprob(nats)) for name, nats in top.items()]
    name = string(text, "token")
    return AnswerToken(name, _id_in_name(name), _nats(value), _sorted(entries))


def _sorted(entries: list[TopLogprob]) -> tuple[TopLogprob, ...]:
    return tuple(sorted(entries, key=lambda entry: -entry.logprob))


def _nats(value: object) -> float | None:
    """None where the engine has no number, which some write as NaN."""
    return None if value is None or value != value else logprob(value)


def _id(entry: JsonObject) -> int | None:
    return token_id(entry["id"]) if entry.get("id") is not None else _id_in_name(entry["token"])


def _id_in_name(name: str) -> int | None:
    match = re.fullmatch(rf"{_ID}([0-9]{{1,10}})", name)
    return token_id(int(match[1])) if match else None


def parse_stream(
    chunks: Iterable[bytes], url: str, *, redact: Callable[[str], str] = lambda text: text
) -> EngineAnswer:
    """Assemble the answer of a stream of server-sent events: text and finish reason.

    redact: applied to each event and to the complete text, as a key may be split over several events.
    Raises EngineError for a stream that breaks off, holds an error, or is none.
    """
    parts: list[str] = []
    finish_reason, done = None, False
    for data in map(redact, _events(chunks, url)):
        if data == "[DONE]":
            done = True
            break
        try:
            part, reason = _stream_part(loads(data), url)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"{url}: not an OpenAI-compatible stream ({_reason(error)}): {data[:200]}") from error
        parts.append(part)
        finish_reason = reason or finish_reason
    text = redact("".join(parts))
    if not done:
        raise EngineError(f"{url}: the stream ends without [DONE] after {len(text)} characters")
    return EngineAnswer(text, finish_reason)


def _stream_part(document: object, url: str) -> tuple[str, str | None]:
    """The text and the finish reason of one event."""
    event = _object(document, "event")
    if "error" in event:
        raise EngineError(f"{url}: the stream holds an error: {short_repr(event['error'])}")
    choice = _first_choice(event) if event["choices"] else {}
    part = _object(choice.get("delta", choice), "delta")
    return string(part.get("content") or part.get("text") or "", "text"), _finish_reason(choice)


def _events(chunks: Iterable[bytes], url: str) -> Iterator[str]:
    """The data of server-sent events; an event may be split over several chunks, and a chunk hold several."""
    num, rest = 0, bytearray()
    for chunk in chunks:
        rest += chunk
        if b"\n" not in chunk:
            if len(rest) > _MAX_EVENT:
                raise EngineError(f"{url}: an event of the stream is longer than {_MAX_EVENT:,} bytes")
            continue
        *lines, rest = rest.split(b"\n")
        for line in lines:
            num += 1
            if num > _MAX_EVENTS:
                raise EngineError(f"{url}: the stream has more than {_MAX_EVENTS:,} lines")
            if line.startswith(b"data:"):
                yield line[5:].strip().decode(errors="replace")
    if rest.startswith(b"data:"):
        yield rest[5:].strip().decode(errors="replace")
