"""Read an engine's draft counts from a file: metrics, JSON, a log or a printed table, in any of their formats."""

import codecs
import io
import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from nextn.bounded_json import loads
from nextn.engines.count_tables import is_count_table, read_count_table
from nextn.engines.counters import Counters, fill_in_derived, refuse_model, sum_counters
from nextn.engines.csv_formats import table_reader
from nextn.engines.embedded_json import MAX_DOCUMENTS, documents
from nextn.engines.json_formats import JSON_READERS, objects, without_warm_ups
from nextn.engines.log_formats import LOG_FORMATS
from nextn.engines.log_reader import LogReading, read_log
from nextn.engines.metrics_formats import (
    METRICS_FORMAT,
    METRICS_LINE,
    SERIES_TABLE,
    NoDraftCountersError,
    from_metrics,
    repr_as_metrics,
    table_as_metrics,
)
from nextn.engines.metrics_json import series_in
from nextn.engines.named_counts import answer_id, in_documents, in_lines, last_parts
from nextn.engines.run_settings import NOT_LOADED_FIX, head_not_loaded, model_not_loaded, with_settings
from nextn.errors import EngineError
from nextn.text_format import docs_page

_MAX_FILE = 512 * 1024 * 1024
_MAX_PARSED = 32 * 1024 * 1024  # bytes of a file that is read in one piece: JSON or metrics
_MAX_DOCUMENTS = 200_000
_MAX_BROKEN = 1000  # lines that begin as JSON and are none, after which the others are not tried
_BREAKS = ((r"\r?\n", ""), (r"\r?\n[ \t>|]*", ""), (r"\r?\n[ \t>|]*", " "))  # what takes the place of a line's end
_CELLS = r"(?m)^[ \t]{0,9}\|[ \t]*([^|\n]{1,60}?)[ \t]*\|[ \t]*([^|\n]{1,60}?)[ \t]*\|[ \t]*$"  # a name and a value
_MAX_PEEK = 512  # bytes by which the encoding is recognized
_MAX_PIPED = 64 * 1024  # bytes of a pipe that are read at once
# First bytes of a packed file -> what unpacks it.
_PACKED = {
    b"\x1f\x8b": "gunzip",
    b"(\xb5/\xfd": "zstd -d",
    b"PK\x03\x04": "unzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ": "unxz",
}
_MAX_START = 1024 * 1024  # characters by which the kind of a file is recognized, and its settings are read
_ONLY_START = f"lines of this form are read in the first {_MAX_START // 2**20} MiB alone, the rest is left out"
_ONLY_FIRST = f"of many objects in the text, the first are read (at most {MAX_DOCUMENTS:,}), the rest is left out"
_STOPPED = "interrupted: these are the counts of what was read so far"
_LOG_PREFIX = re.compile(r'\[(?:[A-Z][^\[\]{}"\n]{1,80}\]|[^\[\]{}"\n]{1,80}\][ \t]*[^\s,\]])')
_CURVE = re.compile(r"(?m)^ +1: [1-2](\.[0-9]+)?$|^ +thinking_(on|off):$")  # InferenceX's golden_al_distribution
# Keys of structured logs under which the line is, of Docker, Kubernetes, journald, Google Cloud and Python loggers.
_MESSAGE_KEYS = ("log", "message", "msg", "MESSAGE", "textPayload", "line", "text", "event", "body")


def read(source: str | Path, *, model: str | None = None) -> Counters:
    """Read the counters of a file or a text in any of the formats.

    Raises EngineError where there are none, ConfigError for a `model` where the counts are of none by name.
    """
    if isinstance(source, str):
        return _read(io.StringIO(source), len(source), "the text", model)
    try:
        with source.open("rb") as file:
            start = file.peek(_MAX_PEEK)  # a pipe can be read only once
            with io.TextIOWrapper(file, encoding=_encoding(start, source), errors="replace") as text:
                if source.is_file():
                    return _read(text, source.stat().st_size, str(source), model)
                copy, note = _piped(text)
        if len(copy) > _MAX_PARSED:
            raise EngineError(
                f"{source}: of a pipe at most {_MAX_PARSED // 2**20} MiB are read; write it to a file, and give that"
            )
        found = _read(io.StringIO(copy), len(copy), str(source), model)
        return replace(found, notes=(*found.notes, *note))
    except OSError as error:
        raise EngineError(f"{source}: cannot be read: {error.strerror or error}") from error


