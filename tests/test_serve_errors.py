"""Malformed requests: each gets an error in OpenAI's form, and the server keeps running."""

import json
import time
from dataclasses import replace

import pytest
from chats import chatty
from http_serving import error_of, serving, wait_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quick import loop
from scripted_engine import ScriptedEngine
from tiny import build

from nextn.serve.api_errors import ApiError
from nextn.serve.request_model import parse_request
from nextn.serve.schemas import CompletionRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model():
    return replace(build("glm4_moe", vocab_size=264), tokenizer=chatty())


@pytest.fixture(scope="module")
def server(model):
    with serving(ScriptedEngine(), model, max_body_bytes=100_000, num_speculative_tokens=4) as server:
        yield server
        # After everything that the tests of this file sent, it still works.
        assert server.post(COMPLETIONS, {"prompt": "x"})[0] == 200
        assert not server.engine.running


def completion(**fields):
    return COMPLETIONS, {"prompt": "x", **fields}


def chat(**fields):
    return CHAT, {"messages": USER, **fields}


def message(**fields):
    return chat(messages=[{"role": "user", "content": "a"}, fields])


def tool(**function):
    return chat(tools=[{"type": "function", "function": function}])


# (route and body, status, param, code, words of the message)
MISSING = "missing_required_parameter"
CASES = [
    # JSON
    ((COMPLETIONS, b""), 400, None, "invalid_json", "not JSON"),
    ((COMPLETIONS, b"{"), 400, None, "invalid_json", "not JSON"),
    ((COMPLETIONS, b'{"prompt": "x"} trailing'), 400, None, "invalid_json", "not JSON"),
    ((COMPLETIONS, b'{"prompt": "\xff\xfe"}'), 400, None, "invalid_json", "UTF-8"),
    ((COMPLETIONS, b"[" * 10_000 + b"]" * 10_000), 400, None, "invalid_json", "nested more than 100 deep"),
    ((COMPLETIONS, b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}"), 400, None, "invalid_json", "digits"),
    ((COMPLETIONS, b"[]"), 400, None, "invalid_type", "expected a JSON object"),
    # the model
    (completion(model="other"), 404, "model", "model_not_found", "'other' does not exist; this server has 'tiny'"),
    (completion(model=3), 400, "model", "invalid_type", "valid string; got 3"),
    (completion(model=""), 400, "model", "invalid_type", "at least 1"),
    (("/tokenize", {"prompt": "x", "model": "other"}), 404, "model", "model_not_found", "does not exist"),
    # prompts
    ((COMPLETIONS, {}), 400, "prompt", "missing_required_parameter", "required"),
    ((COMPLETIONS, {"prompt": None}), 400, "prompt", "missing_required_parameter", "required"),
    (completion(prompt=""), 400, "prompt", "invalid_value", "empty"),
    (completion(prompt=[]), 400, "prompt", "invalid_type", "at least 1"),
    (completion(prompt=[[]]), 400, "prompt[0]", "invalid_type", "at least 1"),
    (completion(prompt=5), 400, "prompt", "invalid_type", "got 5"),
    (completion(prompt=[-1]), 400, "prompt[0]", "invalid_type", "greater than or equal to 0"),
    (completion(prompt=[True]), 400, "prompt[0]", "invalid_type", "valid"),
    (completion(prompt=[264]), 400, "prompt", "invalid_value", "the vocabulary has the ids 0 to 263"),
    (completion(prompt=[2**40]), 400, "prompt[0]", "invalid_type", "less than"),
    (completion(prompt=["x"] * 65), 400, "prompt", "invalid_type", "at most 64"),
    (completion(prompt=["x"] * 8, n=9), 400, "prompt", "invalid_value", "8 prompts times n = 9"),
    (completion(prompt="x" * 256), 400, "prompt", "context_length_exceeded", "256 tokens"),
    (chat(messages=[{"role": "user", "content": "x" * 300}]), 400, "messages", "context_length_exceeded", "context"),
    (completion(prompt=[0, 0, 0]), 400, None, "invalid_value", "does not like this prompt"),
    # numbers
    (completion(max_tokens=0), 400, "max_tokens", "invalid_value", "only with echo"),
    (chat(max_tokens=0), 400, "max_tokens", "invalid_type", "greater than or equal to 1; got 0"),
    (completion(max_tokens=-5), 400, "max_tokens", "invalid_type", "greater"),
    (completion(max_tokens="5"), 400, "max_tokens", "invalid_type", "valid integer; got '5'"),
    (completion(max_tokens=True), 400, "max_tokens", "invalid_type", "valid integer"),
    (completion(max_tokens=2**31), 400, "max_tokens", "invalid_type", "less than"),
    (completion(n=0), 400, "n", "invalid_type", "greater"),
    (completion(n=65), 400, "n", "invalid_type", "less than or equal to 64"),
    (completion(temperature=-0.1), 400, "temperature", "invalid_type", "greater than or equal to 0"),
    (completion(temperature=2.1), 400, "temperature", "invalid_type", "less than or equal to 2"),
    (completion(temperature=1e-9), 400, None, "invalid_value", "at least 1e-4"),
    ((COMPLETIONS, b'{"prompt": "x", "temperature": NaN}'), 400, "temperature", "invalid_type", "finite"),
    ((COMPLETIONS, b'{"prompt": "x", "temperature": 1e999}'), 400, "temperature", "invalid_type", "finite"),
    (completion(top_p=0), 400, "top_p", "invalid_type", "greater than 0"),
    (completion(top_p=1.01), 400, "top_p", "invalid_type", "less"),
    (completion(top_k=-2), 400, "top_k", "invalid_type", "greater"),
    (completion(min_p=1.5), 400, "min_p", "invalid_type", "less"),
    (completion(repetition_penalty=0), 400, "repetition_penalty", "invalid_type", "greater than 0"),
    (completion(presence_penalty=3), 400, "presence_penalty", "invalid_type", "less"),
    (completion(frequency_penalty=[1]), 400, "frequency_penalty", "invalid_type", "valid number"),
    (completion(seed=2**64), 400, "seed", "invalid_type", "less than"),
    (completion(num_speculative_tokens=5), 400, "num_speculative_tokens", "invalid_value", "5; expected 0 to 4, the K"),
    (completion(num_speculative_tokens=-1), 400, "num_speculative_tokens", "invalid_type", "greater"),
    (completion(logprobs=21), 400, "logprobs", "invalid_type", "less than or equal to 20"),
    (completion(logprobs=True), 400, "logprobs", "invalid_type", "valid integer"),
    (chat(logprobs=3), 400, "logprobs", "invalid_type", "valid boolean"),
    (chat(top_logprobs=2), 400, "top_logprobs", "invalid_value", "only valid with logprobs"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "invalid_type", "less"),
    # stops and biases
    (completion(stop=[5]), 400, "stop[0]", "invalid_type", "valid string"),
    (completion(stop=""), 400, "stop", "invalid_value", "1 to 256 characters"),
    (completion(stop=["a"] * 17), 400, "stop", "invalid_value", "at most 16"),
    (completion(stop="x" * 257), 400, "stop", "invalid_value", "1 to 256 characters"),
    (completion(stop_token_ids=["a"]), 400, "stop_token_ids[0]", "invalid_type", "valid integer"),
    (completion(stop_token_ids=[1] * 129), 400, "stop_token_ids", "invalid_type", "at most 128"),
    (completion(logit_bias={"-1": 1}), 400, "logit_bias", "invalid_value", "no token id"),
    (completion(logit_bias={"²": 1}), 400, "logit_bias", "invalid_value", "no token id"),
    (completion(logit_bias={"999": 1}), 400, "logit_bias", "invalid_value", "vocabulary"),
    (completion(logit_bias={"9": 101}), 400, "logit_bias.9", "invalid_type", "less than or equal to 100"),
    (completion(logit_bias=[1]), 400, "logit_bias", "invalid_type", "valid dictionary"),
    (completion(logit_bias={str(i): 1 for i in range(1025)}), 400, "logit_bias", "invalid_value", "at most 1,024"),
    # streams
    (completion(stream=1), 400, "stream", "invalid_type", "valid boolean"),
    (completion(stream_options={"include_usage": True}), 400, "stream_options", "invalid_value", "stream = true"),
    (completion(stream=True, stream_options=3), 400, "stream_options", "invalid_type", "got 3"),
    (completion(stream=True, stream_options={"x": 1}), 400, "stream_options.x", "unknown_parameter", "unknown field"),
    # fields that are not supported, or not known
    (chat(echo=True), 400, "echo", "unsupported_parameter", "leave it out, or send False"),
    (completion(best_of=3), 400, "best_of", "unsupported_parameter", "leave it out"),
    (completion(suffix="end"), 400, "suffix", "unsupported_parameter", "leave it out"),
    (completion(prompt_logprobs=1), 400, "prompt_logprobs", "unsupported_parameter", "leave it out"),
    (completion(min_tokens=5, stop="x"), 400, "min_tokens", "unsupported_parameter", "leave it out"),
    (chat(min_tokens=5, response_format={"type": "json_object"}), 400, "min_tokens", "unsupported_parameter", "with"),
    (completion(min_tokens=5, max_tokens=4), 400, "min_tokens", "invalid_value", "at most max_tokens, 4"),
    (completion(min_tokens=-1), 400, "min_tokens", "invalid_type", "greater than or equal to 0"),
    (completion(nonsense=1), 400, "nonsense", "unknown_parameter", "unknown field"),
    (chat(prompt="x"), 400, "prompt", "unknown_parameter", "unknown field"),
    (chat(modalities=["text", "audio"]), 400, "modalities", "unsupported_parameter", "leave it out"),
    (completion(**{"x" * 5000: 1}), 400, "x" * 100, "unknown_parameter", "unknown field"),
    # conversations
    ((CHAT, {}), 400, "messages", "missing_required_parameter", "required"),
    (chat(messages=[]), 400, "messages", "invalid_type", "at least 1"),
    (chat(messages=["hi"]), 400, "messages[0]", "invalid_type", "got 'hi'"),
    (chat(messages=[{}]), 400, "messages[0].role", "missing_required_parameter", "required"),
    (message(role="user", content=None), 400, "messages[1].content", "invalid_value", "required"),
    (message(role="robot", content="x"), 400, "messages[1].role", "invalid_type", "got 'robot'"),
    (message(role="user", content=5), 400, "messages[1].content", "invalid_type", "got 5"),
    (chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), 400, "messages[0].content[0].text", MISSING, ""),
    (
        message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        400,
        "messages[1].content[0].type",
        "invalid_type",
        "got 'image_url'",
    ),
    (message(role="user", content="x", prefix=True), 400, "messages[1].prefix", "unknown_parameter", "unknown field"),
    (chat(messages=USER * 2049), 400, "messages", "invalid_type", "at most 2048"),
    (chat(chat_template_kwargs=[1]), 400, "chat_template_kwargs", "invalid_type", "valid dictionary"),
    (chat(chat_template_kwargs={"continue_final_message": True}), 400, "chat_template_kwargs", "invalid_value",
     "continue_final_message is a field of the request"),
    # tools and formats
    (chat(tools=[{}]), 400, "tools[0].type", "missing_required_parameter", "required"),
    (tool(name="a b"), 400, "tools[0].function.name", "invalid_type", "pattern"),
    (tool(name="f", parameters=[]), 400, "tools[0].function.parameters", "invalid_type", "valid dictionary"),
    (chat(tool_choice="f"), 400, "tool_choice", "invalid_type", "'none', 'auto' or 'required'"),
    (chat(tool_choice="required"), 400, "tool_choice", "invalid_value", "no tools"),
    (chat(tool_choice={"type": "function", "function": {"name": "f"}}), 400, "tool_choice", "invalid_value", "no tool"),
    (chat(response_format="json"), 400, "response_format", "invalid_type", "got 'json'"),
    (chat(response_format={"type": "xml"}), 400, "response_format.type", "invalid_type", "'json_schema'"),
    (chat(response_format={"type": "json_schema"}), 400, "response_format", "invalid_value", "needs the field"),
    # the other routes
    (("/tokenize", {}), 400, "prompt", "invalid_value", "required"),
    (("/tokenize", {"prompt": 5}), 400, "prompt", "invalid_type", "valid string"),
    (("/detokenize", {"tokens": [999]}), 400, "tokens", "invalid_value", "vocabulary"),
    (("/detokenize", {"tokens": "abc"}), 400, "tokens", "invalid_type", "valid list"),
    (("/v1/embeddings", {"input": "x"}), 404, None, "not_found", "POST /v1/embeddings: there is no such route"),
    (("/v1/completions/", {"prompt": "x"}), 404, None, "not_found", "no such route"),
    (("/health", {}), 405, None, "method_not_allowed", "other methods"),
    # sizes
    (completion(prompt="x" * 100_000), 413, None, "request_too_large", "larger than 100,000 bytes"),
    # ours
    (completion(prompt=[0, 0, 1]), 500, None, "internal_error", "see its log"),
    (completion(prompt=[0, 0, 2]), 500, None, "internal_error", "see its log"),
]  # fmt: skip


