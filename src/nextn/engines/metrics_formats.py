"""Draft counts in the Prometheus text of engines' /metrics.

vLLM, llama.cpp and nextn share one schema with a prefix each, so any other exporter with these names is read, too. The
names of the others are from SGLang (srt/observability/metrics_collector.py), TensorRT-LLM (metrics/collector.py), ATOM
(entrypoints/openai/metrics), text-generation-inference (router/src/infer) and forks of llama.cpp.
"""

import csv
import re
from dataclasses import replace
from itertools import accumulate

from nextn.bounded_json import MAX_COUNT, short_repr
from nextn.engines.counters import (
    COPIED,
    FIRST_TOKENS,
    MAX_POSITIONS,
    Counters,
    Series,
    added_note,
    fill_in_derived,
    parse_series,
    sum_series,
)
from nextn.engines.named_counts import from_record, is_copied, role_of
from nextn.errors import EngineError
from nextn.text_format import docs_page, some

# Lines by which a text is recognized as metrics. `sglang_1  | ` before a line of a log is Docker's.
METRICS_LINE = re.compile(
    r"^[ \t>|]{0,20}(?:[0-9]{1,6}[:-])?(?:# (?:TYPE|HELP) )?"
    r"(?:[a-zA-Z_]\w*:[a-zA-Z_]\w*|(?:trtllm|tgi|lightllm|maxserve|(?:ray_(?:serve_)?)?sglang)_\w++(?! +\|)|"
    # Names without an exporter are those of settings, too.
    r"\w{0,80}?spec(?:ulative)?_(?:decode_)?(?:num_)?(?:drafts|draft_tokens_|accept(?:s|ed|ance)_)\w{0,80}+"
    r"(?=[^\n]* [0-9][0-9.e+]*[ \t\r]*$))"
    r"(?:\{[^\n]*\}|_?\w*)? [^\n]*$",
    re.M,
)
# Exporters such as OpenTelemetry's and Ray's write _ for the colon.
_UNDERSCORE = re.compile(r"(?:ray_(?:serve_)?)?(vllm|sglang|llamacpp|atom)_(?=[a-z])")
# A table of Grafana or of a query: a column a series, or a row a value.
SERIES_TABLE = re.compile(
    r'\A\ufeff?"?(?:time|timestamp|date|metric|series)"?[,;\t](?=(?s:.{0,20000}?)(?:spec_decode_num_|[:_]spec_accept_))',
    re.I,
)
_SERIES_NAME = re.compile(
    r"(?P<name>[a-zA-Z_][\w:]*+)(?:\{(?P<labels>[^{}]*+)\})?|"
    r'\{(?:__name__|name)="(?P<label>[\w:]++)"(?:, *+)?(?P<others>[^{}]*+)\}'
)
_REPR = re.compile(
    r"(?:Counter|Vector)\(name='([\w:]{1,200})', labels=\{([^{}\n]{0,4000})\}, "
    r"values?=([0-9.e+]{1,40}|\[[0-9, ]{0,4000}\])\)"
)
_SHARED = re.compile(r"(?:(?P<prefix>[a-zA-Z_]\w*?)[:_])?spec_decode_num_drafts(?:_total)?")
_ENGINES = {"vllm": "vLLM", "llamacpp": "llama.cpp", "lmdeploy": "LMDeploy", "nextn": "nextn"}
_CACHE_HITS = (
    "vllm:prefix_cache_hits",
    "nextn:prefix_cache_hits",
    "llamacpp:prompt_tokens_cached",
    "sglang:cached_tokens",
)
# Engine, and its series of draft tokens and of accepted ones, the first that it has of each.
_TOKENS = (
    ("TensorRT-LLM", ("trtllm_spec_decode_num_draft_tokens",), ("trtllm_spec_decode_num_accepted_tokens",)),
    ("llama.cpp", ("llamacpp:n_drafted", "llamacpp:n_draft"),
     ("llamacpp:n_drafted_accepted", "llamacpp:n_draft_accepted", "llamacpp:n_accepted")),
    ("Rapid-MLX", ("rapid_mlx_spec_decode_attempts",), ("rapid_mlx_spec_decode_accepts",)),
)  # fmt: skip
_POSITION_LABELS = ("position", "pos")
_LIGHTLLM = "lightllm_request_mtp_avg_token_per_step"
_MAX = re.compile(r"maxserve_spec_decode_acceptance_rate_per_position(?:_percent)?_(sum|count)")
_PROCESS_LABELS = ("model_name", "instance", "engine", "dp_rank")
_REQUIRED = {"vllm": "vllm:spec_decode_num_drafts", "llamacpp": "llamacpp:spec_decode_num_drafts",
             "sglang": "sglang:spec_accept_length", "trtllm": "trtllm_spec_decode_num_draft_tokens",
             "tgi": "tgi_request_skipped_tokens", "nextn": "nextn:spec_decode_num_drafts"}  # fmt: skip
