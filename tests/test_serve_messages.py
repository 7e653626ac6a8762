"""/v1/messages, in the shapes that the `anthropic` client reads; where it is installed, by the client itself."""

import json
from dataclasses import replace

import pytest
from chats import REASONED, reasoner
from http_serving import named_events, serving
from quick import loop
from scripted_engine import ScriptedEngine

from nextn.checkpoint.checkpoint import SHIPPED
from nextn.decoding.records import SequenceRound
from nextn.model.model import Model
from nextn.serve.answer_blocks import BlockAnswer
from nextn.serve.conversations import without_later
from nextn.serve.request import GenerationChunk, GenerationRequest
from nextn.serve.token_sampler import TokenTexts

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOLS = [{"name": "count", "description": "Counts.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}]
ASK = {"model": "tiny", "max_tokens": 200, "messages": [USER]}


@pytest.fixture(scope="module")
def model():
    return replace(Model.load(SHIPPED), tokenizer=reasoner())


@pytest.fixture(scope="module")
def server(model):
    with serving(ScriptedEngine(REASONED, times=1), model) as server:
        yield server


def ask(server, path="/v1/messages", **fields):
    status, headers, body = server.post(path, ASK | fields)
    assert status == 200, body
    return json.loads(body), headers


def request_of(server):
    request = server.engine.requests[-1]
    return bytes(request.prompt).decode(), request


def without_ids(content):
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


CONTENT = [
    {"type": "thinking", "thinking": "Why?", "signature": ""},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "count", "input": {"n": 1}},
]


def test_blocks_whole_and_streamed(server):
    answer, headers = ask(server, tools=TOOLS, system="Be brief.", metadata={"user_id": "me"})
    prompt, _ = request_of(server)
    assert prompt == "<s>Be brief.<u>hi1<a>"
    assert headers["x-ignored-fields"] == "metadata, tools.cache_control"
    assert without_ids(answer["content"]) == CONTENT
    assert answer["content"][2]["id"].startswith("toolu_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    usage = {"input_tokens": 11, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 10}
    assert answer["usage"] == usage | {"output_tokens": len(REASONED) + 1}
    fields = {"tools": TOOLS, "system": [{"type": "text", "text": "Be brief."}], "stream": True}
    first, *events, delta, stop = named_events(server.post("/v1/messages", ASK | fields)[2])
    assert (first["type"], first["message"]["content"], stop) == ("message_start", [], {"type": "message_stop"})
    assert first["message"]["usage"]["input_tokens"] == 21
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"] == answer["usage"]
    blocks, texts = [], {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append([event["content_block"], ""])
        elif event["type"] == "content_block_delta":
            blocks[event["index"]][1] += event["delta"][texts[event["delta"]["type"]]]
        else:
            assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
    assert [text for _, text in blocks] == ["Why?", "I look.", '{"n": 1}']
    assert [block for block, _ in blocks] == [
        CONTENT[0] | {"thinking": ""}, CONTENT[1] | {"text": ""},
        CONTENT[2] | {"input": {}, "id": blocks[2][0]["id"]},
    ]  # fmt: skip
    assert sum(event["type"] == "content_block_delta" for event in events) > 6


@pytest.mark.parametrize("before", ["", "I", "I "])  # rounds of three tokens are cut at other places
def test_text_after_a_call_whole_and_streamed(model, before):
    """A round may end a call and go on with text: a block gets nothing after its end."""
    call = '<tool_call>{"name": "count", "arguments": {"n": 1}}</tool_call>'
    with serving(ScriptedEngine(f"{before}{call}So{call}.", times=1), model) as server:
        answer, _ = ask(server, tools=TOOLS)
        events = named_events(server.post("/v1/messages", ASK | {"tools": TOOLS, "stream": True})[2])
    blocks, is_open = [], False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            blocks.append([event["content_block"]["type"], ""])
        elif event["type"] == "content_block_delta":
            assert is_open
            assert event["index"] == len(blocks) - 1
            blocks[-1][1] += event["delta"].get("text", "") + event["delta"].get("partial_json", "")
        is_open = event["type"] != "content_block_stop"
    whole = [[each["type"], each.get("text", json.dumps(each.get("input")))] for each in answer["content"]]
    call = ["tool_use", '{"n": 1}']
    assert blocks == whole == [*([["text", "I"]] if before else []), call, ["text", "So"], call, ["text", "."]]


def test_histories(server):
    """Calls and results, as the client sends them back; a last message of the assistant is continued."""
    said = [{"type": "thinking", "thinking": "r", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}]
    said += [{"type": "text", "text": "a"}, {"type": "tool_use", "id": "1", "name": "count", "input": {"n": 3}}]
    result = {
        "type": "tool_result",
        "tool_use_id": "1",
        "is_error": False,
        "content": [{"type": "text", "text": "three"}],
    }
    turns = [USER, {"role": "assistant", "content": said}]
    ask(server, messages=[*turns, {"role": "user", "content": [result]}])
    assert request_of(server)[0] == "<u>hi<a>(r)a[count=3]<t>three<a>"
    text = {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}}
    ask(server, messages=[*turns, {"role": "user", "content": [result | {"content": "3"}, text]}])
    assert request_of(server)[0] == "<u>hi<a>(r)a[count=3]<t>3<u>So?<a>"
    ask(server, messages=[USER, {"role": "assistant", "content": "One,"}])
    assert request_of(server)[0] == "<u>hi<a>One,"


def test_fields_reach_the_engine(server):
    ask(server, temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["zz"], seed=4, thinking={"type": "disabled"})
    request = request_of(server)[1]
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.9, 3)
    assert (request.stop, request.seed, request.max_tokens, request.grammar) == (("zz",), 4, 200, None)
    for fields in (
        {"tools": TOOLS, "tool_choice": {"type": "any"}},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "count", "disable_parallel_tool_use": True}},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "max"}},
    ):
        ask(server, **fields)
        assert request_of(server)[1].grammar is not None
    count, _ = ask(server, "/v1/messages/count_tokens", tools=TOOLS, system="S", max_tokens=None)
    assert count == {"input_tokens": len("<s>S<u>hi1<a>")}


