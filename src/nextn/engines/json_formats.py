"""Draft counts in JSON: answers of engines, results of benchmarks, and our own records.

The fields are those of llama.cpp and ik_llama.cpp (`timings`), mlx-vlm and its ports (the same, with rounds), MTPLX
(`accepted_by_depth`), SGLang (`meta_info`), vLLM (`metrics.speculative_decoding`, `bench serve --save-result`), AIPerf
(`spec_decode_acceptance`), mlc-llm (`draft_count`) and TensorRT-LLM (`specDecodingStats`).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from nextn.bounded_json import MAX_COUNT, JsonObject, count, optional_count, short_repr, string
from nextn.engines.counters import (
    COUNTS,
    MAX_POSITIONS,
    Counters,
    drafting_rounds,
    fill_in_derived,
    one_round,
    sum_counters,
)
from nextn.engines.log_formats import rollout, trainer_counts
from nextn.engines.metrics_formats import accepted_at_least
from nextn.engines.named_counts import from_record
from nextn.errors import EngineError

BONUS_INCLUDED = "the engine counts the bonus token of each round as accepted: only the tokens per round are compared"
_MAX_ROWS = 10_000
WARM_UP = "counts of a warm-up are among them"
_WARM_UP = re.compile(r"(?i)(?:is[_-]?)?warm[_ -]?up(?:[_ -]?(?:run|request|result)s?)?")


def from_json(document: object) -> Counters | None:
    """Sum the counts of every object in a JSON document that holds an engine's fields; None where none does."""
    counters = sum_counters(objects(document))
    return None if counters is None else fill_in_derived(counters)


def objects(document: object) -> list[Counters]:
    """Return the counts of each object that holds an engine's fields, those in `usage` where there are no others."""
    found = without_warm_ups(list(_objects(document)))
    return [each for each in found if each.source != _PREDICTED] or [each for each in found if each.draft_tokens]


def without_warm_ups(found: list[Counters]) -> list[Counters]:
    """Return the counts that are of no warm-up, or all where there are no others: of one text, not of each document."""
    return [each for each in found if WARM_UP not in each.notes] or found


def _objects(value: object, notes: tuple[str, ...] = ()) -> Iterator[Counters]:
    if isinstance(value, list):
        for item in value:
            yield from _objects(item, notes)
    elif isinstance(value, Mapping):
        name = next((name for name, (key, _) in JSON_READERS.items() if key in value), None)
        if name is None and _rollout_key(value):
            name = _ROLLOUTS
        if name is None and any(str(key).endswith(f"/{_SKYRL}") for key in value):
            name = "SkyRL's draft metrics of a step"
        if any(each is True and _WARM_UP.fullmatch(str(key)) for key, each in value.items()) or any(
            isinstance(each, str) and _WARM_UP.fullmatch(each) for each in value.values()
        ):
            notes = (WARM_UP,)
        if name is not None:
            counters = _checked(name, value)
            yield replace(counters, notes=(*counters.notes, *notes))
            return
        for key, item in value.items():
            yield from _objects(item, (WARM_UP,) if _WARM_UP.fullmatch(str(key)) else notes)


def _checked(name: str, record: JsonObject) -> Counters:
    try:
        counters = JSON_READERS[name][1](record)
        if counters.has_drafts is None and (counts := from_record(record)):  # beside a length
            return counts
        return replace(counters, source=name)
    except (TypeError, ValueError) as error:
        raise EngineError(f"not the draft counts of an engine: {error}; nearest: {name}") from error


