"""Draft counts in the logs of engines on MLX: mlx-vlm, vMLX, oMLX, mlx-serve, mlxcel and Ollama's runner."""

import re

from nextn.engines.counters import ADAPTIVE, FULL_SHARE, MAX_POSITIONS, ROUNDED, Counters
from nextn.engines.log_format import (
    INT,
    NUMBER,
    Fields,
    LogFormat,
    counts_of,
    equals,
    float_field,
    int_field,
    integer,
)
from nextn.engines.metrics_formats import accepted_at_least
from nextn.errors import EngineError

_OLLAMA = ("iterations", "drafted", "accepted", "max_draft")
_MLXCEL = ("rounds", "proposed", "accepted")
_MLX_SERVE = ("attempts", "drafted", "accepts")


def _mlx_vlm(fields: Fields) -> Counters:
    drafts = float_field(fields, "avg draft") or 0.0
    k = round(drafts) if 1 <= drafts <= MAX_POSITIONS and drafts == round(drafts) else None
    return Counters("mlx-vlm", length=1 + (float_field(fields, "accepted/round") or 0.0), k=k)


def _mlx_vlm_text(fields: Fields) -> Counters:
    """The tokens of a round include its bonus token."""
    rounds, drafts = int_field(fields, "rounds") or 0, float_field(fields, "avg draft")
    accepted = max(0, round(((float_field(fields, "accepted tokens") or 0.0) - 1) * rounds))
    return Counters("mlx-vlm", rounds, None if drafts is None else round(drafts * rounds), accepted, notes=(ROUNDED,))


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
    tested = int(depths[0].split("/")[1]) if depths else None  # a cycle may test no draft
    rounds = int_field(fields, "rounds") or tested or int_field(fields, "cycles")
    k = size - 1 if size and size - 1 <= MAX_POSITIONS else None
    return Counters("oMLX", rounds, drafted, accepted, tuple(int(depth.split("/")[0]) for depth in depths), k=k)


def _mlxcel_loop(fields: Fields) -> Counters:
    """A run; the accepted drafts are a rate of those that were proposed. The block is the one asked for, not K."""
    rounds, drafted = int_field(fields, "rounds"), int_field(fields, "proposed_tokens") or 0
    return Counters("mlxcel", rounds, drafted, round((float_field(fields, "acceptance_rate") or 0.0) * drafted))


def _ollama(fields: Fields) -> Counters:
    """A request; rounds that drafted nothing are iterations, too, so AL is of all of them."""
    rounds, drafted, accepted, k = (int_field(fields, name) or 0 for name in _OLLAMA)
    notes = () if drafted >= FULL_SHARE * rounds * k else (ADAPTIVE,)
    return Counters("Ollama", rounds, drafted, accepted, k=k or None, notes=notes)


MLX_FORMATS: tuple[LogFormat, ...] = (
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
        "oMLX's MTP line", "MTP[", r"(?<!\w)MTP\[[0-9]{1,9}\](?=[^\n]{0,200}(?<!\w)accept=[0-9])",
        {"accepted/drafted": r"(?<!\w)accept=([0-9]{1,15}/[0-9]{1,15})", "cycles": rf"(?<!\w)cycles=({INT})",
         "depth": r"(?<!\w)d[0-9]{1,3}=([0-9]{1,15}/[0-9]{1,15})"},
        ("accepted/drafted",), _omlx,
        "a request: draft tokens, cycles, each of which is a round, and accepted and tested drafts by depth",
    ),
    LogFormat(
        "Ollama's speculative decode stats", "speculative decode stats", r"(?<!\w)speculative decode stats\"(?= [a-z])",
        equals(*_OLLAMA), _OLLAMA, _ollama,
        "a request: iterations (also those without drafts), draft tokens and accepted ones",
    ),
    LogFormat(
        "mlx-serve's spec-stats", "[spec-stats]", r"\[spec-stats\] mode=mtp\b", equals(*_MLX_SERVE), _MLX_SERVE,
        counts_of("mlx-serve", *_MLX_SERVE),
        "a request: rounds, which it calls attempts, draft tokens and accepted ones",
    ),
    LogFormat(
        "mlx-serve's line of a decoding", "/attempt", rf"(?<!\w)(?:mtp|drafter) accept=(?={INT}/{INT} attempts)",
        {"accepted": rf"accept=({INT})/", "rounds": rf"accept={INT}/({INT})"}, ("accepted", "rounds"),
        counts_of("mlx-serve", "rounds", accepted="accepted"),
        "a request: accepted draft tokens and rounds, which it calls attempts",
    ),
    LogFormat(
        "mlxcel's MTP acceptance", "[MTP acceptance:", r"\[MTP acceptance:", equals(*_MLXCEL), _MLXCEL,
        counts_of("mlxcel", *_MLXCEL),
        "a run: rounds, draft tokens and accepted drafts", is_run=True,
    ),
    LogFormat(
        "mlxcel's round-loop diagnostics", "MTP round-loop diagnostics", "MTP round-loop diagnostics",
        {**equals("rounds", "proposed_tokens"), "acceptance_rate": r"(?<!\w)acceptance_rate=([01](?:\.[0-9]{1,9})?)"},
        ("rounds", "proposed_tokens", "acceptance_rate"), _mlxcel_loop,
        "a run: rounds, draft tokens and the share of these that was accepted", num_lines=3, is_run=True,
    ),
)  # fmt: skip
