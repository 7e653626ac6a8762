"""Parse an engine's speculative-decoding counts from Prometheus text, log lines or JSON.

The names were taken from the sources of vLLM 0.32 (vllm/v1/spec_decode/metrics.py, benchmarks/serve.py), llama.cpp
(tools/server/server-task.cpp, server-context.cpp, server-common.cpp, common/speculative.cpp) and SGLang
(srt/observability/metrics_collector.py, scheduler_metrics_mixin.py, managers/schedule_batch.py).
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TextIO

from nextn.bounded_json import MAX_COUNT, count, loads, optional_count, short_repr, string
from nextn.engines.counters import (
    COUNTS,
    FIRST_TOKENS,
    MAX_POSITIONS,
    ROUNDED,
    Counters,
    CounterSums,
    Series,
    fill_in_derived,
    parse_series,
    sum_counters,
    sum_series,
)
from nextn.errors import EngineError

LineMatch = re.Match[str]
_MAX_FILE = 512 * 1024 * 1024
_MAX_PARSED = 32 * 1024 * 1024  # bytes of a file that is read in one piece: JSON or metrics
_MAX_DOCUMENTS = 200_000
_MAX_START = 1024 * 1024  # characters by which a log is distinguished from metrics
_CHUNK = 1024 * 1024  # characters of a log that are held at once, plus the rest of their last line
_MAX_LINE = 64 * 1024
_MAX_DEPTH = 64
# Three servers share one schema, with a prefix for each.
_PREFIXES = {
    "vLLM": "vllm:spec_decode_num_",
    "llama.cpp": "llamacpp:spec_decode_num_",
    "nextn": "nextn:spec_decode_num_",
}
_CACHE_HITS = (
    "vllm:prefix_cache_hits",
    "nextn:prefix_cache_hits",
    "llamacpp:prompt_tokens_cached",
    "sglang:cached_tokens",
)


def read(source: str | Path, *, model: str | None = None) -> Counters:
    """Read the counters of a file or a text in any of the three formats. Raises EngineError where there are none."""
    if isinstance(source, str):
        return _read(io.StringIO(source), len(source), "the text", model)
    try:
        with source.open(encoding="utf-8", errors="replace") as file:
            if source.is_file():
                return _read(file, source.stat().st_size, str(source), model)
            text = file.read(_MAX_PARSED + 1)  # a pipe can be read only once
        return _read(io.StringIO(text), len(text), str(source), model)
    except OSError as error:
        raise EngineError(f"{source}: cannot be read: {error.strerror or error}") from error


def _read(file: TextIO, size: int, source: str, model: str | None) -> Counters:
    """Read a log in chunks; JSON and metrics, which are recognized by their beginning, in one piece."""
    if size > _MAX_FILE:
        raise EngineError(f"{source}: larger than {_MAX_FILE // 2**20} MiB; cut out the run in question")
    start = file.read(_MAX_START)
    file.seek(0)
    is_json = start.lstrip()[:1] in ("{", "[")
    if not is_json and not re.search(r"^(# TYPE )?(vllm|llamacpp|sglang|nextn):", start, re.M):
        return _need(from_log(file), source)
    if size > _MAX_PARSED:
        raise EngineError(f"{source}: larger than {_MAX_PARSED // 2**20} MiB; cut out the run in question")
    text = file.read(_MAX_PARSED)
    if not is_json:
        return from_metrics(text, model=model)
    parts = (part for document in _documents(text, source) for part in _objects(document, _MAX_DEPTH))
    return _need(_completed(sum_counters(parts)), source)


def _need(counters: Counters | None, source: str) -> Counters:
    if counters is None:
        formats = "vLLM's SpecDecoding metrics, llama.cpp's draft acceptance, SGLang's accept len, their fields in JSON"
        raise EngineError(f"{source}: no draft counts in it; looked for {formats}. Check that MTP was on")
    return counters


def from_metrics(text: str, *, model: str | None = None) -> Counters:
    """Parse the counters of /metrics, summed over engines and ranks; with `model`, those of one served model.

    Raises EngineError where there are no draft counters.
    """
    samples = parse_series(text, model=model)
    for engine, prefix in _PREFIXES.items():
        num_drafts = _counter(samples, f"{prefix}drafts")
        if num_drafts is not None:
            return fill_in_derived(_from_shared_schema(engine, prefix, num_drafts, samples))
    rounds, length = _counter(samples, "sglang:spec_verify_calls"), _mean(samples, "sglang:spec_accept_length")
    if rounds is not None or length is not None:
        return _from_sglang(rounds, length, samples)
    raise EngineError(
        "the metrics have no draft counters: MTP is off, or the engine is too old; turn MTP on or update the engine"
    )


def without_first_tokens(counters: Counters, requests: int) -> Counters:
    """Subtract the first token of each request, which comes from no round, where the engine counts it."""
    if FIRST_TOKENS not in counters.notes or counters.accepted is None or counters.emitted is None:
        return counters
    notes = tuple(note for note in counters.notes if note != FIRST_TOKENS)
    accepted, emitted = max(0, counters.accepted - requests), counters.emitted - requests
    return replace(counters, accepted=accepted, emitted=emitted, notes=notes)


def prefix_hits(text: str, *, model: str | None = None) -> float | None:
    """Return the prompt tokens that came from the prefix cache since the engine's start; None where not reported."""
    return sum_series(parse_series(text, model=model), *_CACHE_HITS)