def test_stop_reasons(model):
    with serving(ScriptedEngine("one two three", times=1), model) as server:
        for fields, reason, stop, text in (
            ({}, "end_turn", None, "one two three"),
            ({"max_tokens": 4}, "max_tokens", None, "one "),
            ({"stop_sequences": ["x", "two", "w"]}, "stop_sequence", "two", "one "),
        ):
            answer, _ = ask(server, **fields)
            assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, stop)
            assert answer["content"][0]["text"] == text
            *_, delta, _ = named_events(server.post("/v1/messages", ASK | {"stream": True} | fields)[2])
            assert delta["delta"] == {"stop_reason": reason, "stop_sequence": stop}
    with serving(ScriptedEngine("one two three"), model, max_model_len=40) as server:
        for asked, reason in ((40 - len("<u>hi<a>"), "max_tokens"), (40, "model_context_window_exceeded")):
            answer, _ = ask(server, max_tokens=asked)
            assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == (reason, 40 - len("<u>hi<a>"))


def test_the_stop_sequence_behind_a_special_token_that_is_left_out(model):
    request = GenerationRequest((1,), stop=("x", "two"), skip_special_tokens=True)
    blocks = BlockAnswer(request, None, TokenTexts(model.tokenizer))
    part = SequenceRound(0, (), 0, (257, *b"one two"), "stop", False)
    blocks.choice.add(GenerationChunk("one ", (part,), finish="stop"))
    assert blocks.stop_string == "two"


