"""Options of the engine and the HTTP layer, checked before a model loads: imports neither torch nor a web framework."""

import socket
from dataclasses import dataclass
from pathlib import Path

from nextn.bounded_json import loads
from nextn.checkpoint.file_index import FileStamps
from nextn.errors import ConfigError, require, require_at_least
from nextn.evaluate.acceptance_drop import RECORD

MAX_CHOICES = 64  # sequences of one request: prompts times `n`
MAX_SPECULATIVE_TOKENS = 16  # K of a server, the most that its requests may ask for
MAX_COPY_TOKENS = 32
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MAX_SECONDS = 30 * 24 * 3600
_MAX_REFERENCE = 16 * 1024 * 1024  # bytes


@dataclass(frozen=True)
class EngineOptions:
    """How much the engine takes on. Raises ConfigError on values out of range."""

    backend: str = "auto"
    max_num_seqs: int = 16  # sequences that are prefilled or decoded at the same time
    max_queue: int = 128  # requests of which all sequences wait
    max_model_len: int | None = None  # positions of a sequence; None: what model and memory permit
    cache_gb: float = 2.0  # memory of all caches, in 10^9 bytes
    num_speculative_tokens: int = 4  # K
    num_copy_tokens: int = 0  # the most draft tokens of a round that are copied from a sequence's own text
    adaptive: bool = True  # draft less, or not at all, where it does not pay at the present batch size
    warmup: bool = True  # while idle, record passes of all batch sizes and measure what rounds cost

    def __post_init__(self) -> None:
        drafts, copies = self.num_speculative_tokens, self.num_copy_tokens
        require(
            self,
            max_num_seqs=(1 <= self.max_num_seqs <= 64, "from 1 to 64"),
            max_queue=(self.max_queue >= 0, "0 or more"),
            max_model_len=(self.max_model_len is None or self.max_model_len >= 2, "at least 2"),
            cache_gb=(0.01 <= self.cache_gb < 1e6, "at least 0.01"),
            num_speculative_tokens=(0 <= drafts <= MAX_SPECULATIVE_TOKENS, f"from 0 to {MAX_SPECULATIVE_TOKENS}"),
            num_copy_tokens=(0 <= copies <= MAX_COPY_TOKENS, f"from 0 to {MAX_COPY_TOKENS}"),
        )


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of the HTTP connections. Raises ConfigError on values out of range."""

    max_connections: int = 512
    max_waiting_per_address: int = 128  # connections of one address without a complete request; the oldest is closed
    max_header_bytes: int = 16 * 1024
    max_headers: int = 100
    read_s: float = 30.0  # for the whole of a request, from the first byte of its headers to the last of its body
    keep_alive_s: float = 60.0  # an idle connection is closed after this time
    stall_s: float = 30.0  # a client that reads nothing for this time is disconnected

    def __post_init__(self) -> None:
        require_at_least(self, max_connections=1, max_header_bytes=1024, max_headers=1, max_waiting_per_address=1)


@dataclass(frozen=True)
class ServerOptions:
    """How requests are answered. Raises ConfigError on values out of range."""

    served_name: str  # the `model` of requests and answers
    max_model_len: int  # tokens of a prompt and its completion
    api_key: str | None = None  # None: no key is needed
    allowed_hosts: tuple[str, ...] | None = None  # valid names in the Host header; None: any
    cors_origins: tuple[str, ...] = ()  # origins whose pages may call the API
    max_body_bytes: int = 2_000_000
    request_s: float = 600.0  # a generation that takes longer is ended with an error
    grace_s: float = 30.0  # what running generations have to end when the server stops
    metrics_in_answers: bool = False  # every answer has `metrics`, whether or not the request asks
    num_speculative_tokens: int = MAX_SPECULATIVE_TOKENS  # the most that a request may ask for; 0: none can draft
    reference_rates: tuple[float, ...] = ()  # acceptance per depth that `nextn measure` found
    tool_call_parser: str | None = None  # the syntax of tool calls, one of `tool_calls.SYNTAXES`; None: the template's
    connections: ConnectionLimits = ConnectionLimits()
    weight_files: FileStamps | None = None  # nothing is answered once one of them was changed in place

    def __post_init__(self) -> None:
        require_at_least(self, max_model_len=2, max_body_bytes=1024, request_s=0, grace_s=0)


def check_seconds(*, request_timeout: float, grace: float) -> None:
    """Raise ConfigError for times of the command line that are out of range, before a model is loaded."""
    for name, value in {"--request-timeout": request_timeout, "--grace": grace}.items():
        if not 0 <= value <= _MAX_SECONDS:  # false for nan
            raise ConfigError(f"{name} {value:g}; expected 0 to {_MAX_SECONDS:,} seconds")


def allowed_hosts(host: str) -> tuple[str, ...] | None:
    """Return the valid names in Host headers; None (any) for a server that other machines can reach."""
    return LOOPBACK if host in LOOPBACK else None


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket (port 0: a free one), so that an unusable address is a ConfigError before a model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it, each answer waits 40 ms for an ACK.
    server = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(128)
    except (OSError, OverflowError) as error:
        server.close()
        reason = getattr(error, "strerror", None) or "expected a port of 0 to 65535"  # without "[Errno 98]"
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}; choose another --host or --port") from error
    return server


def reference_rates(path: Path) -> tuple[float, ...]:
    """Read acceptance rates by depth from a record of `nextn measure`, or a folder with one.

    They are those at the lowest temperature, for its largest K.
    Raises ConfigError if the file is not such a record.
    """
    path = path / RECORD if path.is_dir() else path
    try:
        if path.stat().st_size > _MAX_REFERENCE:
            raise ValueError(f"larger than {_MAX_REFERENCE // 2**20} MiB")
        record = loads(path.read_text(encoding="utf-8"))
        figures = [entry for entry in record["figures"] if entry["domain"] == "all"]  # type: ignore[index]
        first = min(figures, key=lambda entry: (entry["temperature"], -entry["num_speculative_tokens"]))
        return tuple(0.0 if rate is None else float(rate) for rate in first["acceptance"])
    except OSError as error:
        raise ConfigError(f"--reference {path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError) as error:
        message = f"--reference {path}: not a record of `nextn measure --out` ({type(error).__name__}: {error})"
        raise ConfigError(message) from error
