"""Draft counts in what engines and their benchmarks print, whatever a container or a log daemon writes before it.

An entry begins at a marker and has a few fields after it, on the same line or, where people wrap or benchmarks print
tables, on the next ones. Lines are from vLLM 0.6 to 0.33 (v1/spec_decode/metrics.py, benchmarks/serve.py, the offline
example), SGLang 0.5 (observability/scheduler_metrics_mixin.py, bench_serving.py) and TensorRT-LLM's iteration log;
those of llama.cpp and of engines on MLX are in files of their own.
"""

import re
from functools import partial

from nextn.engines.counters import (
    MAX_POSITIONS,
    ROUNDED,
    Counters,
    with_all_positions,
)
from nextn.engines.general_formats import GENERAL_FORMATS
from nextn.engines.llama_formats import LLAMA_FORMATS
from nextn.engines.log_format import (
    HALF,
    INT,
    IS,
    LIST,
    NUMBER,
    Fields,
    LogFormat,
    colon,
    counts_of,
    float_field,
    int_field,
    integer,
    rates_of,
    rounds_by_length,
    to_number,
)
from nextn.engines.mlx_formats import MLX_FORMATS

_MIN_RATE = 0.2  # by which a length of two decimals shows K


def _vllm(fields: Fields, engine: str = "vLLM") -> Counters | None:
    """One interval. All rounds draft as many tokens as there are positions, except the last ones before a limit."""
    accepted, drafted = (integer(fields[name][0]) for name in ("Accepted", "Drafted"))
    length = float_field(fields, "Mean acceptance length")
    if not fields.get("Per-position acceptance rate"):
        if length is not None and length <= 1 and accepted > HALF * drafted:
            return None  # the two contradict each other
        return Counters(engine, rounds_by_length(accepted, drafted, length), drafted, accepted, notes=(ROUNDED,))
    rates = rates_of(fields["Per-position acceptance rate"][0])
    rounds = round(drafted / len(rates))
    if length and accepted and abs(1 + accepted / max(rounds, 1) - length) > 0.02:
        rounds = round(accepted / max(length - 1, 1e-9))
    positions = tuple(round(rate * rounds) for rate in rates)
    return with_all_positions(Counters(engine, rounds, drafted, accepted, positions, notes=(ROUNDED,)))


def _vllm_v0(fields: Fields) -> Counters:
    """vLLM before 0.8: accepted counts tokens behind a rejected one, too; emitted tokens show those that were kept."""
    k, drafted, emitted = (
        integer(fields[f"Number of {name} tokens"][0]) for name in ("speculative", "draft", "emitted")
    )
    rounds = round(drafted / max(1, k))
    return Counters("vLLM", rounds, drafted, max(0, emitted - rounds), k=k)


def _table(fields: Fields) -> Counters | None:
    """The console table of `vllm bench serve`, and what vLLM's offline example prints: shares of all rounds."""
    drafts, drafted, accepted, length = (
        int_field(fields, "Drafts"), int_field(fields, "Draft tokens"), int_field(fields, "Accepted tokens"),
        float_field(fields, "Acceptance length"),
    )  # fmt: skip
    percent, shares = fields.get("Position", []), fields.get("acceptance at token", [])
    rates = [to_number(rate) / 100 for rate in percent] or [to_number(rate) for rate in shares]
    if drafts is None and drafted and rates:
        drafts = round(drafted / len(rates))
    if drafts is None and accepted and length and length > 1:
        drafts = round(accepted / (length - 1))
    if drafts is None:
        return None if length is None else Counters("vLLM", length=length, k=len(rates) or None)
    if accepted is None and length is not None:
        accepted = round((length - 1) * drafts)
    positions = tuple(min(drafts, round(rate * drafts)) for rate in rates[:MAX_POSITIONS])
    counters = Counters("vLLM", drafts, drafted, accepted, positions, notes=(ROUNDED,) if rates else ())
    return with_all_positions(counters)


def _sglang_answer(fields: Fields) -> Counters | None:
    """One answer, of which the first token is prefill's; the length is tokens / rounds."""
    tokens, length = to_number(fields["Tokens"][0]), float_field(fields, "Acc Length") or 0.0
    rounds = round(tokens / length) if length >= 1 else 0
    return Counters("SGLang", rounds, None, max(0, int(tokens) - 1 - rounds)) if rounds else None


