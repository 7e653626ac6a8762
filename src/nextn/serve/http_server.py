"""Run the application with uvicorn: limits, and a stop that lets running generations end."""

import asyncio
import gc
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from fastapi import FastAPI

from nextn.serve.api import Api
from nextn.serve.http_limits import limited_protocol
from nextn.serve.options import ServerOptions

_MARGIN_S = 3.0  # beyond the grace time, for answers to be sent; clients that do not read them are cut off
_POLL_S = 0.05
_FORCED_S = 0.2  # for errors to be sent, when the server is ended at once


class HttpServer(uvicorn.Server):
    """Serves one application until SIGINT or SIGTERM; a second SIGINT ends it at once."""

    _api: Api

    def __init__(self, app: FastAPI, options: ServerOptions) -> None:
        limits, self._api = options.connections, app.state.api
        config = uvicorn.Config(
            app,
            http=limited_protocol(limits, self._api.metrics.count_error),
            ws="none",
            lifespan="off",  # the application needs none, and uvicorn prints its end by a second Ctrl-C as a failure
            loop="asyncio",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(limits.keep_alive_s),
            timeout_graceful_shutdown=int(options.grace_s + _MARGIN_S),
            h11_max_incomplete_event_size=limits.max_header_bytes,
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(_is_failure)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal; the calling program starts nothing else. A second one raises KeyboardInterrupt."""
        # Collecting garbage among the objects of torch and the model takes 0.2 s, during which all streams pause.
        gc.collect()
        gc.freeze()
        super().run(sockets)
        if self.force_exit:
            raise KeyboardInterrupt

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and end when the answers are complete or the grace time is over."""
        stopping = asyncio.create_task(self._api.stop())
        forced = asyncio.create_task(self._end_if_forced(stopping))
        await super().shutdown(sockets)
        if not self.force_exit:
            forced.cancel()
        with suppress(asyncio.CancelledError):
            await forced
        with suppress(asyncio.CancelledError):
            await stopping

    async def _end_if_forced(self, stopping: asyncio.Task[None]) -> None:
        """End answers and connections after a second SIGINT, while uvicorn waits: from Python 3.12 on, for them."""
        while not self.force_exit:
            await asyncio.sleep(_POLL_S)
        self._api.fail_all()
        stopping.cancel()
        await asyncio.sleep(_FORCED_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A stop by a signal is a normal end: uvicorn would raise the signals again, inside its event loop."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()


def _is_failure(record: logging.LogRecord) -> bool:
    """Whether a record of uvicorn is of more than an answer that was ended by a second Ctrl-C."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError | KeyboardInterrupt))
