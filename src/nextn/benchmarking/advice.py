"""Should MTP be on here, and with which K: measured acceptance and costs -> expected speed-ups, and a verdict."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

from nextn.benchmarking.benchmark import measured
from nextn.benchmarking.cost import check, measured_costs
from nextn.benchmarking.plan import Plan
from nextn.benchmarking.report import Report
from nextn.benchmarking.runs import Run
from nextn.benchmarking.workload import Prompt
from nextn.errors import ConfigError
from nextn.figures import acceptance
from nextn.figures.acceptance import Acceptance
from nextn.figures.speedup import DEFINITION, Costs, alike, best_drafts, break_even, expected_length, expected_speedup
from nextn.model import Model

DEFINITIONS = {
    "speedup": DEFINITION,
    "interval": "the same with every a_k at the low, and at the high end of its 95 % Wilson interval",
    "acceptance": acceptance.DEFINITION,
    "overhead": "o, measured at the largest K and batch 1 by this decoder; the same o is taken for every K and batch",
    "break_even": "the acceptance, alike at every depth, at which this K costs what it gives; null: not even 1 does",
    "pays": "the low end of the interval, at the best K, is above 1, and some text was no loop",
    "best_drafts": "the best K where it pays, else 0: leave MTP off",
    "measured": "speed-up of the decoder at the largest K in this run, beside what was expected of it",
}


@dataclass(frozen=True)
class Choice:
    """What K = drafts is expected to give. break_even: None where no acceptance makes it pay."""

    drafts: int
    speedup: float
    interval: tuple[float, float]
    break_even: float | None


@dataclass(frozen=True)
class Forecast:
    """Every K > 0 at one temperature and one batch size and context."""

    temperature: float
    costs: Costs
    rates: tuple[float, ...]
    choices: tuple[Choice, ...]
    best: Choice
    only_loops: bool

    @property
    def pays(self) -> bool:
        return self.best.interval[0] > 1 and not self.only_loops

    @property
    def words(self) -> str:
        """The verdict."""
        best, gain = self.best, f"{self.best.speedup:.2f} x expected"
        told = f"{gain} ({best.interval[0]:.2f} to {best.interval[1]:.2f}) at K = {best.drafts}"
        if self.only_loops:
            return f"leave it off until other prompts tell: every text loops, and loops alone say {told}"
        if self.pays:
            return f"turn it on: {told}"
        if best.speedup > 1:
            return f"leave it off here, as no gain is sure: {told}, which includes a loss; more text would narrow that"
        if best.break_even is None:
            return f"leave it off here: {told}; at these costs no acceptance makes it pay"
        has = alike(expected_length(self.rates[: best.drafts]), best.drafts)
        return f"leave it off here: {told}; it pays from an acceptance of {best.break_even:.2f} on, and has {has:.2f}"

    def as_record(self) -> dict[str, object]:
        """What goes into JSON reports."""
        return {
            "temperature": self.temperature,
            "batch": self.costs.batch,
            "context": self.costs.context,
            "pays": self.pays,
            "best_drafts": self.best.drafts if self.pays else 0,
            "verdict": self.words,
            "by_drafts": [vars(choice) for choice in self.choices],
        }


def forecast(
    found: Acceptance, costs: Costs, *, temperature: float, overhead: float = 0.0, only_loops: bool = False
) -> Forecast:
    """found: of runs at the largest K; only_loops: all of them. overhead: o, in plain one-token steps."""
    bounds = found.intervals()
    if not bounds:
        raise ConfigError("no text was long enough for a round with drafts; give other prompts, or more max_tokens")
    low, high = ([bound[end] for bound in bounds] for end in (0, 1))

    def choice(drafts: int) -> Choice:
        expected, least, most = (
            expected_speedup(costs, rates, drafts, overhead=overhead) for rates in (found.rates, low, high)
        )
        return Choice(drafts, expected, (least, most), break_even(costs, drafts, overhead=overhead))

    choices = tuple(choice(drafts) for drafts in range(1, min(len(bounds), costs.max_drafts) + 1))
    # Where no K pays, the one that loses least is told.
    best = best_drafts(costs, found.rates, overhead=overhead)
    told = choices[best - 1] if best else max(choices, key=lambda each: each.speedup)
    return Forecast(temperature, costs, found.rates, choices, told, only_loops)


def advised(
    model: Model,
    prompts: Sequence[Prompt],
    plan: Plan,
    *,
    batches: Sequence[int] = (1, 2, 4, 8),
    contexts: Sequence[int] = (),
    source: str = "",
    on_run: Callable[[Run], None] = lambda run: None,
    on_costs: Callable[[Costs], None] = lambda costs: None,
) -> "Advice":
    """Decode by the plan, then measure the costs of every batch size and context (none: the texts') -> advice.

    Raises ConfigError, before anything is decoded, for sizes that do not fit the model.
    """
    largest = plan.drafts[-1]
    for context, batch in product(contexts or (1,), batches):
        check(model, drafts=largest, batch=batch, context=context)
    report, found = measured(model, prompts, plan, source=source, on_run=on_run), []
    for context, batch in product(contexts or (report.costs.context,), batches):
        found.append(measured_costs(model, drafts=largest, batch=batch, context=context, path=plan.path))
        on_costs(found[-1])
    return Advice(report, tuple(found))


@dataclass(frozen=True)
class Advice:
    """report: the runs behind it, plain and at the largest K. costs: one or more batch sizes and contexts."""

    report: Report
    costs: tuple[Costs, ...]
    forecasts: tuple[Forecast, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "forecasts", tuple(self._forecasts()))

    def _forecasts(self) -> Sequence[Forecast]:
        plan = self.report.plan
        largest = {at: self.report.figures(at, plan.drafts[-1]) for at in plan.temperatures}
        return [
            forecast(
                each.acceptance, costs, temperature=at, overhead=max(0.0, each.overhead), only_loops=each.only_loops
            )
            for at, each in largest.items()
            for costs in self.costs
        ]

    @property
    def headlines(self) -> list[Forecast]:
        """The first batch size and context at every temperature."""
        return [self.forecasts[place] for place in range(0, len(self.forecasts), len(self.costs))]

    def as_record(self) -> dict[str, object]:
        """The JSON document; the first forecast's verdict is told at its top."""
        plan = self.report.plan
        largest = [self.report.figures(at, plan.drafts[-1]) for at in plan.temperatures]
        return {
            "model": self.report.source,
            "verdict": self.forecasts[0].words,
            "pays": self.forecasts[0].pays,
            "definitions": DEFINITIONS,
            "machine": vars(self.report.machine),
            "plan": vars(plan),
            "warnings": self.report.warnings,
            "measured": [each.as_record() for each in largest],
            "costs": [costs.as_record() for costs in self.costs],
            "forecasts": [each.as_record() for each in self.forecasts],
        }