def rollout(length: float, engine: str = "") -> Counters:
    """A step of a trainer, or an engine, as a mean of its answers; 0.0 is of one without drafts."""
    if length < 1:
        return Counters(engine or _TRAINER, 0, 0, 0, notes=() if engine else (STEPS_WITHOUT_DRAFTS,))
    return Counters(engine or _TRAINER, length=length, notes=(RENAMED,) if length == 1 and not engine else ())


def _lmdeploy_totals(fields: Fields) -> Counters:
    k, rounds, drafted, accepted = (int_field(fields, name) for name in _LMDEPLOY_TOTALS)
    rates = rates_of(fields["per_position_acceptance_rate"][0]) if fields["per_position_acceptance_rate"] else []
    positions = tuple(round(rate * (rounds or 0)) for rate in rates[:MAX_POSITIONS])
    return Counters("LMDeploy", rounds, drafted, accepted, positions, k=k, notes=(ROUNDED,) if rates else ())


def _mistralrs(fields: Fields) -> Counters:
    length, rate = float_field(fields, "length") or 0.0, (float_field(fields, "rate") or 0.0) / 100
    k = round((length - 1) / rate) if rate > _MIN_RATE else None
    return Counters("mistral.rs", length=length, k=k if k and k <= MAX_POSITIONS else None)


def _sglang(fields: Fields) -> Counters | None:
    """One interval; 0.00 is of one without a round, as of an idle rank, since each round gives a token."""
    engine, name = ("TokenSpeed", "avg_accept_len") if fields["avg_accept_len"] else ("SGLang", "accept len")
    length = float_field(fields, name) or 0.0
    return Counters(engine, length=length) if length >= 1 else None


