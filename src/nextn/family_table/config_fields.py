"""Fields of a config.json by dotted paths, at its top or in that of its text model. Imports no torch."""

from collections.abc import Iterator, Mapping

# Where models of several modalities have the config of their text model: transformers; InternVL and Nemotron Omni;
# DeepSeek-VL2.
_TEXT_KEYS = ("text_config", "llm_config", "language_config")


def text_key(config: Mapping[str, object]) -> str:
    """Return the key under which a config.json has that of its text model; `text_config` where it has none."""
    return next((key for key in _TEXT_KEYS if isinstance(config.get(key), Mapping)), _TEXT_KEYS[0])


def text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the config of the text model inside another; empty where it has none."""
    inner = config.get(text_key(config))
    return inner if isinstance(inner, Mapping) else {}


def levels(config: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield a config.json, that of its text model, and so on inside that."""
    while config:
        yield config
        config = text_config(config)


def field_at(config: Mapping[str, object], path: str) -> object:
    """Return the value at a dotted path of a config, at its top; None where absent."""
    value: object = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def lookup(config: Mapping[str, object], path: str) -> object:
    """Return the value at a dotted path of a config.json, at its top or in its text model's; None where absent."""
    return next((value for level in levels(config) if (value := field_at(level, path)) is not None), None)


def lookup_count(config: Mapping[str, object], path: str) -> int | None:
    """Return the same if it is an integer above 0; None for anything else."""
    value = lookup(config, path)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def with_field(config: Mapping[str, object], path: str, value: object) -> dict[str, object]:
    """Return the config with the value at a dotted path."""
    key, _, rest = path.partition(".")
    inner = config.get(key)
    return {**config, key: with_field(inner if isinstance(inner, Mapping) else {}, rest, value) if rest else value}
