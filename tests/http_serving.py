"""The server of `nextn serve` in this process, on a free port of the loopback, and plain sockets to talk to it."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

from nextn.serve.api import create_app
from nextn.serve.http_server import HttpServer
from nextn.serve.options import ConnectionLimits, ServerOptions, listen


class Serving:
    """A server that runs in a thread."""

    def __init__(self, engine, model, **options):
        limits = ConnectionLimits(**options.pop("connections", {}))
        options = {"served_name": "tiny", "max_model_len": 256, "grace_s": 1.0} | options
        self.engine, self.options = engine, ServerOptions(connections=limits, **options)
        self.socket = listen("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.app = create_app(engine, model, self.options)
        self.server = HttpServer(self.app, self.options)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        wait_for(lambda: self.server.started)

    def _run(self):
        asyncio.run(self.server.serve(sockets=[self.socket]))

    def stop(self, seconds=10):
        self.server.should_exit = True
        self.thread.join(seconds)
        assert not self.thread.is_alive()

    def connect(self, timeout=10):
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def raw(self, data, *, timeout=10):
        """Send bytes and read until the server closes -> status, headers, body; None for no answer."""
        with self.connect(timeout) as connection:
            connection.sendall(data)
            return parsed(read_all(connection))

    def post(self, path, body, headers=()):
        """POST bytes or a value as JSON -> status, headers, body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(data)}", "Connection: close", *headers, "", ""]
        return self.raw("\r\n".join(lines).encode() + data)

    def get(self, path, headers=()):
        lines = [f"GET {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", ""]
        return self.raw("\r\n".join(lines).encode())


@contextmanager
def serving(engine, model, **options):
    server = Serving(engine, model, **options)
    try:
        yield server
    finally:
        server.stop()


def wait_for(is_true, seconds=60):  # generous: a busy machine is no fault
    ends = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < ends, "waited too long"
        time.sleep(0.005)


def read_all(connection):
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    return data


def read_answer(connection):
    """Read one answer from a connection that stays open."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = connection.recv(65536)
        assert chunk, f"the connection was closed after {data!r}"
        data += chunk
    status, headers, body = parsed(data)
    while len(body) < int(headers["content-length"]):
        chunk = connection.recv(65536)
        assert chunk, "the connection was closed in the middle of an answer"
        body += chunk
    return status, headers, body


def parsed(data):
    """The first answer in these bytes."""
    if not data:
        return None
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = unchunked(body)
    return int(first.split()[1]), headers, body[: int(headers.get("content-length", len(body)))]


def unchunked(data):
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        out, data = out + data[:length], data[length + 2 :]
    return out


def events(body):
    """The JSON of server-sent events; the last must be [DONE]."""
    *parts, end = [part.removeprefix("data: ") for part in body.decode().strip().split("\n\n")]
    assert end == "[DONE]"
    return [json.loads(part) for part in parts]


def named_events(body):
    """The JSON of server-sent events that have names, which are their types."""
    pairs = [part.split("\n") for part in body.decode().strip().split("\n\n")]
    documents = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {document['type']}" for document in documents]
    return documents


def error_of(answer):
    """The error in an answer: it must have OpenAI's form, and nothing else."""
    status, headers, body = answer
    assert headers["content-type"] == "application/json"
    document = json.loads(body)
    assert set(document) == {"error"}
    error = document["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) <= 1000
    assert isinstance(error["type"], str)
    assert "Traceback" not in error["message"]
    return status, error
