"""Requests as engines expect them, answers in the three shapes that they come in."""

import json
from dataclasses import replace

import pytest
from quick import loop

from nextn.engines.answers import (
    AnswerToken,
    EngineAnswer,
    EngineRequest,
    ToolCall,
    TopLogprob,
    parse_answer,
    parse_stream,
)
from nextn.errors import EngineError


def test_body_of_completions():
    request = EngineRequest("hi", 5, temperature=1.0, seed=3, stop=("x",), logprobs=4)
    assert request.body("m", chat=False, extra_fields=False) == {
        "model": "m", "prompt": "hi", "max_tokens": 5, "temperature": 1.0, "top_p": 1.0, "seed": 3, "stop": ["x"],
        "logprobs": 4,
    }  # fmt: skip


def test_body_of_chat():
    """top_logprobs without logprobs = true is refused by all engines."""
    body = EngineRequest(
        "hi", 5, logprobs=4, schema={"type": "object"}, tool_choice="f", tools=({"type": "function"},)
    ).body("m", chat=True, extra_fields=False, stream=True)
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert (body["logprobs"], body["top_logprobs"], body["stream"]) == (True, 4, True)
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert "prompt" not in body


def test_extra_fields_turn_filters_off():
    """A top_k of a generation_config would sample from another distribution than the log-probabilities."""
    request = EngineRequest((1, 2), 5, logprobs=4, use_cache=False)
    body, other = (request.body("m", chat=False, extra_fields=True) for _ in range(2))
    assert (body["prompt"], body["top_k"], body["min_p"], body["repetition_penalty"]) == ([1, 2], -1, 0.0, 1.0)
    assert (body["return_token_ids"], body["return_tokens_as_token_ids"]) == (True, True)
    assert body["cache_prompt"] is False
    assert body["cache_salt"] != other["cache_salt"]
    assert "cache_salt" not in replace(request, use_cache=True).body("m", chat=False, extra_fields=True)


def test_parallel_lists():
    """OpenAI's completions; vLLM names tokens by their ids."""
    logprobs = {
        "tokens": ["token_id:7", "token_id:9"],
        "token_logprobs": [-0.1, None],
        "top_logprobs": [{"token_id:8": -2.0, "token_id:7": -0.1}, None],
    }
    choice = {"text": "ab", "finish_reason": "stop", "logprobs": logprobs, "prompt_token_ids": [1, 2]}
    usage = {"prompt_tokens": 2, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}}
    answer = parse_answer({"choices": [choice], "usage": usage}, "here")
    assert answer.tokens == (
        AnswerToken("token_id:7", 7, -0.1, (TopLogprob("token_id:7", 7, -0.1), TopLogprob("token_id:8", 8, -2.0))),
        AnswerToken("token_id:9", 9, None),
    )
    assert (answer.ids, answer.prompt_ids, answer.cached_tokens, answer.completion_tokens) == ((7, 9), (1, 2), 16, 2)
    assert answer.tokens[0].listed(8) == -2.0
    assert answer.tokens[0].listed(5) is None


def test_list_of_objects():
    """Chat, and llama.cpp's completions, which give ids."""
    best = [{"token": "b", "id": 4, "logprob": -3.0}, {"token": "a", "id": 3, "logprob": -0.2}]
    content = [{"token": "a", "id": 3, "logprob": -0.2, "top_logprobs": best}]
    choice = {"message": {"content": "a"}, "finish_reason": "length", "logprobs": {"content": content}}
    answer = parse_answer({"choices": [choice]}, "here")
    assert answer.tokens == (AnswerToken("a", 3, -0.2, (TopLogprob("a", 3, -0.2), TopLogprob("b", 4, -3.0))),)
    assert (answer.text, answer.cached_tokens) == ("a", None)


def test_ids_alone_and_nothing():
    answer = parse_answer({"choices": [{"text": "ab", "token_ids": [5, 6]}]}, "here")
    assert (answer.ids, answer.names) == ((5, 6), (5, 6))
    assert parse_answer({"choices": [{"text": "ab"}]}, "here").names == ("a", "b")


def test_tool_calls():
    call = {"function": {"name": "f", "arguments": "{}"}}
    answer = parse_answer({"choices": [{"message": {"content": None, "tool_calls": [call]}}]}, "here")
    assert (answer.text, answer.tool_calls) == ("", (ToolCall("f", "{}"),))


@loop(
    "found",
    [{}, {"choices": []}, {"choices": [1]}, {"choices": [{}]}, {"choices": [{"text": 3}]}, {"choices": {"0": {}}},
     {"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [], "top_logprobs": []}}]},
     {"choices": [{"text": "a", "logprobs": {"content": [{}]}}]}, {"choices": [{"text": "a"}], "usage": [1]},
     {"choices": [{"message": {"tool_calls": [{"function": {}}]}}]}],
)  # fmt: skip
def test_other_json(found):
    with pytest.raises(EngineError, match="here: not an OpenAI-compatible answer"):
        parse_answer(found, "here")


def sse(*events):
    return "".join(f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n" for each in events).encode()


def test_stream():
    """Events are cut anywhere, even inside a letter of several bytes."""
    parts = [
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "größe "}}]},
        {"choices": [{"delta": {"content": "ab"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {}},
    ]
    data = b": ping\n\n" + "".join(f"data: {json.dumps(each, ensure_ascii=False)}\n\n" for each in parts).encode()
    data += b"data: [DONE]\n\n"
    chunks = [data[start : start + 7] for start in range(0, len(data), 7)]
    assert parse_stream(chunks, "here") == EngineAnswer("größe ab", "stop")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (sse({"choices": [{"text": "ab"}]}), r"ends without \[DONE\] after 2 characters"),
        (sse({"error": {"message": "boom"}}, "[DONE]"), "holds an error: .*boom"),
        (sse("{"), "not an OpenAI-compatible stream"),
        (sse({"other": 1}), "not an OpenAI-compatible stream"),
    ],
)
def test_broken_streams(data, words):
    with pytest.raises(EngineError, match=words):
        parse_stream([data], "here")
