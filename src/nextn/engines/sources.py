"""Where an engine tells what it drafted: Prometheus text, log lines, or JSON -> Counters.

The names were read in vLLM 0.32 (vllm/v1/spec_decode/metrics.py, benchmarks/serve.py), llama.cpp
(tools/server/server-task.cpp, server-context.cpp, server-common.cpp, common/speculative.cpp) and SGLang
(srt/observability/metrics_collector.py, scheduler_metrics_mixin.py, managers/schedule_batch.py).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nextn.engines.counters import Counters, counted, summed
from nextn.engines.prometheus import Series, series, total
from nextn.errors import EngineError

Numbers = re.Match[str]
ROUNDED = "from rates rounded in the log: counts are approximate"
FIRST_TOKENS = "generated tokens include the first of each request, which no round gave: AL is slightly too high"
_MAX_FILE = 512 * 1024 * 1024
_MAX_DEPTH = 64
# With one name per engine, as vLLM and llama.cpp count the same four things.
_COUNTING = {"vLLM": "vllm:spec_decode_num_", "llama.cpp": "llamacpp:spec_decode_num_"}
_CACHE_HITS = ("vllm:prefix_cache_hits", "llamacpp:prompt_tokens_cached", "sglang:cached_tokens")


def read(source: str | Path, *, model: str | None = None) -> Counters:
    """Counters of a file or a text in any of the three forms. Raises EngineError where it holds none."""
    text = source if isinstance(source, str) else _file(source)
    place = "the text" if isinstance(source, str) else str(source)
    if text.lstrip()[:1] in ("{", "["):
        return _need(from_json(_parsed(text, place)), place)
    if re.search(r"^(# TYPE )?(vllm|llamacpp|sglang):", text, re.M):
        return from_metrics(text, model=model)
    return _need(from_log(text), place)


def _file(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_FILE:
            raise EngineError(f"{path}: larger than {_MAX_FILE // 2**20} MiB; cut out the run in question")
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise EngineError(f"{path}: cannot be read: {error.strerror or error}") from error


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
        drafts = total(found, f"{prefix}drafts")
        if drafts is not None:
            return counted(_of_counting(engine, prefix, round(drafts), found))
    rounds, length = total(found, "sglang:spec_verify_calls"), _mean(found, "sglang:spec_accept_length")
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
    tokens, accepted = (_rounded(total(found, prefix + name)) for name in ("draft_tokens", "accepted_tokens"))
    places: dict[int, float] = {}
    for each in found:
        if each.name.removesuffix("_total") == f"{prefix}accepted_tokens_per_pos" and "position" in each.labels:
            place = int(each.labels["position"])
            places[place] = places.get(place, 0.0) + each.value
    per_position = tuple(round(places.get(place, 0.0)) for place in range(max(places, default=-1) + 1))
    since = [each.value for each in found if each.name == f"{prefix}drafts_created"]
    return Counters(engine, drafts, tokens, accepted, per_position, since=sum(since) if since else None)


def _of_sglang(rounds: float | None, length: float | None, found: list[Series]) -> Counters:
    """SGLang counts rounds and tokens; the length of its gauge is of the last log interval."""
    emitted = total(found, "sglang:generation_tokens")
    if rounds is None or emitted is None:
        return Counters("SGLang", _rounded(rounds), length=length)
    accepted = max(0, round(emitted - rounds))
    tokens = round(emitted)
    return Counters("SGLang", round(rounds), None, accepted, emitted=tokens, length=length, notes=(FIRST_TOKENS,))


def _mean(found: list[Series], name: str) -> float | None:
    values = [each.value for each in found if each.name == name and each.value > 0]
    return sum(values) / len(values) if values else None


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


_VLLM_LINE = re.compile(
    r"SpecDecoding metrics: .*?Mean acceptance length: (?P<length>[\d.]+).*?Accepted: (?P<accepted>\d+) tokens"
    r".*?Drafted: (?P<drafted>\d+) tokens.*?Per-position acceptance rate: (?P<rates>[\d., ]+\d)"
)
_LLAMA_ROUND = re.compile(r"accepted\s+(?P<kept>\d+)/\s*(?P<drafted>\d+) draft tokens(?! \(restore)")
_LLAMA_LINE = re.compile(
    r"draft acceptance(?: rate)? = [\d.]+ \(\s*(?P<accepted>\d+) accepted /\s*(?P<drafted>\d+) generated\)"
    r"(?:, mean len =\s*(?P<length>[\d.]+))?"
)
_SGLANG_LINE = re.compile(r"Decode batch.*?accept len: (?P<length>[\d.]+)")


def from_log(text: str) -> Counters | None:
    """Counters of all log lines that tell of drafts, summed; None where no line does.

    llama.cpp tells whole requests and, with LLAMA_TRACE, rounds; the rounds are exact and win.
    """
    readers: list[tuple[re.Pattern[str], Callable[[Numbers], Counters]]] = [
        (_VLLM_LINE, _vllm_line),
        (_LLAMA_ROUND, _llama_round),
        (_LLAMA_LINE, _llama_line),
        (_SGLANG_LINE, lambda match: Counters("SGLang", length=float(match["length"]))),
    ]
    for pattern, reader in readers:
        found = summed(reader(match) for match in pattern.finditer(text))
        if found is not None:
            return counted(found)
    return None


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
    offered = tuple(1 for _ in range(drafted))
    return Counters("llama.cpp", 1, drafted, kept, tuple(int(place < kept) for place in range(drafted)), offered)


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
            yield of(found)
            return
        for each in found.values():
            yield from _objects(each, depth - 1)


def _own(found: Mapping) -> Counters:
    """A record of `Counters.as_record`."""
    values: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in found.items()}
    try:
        return Counters(**values)
    except TypeError as error:
        raise EngineError(f"not a record of counters: {error}") from error


def _timings(found: Mapping) -> Counters:
    """llama.cpp's `timings`: the prefill gives one token, each round its kept drafts and one more."""
    accepted, drafted = _whole(found, "draft_n_accepted"), _whole(found, "draft_n")
    generated = found.get("predicted_n")
    rounds = max(0, generated - 1 - accepted) if type(generated) is int else None
    return Counters("llama.cpp", rounds, drafted, accepted)


