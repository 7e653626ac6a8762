"""What a running engine, or one whose metrics or log were saved, has counted so far. Imports no torch."""

import re
from collections.abc import Iterator
from pathlib import Path

from nextn.engines.client import Budget
from nextn.engines.counter_formats import read
from nextn.engines.counters import Counters
from nextn.engines.endpoint import fetch_metrics, split_address
from nextn.engines.metrics_formats import from_metrics
from nextn.engines.run_settings import with_settings
from nextn.errors import ConfigError
from nextn.evaluate.hypotheses import engine_depth
from nextn.evaluate.workload import ReferencePlan

_MAX_FLAGS = 1024 * 1024  # bytes


def check_temperatures(plan: ReferencePlan) -> None:
    """Raise ConfigError for several temperatures, which counters that are there already are not of."""
    if len(plan.temperatures) > 1:
        given = ",".join(f"{temperature:g}" for temperature in plan.temperatures)
        message = f"--temperatures {given}: the engine's counters are of one temperature; name it, or use --drive"
        raise ConfigError(message)


def counted_so_far(engine: str, budget: Budget, num_speculative_tokens: int | None, flags: str | None) -> Counters:
    """Return what an engine counted so far; raise as `read_engine_counters` and `engine_depth`."""
    counters = read_engine_counters(engine, budget)
    engine_depth([with_settings(counters, flag_texts(flags))], num_speculative_tokens)
    return counters


def counted_with_settings(engine: str, budget: Budget, flags: str | None) -> Counters:
    """Return what an engine counted so far, with what its flags say; raise as `read_engine_counters`."""
    return with_settings(read_engine_counters(engine, budget), flag_texts(flags))


def read_engine_counters(engine: str, budget: Budget) -> Counters:
    """Read what an engine has counted so far, from a file (metrics, log or JSON) or the /metrics of a running engine.

    `-` is standard input, `#MODEL` at its end chooses one of several served models. Raises ConfigError if `engine` is
    neither a file nor an address, EngineError if it does not answer or reports no draft counts.
    """
    name, _, of_model = engine.partition("#")
    if name == "-":
        return read(Path("/dev/stdin"), model=of_model or None)
    for file, model in _files(engine):
        if file.exists():
            return read(file, model=model)
    engine, model = split_address(engine)
    if "://" not in engine and not re.fullmatch(r"[\w.-]+:\d+(/.*)?|localhost", engine):
        raise ConfigError(
            f"--engine {engine}: no such file, and not an address such as localhost:8000; save lines of a log in a "
            "file, or pipe them to --engine -"
        )
    return from_metrics(fetch_metrics(engine, budget), model=model)


def _files(engine: str) -> Iterator[tuple[Path, str | None]]:
    """Yield each file, with the model behind it, that `FILE#MODEL` may mean: both names may have a `#`."""
    parts = engine.split("#")
    for count in range(len(parts), 0, -1):
        yield Path("#".join(parts[:count])), "#".join(parts[count:]) or None


def flag_texts(flags: str | None) -> list[str]:
    """Return an engine's command line, given as text or as the file that it is in."""
    if flags is None:
        return []
    path = Path(flags)
    try:
        return [path.read_bytes()[:_MAX_FLAGS].decode(errors="replace") if path.is_file() else flags]
    except (OSError, ValueError):  # longer than a path, or with NUL
        return [flags]
