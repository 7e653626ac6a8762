"""A server for the page without a model: it streams a recorded conversation in the wire format of `nextn serve`.

The recording was made by the checkpoint in the package: greedy, K = 4, on the prompt that the file names.
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import loopback

import nextn

PAGE = Path(nextn.__file__).parent / "serve" / "page" / "index.html"
RECORD = json.loads((Path(__file__).with_name("serve_rounds.json")).read_text())
TEXT = "".join(text for one in RECORD["rounds"] for text in one["texts"])


def plain_rounds(rounds):
    """The same tokens as plain decoding emits them."""
    return [
        {"tokens": [token], "texts": [text], "drafts": [], "draft_texts": [], "num_accepted": 0}
        for one in rounds
        for token, text in zip(one["tokens"], one["texts"], strict=True)
    ]


def speech(rounds):
    """(text, rounds) per event: text that is whole where the tokens' own is broken."""
    return [("".join(one["texts"]), [one]) for one in rounds]


@dataclass
class PageServer:
    """Serves the page and streams `events`; the attributes may change while it runs."""

    chat: bool = True
    key: str = ""  # an API key that requests must carry
    delay: float = 0.002  # seconds between events
    round_s: float = 0  # of a round by the engine's clock; 0: not sent
    events: list | None = None  # (text or delta, rounds) per event; None: the recording
    drop_after: int | None = None  # events, then the connection is closed
    status: str = "ok"
    num_speculative_tokens: int = len(RECORD["cost_curve"]) - 1
    reference: list | None = field(default_factory=lambda: [0.9, 0.85, 0.8, 0.8])
    requests: list = field(default_factory=list)  # the bodies that were posted
    num_cancelled: int = 0
    port: int = 0

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/"

    def start(self):
        self._server = loopback.Loopback().listen(_Handler, self.port, page=self)
        self.port = self._server.server.server_port

    def stop(self):
        """Go away, as far as clients see: the same port can be used again by `start`."""
        self._server.stop()

    def health(self):
        return {
            "status": self.status,
            "model": "tiny",
            "chat": self.chat,
            "max_model_len": 4096,
            "num_running": 1,
            "num_waiting": 2,
            "cache": {"positions": 1024, "max_positions": 16384},
            "prefix_cache": {"positions": 512, "max_positions": 8192, "queries": 200, "hits": 96},
            "num_speculative_tokens": self.num_speculative_tokens,
            "cost_curve": RECORD["cost_curve"],
            "draft_cost": RECORD["draft_cost"],
            "reference": self.reference,
        }

    def answer(self, body):
        """The events of one answer, cut to max_tokens."""
        if self.events is not None:
            return self.events
        rounds = RECORD["rounds"] if body.get("num_speculative_tokens") != 0 else plain_rounds(RECORD["rounds"])
        kept, left = [], body.get("max_tokens", 10**6)
        for one in rounds:
            kept.append({**one, "tokens": one["tokens"][:left], "texts": one["texts"][:left]})
            left -= len(one["tokens"])
            if left <= 0:
                break
        return speech(kept)


class _Handler(loopback.Handler):
    protocol_version, wbufsize = "HTTP/1.0", 0  # a stream ends with its connection
    page: PageServer

    def do_GET(self):
        if self.path == "/":
            self.give(200, PAGE.read_bytes(), kind="text/html; charset=utf-8")
        elif self.path == "/health":
            self.give(200 if self.page.status == "ok" else 503, json.dumps(self.page.health()).encode())
        else:
            self.give(404, b"{}")

    def do_POST(self):
        body = self.read_json()
        expected = f"Bearer {self.page.key}" if self.page.key else None
        if expected and self.headers["Authorization"] != expected:
            return self.give(401, json.dumps({"error": {"message": "invalid API key"}}).encode())
        self.page.requests.append((self.path, body))
        if "REFUSE" in json.dumps(body):
            return self.give(400, json.dumps({"error": {"message": "max_tokens = 0; expected at least 1"}}).encode())
        self._stream(body)

    def _stream(self, body):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        events = self.page.answer(body)
        try:
            for index, (text, rounds) in enumerate(events):
                if index == self.page.drop_after:
                    return
                time.sleep(self.page.delay)
                finish = "length" if index == len(events) - 1 else None
                delta = text if isinstance(text, dict) else {"content": text}
                said = {"delta": delta} if "messages" in body else {"text": text}
                said |= {"rounds": rounds} | ({"elapsed_s": index * self.page.round_s} if self.page.round_s else {})
                self._event({"choices": [{"index": 0, **said, "finish_reason": finish}]})
            self._event({"choices": [], "usage": {"completion_tokens": 1}, "metrics": {"spec_decode": {}}})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.page.num_cancelled += 1

    def _event(self, record):
        self.wfile.write(f"data: {json.dumps(record)}\n\n".encode())
