"""Tables and pictures of measured acceptance: by depth and over K, of conventions, beside an earlier measurement."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

from nextn.cli.screen import echo, figures_table, plain, print_lines, print_note, print_table
from nextn.evaluate.acceptance_drop import FALSE_ALARMS
from nextn.stats.intervals import FEW_TEXTS
from nextn.text_format import docs_page, rate_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nextn.evaluate.acceptance_curve import AcceptanceFigures
    from nextn.evaluate.acceptance_drop import AcceptanceChange
    from nextn.evaluate.probe import ProbeReport
    from nextn.evaluate.reference_report import ReferenceReport
    from nextn.stats.intervals import Estimate


def show_reference(report: "ReferenceReport") -> None:
    """Print acceptance per depth, AL over K, the controls and the notes."""
    depths = range(1, report.plan.num_speculative_tokens + 1)
    rates = figures_table("rule", "texts", *(f"a_{k}" for k in depths), left=("rule",))
    for temperature in report.plan.temperatures:
        for label, by_k, style in _rows(report, temperature):
            num_texts = str(by_k[-1].num_texts)
            rates.add_row(plain(label), num_texts, *(each.as_text() for each in by_k[-1].rates), style=style)
        rates.add_section()
    print_table(rates)
    show_lengths(report)
    if (controls := report.controls) is not None:
        print_lines(
            f"controls, greedy where measured: a_1 over all positions {controls.all_positions:.2f}; shifted targets "
            f"{controls.shifted:.2f}, shuffled hidden states {controls.shuffled:.2f}, by chance {controls.chance:.2f}; "
            f"median rank of the actual token {controls.median_rank:.0f} of {controls.vocab_size}"
        )
    largest = report.plan.num_speculative_tokens
    where = f"rules and intervals (95 %, by text): {docs_page('reference/measure')}"
    print_lines(
        f"a_k at K = {largest}; AL@k of rounds of k drafts, on the same texts",
        *([f"texts of {report.text_source}{_streamed(report)}"] if report.text_source else []),
        f"{report.scoring_pass} pass, {report.family}; {where}",
        *(f"note: {warning}" for warning in report.warnings),
    )


def show_lengths(report: "ReferenceReport", *, rule: str | None = None) -> None:
    """Print AL over K, and what the curves say; with a rule, by it alone where there are several."""
    largest, title = report.plan.num_speculative_tokens, "mean acceptance length"
    table, curves = figures_table(title, *(f"AL@{k}" for k in range(1, largest + 1)), left=(title,)), []
    for temperature in report.plan.temperatures:
        rules = report.rules(temperature)
        chosen = rule if rule in rules else rules[0]
        for label, by_k, style in _rows(report, temperature, rule=rule):
            table.add_row(plain(label), *[""] * (largest - len(by_k)), *map(_length, by_k), style=style)
        table.add_section()
        if (curve := report.curve(temperature, rule=chosen)) is not None:
            curves.append(f"{_label(temperature, chosen)}: {curve.summary}")
    print_table(table)
    print_lines(*curves)


def _rows(
    report: "ReferenceReport", temperature: float, *, rule: str | None = None
) -> "Iterator[tuple[str, Sequence[AcceptanceFigures], str | None]]":
    """Yield label, figures by K (or of the largest alone) and style: by rule, and of the first by domain and part.

    rule: The only one where there are several; None for all.
    """
    from nextn.evaluate.teacher_forced import PERFECT

    largest, all_rules = report.plan.num_speculative_tokens, report.rules(temperature)
    choices = range(1, largest + 1) if temperature in report.scored else [largest]
    rules = [rule] if rule in all_rules else all_rules
    for each in rules:
        yield _label(temperature, each), [report.figures(temperature, rule=each, k=k) for k in choices], None
        if each == "argmax" and temperature in report.perfect:
            yield "  perfect head", [report.figures(temperature, rule=PERFECT, k=k) for k in choices], "dim"
        if each != rules[0]:
            continue
        for domain in report.domains_at(temperature):
            yield f"  {domain}", [report.figures(temperature, rule=each, k=k, domain=domain) for k in choices], "dim"
        if each != all_rules[0]:
            continue
        for part in zip(*(report.parts(temperature, k) for k in choices), strict=True):
            yield f"  {part[0].domain}", part, "dim"


def _label(temperature: float, rule: str) -> str:
    return rule if rule == "greedy" else f"T={temperature:g} {rule}"


def _length(figures: "AcceptanceFigures") -> str:
    length = figures.length
    return rate_text(length.value) + ("" if length.low != length.low else f" ({length.low:.2f}-{length.high:.2f})")


def draw_curves(report: "ReferenceReport", path: Path, *, rule: str | None = None) -> None:
    """Draw AL over K of every rule, or one of several, domain and part."""
    from nextn.stats import plots

    curves: dict[str, list[Estimate]] = {}
    name = ""
    for temperature in report.plan.temperatures:
        for label, by_k, _ in _rows(report, temperature, rule=rule):
            part = label.strip() if label.startswith(" ") else ""  # of every temperature one has this name
            name = name if part else label
            curves[f"{name}, {part}" if part else name] = [each.length for each in by_k]
    plots.curves(path, curves)


def _streamed(report: "ReferenceReport") -> str:
    if report.stream is None or report.machine is None:
        return ""
    read, peak = cast(int, report.stream["num_bytes"]) / 1e9, report.machine.peak_memory / 1e9
    return f"; trunk streamed: {read:.1f} GB read in {report.stream['seconds']:.0f} s, peak memory {peak:.1f} GB"


def show_probe(probed: "ProbeReport") -> None:
    """Print the conventions that were tried, best first, and the conclusion."""
    depths = range(1, len(probed.base.rates) + 1)
    table = figures_table(
        "convention", *(f"a_{k}" for k in depths), "accepted per position", "difference", left=("convention",)
    )
    shown_pairs = (probed.best(), probed.preferred)
    scores = [score for score in probed.alternatives if len(score.keys) == 1 or score in shown_pairs]
    for score in sorted([probed.base, *scores], key=lambda score: -score.accepted_per_position()):
        more = probed.gain(score, probed.base)
        rates = ["" if rate != rate else f"{rate:.2f}" for rate in score.rates]
        difference = f"{more.value:+.2f} ({more.low:+.2f} to {more.high:+.2f})" if score.keys else ""
        style = "bold" if score == probed.preferred else None
        accepted = f"{score.accepted_per_position():.2f}"
        table.add_row(plain(score.description), *rates, accepted, difference, style=style)
    print_table(table)
    print_lines(f"probe: {probed.summary}")
    if probed.ties:
        ties = "; ".join(score.description for score in probed.ties)
        print_lines(f"these accept as many drafts as that convention on these texts: {ties}")


def show_comparison(compared: "AcceptanceChange", *, quiet: bool) -> None:
    """Show every figure beside the earlier one, and the conclusion; if quiet, only that, on standard error."""
    if not quiet:
        title = f"against {compared.source}"
        table = figures_table(title, "before", "now", "change", "perfect head", "", left=("", title), no_wrap=False)
        for drop in compared.drops:
            change = f"{drop.change.value:+.1%}"
            if drop.num_texts >= FEW_TEXTS:
                change += f" ({drop.change.low:+.1%} to {drop.change.high:+.1%})"
            # Of later drafts it is on other positions: those where the head's own earlier drafts were accepted.
            ceiling = f"{drop.ceiling:.3f}" if drop.figure in ("a_1", "AL") else ""
            values = (f"{drop.before:.3f}", f"{drop.now:.3f}", change, ceiling)
            table.add_row(plain(drop.label), *values, "fell" if drop in compared.fallen else "")
        print_table(table)
        for temperature in set(compared.degenerate) - {drop.temperature for drop in compared.drops}:
            print_note(f"temperature {temperature:g} is not compared: most of its texts are degenerate (repetitive)")
        echo(
            f"threshold {compared.limit:.1%} (--max-drop): speed falls by no more than AL does; intervals: widened for "
            f"{len(compared.drops)} figures, so at most {FALSE_ALARMS:.0%} of runs find a drop where nothing changed; "
            "perfect head: one that has the trunk's own distribution"
        )
    echo(compared.conclusion, err=quiet)
