"""What the command line needs to start the server, apart from the server itself."""

from pathlib import Path

from nextn.engines.json_values import loads
from nextn.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MAX_REFERENCE = 16 * 1024 * 1024  # bytes


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
