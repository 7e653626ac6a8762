"""HTTP exchanges with a total deadline.

A timeout of httpx bounds one read, so a server that sends a header or an error body byte by byte never exceeds it. Here
each read and write on the connection gets the remaining time of the exchange.
"""

import math
import time
from collections.abc import Iterable
from functools import cache
from ssl import SSLContext
from typing import Any

import httpcore2
import httpx2

_SLICE = 16 * 1024  # bytes per write; the remaining time is computed for each


class Deadline(float):
    """A timeout of some seconds, above 0, for one exchange, from connecting to the last byte, redirects included.

    Each time `rate` bytes are received, the exchange may take one second more.
    """

    _ends: float
    _rate: float

    def __new__(cls, seconds: float, *, rate: float = math.inf) -> "Deadline":
        self = super().__new__(cls, seconds)
        self._ends, self._rate = time.monotonic() + seconds, rate
        return self

    def extend(self, num_bytes: int) -> None:
        """Allow the time that this many received bytes may take."""
        self._ends += num_bytes / self._rate

    @property
    def remaining(self) -> float:
        """Seconds that the next read may take; 0 or less after the deadline."""
        return min(float(self), self._ends - time.monotonic())


def client(**options: Any) -> httpx2.Client:
    """Return an httpx client that keeps each `Deadline` given as a request's timeout. Options are those of httpx."""
    options.setdefault("verify", _certificates(options.get("trust_env", True)))
    http = httpx2.Client(**options)
    for transport in (http._transport, *http._mounts.values()):
        if isinstance(transport, httpx2.HTTPTransport):
            transport._pool._network_backend = _Backend()  # httpx has no option for it
    return http


@cache
def _certificates(trust_env: bool) -> SSLContext:
    """The certificates that httpx trusts by default; reading them takes 65 ms, so clients share them."""
    return httpx2.create_ssl_context(trust_env=trust_env)


def _left(timeout: float | None, over: type[Exception]) -> float | None:
    """Return the seconds that one operation may take; raises `over` after the deadline."""
    if not isinstance(timeout, Deadline):
        return timeout
    left = timeout.remaining  # once, as it may run out between two looks
    if left <= 0:
        raise over("the time for the whole exchange is over")
    return left


class _Stream(httpcore2.NetworkStream):
    """A connection whose reads and writes end at the deadline."""

    def __init__(self, inner: httpcore2.NetworkStream) -> None:
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._inner.read(max_bytes, _left(timeout, httpcore2.ReadTimeout))
        if isinstance(timeout, Deadline):
            timeout.extend(len(data))
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), _SLICE):
            self._inner.write(buffer[start : start + _SLICE], _left(timeout, httpcore2.WriteTimeout))

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, _left(timeout, httpcore2.ConnectTimeout)))

    def get_extra_info(self, info: str) -> object:
        return self._inner.get_extra_info(info)


class _Backend(httpcore2.SyncBackend):
    """Connections that keep deadlines."""

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        left = _left(timeout, httpcore2.ConnectTimeout)
        return _Stream(super().connect_tcp(host, port, left, local_address, socket_options))
