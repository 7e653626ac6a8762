"""/v1/responses, as the `openai` client uses it."""

import json
from dataclasses import replace

import openai
import pytest
from chats import REASONED, reasoner
from http_serving import error_of, named_events, serving
from quick import loop
from scripted_engine import ScriptedEngine

from nextn.checkpoint.checkpoint import SHIPPED
from nextn.model.model import Model
from nextn.serve.api_errors import ApiError
from nextn.serve.openai_responses import ResponseStore
from nextn.serve.request_model import parse_request
from nextn.serve.schemas import ChatRequest

PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOLS = [{"type": "function", "name": "count", "description": "Counts.", "parameters": PARAMETERS}]
ASK = {"model": "tiny", "input": "hi"}


@pytest.fixture(scope="module")
def model():
    return replace(Model.load(SHIPPED), tokenizer=reasoner())


@pytest.fixture(scope="module")
def server(model):
    with serving(ScriptedEngine(REASONED, times=1), model) as server:
        yield server


def prompt_of(server):
    return bytes(server.engine.requests[-1].prompt).decode()


def shown(output):
    """What the items say, without their ids."""
    return [
        (item.type, item.status, item.arguments if item.type == "function_call" else item.content[0].text)
        for item in output
    ]


@pytest.mark.more
def test_items_whole_and_streamed(client, server):
    answer = client.responses.create(**ASK, tools=TOOLS, instructions="Be brief.", metadata={"a": "b"})
    assert prompt_of(server) == "<s>Be brief.<u>hi1<a>"
    assert shown(answer.output) == [
        ("reasoning", "completed", "Why?"),
        ("message", "completed", "I look."),
        ("function_call", "completed", '{"n": 1}'),
    ]
    assert (answer.output_text, answer.output[2].name) == ("I look.", "count")
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief.", {"a": "b"}, 1.0)
    assert answer.tools[0].name == "count"
    usage, num_tokens = answer.usage, len(REASONED) + 1
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (21, num_tokens, 21 + num_tokens)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (10, 4)
    with client.responses.stream(**ASK, tools=TOOLS, instructions="Be brief.", metadata={"a": "b"}) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert shown(final.output) == shown(answer.output)
    assert final.usage == usage
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events if not event.type.endswith(".delta")]
    item = ["response.output_item.added", "response.output_item.done"]
    part = ["response.content_part.added", "response.content_part.done"]
    assert types == [
        "response.created", "response.in_progress",
        item[0], part[0], "response.reasoning_text.done", part[1], item[1],
        item[0], part[0], "response.output_text.done", part[1], item[1],
        item[0], "response.function_call_arguments.done", item[1],
        "response.completed",
    ]  # fmt: skip
    for kind, text in (("reasoning_text", "Why?"), ("output_text", "I look."), ("function_call_arguments", '{"n": 1}')):
        deltas = [event.delta for event in events if event.type == f"response.{kind}.delta"]
        assert "".join(deltas) == text
        assert len(deltas) > 1
    for event in events:
        assert not hasattr(event, "item_id") or event.item_id in {item.id for item in final.output}


def test_conversations(client, server):
    """Items of earlier answers become one message of a turn, whether they are sent again or the server kept them."""
    first = client.responses.create(**ASK, tools=TOOLS, instructions="Be brief.")
    call = first.output[2]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "one"}
    turn = "<u>hi<a>(Why?)I look.[count=1]<t>one"
    second = client.responses.create(model="tiny", input=[result], previous_response_id=first.id)
    assert prompt_of(server) == f"{turn}<a>"  # the instructions are not carried over
    again = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in first.output), result]
    answer = client.responses.with_raw_response.create(model="tiny", input=again, instructions="So.")
    assert prompt_of(server) == f"<s>So.{turn}<a>"
    assert "input.status" in answer.headers["x-ignored-fields"]
    client.responses.create(model="tiny", input="more", previous_response_id=second.id, store=False)
    assert prompt_of(server) == f"{turn}<a>(Why?)I look. {REASONED[27:]}<u>more<a>"
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [
        {"role": "developer", "content": "S"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "c"},
    ]
    two = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
        {"role": "assistant", "content": "d"},
    ]
    client.responses.create(model="tiny", input=[*items, *two], instructions="I")
    assert prompt_of(server) == "<s>I\n\nS<u>a\nb<a>c<a>(r)d<a>"
    refusal = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"n": 2}'}
    behind = [call, {"role": "assistant", "content": "d"}, call, {"role": "assistant", "content": "e"}, result]
    client.responses.create(model="tiny", input=[refusal, {"role": "user", "content": "u"}, *behind])
    assert prompt_of(server) == "<a>no<u>u<a>de[f=2][f=2]<t>one<a>"


def test_fields_reach_the_engine(client, server):
    client.responses.create(
        **ASK, temperature=0.5, top_p=0.9, max_output_tokens=7, reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "a", "schema": PARAMETERS}, "verbosity": "low"},
        truncation="disabled", store=False, include=["reasoning.encrypted_content"], user="me",
        extra_body={"seed": 5, "num_speculative_tokens": 0, "top_k": 3},
    )  # fmt: skip
    request = server.engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 3)
    assert (request.max_tokens, request.seed, request.num_speculative_tokens) == (7, 5, 0)
    assert request.grammar is not None


