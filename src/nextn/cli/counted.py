"""`nextn diagnose` without a model: what an engine counted, and what that alone shows. Imports no torch."""

import shlex
from pathlib import Path

from typer import Context

from nextn.checkpoint.safetensors_file import write_json
from nextn.cli.screen import print_json, print_lines, shown
from nextn.engines.client import Budget
from nextn.engines.counters import Counters
from nextn.errors import ConfigError
from nextn.evaluate.engine_counters import counted_with_settings
from nextn.evaluate.hypotheses import engine_depth
from nextn.stats.intervals import wilson_interval

_OPTIONS = frozenset(
    {"source", "engine", "max_seconds", "timeout", "flags", "num_speculative_tokens", "out", "as_json"}
)
_LEAST_RATE = 0.2  # at the first depth: published rates are 0.5 and more
_MAX_USUAL_K = 16


def refuse_options_of_a_model(context: Context) -> None:
    """Raise ConfigError for options that were given, and say how a model is measured."""
    given = [
        each.opts[0]
        for each in context.command.params
        if each.name not in _OPTIONS
        and getattr(context.get_parameter_source(each.name or ""), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: only with MODEL, which is compared with the engine; give a folder or hub id"
        )


def show_counts(
    engine: str, budget: Budget, flags: str | None, given: int | None, *, out: Path | None, as_json: bool
) -> int:
    """Print the counts, what they show and what to do next; return the exit code, 1 for a finding, else 3."""
    counters, k = counted_with_settings(engine, budget, flags), None
    reason = "only the model shows which acceptance its head should give"
    if counters.has_drafts is not False:
        try:
            k = engine_depth([counters], given)
        except ConfigError as error:
            if given is not None:
                raise
            reason += f"; {error}"
    found = _finding(counters, k)
    record = {"outcome": "failed" if found else "inconclusive", "finding": found, **counters.as_record(), "k": k}
    if out is not None:
        write_json(out, record)
    if as_json:
        print_json(record)
    else:
        steps = (f"  {number}. {step}" for number, step in enumerate(_next_steps(engine, k), 1))
        print_lines(counts_line(counters, k), f"finding: {found}" if found else f"not compared: {reason}")
        print_lines("next, cheapest first", *steps, *(f"note: {shown(note)}" for note in counters.notes))
    return 1 if found else 3


def counts_line(counters: Counters, k: int | None) -> str:
    """Return what the engine counted, in one line."""
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
    high = 1.0 if accepted is None else wilson_interval(min(accepted, rounds), rounds)[1]
    if high >= _LEAST_RATE:
        return ""
    return (
        f"at most {high:.1%} of the first drafts of rounds are accepted (95 %), less than of any head that is loaded "
        "and run as it was trained: its tensors are missing, unset or another head's, or another convention is "
        "applied to them"
    )


def _next_steps(engine: str, k: int | None) -> list[str]:
    address = "HOST:PORT" if engine == "-" or Path(engine).exists() else engine
    given = f"--engine {'FILE' if engine == '-' else shlex.quote(engine)} -k {k or 'K'}"
    return [
        "nextn audit MODEL: the folder that is served; it takes seconds",
        "the engine's log from its start: does it warn of weights that it skipped or did not find?",
        f"nextn diagnose MODEL {given}: what this head should give, and what is likely wrong",
        f"nextn diagnose MODEL --engine {address} --drive: the same with texts that are known, while the engine runs",
    ]
