"""How the server stops, and what it counts: running answers end, metrics agree with what clients got."""

import gc
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import httpx2
import pytest
import uvicorn
from chats import chatty
from http_serving import error_of, events, parsed, read_all, serving, wait_for
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ScriptedEngine
from tiny import build

from nextn.checkpoint.checkpoint import SHIPPED
from nextn.checkpoint.file_index import FileStamps
from nextn.engines.counter_formats import read
from nextn.engines.metrics_formats import from_metrics, prefix_hits
from nextn.serve.api import create_app
from nextn.serve.http_server import HttpServer
from nextn.serve.options import ServerOptions


@pytest.fixture(scope="module")
def model():
    return replace(build("glm4_moe", vocab_size=264), tokenizer=chatty())


class Client(threading.Thread):
    """One request in a thread."""

    def __init__(self, server, body):
        super().__init__(daemon=True)
        self.server, self.body, self.answer = server, body, None
        self.start()

    def run(self):
        self.answer = self.server.post("/v1/completions", {"prompt": "x", **self.body})

    def result(self):
        self.join(10)
        return self.answer


def test_running_answers_end(model):
    engine = ScriptedEngine(round_s=0.02)
    with serving(engine, model, grace_s=5) as server:
        clients = [Client(server, {"max_tokens": 40, "stream": stream}) for stream in (False, True)]
        wait_for(lambda: len(engine.running) == 2)
        server.stop()
        whole, streamed = [client.result() for client in clients]
        assert json.loads(whole[2])["choices"][0]["finish_reason"] == "length"
        assert events(streamed[2])[-1]["choices"][0]["finish_reason"] == "length"
        assert engine.closed
        with pytest.raises(ConnectionError):
            server.connect()


def test_after_the_grace_time_answers_end_with_an_error(model):
    engine = ScriptedEngine(round_s=0.05)
    with serving(engine, model, grace_s=0.3) as server:
        clients = [Client(server, {"max_tokens": 200, "stream": stream}) for stream in (False, True)]
        wait_for(lambda: len(engine.running) == 2)
        begin = time.monotonic()
        server.stop()
        assert time.monotonic() - begin < 4
        whole, streamed = [client.result() for client in clients]
    status, error = error_of(whole)
    assert (status, error["code"]) == (503, "server_stopping")
    assert events(streamed[2])[-1]["error"]["code"] == "server_stopping"
    wait_for(lambda: not engine.running)


def test_a_second_interrupt_ends_answers_at_once(model):
    engine = ScriptedEngine(round_s=0.05)
    with serving(engine, model, grace_s=30) as server:
        client = Client(server, {"max_tokens": 200, "stream": True})
        wait_for(lambda: engine.running)
        server.server.handle_exit(signal.SIGINT, None)
        wait_for(lambda: server.app.state.api.is_stopping)
        server.server.handle_exit(signal.SIGINT, None)
        server.stop()
        assert events(client.result()[2])[-1]["error"]["code"] == "server_stopping"


def test_an_engine_that_hangs_does_not_keep_streams_open(model, monkeypatch):
    """The engine is in a long pass and hears nothing; clients get their error after the grace time all the same."""
    engine = ScriptedEngine()
    monkeypatch.setattr("nextn.serve.api._CLOSE_S", 0.2)
    hang = threading.Event()
    engine.submit = lambda request, emit: lambda: None
    engine.close = lambda *, grace_s: hang.wait(20)
    with serving(engine, model, grace_s=0.2) as server:
        client = Client(server, {"max_tokens": 200, "stream": True})
        time.sleep(0.1)
        server.stop()
        assert events(client.result()[2])[-1]["error"]["code"] == "server_stopping"
    hang.set()


def test_new_requests_on_open_connections_are_refused(model):
    engine = ScriptedEngine(round_s=0.05)
    with serving(engine, model, grace_s=2) as server:
        client = Client(server, {"max_tokens": 60})
        wait_for(lambda: engine.running)
        api = server.app.state.api
        api.is_stopping = True
        status, error = error_of(server.post("/v1/completions", {"prompt": "x"}))
        assert (status, error["code"]) == (503, "server_stopping")
        status, _, data = server.get("/health")
        assert (status, json.loads(data)["status"]) == (503, "stopping")
        api.is_stopping = False
        assert client.result()[0] == 200


@pytest.mark.more
def test_the_command_stops_by_signal():
    """`nextn serve` as a process: it says where it is, answers, and ends with 0 after a signal."""
    command = [sys.executable, "-m", "nextn", "serve", "tiny", "--port", "0", "--backend", "torch", "--grace", "60"]
    command += ["--max-num-seqs", "1", "--fixed-k"]  # nothing to measure before the first request
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("tiny at http://127.0.0.1:"), process.stderr.read()
            port = int(line.split(":")[2].split()[0])
            body = b'{"prompt": "def add(", "max_tokens": 100, "temperature": 0, "stream": true}'
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
            with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                first = connection.recv(2000)
                process.send_signal(signal.SIGTERM)
                data = parsed(first + read_all(connection))[2]
            assert events(data)[-1]["choices"][0]["finish_reason"] == "length"
            assert process.wait(20) == 0
            assert process.stderr.read().splitlines()[0] == f"loading {SHIPPED} ..."
        finally:
            process.kill()