@loop(
    ("fields", "status", "kind", "words"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens: Field required"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens: "),
        ({"model": "claude"}, 404, "not_found_error", "'claude' does not exist"),
        ({"messages": []}, 400, "invalid_request_error", "messages: "),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400,
         "invalid_request_error", "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, 400,
         "invalid_request_error", "tool_use_id: Field required"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "f"}]}]}, 400,
         "invalid_request_error", "a block of type tool_use; expected text or tool_result"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", "tools[0].type"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, 400, "invalid_request_error", "no tool 'f'"),
        ({"container": "c"}, 400, "invalid_request_error", "container: unknown field"),
        ({"messages": [USER | {"content": "x" * 300}]}, 400, "invalid_request_error", "maximum context length"),
    ],
)  # fmt: skip
def test_errors_have_anthropic_s_form(server, fields, status, kind, words):
    found, _, body = server.post("/v1/messages", ASK | fields)
    document = json.loads(body)
    assert (found, document["type"], set(document)) == (status, "error", {"type", "error"})
    assert document["error"]["type"] == kind
    assert words in document["error"]["message"]


def test_threads_are_sent_whole(server):
    """Anthropic's tool runners begin a thread, and send all of a conversation that the server says it does not have."""
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    for path, rest in (("/v1/messages", {}), ("/v1/messages/count_tokens", {"max_tokens": None})):
        ask(server, path, thread={"type": "create"}, **rest)
        status, _, body = server.post(path, ASK | rest | {"thread": thread})
        error = json.loads(body)["error"]
        assert (status, error["type"], error["details"]) == (404, "not_found_error", {"error_code": "thread_not_found"})
        assert "details" not in json.loads(server.post(path, ASK | rest | {"thread": "msg_1"})[2])["error"]


def test_keys_and_failures(model):
    """The client's own header has the key; errors from before the routes, and in streams, have the same form."""
    with serving(ScriptedEngine(fails="it broke"), model, api_key="secret") as server:
        status, _, body = server.post("/v1/messages", ASK, ("x-api-key: wrong",))
        assert (status, json.loads(body)["error"]["type"]) == (401, "authentication_error")
        *_, last = named_events(server.post("/v1/messages", ASK | {"stream": True}, ("x-api-key: secret",))[2])
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        status, _, body = server.post("/v1/messages", ASK, ("Authorization: Bearer secret",))
        assert (status, json.loads(body)["error"]["type"]) == (500, "api_error")
        assert server.post("/v1/chat/completions", {"messages": [USER]}, ("x-api-key: secret",))[0] == 500


def count(n: int) -> str:
    """Counts."""
    return "one" if n == 1 else "many"


@pytest.mark.slow
def test_the_client_of_anthropic(server, model):
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic: nothing else checks its reading")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(**ASK, tools=TOOLS)
        with client.messages.stream(**ASK, tools=TOOLS) as stream:
            assert "".join(stream.text_stream) == "I look."
            final = stream.get_final_message()
        for message in (answer, final):
            assert without_ids(message.model_dump(include={"content"}, exclude_none=True)["content"]) == [
                CONTENT[0], {"type": "text", "text": "I look."}, CONTENT[2],
            ]  # fmt: skip
            assert message.stop_reason == "tool_use"
        assert final.usage == answer.usage
        back = [block.model_dump(exclude_none=True) for block in final.content]
        result = {"type": "tool_result", "tool_use_id": final.content[2].id, "content": "3"}
        messages = [USER, {"role": "assistant", "content": back}, {"role": "user", "content": [result]}]
        client.messages.create(**ASK | {"messages": messages}, tools=TOOLS)
        assert request_of(server)[0] == "<u>hi<a>(Why?)I look.[count=1]<t>31<a>"
        assert client.messages.count_tokens(model="tiny", messages=[USER]).input_tokens == 8
        runner = client.beta.messages.tool_runner(**ASK, tools=[anthropic.beta_tool(count)], max_iterations=3)
        assert [message.stop_reason for message in runner] == ["tool_use"] * 3
        assert request_of(server)[0].endswith("I look.[count=1]<t>one1<a>")
        with pytest.raises(anthropic.BadRequestError, match="tools"):
            client.messages.create(**ASK, tools=[{"type": "bash_20250124", "name": "bash"}])
    with (
        serving(ScriptedEngine(fails="it broke"), model) as broken,
        anthropic.Anthropic(base_url=broken.url, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.APIStatusError, match="it broke"),
        client.messages.stream(**ASK) as stream,
    ):
        stream.get_final_message()


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}<{{ m.role[0] }}>{{ m.content }}"
    "{% endfor %}<a>"
)


