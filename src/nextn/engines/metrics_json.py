"""Series in JSON, as lines of Prometheus text: answers of its query API, Grafana's frames, and what AIPerf exports."""

import json
from collections.abc import Iterator, Mapping

from nextn.bounded_json import JsonObject


def series_in(document: object) -> Iterator[str]:
    """Yield the series in a document, each with its last value, or with its increase where the document has that."""
    yield from _queried(document)
    yield from _exported(document)


def _queried(document: object) -> Iterator[str]:
    """The series in an answer of Prometheus' query API, for an instant or a range, or in an answer of Grafana."""
    if isinstance(document, list):
        for item in document:
            yield from _queried(item)
    elif isinstance(document, Mapping):
        labels, values = document.get("metric"), document.get("values")
        sample = values[-1] if isinstance(values, list) and values else document.get("value")
        if isinstance(labels, Mapping) and isinstance(sample, list) and sample and "__name__" in labels:
            own = {key: text for key, text in labels.items() if key != "__name__"}
            yield _series_line(labels["__name__"], own, sample[-1])
            return
        yield from _framed(document)
        for item in document.values():
            yield from _queried(item)


def _framed(frame: JsonObject) -> Iterator[str]:
    """The columns of a frame of Grafana."""
    schema, data = frame.get("schema"), frame.get("data")
    fields = schema.get("fields") if isinstance(schema, Mapping) else None
    columns = data.get("values") if isinstance(data, Mapping) else None
    if not isinstance(fields, list) or not isinstance(columns, list):
        return
    for field, column in zip(fields, columns, strict=False):
        found = [value for value in column if value is not None] if isinstance(column, list) else []
        if isinstance(field, Mapping) and found:
            labels = field.get("labels")
            own = labels if isinstance(labels, Mapping) else {}
            yield _series_line(own.get("__name__", field.get("name")), own, found[-1])


def _exported(document: object) -> Iterator[str]:
    """The series that AIPerf exports: with their increase during the run, or mean, or as it read them one by one."""
    metrics = document.get("metrics") if isinstance(document, Mapping) else None
    for name, metric in metrics.items() if isinstance(metrics, Mapping) else ():
        series = metric.get("series") if isinstance(metric, Mapping) else metric
        for each in series if isinstance(series, list) else ():
            stats = each.get("stats", {"total": each.get("value")}) if isinstance(each, Mapping) else None
            if isinstance(stats, Mapping) and (value := stats.get("total", stats.get("avg"))) is not None:
                labels = each.get("labels")
                own = labels if isinstance(labels, Mapping) else {}
                yield _series_line(name, {**own, "instance": each.get("endpoint_url")}, value)


def _series_line(name: object, labels: Mapping[str, object], value: object) -> str:
    named = {key: text for key, text in labels.items() if isinstance(text, str) and key != "__name__"}
    return f"{name}{{{','.join(f'{key}={json.dumps(text)}' for key, text in named.items())}}} {value}"
