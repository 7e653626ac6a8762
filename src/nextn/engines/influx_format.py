"""Influx line protocol, in which Telegraf and others store what they read from an engine's /metrics."""

import re

_NAME = r"(?:[^\s,=\\]|\\.){1,200}"
_VALUE = r"(?:-?[0-9][0-9.eE+-]{0,40}[iu]?|\"[^\"\n]{0,1000}\"|[tTfF]\w{0,4})"
_LINE = re.compile(
    rf"(?P<measurement>{_NAME})(?P<tags>(?:,{_NAME}={_NAME}){{0,64}}) "
    rf"(?P<fields>{_NAME}={_VALUE}(?:,{_NAME}={_VALUE}){{0,512}})(?P<time> [0-9]{{1,20}})?"
)
_FIELD = re.compile(rf"({_NAME})=(-?[0-9][0-9.eE+-]{{0,40}})[iu]?(?=,|\Z)")
_SERIES = re.compile(r"[A-Za-z_][\w:]*")
_VALUES = ("value", "counter", "gauge", "count")  # names of fields in which the measurement is the series


def is_influx(line: str) -> bool:
    """Whether a line is of Influx's protocol by more than its form, which words of a log may have."""
    match = _LINE.fullmatch(line.strip())
    return match is not None and bool(
        match["tags"] or match["time"] or "spec_decode" in line or re.search(r"[0-9][iu](?:,|\Z)", match["fields"])
    )


def influx_as_metrics(text: str) -> str:
    """Return lines of Influx's protocol as Prometheus text; "" for a text that has another line."""
    rows: list[str] = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if (match := _LINE.fullmatch(line.strip())) is None:
            return ""
        tags = [tag.partition("=")[::2] for tag in match["tags"].split(",")[1:]]
        labels = ",".join(
            f'{name}="{value}"' for name, value in tags if re.fullmatch(r"[a-zA-Z_]\w*", name) and '"' not in value
        )
        for field, value in _FIELD.findall(match["fields"]):
            name = _series(match["measurement"], field)
            rows += [f"{name}{{{labels}}} {value}"] if _SERIES.fullmatch(name) else []
    return "\n".join(rows)


def _series(measurement: str, field: str) -> str:
    """The name of a series: that of the exporter where the field has it, else measurement and field."""
    if ":" in field:
        return field
    if field in _VALUES:
        return measurement
    return f"{measurement}:{field}" if "spec_decode" in field else f"influx:{measurement}_{field}"
