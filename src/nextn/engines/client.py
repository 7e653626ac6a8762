"""HTTP to a server that may be down, slow, broken or hostile: limits on bytes and seconds, and retries.

Every failure is one EngineError. Knows nothing of what an answer contains.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

import httpx2

from nextn.bounded_http import Deadline
from nextn.bounded_http import client as bounded_client
from nextn.bounded_json import loads, short_repr
from nextn.errors import BudgetError, ConfigError, EngineError
from nextn.redaction import MASK, Redactor

KEY_ENV = "OPENAI_API_KEY"
_CONTEXT = re.compile(r"(?i)context[ _](?:size|length|window)")
_CONTEXT_ADVICE = (
    "its context is too small for this request, or for those that run together; start it with a larger one (-c of "
    "llama.cpp, --max-model-len of vLLM, --context-length of SGLang), or use shorter prompts and fewer new tokens"
)
_KEY_ADVICE = f"the key comes from the environment: set {KEY_ENV}"
_BUSY = frozenset({429, 503})
_FIRST_WAIT = 0.5  # seconds, doubled at each attempt
_MAX_QUOTED = 300  # characters of the engine's own text in a message
_MAX_ERROR = 64 * 1024  # bytes read of an error's body
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


_MOST = 10**9  # of seconds, which is 31 years


@dataclass(frozen=True)
class Limits:
    """Limits of a run and of each of its requests."""

    seconds: float = 900.0  # of the run
    answer_s: float = 120.0  # of one answer, from connecting to its last byte
    answer_bytes: int = 8 * 1024 * 1024
    tries: int = 3  # of a request that is answered 429 or 503, or whose connection was lost
    wait_s: float = 20.0  # the longest wait between two tries

    def __post_init__(self) -> None:
        for name in ("seconds", "answer_s", "answer_bytes", "tries"):
            if not 0 < getattr(self, name) <= _MOST:
                raise ConfigError(f"limit {name} = {getattr(self, name)}; expected a number above 0, at most {_MOST}")


@dataclass
class Budget:
    """The seconds that all endpoints of one run share, and the number of their requests. Thread-safe."""

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
        """Raise BudgetError when the time is over."""
        if self.left_s <= 0:
            raise BudgetError(f"the limit of {self.limits.seconds:g} s is over; raise --max-seconds")

    def take(self) -> None:
        """Count one request. Raises BudgetError when the time is over."""
        self.check()
        with self._lock:
            self.used += 1


def base_url(url: str) -> str:
    """Normalize an address: `host:8000` and `http://host:8000/v1/` give `http://host:8000`.

    Raises ConfigError for anything but an HTTP address.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname or url.isdecimal():
        port = url if url.isdecimal() else 8000
        raise ConfigError(f"{_shown_url(url)}: not an HTTP address; expected one such as http://localhost:{port}")
    if parts.username or parts.password or parts.query:
        raise ConfigError(f"{_shown_url(url)}: no user, password or query in the address; {_KEY_ADVICE}")
    path = re.sub(r"/v1$", "", parts.path.rstrip("/"))
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def _shown_url(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//***@", url).split("?")[0][:200]


class Client:
    """One server. The key of the environment variable `KEY_ENV` is sent in the Authorization header only.

    Where the server repeats the key, it is replaced by ***.
    """

    def __init__(self, url: str, budget: Budget) -> None:
        key = os.environ.get(KEY_ENV, "").strip()
        self.url, self.budget = base_url(url), budget
        self._key, self._redactor = key, Redactor(key)
        headers = {"Accept-Encoding": "identity"}  # so that the byte limits apply to the decoded body
        if key and not re.fullmatch(r"[\x21-\x7e]+", key):
            raise ConfigError(
                f"the key in {KEY_ENV} has spaces, line breaks or letters that no HTTP header can carry; set it again"
            )
        if key:
            headers["Authorization"] = f"Bearer {key}"
        # A proxy of the environment cannot reach ports of this machine. Redirects could send the key elsewhere.
        is_local = urlsplit(self.url).hostname in _LOOPBACK
        self._http = bounded_client(
            headers=headers, trust_env=not is_local, limits=httpx2.Limits(max_connections=256), follow_redirects=False
        )

    def close(self) -> None:
        self._http.close()

    def json(
        self, path: str, body: Mapping[str, object] | None = None, *, max_bytes: int | None = None
    ) -> dict[str, object]:
        """Return a JSON object: POST with a body, else GET. Arguments and errors as of `iter_bytes`."""
        text = self.text(path, body, max_bytes=max_bytes)
        try:
            document = loads(text)
        except ValueError as error:
            raise EngineError(f"{self.url}{path}: {self._not_json(text, error)}") from error
        if not isinstance(document, dict):
            raise EngineError(f"{self.url}{path}: the answer is JSON but not an object: {self._quoted(text)}")
        return document

    def text(self, path: str, body: Mapping[str, object] | None = None, *, max_bytes: int | None = None) -> str:
        """Return the body of a 200 answer, without the key. Arguments and errors as of `iter_bytes`."""
        data = bytearray()
        for chunk in self.iter_bytes(path, body, max_bytes=max_bytes):
            data += chunk
        return self._redactor.text(data.decode(errors="replace"))

    def redacted(self, text: str) -> str:
        """Return the text without the key; for text assembled from `iter_bytes`, whose chunks may split the key."""
        return self._redactor.text(text)

    def iter_bytes(
        self, path: str, body: Mapping[str, object] | None = None, *, max_bytes: int | None = None
    ) -> Iterator[bytes]:
        """Yield the body of a 200 answer as it arrives: POST with a body, else GET.

        A busy engine (429, 503) and a lost connection are retried, unless something has been yielded.

        max_bytes: limit of the answer, where the request implies a lower one than the budget's.
        Raises EngineError for any other answer, BudgetError when no requests or no time are left.
        """
        limits, has_started = self.budget.limits, False
        byte_limit = min(max_bytes or limits.answer_bytes, limits.answer_bytes)
        for attempt in range(limits.tries):
            self.budget.take()
            try:
                for chunk in self._attempt(path, body, byte_limit):
                    has_started = True
                    yield chunk
                return
            except _RetryableError as error:
                wait = max(error.wait, _FIRST_WAIT * 2**attempt)
                if has_started or attempt + 1 == limits.tries or wait > limits.wait_s:
                    tries = f"{attempt + 1} of {limits.tries} tries"
                    raise EngineError(f"{error} ({tries})", status=error.status) from error
            time.sleep(max(0.0, min(wait, self.budget.left_s)))

    def _attempt(self, path: str, body: Mapping[str, object] | None, byte_limit: int) -> Iterator[bytes]:
        deadline = Deadline(max(0.001, min(self.budget.limits.answer_s, self.budget.left_s)))
        method = "GET" if body is None else "POST"
        try:
            with self._http.stream(method, f"{self.url}{path}", json=body, timeout=deadline) as response:
                if response.status_code != 200:
                    raise self._status_error(path, response)
                yield from self._body(path, response, deadline, byte_limit)
        except httpx2.TimeoutException as error:
            if isinstance(error, httpx2.ConnectTimeout):
                raise self._unreachable(path, error) from error
            raise self._timed_out(path, deadline) from error
        except (httpx2.ConnectError, httpx2.ProxyError) as error:
            raise self._unreachable(path, error) from error
        except httpx2.TransportError as error:
            reason = self._quoted(str(error)) or type(error).__name__
            message = f"{self.url}{path}: the engine broke off its answer: {reason}; see its log"
            raise _RetryableError(message) from error

    def _body(self, path: str, response: httpx2.Response, deadline: Deadline, byte_limit: int) -> Iterator[bytes]:
        """The bytes as they were sent: a compressed body could expand a thousandfold."""
        coding = response.headers.get("Content-Encoding", "identity")
        if coding.lower() != "identity":
            raise EngineError(
                f"{self.url}{path}: the answer is compressed ({self._quoted(coding)}), which was not requested; "
                "check the proxy in front of the engine"
            )
        size = 0
        for chunk in response.iter_raw():
            size += len(chunk)
            if size > byte_limit:
                raise EngineError(f"{self.url}{path}: the answer is longer than {byte_limit:,} bytes")
            if deadline.remaining <= 0:
                raise self._timed_out(path, deadline)
            yield chunk

    def _unreachable(self, path: str, error: Exception) -> EngineError:
        self.budget.check()
        reason = self._quoted(str(error)) or type(error).__name__
        advice = "is the engine running, and the port right?"
        if "WRONG_VERSION_NUMBER" in reason:  # TLS towards a server that does not speak it
            advice = f"it does not speak https: give {self.url.replace('https:', 'http:', 1)}"
        return EngineError(f"{self.url}{path}: nothing answers ({reason}); {advice}")

    def _timed_out(self, path: str, seconds: float) -> EngineError:
        self.budget.check()
        return EngineError(
            f"{self.url}{path}: no complete answer within {seconds:g} s; see its log, or "
            "raise --timeout of verify or diagnose"
        )

    def _status_error(self, path: str, response: httpx2.Response) -> Exception:
        status, prefix = response.status_code, f"{self.url}{path}: HTTP {response.status_code}"
        if 300 <= status < 400:
            target = self._quoted(_shown_url(response.headers.get("Location", "nowhere")))
            return EngineError(f"{prefix}: it redirects to {target}; give that address", status=status)
        message = self._error_message(response)
        if status in _BUSY:
            return _RetryableError(
                f"{prefix}: the engine is busy: {message}", status=status, wait=_retry_after(response.headers)
            )
        advice = {
            401: f"it requires a key, or another one; {_KEY_ADVICE}",
            403: f"the key has no permission for this; {_KEY_ADVICE}",
            404: "not found; check the address (it ends before /v1) and the model's name",
        }.get(status, "the engine failed; see its log" if status >= 500 else "the engine refuses the request")
        if _CONTEXT.search(message):
            advice = _CONTEXT_ADVICE
        return EngineError(f"{prefix}: {advice}. Its message: {message}", status=status)

    def _error_message(self, response: httpx2.Response) -> str:
        """The message in an error's body: OpenAI's error.message, else the beginning of the body."""
        data = b""
        for chunk in response.iter_raw():
            data += chunk
            if len(data) > _MAX_ERROR:
                break
        text = self._redactor.text(data[:_MAX_ERROR].decode(errors="replace"))
        try:
            value = loads(text)
        except ValueError as error:
            return self._not_json(text, error) if "<" in text[:200] else self._quoted(text) or "nothing"
        while isinstance(value, dict):
            value = next((value[name] for name in ("error", "message", "detail") if name in value), short_repr(value))
        return self._quoted(value if isinstance(value, str) else short_repr(value)) or "nothing"

    def _not_json(self, text: str, error: ValueError) -> str:
        page = re.search(r"<title[^>]{0,200}>([^<]{0,500})</title", text[:_MAX_ERROR], re.I)
        if page or re.match(r"\s*<(!doctype|html)", text, re.I):
            title = f" titled {self._quoted(page[1])!r}" if page else ""
            return f"an HTML page{title}, not an OpenAI-compatible engine; check the address"
        return f"not JSON, so not an OpenAI-compatible engine ({self._quoted(str(error))}): {self._quoted(text)!r}"

    def _quoted(self, text: str) -> str:
        """Text of the engine for a message: short, in one line, and without the key, which some repeat."""
        text = self._redactor.text(text[:_MAX_ERROR])
        text = text.replace(self._key, MASK) if self._key else text  # in messages also a key too short to be a secret
        # The end may hold the beginning of a truncated key.
        return " ".join(text[: _MAX_ERROR // 2].split())[:_MAX_QUOTED]


class _RetryableError(Exception):
    """A failure that may pass; `wait` is what the engine asked for, in seconds."""

    def __init__(self, reason: str, *, status: int | None = None, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.status, self.wait = status, wait


def _retry_after(headers: Mapping[str, str]) -> float:
    stated = headers.get("Retry-After", "").strip()
    return float(stated) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?", stated) else 0.0