@loop("case", range(len(CASES)), ids=lambda number: f"{number}-{CASES[number][3]}")
def test_table(server, case):
    (path, body), status, param, code, words = CASES[case]
    got, error = error_of(server.post(path, body))
    assert (got, error["param"], error["code"]) == (status, param, code), error
    assert words.lower() in error["message"].lower()
    assert "secret" not in error["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = [
    "model", "prompt", "messages", "n", "max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "logit_bias",
    "logprobs", "top_logprobs", "stream", "stream_options", "tools", "tool_choice", "response_format", "echo", "user",
    "stop_token_ids", "num_speculative_tokens", "chat_template_kwargs", "metadata", "input", "text", "instructions",
]  # fmt: skip


@pytest.mark.more
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/v1/responses"]),
    base=st.sampled_from([{}, {"prompt": "x"}, {"messages": USER}, {"tokens": [1]}, {"input": "x"}]),
    changes=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
)
def test_any_values(server, path, base, changes):
    """Whatever the values are: an answer, or an error of the client's."""
    answer = server.post(path, base | changes)
    if answer[0] != 200:
        status, error = error_of(answer)
        assert status in (400, 404), error


@pytest.mark.more
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 60), junk=st.binary(max_size=12), path=st.sampled_from([COMPLETIONS, CHAT]))
def test_any_bytes(server, cut, junk, path):
    """Valid JSON with bytes cut out or put in."""
    valid = json.dumps({"prompt": "xé", "max_tokens": 2, "stop": ["a"]}, ensure_ascii=False).encode()
    answer = server.post(path, valid[:cut] + junk + valid[cut + len(junk) :])
    if answer[0] != 200:
        assert error_of(answer)[0] in (400, 404)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(head=st.binary(min_size=1, max_size=40))