@pytest.mark.slow
def test_the_command_outlives_truncated_weights(tmp_path):
    """While it warms up, whose passes read the mapped weights."""
    folder = shutil.copytree(SHIPPED, tmp_path / "model")
    command = [sys.executable, "-m", "nextn", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            port = int(process.stdout.readline().split(":")[2].split()[0])
            for file in folder.glob("*.safetensors"):
                os.truncate(file, 1000)
            for _ in range(12):
                time.sleep(0.5)
                status = httpx2.get(f"http://127.0.0.1:{port}/health", timeout=60).json()["status"]
                assert (status, process.poll()) == ("model_files_changed", None)
        finally:
            process.kill()


def test_garbage_collection_does_not_interrupt_streams(model, monkeypatch):
    """What exists before the first request is never looked through again."""
    counts = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: counts.append(gc.get_freeze_count()))
    options = ServerOptions("tiny", 256)
    try:
        HttpServer(create_app(ScriptedEngine(), model, options), options).run()
        assert counts[0] > 10_000
    finally:
        gc.unfreeze()


def test_metrics_agree_with_the_answers(model):
    """Counters, summed over whole, streamed and cancelled requests; read by our own parsers."""
    engine = ScriptedEngine()
    with serving(engine, model) as server:
        num_drafts = drafted = accepted = generated = 0
        positions = [0, 0]
        for stream in (False, True):
            for n in (1, 3):
                body = {"prompt": "xyz", "max_tokens": 20, "n": n, "stream": stream, "return_metrics": True}
                data = server.post("/v1/completions", body)[2]
                last = events(data)[-1] if stream else json.loads(data)
                metrics = last["metrics"]["spec_decode"]
                num_drafts += metrics["num_drafts"]
                drafted += metrics["num_draft_tokens"]
                accepted += metrics["num_accepted_tokens"]
                positions = [a + b for a, b in zip(positions, metrics["num_accepted_tokens_per_pos"][:2], strict=True)]
                generated += last["usage"]["completion_tokens"]
        server.post("/v1/completions", {"prompt": 5})
        server.get("/nowhere")
        status, headers, data = server.get("/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    text = data.decode()
    counters = from_metrics(text, model="tiny")
    assert counters.engine == "nextn"
    assert (counters.num_drafts, counters.draft_tokens, counters.accepted) == (num_drafts, drafted, accepted)
    assert list(counters.per_position) == positions == [56, 48]
    assert read(text).num_drafts == num_drafts
    assert prefix_hits(text) == 8
    samples = {
        (sample.name, *sorted(set(sample.labels.values()) - {"tiny"})): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["nextn:generation_tokens_total",] == generated == 8 * 20
    assert samples["nextn:prompt_tokens_total",] == 8 * 3
    assert samples["nextn:request_success_total", "length"] == 8
    assert samples["nextn:time_to_first_token_seconds_count",] == 8
    assert samples["nextn:inter_token_latency_seconds_count",] == num_drafts
    assert samples["nextn:e2e_request_latency_seconds_count",] == 8
    assert samples["nextn:http_errors_total", "400"] == 1
    assert samples["nextn:http_errors_total", "404"] == 1
    assert samples["nextn:num_requests_running",] == 0
    assert samples["nextn:kv_cache_usage_perc",] == 0.1
    assert samples["nextn:prefix_cache_queries_total",] == 40


@pytest.mark.parametrize("change", ["truncate", "overwrite", "replace"])
def test_weights_that_change_while_they_are_served(model, tmp_path, change, caplog):
    """Nothing is answered from a file that was changed in place; one that was replaced is not the mapped one: noted."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(1000))
    stamps = FileStamps.of_weights(tmp_path)
    engine = ScriptedEngine(round_s=0.05)
    with serving(engine, model, weight_files=stamps) as server:
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
        clients = [Client(server, {"max_tokens": 200, "stream": stream}) for stream in (False, True)]
        wait_for(lambda: len(engine.running) == 2)
        if change == "truncate":
            file.write_bytes(b"")
        elif change == "overwrite":
            with file.open("r+b") as opened:
                opened.write(b"1")
        else:
            (tmp_path / "new").write_bytes(bytes(900))
            (tmp_path / "new").rename(file)
        answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
        if change == "replace":
            status, _, health = server.get("/health")
            assert answer[0] == status == 200
            assert ["model.safetensors" in text for text in (json.loads(health)["weights"], caplog.text)] == [True] * 2
            return
        status, error = error_of(answer)
        assert (status, error["code"]) == (503, "model_files_changed")
        assert "model.safetensors was changed while it is served" in error["message"]
        assert (server.get("/health")[0], json.loads(server.get("/health")[2])["status"]) == (
            503,
            "model_files_changed",
        )
        whole, streamed = [client.result() for client in clients]
        assert error_of(whole)[1]["code"] == "model_files_changed"
        assert events(streamed[2])[-1]["error"]["code"] == "model_files_changed"


@pytest.mark.slow
def test_a_second_interrupt_prints_no_traceback(tmp_path):
    """The program itself, with a stream under way."""
    command = [sys.executable, "-m", "nextn", "serve", "tiny", "--port", "0", "--grace", "30"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        port = next(
            int(match[1]) for line in process.stdout if (match := re.search(r"http://127\.0\.0\.1:(\d+)", line))
        )
        body = json.dumps({"prompt": "def add(a, b):", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(head.encode() + body)
            client.recv(1000)
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            output = process.communicate(timeout=30)[0]
    finally:
        process.kill()
    assert "Traceback" not in output, output
    assert process.returncode == 130, output
