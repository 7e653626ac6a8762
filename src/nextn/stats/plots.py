"""Plots of acceptance lengths and speedups over K, drawn with matplotlib."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nextn.errors import ConfigError
from nextn.text_format import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from nextn.stats.intervals import Estimate
    from nextn.stats.speedup import Spread

_INK, _MUTED, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_DEPTHS = ("#1f2933", "#d1495b", "#edae49", "#30638e", "#00798c", "#8d5a97", "#66a182", "#c97b63", "#5f6caf")


def curves(path: Path, rows: Mapping[str, "Sequence[Estimate]"]) -> None:
    """Plot AL over K with its intervals, one line per entry of `rows`, whose last value is of the largest K."""
    with _figure(path, "Mean acceptance length", "tokens per round") as axes:
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
    with _figure(path, "Speedup over baseline decoding", "speedup") as axes:
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


@contextmanager
def _figure(path: Path, title: str, y: str) -> "Iterator[Axes]":
    """Give styled axes, and save the figure to `path` on a normal exit."""
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
    figure = Figure(figsize=(7.6, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", color=_INK, fontsize=12, fontweight="bold", pad=10)
    axes.set_xlabel("K, draft tokens per round", color=_MUTED)
    axes.set_ylabel(y, color=_MUTED)
    axes.grid(True, axis="y", color=_GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)
    yield axes
    staged = path.with_name(f".{path.stem}.tmp{path.suffix}")  # the suffix is the format
    try:
        figure.savefig(staged)
        staged.replace(path)
    except OSError as error:  # a full disk has no filename
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        staged.unlink(missing_ok=True)
