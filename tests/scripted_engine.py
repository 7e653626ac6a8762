"""An engine for tests of the HTTP layer: it "generates" a fixed text in rounds, each request in a thread of its own."""

import threading
import time
from itertools import islice

from nextn.decoding.records import SequenceRound
from nextn.errors import CheckpointError, ConfigError, QueueFullError
from nextn.serve.request import EngineStats, GenerationChunk, TokenLogprob

TEXT = "A café, 3 €: "  # bytes of several-byte characters arrive in different rounds
EOS = 257


class ScriptedEngine:
    """text: what every request gets, again and again. Tokens are its UTF-8 bytes, as of the byte tokenizer.

    A round drafts three tokens, of which two are accepted, and adds one. `round_s` is its duration.
    """

    def __init__(self, text=TEXT, *, round_s=0.0, times=None, max_running=64, fails=""):
        self.text, self.round_s, self.times, self.max_running, self.fails = text, round_s, times, max_running, fails
        self.running, self.cancelled, self.requests, self.closed = set(), 0, [], False
        self.lock = threading.Lock()

    def submit(self, request, emit):
        with self.lock:
            if len(self.running) >= self.max_running:
                raise QueueFullError(f"{len(self.running)} requests run; try again later")
            if request.prompt == (0, 0, 0):
                raise ConfigError("the engine does not like this prompt")
            if request.prompt == (0, 0, 1):
                raise RuntimeError("secret: a bug in the engine")
            if request.prompt == (0, 0, 2):
                raise CheckpointError("secret: a shard is missing")
            generation = ScriptedGeneration(self, request, emit)
            self.running.add(generation)
            self.requests.append(request)
        threading.Thread(target=generation.run, daemon=True).start()
        return generation.cancel

    def stats(self):
        return EngineStats(len(self.running), 0, 10, 100, 5, 50, 40, 8, (1.0, 1.1), 0.2)

    def close(self, *, grace_s):
        self.closed = True
        ends = time.monotonic() + grace_s
        while self.running and time.monotonic() < ends:
            time.sleep(0.005)
        for generation in list(self.running):
            generation.cancel()


class ScriptedGeneration:
    def __init__(self, engine, request, emit):
        self.engine, self.request, self.emit = engine, request, emit
        self.stop = threading.Event()

    def cancel(self):
        self.stop.set()

    def run(self):
        engine, shown = self.engine, b""
        tokens, sent, finish = self.tokens(), 0, None
        while finish is None:
            if engine.round_s:
                self.stop.wait(engine.round_s)
            emitted = tuple(islice(tokens, 1 if sent == 0 else 3))
            emitted = emitted[: self.request.max_tokens - sent]
            for token in emitted:
                if token in self.request.stop_token_ids:
                    emitted, finish = emitted[: emitted.index(token) + 1], "eos"
                    break
            sent += len(emitted)
            shown += bytes(token for token in emitted if token < 256)
            finish = finish or ("length" if sent == self.request.max_tokens else None)
            text, rest = decoded(shown, last=finish is not None)
            for stop in self.request.stop:
                if stop in text:
                    text, finish = text[: text.index(stop)], "stop"
            shown = rest
            if self.stop.is_set():
                finish = "cancelled"
                engine.cancelled += 1
            if engine.fails and sent > 4:
                finish = "error"
            drafts = () if sent == len(emitted) else (*emitted[:2], 1)
            one = SequenceRound(0, drafts, min(2, len(emitted)) if drafts else 0, emitted, finish)
            if finish is not None:
                engine.running.discard(self)
            cached = len(self.request.prompt) // 2
            logprobs = self.logprobs(emitted)
            error = engine.fails if finish == "error" else ""
            self.emit(GenerationChunk(text, (one,), logprobs, finish, error=error, cached_tokens=cached))

    def tokens(self):
        data, number = self.engine.text.encode(), 0
        while self.engine.times is None or number < self.engine.times:
            yield from data
            number += 1
        while True:
            yield EOS

    def logprobs(self, emitted):
        count = self.request.logprobs
        if count is None:
            return ()
        top = [((97 + i, -1.0 - i)) for i in range(count)]
        return tuple(TokenLogprob(token, -0.5, ((token, -0.5), *top)[:count]) for token in emitted)


def decoded(data, *, last):
    """The text that is final, and the bytes of an incomplete character."""
    for size in range(len(data), max(-1, len(data) - 4), -1):
        try:
            return data[:size].decode() + ("\ufffd" if last and size < len(data) else ""), b"" if last else data[size:]
        except UnicodeDecodeError:
            continue
    return data.decode(errors="replace"), b""
