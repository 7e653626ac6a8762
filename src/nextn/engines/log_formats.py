"""Draft counts in what engines and their benchmarks print, whatever a container or a log daemon writes before it.

An entry begins at a marker and has a few fields after it, on the same line or, where people wrap or benchmarks print
tables, on the next ones. Lines are from vLLM 0.6 to 0.33 (v1/spec_decode/metrics.py, benchmarks/serve.py, the offline
example), SGLang 0.5 (observability/scheduler_metrics_mixin.py, bench_serving.py), llama.cpp and ik_llama.cpp
(tools/server/server-context.cpp, common/speculative.cpp, examples/speculative-simple) and TensorRT-LLM's iteration log.
"""

import math
import re
from collections.abc import Callable
from functools import partial

from nextn.engines.counters import (
    ADAPTIVE,
    FULL_SHARE,
    MAX_POSITIONS,
    ROUNDED,
    Counters,
    drafting_rounds,
    one_round,
    with_all_positions,
)
from nextn.engines.general_formats import GENERAL_FORMATS
from nextn.engines.log_format import (
    INT,
    IS,
    LIST,
    NUMBER,
    Fields,
    LogFormat,
    colon,
    equals,
    float_field,
    int_field,
    integer,
    rates_of,
    to_number,
)
from nextn.engines.metrics_formats import accepted_at_least
from nextn.errors import EngineError

HEAD_STATISTICS = "llama.cpp's draft statistics"
_MIN_RATE = 0.2  # by which a length of two decimals shows K
_HALF = 0.005  # of the last digit of a length


def _rounds(accepted: int, drafted: int, length: float | None, k: int = 0) -> int | None:
    """Return the rounds that a printed length shows, or `drafted / k` where it allows that; None where it shows none.

    A length of 1.00 fits any number of rounds if nothing was accepted, and many if a few drafts were.
    """
    if length is None:
        return None
    low = accepted / max(length - 1 + _HALF, _HALF)
    high = accepted / (length - 1 - _HALF) if length - 1 > _HALF else math.inf
    if k and low - 1 <= drafted / k <= high + 1:
        return round(drafted / k)
    return round(accepted / (length - 1)) if length > 1 else None


def _vllm(fields: Fields, engine: str = "vLLM") -> Counters | None:
    """One interval. All rounds draft as many tokens as there are positions, except the last ones before a limit."""
    accepted, drafted = (integer(fields[name][0]) for name in ("Accepted", "Drafted"))
    length = float_field(fields, "Mean acceptance length")
    if not fields.get("Per-position acceptance rate"):
        if length is not None and length <= 1 and accepted > _HALF * drafted:
            return None  # the two contradict each other
        return Counters(engine, _rounds(accepted, drafted, length), drafted, accepted, notes=(ROUNDED,))
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


def _mlx_vlm(fields: Fields) -> Counters:
    drafts = float_field(fields, "avg draft") or 0.0
    k = round(drafts) if 1 <= drafts <= MAX_POSITIONS and drafts == round(drafts) else None
    return Counters("mlx-vlm", length=1 + (float_field(fields, "accepted/round") or 0.0), k=k)


def _mlx_vlm_text(fields: Fields) -> Counters:
    """The tokens of a round include its bonus token."""
    rounds, drafts = int_field(fields, "rounds") or 0, float_field(fields, "avg draft")
    accepted = max(0, round(((float_field(fields, "accepted tokens") or 0.0) - 1) * rounds))
    return Counters("mlx-vlm", rounds, None if drafts is None else round(drafts * rounds), accepted, notes=(ROUNDED,))


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
_OLLAMA = ("iterations", "drafted", "accepted", "max_draft")
_MLXCEL = ("rounds", "proposed", "accepted")
_MLX_SERVE = ("attempts", "drafted", "accepts")
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
    rounds = _rounds(accepted, drafted, float_field(fields, "mean len"), len(rates))
    positions = tuple(round(rate * rounds) for rate in rates) if rounds else ()
    return Counters("llama.cpp", rounds, drafted, accepted, positions, notes=(ROUNDED,) if rounds else ())