def test_any_http(server, head):
    """Bytes that are no HTTP: an error or a closed connection."""
    answer = server.raw(b"POST " + head + b"\r\n\r\n", timeout=5)
    if answer is not None:
        assert 400 <= error_of(answer)[0] < 500


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a"] + [1] * 250_000},
        {"prompt": [1.5] * 250_000},
        {"prompt": [[1]] * 150_000},
        {"prompt": "x", "logit_bias": {str(number): "a" for number in range(60_000)}},
        {str(number): 1 for number in range(60_000)},
        {"prompt": "x", "response_format": {str(number): 1 for number in range(60_000)}},
    ],
    ids=["a text among ids", "no ids", "many prompts", "biases", "fields", "inner fields"],
)
def test_large_wrong_values_are_refused_quickly(fields):
    """While a body is checked, all streams wait. To describe a million errors would take 13 seconds."""
    begin = time.process_time()
    with pytest.raises(ApiError) as refused:
        parse_request(CompletionRequest, fields)
    assert time.process_time() - begin < 0.3
    assert refused.value.status == 400


@pytest.mark.parametrize(("prompt", "words"), [([0, 0, 1], "a bug in the engine"), ([0, 0, 2], "a shard is missing")])
def test_a_fault_of_ours_is_in_the_log(server, caplog, prompt, words):
    """With its traceback, which the client does not get, whether or not the error is one of this package."""
    assert server.post(COMPLETIONS, {"prompt": prompt})[0] == 500
    assert f"secret: {words}" in caplog.text
    assert "Traceback" in caplog.text


