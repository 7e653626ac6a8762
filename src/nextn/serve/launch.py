"""What `nextn serve` starts: an engine around a model, and the server in front of it."""

from dataclasses import dataclass
from pathlib import Path

from nextn.engines.json_values import loads
from nextn.errors import ConfigError, require_at_least
from nextn.model.model import Model
from nextn.serve.request import Engine

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MAX_REFERENCE = 16 * 1024 * 1024  # bytes
_DEFAULT_CONTEXT = 32_768  # tokens, for a trunk without a limit of its own


@dataclass(frozen=True)
class EngineChoices:
    """What the command line says about the engine. Raises ConfigError on values out of range."""

    backend: str = "auto"
    num_speculative_tokens: int | None = None  # None: the engine's choice; 0: plain decoding
    max_num_seqs: int = 16
    max_queue: int = 128
    cache_gb: float = 2.0

    def __post_init__(self) -> None:
        require_at_least(self, max_num_seqs=1, max_queue=0)
        if self.num_speculative_tokens is not None:
            require_at_least(self, num_speculative_tokens=0)
        if not self.cache_gb > 0:
            raise ConfigError(f"cache_gb = {self.cache_gb}; expected a number above 0")


def make_engine(model: Model, choices: EngineChoices, *, max_model_len: int) -> Engine:
    """Start the engine that all requests go to."""
    from nextn.serve.serial_engine import SerialEngine

    drafts = 4 if choices.num_speculative_tokens is None else choices.num_speculative_tokens
    return SerialEngine(model, choices.backend, drafts if model.head is not None else 0)


def context_length(model: Model, wanted: int | None) -> int:
    """Return the tokens of a prompt and its completion. Raises ConfigError for more than the model has."""
    limit = model.trunk.max_length
    if wanted is not None and limit is not None and wanted > limit:
        raise ConfigError(f"--max-model-len {wanted}; this model's context has {limit} tokens")
    return wanted or limit or _DEFAULT_CONTEXT


def allowed_hosts(host: str) -> tuple[str, ...] | None:
    """Return the valid names in Host headers; None (any) for a server that other machines can reach."""
    return LOOPBACK if host in LOOPBACK else None


def reference_rates(path: Path) -> tuple[float, ...]:
    """Read acceptance rates by depth from a record of `nextn measure`: at the lowest temperature, for its largest K.

    Raises:
        ConfigError: The file is not such a record.
    """
    try:
        if path.stat().st_size > _MAX_REFERENCE:
            raise ValueError(f"larger than {_MAX_REFERENCE // 2**20} MiB")
        record = loads(path.read_text(encoding="utf-8"))
        figures = [entry for entry in record["figures"] if entry["domain"] == "all"]  # type: ignore[index]
        first = min(figures, key=lambda entry: (entry["temperature"], -entry["drafts"]))
        return tuple(0.0 if rate is None else float(rate) for rate in first["acceptance"])
    except OSError as error:
        raise ConfigError(f"--reference {path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError) as error:
        message = f"--reference {path}: not a record of `nextn measure --out` ({type(error).__name__}: {error})"
        raise ConfigError(message) from error
