"""What is asked of an OpenAI-compatible engine, and what its answers hold. Knows the three shapes of log-probabilities.

OpenAI's completions: parallel lists; its chat: a list under `content`; llama.cpp's completions: chat's shape with ids.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from nextn.engines.documents import loads, logprob, optional_count, shown, string, token_id
from nextn.errors import EngineError

_ID = "token_id:"  # vLLM's return_tokens_as_token_ids
_MAX_EVENT = 1024 * 1024  # bytes of one event of a stream
_MAX_EVENTS = 100_000
_MAX_NAME = 200  # characters of a finish reason, and of a function's name


@dataclass(frozen=True)
class Ask:
    """One request. prompt: text, or token ids. logprobs: how many best tokens per position, 0 for none.

    schema: a JSON schema that the text must fit. tools: OpenAI's function tools; choice: one that must be called.
    cold: a text of its own, so that nothing comes from a prefix cache (vLLM, SGLang: cache_salt). endless: go on behind
    an end-of-text token, up to max_tokens (vLLM, SGLang, llama.cpp: ignore_eos).
    """

    prompt: str | tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int = 0
    schema: Mapping[str, object] | None = None
    tools: tuple[Mapping[str, object], ...] = ()
    choice: str | None = None
    cold: str | None = None
    endless: bool = False

    @property
    def max_bytes(self) -> int:
        """Bytes that an answer may have: per token its text and its list of the likeliest, the prompt's ids, a rest."""
        return 256 * 1024 + 4096 * self.max_tokens + 16 * len(self.prompt)

    def body(self, model: str, *, chat: bool, extras: bool, stream: bool = False) -> dict[str, object]:
        """The JSON that is posted. extras: fields beyond OpenAI's: ids of tokens, and no filter on the law.

        -1 turns top-k off in vLLM, SGLang and llama.cpp alike; without it a model's generation_config may turn it on.
        """
        prompt = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        said: dict[str, object] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        said |= {"model": model, "max_tokens": self.max_tokens, "temperature": self.temperature, "top_p": 1.0}
        said |= {"stream": True} if stream else {}
        said |= {"seed": self.seed} if self.seed is not None else {}
        said |= {"stop": list(self.stop)} if self.stop else {}
        if self.logprobs:
            said |= {"logprobs": True, "top_logprobs": self.logprobs} if chat else {"logprobs": self.logprobs}
        if self.schema is not None:
            named = {"name": "answer", "schema": dict(self.schema), "strict": True}
            said |= {"response_format": {"type": "json_schema", "json_schema": named}}
        if self.tools:
            said |= {"tools": [dict(tool) for tool in self.tools]}
        if self.choice is not None:
            said |= {"tool_choice": {"type": "function", "function": {"name": self.choice}}}
        if extras:
            said |= {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
            said |= {"return_token_ids": True}
            said |= {"return_tokens_as_token_ids": True} if self.logprobs else {}
            said |= {"cache_salt": self.cold, "cache_prompt": False} if self.cold else {}
            said |= {"ignore_eos": True} if self.endless else {}
        return said


@dataclass(frozen=True)
class Best:
    """One token of a list of best ones. logprob in nats."""

    text: str
    id: int | None
    logprob: float

    @property
    def name(self) -> str | int:
        return self.text if self.id is None else self.id


@dataclass(frozen=True)
class Token:
    """A generated token. logprob in nats, None if not told; best: the likeliest tokens there, best first."""

    text: str
    id: int | None = None
    logprob: float | None = None
    best: tuple[Best, ...] = ()

    @property
    def name(self) -> str | int:
        return self.text if self.id is None else self.id

    def listed(self, name: str | int) -> float | None:
        """The log-probability of a token in the list of best ones."""
        return next((each.logprob for each in self.best if each.name == name), None)


@dataclass(frozen=True)
class Call:
    """A tool call; arguments as the engine wrote them."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """tokens: empty where the engine tells neither ids nor log-probabilities. cached: prompt tokens that came from the
    prefix cache, None if not told. raw: the whole JSON, for `timings` and `meta_info`."""

    text: str
    finish: str | None
    tokens: tuple[Token, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached: int | None = None
    calls: tuple[Call, ...] = ()
    raw: Mapping[str, object] = field(default_factory=dict, repr=False, compare=False)

    @property
    def ids(self) -> tuple[int, ...] | None:
        found = tuple(token.id for token in self.tokens if token.id is not None)
        return found if found and len(found) == len(self.tokens) else None

    @property
    def names(self) -> tuple[str | int, ...]:
        """What can be compared: token ids or texts, or where neither is told, the characters of the text."""
        return tuple(token.name for token in self.tokens) or tuple(self.text)


def parsed(found: Mapping[str, object], place: str) -> Answer:
    """An answer of /v1/completions or /v1/chat/completions. Raises EngineError for other JSON."""
    try:
        return _answer(found)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise EngineError(f"{place}: not an OpenAI-compatible answer ({_reason(error)}): {shown(found)}") from error


def _reason(error: Exception) -> str:
    """Short, as a KeyError or a TypeError may hold a name of any length."""
    return f"{type(error).__name__}: {error}"[:200]


def _answer(found: Mapping[str, object]) -> Answer:
    choice = _first(found)
    message = _object(choice.get("message"), "message")
    text = message.get("content") if "message" in choice else choice["text"]
    usage = _object(found.get("usage"), "usage")
    details = _object(usage.get("prompt_tokens_details"), "prompt_tokens_details")
    finish = choice.get("finish_reason")
    return Answer(
        text="" if text is None else string(text, "text"),
        finish=None if finish is None else string(finish, "finish_reason", most=_MAX_NAME),
        tokens=_tokens(choice),
        prompt_ids=token_ids(choice.get("prompt_token_ids") or found.get("prompt_token_ids")) or None,
        prompt_tokens=optional_count(usage.get("prompt_tokens"), "prompt_tokens"),
        completion_tokens=optional_count(usage.get("completion_tokens"), "completion_tokens"),
        cached=optional_count(details.get("cached_tokens"), "cached_tokens"),
        calls=tuple(_call(each) for each in _list(message.get("tool_calls"), "tool_calls")),
        raw=found,
    )


def _object(value: object, name: str) -> Mapping:
    """An object, or an empty one where the engine says nothing. Raises TypeError for anything else."""
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{name} = {shown(value)}; expected an object")
    return value or {}


def _list(value: object, name: str) -> list:
    """The same of a list."""
    if value is not None and not isinstance(value, list):
        raise TypeError(f"{name} = {shown(value)}; expected a list")
    return value or []


def token_ids(value: object) -> tuple[int, ...]:
    """Token ids of a list; none for None. Raises TypeError or ValueError for other values."""
    return tuple(map(token_id, _list(value, "token ids")))


def _first(found: Mapping[str, object]) -> Mapping:
    choices = found["choices"]
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise TypeError("choices is no list of objects")
    return choices[0]


def _call(found: Mapping) -> Call:
    called = found["function"]
    return Call(string(called["name"], "name", most=_MAX_NAME), string(called["arguments"], "arguments"))


def _tokens(choice: Mapping) -> tuple[Token, ...]:
    told, ids = _object(choice.get("logprobs"), "logprobs"), token_ids(choice.get("token_ids"))
    if not told:
        tokens: list[Token] = []
    elif told.get("content") is not None:
        tokens = [_chat_token(each) for each in _list(told["content"], "content")]
    else:
        names = _list(told["tokens"], "tokens")
        bests = _list(told.get("top_logprobs"), "top_logprobs") or [None] * len(names)
        rows = zip(names, _list(told["token_logprobs"], "token_logprobs"), bests, strict=True)
        tokens = [_listed_token(text, value, _object(best, "top_logprobs")) for text, value, best in rows]
    # Where both are told, the names are those of the list of best tokens, as the two are compared.
    return tuple(tokens) or tuple(Token(f"{_ID}{each}", each) for each in ids)


def _chat_token(found: Mapping) -> Token:
    best = [
        Best(string(each["token"], "token"), _id(each), logprob(each["logprob"]))
        for each in _list(found.get("top_logprobs"), "top_logprobs")
    ]
    return Token(string(found["token"], "token"), _id(found), _nats(found.get("logprob")), _sorted(best))


def _listed_token(text: object, value: object, best: Mapping[str, object]) -> Token:
    listed = [Best(name, _named_id(name), logprob(each)) for name, each in best.items()]
    name = string(text, "token")
    return Token(name, _named_id(name), _nats(value), _sorted(listed))


def _sorted(best: list[Best]) -> tuple[Best, ...]:
    return tuple(sorted(best, key=lambda each: -each.logprob))


def _nats(value: object) -> float | None:
    """None where the engine has no number, which some write as NaN."""
    return None if value is None or value != value else logprob(value)


def _id(found: Mapping) -> int | None:
    return token_id(found["id"]) if found.get("id") is not None else _named_id(found["token"])


def _named_id(name: str) -> int | None:
    found = re.fullmatch(rf"{_ID}([0-9]{{1,10}})", name)
    return token_id(int(found[1])) if found else None


def streamed(pieces: Iterable[bytes], place: str, *, redacted: Callable[[str], str] = lambda text: text) -> Answer:
    """The answer that a stream of server-sent events adds up to: text and finish reason.

    redacted: applied to each event, and to the whole text, as a key may come in several events.
    Raises EngineError for a stream that breaks off, holds an error, or is none.
    """
    parts: list[str] = []
    finish, done = None, False
    for data in map(redacted, _events(pieces, place)):
        if data == "[DONE]":
            done = True
            break
        try:
            part, ended = _part(loads(data), place)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            said = f"not an OpenAI-compatible stream ({_reason(error)}): {data[:200]}"
            raise EngineError(f"{place}: {said}") from error
        parts.append(part)
        finish = ended or finish
    text = redacted("".join(parts))
    if not done:
        raise EngineError(f"{place}: the stream ends without [DONE] after {len(text)} characters")
    return Answer(text, finish)


def _part(found: object, place: str) -> tuple[str, str | None]:
    """The text and the finish reason of one event."""
    event = _object(found, "event")
    if "error" in event:
        raise EngineError(f"{place}: the stream holds an error: {shown(event['error'])}")
    choice = _first(event) if event["choices"] else {}
    part = _object(choice.get("delta", choice), "delta")
    finish = choice.get("finish_reason")
    text = part.get("content") or part.get("text") or ""
    return string(text, "text"), None if finish is None else string(finish, "finish_reason", most=_MAX_NAME)


def _events(pieces: Iterable[bytes], place: str) -> Iterator[str]:
    """The data of server-sent events; an event may come in several pieces, or several in one."""
    num, rest = 0, bytearray()
    for piece in pieces:
        rest += piece
        if b"\n" not in piece:
            if len(rest) > _MAX_EVENT:
                raise EngineError(f"{place}: an event of the stream is longer than {_MAX_EVENT:,} bytes")
            continue
        *lines, rest = rest.split(b"\n")
        for line in lines:
            num += 1
            if num > _MAX_EVENTS:
                raise EngineError(f"{place}: the stream has more than {_MAX_EVENTS:,} lines")
            if line.startswith(b"data:"):
                yield line[5:].strip().decode(errors="replace")
    if rest.startswith(b"data:"):
        yield rest[5:].strip().decode(errors="replace")
