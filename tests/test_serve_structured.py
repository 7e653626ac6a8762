"""Structured output, tool calls and reasoning through the API, as the `openai` client reads them."""

import json
import re
from dataclasses import replace

import openai
import pytest
from chats import UNMARKED, chatty
from http_serving import error_of, serving
from openai.lib.streaming.chat import ChatCompletionStreamState
from quick import loop
from scripted_engine import ScriptedEngine

from nextn.checkpoint.checkpoint import SHIPPED
from nextn.model.model import Model
from nextn.serve.engine import ServingEngine
from nextn.serve.options import EngineOptions

pytest.importorskip("llguidance")
USER = [{"role": "user", "content": "hi"}]
NO_SPACE = {"10": -100, "32": -100}  # where JSON may have whitespace, this model writes nothing else
CHAT = {"model": "tiny", "messages": USER, "max_tokens": 200, "temperature": 0, "logit_bias": NO_SPACE}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {"type": "function", "function": {"name": "count", "description": "Counts.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "other", "parameters": SCHEMA}},
]
NAMED = {"type": "function", "function": {"name": "count"}}


@pytest.fixture(scope="module")
def model():
    return replace(Model.load(SHIPPED), tokenizer=chatty())


@pytest.fixture(scope="module")
def server(model):
    options = EngineOptions("torch", max_num_seqs=4, max_model_len=2048, num_speculative_tokens=3, warmup=False)
    with serving(ServingEngine(model, options), model, max_model_len=2048) as server:
        yield server


def fits(text):
    value = json.loads(text)
    return set(value) == {"n", "ok"} and 0 <= value["n"] <= 99 and isinstance(value["ok"], bool)


@pytest.mark.more
def test_json_schema(client):
    (choice,) = client.chat.completions.create(**CHAT, response_format=FORMAT).choices
    assert fits(choice.message.content)
    assert choice.finish_reason == "stop"
    stream = client.chat.completions.create(**CHAT, response_format=FORMAT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == choice.message.content
    sampled = client.chat.completions.create(**CHAT | {"temperature": 1, "n": 3, "seed": 1}, response_format=FORMAT)
    assert all(fits(choice.message.content) for choice in sampled.choices)


@pytest.mark.more
def test_json_schema_of_completions_and_json_object(client):
    body = {"response_format": FORMAT}
    answer = client.completions.create(
        model="tiny", prompt="x", max_tokens=200, temperature=0, logit_bias=NO_SPACE, extra_body=body
    )
    assert fits(answer.choices[0].text)
    options = CHAT | {"max_tokens": 60, "stop": ["}"]}
    answer = client.chat.completions.create(**options, response_format={"type": "json_object"})
    assert answer.choices[0].message.content.startswith("{")


@pytest.mark.more
def test_the_forms_of_vllm(client, server):
    """Each in its field of `structured_outputs`, under its older name, in chats and completions."""
    gbnf = 'root ::= "<" [ab]{2} ">"'
    forms = {
        "json": (SCHEMA, fits), "regex": (r"[0-9]{3}-x", lambda text: re.fullmatch("[0-9]{3}-x", text)),
        "choice": (["maybe \"so\"", "<yes>"], lambda text: text in ('maybe "so"', "<yes>")),
        "grammar": (gbnf, lambda text: re.fullmatch("<[ab]{2}>", text)), "json_object": (True, json.loads),
    }  # fmt: skip
    few = CHAT | {"max_tokens": 60}
    for kind, (value, is_valid) in forms.items():
        bodies = [{"structured_outputs": {kind: value}}, {f"guided_{kind}": value}]
        bodies += [{"guided_json": json.dumps(value)}] if kind == "json" else []
        for body in bodies[: 1 if kind == "json_object" else None]:
            stop = ["}"] if kind == "json_object" else None  # this model would not end it
            (choice,) = client.chat.completions.create(**few, extra_body=body, stop=stop).choices
            text = choice.message.content
            assert text.startswith("{") if stop else is_valid(text), (body, text)
    answer = client.completions.create(model="tiny", prompt="x", extra_body={"guided_choice": ["one", "two"]})
    assert answer.choices[0].text in ("one", "two")


@pytest.mark.more
def test_a_call_that_is_forced(client):
    """The template knows no tool calls; they are forced by a grammar and parsed all the same."""
    for choice, names in ((NAMED, {"count"}), ("required", {"count", "other"})):
        (answer,) = client.chat.completions.create(
            **CHAT, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False
        ).choices
        (call,) = answer.message.tool_calls
        assert answer.message.content is None
        assert call.function.name in names
        assert fits(call.function.arguments)
        assert call.id.startswith("call-")
        assert answer.finish_reason == "tool_calls"


@pytest.mark.more
def test_a_streamed_call(client):
    stream = client.chat.completions.create(**CHAT, tools=TOOLS, tool_choice=NAMED, stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    first, *more = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert {call.index for call in (first, *more)} == {0}
    assert (first.type, first.function.name, bool(first.id)) == ("function", "count", True)
    assert more
    assert all((call.id, call.type, call.function.name) == (None, None, None) for call in more)
    assert fits("".join(call.function.arguments for call in (first, *more)))
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == "tool_calls"


@loop(
    ("fields", "param", "words"),
    [
        ({"response_format": FORMAT | {"json_schema": {"schema": {"type": 5}}}}, "response_format", "JSON schema"),
        ({"response_format": FORMAT | {"json_schema": {"schema": {"enum": []}}}}, "response_format", "JSON schema"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_regex": "("}, "guided_regex", "regular expression"),
        ({"guided_regex": ""}, "guided_regex", "at least 1"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_choice": ["x" * 70_000]}, "guided_choice", "at most 65,536"),
        ({"guided_grammar": "nothing"}, "guided_grammar", "neither Lark nor GBNF"),
        ({"guided_grammar": "start: " + "x" * 20_000}, "guided_grammar", "at most 16,384"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"whitespace_pattern": "a"}}, "structured_outputs.whitespace_pattern", "unknown"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "together with"),
    ],
)
def test_what_cannot_be_done_is_refused(server, fields, param, words):
    status, error = error_of(server.post("/v1/chat/completions", {"messages": USER, **fields}))
    assert (status, error["param"]) == (400, param)
    assert words in error["message"]


def texts_of(chunks, name):
    return "".join(getattr(chunk.choices[0].delta, name, None) or "" for chunk in chunks)


CALL = '<think>Why?</think>I look. <tool_call>{"name": "count", "arguments": {"n": 1, "ok": true}}</tool_call>'


@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_content_and_calls(model, is_open):
    """Of text that a model writes freely, whole and streamed alike; some templates open the reasoning themselves."""
    tokenizer = chatty()
    tokenizer.chat_template = UNMARKED + "{# <tool_call> <think></think> #}" + ("<think>" if is_open else "")
    text = CALL.removeprefix("<think>") if is_open else CALL
    engine = ScriptedEngine(text, times=1)
    with (
        serving(engine, replace(model, tokenizer=tokenizer)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        (choice,) = client.chat.completions.create(**CHAT, tools=TOOLS).choices
        chunks = list(client.chat.completions.create(**CHAT, tools=TOOLS, stream=True))
        plain = client.chat.completions.create(**CHAT, tools=TOOLS, tool_choice="none").choices[0]
    state = ChatCompletionStreamState()  # the client's own way of joining pieces
    for chunk in chunks:
        state.handle_chunk(chunk)
    assert choice.message.reasoning_content == texts_of(chunks, "reasoning_content") == "Why?"
    assert choice.message.content == texts_of(chunks, "content") == "I look."
    (call,) = choice.message.tool_calls
    (streamed,) = state.get_final_completion().choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    assert json.loads(call.function.arguments) == json.loads(streamed.function.arguments) == {"n": 1, "ok": True}
    assert choice.finish_reason == chunks[-1].choices[0].finish_reason == "tool_calls"
    assert plain.message.tool_calls is None
    assert "<tool_call>" in plain.message.content
    assert plain.finish_reason == "stop"


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + UNMARKED


@pytest.mark.parametrize(("template", "begin"), [(UNMARKED, "<s>"), (NO_SYSTEM, "<u>")])
def test_tools_of_a_template_that_knows_none(model, template, begin):
    """A text describes them, results are the user's, and calls of a history are text."""
    tokenizer = chatty()
    tokenizer.chat_template = template
    said = 'I look. <tool_call>\n{"name": "count", "arguments": {"n": 1, "ok": true}}\n</tool_call>'
    engine = ScriptedEngine(said, times=1)
    calls = [{"id": str(n), "type": "function", "function": {"name": "count", "arguments": '{"n": 2}'}} for n in (1, 2)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "two"} for call in calls]
    history = [*USER, {"role": "assistant", "content": "So", "tool_calls": calls}, *results]
    with (
        serving(engine, replace(model, tokenizer=tokenizer), max_model_len=4096) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        (choice,) = client.chat.completions.create(**CHAT | {"messages": history}, tools=TOOLS).choices
        client.chat.completions.create(**CHAT | {"messages": history})
        client.chat.completions.create(**CHAT, tools=TOOLS, tool_choice="none")
        if template is NO_SYSTEM:
            with pytest.raises(openai.BadRequestError, match="no system"):
                client.chat.completions.create(model="tiny", messages=[{"role": "system", "content": "S"}])
    (call,) = choice.message.tool_calls
    assert (choice.message.content, call.function.name, choice.finish_reason) == ("I look.", "count", "tool_calls")
    shown, without, none = (tokenizer.decode(request.prompt) for request in engine.requests)
    assert shown.startswith(begin)
    assert json.dumps(TOOLS[0]["function"]["parameters"])[:40] in shown
    assert "Counts." in shown
    text = '<tool_call>\n{"name": "count", "arguments": {"n": 2}}\n</tool_call>'
    response = "<tool_response>\ntwo\n</tool_response>"
    end = f"<a>So\n{text}\n{text}{tokenizer.eos_token}<u>{response}\n{response}<a>"
    assert shown.endswith(f"hi{end}")
    assert without == f"<u>hi{end}"
    assert none == "<u>hi<a>"
    grammars = [request.grammar is not None for request in engine.requests]
    assert grammars == [True, False, False]


def test_a_chosen_syntax(model):
    """A template that shows no syntax, with one that the server was told."""
    engine = ScriptedEngine('[TOOL_CALLS] [{"name": "count", "arguments": {"n": 1, "ok": true}}]', times=1)
    with (
        serving(engine, model, tool_call_parser="mistral") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        (choice,) = client.chat.completions.create(**CHAT, tools=TOOLS).choices
    assert choice.message.tool_calls[0].function.name == "count"