def _meta_info(found: Mapping) -> Counters:
    """SGLang's `meta_info`; histogram[k]: rounds that kept k drafts."""
    rounds, histogram = _whole(found, "spec_verify_ct"), found.get("spec_accept_histogram") or []
    places = tuple(sum(map(int, histogram[depth:])) for depth in range(1, len(histogram)))
    accepted, drafted = found.get("spec_accept_token_num"), found.get("spec_draft_token_num")
    emitted = found.get("completion_tokens")
    if accepted is None and type(emitted) is int:
        accepted = max(0, emitted - rounds)
    return Counters("SGLang", rounds, drafted, accepted, places)


def _vllm_bench(found: Mapping) -> Counters:
    """`vllm bench serve --save-result`."""
    rounds = _whole(found, "spec_decode_num_drafts")
    rates = found.get("spec_decode_per_position_acceptance_rates") or []
    places = tuple(round(float(rate) * rounds) for rate in rates)
    drafted, accepted = found.get("spec_decode_draft_tokens"), found.get("spec_decode_accepted_tokens")
    return Counters("vLLM", rounds, drafted, accepted, places)


_SHAPES: dict[str, Callable[[Mapping], Counters]] = {
    "per_position_offered": _own,
    "draft_n": _timings,
    "spec_verify_ct": _meta_info,
    "spec_decode_num_drafts": _vllm_bench,
}


def _whole(found: Mapping, name: str) -> int:
    value = found.get(name)
    if type(value) is not int or value < 0:
        raise EngineError(f"{name} = {value!r}; expected a whole number")
    return value


def _parsed(text: str, place: str) -> object:
    """One JSON document, or one a line."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    except RecursionError as error:
        raise EngineError(f"{place}: JSON nested too deeply") from error
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{place}: neither JSON nor lines of JSON: {error}") from error
