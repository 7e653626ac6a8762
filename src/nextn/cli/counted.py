"""`nextn diagnose` without a model: what an engine counted, and what that alone shows. Imports no torch."""

import shlex
from pathlib import Path

import typer

from nextn.checkpoint.safetensors_file import write_json
from nextn.cli.screen import print_json, print_lines, shown
from nextn.engines.counters import Counters
from nextn.stats.intervals import wilson_interval

_LEAST_RATE = 0.2  # at the first depth: published rates are 0.5 and more
_MAX_USUAL_K = 16


def show_counts(
    counters: Counters, num_speculative_tokens: int | None, engine: str, *, out: Path | None, as_json: bool
) -> None:
    """Print the counts, what they show and what to do next; exit with 1 for a finding, else with 3."""
    k = num_speculative_tokens or counters.k or len(counters.per_position) or None
    found = _finding(counters, k)
    record = {"outcome": "failed" if found else "inconclusive", "finding": found, **counters.as_record(), "k": k}
    if out is not None:
        write_json(out, record)
    if as_json:
        print_json(record)
        raise typer.Exit(1 if found else 3)
    print_lines(_counted(counters, k), f"finding: {found}" if found else f"not compared: {_without_model(counters, k)}")
    for number, step in enumerate(_next_steps(engine, k), 1):
        print_lines(f"{'next, cheapest first' if number == 1 else ''}  {number}. {step}")
    print_lines(*(f"note: {shown(note)}" for note in counters.notes))
    raise typer.Exit(1 if found else 3)


def _counted(counters: Counters, k: int | None) -> str:
    parts = [f"K = {k}"] if k else []
    if counters.num_drafts is not None:
        parts.append(f"{counters.num_drafts:,} rounds with drafts")
    if counters.accepted is not None:
        drafted = "" if counters.draft_tokens is None else f" of {counters.draft_tokens:,}"
        share = f" ({counters.accepted / counters.draft_tokens:.1%})" if counters.draft_tokens else ""
        parts.append(f"{counters.accepted:,}{drafted} draft tokens accepted{share}")
    if counters.mean_length is not None:
        parts.append(f"mean acceptance length {counters.mean_length:.2f}")
    if counters.num_drafts and counters.per_position:
        rates = counters.acceptance().rates
        parts.append(", ".join(f"a_{depth} = {rate:.2f}" for depth, rate in enumerate(rates, 1) if rate == rate))
    return f"{' '.join(filter(None, (counters.engine, counters.version)))}: {'; '.join(parts)}"


def _finding(counters: Counters, k: int | None) -> str:
    """What the counts show without the model; empty if nothing."""
    if counters.overrides:
        return f"the acceptance is not the head's own, by {', '.join(map(shown, counters.overrides))}"
    if counters.has_drafts is False:
        return "nothing was drafted: MTP is off, or no request was sent"
    # Where positions or rounds are not counted, at most so many first drafts were accepted, of at least so many.
    accepted = counters.per_position[0] if counters.per_position else counters.accepted
    rounds = counters.num_drafts or (counters.draft_tokens or 0) / (k or _MAX_USUAL_K)
    if accepted is None or wilson_interval(min(accepted, rounds), rounds)[1] >= _LEAST_RATE:
        return ""
    high = wilson_interval(min(accepted, rounds), rounds)[1]
    return (
        f"at most {high:.1%} of the first drafts of rounds are accepted (95 %), less than of any head that is loaded "
        "and run as it was trained: its tensors are missing, unset or another head's, or another convention is "
        "applied to them"
    )


def _without_model(counters: Counters, k: int | None) -> str:
    reason = "only the model shows which acceptance its head should give"
    if counters.draft_tokens and not counters.num_drafts and k is None:
        return f"{reason}; how many tokens a round drafts (K) is not in these counts: give -k"
    if counters.mean_length is not None and counters.mean_length < 1 + _LEAST_RATE and not counters.draft_tokens:
        return (
            f"{reason}; a length near 1 says that almost no draft is accepted, but these counts do not say of how many"
        )
    return reason


def _next_steps(engine: str, k: int | None) -> list[str]:
    address, given = "HOST:PORT" if Path(engine).exists() else engine, f"--engine {shlex.quote(engine)} -k {k or 'K'}"
    return [
        "nextn audit MODEL: the folder that is served; it takes seconds",
        "the engine's log from its start: does it warn of weights that it skipped or did not find?",
        f"nextn diagnose MODEL {given}: what this head should give, and what is likely wrong",
        f"nextn diagnose MODEL --engine {address} --drive: the same with texts that are known, while the engine runs",
    ]