def _piped(text: io.TextIOWrapper) -> tuple[str, tuple[str, ...]]:
    """Return what comes through a pipe, at most a little more than is parsed, until its end or Ctrl-C; and a note."""
    parts: list[str] = []
    note: tuple[str, ...] = ()
    size = 0
    decode = codecs.getincrementaldecoder(text.encoding)(errors="replace").decode
    try:
        while size <= _MAX_PARSED and (part := text.buffer.read1(_MAX_PIPED)):  # type: ignore[attr-defined]
            parts.append(decode(part))
            size += len(parts[-1])
    except KeyboardInterrupt:  # as a log that is followed ends; what was read counts
        if not parts:
            raise
        note = (_STOPPED,)
    return "".join(parts), note


def _encoding(start: bytes, source: Path) -> str:
    """Return the encoding of a text: UTF-16 as of PowerShell's `>`, else UTF-8. Raises EngineError for no text."""
    if not start:
        raise EngineError(f"{source}: empty; give the file with the engine's log, metrics or JSON")
    if packed := next((tool for magic, tool in _PACKED.items() if start.startswith(magic)), ""):
        raise EngineError(f"{source}: compressed; unpack it first (`{packed}`)")
    zeros = [start[place:512:2].count(0) / len(start[place:512:2] or b"x") for place in (0, 1)]
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    return "utf-8-sig" if max(zeros) < 0.5 or min(zeros) > 0.5 else "utf-16-le" if zeros[1] > zeros[0] else "utf-16-be"


def _read(file: TextIO, size: int, source: str, model: str | None) -> Counters:
    """Read a log in chunks; JSON and metrics, which are recognized by their beginning, in one piece."""
    if size > _MAX_FILE:
        raise EngineError(f"{source}: larger than {_MAX_FILE // 2**20} MiB; cut out the run in question")
    start = file.read(_MAX_START)
    file.seek(0)
    read_table = table_reader(start)
    is_json, is_series = _begins_as_json(start), SERIES_TABLE.match(start) is not None
    if read_table is None and not is_series and not is_json and is_count_table(start):
        read_table = read_count_table
    if printed := repr_as_metrics(start):
        return from_metrics(printed, model=model)
    if read_table is None and not is_json and not is_series:
        if not METRICS_LINE.search(start):
            refuse_model(model, source)
            return with_settings(_from_log(file, source, start), [start])
        return _from_metrics_or_log(file, size, source, model)
    if size > _MAX_PARSED:
        raise _too_large(source)
    text = file.read(_MAX_PARSED)
    if read_table is not None:
        return read_table(text, source, model)
    if not is_json:
        return from_metrics(table_as_metrics(text), model=model)
    counters = _from_json_text(text, source, model)
    return with_settings(counters, [start])


def _from_log(file: TextIO, source: str, start: str) -> Counters:
    """The counts of a log, of objects in it, or of lines that no engine has for itself; a length where none counts."""
    reading = read_log(file)
    own = reading.counters
    if own.has_drafts is None if own else not reading.has_entries:
        counters = _embedded(start)
        if counters and not (own and counters.has_drafts is None):
            return counters
    if reading.counters is None:
        reading = next((again for again in _read_again(start, reading) if again.counters), reading)
        if reading.counters and len(start) == _MAX_START:
            reading = replace(reading, counters=_with_note(reading.counters))
    return _need(reading, source, start)


def _from_metrics_or_log(file: TextIO, size: int, source: str, model: str | None) -> Counters:
    """The counts of metrics; without any, those of a log, in which a line may look like a series."""
    error = _too_large(source)
    start = file.read(_MAX_PARSED)
    if size <= _MAX_PARSED:
        try:
            return with_settings(from_metrics(start, model=model), [start[:_MAX_START]])
        except NoDraftCountersError as none:
            error = none
    file.seek(0)
    counters = read_log(file).counters
    if counters is None:
        raise error
    refuse_model(model, source)
    return with_settings(counters, [start[:_MAX_START]])


def _too_large(source: str) -> EngineError:
    return EngineError(f"{source}: larger than {_MAX_PARSED // 2**20} MiB; cut out the run in question")


