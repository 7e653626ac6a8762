"""Limits on connections, headers, bodies and times, the API key, and the guard against pages of other sites.

uvicorn limits the size of headers and the time of idle connections. The rest is here: a client that sends a request
slowly or not at all, that does not read its answer, or that opens too many connections.
"""

import asyncio
import hmac
import sys
from collections.abc import Callable
from typing import Any

import h11
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from nextn.serve.api_errors import ApiError
from nextn.serve.options import ConnectionLimits, ServerOptions
from nextn.serve.request_model import ignored_header

IGNORED_HEADER = "X-Ignored-Fields"  # of answers: the fields of the request that were ignored
CLIENT_GONE = 499  # the status of answers that nobody reads any more
_LINGER_S = 1.0  # a refused connection stays open so long, so that the client reads why
OPEN_PATHS = frozenset({"/", "/health"})  # no API key: the page asks for one, and probes have none


class LimitedProtocol(H11Protocol):
    """One connection. A timer runs while a request is being read, and another while the client reads nothing."""

    limits = ConnectionLimits()
    on_error: Callable[[int], None]  # called with the status of each error that this class answers
    waiting: dict[str, dict["LimitedProtocol", None]]  # by address, the longest waiting first

    _read_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _is_refused = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self.limits.max_connections:
            self._answer(ApiError(503, "too many connections", code="too_many_connections", retry_after=1))
        else:
            self._start_read_timer(self.limits.read_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._read_timer is None and self._is_idle():
            self._start_read_timer(self.limits.read_s)
        super().data_received(data)
        self._check_request_is_read()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A body that the answer did not wait for may still be arriving, and must not do so for ever.
        if self.conn.their_state is h11.SEND_BODY:
            self._start_read_timer(self.limits.read_s)
        self._wait()
        self._check_request_is_read()

    def send_400_response(self, msg: str) -> None:
        error = sys.exception()
        hint = getattr(error, "error_status_hint", 400)
        message = f"not a valid HTTP request: {str(error or msg)[:200]}"
        status, code = (431, "headers_too_large") if hint == 431 else (400, "invalid_request")
        self._answer(ApiError(status, message, code=code))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self.limits.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall_timer()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _check_request_is_read(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body:
            self._stop_read_timer()
            self._stop_waiting()

    def _wait(self) -> None:
        """Count this connection among those of its address that have sent no complete request.

        Beyond the limit the longest waiting is closed, not the new one: then a client with many half-open requests only
        takes its own connections, and others behind the same address, such as /health of this machine, are answered.
        """
        if self._is_refused or self.transport.is_closing():
            return
        same = self.waiting.setdefault(self.client[0] if self.client else "", {})
        same.pop(self, None)
        same[self] = None
        if len(same) > self.limits.max_waiting_per_address:
            oldest = next(iter(same))
            oldest._stop_waiting()
            oldest.connections.discard(oldest)  # before the loop says that it is closed, as many may come at once
            oldest.transport.abort()

    def _stop_waiting(self) -> None:
        address = self.client[0] if self.client else ""
        same = self.waiting.get(address, {})
        same.pop(self, None)
        if not same:
            self.waiting.pop(address, None)

    def _start_read_timer(self, seconds: float) -> None:
        self._stop_read_timer()
        self._read_timer = self.loop.call_later(seconds, self._reading_took_too_long)

    def _reading_took_too_long(self) -> None:
        self._read_timer = None
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            message = f"the request did not arrive within {self.limits.read_s:g} s"
            self._answer(ApiError(408, message, code="request_timeout"))
        else:  # it has been answered, and its body is still arriving
            self.transport.close()

    def _answer(self, error: ApiError) -> None:
        """Write an error without the application, and close the connection."""
        if not self._is_idle():  # the application waits for the body, and hears that the client is gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = error.body()
        headers = [("content-type", "application/json"), ("connection", "close"), ("content-length", str(len(body)))]
        headers += [(name.lower(), value) for name, value in error.headers.items()]
        try:
            events = (h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
            self.on_error(error.status)
        except h11.LocalProtocolError:  # an answer is already under way
            pass
        self._linger()

    def _linger(self) -> None:
        """Close after a moment: bytes still to come would reset the connection, and the answer would be lost."""
        self._is_refused = True
        self._stop_timers()
        self._stop_waiting()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.abort)

    def _stop_timers(self) -> None:
        self._stop_read_timer()
        self._stop_stall_timer()

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def limited_protocol(limits: ConnectionLimits, on_error: Callable[[int], None]) -> type[LimitedProtocol]:
    """Return uvicorn's protocol class with these limits. uvicorn makes one object per connection, without arguments."""
    fields = {"limits": limits, "on_error": staticmethod(on_error), "waiting": {}}
    return type("LimitedProtocol", (LimitedProtocol,), fields)


def ignored_fields(scope: Scope) -> set[str]:
    """Return the set in which a request's ignored fields are collected."""
    names: set[str] = scope.setdefault("state", {}).setdefault("ignored_fields", set())
    return names


class RequestGuard:
    """ASGI middleware: checks the headers of each request before the application sees it, and counts its body."""

    def __init__(self, app: ASGIApp, *, options: ServerOptions, on_error: Callable[[int], None]) -> None:
        self._app, self._options, self._on_error = app, options, on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        watched = self._watched(scope, send)
        try:
            self._check(scope)
        except ApiError as error:
            response = Response(error.body(scope["path"]), error.status, error.headers, "application/json")
            await response(scope, receive, watched)
            return
        await self._app(scope, self._counted(receive), watched)

    def _check(self, scope: Scope) -> None:
        headers = scope["headers"]
        limits = self._options.connections
        # h11 limits what it holds of incomplete headers; those that arrive in one piece may be larger.
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in headers)
        if len(headers) > limits.max_headers or size > limits.max_header_bytes:
            message = f"{len(headers)} headers of {size:,} bytes"
            message += f"; at most {limits.max_headers} of {limits.max_header_bytes:,} bytes are read"
            raise ApiError(431, message, code="headers_too_large")
        values = dict(headers)
        self._check_host(values.get(b"host", b"").decode("latin-1"))
        if scope["path"] not in OPEN_PATHS:
            self._check_key(values.get(b"authorization", b""), values.get(b"x-api-key", b""))
        length = values.get(b"content-length", b"0")
        if int(length) > self._options.max_body_bytes:  # h11 has checked that these are digits
            raise self._too_large()
        content_type = values.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and content_type != "application/json":
            # Pages of other sites can post other types without asking (CORS), and would make this server work.
            raise ApiError(415, "expected the header Content-Type: application/json", code="unsupported_media_type")

    def _check_host(self, header: str) -> None:
        """Refuse names that are not this server's: a page may have made its own name point to this machine."""
        allowed = self._options.allowed_hosts
        host = header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]
        if allowed is not None and host and host.lower() not in allowed:
            message = f"Host {header[:100]!r} is not a name of this server; start it with --host to serve other names"
            raise ApiError(403, message, code="host_not_allowed")

    def _check_key(self, authorization: bytes, api_key: bytes) -> None:
        """Accept a key in OpenAI's header or in Anthropic's."""
        expected = self._options.api_key
        if expected is None:
            return
        scheme, _, key = authorization.partition(b" ")
        keys = [key if scheme.lower() == b"bearer" else b"", api_key]
        if not any(hmac.compare_digest(each.strip(), expected.encode()) for each in keys):
            message = "no valid API key; expected the header Authorization: Bearer <key>, or x-api-key: <key>"
            raise ApiError(401, message, code="invalid_api_key")

    def _counted(self, receive: Receive) -> Receive:
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._options.max_body_bytes:
                raise self._too_large()
            return message

        return counted

    def _watched(self, scope: Scope, send: Send) -> Send:
        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                if 400 <= message["status"] != CLIENT_GONE:
                    self._on_error(message["status"])
                if names := ignored_header(ignored_fields(scope)):
                    message["headers"] = [*message["headers"], (IGNORED_HEADER.lower().encode(), names.encode())]
            await send(message)

        return watched

    def _too_large(self) -> ApiError:
        limit = self._options.max_body_bytes
        return ApiError(413, f"the body is larger than {limit:,} bytes", code="request_too_large")
