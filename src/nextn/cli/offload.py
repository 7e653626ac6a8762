"""`nextn advise --offload-bandwidth`: advice for a machine whose experts come over a bus or from disk.

With `--cores`, costs with other numbers of cores.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.common import ModelOptions, open_checkpoint
from nextn.cli.screen import figures_table, plain, print_lines, print_table
from nextn.cli.streaming import TextOptions, measure_acceptance
from nextn.errors import ConfigError
from nextn.evaluate.workload import ReferencePlan
from nextn.settings import available_cores

if TYPE_CHECKING:
    from nextn.evaluate.core_scaling import CoreScaling
    from nextn.evaluate.offloading import OffloadAdvice
    from nextn.evaluate.workload import Prompt

_PANEL = "Experts outside of memory"
OffloadBandwidth = Annotated[
    str | None,
    typer.Option(
        help="Advise for a machine that reads routed experts at this rate, over a bus or from disk, such as 12GB/s.",
        rich_help_panel=_PANEL,
    ),
]
MemoryBandwidth = Annotated[
    str | None,
    typer.Option(help="Rate at which it reads all other weights. Default: measured here.", rich_help_panel=_PANEL),
]
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
Cores = Annotated[
    str | None,
    typer.Option(
        help="Also predict the costs with these numbers of cores, such as 1,2,8,32 (native backend). With more than "
        "this machine has, give --memory-bandwidth of theirs."
    ),
]
_POSITIONS = (3, 5, 9)  # of the passes that the table shows


def parse_bandwidth(name: str, text: str) -> float:
    """Return bytes per second. Raises ConfigError naming the option for anything but a number above 0 with a unit."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kMGT]i?|)B/s\s*", text)
    rate = float(match[1]) * _UNITS[match[2].replace("ki", "Ki")] if match else 0.0
    if not rate:
        raise ConfigError(f"{name} {text!r}; expected a rate above 0 with its unit, such as 12GB/s or 900MB/s")
    return rate


def check_needs_offloading(given: Mapping[str, object]) -> None:
    """Refuse options, by name, that only advice with --offload-bandwidth takes. Raises ConfigError."""
    if names := [name for name, value in given.items() if value is not None]:
        raise ConfigError(
            f"{', '.join(names)}: only with --offload-bandwidth; without it, `advise` times decoding with the loaded "
            "model, on --prompts"
        )


def advise_offloaded(
    options: ModelOptions,
    source: TextOptions,
    plan: ReferencePlan,
    prompts: "Sequence[Prompt]",
    offload: float,
    memory: float | None,
) -> "OffloadAdvice":
    """Measure acceptance and routing on texts: given ones, or, of a loaded model, its continuations of the prompts.

    memory: None: the rate of a copy on this machine.
    """
    from nextn.checkpoint.head_inventory import Inventory
    from nextn.checkpoint.provenance import open_head, trunk_family
    from nextn.evaluate.decoding_costs import Machine
    from nextn.evaluate.offloading import Bandwidths, ExpertRouting, OffloadAdvice, StoredWeights

    checkpoint = open_checkpoint(options.source)
    trunk = Inventory.of(checkpoint, family=trunk_family(checkpoint))
    head = trunk
    if options.head is not None:
        head = open_head(options.head, trunk)
    weights = StoredWeights.of(trunk, head)
    routing = ExpertRouting(
        {index: each.num_experts for index, each in weights.experts.items()}, plan.num_speculative_tokens + 1
    )
    loaded, report = measure_acceptance(options, source, plan, prompts, routing=routing)
    machine = Machine.of(loaded)
    report = replace(report, source=options.source, machine=machine)
    return OffloadAdvice(report, weights, routing, Bandwidths(offload, memory or machine.bandwidth))


def show_experts(advice: "OffloadAdvice") -> None:
    """Print what blocks of 1, 2, ... positions load and cost."""
    num_layers = len(advice.weights.experts)
    num_experts = sum(each.num_experts for each in advice.weights.experts.values()) / num_layers
    sizes = range(1, max(len(each.costs.steps) for each in advice.forecasts) + 1)
    title = "block of m positions"
    table = figures_table(title, *(f"m={size}" for size in sizes), left=(title,))
    for each in advice.forecasts:
        label, temperature = f"T={each.temperature:g} ", each.temperature
        rows = {
            f"distinct experts of {num_experts:g}": [f"{num:.1f}" for num in advice.experts_per_layer(temperature)],
            "GB of experts": [f"{num / 1e9:.3g}" for num in advice.offloaded_bytes(temperature)],
            "v(m)": [f"{value:.2f}" for value in each.costs.v],
        }
        for title, cells in rows.items():
            table.add_row(plain(label + title), *cells)
    print_table(table)
    rates, weights = advice.bandwidths, advice.weights
    costs = advice.forecasts[0].costs
    print_lines(
        f"experts of {num_layers} layers at {rates.offload / 1e9:.3g} GB/s, {weights.trunk_bytes / 1e9:.3g} GB of "
        f"other weights at {rates.memory / 1e9:.3g} GB/s: {costs.steps[0].median * 1e3:.3g} ms per baseline step, c "
        f"{costs.c:.2f}; one sequence, and no expert is kept from one pass to the next"
    )


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
    shown = [num for num in _POSITIONS if num <= len(scaling.forecasts[0].predicted)]
    table = figures_table("cores", "baseline step, ms", *(f"v({num})" for num in shown))
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
    print_lines(
        "predicted (measured): one core's time over the cores, but no less than reading "
        f"{scaling.step_bytes / 1e6:.0f} MB at {scaling.bandwidth / 1e9:.1f} GB/s; without barriers and NUMA"
    )
