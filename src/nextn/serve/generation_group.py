"""Generations of one request: submitted to the engine together, and their chunks merged as they arrive."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial

from nextn.serve.api_errors import ApiError, server_stopping
from nextn.serve.metrics import ServerMetrics
from nextn.serve.request import Engine, GenerationChunk, GenerationRequest

ChunkBatch = list[tuple[int, GenerationChunk]]  # index of the generation, and its chunk


class GenerationGroup:
    """Submits requests together and merges their chunks. Must be made in a running event loop.

    Args:
        engine: Where the requests are submitted.
        metrics: What counts the chunks, also those that nobody reads any more.
    """

    def __init__(self, engine: Engine, metrics: ServerMetrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, GenerationChunk]] = asyncio.Queue()
        self._cancels: list[Callable[[], None]] = []  # of each generation
        self._unfinished: set[int] = set()
        self._submitted = 0.0
        self._failure: ApiError | None = None
        self._last: dict[int, float] = {}  # when each generation had its last tokens

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Submit all requests, or none. Raises what the engine's `submit` raises."""
        self._submitted = time.monotonic()
        try:
            for index, request in enumerate(requests):
                self._cancels.append(self._engine.submit(request, partial(self._emit, index)))
                self._unfinished.add(index)
        except BaseException:
            self.cancel()
            raise
        self._metrics.prompt_tokens.inc(sum(len(request.prompt) for request in requests))

    def cancel(self) -> None:
        """End all generations that still run; their chunks are no longer returned."""
        for cancel in self._cancels:
            cancel()
        self._unfinished.clear()

    def fail(self, error: ApiError) -> None:
        """End the stream with this error, and the generations that still run."""
        self._failure = error
        for index in sorted(self._unfinished):
            self._queue.put_nowait((index, GenerationChunk("", (), finish="error")))
        self.cancel()

    async def batches(self) -> AsyncIterator[ChunkBatch]:
        """Yield the chunks as they arrive, all that are ready at once, until every generation has finished.

        Raises ApiError if a generation fails, or does not end by itself.
        """
        while self._unfinished or not self._queue.empty():
            batch = [await self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            for _, chunk in batch:
                self._check(chunk)
            yield batch

    def _check(self, chunk: GenerationChunk) -> None:
        if chunk.finish == "error":
            reason = chunk.error.partition("\n")[0][:300]
            raise self._failure or ApiError(500, f"the generation failed: {reason}", code="generation_failed")
        if chunk.finish == "cancelled":  # not by the client, for whom nobody reads chunks any more
            raise server_stopping()

    def _emit(self, index: int, chunk: GenerationChunk) -> None:
        """Called in the engine's thread."""
        with suppress(RuntimeError):  # the event loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._receive, index, chunk, time.monotonic())

    def _receive(self, index: int, chunk: GenerationChunk, now: float) -> None:
        last = self._last.get(index)
        since_chunk = None if last is None else now - last
        self._metrics.observe(chunk, since_submitted=now - self._submitted, since_chunk=since_chunk)
        if any(one.emitted for one in chunk.rounds):
            self._last[index] = now
        if index in self._unfinished:
            self._queue.put_nowait((index, chunk))
            if chunk.finish is not None:
                self._unfinished.discard(index)