def _llama_bench(fields: Fields) -> Counters:
    """A request's tokens are one of prefill and, of each round, its accepted drafts and a bonus token."""
    emitted, drafted, accepted = (int_field(fields, name) or 0 for name in ("pred", "draft", "acc"))
    return Counters("llama.cpp", drafting_rounds(emitted - 1, drafted, accepted) if drafted else 0, drafted, accepted)


def _atom(fields: Fields) -> Counters:
    """Totals, and the share of rounds by number of accepted drafts, 0 to K."""
    accepted, drafted = (integer(count) for count in fields["Accepted/Total Draft tokens"][0].split("/"))
    shares = [float(share) / 100 for share in re.findall(r"([0-9.]{1,6})%", fields["Accepted tokens distribution"][0])]
    k = len(shares) - 1
    rounds = round(drafted / k) if k > 0 else None
    positions = tuple(round(sum(shares[place:]) * (rounds or 0)) for place in range(1, k + 1))
    return Counters("ATOM", rounds, drafted, accepted, positions, k=k or None, notes=(ROUNDED,))


def _native_mtp(fields: Fields) -> Counters:
    """A request. [n]: rounds that accepted n drafts; `rejected` counts rounds, not drafts."""
    depth, active = (int_field(fields, name) for name in ("depth", "activeDepth"))
    found = {
        int(key): int(count) for key, count in re.findall(r"([0-9]{1,9}):([0-9]{1,15})", fields["acceptedByDepth"][0])
    }
    if max([*found, depth or 0]) > MAX_POSITIONS:
        message = f"a line of vMLX has a depth above {MAX_POSITIONS}: depth={depth}, {fields['acceptedByDepth'][0]:.60}"
        raise EngineError(message)
    histogram = [found.get(accepted, 0) for accepted in range(max([*found, depth or 0]) + 1)]
    rounds, accepted = sum(histogram), sum(index * count for index, count in enumerate(histogram))
    is_fixed = depth is not None and active in (None, depth)
    drafted, notes = (depth * rounds, ()) if depth is not None and is_fixed else (None, (ADAPTIVE,))
    return Counters("vMLX", rounds, drafted, accepted, accepted_at_least(histogram), notes=notes, k=depth)


def _omlx(fields: Fields) -> Counters:
    """A request: accepted and draft tokens, and its rounds; dK: accepted and tested drafts of depth K."""
    accepted, drafted = (integer(part) for part in fields["accepted/drafted"][0].split("/"))
    size, depths = int_field(fields, "block_size"), fields.get("depth", [])[:MAX_POSITIONS]
    rounds = int_field(fields, "rounds") if size else int(depths[0].split("/")[1]) if depths else None
    k = size - 1 if size and size - 1 <= MAX_POSITIONS else None
    return Counters("oMLX", rounds, drafted, accepted, tuple(int(depth.split("/")[0]) for depth in depths), k=k)


def _shares(fields: Fields) -> Counters | None:
    rates, length = rates_of(fields["rates"][0]), float_field(fields, "Mean acceptance length")
    shares = [rate / 100 for rate in rates] if max(rates) > 1 else rates
    return Counters("vLLM", length=1 + sum(shares) if length is None else length, k=len(rates))


def _ollama(fields: Fields) -> Counters:
    """A request; rounds that drafted nothing are iterations, too, so AL is of all of them."""
    rounds, drafted, accepted, k = (int_field(fields, name) or 0 for name in _OLLAMA)
    notes = () if drafted >= FULL_SHARE * rounds * k else (ADAPTIVE,)
    return Counters("Ollama", rounds, drafted, accepted, k=k or None, notes=notes)


def _counts_of(
    engine: str, rounds: str = "", drafted: str = "", accepted: str = "", *, length: str = "", k: str = ""
) -> Callable[[Fields], Counters]:
    """Return the reader of an entry with these fields."""
    return lambda fields: Counters(
        engine, int_field(fields, rounds), int_field(fields, drafted), int_field(fields, accepted),
        length=float_field(fields, length), k=int_field(fields, k),
    )  # fmt: skip