# Engines whose other series with such names count something else: vLLM before 0.8 drafts behind a rejected one, too.
_KNOWN = _REQUIRED.keys() - {"llamacpp"}
METRICS_FORMAT = "Prometheus metrics"
REPEATED = "series are there more than once: the last reading is taken, which includes the earlier ones"
OF_REQUESTS = "the length is a mean of requests, each weighted alike"
OF_BATCHES = "the length is of shares by position, as means of batches"
# The part of a series' name that says what it counts, without the name of the exporter.
_OF_DRAFTS = re.compile(r"(?<![a-z])(?:mtp|nextn|spec|speculative|draft|drafts|drafted)_.*$")
_DRAFT_COUNTER = re.compile(r"^(?!.*(?:rate|len|mean|avg|_created)).*(?:drafts|draft_tokens|accepted)")
_PER_POSITION = re.compile(r"_per_pos(?:ition)?$")
METRICS_COUNTED = (  # engine, series, what is counted; for the documentation
    ("vLLM, llama.cpp, nextn, any prefix", "`*:spec_decode_num_drafts`, `..._draft_tokens`, `..._accepted_tokens`, "
     "`..._accepted_tokens_per_pos`", "rounds, draft tokens, accepted drafts, rounds that accepted each position"),
    ("SGLang", "`sglang:spec_verify_calls_total`, `sglang:generation_tokens_total`; `sglang:spec_accept_length`",
     "rounds and all tokens, the first of each request included; a gauge of the last interval's AL"),
    ("TensorRT-LLM", "`trtllm_spec_decode_num_draft_tokens_total`, `..._accepted_tokens_total`",
     "draft tokens and accepted drafts; rounds follow from K"),
    ("ATOM", "`atom:mtp_draft_tokens_total`, `atom:mtp_accepted_tokens_total`, `atom:mtp_decode_steps_total`",
     "draft tokens, accepted drafts, rounds by their number of accepted drafts"),
    ("text-generation-inference", "`tgi_request_skipped_tokens`", "steps (prefills too) and their accepted drafts"),
    ("LightLLM", "`lightllm_request_mtp_avg_token_per_step`", "requests by their tokens per round; no counts"),
    ("MAX", "`maxserve_spec_decode_acceptance_rate_per_position`",
     "batches by the share of their rounds that accepted a position; no counts"),
    ("Rapid-MLX", "`rapid_mlx_spec_decode_attempts_total`, `..._accepts_total`", "draft tokens and accepted drafts"),
    ("others", "`*_draft_tokens`, `*_draft_tokens_accepted`, `*_drafts`, in any order of these words",
     "draft tokens, accepted drafts and rounds, by name"),
    ("forks of llama.cpp", "`llamacpp:n_drafted_total`, `llamacpp:n_drafted_accepted_total`",
     "draft tokens and accepted drafts; rounds follow from K"),
)  # fmt: skip


class NoDraftCountersError(EngineError):
    """The metrics have no counts of drafts: they are of something else, or a few lines of a log look like them."""


