"""Plots of training, acceptance, speedup, cost and timeline records, drawn with matplotlib."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nextn.errors import ConfigError
from nextn.stats.acceptance import DecodedRound
from nextn.text_format import install_command, rate_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from nextn.stats.acceptance import Acceptance
    from nextn.stats.intervals import Estimate
    from nextn.stats.speedup import Costs, Spread

_INK, _MUTED, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_DEPTHS = ("#1f2933", "#d1495b", "#edae49", "#30638e", "#00798c", "#8d5a97", "#66a182", "#c97b63", "#5f6caf")
_DRAFT, _VERIFY, _BASELINE = "#edae49", "#30638e", "#9aa5b1"


def losses(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    """Plot the loss per depth, in bits per token, over training, from the step records of metrics.jsonl."""
    steps: list[Any] = [record for record in records if "loss" in record]
    with _figure(path, "Loss per depth", "training tokens", "bits per token") as axes:
        for depth, series in enumerate(zip(*(record["loss"] for record in steps), strict=True)):
            bits = _smoothed([nats / 0.6931471805599453 for nats in series])
            label = "trunk" if depth == 0 else f"depth {depth}"
            axes.plot([record["tokens"] for record in steps], bits, color=_DEPTHS[depth % 9], lw=1.8, label=label)
        axes.set_ylim(0, None)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g} M" if value else "0")
        axes.legend(frameon=False, labelcolor=_INK)


def acceptance(path: Path, rows: Mapping[str, "Acceptance"]) -> None:
    """Plot the conditional acceptance per depth with 95 % intervals, one color of bars per entry of `rows`."""
    with _figure(
        path, "Acceptance per depth, given that shallower drafts were accepted", "depth", "acceptance rate"
    ) as axes:
        width = 0.8 / len(rows)
        for index, (label, figures) in enumerate(rows.items()):
            depths = range(1, len(figures.rates) + 1)
            x_positions = [depth + (index - (len(rows) - 1) / 2) * width for depth in depths]
            bounds = figures.intervals()
            # Rounding may put a bound of a rate of 1 below it.
            below = [max(0.0, rate - low) for rate, (low, _) in zip(figures.rates, bounds, strict=True)]
            above = [max(0.0, high - rate) for rate, (_, high) in zip(figures.rates, bounds, strict=True)]
            name = f"{label} (AL {figures.length:.2f})"
            style = {"ecolor": _INK, "elinewidth": 1, "capsize": 3}
            axes.bar(
                x_positions,
                figures.rates,
                width * 0.92,
                yerr=[below, above],
                label=name,
                color=_DEPTHS[(3 - index) % len(_DEPTHS)],
                error_kw=style,
            )
            for x, rate, (_, high) in zip(x_positions, figures.rates, bounds, strict=True):
                text = rate_text(rate)
                axes.annotate(text, (x, high), (0, 3), textcoords="offset points", ha="center", color=_INK, fontsize=9)
        axes.set_ylim(0, 1.22)
        axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
        axes.set_xticks(range(1, 1 + max(len(figures.rates) for figures in rows.values())))
        axes.legend(frameon=False, labelcolor=_INK, loc="upper left", ncols=len(rows))


def curves(path: Path, rows: Mapping[str, "Sequence[Estimate]"]) -> None:
    """Plot AL over K with its intervals, one line per entry of `rows`, whose last value is of the largest K."""
    with _figure(path, "Mean acceptance length", "K, draft tokens per round", "tokens per round") as axes:
        largest = max(map(len, rows.values()))
        for index, (label, lengths) in enumerate(rows.items()):
            ks, values = range(largest - len(lengths) + 1, largest + 1), [each.value for each in lengths]
            errors = [[each.value - each.low for each in lengths], [each.high - each.value for each in lengths]]
            axes.errorbar(
                ks,
                values,
                yerr=errors,
                fmt="o",
                lw=1.6,
                ms=4,
                capsize=2,
                label=label,
                color=_DEPTHS[index % 9],
                ls=("-", "--", ":")[index // 9 % 3],
            )
        axes.set_ylim(1, None)
        axes.set_xticks(range(1, largest + 1))
        axes.legend(frameon=False, labelcolor=_INK, fontsize=8, loc="upper left")


def speedups(
    path: Path, measured: "Mapping[str, Mapping[int, Spread]]", theory: Mapping[str, Sequence[tuple[int, float]]]
) -> None:
    """Plot the measured speedup over K, with quartiles, and the curves expected from acceptance and costs."""
    with _figure(path, "Speedup over baseline decoding", "K, draft tokens per round", "speedup") as axes:
        axes.axhline(1, color=_MUTED, lw=1)
        for index, (label, spreads) in enumerate(measured.items()):
            color, medians = _DEPTHS[3 - index % 4], [spread.median for spread in spreads.values()]
            below = [spread.median - spread.low for spread in spreads.values()]
            above = [spread.high - spread.median for spread in spreads.values()]
            axes.plot(*zip(*theory[label], strict=True), color=color, lw=1.4, ls="--", label=f"{label}, expected")
            axes.errorbar(
                list(spreads), medians, yerr=[below, above], color=color, fmt="o", ms=5, capsize=3, label=label
            )
        axes.set_ylim(0, None)
        axes.set_xticks(sorted({k for spreads in measured.values() for k in (0, *spreads)}))
        axes.legend(frameon=False, labelcolor=_INK)


def costs(path: Path, rows: "Sequence[Costs]") -> None:
    """Plot v(m), the cost of an m-token trunk pass in baseline steps, one line per batch size and context."""
    with _figure(path, "Cost of a trunk pass", "m, tokens in the pass", "baseline steps") as axes:
        for index, each in enumerate(rows):
            label = f"batch {each.batch}, context {each.context}: c = {each.c:.2f}"
            axes.plot(range(1, 1 + len(each.v)), each.v, "o-", color=_DEPTHS[index % 9], lw=1.8, ms=4, label=label)
        axes.set_ylim(0, None)
        axes.set_xticks(range(1, 1 + max(len(each.v) for each in rows)))
        axes.legend(frameon=False, labelcolor=_INK)


class TimedRound(DecodedRound, Protocol):
    """A round with its wall times in seconds."""

    @property
    def draft_s(self) -> float: ...
    @property
    def verify_s(self) -> float: ...


def timeline(path: Path, plain: Sequence[TimedRound], mtp: Sequence[TimedRound], *, num_tokens: int) -> None:
    """Plot the wall time of the first num_tokens tokens: baseline decoding above, drafts and verifications below."""
    with _figure(path, f"Wall time of the first {num_tokens} tokens", "milliseconds", "", height=2.9) as axes:
        for y, rounds in ((1, plain), (0, mtp)):
            elapsed = emitted = 0.0
            for each in rounds:
                if emitted >= num_tokens:
                    break
                tokens = len(each.rows[0].emitted)
                draft, verify = each.draft_s * 1e3, each.verify_s * 1e3
                axes.barh(y, draft, left=elapsed, height=0.55, color=_DRAFT, lw=0)
                axes.barh(
                    y,
                    verify,
                    left=elapsed + draft,
                    height=0.55,
                    color=_VERIFY if y == 0 else _BASELINE,
                    ec="white",
                    lw=0.7,
                )
                if y == 0:
                    axes.text(
                        elapsed + draft + verify / 2,
                        y,
                        f"{tokens}",
                        ha="center",
                        va="center",
                        color="white",
                        fontsize=8,
                    )
                elapsed, emitted = elapsed + draft + verify, emitted + tokens
            axes.text(elapsed, y, f"  {elapsed:.0f} ms", va="center", color=_INK, fontsize=9)
        axes.set_yticks([0, 1], ["MTP", "baseline"])
        axes.set_xlim(0, axes.get_xlim()[1] * 1.06)
        axes.grid(False)
        handles = [
            _patch(_BASELINE, "baseline step"),
            _patch(_DRAFT, "draft"),
            _patch(_VERIFY, "verify (tokens emitted)"),
        ]
        axes.legend(
            handles=handles, frameon=False, labelcolor=_INK, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.02)
        )
        axes.set_ylim(-0.5, 1.95)


def _smoothed(values: Sequence[float]) -> list[float]:
    # A running mean over 3 % of the run; otherwise batch noise hides the order of the depths.
    half = max(1, round(len(values) * 0.03 / 2))
    return [sum(part) / len(part) for part in (values[max(0, i - half) : i + half + 1] for i in range(len(values)))]


def _patch(color: str, label: str) -> object:
    from matplotlib.patches import Patch

    return Patch(color=color, label=label)


class _figure:
    """Context manager that gives styled axes and saves the figure to `path` on a normal exit."""

    def __init__(self, path: Path, title: str, x: str, y: str, *, height: float = 4.2) -> None:
        self.path, self.title, self.x, self.y, self.height = path, title, x, y, height

    def __enter__(self) -> "Axes":
        log = logging.getLogger("matplotlib")
        level = log.level
        log.setLevel(logging.ERROR)  # without a home that can be written, two warnings of a temporary cache
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigError(f"figures need matplotlib: {install_command('plot')}") from error
        finally:
            log.setLevel(level)
        self.figure = Figure(figsize=(7.6, self.height), dpi=150, layout="constrained")
        FigureCanvasAgg(self.figure)
        axes = self.figure.add_subplot()
        axes.set_title(self.title, loc="left", color=_INK, fontsize=12, fontweight="bold", pad=10)
        axes.set_xlabel(self.x, color=_MUTED)
        axes.set_ylabel(self.y, color=_MUTED)
        axes.grid(True, axis="y", color=_GRID, lw=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=_MUTED, length=0)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_GRID)
        return axes

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        staged = self.path.with_name(f".{self.path.stem}.tmp{self.path.suffix}")  # the suffix is the format
        try:
            self.figure.savefig(staged)
            staged.replace(self.path)
        except OSError as error:  # a full disk has no filename
            raise ConfigError(f"{self.path}: cannot be written: {error.strerror or error}") from error
        finally:
            staged.unlink(missing_ok=True)