def _embedded(text: str) -> Counters | None:
    """The counts in objects of JSON or Python inside other text; None where there are none."""
    if not re.search("(?i)accept|spec_", text):
        return None
    found, is_whole = documents(text)
    parts = [part for document in found for part in objects(document)]
    counters = sum_counters(without_warm_ups(parts)) or in_documents(found)
    counters = counters or in_lines(text)
    if counters and not is_whole:
        counters = _with_note(counters, _ONLY_FIRST)
    elif counters and len(text) == _MAX_START:
        counters = _with_note(counters)
    return counters and fill_in_derived(counters)


def _read_again(start: str, first: LogReading) -> Iterator[LogReading]:
    """Read lines that a terminal or an editor broke within words, or Markdown and HTML, then those of any engine."""
    text = re.sub(r"<[^<>\n]{1,200}>", " ", re.sub(r"</tr>|<br ?/?>", "\n", start))
    plain = re.sub(_CELLS, r"\1: \2", re.sub(r"[*`]{1,3}", "", text))
    for other in (*(re.sub(*line_break, start) for line_break in _BREAKS), plain):
        if other != start:
            yield read_log(io.StringIO(other))
    if not first.has_entries:
        yield read_log(io.StringIO(start), general=True)


def _with_note(counters: Counters, note: str = _ONLY_START) -> Counters:
    return replace(counters, notes=(*counters.notes, note))


def _begins_as_json(start: str) -> bool:
    """Whether the first line begins a JSON document; a log's line may begin with [date TP0] or [pid]."""
    first = start.lstrip().removeprefix("data:").lstrip()
    return first[:1] in ("{", "[") and not _LOG_PREFIX.match(first)


@dataclass
class _Contents:
    """What the documents of a text hold."""

    counts: list[tuple[Hashable, list[Counters]]] = field(default_factory=list)  # beside the answer that they are of
    series: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # of text, and the messages of objects without counts
    others: list[object] = field(default_factory=list)  # objects without counts
    reason: ValueError | None = None  # why the text is not one document
    num_objects: int = 0
    num_answers: int = 0  # that are at an end, of those without an id

    def add(self, document: object) -> None:
        if isinstance(document, ValueError):
            self.reason = self.reason or document
        elif isinstance(document, str):
            self.lines.append(document)
        else:
            self.num_objects += 1
            found = objects(document)
            self.counts.append((self._answer(document), found))
            self.series += series_in(document)
            if not found:
                messages = _messages(document)
                self.counts += [(None, _inside(text)) for text in messages if text.lstrip()[:1] == "{"]
                self.lines += messages
                self.others.append(document)

    def _answer(self, document: object) -> Hashable:
        """The id of the answer that a document is a part of, or the number of one without; None for no such part."""
        is_part = isinstance(document, Mapping) and "stop" in document and "content" in document
        if (name := answer_id(document)) or not is_part:
            self.num_answers += 1
            return name
        number = self.num_answers
        self.num_answers += isinstance(document, Mapping) and document["stop"] is True
        return "", number


def _from_json_text(text: str, source: str, model: str | None) -> Counters:
    """The counts of one JSON document, of one per line, or of the lines that a structured log has in its fields."""
    contents = _Contents()
    for document in _documents(text, source):
        contents.add(document)
    counters = sum_counters(without_warm_ups(last_parts(contents.counts)))
    if counters is None and contents.series:
        return from_metrics("\n".join(contents.series), model=model)
    refuse_model(model, source)
    return fill_in_derived(counters) if counters is not None else _from_contents(contents, text, source)


def _from_contents(contents: _Contents, text: str, source: str) -> Counters:
    """The counts of objects without a known format, or of the lines in them."""
    reading = read_log(io.StringIO("\n".join(line.rstrip("\n") for line in contents.lines)))
    if not reading.has_entries and reading.counters is None:
        counters = in_documents(contents.others)
        counters = counters or (None if contents.num_objects else _embedded(text[:_MAX_START]))
        if counters is not None:
            return fill_in_derived(counters)
        general = read_log(io.StringIO(text[:_MAX_START]), general=True)
        reading = general if general.counters else reading
    reason = contents.reason
    if reading.counters is None and not reading.has_entries and reason is not None and not contents.num_objects:
        raise EngineError(f"{source}: neither JSON nor lines of JSON: {reason}") from reason
    return _need(reading, source, text[:_MAX_START])


