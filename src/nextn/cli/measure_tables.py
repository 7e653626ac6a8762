"""What `nextn measure` prints and draws of a measurement."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

from nextn.cli.screen import console, plain, print_table
from nextn.text_format import docs_page

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from nextn.evaluate.probe import ProbeReport
    from nextn.evaluate.reference_report import AcceptanceFigures, ReferenceReport


def show_reference(report: "ReferenceReport") -> None:
    """Print acceptance per depth, AL over K, what the curves say, the controls and the notes."""
    screen, largest = console(), report.plan.num_speculative_tokens
    depths = range(1, largest + 1)
    rates = _table(["rule", "texts", *(f"a_{k}" for k in depths)])
    lengths = _table(["mean acceptance length", *(f"AL@{k}" for k in depths)])
    for temperature in report.plan.temperatures:
        for label, by_k, style in _rows(report, temperature):
            rates.add_row(
                plain(label), str(by_k[-1].num_texts), *(each.as_text() for each in by_k[-1].rates), style=style
            )
            lengths.add_row(plain(label), *[""] * (largest - len(by_k)), *(_length(each) for each in by_k), style=style)
        for table in (rates, lengths):
            table.add_section()
    print_table(rates)
    print_table(lengths)
    for temperature in report.plan.temperatures:
        if (curve := report.curve(temperature)) is not None:
            screen.print(plain(f"{_label(temperature, report.rules(temperature)[0])}: {curve.summary}"), soft_wrap=True)
    if (controls := report.controls) is not None:
        screen.print(
            plain(
                f"controls, greedy where measured: a_1 over all positions {controls.all_positions:.2f}; shifted "
                f"targets {controls.shifted:.2f}, shuffled hidden states {controls.shuffled:.2f}, by chance "
                f"{controls.chance:.2f}; median rank of the actual token {controls.median_rank:.0f} of "
                f"{controls.vocab_size}"
            ),
            soft_wrap=True,
        )
    screen.print(plain(f"a_k at K = {largest}; AL@k of rounds of k drafts, on the same texts"), soft_wrap=True)
    if report.text_source:
        screen.print(plain(f"texts of {report.text_source}{_streamed(report)}"), soft_wrap=True)
    where = f"rules and intervals (95 %, by text): {docs_page('reference/measure')}"
    screen.print(plain(f"{report.scoring_pass} pass, {report.family}; {where}"), soft_wrap=True)
    for warning in report.warnings:
        screen.print(plain(f"note: {warning}"), soft_wrap=True)


def _table(titles: "Sequence[str]") -> "Table":
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, title in enumerate(titles):
        table.add_column(title, justify="right" if index else "left", no_wrap=True)
    return table


def _rows(
    report: "ReferenceReport", temperature: float
) -> "Iterator[tuple[str, Sequence[AcceptanceFigures], str | None]]":
    """Yield label, figures by K (or of the largest alone) and style: by rule, and of the first by domain and part."""
    from nextn.evaluate.teacher_forced import PERFECT

    largest = report.plan.num_speculative_tokens
    choices = range(1, largest + 1) if temperature in report.scored else [largest]
    for index, rule in enumerate(report.rules(temperature)):
        yield _label(temperature, rule), [report.figures(temperature, rule=rule, k=k) for k in choices], None
        if rule == "argmax" and temperature in report.perfect:
            yield "  perfect head", [report.figures(temperature, rule=PERFECT, k=k) for k in choices], "dim"
        if index:
            continue
        for domain in report.domains_at(temperature):
            yield f"  {domain}", [report.figures(temperature, k=k, domain=domain) for k in choices], "dim"
        for part in zip(*(report.parts(temperature, k) for k in choices), strict=True):
            yield f"  {part[0].domain}", part, "dim"


def _label(temperature: float, rule: str) -> str:
    return rule if rule == "greedy" else f"T={temperature:g} {rule}"


def _length(figures: "AcceptanceFigures") -> str:
    length = figures.bounded_length
    return f"{length.value:.2f}" + ("" if length.low != length.low else f" ({length.low:.2f}-{length.high:.2f})")


def draw_curves(report: "ReferenceReport", path: Path) -> None:
    """Draw AL over K of every rule, domain and part."""
    from nextn.stats import plots

    rows = [row for temperature in report.plan.temperatures for row in _rows(report, temperature)]
    plots.curves(path, {label.strip(): [each.bounded_length for each in by_k] for label, by_k, _ in rows})


def _streamed(report: "ReferenceReport") -> str:
    if report.stream is None or report.machine is None:
        return ""
    read, peak = cast(int, report.stream["num_bytes"]) / 1e9, report.machine.peak_memory / 1e9
    return f"; trunk streamed: {read:.1f} GB read in {report.stream['seconds']:.0f} s, peak memory {peak:.1f} GB"


def show_probe(probed: "ProbeReport") -> None:
    """Print the conventions that were tried, best first, and the conclusion."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    depths = range(1, len(probed.base.rates) + 1)
    for title in ("convention", *(f"a_{k}" for k in depths), "accepted per position", "difference"):
        table.add_column(title, justify="left" if title == "convention" else "right", no_wrap=True)
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
    console().print(plain(f"probe: {probed.summary}"), soft_wrap=True)
    if probed.ties:
        ties = "; ".join(score.description for score in probed.ties)
        console().print(plain(f"indistinguishable from it on these texts: {ties}"), soft_wrap=True)
