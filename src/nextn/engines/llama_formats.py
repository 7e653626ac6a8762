"""Draft counts in the logs of llama.cpp and ik_llama.cpp, and in what their examples and benchmarks print.

Lines are from tools/server/server-context.cpp, common/speculative.cpp and examples/speculative-simple.
"""

import re

from nextn.engines.counters import MAX_POSITIONS, ROUNDED, Counters, drafting_rounds, one_round
from nextn.engines.log_format import (
    INT,
    LIST,
    NUMBER,
    Fields,
    LogFormat,
    counts_of,
    float_field,
    int_field,
    integer,
    rates_of,
    rounds_by_length,
)
from nextn.engines.named_counts import copied_error

HEAD_STATISTICS = "llama.cpp's draft statistics"


def _llama_round(fields: Fields) -> Counters:
    accepted, drafted = (int(count) for count in fields["accepted/drafted"][0].replace(" ", "").split("/"))
    return one_round("llama.cpp", accepted, drafted)


def _llama_statistics(fields: Fields) -> Counters:
    """Totals of one drafter. Drafts accepted in part or whole are the rounds that accepted the first position."""
    names = ("#gen drafts", "#acc drafts", "#gen tokens", "#acc tokens")
    rounds, first, drafted, accepted = (integer(fields[name][0]) for name in names)
    rates = rates_of(fields["#acc rate/pos"][0]) if fields.get("#acc rate/pos") else []
    if drafted == 2 * rounds:
        positions: tuple[int, ...] = (first, max(0, accepted - first))
    else:
        positions = tuple(round(rate * rounds) for rate in rates[:MAX_POSITIONS])
    return Counters("llama.cpp", rounds, drafted, accepted, positions, notes=(ROUNDED,) if len(positions) > 2 else ())


def _llama_request(fields: Fields) -> Counters:
    accepted, drafted = (integer(part.strip()) for part in fields["accepted / generated"][0].split("accepted /"))
    rates = [rate for text in fields.get("acceptance rate per position", []) for rate in rates_of(text)][:MAX_POSITIONS]
    rounds = rounds_by_length(accepted, drafted, float_field(fields, "mean len"), len(rates))
    positions = tuple(round(rate * rounds) for rate in rates) if rounds else ()
    return Counters("llama.cpp", rounds, drafted, accepted, positions, notes=(ROUNDED,) if rounds else ())


def _example(fields: Fields) -> Counters:
    """The end of llama-speculative-simple and its like; llama-lookup, which copies drafts, has a time of its own."""
    if fields["copied"]:
        raise copied_error(fields["copied"][0])
    return counts_of("llama.cpp", "", "n_drafted", "n_accept", k="n_draft")(fields)


def _llama_bench(fields: Fields) -> Counters:
    """A request's tokens are one of prefill and, of each round, its accepted drafts and a bonus token."""
    emitted, drafted, accepted = (int_field(fields, name) or 0 for name in ("pred", "draft", "acc"))
    return Counters("llama.cpp", drafting_rounds(emitted - 1, drafted, accepted) if drafted else 0, drafted, accepted)


def _spec_bench(fields: Fields) -> Counters:
    """A task; positions are shares of its rounds."""
    rounds, accepted, drafted = (int(count) for count in re.findall(r"[0-9]+", fields["rounds, accepted/drafted"][0]))
    rates = [rate / 100 for text in fields["pos accept"] for rate in rates_of(text)][:MAX_POSITIONS]
    positions = tuple(round(rate * rounds) for rate in rates)
    return Counters("ik_llama.cpp", rounds, drafted, accepted, positions, notes=(ROUNDED,) if rates else ())


