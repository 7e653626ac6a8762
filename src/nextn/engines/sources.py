"""Where an engine tells what it drafted: Prometheus text, log lines, or JSON -> Counters.

The names were read in vLLM 0.32 (vllm/v1/spec_decode/metrics.py, benchmarks/serve.py), llama.cpp
(tools/server/server-task.cpp, server-context.cpp, server-common.cpp, common/speculative.cpp) and SGLang
(srt/observability/metrics_collector.py, scheduler_metrics_mixin.py, managers/schedule_batch.py).
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path
from typing import TextIO

from nextn.engines.counters import MAX_POSITIONS, Counters, Sums, counted, summed
from nextn.engines.documents import MAX_COUNT, count, loads, optional_count, shown, string
from nextn.engines.prometheus import Series, series, total
from nextn.errors import EngineError

Numbers = re.Match[str]
ROUNDED = "from rates rounded in the log: counts are approximate"
FIRST_TOKENS = "generated tokens include the first of each request, which no round gave: AL is slightly too high"
_MAX_FILE = 512 * 1024 * 1024
_MAX_PARSED = 32 * 1024 * 1024  # bytes of a file that is read at once: JSON or metrics
_MAX_DOCUMENTS = 200_000
_MAX_START = 1024 * 1024  # characters that tell a log from metrics
_CHUNK = 1024 * 1024  # characters of a log that are held at once, and the rest of their last line
_MAX_LINE = 64 * 1024
_MAX_DEPTH = 64
# With one name per engine, as vLLM and llama.cpp count the same four things.
_COUNTING = {"vLLM": "vllm:spec_decode_num_", "llama.cpp": "llamacpp:spec_decode_num_"}
_CACHE_HITS = ("vllm:prefix_cache_hits", "llamacpp:prompt_tokens_cached", "sglang:cached_tokens")


def read(source: str | Path, *, model: str | None = None) -> Counters:
    """Counters of a file or a text in any of the three forms. Raises EngineError where it holds none."""
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


def _read(file: TextIO, size: int, place: str, model: str | None) -> Counters:
    """A log is read piece by piece; JSON and metrics, which are told by their beginning, at once."""
    if size > _MAX_FILE:
        raise EngineError(f"{place}: larger than {_MAX_FILE // 2**20} MiB; cut out the run in question")
    start = file.read(_MAX_START)
    file.seek(0)
    is_json = start.lstrip()[:1] in ("{", "[")
    if not is_json and not re.search(r"^(# TYPE )?(vllm|llamacpp|sglang):", start, re.M):
        return _need(_of_log(file), place)
    if size > _MAX_PARSED:
        raise EngineError(f"{place}: larger than {_MAX_PARSED // 2**20} MiB; cut out the run in question")
    text = file.read(_MAX_PARSED)
    if not is_json:
        return from_metrics(text, model=model)
    parts = (part for document in _documents(text, place) for part in _objects(document, _MAX_DEPTH))
    return _need(_completed(summed(parts)), place)


def _need(found: Counters | None, place: str) -> Counters:
    if found is None:
        kinds = "vLLM's SpecDecoding metrics, llama.cpp's draft acceptance, SGLang's accept len, their fields in JSON"
        raise EngineError(f"{place}: no figures of drafts in it; looked for {kinds}. Was MTP on?")
    return found


def from_metrics(text: str, *, model: str | None = None) -> Counters:
    """Counters from /metrics, summed over engines and ranks, of one served model where `model` is given.

    Raises EngineError where no engine counts drafts there.
    """
    found = series(text, model=model)
    for engine, prefix in _COUNTING.items():
        drafts = _counter(found, f"{prefix}drafts")
        if drafts is not None:
            return counted(_of_counting(engine, prefix, drafts, found))
    rounds, length = _counter(found, "sglang:spec_verify_calls"), _mean(found, "sglang:spec_accept_length")
    if rounds is not None or length is not None:
        return _of_sglang(rounds, length, found)
    raise EngineError("the metrics hold no counters of drafts: MTP is off, or the engine is too old to count them")


def less_first(counters: Counters, requests: int) -> Counters:
    """Without the first token of each request, which no round gave, where an engine counts it."""
    if FIRST_TOKENS not in counters.notes or counters.accepted is None or counters.emitted is None:
        return counters
    left = tuple(note for note in counters.notes if note != FIRST_TOKENS)
    accepted, emitted = max(0, counters.accepted - requests), counters.emitted - requests
    return replace(counters, accepted=accepted, emitted=emitted, notes=left)


def prefix_hits(text: str, *, model: str | None = None) -> float | None:
    """Prompt tokens that came from the prefix cache since the engine's start; None where it does not tell."""
    return total(series(text, model=model), *_CACHE_HITS)


