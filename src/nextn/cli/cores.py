"""`nextn advise --cores`: predicted costs with other numbers of cores, beside those that were measured."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.screen import console, plain, print_table
from nextn.errors import ConfigError
from nextn.settings import available_cores

if TYPE_CHECKING:
    from nextn.evaluate.core_scaling import CoreScaling

Cores = Annotated[
    str | None,
    typer.Option(
        help="Also predict the costs with these numbers of cores, such as 1,2,8,32 (native backend). With more than "
        "this machine has, give --memory-bandwidth of theirs."
    ),
]
_POSITIONS = (3, 5, 9)  # of the passes that the table shows


def check_cores(cores: Sequence[int], bandwidth: float | None) -> None:
    """Raise ConfigError if more cores than there are here are asked for without the bandwidth of their memory."""
    most = available_cores()
    if bandwidth is None and max(cores) > most:
        raise ConfigError(
            f"--cores {max(cores)}: there are {most} here, and the memory of a machine with more cannot be measured; "
            "give its bandwidth, such as --memory-bandwidth 300GB/s"
        )


def show_cores(scaling: "CoreScaling") -> None:
    """Print a row for each number of cores: predicted, and in parentheses measured."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    shown = [num for num in _POSITIONS if num <= len(scaling.forecasts[0].predicted)]
    for title in ("cores", "baseline step, ms", *(f"v({num})" for num in shown)):
        table.add_column(title, justify="right", no_wrap=True)
    for each in scaling.forecasts:
        cells = []
        for num in (1, *shown):
            scale = 1e-3 if num == 1 else each.predicted[0]
            cell = f"{each.predicted[num - 1] / scale:.2f}"
            if each.measured is not None:
                cell += f" ({each.measured[num - 1] / (1e-3 if num == 1 else each.measured[0]):.2f})"
            cells.append(cell)
        table.add_row(str(each.cores), *cells)
    print_table(table)
    console().print(
        plain(
            f"predicted (measured): one core's time over the cores, but no less than reading "
            f"{scaling.step_bytes / 1e6:.0f} MB at {scaling.bandwidth / 1e9:.1f} GB/s; without barriers and NUMA"
        ),
        soft_wrap=True,
    )
