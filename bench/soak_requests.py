"""Requests of bench/soak.py: random ones with a reference answer, invalid ones, and what a client got."""

import asyncio
import json
import random
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}<assistant>"
)
MAX_NEW_TOKENS = 120
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12}, "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "sizes"],
}  # fmt: skip
_TOOL = {"type": "function", "function": {"name": "store", "parameters": _SCHEMA}}
INVALID: Sequence[Mapping[str, object] | bytes] = (
    {"temperature": "hot"}, {"max_tokens": -2}, {"model": "none"}, {"logprobs": 10**9}, {"prompt": None},
    {"prompt": "x" * 200_000}, {"stop": [""] * 9}, {"num_speculative_tokens": 1000}, {"n": 10**9}, {"prompt": [10**9]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
    {"n": 0}, b"{", b"\xff\xfe", b"[" * 5000, b"",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A request whose answer depends neither on the load, nor on K, nor on whether it is streamed."""

    path: str
    body: Mapping[str, object]

    @property
    def num_choices(self) -> int:
        return int(str(self.body.get("n", 1)))


@dataclass(frozen=True)
class Answer:
    """What a client got."""

    outcome: str  # complete, cancelled, refused, ended (by the server's error), broken (off), unreachable, wrong, ...
    detail: str = ""
    choices: tuple[object, ...] = ()  # comparable: texts, tool calls, tokens, log probabilities, reasons
    counts: Counter[str] = field(default_factory=Counter)  # what the server's counters grow by


def random_cases(draw: random.Random, count: int, texts: Sequence[str]) -> list[Case]:
    """Make requests; many of their prompts begin with the same of a few texts."""
    prefixes = [text[:300] for text in texts[:4]]
    return [_random_case(draw, draw.choice(prefixes), draw.choice(texts)) for _ in range(count)]


def _random_case(draw: random.Random, prefix: str, text: str) -> Case:
    prompt = prefix[: draw.choice((0, 0, 150, 300))] + text[: draw.randrange(1, 400)]
    body: dict[str, object] = {
        "max_tokens": draw.randrange(1, MAX_NEW_TOKENS), "n": draw.choice((1, 1, 1, 2, 3)), "return_token_ids": True,
        "return_metrics": True, "ignore_eos": True, "temperature": 0, "seed": draw.randrange(1000),
    }  # fmt: skip
    if draw.random() < 0.5:
        body |= {
            "temperature": draw.choice((0.3, 0.7, 1.0)),
            "top_p": draw.choice((0.8, 1)),
            "top_k": draw.choice((0, 20)),
        }
    if draw.random() < 0.2:
        body |= {"repetition_penalty": 1.1, "presence_penalty": 0.3, "logit_bias": {"101": -2}}
    if draw.random() < 0.3:
        body["stop"] = draw.sample(["e ", "\n", "the", "in"], 2)
    is_chat, special = draw.random() < 0.35, draw.random()
    if draw.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    if special < 0.15:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}
        body["ignore_eos"] = False
    elif special < 0.3 and is_chat:
        body |= {"tools": [_TOOL], "tool_choice": "required", "ignore_eos": False}
    if is_chat:
        return Case("/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]})
    return Case("/v1/completions", body | {"prompt": prompt})


async def send(client: httpx2.AsyncClient, case: Case, *, stream: bool, k: int | None) -> Answer:
    """Send a request and read its answer to the end."""
    body: dict[str, object] = {**case.body, "stream": stream, "num_speculative_tokens": k}
    if stream:
        body["stream_options"] = {"include_usage": True}
    try:
        async with client.stream("POST", case.path, json=body) as response:
            if response.status_code != 200:
                return _refusal(response.status_code, json.loads(await response.aread()))
            if not stream:
                return _answer(case, [json.loads(await response.aread())])
            return await _read_events(case, response)
    except (httpx2.NetworkError, httpx2.RemoteProtocolError) as error:
        return _broken(error)


async def send_invalid(client: httpx2.AsyncClient, invalid: Mapping[str, object] | bytes) -> Answer:
    """Send an invalid request: `refused` is an error in OpenAI's form, with a status of 4xx."""
    content = invalid if isinstance(invalid, bytes) else json.dumps({"prompt": "x", "max_tokens": 4} | invalid).encode()
    try:
        response = await client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    except (httpx2.NetworkError, httpx2.RemoteProtocolError) as error:
        return _broken(error)
    answer = _refusal(response.status_code, response.json())
    is_client_error = 400 <= response.status_code < 500
    return answer if is_client_error or answer.outcome == "ended" else Answer("wrong", f"{invalid!r:.100}: {answer}")


async def leave_half_a_request(draw: random.Random, port: int) -> Answer:
    """Open a connection, send a part of a request, and go."""
    request = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"prompt": '
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        return Answer("unreachable", str(error))
    writer.write(request[: draw.randrange(len(request))])
    await asyncio.sleep(draw.random() * 0.2)
    writer.close()
    return Answer("cancelled")


def _broken(error: Exception) -> Answer:
    outcome = "unreachable" if isinstance(error, httpx2.ConnectError) else "broken"
    return Answer(outcome, f"{type(error).__name__}: {error}")


def _refusal(status: int, document: Mapping[str, Mapping[str, str]]) -> Answer:
    error = document["error"]
    is_ended = status == 503 and error["code"] == "server_stopping"
    return Answer("ended" if is_ended else "refused", f"{status} {error['code']}: {error['message'][:200]}")


async def _read_events(case: Case, response: httpx2.Response) -> Answer:
    events: list[dict[str, object]] = []
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return _answer(case, events)
        if line.startswith("data: "):
            events.append(json.loads(line[6:]))
            if "error" in events[-1]:
                return _refusal(503, events[-1])  # type: ignore[arg-type]
    return Answer("broken", "the stream has no end")


def _answer(case: Case, documents: Sequence[dict]) -> Answer:
    """Join the events of a stream, or read a whole answer, which is one document."""
    choices = [ChoiceReader() for _ in range(case.num_choices)]
    for document in documents:
        for choice in document["choices"]:
            choices[choice["index"]].add(choice)
    usage, spec = documents[-1]["usage"], documents[-1]["metrics"]["spec_decode"]
    counts = Counter(
        prompt_tokens=usage["prompt_tokens"] * case.num_choices,
        generation_tokens=usage["completion_tokens"],
        request_success=case.num_choices,
        spec_decode_num_drafts=spec["num_drafts"],
        spec_decode_num_draft_tokens=spec["num_draft_tokens"],
        spec_decode_num_accepted_tokens=spec["num_accepted_tokens"],
        spec_decode_num_accepted_tokens_per_pos=sum(spec["num_accepted_tokens_per_pos"]),
    )
    return Answer("complete", choices=tuple(choice.result for choice in choices), counts=counts)


@dataclass
class ChoiceReader:
    """Joins what a choice consists of, whole or in pieces."""

    text: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None

    def add(self, choice: dict) -> None:
        part = choice.get("message") or choice.get("delta") or choice
        self.text += part.get("content") or part.get("text") or ""
        for index, call in enumerate(part.get("tool_calls") or ()):
            pieces = self.calls.setdefault(call.get("index", index), ["", ""])
            pieces[0] += call["function"].get("name") or ""
            pieces[1] += call["function"].get("arguments") or ""
        self.tokens += choice.get("token_ids") or ()
        logprobs = choice.get("logprobs") or {}
        self.logprobs += logprobs.get("token_logprobs") or [one["logprob"] for one in logprobs.get("content") or ()]
        self.finish = choice["finish_reason"] or self.finish

    @property
    def result(self) -> object:
        # A streamed call that is cut off has begun; a whole answer does not have it.
        calls = tuple(tuple(pieces) for _, pieces in sorted(self.calls.items()) if self.finish == "tool_calls")
        return self.text, calls, tuple(self.tokens), tuple(self.logprobs), self.finish


def with_chat_template(checkpoint: Path, folder: Path) -> Path:
    """Copy a checkpoint without its large files, to which it links, and give it a chat template with tools."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in checkpoint.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": CHAT_TEMPLATE}))
    return folder