def _lightllm(fields: Fields) -> Counters:
    """A request; older versions print no counts but its tokens, of which each round gives some."""
    emitted, rounds, accepted = (int_field(fields, name) for name in _LIGHTLLM)
    length = max(1.0, float_field(fields, "mtp_avg_token_per_step") or 1.0)
    rounds = round((emitted or 0) / length) if rounds is None else rounds
    accepted = max(0, (emitted or 0) - rounds) if accepted is None else accepted
    return Counters("LightLLM", rounds, None, accepted, notes=() if accepted else (NO_MTP,))


def trainer_counts(drafted: int, accepted: int, length: float | None, rates: list[float]) -> Counters:
    """A step of SkyRL's, of all requests; positions as shares of rounds."""
    rounds = round(drafted / len(rates)) if rates else _rounds(accepted, drafted, length)
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


def _spec_bench(fields: Fields) -> Counters:
    """A task; positions are shares of its rounds."""
    rounds, accepted, drafted = (int(count) for count in re.findall(r"[0-9]+", fields["rounds, accepted/drafted"][0]))
    rates = [rate / 100 for text in fields["pos accept"] for rate in rates_of(text)][:MAX_POSITIONS]
    positions = tuple(round(rate * rounds) for rate in rates)
    return Counters("ik_llama.cpp", rounds, drafted, accepted, positions, notes=(ROUNDED,) if rates else ())


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
        "llama.cpp's speculative examples", "n_drafted", r"(?<!\w)n_draft\s+=",
        {name: rf"(?<!\w){name}\s*=\s*({INT})" for name in ("n_draft", "n_drafted", "n_accept")},
        ("n_drafted", "n_accept"), _counts_of("llama.cpp", "", "n_drafted", "n_accept", k="n_draft"),
        "the run: K, drafted and accepted tokens; no rounds", num_lines=8, is_run=True,
    ),
    LogFormat(
        "table of llama.cpp's mtp-bench.py", "pred=", r"(?<!\w)pred=",
        {name: rf"(?<!\w){name}=\s*({INT})" for name in ("pred", "draft", "acc")}, ("pred", "draft", "acc"),
        _llama_bench, "a request: generated, draft and accepted tokens", is_run=True,
    ),
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
        _counts_of("SGLang", length="Accept length"), "the run: tokens per round with bonus token; no counts",
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
    LogFormat(
        "mlx-vlm's speculative decoding", "accepted tokens", rf"Speculative decoding: (?={NUMBER} accepted tokens)",
        {"accepted tokens": rf"({NUMBER}) accepted tokens", "rounds": rf"over ({INT}) rounds",
         "avg draft": rf"avg draft ({NUMBER})"},
        ("accepted tokens", "rounds"), _mlx_vlm_text,
        "a text: rounds, and draft and accepted tokens by their means", num_lines=2,
    ),
    LogFormat(
        "mlx-vlm's accepted drafts per round", " accepted/round", rf"(?<![0-9.,]){NUMBER} accepted/round",
        {"accepted/round": rf"({NUMBER}) accepted/round", "avg draft": rf"avg draft:? ({NUMBER})"},
        ("accepted/round",), _mlx_vlm, "a text: accepted drafts per round; no counts",
    ),
    LogFormat(
        "TensorRT-LLM's iteration log", "specDecodingStats", r"specDecodingStats",
        {name: rf"{name}['\"]?\s*:\s*({INT})"
         for name in _TENSORRT},
        _TENSORRT, _counts_of("TensorRT-LLM", *_TENSORRT),
        "an iteration: draft tokens, accepted drafts, and requests with drafts, each of which is a round",
    ),
    LogFormat(
        "table of TensorRT-LLM's benchmark_serving", "Decoded Tokens per Iter:", r"Mean Avg Decoded Tokens per Iter:",
        colon("Mean Avg Decoded Tokens per Iter"), ("Mean Avg Decoded Tokens per Iter",),
        _counts_of("TensorRT-LLM", length="Mean Avg Decoded Tokens per Iter"),
        "the run, as a mean of its requests: tokens per round with bonus token; no counts", is_run=True,
    ),
    LogFormat(
        "report of trtllm-bench", "[AL] AVERAGE", r"\[AL\] AVERAGE",
        {"[AL] AVERAGE": rf"\[AL\] AVERAGE\s*:\s*({NUMBER})"}, ("[AL] AVERAGE",),
        _counts_of("TensorRT-LLM", length="[AL] AVERAGE"),
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
        "vMLX's NativeMTP line", "[NativeMTP]", r"\[NativeMTP\]",
        {**{name: rf"(?<!\w){name}=({INT})" for name in ("depth", "activeDepth")},
         "acceptedByDepth": r"acceptedByDepth=(none|[0-9:,]{1,999})"},
        ("depth", "acceptedByDepth"), _native_mtp, "a request: rounds by their number of accepted drafts",
    ),
    LogFormat(
        "oMLX's stats of a request", "mtp stats:", r"(?<!\w)\w*mtp stats:",
        {**{name: rf"(?<!\w){name}=({INT})" for name in ("rounds", "block_size")},
         "accepted/drafted": r"(?<!\w)accepted=([0-9]{1,15}/[0-9]{1,15})"},
        ("rounds", "accepted/drafted", "block_size"), _omlx, "a request: rounds, draft tokens and accepted drafts",
        num_lines=3,
    ),
    LogFormat(
        "oMLX's MTP line", "depth[d1=", r"(?<!\w)MTP\[[0-9]{1,9}\](?=[^\n]{0,200}depth\[d1=)",
        {"accepted/drafted": r"(?<!\w)accept=([0-9]{1,15}/[0-9]{1,15})",
         "depth": r"(?<!\w)d[0-9]{1,3}=([0-9]{1,15}/[0-9]{1,15})"},
        ("accepted/drafted", "depth"), _omlx, "a request: draft tokens, and accepted and tested drafts by depth",
    ),
    LogFormat(
        "AIPerf's Spec Decode table", "Token-Weighted Acceptance Length", r"Token-Weighted Acceptance Length",
        {"Token-Weighted Acceptance Length": rf"Token-Weighted Acceptance Length\s*[|│┃]?\s*({NUMBER})"},
        ("Token-Weighted Acceptance Length",),  # by its tokens, so that all rounds weigh alike
        _counts_of("an engine under AIPerf", length="Token-Weighted Acceptance Length"),
        "the run: tokens per round with bonus token; no counts", is_run=True,
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
        {"a.len": rf"% *[|] *({NUMBER})/"}, ("a.len",), _counts_of("ik_llama.cpp", length="a.len"),
        "a task: tokens per round with bonus token; no counts", is_run=True,
    ),
    LogFormat(
        "Ollama's speculative decode stats", "speculative decode stats", r"(?<!\w)speculative decode stats\"(?= [a-z])",
        equals(*_OLLAMA), _OLLAMA, _ollama,
        "a request: iterations (also those without drafts), draft tokens and accepted ones",
    ),
    LogFormat(
        "mlx-serve's spec-stats", "[spec-stats]", r"\[spec-stats\] mode=mtp\b", equals(*_MLX_SERVE), _MLX_SERVE,
        _counts_of("mlx-serve", *_MLX_SERVE),
        "a request: rounds, which it calls attempts, draft tokens and accepted ones",
    ),
    LogFormat(
        "mlx-serve's line of a decoding", "/attempt", rf"(?<!\w)(?:mtp|drafter) accept=(?={INT}/{INT} attempts)",
        {"accepted": rf"accept=({INT})/", "rounds": rf"accept={INT}/({INT})"}, ("accepted", "rounds"),
        _counts_of("mlx-serve", "rounds", accepted="accepted"),
        "a request: accepted draft tokens and rounds, which it calls attempts",
    ),
    LogFormat(
        "mistral.rs' interval", "MTP accept", rf"MTP accept(?= {NUMBER}% \(len {NUMBER}\))",
        {"length": rf"\(len ({NUMBER})\)", "rate": rf"accept ({NUMBER})%"}, ("length", "rate"), _mistralrs,
        "an interval: tokens per round with bonus token, and a rate, which shows K; no counts",
    ),
    LogFormat(
        "mlxcel's MTP acceptance", "[MTP acceptance:", r"\[MTP acceptance:", equals(*_MLXCEL), _MLXCEL,
        _counts_of("mlxcel", *_MLXCEL),
        "a run: rounds, draft tokens and accepted drafts", is_run=True,
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
