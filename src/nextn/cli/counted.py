"""`nextn diagnose` without a model: what an engine counted, and what that alone shows. Imports no torch."""

import shlex
from pathlib import Path

import typer

from nextn.cli.screen import print_json, print_lines, shown
from nextn.engines.counters import Counters
from nextn.stats.intervals import wilson_interval

# Acceptance rates that are published for heads are 0.5 and more at the first depth, and seldom below 0.3 over all.
_LEAST_SHARE = 0.1


def show_counts(counters: Counters, num_speculative_tokens: int | None, engine: str, *, as_json: bool) -> None:
    """Print the counts, what they show and what to do next; exit with 1 for a finding, else with 3."""
    k, found = num_speculative_tokens or counters.k or len(counters.per_position) or None, _finding(counters)
    if as_json:
        print_json({"outcome": "failed" if found else "inconclusive", "finding": found, **counters.as_record(), "k": k})
        raise typer.Exit(1 if found else 3)
    print_lines(_counted(counters, k), f"finding: {found}" if found else f"not compared: {_without_model(counters)}")
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


def _finding(counters: Counters) -> str:
    """What the counts show without the model; empty if nothing."""
    if counters.overrides:
        settings = ", ".join(map(shown, counters.overrides))
        return f"the acceptance is set or relaxed by {settings}, and is not the head's own"
    if counters.has_drafts is False:
        return "nothing was drafted: MTP is off, or no request was sent"
    if counters.draft_tokens and counters.accepted is not None:
        _, high = wilson_interval(counters.accepted, counters.draft_tokens)
        if high < _LEAST_SHARE:
            return (
                f"less than {high:.1%} of the drafts are accepted, which no head does that is loaded and run as it was "
                "trained: its tensors are missing, unset or another head's, or another convention is applied to them"
            )
    return ""


def _without_model(counters: Counters) -> str:
    few = counters.mean_length is not None and counters.mean_length < 1 + _LEAST_SHARE and not counters.draft_tokens
    return "only the model shows which acceptance its head should give" + (
        "; a length near 1 says that almost no draft is accepted, but not of how many: give more lines" if few else ""
    )


def _next_steps(engine: str, k: int | None) -> list[str]:
    address, given = "HOST:PORT" if Path(engine).exists() else engine, f"--engine {shlex.quote(engine)} -k {k or 'K'}"
    return [
        "nextn audit MODEL: the folder that is served; it takes seconds",
        "the engine's log from its start: does it warn of weights that it skipped or did not find?",
        f"nextn diagnose MODEL {given}: what this head should give, and what is likely wrong",
        f"nextn diagnose MODEL --engine {address} --drive: the same with texts that are known, while the engine runs",
    ]
