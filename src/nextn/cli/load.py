"""`nextn advise --engine URL --against URL`: K for each number of streams of a live engine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.common import EngineAccess, first_turns
from nextn.cli.progress import progress_bars
from nextn.cli.screen import figures_table, print_json, print_lines, print_table
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from nextn.engines.endpoint import Endpoint
    from nextn.evaluate.load_advice import LoadAdvice
    from nextn.evaluate.workload import Prompt

_PANEL = "K by load of a live engine"
Against = Annotated[
    str | None,
    typer.Option(
        help="With --engine, and without MODEL: the same model served without MTP. Times both at --batches "
        "streams, and prints K for each in the engine's own syntax.",
        rich_help_panel=_PANEL,
    ),
]
ADVICE_FILE = "advice.json"  # in the folder of `nextn advise --out`


@dataclass(frozen=True)
class LoadQuestion:
    """What the engines are asked."""

    prompts: "Sequence[Prompt]"
    loads: Sequence[int]
    temperatures: Sequence[float]
    max_tokens: int
    chat: bool

    def answer(self, model: str | None, access: EngineAccess, against: str, *, quiet: bool) -> "list[LoadAdvice]":
        """Return advice for every temperature.

        Raises:
            ConfigError: The options do not go together, the engine does not draft, or the other one does.
            EngineError: An engine is down, or refuses a request.
        """
        if model is not None:
            raise ConfigError("--against gives advice for an engine and takes no MODEL; leave it out")
        if not access.url:
            raise ConfigError("--against takes --engine ADDRESS, the server with MTP")
        engine = access.open(chat=self.chat)
        return self._measure(engine, replace(access, engine=against).open(chat=self.chat), quiet=quiet)

    def _measure(self, engine: "Endpoint", plain_engine: "Endpoint", *, quiet: bool) -> "list[LoadAdvice]":
        from nextn.evaluate.load_advice import REPEATS, measure_loads, refuse_drafts

        texts = [prompt.text for prompt in first_turns(self.prompts)]
        refuse_drafts(plain_engine, texts[0])
        with progress_bars(quiet=quiet) as progress:
            return [
                measure_loads(
                    engine,
                    plain_engine,
                    texts,
                    self.loads,
                    temperature=temperature,
                    max_tokens=self.max_tokens,
                    on_pass=progress(f"T={temperature:g}", 2 * REPEATS * len(set(self.loads))),
                )
                for temperature in self.temperatures
            ]


def report_by_load(found: "Sequence[LoadAdvice]", out: Path | None, *, as_json: bool) -> None:
    """Write the record into the folder `out`, if there is one, and print it or a table for each temperature."""
    record = found[0].as_record() | {"temperatures": [each.as_record() for each in found]}
    if out is not None:
        from nextn.checkpoint.safetensors_file import write_json

        write_json(out / ADVICE_FILE, record)
    if as_json:
        print_json(record)
        return
    for each in found:
        show_by_load(each)


def show_by_load(advice: "LoadAdvice") -> None:
    """Print a row for each number of streams, the advice, and the engines' settings."""
    expected = (f"K={k}" for k in range(1, len(advice.rates) + 1))
    titles = ("streams", "tokens/s without", "with MTP", "speed-up", "AL", "round costs")
    table = figures_table(*titles, *expected, "best K")
    for point in advice.points:
        speeds = ("" if each.num == 0 else f"{each.median:.0f}" for each in (point.plain, point.drafted))
        spread = point.speedup
        measured = f"{spread.median:.2f}" + (f" ({spread.low:.2f}-{spread.high:.2f})" if spread.num > 1 else "")
        speedups = [f"{each:.2f}" for each in point.expected(advice.rates)[1:]]
        cells = (measured, f"{point.length:.2f}", f"{point.round_cost:.2f}", *speedups)
        table.add_row(str(point.streams), *speeds, *cells, str(point.best(advice.rates) or "off"))
    print_table(table)
    print_lines(
        f"T={advice.temperature:g}, {advice.engine}: {advice.summary}",
        f"round costs: a round of {len(advice.rates)} drafts, in rounds without; MTP gains where AL is above it. K=1, "
        "...: expected speed-up, each draft of a round costing the same.",
        *(f"note: {note}" for note in advice.notes),
        *(f"  {name}: {value}" for name, value in advice.settings.items()),
    )