_LMDEPLOY_TOTALS = ("num_spec_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
# Of verl, slime and others, which read per-request counts by name.
_TRAINER = "a trainer's rollouts"
STEPS_WITHOUT_DRAFTS = "steps with an acceptance length below 1, as of answers without drafts, are left out of the mean"
RENAMED = (
    "1.0 is also what a trainer reports that does not find the counts of its engine: SGLang has renamed them twice "
    "(0.5.11, 0.5.12); compare the engine's own log"
)
NO_MTP = "without an accepted draft, LightLLM prints the same as without MTP: check that it was on"
_TENSORRT = ("numRequestsWithDraftTokens", "numDraftTokens", "numAcceptedTokens")
_SKYRL = ("draft_num_draft_tokens", "draft_num_accepted_tokens", "draft_mean_acceptance_length",
          "draft_acceptance_rate_pos")  # fmt: skip
_LIGHTLLM = ("out_token_counter", "mtp_total_verify_steps", "mtp_accepted_token_num")
_FINISH = ("spec_accept_token_num", "spec_draft_token_num", "total")  # and their other names


def _sglang_finish(fields: Fields) -> Counters:
    rounds = int_field(fields, "spec_verify_ct") or 0
    accepted, drafted, emitted = (int_field(fields, name) for name in _FINISH)
    if accepted is None and emitted is not None:  # of which the first token is prefill's
        accepted = max(0, emitted - 1 - rounds)
    return Counters("SGLang", rounds, drafted, accepted)


def _atom(fields: Fields) -> Counters:
    """Totals, and the share of rounds by number of accepted drafts, 0 to K."""
    accepted, drafted = (integer(count) for count in fields["Accepted/Total Draft tokens"][0].split("/"))
    shares = [float(share) / 100 for share in re.findall(r"([0-9.]{1,6})%", fields["Accepted tokens distribution"][0])]
    k = len(shares) - 1
    rounds = round(drafted / k) if k > 0 else None
    positions = tuple(round(sum(shares[place:]) * (rounds or 0)) for place in range(1, k + 1))
    return Counters("ATOM", rounds, drafted, accepted, positions, k=k or None, notes=(ROUNDED,))


def _shares(fields: Fields) -> Counters | None:
    rates, length = rates_of(fields["rates"][0]), float_field(fields, "Mean acceptance length")
    shares = [rate / 100 for rate in rates] if max(rates) > 1 else rates
    return Counters("vLLM", length=1 + sum(shares) if length is None else length, k=len(rates))


def _lightllm(fields: Fields) -> Counters:
    """A request; older versions print no counts but its tokens, of which each round gives some."""
    emitted, rounds, accepted = (int_field(fields, name) for name in _LIGHTLLM)
    length = max(1.0, float_field(fields, "mtp_avg_token_per_step") or 1.0)
    rounds = round((emitted or 0) / length) if rounds is None else rounds
    accepted = max(0, (emitted or 0) - rounds) if accepted is None else accepted
    return Counters("LightLLM", rounds, None, accepted, notes=() if accepted else (NO_MTP,))


def trainer_counts(drafted: int, accepted: int, length: float | None, rates: list[float]) -> Counters:
    """A step of SkyRL's, of all requests; positions as shares of rounds."""
    rounds = round(drafted / len(rates)) if rates else rounds_by_length(accepted, drafted, length)
    positions = tuple(round(rate * (rounds or 0)) for rate in rates[:MAX_POSITIONS])
    return Counters(_TRAINER, rounds, drafted, accepted, positions)


def _skyrl(fields: Fields) -> Counters | None:
    if fields["draft_num_draft_tokens"][1:]:  # of which step each count is cannot be known
        return None
    drafted, accepted = (
        int_field(fields, name) or 0 for name in ("draft_num_draft_tokens", "draft_num_accepted_tokens")
    )
    length = float_field(fields, "draft_mean_acceptance_length")
    return trainer_counts(drafted, accepted, length, list(map(to_number, fields["draft_acceptance_rate_pos"])))


_VLLM_FIELDS = {
    **colon("Mean acceptance length"), "Accepted": rf"(?:Accepted|accepted tokens):\s*({INT})(?: tokens|,)",
    "Drafted": rf"(?:Drafted|draft tokens):\s*({INT})(?: tokens|,)",
    "Per-position acceptance rate": rf"Per-position acceptance rate:\s*\[?({LIST})",
}  # fmt: skip
# The first format that a log has is read; another is named in a note, as both count the same rounds.
LOG_FORMATS: tuple[LogFormat, ...] = (
    LogFormat(
        "table of vllm bench serve", "Acceptance length:", r"(?<![\w-])(?<!/s, )Acceptance length:",
        {**colon("Acceptance length"), **colon("Drafts", "Draft tokens", "Accepted tokens", value=INT),
         "Position": rf"(?<![\w-])Position [0-9]{{1,3}}:\s+({NUMBER})"},
        ("Acceptance length",), _table,
        "rounds, draft tokens and accepted drafts of the run; positions in per cent of all rounds; AL with bonus token",
        num_lines=10 + MAX_POSITIONS, is_run=True,
    ),
    LogFormat(
        "vLLM's offline example", "num_drafts:", r"(?<!\w)num_drafts:",
        {"Drafts": rf"num_drafts:\s*({INT})", "Draft tokens": rf"num_draft_tokens:\s*({INT})",
         "Accepted tokens": rf"num_accepted_tokens:\s*({INT})",
         "Acceptance length": rf"mean acceptance length:\s*({NUMBER})",
         "acceptance at token": rf"acceptance at token [0-9]{{1,3}}:\s*({NUMBER})"},
        ("Drafts", "Accepted tokens"), _table,
        "rounds, draft tokens and accepted drafts of the run; positions as shares of all rounds",
        num_lines=10 + MAX_POSITIONS, is_run=True,
    ),
    LogFormat(
        "LMDeploy's SpecDecoding metrics", "SpecDecoding metrics: Draft",
        r"SpecDecoding metrics:(?= Draft acceptance rate: [0-9]{1,3}\.[0-9]{2}%, Mean )", _VLLM_FIELDS,
        ("Accepted", "Drafted"), partial(_vllm, engine="LMDeploy"),
        "accepted and draft tokens of an interval; positions as shares of all rounds",
    ),
    LogFormat(
        "LMDeploy's SpeculativeDecodingStats", "SpeculativeDecodingStats(", r"SpeculativeDecodingStats\(",
        {**{name: rf"(?<!\w){name}=({INT})" for name in _LMDEPLOY_TOTALS},
         "per_position_acceptance_rate": rf"per_position_acceptance_rate=({LIST})"},
        _LMDEPLOY_TOTALS, _lmdeploy_totals, "rounds, draft tokens and accepted drafts; positions as shares of rounds",
    ),
    LogFormat(
        "vLLM's SpecDecoding metrics", " metrics:",
        r"SpecDecoding metrics:|Speculative metrics:(?= Draft acceptance rate: [0-9.]+, Number of acc)",  # 0.8.0
        _VLLM_FIELDS, ("Accepted", "Drafted"), _vllm,
        "accepted and draft tokens of an interval; positions as shares of all rounds; AL = 1 + accepted / rounds",
        num_lines=5,
    ),
    LogFormat(
        "vLLM's Speculative metrics (before 0.8)", "Speculative metrics:", r"Speculative metrics:",
        {name: rf"{name}:\s*({INT})" for name in (
            "Number of speculative tokens", "Number of draft tokens", "Number of emitted tokens")},
        ("Number of speculative tokens", "Number of draft tokens", "Number of emitted tokens"), _vllm_v0,
        "since the start: draft tokens, and emitted tokens with one bonus token per round", is_cumulative=True,
    ),
    *LLAMA_FORMATS,
    LogFormat(
        "SGLang's Decode batch", " batch", r"Decode (?:rank )?batch",
        {"accept len": rf"accept[ _]len:\s*({NUMBER})", "avg_accept_len": rf"avg_accept_len:\s*({NUMBER})"},
        ("accept len",), _sglang,
        "an interval, of TokenSpeed, too: tokens per round with bonus token, and a rate, which shows K; no counts",
    ),
    LogFormat(
        "SGLang's Finish line", "spec_verify_ct", r"'meta_info':",
        {name: rf"'(?:{names})':\s*({INT})" for name, names in zip(("spec_verify_ct", *_FINISH), (
            "spec_verify_ct", "spec_num_correct_drafts|spec_accepted_drafts|spec_accept_token_num",
            "spec_num_proposed_drafts|spec_proposed_drafts|spec_draft_token_num", "completion_tokens"), strict=True)},
        ("spec_verify_ct",), _sglang_finish, "a request: rounds, draft tokens and accepted drafts",
    ),
    LogFormat(
        "table of SGLang's bench_serving", " length:", r"(?<![\w-])Accept length:|(?<=/s, )Acceptance length:",
        {"Accept length": rf"Accept(?:ance)? length:\s*({NUMBER})"}, ("Accept length",),
        counts_of("SGLang", length="Accept length"), "the run: tokens per round with bonus token; no counts",
        is_run=True,
    ),
    LogFormat(
        "table of SGLang's send_one", "Acc Length", r"[|] *Latency \(s\)(?=[^\n]{0,80}Acc Length)",
        {"Tokens": rf"[|] *{NUMBER} *[|] *([0-9]{{1,9}}) *[|]",
         "Acc Length": rf"[|] *{NUMBER} *[|] *[0-9]{{1,9}} *[|] *({NUMBER}) *[|]"},
        ("Tokens", "Acc Length"), _sglang_answer, "an answer: all of its tokens, and rounds by their length",
        num_lines=4,
    ),
    LogFormat(
        "rollout metrics of verl, slime, miles and TRL", "spec_accept_length",
        r"(?<!\w)(?:avg_)?spec_accept_length(?!/(?!mean))",
        {"spec_accept_length": rf"spec_accept_length(?:/mean)?{IS}({NUMBER})", "of SGLang": "(avg_)spec"},
        ("spec_accept_length",),
        lambda fields: rollout(to_number(fields["spec_accept_length"][0]), "SGLang" * bool(fields["of SGLang"])),
        "a step of training, as a mean of its answers: tokens per round with bonus token; no counts",
    ),
    *MLX_FORMATS,
    LogFormat(
        "TensorRT-LLM's iteration log", "specDecodingStats", r"specDecodingStats",
        {name: rf"{name}['\"]?\s*:\s*({INT})"
         for name in _TENSORRT},
        _TENSORRT, counts_of("TensorRT-LLM", *_TENSORRT),
        "an iteration: draft tokens, accepted drafts, and requests with drafts, each of which is a round",
    ),
    LogFormat(
        "table of TensorRT-LLM's benchmark_serving", "Decoded Tokens per Iter:", r"Mean Avg Decoded Tokens per Iter:",
        colon("Mean Avg Decoded Tokens per Iter"), ("Mean Avg Decoded Tokens per Iter",),
        counts_of("TensorRT-LLM", length="Mean Avg Decoded Tokens per Iter"),
        "the run, as a mean of its requests: tokens per round with bonus token; no counts", is_run=True,
    ),
    LogFormat(
        "report of trtllm-bench", "[AL] AVERAGE", r"\[AL\] AVERAGE",
        {"[AL] AVERAGE": rf"\[AL\] AVERAGE\s*:\s*({NUMBER})"}, ("[AL] AVERAGE",),
        counts_of("TensorRT-LLM", length="[AL] AVERAGE"),
        "the run, as a mean of its requests: tokens per round with bonus token; no counts", is_run=True,
    ),
    LogFormat(
        "ATOM's MTP Stats", "MTP Stats", r"\[MTP Stats *\]",
        {"Accepted/Total Draft tokens": r"Accepted/Total Draft tokens: ([0-9]{1,15}/[0-9]{1,15})",
         "Accepted tokens distribution": r"Accepted tokens distribution: \{([^}\n]{1,999})\}"},
        ("Accepted/Total Draft tokens", "Accepted tokens distribution"), _atom,
        "since the start: accepted and draft tokens, and rounds by their number of accepted drafts", is_cumulative=True,
    ),
    LogFormat(
        "AIPerf's Spec Decode table", "Token-Weighted Acceptance Length", r"Token-Weighted Acceptance Length",
        {"Token-Weighted Acceptance Length": rf"Token-Weighted Acceptance Length\s*[|│┃]?\s*({NUMBER})"},
        ("Token-Weighted Acceptance Length",),  # by its tokens, so that all rounds weigh alike
        counts_of("an engine under AIPerf", length="Token-Weighted Acceptance Length"),
        "the run: tokens per round with bonus token; no counts", is_run=True,
    ),
    LogFormat(
        "mistral.rs' interval", "MTP accept", rf"MTP accept(?= {NUMBER}% \(len {NUMBER}\))",
        {"length": rf"\(len ({NUMBER})\)", "rate": rf"accept ({NUMBER})%"}, ("length", "rate"), _mistralrs,
        "an interval: tokens per round with bonus token, and a rate, which shows K; no counts",
    ),
    LogFormat(
        "LightLLM's line of a request", "mtp_avg_token_per_step:", r"(?<!\w)out_token_counter:",
        colon(*_LIGHTLLM, value=INT) | {"mtp_avg_token_per_step": r"mtp_avg_token_per_step:([0-9]+(?:\.[0-9]+)?)"},
        ("out_token_counter", "mtp_avg_token_per_step"), _lightllm, "a request: tokens, rounds and accepted drafts",
    ),
    LogFormat(
        "SkyRL's draft metrics", "draft_num_draft_tokens",
        r"(?m:^)(?=[^\n]*(?<![a-z])draft_num_draft_tokens['\"]?[:=] ?[0-9])",
        {name: rf"{name}(?:_[0-9]{{1,3}})?['\"]?[:=] ?({NUMBER})" for name in _SKYRL},
        ("draft_num_draft_tokens", "draft_num_accepted_tokens"), _skyrl,
        "a step of training: draft and accepted tokens; positions as shares of rounds",
    ),
    LogFormat(
        "vLLM's SpecDecoding metrics without their beginning", "Accepted:",
        rf"(?:Accepted throughput:[^:]{{0,60}}(?:Drafted throughput:[^:]{{0,60}})?)?Accepted:(?=\s*{INT} tokens,\s+D)",
        _VLLM_FIELDS, ("Accepted", "Drafted"), _vllm,
        "accepted and draft tokens of an interval; positions as shares of all rounds", num_lines=5, is_general=True,
    ),
    LogFormat(
        "vLLM's acceptance without counts", "er-position acceptance rate:",
        r"(?:Mean acceptance length:(?:[^\n]{0,200}\n){0,2}?[^\n]{0,200}?)?Per-position acceptance rate:",
        {**colon("Mean acceptance length"), "rates": rf"Per-position acceptance rate:\s*\[?({LIST})"},
        ("rates",), _shares, "an interval: tokens per round with bonus token; no counts",
        num_lines=3, is_general=True,
    ),
    *GENERAL_FORMATS,
)  # fmt: skip
