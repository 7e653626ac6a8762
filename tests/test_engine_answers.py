"""Requests as engines expect them; answers in their three shapes, and hostile ones: each ends in one EngineError."""

import json
import os
import random
import resource
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from quick import loop
from raw_server import serving

from nextn.engines import counter_formats
from nextn.engines.answers import (
    AnswerToken,
    EngineAnswer,
    EngineRequest,
    ToolCall,
    TopLogprob,
    parse_answer,
    parse_stream,
)
from nextn.engines.client import KEY_ENV, Budget, Client, Limits
from nextn.engines.endpoint import Capabilities, Endpoint, ServedModel
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
    thinks = EngineRequest("hi", 5, template_variables={"enable_thinking": True})
    assert thinks.body("m", chat=True, extra_fields=False)["chat_template_kwargs"] == {"enable_thinking": True}
    assert "chat_template_kwargs" not in thinks.body("m", chat=False, extra_fields=False)


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


ATTACKS = int(os.environ.get("NEXTN_ATTACKS", "1"))
SECONDS, MEMORY = 30, 200  # of one answer on any processor (a quadratic reader needs minutes); MiB of growth
KEY = "sk-secret-key-0123"
DRAFTS = "vllm:spec_decode_num_drafts_total"
PLACES = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
# What is where something else belongs.
VALUES = [
    "Infinity", "-Infinity", "NaN", "1e999", "9" * 400, "-1", "1.5", '"7"', '"\\ud800"', "[]", "{}", "true",
    "[" * 500 + "]" * 500, '{"a":' * 400 + "1" + "}" * 400, "[[1]]", '"' + "x" * 5000 + '"', "1e300", '{"": []}',
    "[null]",
]  # fmt: skip
# JSON with one place (@) where each of the values is put.
ANSWERS = [
    '{"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"prompt_tokens": @}}',
    '{"choices": [{"text": "a", "token_ids": [1, @]}]}',
    '{"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"completion_tokens": @}}',
    '{"choices": [{"text": "a", "prompt_token_ids": [@]}]}',
    '{"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [@], "top_logprobs": [{"a": @}]}}]}',
    '{"choices": [{"text": "a", "logprobs": {"content": [{"token": "a", "logprob": -1, "top_logprobs": [@]}]}}]}',
    '{"choices": [{"message": {"content": "a", "tool_calls": [@]}}]}',
    '{"choices": @}',
    "@",
]
RECORDS = [
    '{"draft_n": @, "draft_n_accepted": 1}',
    '{"draft_n": 4, "draft_n_accepted": 1, "predicted_n": @}',
    '{"spec_verify_ct": 4, "spec_accept_histogram": [1, @]}',
    '{"spec_decode_num_drafts": 4, "spec_decode_per_position_acceptance_rates": [@]}',
    '{"engine": "x", "drafts": @, "per_position_offered": []}',
    '{"engine": "x", "per_position": [@], "per_position_offered": []}',
]
# Values that are right where they were put.
NO_FAULT = {
    (ANSWERS[0], "[]"), (ANSWERS[0], "{}"), (ANSWERS[4], "-Infinity"), (ANSWERS[4], "-1"),
    (ANSWERS[4], "1.5"),
    (RECORDS[3], "true"), (RECORDS[4], "[]"),
}  # fmt: skip
LARGE = {
    "nested": "[" * 4_000_000,
    "empty arrays": "[" + "[]," * 1_000_000 + "[]]",
    "objects": '{"choices": [' + '{"a":1},' * 500_000 + "{}]}",
    "a long number": "9" * 4_000_000,
    "a long float": "[1." + "9" * 4_000_000 + "]",
    "a long text": '{"choices": [{"text": "' + "x" * 8_000_000 + '"}]}',
    "surrogates": '{"choices": "' + "\\ud800" * 600_000 + '"}',
    "titles": "<html>" + "<title" * 600_000,
}


def metrics_texts():
    """Metrics without one count that can be."""
    yield from (f"{DRAFTS} {value}\n" for value in ("-5", "1e300", "1e18", "9" * 300, "NaN", "Inf", "0x10", "1_0", "٣"))
    for position in ("2000000000", "-1", "x", "", "1.5", "٣", "9" * 5000, "999"):
        yield f'{DRAFTS} 10\n{PLACES}{{position="{position}"}} 3\n'
    yield f'{DRAFTS}{{x="{"y" * 400_000}"}} 1\n'
    yield f'{DRAFTS}{{x="{"y" * 2000}"}} 1\n'
    yield "a 1\n" * 8_000_000
    yield f"{DRAFTS} 1\n" + "".join(f'{PLACES}{{position="{at}"}} 1\n' for at in range(100_000))
    yield "a{" * 4_000_000
    yield ("a{" + 'x="\\' * 3000 + "\n") * 400
    yield ("a{" + 'b="",' * 2500 + "} 1\n") * 400
    yield ("a{" + ",".join(f'b{at}=""' for at in range(60)) + "} 1\n") * 10_000
    yield ('a{x="' + "\\n" * 500 + '"} 1\n') * 4000
    yield f'{DRAFTS}{{model_name="\ud83d"}} 1\n'.encode(errors="surrogatepass").decode(errors="replace") + "\n" * 60_000


