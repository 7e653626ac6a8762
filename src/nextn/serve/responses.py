"""The JSON of answers, whole and streamed, in OpenAI's form with vLLM's additions."""

import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from nextn import __version__
from nextn.decoding.records import SequenceRound
from nextn.serve.api_errors import ApiError
from nextn.serve.message_parser import MessageDelta, MessageParser, parse_message
from nextn.serve.metrics import request_metrics
from nextn.serve.options import ServerOptions
from nextn.serve.request import GenerationChunk, GenerationRequest, TokenLogprob
from nextn.serve.schemas import ChatRequest, CompletionRequest
from nextn.serve.token_sampler import TokenTexts

Json = dict[str, object]
_FINISH = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
_MIN_LOGPROB = -9999.0  # JSON has no infinity; vLLM writes this number


@dataclass
class GeneratedChoice:
    """What one sequence has generated so far."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    rounds: list[SequenceRound] = field(default_factory=list)
    finish: str | None = None
    cached_tokens: int = 0
    num_chars: int = 0  # of the texts of all tokens, for `text_offset`
    first_at: float | None = None  # when its first rounds ended, by the engine's clock

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, chunk: GenerationChunk) -> None:
        self.cached_tokens = chunk.cached_tokens
        self.texts.append(chunk.text)
        self.logprobs += chunk.logprobs
        self.rounds += chunk.rounds
        self.finish = chunk.finish
        for one in chunk.rounds:
            self.tokens += one.emitted


class RouteAnswer(Protocol):
    """What a route answers, built from the chunks of its sequences."""

    @property
    def is_stream(self) -> bool: ...

    def add(self, index: int, chunk: GenerationChunk) -> None:
        """Add a chunk of a whole answer."""

    def document(self) -> Json:
        """Return the whole answer."""

    def first_events(self) -> list[Json]:
        """Return what a stream begins with."""

    def events(self, index: int, chunk: GenerationChunk) -> list[Json]:
        """Add a chunk and return its events."""

    def last_events(self) -> list[Json]:
        """Return what a stream ends with."""

    def error_event(self, error: ApiError) -> Json:
        """Return the event of a stream that fails."""

    def frame(self, events: Iterable[Json]) -> bytes:
        """Return events as sent; those that are ready together go out in one write."""

    @property
    def end(self) -> bytes: ...


def sse_data(event: Json) -> bytes:
    """Return the data line of a server-sent event."""
    text = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


class Answer:
    """Builds the answer to one request from the chunks of its sequences; a subclass knows the form of its route."""

    kind = ""  # the field `object` of whole answers
    chunk_kind = ""  # and of streamed ones
    prefix = ""  # of ids
    empty_part: ClassVar[Json] = {}  # of a streamed choice to which a chunk adds nothing

    def __init__(
        self,
        options: ServerOptions,
        body: ChatRequest | CompletionRequest,
        requests: Sequence[GenerationRequest],
        token_texts: TokenTexts,
    ) -> None:
        self.body, self.requests, self.token_texts = body, requests, token_texts
        self.choices = [GeneratedChoice() for _ in requests]
        self.with_rounds = body.stream_options.include_rounds
        self._with_metrics = options.metrics_in_answers or body.return_metrics or self.with_rounds
        self._id, self._created, self._model = _new_id(self.prefix), int(time.time()), options.served_name

    end = b"data: [DONE]\n\n"

    @property
    def is_stream(self) -> bool:
        return self.body.stream

    def frame(self, events: Iterable[Json]) -> bytes:
        return b"".join(map(sse_data, events))

    def error_event(self, error: ApiError) -> Json:
        return error.document()

    def add(self, index: int, chunk: GenerationChunk) -> None:
        self.choices[index].add(chunk)

    def document(self) -> Json:
        choices = [self._choice(index, choice) for index, choice in enumerate(self.choices)]
        return {**self._envelope(self.kind), "choices": choices, **self._figures()}

    def first_events(self) -> list[Json]:
        return []

    def events(self, index: int, chunk: GenerationChunk) -> list[Json]:
        choice = self.choices[index]
        is_first = not choice.rounds
        part = self._part(index, chunk)
        choice.add(chunk)
        extra = self._token_ids(index, [token for one in chunk.rounds for token in one.emitted], with_prompt=is_first)
        if self.with_rounds and chunk.rounds:
            choice.first_at = chunk.at if choice.first_at is None else choice.first_at
            extra |= {"rounds": [self._round(one) for one in chunk.rounds], "elapsed_s": chunk.at - choice.first_at}
        if part is None and not extra and chunk.finish is None:
            return []
        event = {"index": index, **(part or self.empty_part), "finish_reason": self._finish(index), **extra}
        return [self._with_usage_field({**self._envelope(self.chunk_kind), "choices": [event]})]

    def last_events(self) -> list[Json]:
        """Return usage and metrics, if they were requested."""
        if not (self.body.stream_options.include_usage or self._with_metrics):
            return []
        return [{**self._envelope(self.chunk_kind), "choices": [], **self._figures()}]

    def _envelope(self, kind: str) -> Json:
        known = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return known | {"system_fingerprint": f"nextn-{__version__}"}

    def _with_usage_field(self, event: Json) -> Json:
        """OpenAI's streams with usage have the field in every chunk."""
        options = self.body.stream_options
        if not options.include_usage:
            return event
        return event | {"usage": self._usage() if options.continuous_usage_stats else None}

    def _figures(self) -> Json:
        figures: Json = {"usage": self._usage()}
        if self._with_metrics:
            figures["metrics"] = request_metrics([one for choice in self.choices for one in choice.rounds])
        return figures

    def _usage(self) -> Json:
        """Each prompt counts once, however many choices it has."""
        firsts = range(0, len(self.requests), self.body.n)
        prompt = sum(len(self.requests[index].prompt) for index in firsts)
        completion = sum(len(choice.tokens) for choice in self.choices)
        cached = sum(self.choices[index].cached_tokens for index in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _finish(self, index: int) -> str | None:
        finish = self.choices[index].finish
        return None if finish is None else _FINISH[finish]

    def _token_ids(self, index: int, tokens: Sequence[int], *, with_prompt: bool) -> Json:
        if not self.body.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": list(self.requests[index].prompt)} if with_prompt else {}
        return {"token_ids": list(tokens), **prompt}

    def _round(self, one: SequenceRound) -> Json:
        texts = self.token_texts.texts
        return {
            "tokens": list(one.emitted),
            "texts": texts(one.emitted),
            "drafts": list(one.drafts),
            "draft_texts": texts(one.drafts),
            "num_accepted": one.num_accepted,
            "copied": one.copied,
        }

    def _spelled(self, token: int) -> str:
        return f"token_id:{token}" if self.body.return_tokens_as_token_ids else self.token_texts.spelled(token)

    def _choice(self, index: int, choice: GeneratedChoice) -> Json:
        raise NotImplementedError

    def _part(self, index: int, chunk: GenerationChunk) -> Json | None:
        """What a chunk adds to a streamed choice; None for nothing."""
        raise NotImplementedError


class CompletionAnswer(Answer):
    """The answer of /v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    empty_part: ClassVar[Json] = {"text": "", "logprobs": None}
    body: CompletionRequest

    def add(self, index: int, chunk: GenerationChunk) -> None:
        super().add(index, self._with_prompt(index, chunk))

    def events(self, index: int, chunk: GenerationChunk) -> list[Json]:
        return super().events(index, self._with_prompt(index, chunk))

    def _with_prompt(self, index: int, chunk: GenerationChunk) -> GenerationChunk:
        """The chunk; with `echo`, the first one begins with the prompt."""
        if not self.body.echo or self.choices[index].rounds:
            return chunk
        request, prompt = self.requests[index], self.body.prompts[index // self.body.n]
        text = prompt if isinstance(prompt, str) else self.token_texts.running_text(prompt)
        first = (TokenLogprob(request.prompt[0], None, ()),) if request.prompt_logprobs else ()
        return replace(chunk, text=text + chunk.text, logprobs=(*first, *chunk.prompt_logprobs, *chunk.logprobs))

    def _choice(self, index: int, choice: GeneratedChoice) -> Json:
        return {
            "index": index,
            "text": choice.text,
            "logprobs": self._logprobs(choice, choice.logprobs),
            "finish_reason": self._finish(index),
            **self._token_ids(index, choice.tokens, with_prompt=True),
        }

    def _part(self, index: int, chunk: GenerationChunk) -> Json | None:
        if not chunk.text and not chunk.logprobs:
            return None
        return {"text": chunk.text, "logprobs": self._logprobs(self.choices[index], chunk.logprobs)}

    def _logprobs(self, choice: GeneratedChoice, logprobs: Sequence[TokenLogprob]) -> Json | None:
        """Parallel lists, as of OpenAI's completions; `top_logprobs` always has the chosen token, too."""
        if self.requests[0].logprobs is None:
            return None
        offsets = []
        for entry in logprobs:
            offsets.append(choice.num_chars)
            choice.num_chars += len(self.token_texts.text(entry.token))
        return {
            "tokens": [self._spelled(entry.token) for entry in logprobs],
            "token_logprobs": [_nats(entry.logprob) for entry in logprobs],
            "top_logprobs": [self._top(entry) for entry in logprobs] if self.requests[0].logprobs else None,
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> Mapping[str, float | None] | None:
        if entry.logprob is None:
            return None
        top: dict[str, float | None] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(self._spelled(token), _nats(logprob))  # of two tokens with one text, the likelier
        return top


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"
    empty_part: ClassVar[Json] = {"delta": {}, "logprobs": None}

    def __init__(
        self,
        options: ServerOptions,
        body: ChatRequest,
        requests: Sequence[GenerationRequest],
        token_texts: TokenTexts,
        parsers: Sequence[MessageParser | None],
    ) -> None:
        """Create the answer. parsers: what splits the text of each sequence; None where all of it is content."""
        super().__init__(options, body, requests, token_texts)
        self._parsers = parsers
        self._num_calls = [0] * len(requests)  # complete ones

    def first_events(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [
            self._with_usage_field(
                {
                    **self._envelope(self.chunk_kind),
                    "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}],
                }
            )
            for index in range(len(self.choices))
        ]

    def _choice(self, index: int, choice: GeneratedChoice) -> Json:
        delta = parse_message(self._parsers[index], choice.text)
        calls = delta.complete_calls
        self._num_calls[index] = len(calls)
        message = {"role": "assistant", "content": None if calls else "", "refusal": None, **_texts(delta)}
        if calls:
            message["tool_calls"] = [_tool_call(call.name, call.arguments) for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": self._finish(index),
            **self._token_ids(index, choice.tokens, with_prompt=True),
        }

    def _part(self, index: int, chunk: GenerationChunk) -> Json | None:
        delta = parse_message(self._parsers[index], chunk.text, is_last=chunk.finish is not None)
        fields = self._fields(index, delta)
        return {"delta": fields, "logprobs": self._logprobs(chunk.logprobs)} if fields or chunk.logprobs else None

    def _fields(self, index: int, delta: MessageDelta) -> Json:
        """What a delta adds to a message."""
        self._num_calls[index] += sum(call.is_last for call in delta.tool_calls)
        calls = [{"index": call.index, **_tool_call(call.name, call.arguments)} for call in delta.tool_calls]
        return _texts(delta) | ({"tool_calls": calls} if calls else {})

    def _finish(self, index: int) -> str | None:
        finish = super()._finish(index)
        return "tool_calls" if finish == "stop" and self._num_calls[index] else finish

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Json | None:
        if self.requests[0].logprobs is None:
            return None
        content = [
            {
                **self._token(entry.token, entry.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in entry.top],
            }
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> Json:
        return {"token": self._spelled(token), "logprob": _nats(logprob), "bytes": self.token_texts.utf8(token)}


def _texts(delta: MessageDelta) -> Json:
    texts = {"reasoning_content": delta.reasoning, "content": delta.content}
    return {name: text for name, text in texts.items() if text}


def _tool_call(name: str | None, arguments: str) -> Json:
    """An entry of `tool_calls`; a later piece of a call, which has no name, has no id either."""
    if name is None:
        return {"function": {"arguments": arguments}}
    return {"id": _new_id("call"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def _nats(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _MIN_LOGPROB)
