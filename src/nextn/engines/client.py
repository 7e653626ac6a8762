"""HTTP to a server that may be down, slow, broken or hostile: bounded in bytes, seconds and requests, one error each.

Knows statuses and retries; knows nothing of what an answer says.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

import httpx2

from nextn.bounded_http import Deadline
from nextn.bounded_http import client as bounded_client
from nextn.engines.documents import loads, shown
from nextn.errors import BudgetError, ConfigError, EngineError
from nextn.redaction import MASK, Redactor

KEY_ENV = "OPENAI_API_KEY"
_BUSY = frozenset({429, 503})
_FIRST_WAIT = 0.5  # seconds, doubled at each try
_TOLD = 300  # characters of the engine's own words in a message
_MAX_ERROR = 64 * 1024
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Limits:
    """requests, seconds: of a whole run. answer_s, answer_bytes: of one answer, from connecting to its last byte.

    tries: of a request that is answered 429 or 503, or whose connection was lost; wait_s: the longest wait between two.
    """

    requests: int = 1000
    seconds: float = 900.0
    answer_s: float = 120.0
    answer_bytes: int = 8 * 1024 * 1024
    tries: int = 3
    wait_s: float = 20.0

    def __post_init__(self) -> None:
        for name in ("requests", "seconds", "answer_s", "answer_bytes", "tries"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"limit {name} = {getattr(self, name)}; expected a number above 0")


@dataclass
class Budget:
    """Requests and seconds that all endpoints of one run share; may be used from several threads."""

    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.monotonic
    used: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._ends = self.clock() + self.limits.seconds

    @property
    def left_s(self) -> float:
        return self._ends - self.clock()

    def check(self) -> None:
        """Raises BudgetError when the time is over."""
        if self.left_s <= 0:
            raise BudgetError(f"the {self.limits.seconds:g} s allowed are over; raise --max-seconds")

    def take(self) -> None:
        """Count one request. Raises BudgetError when none, or no time, is left."""
        self.check()
        with self._lock:
            if self.used >= self.limits.requests:
                raise BudgetError(f"the {self.limits.requests} requests allowed are used up; raise --max-requests")
            self.used += 1


def base_url(url: str) -> str:
    """`host:8000`, `http://host:8000/v1/` -> `http://host:8000`. Raises ConfigError for what is no HTTP address."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{_shown_url(url)}: not an HTTP address; expected one such as http://localhost:8000")
    if parts.username or parts.password or parts.query:
        raise ConfigError(f"{_shown_url(url)}: no user, password or query in the address; {_key_advice(KEY_ENV)}")
    path = re.sub(r"/v1$", "", parts.path.rstrip("/"))
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def _shown_url(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//***@", url).split("?")[0][:200]


def _key_advice(name: str) -> str:
    return f"keys come from the environment: set {name}, or name another variable with --key-env"


class Client:
    """One server. `key` goes into the Authorization header alone: where the server repeats it, *** takes its place.

    key_env: the variable that the key came from.
    """

    def __init__(self, url: str, budget: Budget, *, key: str | None = None, key_env: str = KEY_ENV) -> None:
        self.url, self.budget = base_url(url), budget
        self._key, self._key_env, self._redactor = key, key_env, Redactor(key)
        headers = {"Accept-Encoding": "identity"}  # the bytes that are counted are those that were sent
        if key and not re.fullmatch(r"[\x21-\x7e]+", key):
            raise ConfigError(
                f"{key_env} holds a key with spaces, line breaks or letters that no HTTP header can carry"
            )
        if key:
            headers["Authorization"] = f"Bearer {key}"
        # A proxy of the environment cannot reach this machine's own ports. Redirects could carry the key away.
        own = urlsplit(self.url).hostname in _LOOPBACK
        self._http = bounded_client(
            headers=headers, trust_env=not own, limits=httpx2.Limits(max_connections=256), follow_redirects=False
        )

    def close(self) -> None:
        self._http.close()

    def json(
        self, path: str, body: Mapping[str, object] | None = None, *, max_bytes: int | None = None
    ) -> dict[str, object]:
        """A JSON object: POST with a body, else GET. max_bytes: as in `pieces`. Raises EngineError."""
        text = self.text(path, body, max_bytes=max_bytes)
        try:
            found = loads(text)
        except ValueError as error:
            raise EngineError(f"{self.url}{path}: {self._not_json(text, error)}") from error
        if not isinstance(found, dict):
            raise EngineError(f"{self.url}{path}: the answer is JSON but no object: {self._told(text)}")
        return found

    def text(self, path: str, body: Mapping[str, object] | None = None, *, max_bytes: int | None = None) -> str:
        """The body of a good answer, without the key. Arguments and errors as of `pieces`."""
        data = bytearray()
        for piece in self.pieces(path, body, max_bytes=max_bytes):
            data += piece
        return self._redactor.text(data.decode(errors="replace"))

    def redacted(self, text: str) -> str:
        """The text without the key; for what is put together from `pieces`, which may cut the key in two."""
        return self._redactor.text(text)

    def pieces(
        self, path: str, body: Mapping[str, object] | None = None, *, max_bytes: int | None = None
    ) -> Iterator[bytes]:
        """The body of a good answer as it comes. Raises EngineError for any other, BudgetError when none may be asked.

        A busy engine (429, 503) and a lost connection are tried again, not once something has been yielded.
        max_bytes: of the body, where what was asked for bounds it better than the limits do.
        """
        limits, begun = self.budget.limits, False
        most = min(max_bytes or limits.answer_bytes, limits.answer_bytes)
        for attempt in range(limits.tries):
            self.budget.take()
            try:
                for piece in self._once(path, body, most):
                    begun = True
                    yield piece
                return
            except _Again as again:
                wait = max(again.wait, _FIRST_WAIT * 2**attempt)
                if begun or attempt + 1 == limits.tries or wait > limits.wait_s:
                    tries = f"{attempt + 1} of {limits.tries} tries"
                    raise EngineError(f"{again} ({tries})", status=again.status) from again
            time.sleep(max(0.0, min(wait, self.budget.left_s)))

    def _once(self, path: str, body: Mapping[str, object] | None, most: int) -> Iterator[bytes]:
        deadline = Deadline(max(0.001, min(self.budget.limits.answer_s, self.budget.left_s)))
        method = "GET" if body is None else "POST"
        try:
            with self._http.stream(method, f"{self.url}{path}", json=body, timeout=deadline) as response:
                if response.status_code != 200:
                    raise self._refusal(path, response)
                yield from self._body(path, response, deadline, most)
        except httpx2.TimeoutException as error:
            if isinstance(error, httpx2.ConnectTimeout):
                raise self._down(path, error) from error
            raise self._slow(path, deadline) from error
        except (httpx2.ConnectError, httpx2.ProxyError) as error:
            raise self._down(path, error) from error
        except httpx2.TransportError as error:
            reason = self._told(str(error)) or type(error).__name__
            raise _Again(f"{self.url}{path}: the engine broke off its answer: {reason}; see its log") from error

    def _body(self, path: str, response: httpx2.Response, deadline: Deadline, most: int) -> Iterator[bytes]:
        """The bytes as they were sent: a compressed body could be a thousand times as long as what was received."""
        coding = response.headers.get("Content-Encoding", "identity")
        if coding.lower() != "identity":
            raise EngineError(
                f"{self.url}{path}: the answer is compressed ({self._told(coding)}), unasked; see its proxy"
            )
        size = 0
        for piece in response.iter_raw():
            size += len(piece)
            if size > most:
                raise EngineError(f"{self.url}{path}: the answer is longer than {most:,} bytes")
            if deadline.remaining <= 0:
                raise self._slow(path, deadline)
            yield piece

    def _down(self, path: str, error: Exception) -> EngineError:
        self.budget.check()
        reason = self._told(str(error)) or type(error).__name__
        return EngineError(f"{self.url}{path}: nothing answers ({reason}); is the engine running, and the port right?")

    def _slow(self, path: str, seconds: float) -> EngineError:
        self.budget.check()
        return EngineError(f"{self.url}{path}: no whole answer within {seconds:g} s; raise --timeout, or see its log")

    def _refusal(self, path: str, response: httpx2.Response) -> Exception:
        status, place = response.status_code, f"{self.url}{path}: HTTP {response.status_code}"
        if 300 <= status < 400:
            where = self._told(_shown_url(response.headers.get("Location", "nowhere")))
            return EngineError(f"{place}: it redirects to {where}; give that address", status=status)
        says = self._words(response)
        if status in _BUSY:
            return _Again(f"{place}: the engine is busy: {says}", status=status, wait=_asked_wait(response.headers))
        advice = {
            401: f"it wants a key, or another one; {_key_advice(self._key_env)}",
            403: f"the key may not do this; {_key_advice(self._key_env)}",
            404: "nothing there; check the address (it ends before /v1) and the model's name",
        }.get(status, "the engine failed; see its log" if status >= 500 else "the engine refuses the request")
        return EngineError(f"{place}: {advice}. It says: {says}", status=status)

    def _words(self, response: httpx2.Response) -> str:
        """What an error's body says in words: OpenAI's error.message, else its beginning."""
        data = b""
        for piece in response.iter_raw():
            data += piece
            if len(data) > _MAX_ERROR:
                break
        text = self._redactor.text(data[:_MAX_ERROR].decode(errors="replace"))
        try:
            found = loads(text)
        except ValueError as error:
            return self._not_json(text, error) if "<" in text[:200] else self._told(text) or "nothing"
        while isinstance(found, dict):
            found = next((found[name] for name in ("error", "message", "detail") if name in found), shown(found))
        return self._told(found if isinstance(found, str) else shown(found)) or "nothing"

    def _not_json(self, text: str, error: ValueError) -> str:
        page = re.search(r"<title[^>]{0,200}>([^<]{0,500})</title", text[:_MAX_ERROR], re.I)
        if page or re.match(r"\s*<(!doctype|html)", text, re.I):
            title = f" titled {self._told(page[1])!r}" if page else ""
            return f"an HTML page{title}, not an OpenAI-compatible engine; check the address"
        return f"not JSON, so not an OpenAI-compatible engine ({self._told(str(error))}): {self._told(text)!r}"

    def _told(self, text: str) -> str:
        """Words of the engine's, short, in one line, and without the key, which some repeat."""
        text = self._redactor.text(text[:_MAX_ERROR])
        text = text.replace(self._key, MASK) if self._key else text  # in messages also a key too short to be a secret
        # The end may hold the beginning of a key that was cut.
        return " ".join(text[: _MAX_ERROR // 2].split())[:_TOLD]


class _Again(Exception):
    """An answer worth asking for again; `wait` is what the engine asked for, in seconds."""

    def __init__(self, reason: str, *, status: int | None = None, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.status, self.wait = status, wait


def _asked_wait(headers: Mapping[str, str]) -> float:
    stated = headers.get("Retry-After", "").strip()
    return float(stated) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?", stated) else 0.0