LLAMA_FORMATS: tuple[LogFormat, ...] = (
    LogFormat(
        "llama.cpp's rounds (trace output)", " draft tokens",
        r"(?<!\w)accepted(?= +[0-9]+/ *[0-9]+ draft tokens(?! \(restore))",
        {"accepted/drafted": r" +([0-9]{1,9}/ *[0-9]{1,9}) draft tokens"}, ("accepted/drafted",), _llama_round,
        "every round: accepted of drafted tokens",
    ),
    LogFormat(
        HEAD_STATISTICS, "#gen drafts", r"statistics\s+(?:draft-)?mtp\S*:",
        {**{name: rf"{name}\s*=\s*({INT})" for name in ("#gen drafts", "#acc drafts", "#gen tokens", "#acc tokens")},
         "#acc rate/pos": rf"#acc rate/pos\s*=\s*\(({LIST})\)"},
        ("#gen drafts", "#acc drafts", "#gen tokens", "#acc tokens"), _llama_statistics,
        "since the start, of the MTP drafter alone: rounds, rounds with the first draft accepted, drafted, accepted",
        is_cumulative=True,
    ),
    LogFormat(
        "llama.cpp's draft acceptance", "draft acceptance", r"draft acceptance(?: rate)? =",
        {"accepted / generated": rf"\(\s*({INT} accepted /\s*{INT}) generated\)",
         "mean len": rf"mean (?:len|acceptance length)\s*=\s*({NUMBER})",
         "acceptance rate per position": rf"acceptance rate per position\s*=\s*\(({LIST})\)"},
        ("accepted / generated",), _llama_request,
        "a request: accepted and drafted tokens of all its drafters; mean length with bonus token, in newer builds",
    ),
    LogFormat(
        "llama.cpp's changes of an adaptive depth", " adaptive ", r"accept: adaptive (?:draft depth|n) ",
        {"draft acceptance": r"(?!)()"}, ("draft acceptance",), lambda fields: None,
        "rounds after which K changed: no sample of all, so a line with `draft acceptance` is needed",
    ),
    LogFormat(
        "KoboldCpp's draft results", "Draft Results", r"Draft Results - Success:",
        {"rounds that accepted all drafts": r"(?!)()"}, ("rounds that accepted all drafts",), lambda fields: None,
        "accepted drafts, and rounds in which one was rejected: those that accepted all are missing, so K and AL, too",
    ),
    LogFormat(
        "llama.cpp's speculative examples", "n_drafted", r"(?<!\w)n_draft\s+=",
        {name: rf"(?<!\w){name}\s*=\s*({INT})" for name in ("n_draft", "n_drafted", "n_accept")}
        | {"copied": r"(?<!\w)(t_draft_flat) "},
        ("n_drafted", "n_accept"), _example,
        "the run: K, drafted and accepted tokens; no rounds", num_lines=8, is_run=True,
    ),
    LogFormat(
        "table of llama.cpp's mtp-bench.py", "pred=", r"(?<!\w)pred=",
        {name: rf"(?<!\w){name}=\s*({INT})" for name in ("pred", "draft", "acc")}, ("pred", "draft", "acc"),
        _llama_bench, "a request: generated, draft and accepted tokens", is_run=True,
    ),
    LogFormat(
        "rows of ik_llama.cpp's llama-spec-bench", "a.len |", r"[|] *(?:draft-)?mtp *[|]",
        {"rounds, accepted/drafted": r"[|] *([0-9]{1,9} *[|] *[0-9]{1,12}/[0-9]{1,12}) *[|]",
         "pos accept": rf"[|]((?: +{NUMBER}%){{1,64}}) *[|]?$"},
        ("rounds, accepted/drafted",), _spec_bench,
        "a task: rounds, draft tokens and accepted drafts; positions as shares of its rounds", is_run=True,
    ),
    LogFormat(
        "table of ik_llama.cpp's llama-spec-bench", "a.len mean", r"[|] *(?:draft-)?mtp *[|]",
        {"a.len": rf"% *[|] *({NUMBER})/"}, ("a.len",), counts_of("ik_llama.cpp", length="a.len"),
        "a task: tokens per round with bonus token; no counts", is_run=True,
    ),
)  # fmt: skip
