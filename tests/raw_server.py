"""A server on the loopback that sends what a test gives it, byte by byte if so wanted; it knows no HTTP."""

import socket
import threading
import time
from contextlib import contextmanager, suppress


@contextmanager
def serving(answer):
    """answer(connection, request: bytes) is run once a request, in a thread; the connection is then closed."""
    server = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def one(connection):
        with connection, suppress(OSError):  # the client goes away, as it should
            answer(connection, _request(connection))

    def run():
        while not over.is_set():
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(connection,), daemon=True).start()

    threading.Thread(target=run, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
    finally:
        over.set()
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def _received(connection):
    if not (data := connection.recv(65536)):  # closed: waiting for more would take a core for the rest of the run
        raise ConnectionError
    return data


def _request(connection):
    data = b""
    while b"\r\n\r\n" not in data:
        data += _received(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    while len(body) < length:
        body += _received(connection)
    return head + b"\r\n\r\n" + body


def drip(connection, at_once, then, *, seconds=20.0):
    """Send the first part, then endlessly the second, a byte at a time; gives up after `seconds`."""
    connection.sendall(at_once)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for place in range(len(then)):
            connection.sendall(then[place : place + 1])
            time.sleep(0.05)


# What a server drips for ever: (sent at once, sent byte by byte).
DRIPS = {
    "status line": (b"", b"HTTP/1.1 200 OK" + b" " * 4096),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X-Slow: yes\r\n"),
    "informational": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "),
    "endless body": (b"HTTP/1.1 200 OK\r\n\r\n", b" "),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "chunk size": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0"),
    "trailers": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", b"X-Slow: yes\r\n"),
    "error body": (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 100000\r\n\r\n", b" "),
    "redirect": (b"HTTP/1.1 302 Found\r\nLocation: /\r\n", b"X-Slow: yes\r\n"),
}