def _of_counting(engine: str, prefix: str, drafts: int, found: list[Series]) -> Counters:
    tokens, accepted = (_counter(found, prefix + name) for name in ("draft_tokens", "accepted_tokens"))
    places: dict[int, list[Series]] = {}
    for each in found:
        if each.name.removesuffix("_total") == f"{prefix}accepted_tokens_per_pos" and "position" in each.labels:
            places.setdefault(_position(each.labels["position"]), []).append(each)
    per_position = tuple(
        _counter(places.get(place, []), f"{prefix}accepted_tokens_per_pos") or 0
        for place in range(max(places, default=-1) + 1)
    )
    since = [each.value for each in found if each.name == f"{prefix}drafts_created"]
    return Counters(engine, drafts, tokens, accepted, per_position, since=sum(since) if since else None)


def _position(label: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", label) or int(label) >= MAX_POSITIONS:
        raise EngineError(f"the metrics count a position {shown(label)}; expected one of 0 to {MAX_POSITIONS - 1}")
    return int(label)


def _counter(found: list[Series], name: str) -> int | None:
    """The sum of one counter as a whole number; None where it is not there."""
    value = total(found, name)
    if value is not None and not 0 <= value <= MAX_COUNT:
        raise EngineError(f"{name} = {value:g}; expected a count from 0 to {MAX_COUNT}")
    return None if value is None else round(value)


def _of_sglang(rounds: int | None, length: float | None, found: list[Series]) -> Counters:
    """SGLang counts rounds and tokens; the length of its gauge is of the last log interval."""
    tokens = _counter(found, "sglang:generation_tokens")
    if rounds is None or tokens is None:
        return Counters("SGLang", rounds, length=length)
    accepted = max(0, tokens - rounds)
    return Counters("SGLang", rounds, None, accepted, emitted=tokens, length=length, notes=(FIRST_TOKENS,))


def _mean(found: list[Series], name: str) -> float | None:
    values = [each.value for each in found if each.name == name and 0 < each.value <= MAX_POSITIONS]
    return sum(values) / len(values) if values else None


_NUM = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
# Each is tried once a line, at the first place of its marker, and goes back to nothing (atomic groups): linear.
_VLLM_LINE = re.compile(
    rf"(?>.*?Mean acceptance length: (?P<length>{_NUM}))(?>.*?Accepted: (?P<accepted>[0-9]{{1,15}}) tokens)"
    rf"(?>.*?Drafted: (?P<drafted>[0-9]{{1,15}}) tokens)"
    rf"(?>.*?Per-position acceptance rate: (?P<rates>{_NUM}(?:, *{_NUM})*))"
)
_LLAMA_ROUND = re.compile(r"\s+(?P<kept>[0-9]{1,9})/\s*(?P<drafted>[0-9]{1,9}) draft tokens(?! \(restore)")
_LLAMA_LINE = re.compile(
    rf"(?: rate)? = {_NUM} \(\s*(?P<accepted>[0-9]{{1,15}}) accepted /\s*(?P<drafted>[0-9]{{1,15}}) generated\)"
    rf"(?:, mean len =\s*(?P<length>{_NUM}))?"
)
_SGLANG_LINE = re.compile(rf".*?accept len: (?P<length>{_NUM})")


def from_log(text: str) -> Counters | None:
    """Counters of all log lines that tell of drafts, summed; None where no line does.

    llama.cpp tells whole requests and, with LLAMA_TRACE, rounds; the rounds are exact and win.
    """
    return _of_log(io.StringIO(text))


def _of_log(file: TextIO) -> Counters | None:
    readers: dict[str, tuple[re.Pattern[str], Callable[[Numbers], Counters]]] = {
        "SpecDecoding metrics: ": (_VLLM_LINE, _vllm_line),
        "accepted": (_LLAMA_ROUND, _llama_round),
        "draft acceptance": (_LLAMA_LINE, _llama_line),
        "Decode batch": (_SGLANG_LINE, lambda match: Counters("SGLang", length=float(match["length"]))),
    }
    markers = re.compile("|".join(readers))
    sums = {marker: Sums() for marker in readers}
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
    return next((counted(each) for found in sums.values() if (each := found.counters()) is not None), None)


def _vllm_line(match: Numbers) -> Counters:
    """One interval. All rounds draft as many tokens as there are positions, save the last ones before a limit."""
    rates = [float(rate) for rate in match["rates"].split(",")]
    accepted, drafted, length = int(match["accepted"]), int(match["drafted"]), float(match["length"])
    rounds = round(drafted / len(rates))
    if accepted and abs(1 + accepted / max(rounds, 1) - length) > 0.02:
        rounds = round(accepted / max(length - 1, 1e-9))
    places = tuple(round(rate * rounds) for rate in rates)
    return Counters("vLLM", rounds, drafted, accepted, places, notes=(ROUNDED,))


def _llama_round(match: Numbers) -> Counters:
    kept, drafted = int(match["kept"]), int(match["drafted"])
    if not kept <= drafted <= MAX_POSITIONS:
        raise EngineError(f"llama.cpp: a round accepted {kept} of {drafted} drafts; expected at most {MAX_POSITIONS}")
    places = tuple(int(place < kept) for place in range(drafted))
    return Counters("llama.cpp", 1, drafted, kept, places, (1,) * drafted)


def _llama_line(match: Numbers) -> Counters:
    accepted, drafted = int(match["accepted"]), int(match["drafted"])
    length = float(match["length"] or 1)
    rounds = round(accepted / (length - 1)) if length > 1 else None
    return Counters("llama.cpp", rounds, drafted, accepted, notes=(ROUNDED,))


def from_json(found: object) -> Counters | None:
    """Counters of every object in a JSON document that holds an engine's fields, summed; None where none does."""
    return _completed(summed(_objects(found, _MAX_DEPTH)))


def _completed(found: Counters | None) -> Counters | None:
    return None if found is None else counted(found)


def _objects(found: object, depth: int) -> Iterator[Counters]:
    if depth == 0:
        return
    if isinstance(found, list):
        for each in found:
            yield from _objects(each, depth - 1)
    elif isinstance(found, Mapping):
        of = next((reader for key, reader in _SHAPES.items() if key in found), None)
        if of is not None:
            yield _checked(of, found)
            return
        for each in found.values():
            yield from _objects(each, depth - 1)


def _checked(of: Callable[[Mapping], Counters], found: Mapping) -> Counters:
    try:
        return of(found)
    except (TypeError, ValueError) as error:
        raise EngineError(f"not an engine's counts of drafts: {error}") from error


def _own(found: Mapping) -> Counters:
    """A record of `Counters.as_record`."""
    unknown = sorted(set(found) - {each.name for each in fields(Counters)})
    if unknown or "engine" not in found:
        raise ValueError(f"not a record of counters: it has {shown(unknown)}" if unknown else "no engine is named")
    counts = {name: optional_count(found.get(name), name) for name in ("drafts", "draft_tokens", "accepted", "emitted")}
    rows = {name: tuple(count(each, name) for each in _list(found, name)) for name in _ROWS}
    numbers = {name: _number(found[name], name) for name in ("length", "since") if found.get(name) is not None}
    notes = tuple(string(each, "notes") for each in _list(found, "notes", most=100))
    return Counters(string(found["engine"], "engine"), **counts, **rows, **numbers, notes=notes)  # type: ignore[arg-type]


_ROWS = ("per_position", "per_position_offered")


def _list(found: Mapping, name: str, *, most: int = MAX_POSITIONS + 1) -> list:
    """The list of that name, empty where there is none. Raises ValueError for a longer one, or anything else."""
    value = found.get(name) or []
    if not isinstance(value, list):
        raise ValueError(f"{name} = {shown(value)}; expected a list")
    if len(value) > most:
        raise ValueError(f"{name} has {len(value):,} entries; expected at most {most}")
    return value


def _number(value: object, name: str, *, most: int = MAX_COUNT) -> float:
    if type(value) not in (int, float) or not 0 <= value <= most:  # type: ignore[operator]
        raise ValueError(f"{name} = {shown(value)}; expected a number from 0 to {most}")
    return float(value)  # type: ignore[arg-type]


def _timings(found: Mapping) -> Counters:
    """llama.cpp's `timings`: the prefill gives one token, each round its kept drafts and one more."""
    accepted, drafted = (count(found.get(name), name) for name in ("draft_n_accepted", "draft_n"))
    generated = optional_count(found.get("predicted_n"), "predicted_n")
    rounds = None if generated is None else max(0, generated - 1 - accepted)
    return Counters("llama.cpp", rounds, drafted, accepted)


def _meta_info(found: Mapping) -> Counters:
    """SGLang's `meta_info`; histogram[k]: rounds that kept k drafts."""
    rounds = count(found.get("spec_verify_ct"), "spec_verify_ct")
    histogram = [count(each, "spec_accept_histogram") for each in _list(found, "spec_accept_histogram")]
    places = tuple(accumulate(reversed(histogram[1:])))[::-1]
    names = ("spec_accept_token_num", "spec_draft_token_num", "completion_tokens")
    accepted, drafted, emitted = (optional_count(found.get(name), name) for name in names)
    if accepted is None and emitted is not None:
        accepted = max(0, emitted - rounds)
    return Counters("SGLang", rounds, drafted, accepted, places)


def _vllm_bench(found: Mapping) -> Counters:
    """`vllm bench serve --save-result`."""
    rounds = count(found.get("spec_decode_num_drafts"), "spec_decode_num_drafts")
    name = "spec_decode_per_position_acceptance_rates"
    places = tuple(round(_number(rate, name, most=1) * rounds) for rate in _list(found, name))
    names = ("spec_decode_draft_tokens", "spec_decode_accepted_tokens")
    drafted, accepted = (optional_count(found.get(each), each) for each in names)
    return Counters("vLLM", rounds, drafted, accepted, places)


_SHAPES: dict[str, Callable[[Mapping], Counters]] = {
    "per_position_offered": _own,
    "draft_n": _timings,
    "spec_verify_ct": _meta_info,
    "spec_decode_num_drafts": _vllm_bench,
}


def _documents(text: str, place: str) -> Iterator[object]:
    """One JSON document, or one a line; only one at a time is held."""
    try:
        whole = loads(text)
    except ValueError as error:
        reason = error
    else:
        yield whole
        return
    for number, line in enumerate(re.finditer(r"[^\n]*\S[^\n]*", text), 1):
        if number > _MAX_DOCUMENTS:
            raise EngineError(f"{place}: more than {_MAX_DOCUMENTS:,} lines of JSON; cut out the run in question")
        try:
            found = loads(line[0])
        except ValueError as error:
            said = reason if number == 1 else error
            raise EngineError(f"{place}: neither JSON nor lines of JSON: {said}") from error
        yield found