def from_metrics(text: str, *, model: str | None = None) -> Counters:
    """Parse the counters of /metrics, summed over engines and ranks; with `model`, those of one served model.

    Raises NoDraftCountersError where there are none, EngineError where they contradict each other.
    """
    samples, is_repeated = _last_reading([
        replace(sample, name=_UNDERSCORE.sub(r"\1:", sample.name, count=1))
        for sample in parse_series(text, model=model)
    ])  # fmt: skip
    readers = (_from_shared_schema, _from_sglang, _from_tokens, _from_atom, _from_tgi, _from_lightllm, _from_max,
               _from_names)  # fmt: skip
    if (
        is_repeated
        and len(hosts := {*re.findall(r"(?m)^[$>#% ]{0,4}curl [^\n]{0,200}?https?://([\w.:-]{1,200})", text)}) > 1
    ):
        raise EngineError(f"readings of several servers ({some(sorted(hosts))}); give those of one alone")
    for reader in readers:
        counters = reader(samples)
        if counters is not None:
            parts = {name: part for name, each in _processes(samples).items() if (part := reader(each)) is not None}
            notes = (*counters.notes, *added_note(parts), *((REPEATED,) if is_repeated else ()))
            return fill_in_derived(replace(counters, source=METRICS_FORMAT, notes=notes))
    like = sorted({sample.name for sample in samples if re.search("spec|draft|accept|mtp", sample.name)})
    if like and not _nearest(samples):
        raise NoDraftCountersError(
            f"the metrics have series of drafts, such as {some(like)}, and nextn does not know what they count; give "
            f"the engine's log or JSON: {docs_page('reference/counter-formats')}"
        )
    raise NoDraftCountersError(
        f"the metrics have no draft counters{_nearest(samples)}: MTP is off, or the engine is too old; turn MTP on or "
        "update the engine"
    )


def _last_reading(samples: list[Series]) -> tuple[list[Series], bool]:
    """The last of each series, and whether some are there more than once.

    Raises EngineError where counters of drafts fell: they are of several servers, or of one that was started again.
    """
    last: dict[tuple[str, object], Series] = {}
    is_repeated = False
    for sample in samples:
        key = (sample.name, tuple(sorted(sample.labels.items())))
        before = last.get(key)
        is_counted = _DRAFT_COUNTER.search(sample.name) is not None
        if before is not None and is_counted and sample.value < before.value:
            raise EngineError(
                f"{sample.name} is {before.value:g}, then {sample.value:g}: readings of several servers, or of one "
                "that was started again; give one of them, or a label (`instance`) to those of each server"
            )
        is_repeated |= before is not None and is_counted
        last[key] = sample
    return [*last.values()], is_repeated


def table_as_metrics(text: str) -> str:
    """Return a table of series over time as Prometheus text: the last value of each.

    Raises EngineError for text that is no table.
    """
    lines = text.removeprefix("\ufeff").splitlines()
    rows = csv.reader(lines, delimiter=max(",;\t", key=lines[0].count))
    last: dict[str, str] = {}
    try:
        columns = [_series(cell) for cell in next(rows)]
        for row in rows:
            own = next(filter(None, map(_series, row)), "")
            values = [(own, row[-1])] if own else zip(columns, row, strict=False)
            last |= {name: value for name, value in values if name and value}
    except csv.Error as error:
        raise EngineError(f"not a table of series: line {rows.line_num}: {error}") from error
    return "\n".join(f"{name} {value}" for name, value in last.items())


def repr_as_metrics(text: str) -> str:
    """Return what vLLM's LLM.get_metrics() prints as Prometheus text; "" for another text."""
    lines = []
    for name, labels, values in _REPR.findall(text):
        own = [f'{key}="{value}"' for key, value in re.findall(r"'(\w{1,99})': '([^'\n\"\\]{0,999})'", labels)]
        for position, value in enumerate(re.findall(r"[0-9.e+]+", values)):
            place = [f'position="{position}"'] if values.startswith("[") else []
            lines.append(f"{name}{{{','.join([*own, *place])}}} {value}")
    return "\n".join(lines)


def _series(cell: str) -> str:
    """A cell that names a series, as Prometheus writes it; "" for another."""
    match = _SERIES_NAME.fullmatch(cell)
    name = "" if match is None else match["name"] or match["label"]
    return f"{name}{{{match['labels'] or match['others'] or ''}}}" if match and re.search("[:_]", name) else ""


