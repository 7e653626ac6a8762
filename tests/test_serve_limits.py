"""Limits of connections: slow clients, half-open connections, sizes, the API key, and pages of other sites."""

import contextlib
import json
import re
import socket
import time
from dataclasses import replace

import pytest
from chats import chatty
from http_serving import error_of, parsed, read_all, read_answer, serving, wait_for
from quick import loop
from scripted_engine import ScriptedEngine
from tiny import build

LIMITS = {"read_s": 0.25, "keep_alive_s": 2, "stall_s": 0.5, "max_connections": 6}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "x", "max_tokens": 2}'
REQUEST = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


@pytest.fixture(scope="module")
def model():
    return replace(build("glm4_moe", vocab_size=264), tokenizer=chatty())


@pytest.fixture(scope="module")
def server(model):
    with serving(ScriptedEngine(), model, connections=LIMITS, max_body_bytes=50_000) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_connections_are_left(server):
    yield
    wait_for(lambda: not server.server.server_state.connections)


@pytest.mark.parametrize(
    "start",
    [b"", b"P", b"POST /v1/completions HTTP/1.1\r\n", HEAD, HEAD + b"Content-Length: 100\r\n\r\n", REQUEST[:-1]],
    ids=["nothing", "a byte", "a line", "headers", "no body", "most of it"],
)
def test_a_request_that_stops_arriving(server, start):
    """A half-open connection ends by itself, with an error that says why."""
    begin = time.monotonic()
    with server.connect() as connection:
        connection.sendall(start)
        status, error = error_of(parsed(read_all(connection)))
    assert (status, error["code"]) == (408, "request_timeout")
    assert 0.2 < time.monotonic() - begin < 3


@pytest.mark.parametrize("start", [b"", HEAD, HEAD + b"Content-Length: 1000\r\n\r\n"], ids=["line", "headers", "body"])
def test_a_request_that_drips(server, start):
    """Each byte comes soon after the last one, but the whole takes too long."""
    with server.connect() as connection:
        connection.sendall(start)
        connection.settimeout(0.03)
        answer = b""
        for number in range(100):
            try:
                connection.sendall(b"POST / HTTP/1.1\r\nX-Slow: aaaaaaaaaa"[number % 30 :][:1])
                chunk = connection.recv(1000)
            except TimeoutError:
                continue
            except OSError:
                break
            answer += chunk
            if not chunk:
                break
        assert number < 60
    assert error_of(parsed(answer))[0] == 408


def test_a_second_request_that_stops_arriving(server):
    with server.connect() as connection:
        connection.sendall(REQUEST)
        assert read_answer(connection)[0] == 200
        connection.sendall(HEAD)
        status, error = error_of(read_answer(connection))
    assert (status, error["code"]) == (408, "request_timeout")


def test_a_body_that_goes_on_after_its_error(server):
    """It was refused by its length; what still arrives is dropped for a while, and the connection then closed."""
    with server.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: 1000000\r\n\r\n")
        status, error = error_of(read_answer(connection))
        assert (status, error["code"]) == (413, "request_too_large")
        begin = time.monotonic()
        connection.settimeout(0.05)
        while time.monotonic() - begin < 5:
            try:
                connection.sendall(b"x")
                if not connection.recv(100):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        assert time.monotonic() - begin < 3


def test_a_body_without_a_length_is_counted(server):
    chunk = b"1000\r\n" + b"x" * 4096 + b"\r\n"
    with server.connect() as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 13)
        status, error = error_of(read_answer(connection))
    assert (status, error["code"]) == (413, "request_too_large")