def test_the_queue_is_full(model):
    engine = ScriptedEngine(max_running=2, round_s=0.01)
    with serving(engine, model) as server:
        answer = server.post(COMPLETIONS, {"prompt": "x", "n": 3, "max_tokens": 200})
        status, error = error_of(answer)
        assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
        assert int(answer[1]["retry-after"]) > 0
        assert len(engine.requests) == 2  # those that were submitted are cancelled
        assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2, "stream": True})[0] in (200, 429)


def test_a_model_without_template_or_tokenizer(model):
    plain = chatty()
    plain.chat_template = None
    with serving(ScriptedEngine(), replace(model, tokenizer=plain)) as server:
        status, error = error_of(server.post(CHAT, {"messages": USER}))
        assert (status, error["code"]) == (400, "no_chat_template")
    with serving(ScriptedEngine(), replace(model, tokenizer=None)) as server:
        status, error = error_of(server.post(COMPLETIONS, {"prompt": "x"}))
        assert (status, error["code"]) == (400, "no_tokenizer")
        status, error = error_of(server.post(COMPLETIONS, {"prompt": [1], "stop": "a"}))
        assert (status, error["code"]) == (400, "no_tokenizer")
        assert server.post(COMPLETIONS, {"prompt": [1]})[0] == 200