@loop("place", range(4))
def test_empty_system_messages(place):
    """An empty turn of the user's, wherever the message is: templates that alternate turns refuse it."""
    call = {"role": "assistant", "tool_calls": [{"id": "c"}]}
    said = [{"role": "user", "content": "hi"}, call, {"role": "tool", "content": "2", "tool_call_id": "c"}]
    assert without_later([*said[:place], {"role": "developer", "content": ""}, *said[place:]]) == said


def test_system_messages_behind_the_start(model):
    """As Claude Code 2.1 sends them. A template that refuses them gets their text in the user's messages."""
    tokenizer = reasoner()
    lenient, tokenizer.chat_template = tokenizer.chat_template, STRICT
    says = [("user", "hi"), ("system", "Agents."), ("assistant", "yes"), ("system", "Be brief."), ("user", "go")]
    messages = [{"role": role, "content": content} for role, content in says]
    late = "<u>hi\n\nAgents.<a>yes<u>Be brief.\n\ngo<a>"
    items = [{"role": "developer", "content": "Skills."}, *messages]
    with serving(ScriptedEngine("ok", times=1), replace(model, tokenizer=tokenizer)) as server:
        ask(server, system="Code.", messages=messages)
        assert request_of(server)[0] == f"<s>Code.{late}"
        chat = [{"role": "system", "content": "Code."}, *items]
        bodies = {"responses": {"instructions": "Code.", "input": items}, "chat/completions": {"messages": chat}}
        for path, body in bodies.items():
            assert server.post(f"/v1/{path}", {"model": "tiny"} | body)[0] == 200
            assert request_of(server)[0] == f"<s>Code.\n\nSkills.{late}"
        assert server.post("/v1/messages", ASK | {"messages": [], "system": "S"})[0] == 400
    tokenizer.chat_template = lenient
    with serving(ScriptedEngine("ok", times=1), replace(model, tokenizer=tokenizer)) as server:
        ask(server, messages=messages)
        assert request_of(server)[0] == "<u>hi<s>Agents.<a>yes<s>Be brief.<u>go<a>"


def test_calls_without_arguments(model):
    """Clients send {}, an empty text, null or nothing; templates such as Qwen3.5's read the items of an object."""
    tokenizer = reasoner()
    tokenizer.chat_template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{% for key, value in c.function.arguments | items %}{{ key }}{% endfor %}{% endfor %}{% endfor %}"
        "{# <tool_call> #}"
    )
    with serving(ScriptedEngine("ok", times=1), replace(model, tokenizer=tokenizer)) as server:
        for given in ({"arguments": "{}"}, {"arguments": ""}, {"arguments": "null"}, {"arguments": None}, {}):
            call = {"id": "c", "type": "function", "function": {"name": "now", **given}}
            messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
            status, _, body = server.post("/v1/chat/completions", {"messages": messages})
            assert (status, request_of(server)[0]) == (200, "now"), (given, body)


def test_results_in_the_order_of_the_calls(model):
    """Clients send them as they arrive; without ids in the template, the model would take one for the other's."""
    tokenizer = reasoner()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{# <tool_call> #}"

    def turn(*ids):
        uses = [{"type": "tool_use", "id": id, "name": "count", "input": {}} for id in ids]
        return {"role": "assistant", "content": uses}

    def results(*ids):
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": id} for id in ids]}

    with serving(ScriptedEngine("ok", times=1), replace(model, tokenizer=tokenizer)) as server:
        for ids, given, expected in (
            ("abc", "cab", "abc"),
            ("abc", "cxb", "bcx"),  # one that no call has
            ("ab", "ba", "ab"),
            ("aab", "baa", "aab"),
        ):
            ask(server, messages=[USER, turn(*ids), results(*given), turn("d"), results("d")])
            shown = "".join(f"<t>{id}" for id in expected)
            assert request_of(server)[0] == f"<u>hi<a>{shown}<a><t>d", (ids, given)
