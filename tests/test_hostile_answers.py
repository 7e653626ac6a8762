"""Answers that no engine gives: each ends in one EngineError, in little time and memory.

NEXTN_ATTACKS=n multiplies the number of generated ones (1: about 120; 5: 350).
"""

import json
import os
import random
import resource
import subprocess
import sys
import time
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from raw_server import serving

from nextn.engines import counter_formats
from nextn.engines.answers import EngineRequest
from nextn.engines.client import KEY_ENV, Budget, Client, Limits
from nextn.engines.endpoint import Capabilities, Endpoint, ServedModel
from nextn.errors import EngineError

ATTACKS = int(os.environ.get("NEXTN_ATTACKS", "1"))
SECONDS, MEMORY = 30, 200  # of one answer on any processor (a quadratic reader needs minutes); MiB of growth
KEY = "sk-secret-key-0123"
DRAFTS = "vllm:spec_decode_num_drafts_total"
PLACES = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
# What stands where something else belongs.
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