def _from_shared_schema(engine: str, prefix: str, num_drafts: int, samples: list[Series]) -> Counters:
    tokens, accepted = (_counter(samples, prefix + name) for name in ("draft_tokens", "accepted_tokens"))
    positions: dict[int, list[Series]] = {}
    for sample in samples:
        if sample.name.removesuffix("_total") == f"{prefix}accepted_tokens_per_pos" and "position" in sample.labels:
            positions.setdefault(_position(sample.labels["position"]), []).append(sample)
    per_position = tuple(
        _counter(positions.get(index, []), f"{prefix}accepted_tokens_per_pos") or 0
        for index in range(max(positions, default=-1) + 1)
    )
    since = [sample.value for sample in samples if sample.name == f"{prefix}drafts_created"]
    return Counters(engine, num_drafts, tokens, accepted, per_position, since=sum(since) if since else None)


def _position(label: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", label) or int(label) >= MAX_POSITIONS:
        raise EngineError(f"the metrics count a position {short_repr(label)}; expected one of 0 to {MAX_POSITIONS - 1}")
    return int(label)


def _counter(samples: list[Series], name: str) -> int | None:
    """The sum of one counter as a whole number; None where it is missing."""
    value = sum_series(samples, name)
    if value is not None and not 0 <= value <= MAX_COUNT:
        raise EngineError(f"{name} = {value:g}; expected a count from 0 to {MAX_COUNT}")
    return None if value is None else round(value)


def _from_sglang(rounds: int | None, length: float | None, samples: list[Series]) -> Counters:
    """SGLang counts rounds and tokens; its gauge has the acceptance length of the last log interval."""
    tokens = _counter(samples, "sglang:generation_tokens")
    if rounds is None or tokens is None:
        return Counters("SGLang", rounds, length=length)
    accepted = max(0, tokens - rounds)
    return Counters("SGLang", rounds, None, accepted, emitted=tokens, length=length, notes=(FIRST_TOKENS,))


def _mean(samples: list[Series], name: str) -> float | None:
    values = [sample.value for sample in samples if sample.name == name and 0 < sample.value <= MAX_POSITIONS]
    return sum(values) / len(values) if values else None


_NUM = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
# Each is tried once per line, after the first marker, and atomic groups never backtrack: linear time.
_VLLM_LINE = re.compile(
    rf"(?>.*?Mean acceptance length: (?P<length>{_NUM}))(?>.*?Accepted: (?P<accepted>[0-9]{{1,15}}) tokens)"
    rf"(?>.*?Drafted: (?P<drafted>[0-9]{{1,15}}) tokens)"
    rf"(?>.*?Per-position acceptance rate: (?P<rates>{_NUM}(?:, *{_NUM})*))"
)
_LLAMA_ROUND = re.compile(r"\s+(?P<accepted>[0-9]{1,9})/\s*(?P<drafted>[0-9]{1,9}) draft tokens(?! \(restore)")
_LLAMA_LINE = re.compile(
    rf"(?: rate)? = {_NUM} \(\s*(?P<accepted>[0-9]{{1,15}}) accepted /\s*(?P<drafted>[0-9]{{1,15}}) generated\)"
    rf"(?:, mean len =\s*(?P<length>{_NUM}))?"
)
_SGLANG_LINE = re.compile(rf".*?accept len: (?P<length>{_NUM})")


def from_log(file: TextIO) -> Counters | None:
    """Sum the counts of all log lines with drafts; None where there are none.

    llama.cpp logs requests and, with LLAMA_TRACE, rounds; the rounds are exact and take precedence.
    """
    readers: dict[str, tuple[re.Pattern[str], Callable[[LineMatch], Counters]]] = {
        "SpecDecoding metrics: ": (_VLLM_LINE, _vllm_line),
        "accepted": (_LLAMA_ROUND, _llama_round),
        "draft acceptance": (_LLAMA_LINE, _llama_line),
        "Decode batch": (_SGLANG_LINE, lambda match: Counters("SGLang", length=float(match["length"]))),
    }
    markers = re.compile("|".join(readers))
    sums = {marker: CounterSums() for marker in readers}
    while text := file.read(_CHUNK) + file.readline(_MAX_LINE):
        tried = dict.fromkeys(readers, -1)  # the end of the line where a marker was last seen
        for marker in markers.finditer(text):
            name, start = marker[0], marker.end()
            if start <= tried[name]:
                continue
            end = text.find("\n", start)
            tried[name] = len(text) if end < 0 else end
            pattern, reader = readers[name]
            if match := pattern.match(text, start, tried[name]):
                sums[name].add(reader(match))
    totals = (part.counters() for part in sums.values())
    return next((fill_in_derived(counters) for counters in totals if counters is not None), None)


def _vllm_line(match: LineMatch) -> Counters:
    """One interval. All rounds draft as many tokens as there are positions, except the last ones before a limit."""
    rates = [float(rate) for rate in match["rates"].split(",")]
    accepted, drafted, length = int(match["accepted"]), int(match["drafted"]), float(match["length"])
    rounds = round(drafted / len(rates))
    if accepted and abs(1 + accepted / max(rounds, 1) - length) > 0.02:
        rounds = round(accepted / max(length - 1, 1e-9))
    positions = tuple(round(rate * rounds) for rate in rates)
    return Counters("vLLM", rounds, drafted, accepted, positions, notes=(ROUNDED,))


def _llama_round(match: LineMatch) -> Counters:
    accepted, drafted = int(match["accepted"]), int(match["drafted"])
    if not accepted <= drafted <= MAX_POSITIONS:
        raise EngineError(
            f"llama.cpp: a round accepted {accepted} of {drafted} drafts; expected at most {MAX_POSITIONS}"
        )
    positions = tuple(int(index < accepted) for index in range(drafted))
    return Counters("llama.cpp", 1, drafted, accepted, positions, (1,) * drafted)


def _llama_line(match: LineMatch) -> Counters:
    accepted, drafted = int(match["accepted"]), int(match["drafted"])
    length = float(match["length"] or 1)
    rounds = round(accepted / (length - 1)) if length > 1 else None
    return Counters("llama.cpp", rounds, drafted, accepted, notes=(ROUNDED,))


def from_json(document: object) -> Counters | None:
    """Sum the counts of every object in a JSON document that holds an engine's fields; None where none does."""
    return _completed(sum_counters(_objects(document, _MAX_DEPTH)))


def _completed(counters: Counters | None) -> Counters | None:
    return None if counters is None else fill_in_derived(counters)


def _objects(value: object, depth: int) -> Iterator[Counters]:
    if depth == 0:
        return
    if isinstance(value, list):
        for item in value:
            yield from _objects(item, depth - 1)
    elif isinstance(value, Mapping):
        reader = next((reader for key, reader in _JSON_READERS.items() if key in value), None)
        if reader is not None:
            yield _checked(reader, value)
            return
        for item in value.values():
            yield from _objects(item, depth - 1)


def _checked(reader: Callable[[Mapping], Counters], record: Mapping) -> Counters:
    try:
        return reader(record)
    except (TypeError, ValueError) as error:
        raise EngineError(f"not the draft counts of an engine: {error}") from error


def _own(record: Mapping) -> Counters:
    """A record of `Counters.as_record`."""
    unknown = sorted(set(record) - set(Counters("").as_record()))
    if unknown or "engine" not in record:
        raise ValueError(f"not a record of counters: it has {short_repr(unknown)}" if unknown else "no engine is named")
    counts = {name: optional_count(record.get(name), name) for name in COUNTS}
    positions = {name: tuple(count(value, name) for value in _list(record, name)) for name in _POSITIONS}
    numbers = {name: _number(record[name], name) for name in ("length", "since") if record.get(name) is not None}
    notes = tuple(string(note, "notes") for note in _list(record, "notes", maximum=100))
    return Counters(string(record["engine"], "engine"), **counts, **positions, **numbers, notes=notes)  # type: ignore[arg-type]


_POSITIONS = ("per_position", "per_position_offered")


def _list(record: Mapping, name: str, *, maximum: int = MAX_POSITIONS + 1) -> list:
    """The list of that name, empty where it is missing. Raises ValueError for a longer one, or anything else."""
    value = record.get(name) or []
    if not isinstance(value, list):
        raise ValueError(f"{name} = {short_repr(value)}; expected a list")
    if len(value) > maximum:
        raise ValueError(f"{name} has {len(value):,} entries; expected at most {maximum}")
    return value


def _number(value: object, name: str, *, maximum: int = MAX_COUNT) -> float:
    if type(value) not in (int, float) or not 0 <= value <= maximum:  # type: ignore[operator]
        raise ValueError(f"{name} = {short_repr(value)}; expected a number from 0 to {maximum}")
    return float(value)  # type: ignore[arg-type]


def _timings(record: Mapping) -> Counters:
    """llama.cpp's `timings`: prefill gives one token, each round its accepted drafts and a bonus token."""
    accepted, drafted = (count(record.get(name), name) for name in ("draft_n_accepted", "draft_n"))
    generated = optional_count(record.get("predicted_n"), "predicted_n")
    rounds = None if generated is None else max(0, generated - 1 - accepted)
    return Counters("llama.cpp", rounds, drafted, accepted)


def _meta_info(record: Mapping) -> Counters:
    """SGLang's `meta_info`; histogram[k]: rounds that accepted k drafts."""
    rounds = count(record.get("spec_verify_ct"), "spec_verify_ct")
    histogram = [count(value, "spec_accept_histogram") for value in _list(record, "spec_accept_histogram")]
    positions = tuple(accumulate(reversed(histogram[1:])))[::-1]
    names = ("spec_accept_token_num", "spec_draft_token_num", "completion_tokens")
    accepted, drafted, emitted = (optional_count(record.get(name), name) for name in names)
    if accepted is None and emitted is not None:
        accepted = max(0, emitted - rounds)
    return Counters("SGLang", rounds, drafted, accepted, positions)


def _vllm_request(record: Mapping) -> Counters:
    """vLLM's --per-request-spec-decode-metrics, also of `nextn serve`; histogram[k]: rounds that accepted k drafts."""
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    rounds, drafted, accepted = (count(record.get(name), name) for name in names)
    histogram = [count(value, "acceptance_histogram") for value in _list(record, "acceptance_histogram")]
    positions = tuple(accumulate(reversed(histogram[1:])))[::-1]
    return Counters("vLLM", rounds, drafted, accepted, positions)


def _vllm_bench(record: Mapping) -> Counters:
    """`vllm bench serve --save-result`."""
    rounds = count(record.get("spec_decode_num_drafts"), "spec_decode_num_drafts")
    name = "spec_decode_per_position_acceptance_rates"
    positions = tuple(round(_number(rate, name, maximum=1) * rounds) for rate in _list(record, name))
    names = ("spec_decode_draft_tokens", "spec_decode_accepted_tokens")
    drafted, accepted = (optional_count(record.get(count_name), count_name) for count_name in names)
    return Counters("vLLM", rounds, drafted, accepted, positions)


_JSON_READERS: dict[str, Callable[[Mapping], Counters]] = {
    "per_position_offered": _own,
    "draft_n": _timings,
    "spec_verify_ct": _meta_info,
    "num_spec_steps": _vllm_request,
    "spec_decode_num_drafts": _vllm_bench,
}


def _documents(text: str, source: str) -> Iterator[object]:
    """One JSON document, or one per line; only one at a time is held."""
    try:
        document = loads(text)
    except ValueError as error:
        reason = error
    else:
        yield document
        return
    for number, line in enumerate(re.finditer(r"[^\n]*\S[^\n]*", text), 1):
        if number > _MAX_DOCUMENTS:
            raise EngineError(f"{source}: more than {_MAX_DOCUMENTS:,} lines of JSON; cut out the run in question")
        try:
            document = loads(line[0])
        except ValueError as error:
            cause = reason if number == 1 else error
            raise EngineError(f"{source}: neither JSON nor lines of JSON: {cause}") from error
        yield document