def _own(record: JsonObject) -> Counters:
    """A record of `Counters.as_record`, also with what `nextn diagnose` says of it without a model."""
    unknown = sorted(set(record) - set(Counters("").as_record()) - {"finding", "outcome"})
    if unknown or "engine" not in record:
        raise ValueError(f"not a record of counters: it has {short_repr(unknown)}" if unknown else "no engine is named")
    counts = {name: optional_count(record.get(name), name) for name in COUNTS}
    positions = {name: tuple(count(value, name) for value in _list(record, name)) for name in _POSITIONS}
    numbers = {name: _number(record[name], name) for name in ("length", "since") if record.get(name) is not None}
    texts = {
        name: tuple(string(text, name) for text in _list(record, name, maximum=100)) for name in ("notes", "overrides")
    }
    names = {name: string(record.get(name) or "", name, maximum=200) for name in ("source", "version")}
    return Counters(
        string(record["engine"], "engine"), **counts, **positions, **numbers, **texts, **names,  # type: ignore[arg-type]
        k=None if record.get("k") is None else count(record["k"], "k", maximum=MAX_POSITIONS),
    )  # fmt: skip


_POSITIONS = ("per_position", "per_position_offered")


def _list(record: JsonObject, name: str, *, maximum: int = MAX_POSITIONS + 1) -> list[Any]:
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


def _first(record: JsonObject, *names: str) -> int | None:
    """The count under the first of these names that is there: engines rename their fields."""
    name = next((name for name in names if record.get(name) is not None), None)
    return None if name is None else count(record[name], name)


def _histogram(record: JsonObject, *names: str) -> list[int]:
    """[k]: rounds that accepted k drafts; a list, or an object with k as text."""
    name = next((name for name in names if record.get(name)), None)
    if name is None:
        return []
    if isinstance(record[name], Mapping):
        items = {_small(key, name): count(value, name) for key, value in record[name].items()}
        return [items.get(index, 0) for index in range(max(items) + 1)]
    return [count(value, name) for value in _list(record, name)]


def _small(key: object, name: str) -> int:
    text = string(key, name, maximum=10)
    if not text.isascii() or not text.isdigit() or int(text) > MAX_POSITIONS:
        raise ValueError(f"{name} has a key {short_repr(key)}; expected a whole number from 0 to {MAX_POSITIONS}")
    return int(text)


def _timings(record: JsonObject) -> Counters:
    """llama.cpp's `timings`: prefill gives one token, each round its accepted drafts and a bonus token.

    mlx-vlm adds the rounds, ik_llama.cpp both counts by depth. An engine that counts bonus tokens as accepted has as
    many accepted tokens as generated ones.
    """
    accepted, drafted = (count(record.get(name), name) for name in ("draft_n_accepted", "draft_n"))
    rounds = _first(record, "draft_rounds")
    if rounds is not None:
        k = round(drafted / rounds) if rounds else None
        return Counters("mlx-vlm", rounds, drafted, accepted, k=k)
    depths = _list(record, "draft_by_depth")
    if depths:
        offered, kept = (
            tuple(count(depth.get(name), name) for depth in depths) for name in ("draft_n", "draft_n_accepted")
        )
        return Counters("llama.cpp", offered[0], drafted, accepted, kept, offered)
    generated = optional_count(record.get("predicted_n"), "predicted_n")
    if generated is None:
        return Counters("llama.cpp", None, drafted, accepted)
    if drafted and accepted and accepted in (generated, generated - 1):
        return Counters("llama.cpp", None, drafted, None, emitted=accepted, notes=(BONUS_INCLUDED,))
    return Counters("llama.cpp", drafting_rounds(generated - 1, drafted, accepted), drafted, accepted)


def _round_dump(record: JsonObject) -> Counters:
    """A round, of a fork of llama.cpp."""
    return one_round("llama.cpp", *(count(record.get(name), name) for name in ("n_accepted", "n_draft")))


def _speed_bench(record: JsonObject) -> Counters:
    """llama.cpp's speed_bench.py --output: turns of `results` count as requests; the rows of `summary` repeat them."""
    rounds = drafted = accepted = 0
    for result in _list(record, "results", maximum=_MAX_ROWS):
        if not isinstance(result, Mapping):
            raise ValueError(f"results has an entry {short_repr(result)}; expected an object")
        names = ("completion_tokens", "turns", "draft_n", "draft_n_accepted")
        tokens, turns, offered, kept = (count(result.get(name), name) for name in names)
        rounds += drafting_rounds(tokens - turns, offered, kept, num_texts=turns)
        drafted, accepted = drafted + offered, accepted + kept
    return Counters("llama.cpp", rounds, drafted, accepted)