def test_an_answer_that_is_cut_off(client, server):
    """In a stream, a call that has begun stays incomplete; a whole answer shows its text."""
    size = REASONED.index('"n"') + 6
    answer = client.responses.create(**ASK, tools=TOOLS, max_output_tokens=size)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert shown(answer.output)[1:] == [("message", "incomplete", REASONED[19:size])]
    body = ASK | {"tools": TOOLS, "max_output_tokens": size, "stream": True}
    *_, last = named_events(server.post("/v1/responses", body)[2])
    assert last["type"] == "response.incomplete"
    assert [item["status"] for item in last["response"]["output"]][:3] == ["completed", "completed", "incomplete"]


def test_what_a_coding_agent_sends(server):
    """As Codex 0.171: tools that are no functions are left out, and several system messages at the start become one."""
    agents = [{"type": "function", "name": "spawn", "parameters": PARAMETERS}]
    body = {
        "instructions": "You code.",
        "input": [
            *({"type": "message", "id": "m", "role": role, "content": [{"type": "input_text", "text": text}]}
              for role, text in (("developer", "Skills."), ("system", "Rules."), ("user", "hi"))),
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
            {"type": "function_call", "call_id": "c1", "name": "count", "arguments": '{"n": 2}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
        "tools": [*TOOLS, {"type": "namespace", "name": "agents", "tools": agents}, {"type": "web_search"},
                  {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}],
        "reasoning": {"summary": "auto"}, "store": False, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k", "client_metadata": {"session_id": "s"},
    }  # fmt: skip
    status, headers, _ = server.post("/v1/responses", {"model": "tiny"} | body)
    assert status == 200
    assert prompt_of(server) == "<s>You code.\n\nSkills.\n\nRules.<u>hi<a>[count=2]<t>21<a>"
    ignored = set(headers["x-ignored-fields"].split(", "))
    assert {"client_metadata", "tools.custom", "tools.namespace", "tools.web_search"} <= ignored


def test_a_choice_among_some_tools(server):
    """The others are not offered; in both forms, that of responses and that of chats."""
    names = ("now", "later")
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in names]
    allowed = [{"type": "function", "name": "later"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    status, _, body = server.post("/v1/responses", ASK | {"tools": tools, "tool_choice": choice, "truncation": "auto"})
    assert (status, json.loads(body)["tool_choice"]) == (200, choice)
    assert server.engine.requests[-1].grammar is not None
    unknown = [{"type": "function", "name": "x"}]
    for wrong, word in (({"tools": unknown}, "'x'"), ({"mode": "x"}, "'auto'")):
        _, error = error_of(server.post("/v1/responses", ASK | {"tools": tools, "tool_choice": choice | wrong}))
        assert word in error["message"]
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": name}} for name in names],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]},
        },
    }
    request = parse_request(ChatRequest, chat)
    assert ([tool.function.name for tool in request.tools], request.tool_choice) == (["now"], "auto")


@loop(
    ("fields", "status", "param", "words"),
    [
        ({"input": ""}, 400, "input", "1 to 2,048"),
        ({"input": []}, 400, "input", "1 to 2,048"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0].type", "'function_call'"),
        ({"input": [{"type": "message", "role": "user"}]}, 400, "input[0].content", "required"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, 400, "input[0].arguments", "required"),
        ({"previous_response_id": "resp_1"}, 404, "previous_response_id", "'resp_1'"),
        ({"background": True}, 400, "background", "False"),
        ({"truncation": "always"}, 400, "truncation", "disabled"),
        ({"conversation": "c"}, 400, "conversation", "unknown field"),
        ({"tools": [{"type": "functions", "name": "f"}]}, 400, "tools[0].type", "function"),
        ({"tools": {"type": "web_search"}}, 400, "tools", "list"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            400,
            "tool_choice.type",
            "function",
        ),
        ({"tool_choice": {"type": "function", "name": "f"}}, 400, "tool_choice", "no tool 'f'"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens", "greater"),
        ({"temperature": 3}, 400, "temperature", "less"),
    ],
)
def test_what_is_refused(server, fields, status, param, words):
    found, error = error_of(server.post("/v1/responses", ASK | fields))
    assert (found, error["param"]) == (status, param)
    assert words in error["message"]


def test_a_stream_that_fails(model):
    with serving(ScriptedEngine(fails="the model broke"), model) as server:
        events = named_events(server.post("/v1/responses", ASK | {"stream": True})[2])
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            *_, last = client.responses.create(**ASK, stream=True)
    assert events[-1]["type"] == last.type == "error"
    assert "the model broke" in last.message
    assert events[-1]["sequence_number"] == len(events) - 1


def test_stored_conversations_are_bounded(monkeypatch):
    monkeypatch.setattr("nextn.serve.openai_responses._MAX_STORED", 3)
    monkeypatch.setattr("nextn.serve.openai_responses._MAX_STORED_CHARS", 1000)
    store = ResponseStore()
    for number in range(4):
        store.put(str(number), ({"content": "x"},))
    assert store.get("1") == ({"content": "x"},)
    store.put("4", ({"content": "y" * 900},))  # the oldest go: 0 by number, then 2, which was read before 1
    assert store.get("1")
    for gone in ("0", "2"):
        with pytest.raises(ApiError):
            store.get(gone)
    store.put("5", ({"content": "z" * 2000},))
    with pytest.raises(ApiError):
        store.get("5")
