"""How the HTTP layer behaves: names, limits and times. Imports neither torch nor a web framework."""

from dataclasses import dataclass

from nextn.errors import require_at_least

MAX_CHOICES = 64  # sequences of one request: prompts times `n`


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of the HTTP connections. Raises ConfigError on values out of range."""

    max_connections: int = 512
    max_header_bytes: int = 16 * 1024
    max_headers: int = 100
    read_s: float = 30.0  # for the whole of a request, from the first byte of its headers to the last of its body
    keep_alive_s: float = 60.0  # an idle connection is closed after this time
    stall_s: float = 30.0  # a client that reads nothing for this time is disconnected

    def __post_init__(self) -> None:
        require_at_least(self, max_connections=1, max_header_bytes=1024, max_headers=1)


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
    drafts: bool = True  # False: requests cannot turn drafting on
    reference_rates: tuple[float, ...] = ()  # acceptance per depth that `nextn measure` found
    tool_call_parser: str | None = None  # the syntax of tool calls, one of `tool_calls.SYNTAXES`; None: the template's
    connections: ConnectionLimits = ConnectionLimits()

    def __post_init__(self) -> None:
        require_at_least(self, max_model_len=2, max_body_bytes=1024, request_s=0, grace_s=0)
