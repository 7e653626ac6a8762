"""The total deadline of an exchange, which nothing that drips outlasts, and keys in foreign text."""

import json
import ssl
import time
from html import escape
from urllib.parse import quote

import httpx2
import pytest
from quick import loop, others_slow
from raw_server import DRIPS, drip, serving

from nextn.bounded_http import Deadline, _left, client
from nextn.engines.client import Budget, Client, Limits
from nextn.errors import BudgetError, EngineError
from nextn.redaction import Redactor

SLACK = 3.0  # seconds, for a machine that is busy
KEY = 'sk-a/b+c"\\d&<e>'


def test_a_deadline_that_passes_between_two_looks():
    """A negative timeout is a ValueError of the socket."""
    looks = iter([1e-9, -1e-9])

    class Ending(Deadline):
        remaining = property(lambda self: next(looks))

    assert _left(Ending(1), TimeoutError) > 0
    with pytest.raises(TimeoutError):
        _left(Ending(1), TimeoutError)


@pytest.mark.parametrize("part", others_slow(DRIPS, "headers", "body"))
def test_engine_that_drips(part):
    """Each byte comes in time, the answer never."""
    with serving(lambda connection, _: drip(connection, *DRIPS[part])) as url:
        started = time.monotonic()
        with pytest.raises(EngineError, match=r"no complete answer within 0.5 s; see its log"):
            Client(url, Budget(Limits(answer_s=0.5))).text("/v1/models")
        assert time.monotonic() - started < 0.5 + SLACK


@pytest.mark.parametrize("part", ["headers", "error body"])
def test_run_that_drips(part):
    """--max-seconds is total, too."""
    with serving(lambda connection, _: drip(connection, *DRIPS[part])) as url:
        started = time.monotonic()
        with pytest.raises(BudgetError, match="raise --max-seconds"):
            Client(url, Budget(Limits(answer_s=60, seconds=0.5))).text("/v1/models")
        assert time.monotonic() - started < 0.5 + SLACK


def test_other_requests_go_on():
    """A deadline ends its own exchange, and no other of the same client."""

    def answer(connection, request):
        if request.startswith(b"GET /slow"):
            drip(connection, *DRIPS["headers"])
        # `serving` closes after each answer: unannounced, the next request could go into the closing socket.
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")

    with serving(answer) as url, client(trust_env=False) as http:
        with pytest.raises(httpx2.ReadTimeout):
            http.get(f"{url}/slow", timeout=Deadline(0.3))
        assert http.get(f"{url}/quick", timeout=Deadline(5)).text == "ok"
        assert http.get(f"{url}/quick", timeout=5).text == "ok"


def test_request_that_nobody_reads():
    """A server that takes no bytes does not hold a large request for ever."""
    with serving(lambda connection, _: time.sleep(5)) as url, client(trust_env=False) as http:
        started = time.monotonic()
        with pytest.raises(httpx2.TimeoutException):
            http.post(url, content=b"x" * 64_000_000, timeout=Deadline(0.5), headers={"Content-Length": "64000000"})
        assert time.monotonic() - started < 0.5 + SLACK


def test_handshake_that_hangs():
    with (
        serving(lambda connection, _: time.sleep(5)) as url,
        client(verify=ssl.create_default_context(), trust_env=False) as http,
    ):
        started = time.monotonic()
        with pytest.raises(httpx2.TimeoutException):
            http.get(url.replace("http:", "https:"), timeout=Deadline(0.5))
        assert time.monotonic() - started < 0.5 + SLACK


def test_proxies_of_the_environment_keep_deadlines(monkeypatch):
    with serving(lambda connection, _: drip(connection, *DRIPS["headers"])) as url:
        monkeypatch.setenv("HTTP_PROXY", url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        with client() as http, pytest.raises(httpx2.ReadTimeout):
            http.get("http://example.invalid/", timeout=Deadline(0.3))


def test_compressed_answers_are_refused():
    """A few KB of gzip could become gigabytes."""
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}"
    with (
        serving(lambda connection, _: connection.sendall(head)) as url,
        pytest.raises(EngineError, match=r"compressed \(gzip\)"),
    ):
        Client(url, Budget()).json("/v1/models")


@loop(
    "form",
    [
        str,
        json.dumps,
        quote,
        lambda key: quote(key, safe="").lower(),
        lambda key: "".join(f"\\u{ord(char):04x}" for char in key),
        lambda key: "".join(f"\\u{ord(char):04X}" for char in key),
        lambda key: "".join(f"&#{ord(char)};" for char in key),
        lambda key: key.replace("/", "\\/").replace("-", "%2d"),
        repr,
    ],
)
def test_forms(form):
    text = f"before {form(KEY)} after"
    found = Redactor(KEY).text(text)
    assert found.replace('"', "").replace("'", "") == "before *** after"


def test_html():
    assert Redactor("sk-a&b-cdef").text(escape("sk-a&b-cdef")) == "***"


def test_what_is_no_secret():
    """vLLM's users give "EMPTY" as a key, or "1"."""
    for key in (None, "", "1", "EMPTY"):
        assert Redactor(key).text("EMPTY 1 none") == "EMPTY 1 none"
        assert Redactor(key).data(b"EMPTY 1") == b"EMPTY 1"


def test_bytes_keep_their_length():
    assert Redactor("secret-key").data(b"a secret-key b") == b"a ********** b"


def test_shows_nothing_of_itself():
    assert "secret" not in repr(Redactor("secret-key"))