def _by_depth(record: JsonObject) -> Counters:
    """MTPLX: drafts and accepted drafts by depth; each verification is a round."""
    accepted, drafted = (
        tuple(count(value, name) for value in _list(record, name)) for name in ("accepted_by_depth", "drafted_by_depth")
    )
    rounds = _first(record, "verify_calls") or (drafted[0] if drafted else 0)
    return Counters("MTPLX", min(rounds, drafted[0]) if drafted else rounds, sum(drafted), sum(accepted), accepted,
                    drafted)  # fmt: skip


def _meta_info(record: JsonObject) -> Counters:
    """SGLang's `meta_info`; histogram[k]: rounds that accepted k drafts."""
    rounds = count(record.get("spec_verify_ct"), "spec_verify_ct")
    histogram = _histogram(
        record, "spec_correct_drafts_histogram", "spec_accept_histogram", "spec_acceptance_histogram"
    )
    accepted = _first(record, "spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
    drafted = _first(record, "spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
    emitted = _first(record, "completion_tokens", "completion_token_num")
    positions = accepted_at_least(histogram)
    if rounds and not drafted:  # each round has drafts: a trainer that looks for other names writes 0 for both
        accepted, drafted = accepted or None, None
    # The first of completion_tokens comes from prefill, which is no round.
    if accepted is None and (positions or emitted is not None):
        accepted = sum(positions) if positions else max(0, (emitted or 0) - 1 - rounds)
    return Counters("SGLang", rounds, drafted, accepted, positions)


def _vllm_request(record: JsonObject) -> Counters:
    """vLLM's --per-request-spec-decode-metrics, also of `nextn serve`, and the same record of AIPerf."""
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    rounds, drafted, accepted = (count(record.get(name), name) for name in names)
    histogram = _histogram(record, "acceptance_histogram")
    engine = "vLLM" if record.get("engine") in (None, "vllm") else string(record["engine"], "engine", maximum=50)
    return Counters(
        engine, rounds, drafted, accepted, accepted_at_least(histogram), k=_first(record, "num_spec_tokens")
    )


def _pooled_histogram(record: JsonObject) -> Counters:
    """AIPerf's aggregate over a run."""
    histogram = _histogram(record, "pooled_spec_decode_acceptance_histogram")
    accepted = sum(index * rounds for index, rounds in enumerate(histogram))
    return Counters("an engine under AIPerf", sum(histogram), None, accepted, accepted_at_least(histogram))


def _vllm_bench(record: JsonObject) -> Counters:
    """`vllm bench serve --save-result`."""
    rounds = count(record.get("spec_decode_num_drafts"), "spec_decode_num_drafts")
    name = "spec_decode_per_position_acceptance_rates"
    if name not in record and "spec_decode_draft_tokens" not in record:  # of a script, under the names of the metrics
        counters = from_record(record)
        return replace(counters, engine="vLLM") if counters else Counters("vLLM", rounds)
    positions = tuple(round(_number(rate, name, maximum=1) * rounds) for rate in _list(record, name))
    names = ("spec_decode_draft_tokens", "spec_decode_accepted_tokens")
    drafted, accepted = (optional_count(record.get(count_name), count_name) for count_name in names)
    return Counters("vLLM", rounds, drafted, accepted, positions)


def _sglang_bench(record: JsonObject) -> Counters:
    """A line of SGLang's bench_serving --output-file: an acceptance length, no counts."""
    return rollout(_number(record["accept_length"], "accept_length", maximum=MAX_POSITIONS + 1), "SGLang")


def _sglang_state(record: JsonObject) -> Counters:
    """SGLang's /get_server_info: the acceptance length since the start."""
    name = "avg_spec_accept_length"
    return rollout(_number(record[name], name, maximum=MAX_POSITIONS + 1), "SGLang")


def _lm_studio(record: JsonObject) -> Counters:
    """LM Studio's `stats` of a request: draft tokens and accepted ones, no rounds."""
    names = ("total_draft_tokens_count", "accepted_draft_tokens_count")
    drafted, accepted = (count(record.get(name), name) for name in names)
    return Counters("LM Studio", None, drafted, accepted)


def _vllm_mlx(record: JsonObject) -> Counters:
    """vllm-mlx's /v1/status: each attempt drafts `effective_draft_tokens`, and is accepted or rejected as a whole."""
    names = ("attempts", "accepted", "effective_draft_tokens")
    attempts, accepted, k = (count(record.get(name), name) for name in names)
    if k != 1:
        raise ValueError(f"effective_draft_tokens = {k}; what an attempt counts is known for 1 alone")
    return Counters("vllm-mlx", attempts, attempts, accepted, (accepted,), k=k)


def _vllm_mlx_request(record: JsonObject) -> Counters:
    """vllm-mlx's metadata of a request: draft tokens, by one or several a round, and accepted ones."""
    drafted = optional_count(record.get("mtp_drafts"), "mtp_drafts") or 0
    accepted = optional_count(record.get("mtp_accepted"), "mtp_accepted")
    return Counters("vllm-mlx", None, drafted, count(accepted, "mtp_accepted") if drafted else accepted or 0)


def _mlc(record: JsonObject) -> Counters:
    """mlc-llm's engine metrics: step 0 is the trunk's own token of each round, step i its i-th draft."""
    drafted, accepted = (
        tuple(count(value, name) for value in _list(record, name)) for name in ("draft_count", "accept_count")
    )
    if drafted[:1] != accepted[:1] or len(drafted) != len(accepted):
        raise ValueError("draft_count and accept_count differ at step 0, the trunk's own token, or in length")
    return Counters("mlc-llm", drafted[0] if drafted else 0, sum(drafted[1:]), sum(accepted[1:]), accepted[1:],
                    drafted[1:], k=len(drafted) - 1 if drafted else None)  # fmt: skip


def _fastdeploy(record: JsonObject) -> Counters:
    """FastDeploy's `speculate_metrics`: tokens by place in a round, of which the first is the trunk's own."""
    tokens = tuple(count(value, "accepted_tokens_per_head") for value in _list(record, "accepted_tokens_per_head"))
    rounds, k = (tokens[0] if tokens else 0), max(0, len(tokens) - 1)
    return Counters("FastDeploy", rounds, k * rounds, sum(tokens[1:]), tokens[1:], k=k or None)


def _tensorrt(record: JsonObject) -> Counters:
    """An iteration of TensorRT-LLM: one round for each request with draft tokens."""
    names = ("numRequestsWithDraftTokens", "numDraftTokens", "numAcceptedTokens")
    rounds, drafted, accepted = (count(record.get(name), name) for name in names)
    return Counters("TensorRT-LLM", rounds, drafted, accepted)


def _trtllm_bench(record: JsonObject) -> Counters:
    """The `decoding_stats` of trtllm-bench --report_json: an acceptance length, as a mean of the requests."""
    name, lengths = "acceptance_length_percentiles", record["acceptance_length_percentiles"]
    if not isinstance(lengths, Mapping):
        raise ValueError(f"{name} = {short_repr(lengths)}; expected an object")
    return Counters("TensorRT-LLM", length=_number(lengths.get("average"), name, maximum=MAX_POSITIONS + 1))


def _iteration(record: JsonObject) -> Counters:
    """The rows of other ranks repeat rank 0."""
    stats = record.get("specDecodingStats")
    if not isinstance(stats, Mapping) or record.get("attentionDpRank") or record.get("rank"):
        return Counters("TensorRT-LLM", 0, 0, 0)
    return _tensorrt(stats)


_ROLLOUTS = "rollout metrics of trainers"
_SKYRL = "draft_num_draft_tokens"
_PREDICTED = "tabbyAPI's usage"  # of others, OpenAI's own names for what a client predicts: then both are 0


def _rollout_key(record: JsonObject) -> str | None:
    """The key with the acceptance length of a trainer's step, with any group before it, and `/mean` after it or not."""
    keys = (key for key in record if "spec_accept_length" in key and record[key] is not None)
    return next((key for key in keys if re.fullmatch(r"(?:[^:]*/)?spec_accept_length(?:/mean)?", key)), None)


def _trainer(record: JsonObject) -> Counters:
    """A step of training, as a mean of its answers: an acceptance length, also as `rollout/spec_accept_length/mean`."""
    key = _rollout_key(record) or ""
    return rollout(_number(record[key], key, maximum=MAX_POSITIONS + 1))


def _skyrl(record: JsonObject) -> Counters:
    """A step of training: draft tokens and accepted ones, by the last part of a key, as in `vllm/train/draft_...`."""
    values = {key.rpartition("/")[2]: value for key, value in record.items() if isinstance(key, str)}
    drafted, accepted = (int(_number(values.get(name), name)) for name in (_SKYRL, "draft_num_accepted_tokens"))
    length = values.get("draft_mean_acceptance_length")
    rates = [values[name] for k in range(1, MAX_POSITIONS + 1) if (name := f"draft_acceptance_rate_pos_{k}") in values]
    return trainer_counts(
        drafted, accepted, None if length is None else _number(length, "draft_mean_acceptance_length"),
        [_number(rate, "draft_acceptance_rate_pos", maximum=1) for rate in rates],
    )  # fmt: skip


def _swift(record: JsonObject) -> Counters:
    """mlx-swift-lm's metrics of a request: draft tokens and accepted ones, no rounds."""
    drafted, accepted = (count(record.get(name), name) for name in ("proposedDraftTokens", "acceptedDraftTokens"))
    return Counters("mlx-swift-lm", None, drafted, accepted)


def _predicted(record: JsonObject) -> Counters:
    """tabbyAPI's `completion_tokens_details`: accepted and rejected draft tokens, no rounds."""
    names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
    accepted, rejected = (optional_count(record.get(name), name) or 0 for name in names)
    return Counters("tabbyAPI", None, accepted + rejected, accepted)


# Name of the format -> a key by which an object is recognized, and its reader. The first that fits is used.
JSON_READERS: dict[str, tuple[str, Callable[[JsonObject], Counters]]] = {
    "nextn's counters": ("per_position_offered", _own),
    "timings of llama.cpp, ik_llama.cpp or mlx-vlm": ("draft_n", _timings),
    "llama.cpp's speed_bench.py --output": ("selected_samples", _speed_bench),
    "rounds of a fork of llama.cpp": ("pmin_drop", _round_dump),
    "MTPLX's statistics": ("accepted_by_depth", _by_depth),
    "SGLang's meta_info": ("spec_verify_ct", _meta_info),
    "vLLM's or AIPerf's record of a request": ("num_spec_steps", _vllm_request),
    "AIPerf's aggregate": ("pooled_spec_decode_acceptance_histogram", _pooled_histogram),
    "vllm bench serve --save-result": ("spec_decode_num_drafts", _vllm_bench),
    "SGLang's benchmark result": ("accept_length", _sglang_bench),
    "SGLang's server info": ("avg_spec_accept_length", _sglang_state),
    _ROLLOUTS: ("spec_accept_length", _trainer),
    "SkyRL's draft metrics of a step": (_SKYRL, _skyrl),
    "mlx-swift-lm's metrics of a request": ("proposedDraftTokens", _swift),
    _PREDICTED: ("rejected_prediction_tokens", _predicted),
    "LM Studio's statistics": ("accepted_draft_tokens_count", _lm_studio),
    "vllm-mlx's status": ("effective_draft_tokens", _vllm_mlx),
    "vllm-mlx's metadata of a request": ("mtp_drafts", _vllm_mlx_request),
    "mlc-llm's engine metrics": ("draft_count", _mlc),
    "trtllm-bench --report_json": ("acceptance_length_percentiles", _trtllm_bench),
    "FastDeploy's speculate_metrics": ("accepted_tokens_per_head", _fastdeploy),
    "TensorRT-LLM's iteration": ("specDecodingStats", _iteration),
}
