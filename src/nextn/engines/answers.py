"""What is asked of an OpenAI-compatible engine, and what its answers hold. Knows the three shapes of log-probabilities.

OpenAI's completions: parallel lists; its chat: a list under `content`; llama.cpp's completions: chat's shape with ids.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from nextn.errors import EngineError

_ID = "token_id:"  # vLLM's return_tokens_as_token_ids


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
        said = json.dumps(found)[:200]
        raise EngineError(f"{place}: not an OpenAI-compatible answer ({error!r}): {said}") from error


def _answer(found: Mapping[str, object]) -> Answer:
    choice = _first(found)
    message = choice.get("message") or {}
    text = message.get("content") if "message" in choice else choice["text"]
    if not isinstance(text, str | None):
        raise TypeError("the text is no text")
    usage = found.get("usage") or {}
    if not isinstance(usage, Mapping):
        raise TypeError("usage is no object")
    details = usage.get("prompt_tokens_details") or {}
    prompt_ids = choice.get("prompt_token_ids") or found.get("prompt_token_ids")
    return Answer(
        text=text or "",
        finish=choice.get("finish_reason"),
        tokens=_tokens(choice),
        prompt_ids=tuple(map(int, prompt_ids)) if isinstance(prompt_ids, list) and prompt_ids else None,
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        cached=_count(details.get("cached_tokens")),
        calls=tuple(_call(each) for each in message.get("tool_calls") or ()),
        raw=found,
    )


def _first(found: Mapping[str, object]) -> Mapping:
    choices = found["choices"]
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise TypeError("choices is no list of objects")
    return choices[0]


def _count(value: object) -> int | None:
    return value if type(value) is int else None


def _call(found: Mapping) -> Call:
    return Call(str(found["function"]["name"]), str(found["function"]["arguments"]))


def _tokens(choice: Mapping) -> tuple[Token, ...]:
    told, ids = choice.get("logprobs"), choice.get("token_ids")
    if not isinstance(told, Mapping):
        tokens: list[Token] = []
    elif isinstance(told.get("content"), list):
        tokens = [_chat_token(each) for each in told["content"]]
    else:
        bests = told.get("top_logprobs") or [None] * len(told["tokens"])
        rows = zip(told["tokens"], told["token_logprobs"], bests, strict=True)
        tokens = [_listed_token(text, logprob, best or {}) for text, logprob, best in rows]
    # Where both are told, the names are those of the list of best tokens, as the two are compared.
    return tuple(tokens) or tuple(Token(f"{_ID}{each}", int(each)) for each in ids or ())


def _chat_token(found: Mapping) -> Token:
    best = [Best(str(each["token"]), _id(each), float(each["logprob"])) for each in found.get("top_logprobs") or ()]
    return Token(str(found["token"]), _id(found), _nats(found.get("logprob")), _sorted(best))


def _listed_token(text: str, logprob: float | None, best: Mapping[str, float]) -> Token:
    listed = [Best(name, _named_id(name), float(value)) for name, value in best.items()]
    return Token(text, _named_id(text), _nats(logprob), _sorted(listed))


def _sorted(best: list[Best]) -> tuple[Best, ...]:
    return tuple(sorted(best, key=lambda each: -each.logprob))


def _nats(value: float | None) -> float | None:
    return None if value is None or math.isnan(float(value)) else float(value)


def _id(found: Mapping) -> int | None:
    return int(found["id"]) if type(found.get("id")) is int else _named_id(found["token"])


def _named_id(name: str) -> int | None:
    number = name.removeprefix(_ID)
    return int(number) if name.startswith(_ID) and number.isdigit() else None


def streamed(pieces: Iterable[bytes], place: str) -> Answer:
    """The answer that a stream of server-sent events adds up to: text and finish reason.

    Raises EngineError for a stream that breaks off, holds an error, or is none.
    """
    text, finish, done = "", None, False
    for data in _events(pieces):
        if data == "[DONE]":
            done = True
            break
        try:
            found = json.loads(data)
            if "error" in found:
                raise EngineError(f"{place}: the stream holds an error: {str(found['error'])[:200]}")
            choice = _first(found) if found["choices"] else {}
            part = choice.get("delta", choice)
            text += part.get("content") or part.get("text") or ""
            finish = choice.get("finish_reason") or finish
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise EngineError(f"{place}: not an OpenAI-compatible stream ({error!r}): {data[:200]}") from error
    if not done:
        raise EngineError(f"{place}: the stream ends without [DONE] after {len(text)} characters")
    return Answer(text, finish)


def _events(pieces: Iterable[bytes]) -> Iterator[str]:
    """The data of server-sent events; an event may come in several pieces, or several in one."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode(errors="replace")
    if rest.startswith(b"data:"):
        yield rest[5:].strip().decode(errors="replace")