def _inside(text: str) -> list[Counters]:
    """The counts in a JSON document that is a value of another."""
    try:
        return objects(loads(text))
    except ValueError:
        return []


def _documents(text: str, source: str) -> Iterator[object]:
    """One JSON document, or one per line; lines that are no JSON come as text, the error of the whole as itself."""
    try:
        yield loads(text)
        return
    except ValueError as error:
        yield error
    num_broken = 0
    for number, line in enumerate(text.splitlines(), 1):
        if number > _MAX_DOCUMENTS:
            raise EngineError(f"{source}: more than {_MAX_DOCUMENTS:,} lines of JSON; cut out the run in question")
        stripped = line.strip().removeprefix("data:").strip()
        if stripped[:1] not in ("{", "[") or num_broken > _MAX_BROKEN:
            yield line
            continue
        try:
            yield loads(stripped)
        except ValueError:
            num_broken += 1
            yield line


def _messages(value: object, depth: int = 8) -> list[str]:
    """The lines of structured logs: of each record of a list the one under a usual key, or its longest text."""
    if isinstance(value, str) or depth == 0:
        return [value] if isinstance(value, str) else []
    if isinstance(value, list):
        if value and all(type(item) is int and 0 <= item < 256 for item in value):  # journald's, of text with colors
            return [bytes(value).decode("utf-8", "replace")]
        return [text for item in value for text in _messages(item, depth - 1)]
    if not isinstance(value, Mapping):
        return []
    key = next((key for key in _MESSAGE_KEYS if isinstance(value.get(key), str | list)), None)
    texts = [text for item in ((value[key],) if key else value.values()) for text in _messages(item, depth - 1)]
    records = key is not None or _holds_list(value, depth)
    return texts if records else [max(texts, key=len)] if texts else []


def _holds_list(value: object, depth: int) -> bool:
    inner = value.values() if isinstance(value, Mapping) and depth else ()
    return isinstance(value, list) or any(_holds_list(item, depth - 1) for item in inner)


def _need(reading: LogReading, source: str, start: str) -> Counters:
    """The counters, or an error that names the format that is nearest to the text, and what it lacks."""
    if reading.counters is not None:
        return reading.counters
    if reading.incomplete:
        name, missing = reading.incomplete[0]
        raise EngineError(f"{source}: no draft counts in it; nearest: {name}, which lacks {missing!r}")
    if fault := head_not_loaded(start):
        raise EngineError(
            f"{source}: no draft counts in it, as the engine did not load the head: {fault!r}. {NOT_LOADED_FIX}"
        )
    if fault := model_not_loaded(start):
        raise EngineError(
            f"{source}: no draft counts in it, as the engine may not have loaded the model: {fault!r}. "
            f"{NOT_LOADED_FIX}; a sound file may need a newer engine"
        )
    if _CURVE.search(start):
        raise EngineError(f"{source}: acceptance lengths by K, without counts; to show them beside: measure --baseline")
    name, words = _nearest(start)
    hint = f"nearest: {name}, by {words!r}" if name else "nothing in it is of an engine's drafts"
    if not name and (line := re.search(r"(?i)[^\n]{0,60}(?<![a-z])accept[^\n]{0,60}", start)):
        hint = f"{line[0].strip()!r} is not read; accepted and drafted tokens are read as `MTP accepted 29/35`"
    raise EngineError(
        f"{source}: no draft counts in it; {hint}. Check that MTP was on, and that the part with the counts "
        f"was copied; formats that are read: {docs_page('reference/counter-formats')}"
    )


def _nearest(start: str) -> tuple[str, str]:
    """The format of which a text holds what all of its entries have, the name of a field, or a key."""
    names = [(each.name, each.literal) for each in LOG_FORMATS if each.literal[0] != " "]  # words of any sentence
    names += [(each.name, name) for each in LOG_FORMATS for name in each.fields]
    for log_format, name in names:
        if len(name) > 8 and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", start):
            return log_format, name
    for name, (key, _) in JSON_READERS.items():
        if f'"{key}"' in start:
            return name, key
    for word, name in (("vllm:", METRICS_FORMAT), ("sglang:", METRICS_FORMAT), ("llamacpp:", METRICS_FORMAT)):
        if word in start:
            return name, word
    return "", ""
