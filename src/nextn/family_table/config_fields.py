"""Fields of a config.json by dotted paths, at its top or in `text_config`. Imports no torch."""

from collections.abc import Mapping


def field_at(config: Mapping[str, object], path: str) -> object:
    """Return the value at a dotted path of a config, at its top; None where absent."""
    value: object = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def lookup(config: Mapping[str, object], path: str) -> object:
    """Return the value at a dotted path of a config.json, at its top or in `text_config`; None where absent."""
    inner = config.get("text_config")
    value = field_at(config, path)
    return field_at(inner, path) if value is None and isinstance(inner, Mapping) else value


def lookup_count(config: Mapping[str, object], path: str) -> int | None:
    """Return the same if it is an integer above 0; None for anything else."""
    value = lookup(config, path)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def with_field(config: Mapping[str, object], path: str, value: object) -> dict[str, object]:
    """Return the config with the value at a dotted path."""
    key, _, rest = path.partition(".")
    inner = config.get(key)
    return {**config, key: with_field(inner if isinstance(inner, Mapping) else {}, rest, value) if rest else value}
