"""TEMPORARY: an `Engine` that runs one request after the other; replaced by the scheduler."""

import queue
import threading
from collections.abc import Callable

from nextn.decoding.generate import _TextStream
from nextn.decoding.rounds import rounds
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.serve.request import EngineStats, GenerationChunk, GenerationRequest
from nextn.settings import Settings


class _Generation:
    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


class SerialEngine:
    def __init__(self, model: Model, backend: str = "auto", num_speculative_tokens: int = 4) -> None:
        self._model, self._backend, self._k = model, backend_for(model, backend), num_speculative_tokens
        self._queue: queue.Queue = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, emit: Callable[[GenerationChunk], None]) -> _Generation:
        generation = _Generation()
        self._queue.put((request, emit, generation))
        return generation

    def stats(self) -> EngineStats:
        return EngineStats(0, self._queue.qsize(), 0, 4096, 0, 4096, 0, 0)

    def close(self, *, grace_s: float) -> None:
        self._queue.put(None)
        self._thread.join(grace_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            request, emit, generation = item
            text = _TextStream(self._model.tokenizer, request.stop)
            k = self._k if request.num_speculative_tokens is None else request.num_speculative_tokens
            settings = Settings(
                drafts=k if self._model.head is not None else 0, sampling=request.sampling,
                max_tokens=request.max_tokens, eos=request.stop_token_ids, seed=request.seed,
            )  # fmt: skip
            stop = (lambda row, new, text=text: text.stop_after(new)) if request.stop else None
            for result in rounds(self._backend.trunk, self._backend.head, [request.prompt], settings, stop=stop):
                (row,) = result.rows
                finish = "cancelled" if generation.cancelled.is_set() and row.finish is None else row.finish
                shown = text.push(row.emitted, request.stop_token_ids, last=finish is not None)
                emit(GenerationChunk(shown, (row,), finish=finish))
                if finish:
                    break