@loop(
    ("data", "status", "code"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 120 + b"\r\n", 431, "headers_too_large"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431, "headers_too_large"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "invalid_request"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_request"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "invalid_request"),
        (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400, "invalid_request"),
        (HEAD + b"Content-Length: -5\r\n\r\n", 400, "invalid_request"),
        (HEAD + b"Content-Length: abc\r\n\r\n", 400, "invalid_request"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_request"),
        (REQUEST.replace(b"application/json", b"text/plain"), 415, "unsupported_media_type"),
        (REQUEST.replace(b"Content-Type", b"X-Type"), 415, "unsupported_media_type"),
    ],
)
def test_headers(server, data, status, code):
    with server.connect() as connection:
        connection.sendall(data)
        got, error = error_of(read_answer(connection))
    assert (got, error["code"]) == (status, code)


@pytest.mark.parametrize("start", [b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", b"GET /"], ids=["header", "path"])
def test_headers_that_arrive_in_pieces(server, start):
    """Their size is found by h11 before they are complete, not by the application."""
    with server.connect() as connection:
        for data in (start, b"a" * 10_000, b"a" * 10_000):
            connection.sendall(data)
            time.sleep(0.02)
        status, error = error_of(read_answer(connection))
    assert (status, error["code"]) == (431, "headers_too_large")


def test_every_error_is_counted_once(model):
    """Also those that are answered without the application, and those that its body never arrives for."""
    with serving(ScriptedEngine(), model, connections=LIMITS | {"max_connections": 1}) as server:
        sent = {
            "400": b"GET /health HTTP/1.1\r\n\r\n",
            "404": b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
            "408": HEAD + b"Content-Length: 100\r\n\r\n",
            "431": b"GET /" + b"a" * 20_000,
        }
        for status, data in sent.items():
            assert server.raw(data)[0] == int(status)
            wait_for(lambda: not server.server.server_state.connections)
        with server.connect():
            wait_for(lambda: server.server.server_state.connections)
            assert server.raw(b"")[0] == 503
        wait_for(lambda: not server.server.server_state.connections)
        with server.connect() as connection:  # a client that goes away gets no answer
            connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n")
            wait_for(lambda: server.server.server_state.connections)
        wait_for(lambda: not server.server.server_state.connections)
        text = server.get("/metrics")[2].decode()
    counts = dict(re.findall(r'nextn:http_errors_total\{.*status="(\d+)"\} ([\d.]+)', text))
    assert counts == dict.fromkeys([*sent, "503"], "1.0")


def test_a_connection_serves_many_requests(server):
    with server.connect() as connection:
        for _ in range(3):
            connection.sendall(REQUEST)
            assert read_answer(connection)[0] == 200
        connection.sendall(REQUEST + REQUEST)  # pipelined
        data = b""
        while data.count(b"HTTP/1.1 200") < 2:
            data += connection.recv(10_000)


def test_answers_do_not_wait_for_acknowledgements(server):
    """Headers and body are two writes: with Nagle's algorithm, the second one waits 40 ms."""
    with server.connect() as connection:
        times = []
        for _ in range(8):
            begin = time.monotonic()
            connection.sendall(REQUEST)
            assert read_answer(connection)[0] == 200
            times.append(time.monotonic() - begin)
    assert min(times[1:]) < 0.03  # the first acknowledgements of a connection are sent at once


def test_an_idle_connection_is_closed(model):
    with serving(ScriptedEngine(), model, connections={"keep_alive_s": 1}) as server, server.connect() as connection:
        connection.sendall(REQUEST)
        assert read_answer(connection)[0] == 200
        begin = time.monotonic()
        assert connection.recv(100) == b""
        assert time.monotonic() - begin < 3


def test_too_many_connections(server):
    held = [server.connect() for _ in range(6)]
    try:
        wait_for(lambda: len(server.server.server_state.connections) == 6)
        with server.connect() as connection:
            answer = parsed(read_all(connection))
        status, error = error_of(answer)
        assert (status, error["code"]) == (503, "too_many_connections")
        assert answer[1]["retry-after"]
    finally:
        for connection in held:
            connection.close()
    wait_for(lambda: not server.server.server_state.connections)
    assert server.get("/health")[0] == 200


def test_a_client_that_does_not_read_is_disconnected(model):
    """Its buffers are full, and its generation ends with the connection."""
    engine = ScriptedEngine("x" * 300)
    with serving(engine, model, connections={"stall_s": 0.3}, max_model_len=200_000) as server:
        body = b'{"prompt": "x", "max_tokens": 60000, "stream": true, "stream_options": {"include_rounds": true}}'
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            wait_for(lambda: engine.requests)
            wait_for(lambda: not server.server.server_state.connections)
            wait_for(lambda: not engine.running)


def test_api_key(model):
    with serving(ScriptedEngine(), model, api_key="right") as server:
        for headers in ([], ["Authorization: Bearer wrong"], ["Authorization: right"], ["Authorization: Basic right"]):
            for path in ("/v1/models", "/metrics", "/nowhere"):
                answer = server.get(path, headers)
                status, error = error_of(answer)
                assert (status, error["code"]) == (401, "invalid_api_key")
                assert answer[1]["www-authenticate"] == "Bearer"
            assert error_of(server.post("/v1/completions", {"prompt": "x"}, headers))[0] == 401
        right = ["Authorization: Bearer right"]
        assert server.get("/v1/models", right)[0] == 200
        assert server.post("/v1/completions", {"prompt": "x"}, right)[0] == 200
        assert server.get("/health")[0] == 200
        assert len(server.engine.requests) == 1


@pytest.mark.parametrize(
    ("host", "is_valid"),
    [("localhost:1", 1), ("LocalHost", 1), ("127.0.0.1", 1), ("[::1]:8000", 1), ("evil.example:1", 0)],
)
def test_names_of_other_hosts(model, host, is_valid):
    """A web page whose own name points to this machine cannot use the server: its requests have its name as Host."""
    with serving(ScriptedEngine(), model, allowed_hosts=("localhost", "127.0.0.1", "::1")) as server:
        answer = server.raw(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        if is_valid:
            assert answer[0] == 200
        else:
            status, error = error_of(answer)
            assert (status, error["code"]) == (403, "host_not_allowed")


def test_cors_only_where_asked(model, server):
    preflight = (
        b"OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: https://a.example\r\nConnection: close\r\n"
    )
    preflight += b"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: content-type\r\n\r\n"
    status, headers, _ = server.raw(preflight)
    assert status == 405
    assert "access-control-allow-origin" not in headers
    with serving(ScriptedEngine(), model, cors_origins=("https://a.example",)) as asked:
        status, headers, _ = asked.raw(preflight)
        assert status == 200
        assert headers["access-control-allow-origin"] == "https://a.example"
        status, headers, _ = asked.raw(preflight.replace(b"a.example", b"b.example"))
        assert "access-control-allow-origin" not in headers


def test_an_open_stream_keeps_its_connection(model):
    """The times of reading a request do not limit its answer."""
    engine = ScriptedEngine(round_s=0.05)
    with serving(engine, model, connections={"read_s": 0.2, "keep_alive_s": 1}) as server:
        body = {"prompt": "x", "max_tokens": 40, "stream": True}
        begin = time.monotonic()
        status, _, data = server.post("/v1/completions", body)
        assert time.monotonic() - begin > 0.5
    assert status == 200
    assert data.endswith(b"data: [DONE]\n\n")
    assert json.loads(data.split(b"\n\n")[-3].removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"


def test_half_open_requests_of_one_client_do_not_lock_others_out(model):
    """Of more connections than one address may have waiting the oldest are closed, and /health is answered at once."""
    limits = LIMITS | {"read_s": 20, "max_connections": 40, "max_waiting_per_address": 10}
    with serving(ScriptedEngine(), model, connections=limits) as server:
        half_open = []
        for _ in range(60):
            client = socket.create_connection(("127.0.0.1", server.port), timeout=5)
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-a: ")
            half_open.append(client)
        begin = time.monotonic()
        assert server.get("/health")[0] == 200
        assert time.monotonic() - begin < 5
        assert len(server.server.server_state.connections) <= 12
        half_open[0].settimeout(5)
        with contextlib.suppress(ConnectionError):
            assert half_open[0].recv(1) == b""  # closed
        half_open[-1].sendall(b"b\r\nContent-Length: 0\r\n\r\n")
        assert half_open[-1].recv(20).startswith(b"HTTP/1.1 4")  # one of the newest is still read
        for client in half_open:
            client.close()


def test_preflight_of_the_openai_client(model):
    """It sends headers of its own, and the page's origin is allowed all the same; another origin is not."""
    names = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-retry-count,x-stainless-timeout"
    request = (
        "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: {}\r\nConnection: close\r\n"
        f"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: {names}\r\n\r\n"
    )
    with serving(ScriptedEngine(), model, cors_origins=("https://a.example",)) as asked:
        for origin, status in (("https://a.example", 200), ("https://b.example", 400)):
            found, headers, _ = asked.raw(request.format(origin).encode())
            assert found == status
            assert ("access-control-allow-origin" in headers) == (status == 200)
        allowed = asked.raw(request.format("https://a.example").encode())[1]["access-control-allow-headers"]
        assert set(names.split(",")) <= {name.strip().lower() for name in allowed.split(",")}
