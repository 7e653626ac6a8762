"""Structured output through the API: grammars with drafts on a real engine, tool calls and reasoning as streams."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import openai
import pytest
from chats import chatty
from http_serving import error_of, events, serving
from scripted_engine import ScriptedEngine

import nextn
from nextn.errors import ConfigError
from nextn.model.model import Model
from nextn.serve.engine import EngineOptions, ServingEngine
from nextn.serve.request import GenerationRequest

TINY = Path(nextn.__file__).parent / "assets" / "tiny"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 4},
        "kind": {"enum": ["a", "b", None]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {
    "a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "b"], "additionalProperties": False}}}  # fmt: skip
NOW = {"type": "function", "function": {"name": "now"}}
HERMES = "<tool_call>\n{}\n</tool_call>"
MESSAGES = [{"role": "user", "content": "add 1 and 2"}]


def speaking(model, template_tail=""):
    """A model with a chat template that names a syntax of tool calls."""
    tokenizer = chatty()
    tokenizer.chat_template += "{# <tool_call> </think> #}" + template_tail
    return replace(model, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def model():
    return speaking(Model.load(TINY))


@pytest.fixture(scope="module")
def client(model):
    engine = ServingEngine(model, EngineOptions(backend="native", warmup=False, max_model_len=1024, cache_gb=0.1))
    with (
        serving(engine, model, max_model_len=1024) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@contextmanager
def saying(text, model):
    with (
        serving(ScriptedEngine(text, times=1), model, max_model_len=4096) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield server, client


def formatted(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def is_answer(text):
    value = json.loads(text)
    sizes = value["sizes"]
    return (
        list(value) == ["name", "sizes", "kind"]
        and len(value["name"]) <= 8
        and len(sizes) <= 4
        and all(type(each) is int and 0 <= each <= 9 for each in sizes)
        and value["kind"] in ("a", "b", None)
    )


@pytest.mark.parametrize("temperature", [0, 1])
def test_text_follows_the_schema_with_and_without_drafts(client, temperature):
    """The same text whatever K is, and drafts are accepted inside the grammar. Native: its bits do not depend on K."""
    texts, accepted = [], []
    for k in (0, 1, 3):
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, response_format=formatted(SCHEMA), temperature=temperature, seed=5,
            max_tokens=700, extra_body={"num_speculative_tokens": k, "return_metrics": True},
        )  # fmt: skip
        (choice,) = answer.choices
        assert choice.finish_reason == "stop", choice.message.content
        assert is_answer(choice.message.content)
        texts.append(choice.message.content)
        accepted.append(answer.model_extra["metrics"]["spec_decode"]["num_accepted_tokens"])
    assert len(set(texts)) == 1
    assert accepted[0] == 0
    assert accepted[2] > 0


def test_json_object(client):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=700, temperature=1, seed=1
    )
    (choice,) = answer.choices
    assert choice.message.content.lstrip()[0] == "{"
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def test_completions_have_formats_too(client):
    answer = client.completions.create(
        model="tiny", prompt="x", max_tokens=50, extra_body={"response_format": formatted({"enum": ["yes", "no"]})}
    )
    assert answer.choices[0].text in ('"yes"', '"no"')


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_forced_calls(client, tool_choice):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=[NOW, TOOL], tool_choice=tool_choice, max_tokens=900,
        parallel_tool_calls=False, temperature=1, seed=3,
    )  # fmt: skip
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    if tool_choice != "required":
        assert call.function.name == "add"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == ({"a", "b"} if call.function.name == "add" else set())
    assert all(0 <= value <= 99 for value in arguments.values())


def test_a_call_in_free_text(model):
    call = HERMES.format('{"name": "add", "arguments": {"a": 1, "b": 2}}')
    with saying(f"Sure.\n{call}\n{call}", model) as (server, client):
        arguments = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL], "max_tokens": 2000}
        (choice,) = client.chat.completions.create(**arguments).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Sure.")
        assert [each.function.name for each in choice.message.tool_calls] == ["add", "add"]
        assert len({each.id for each in choice.message.tool_calls}) == 2
        with client.chat.completions.stream(**arguments) as stream:
            (streamed,) = stream.get_final_completion().choices
        assert (streamed.finish_reason, streamed.message.content) == ("tool_calls", "Sure.")
        assert [each.function.arguments for each in streamed.message.tool_calls] == ['{"a": 1, "b": 2}'] * 2
        parts = events(server.post("/v1/chat/completions", {**arguments, "stream": True})[2])
        calls = [call for part in parts for call in part["choices"][0]["delta"].get("tool_calls", [])]
        assert [call["index"] for call in calls] == [0, 1]
        assert server.engine.requests[0].grammar is None


def test_no_calls_without_tools(model):
    call = HERMES.format('{"name": "add", "arguments": {}}')
    with saying(call, model) as (_, client):
        for options in ({}, {"tools": [TOOL], "tool_choice": "none"}):
            answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2000, **options)
            assert answer.choices[0].message.content == call
            assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("tail", "text"), [("", "<think>\nHm.\n</think>\n\nYes."), ("<think>\n", "Hm.\n</think>\n\nYes.")]
)
def test_reasoning(model, tail, text):
    with saying(text, speaking(model, tail)) as (server, client):
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2000)
        message = answer.choices[0].message
        assert (message.content, message.model_extra["reasoning_content"]) == ("Yes.", "Hm.")
        body = {"messages": MESSAGES, "max_tokens": 2000, "stream": True}
        deltas = [part["choices"][0]["delta"] for part in events(server.post("/v1/chat/completions", body)[2])]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes."


def test_a_grammar_leaves_no_room_for_reasoning(model):
    """With a format, all of the text is content, also after a prompt that opens reasoning."""
    with saying('{"a": 1}', speaking(model, "<think>\n")) as (_, client):
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=2000
        )
        assert answer.choices[0].message.content == '{"a": 1}'


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": formatted({"type": "strin"})}, "response_format", "Invalid type: strin"),
        ({"response_format": formatted({"not": {}})}, "response_format", "Unimplemented keys"),
        ({"tools": [TOOL], "tool_choice": "required"} | {"tools": [{"type": "function", "function": {
            "name": "f", "parameters": {"type": "strin"}}}]}, "tools", "Invalid type: strin"),
    ],
)  # fmt: skip
def test_bad_schemas(model, fields, param, message):
    with saying("x", model) as (server, _):
        status, error = error_of(server.post("/v1/chat/completions", {"messages": MESSAGES, **fields}))
    assert (status, error["param"], error["code"]) == (400, param, "invalid_value")
    assert message in error["message"]


class _Breaking:
    """A grammar that can be followed for some tokens only."""

    def __init__(self):
        self.left = 5

    def allowed(self, drafts):
        if self.left < 0:
            raise ConfigError("too complex")
        return [~self._none()] * (len(drafts) + 1)

    def advance(self, tokens):
        self.left -= len(tokens)

    def _none(self):
        import torch

        return torch.zeros(Model.load(TINY).trunk.vocab_size, dtype=torch.bool)


def test_a_grammar_that_breaks_ends_its_own_sequence_only(model):
    import queue

    engine = ServingEngine(model, EngineOptions(backend="torch", warmup=False, max_model_len=256, cache_gb=0.1))
    try:
        ends = {}
        for name, grammar in (("broken", _Breaking), ("other", None)):
            chunks = queue.Queue()
            engine.submit(GenerationRequest(tuple(b"def f("), max_tokens=40, grammar=grammar, logprobs=0), chunks.put)
            ends[name] = chunks
        last = {}
        for name, chunks in ends.items():
            while (chunk := chunks.get(timeout=60)).finish is None:
                pass
            last[name] = (chunk.finish, chunk.error)
        assert last == {"broken": ("error", "too complex"), "other": ("length", "")}
    finally:
        engine.close(grace_s=1)