def _processes(samples: list[Series]) -> dict[str, list[Series]]:
    """The series of each model, server and rank, by the labels in which they differ."""
    values = {label: {sample.labels.get(label) for sample in samples} - {None} for label in _PROCESS_LABELS}
    differ = [label for label, found in values.items() if len(found) > 1]
    parts: dict[str, list[Series]] = {}
    for sample in samples:
        own = ", ".join(f"{label} {sample.labels[label]}" for label in differ if label in sample.labels)
        parts.setdefault(own, []).append(sample)
    return parts


def _nearest(samples: list[Series]) -> str:
    """The engine whose metrics these are, and the counter that is missing."""
    prefixes = [_prefix(sample.name) for sample in samples]
    known = next((prefix for prefix in prefixes if prefix in _REQUIRED), None)
    return f" (they are of {known}, and {_REQUIRED[known]} is missing)" if known else ""


def _prefix(name: str) -> str:
    return re.split("[:_]", name, maxsplit=1)[0]


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


def _from_shared_schema(samples: list[Series]) -> Counters | None:
    """Counters of vLLM's schema, with any prefix."""
    match = next((match for sample in samples if (match := _SHARED.fullmatch(sample.name))), None)
    if match is None:
        return None
    prefix = match[0].removesuffix("_total").removesuffix("drafts")
    num_drafts, tokens, accepted = (
        _counter(samples, prefix + name) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    per_position = _by_label(samples, f"{prefix}accepted_tokens_per_pos", *_POSITION_LABELS)
    since = [sample.value for sample in samples if sample.name == f"{prefix}drafts_created"]
    engine = _ENGINES.get(match["prefix"] or "", match["prefix"] or "an engine")
    copied = _counter(samples, "nextn:copy_num_drafts")
    notes = (f"{copied:,} {COPIED}",) if copied else ()
    return Counters(
        engine, num_drafts, tokens, accepted, per_position, since=sum(since) if since else None, notes=notes
    )


def _from_sglang(samples: list[Series]) -> Counters | None:
    """SGLang counts rounds and tokens; its gauge has the acceptance length of the last log interval."""
    rounds, length = _counter(samples, "sglang:spec_verify_calls"), _mean(samples, "sglang:spec_accept_length")
    if rounds is None and length is None:
        return None
    steps = _mean(samples, "sglang:spec_num_steps")
    k = None if steps is None else round(steps)
    tokens = _counter(samples, "sglang:generation_tokens")
    if rounds is None or tokens is None:
        return Counters("SGLang", rounds, length=length, k=k)
    accepted = max(0, tokens - rounds)
    return Counters("SGLang", rounds, None, accepted, emitted=tokens, length=length, notes=(FIRST_TOKENS,), k=k)


def _from_tokens(samples: list[Series]) -> Counters | None:
    """Draft and accepted tokens; rounds, which a fork of llama.cpp counts, follow from K in others."""
    for engine, *names in _TOKENS:
        drafted, accepted = (
            next((value for name in each if (value := _counter(samples, name)) is not None), None) for each in names
        )
        if drafted is not None and accepted is not None:
            return Counters(engine, _counter(samples, "llamacpp:n_verify_steps"), drafted, accepted)
    return None


def _from_atom(samples: list[Series]) -> Counters | None:
    """Decode steps by the number of accepted drafts, which is a histogram of rounds."""
    drafted, accepted = (_counter(samples, f"atom:mtp_{name}_tokens") for name in ("draft", "accepted"))
    if drafted is None:
        return None
    histogram = _by_label(samples, "atom:mtp_decode_steps", "accepted_tokens")
    return Counters("ATOM", sum(histogram) or None, drafted, accepted, accepted_at_least(histogram))


def _from_tgi(samples: list[Series]) -> Counters | None:
    """The histogram of speculated tokens per step; prefills are steps without one."""
    accepted, steps = (_counter(samples, f"tgi_request_skipped_tokens_{part}") for part in ("sum", "count"))
    if accepted is None or steps is None:
        return None
    note = "the count includes one step without drafts for each request: AL is slightly too low"
    return Counters("text-generation-inference", steps, None, accepted, notes=(note,))


def _from_lightllm(samples: list[Series]) -> Counters | None:
    """A histogram of requests by their tokens per step."""
    total, requests = sum_series(samples, f"{_LIGHTLLM}_sum"), sum_series(samples, f"{_LIGHTLLM}_count")
    return Counters("LightLLM", length=total / requests, notes=(OF_REQUESTS,)) if total and requests else None


def _from_max(samples: list[Series]) -> Counters | None:
    """A histogram of batches for each position, by the share of their rounds that accepted it, in per cent."""
    sums: dict[int, dict[str, float]] = {}
    for sample in samples:
        match = _MAX.fullmatch(sample.name)
        label = next((label for label in _POSITION_LABELS if label in sample.labels), None)
        if match and label is not None:
            own = sums.setdefault(_index(sample.labels[label]), {})
            own[match[1]] = own.get(match[1], 0.0) + sample.value
    if not sums or not all(own.get("count") for own in sums.values()):
        return None
    rates = [own.get("sum", 0.0) / own["count"] / 100 for own in sums.values()]
    return Counters("MAX", length=1 + sum(rates), notes=(OF_BATCHES,), k=max(sums) + 1)


def _from_names(samples: list[Series]) -> Counters | None:
    """Counters of any exporter, by their names without it: those of the first that has draft and accepted tokens."""
    exporters: dict[str, dict[str, float]] = {}
    positions: dict[str, list[Series]] = {}
    for sample in samples:
        name = sample.name.removesuffix("_total")
        match = _OF_DRAFTS.search(name)
        if match is None or is_copied([name]) or _prefix(name) in _KNOWN:
            continue
        prefix = name[: match.start()].rstrip("_:")
        if _PER_POSITION.search(name):
            positions.setdefault(prefix, []).append(replace(sample, name="positions"))
        else:
            own = exporters.setdefault(prefix, {})
            own[match[0]] = own.get(match[0], 0.0) + sample.value
    for prefix, counts in exporters.items():
        by_position = _by_label(positions.get(prefix, []), "positions", *_POSITION_LABELS)
        counts = {name: value for name, value in counts.items() if role_of(name)}  # without gauges of an interval
        counters = from_record({**counts, "accepted_per_pos": list(by_position)})
        if counters is not None:
            return replace(counters, engine=prefix or counters.engine)
    return None


def accepted_at_least(histogram: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    """Convert [k]: rounds that accepted k drafts, to [j]: rounds that accepted position j + 1."""
    return tuple(accumulate(reversed(histogram[1:])))[::-1]


def _by_label(samples: list[Series], name: str, *labels: str) -> tuple[int, ...]:
    """The sums of one counter by a label that is an index, the first of these names that it has."""
    by_index: dict[int, list[Series]] = {}
    for sample in samples:
        label = next((label for label in labels if label in sample.labels), None)
        if sample.name.removesuffix("_total") == name and label is not None:
            by_index.setdefault(_index(sample.labels[label]), []).append(sample)
    return tuple(_counter(by_index.get(index, []), name) or 0 for index in range(max(by_index, default=-1) + 1))


def _index(label: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", label) or int(label) >= MAX_POSITIONS:
        raise EngineError(f"the metrics count a position {short_repr(label)}; expected one of 0 to {MAX_POSITIONS - 1}")
    return int(label)


def _counter(samples: list[Series], name: str) -> int | None:
    """The sum of one counter as a whole number; None where it is missing."""
    value = sum_series(samples, name)
    if value is not None and not 0 <= value <= MAX_COUNT:
        raise EngineError(f"{name} = {value:g}; expected a count from 0 to {MAX_COUNT}")
    return None if value is None else round(value)


def _mean(samples: list[Series], name: str) -> float | None:
    values = [sample.value for sample in samples if sample.name == name and 0 < sample.value <= MAX_POSITIONS]
    return sum(values) / len(values) if values else None