def log_texts():
    vllm = "SpecDecoding metrics: Mean acceptance length: {}, Accepted: {} tokens, Drafted: {} tokens, "
    vllm += "Per-position acceptance rate: {}\n"
    yield vllm.format("1.5", 1, 2, ", ".join(["0.5"] * 200_000))
    yield vllm.format("1.5", 1, 2, ", ".join(["0.5"] * 300))
    yield vllm.format("1.1.1", "9" * 5000, 2, "0.5.5")
    yield "SpecDecoding metrics: " * 400_000
    yield "SpecDecoding metrics: Mean acceptance length: 1 Accepted: 1 tokens Drafted: 1 tokens " * 100_000
    yield "accepted 1/ 2000000000 draft tokens\n"
    yield "accepted 9/ 3 draft tokens\n"
    yield "accepted" + " " * 8_000_000
    yield "draft acceptance = " * 400_000
    yield "Decode batch" * 700_000


def files():
    """What `sources.read` gets: every hostile value in every record, then metrics, logs and large JSON."""
    histogram = json.dumps({"spec_verify_ct": 1, "spec_accept_histogram": [1] * 200_000})
    generated = [
        record.replace("@", value) for record in RECORDS for value in VALUES if (record, value) not in NO_FAULT
    ]
    large = (part * num for part, num in ((histogram, 1), ("[1,\n", 3_000_000), ("1\n{", 100_000)))
    return chain(picked(generated, 20), metrics_texts(), large)


def answers():
    generated = [
        answer.replace("@", value) for answer in ANSWERS for value in VALUES if (answer, value) not in NO_FAULT
    ]
    return picked(generated, 20) + list(LARGE.values())


def picked(generated, num):
    random.Random(0).shuffle(generated)
    return generated[: num * ATTACKS]


def ends_in_an_engine_error(read, name):
    """One line, in time."""
    started = time.process_time()  # not that of others on this machine
    try:
        found = read()
    except EngineError as error:
        said = str(error)
    else:
        raise AssertionError(f"{name}: read as {found!r:.200}")
    seconds = time.process_time() - started
    assert seconds < SECONDS, f"{name}: {seconds:.1f} s"
    assert "\n" not in said, f"{name}: {said!r}"
    assert len(said) < 1000, f"{name}: {len(said)} characters"
    assert KEY not in said, f"{name}: {said!r}"
    said.encode()
    return seconds


def attack_logs():
    return attack_files(log_texts)


def attack_files(texts=files):
    found = []
    path = Path(sys.argv[2]) / "counters.txt"
    for number, text in enumerate(texts()):
        with path.open("w", encoding="utf-8") as file:
            for start in range(0, len(text), 2**20):  # no second copy: memory is measured
                file.write(text[start : start + 2**20])
        name = f"file {number} {text[:100]!r}"
        del text  # its memory is not what is measured
        found.append(ends_in_an_engine_error(partial(counter_formats.read, path), name))
    return found


def attack_answers():
    """Answers and streams over HTTP, with a key that the server repeats."""
    os.environ[KEY_ENV] = KEY
    found, bodies = [], [text.encode() for text in answers()]
    for number, body in enumerate(bodies):
        for stream in (False, True):
            if stream:
                body = b"data: " + body.replace(b"\n", b" ") + f"\n\ndata: {KEY}\n\n".encode()
            head = f"HTTP/1.1 200 {KEY}\r\nContent-Length: {len(body)}\r\nX-Key: {KEY}\r\n\r\n".encode()
            with serving(lambda connection, _, data=head + body: connection.sendall(data)) as url:
                client = Client(url, Budget(Limits()))
                endpoint = Endpoint(client, ServedModel("m", None), Capabilities(True, True, 4.0))
                ask = endpoint.stream if stream else endpoint.answer
                found.append(ends_in_an_engine_error(partial(ask, EngineRequest("a", 8)), f"{number} {body[:100]!r}"))
                client.close()
    return found


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param("attack_files", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.more) for name in ("attack_logs", "attack_answers")),
    ],
)
def test_hostile(attack, tmp_path):
    """In a child process, whose memory is measured and bounded."""
    done = subprocess.run(
        [sys.executable, __file__, attack, str(tmp_path)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    print(done.stdout)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    times = globals()[sys.argv[1]]()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024 - before
    assert grown < MEMORY, f"{grown} MiB more"
    print(f"{sys.argv[1]}: {len(times)} attacks, {max(times):.2f} s at most, {grown} MiB more")