def test_a_server_without_mtp(model):
    with serving(ScriptedEngine(), model, num_speculative_tokens=0) as server:
        status, error = error_of(server.post(COMPLETIONS, {"prompt": "x", "num_speculative_tokens": 2}))
        assert (status, error["param"]) == (400, "num_speculative_tokens")
        assert "2; expected 0, as this server decodes without MTP" in error["message"]
        assert server.post(COMPLETIONS, {"prompt": "x", "num_speculative_tokens": 0})[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_that_fails(model, stream):
    """In a stream, the error comes as an event, and the stream ends as streams do."""
    with serving(ScriptedEngine(fails="no memory\nTraceback (most recent call last)"), model) as server:
        answer = server.post(CHAT, {"messages": USER, "stream": stream})
        if stream:
            *_, last, done = answer[2].decode().strip().split("\n\n")
            assert done == "data: [DONE]"
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            status, error = error_of(answer)
            assert status == 500
        assert error["message"] == "the generation failed: no memory"
        assert error["type"] == "server_error"


def test_a_generation_that_takes_too_long(model):
    engine = ScriptedEngine(round_s=0.02)
    with serving(engine, model, request_s=0.1) as server:
        status, error = error_of(server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 250}))
        assert (status, error["code"]) == (504, "request_timeout")
        wait_for(lambda: not engine.running)
        assert engine.cancelled == 1
