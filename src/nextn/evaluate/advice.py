"""Advice on whether to use MTP here and with which K, from measured acceptance and costs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product

from nextn.errors import ConfigError
from nextn.evaluate.benchmark import BenchmarkFigures, BenchmarkReport, run_benchmark
from nextn.evaluate.benchmark_runs import Run
from nextn.evaluate.decoding_costs import REPORT_S, check_sizes, measure_costs, step_bytes
from nextn.evaluate.workload import BenchmarkPlan, Prompt
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.settings import WEIGHT_BITS, WEIGHTS
from nextn.stats import acceptance
from nextn.stats.acceptance import Acceptance, expected_length, rates_record
from nextn.stats.speedup import DEFINITION, Costs, best_k, break_even, expected_speedup, uniform_rate

OTHER = "int8"  # weights of another precision, whose speed is measured beside that of the weights as stored
REPETITIVE = "on other prompts: every text is repetitive"
OTHER_STEPS = "again: the machine's load changed between the texts and the costs"
DEFINITIONS = {
    "speedup": DEFINITION,
    "interval": "the same with every a_k at the low, and at the high end of its 95 % Wilson interval",
    "acceptance": acceptance.DEFINITION,
    "overhead": "o, measured at the largest K and batch 1 by this decoder; assumed equal for every K and batch",
    "break_even": "the acceptance, equal at all depths, at which this K has speedup 1; null: there is none",
    "pays": "the low end of the interval, at the best K, is above 1, not all texts are repetitive, and a step "
    "of plain decoding took the same time in the texts as in the costs",
    "best_num_speculative_tokens": "the best K if it pays, else 0: leave MTP off",
    "other_weights": "speed with these weights in that of plain decoding with the model's own: without MTP, and at the "
    "best K, which is given; first batch size and context. null: they do not read fewer bytes here",
    "measured": "speedup of the decoder at the largest K in this run, to compare with what was expected",
}


@dataclass(frozen=True)
class Choice:
    """The expected speedup at a K. break_even: None if no acceptance makes it pay."""

    num_speculative_tokens: int
    speedup: float
    interval: tuple[float, float]
    break_even: float | None


@dataclass(frozen=True)
class Forecast:
    """The expected speedup of every K > 0 at one temperature, batch size and context."""

    temperature: float
    costs: Costs
    rates: tuple[float, ...]
    choices: tuple[Choice, ...]
    best: Choice  # if none pays, the one that loses least
    doubt: str = ""  # why it is no advice: what to measure again, and the reason

    @property
    def pays(self) -> bool:
        """Whether MTP is faster with enough certainty to use it."""
        return self.best.interval[0] > 1 and not self.doubt

    @property
    def best_length(self) -> float:
        """AL at the best K."""
        return expected_length(self.rates[: self.best.num_speculative_tokens])

    @property
    def best_rate(self) -> float:
        """The acceptance, equal at all depths, of this AL: what a break-even is compared with."""
        rate = uniform_rate(self.best_length, self.best.num_speculative_tokens)
        return 1.0 if rate is None else rate  # an AL of K + 1, but for rounding

    @property
    def summary(self) -> str:
        """The advice, in one sentence."""
        best = self.best
        low, high = best.interval
        expected = f"{best.speedup:.2f} x expected ({low:.2f} to {high:.2f}) at K = {best.num_speculative_tokens}"
        if self.doubt:
            return f"leave it off until measured {self.doubt}, and these give {expected}"
        if self.pays:
            return f"turn it on: {expected}"
        if best.speedup > 1:
            unsure = f"{expected}, which includes a slowdown; more text narrows it"
            return f"leave it off here, as it may not be faster: {unsure}"
        if best.break_even is None:
            return f"leave it off here: {expected}; at these costs no acceptance makes it pay"
        return (
            f"leave it off here: {expected}; it pays from an acceptance of {best.break_even:.2f} on, and has "
            f"{self.best_rate:.2f}"
        )

    def as_record(self) -> dict[str, object]:
        """Return the forecast for JSON reports."""
        return {
            "temperature": self.temperature,
            "batch": self.costs.batch,
            "context": self.costs.context,
            "acceptance": rates_record(self.rates),
            "mean_acceptance_length": self.best_length,
            "pays": self.pays,
            "best_num_speculative_tokens": self.best.num_speculative_tokens if self.pays else 0,
            "summary": self.summary,
            "by_num_speculative_tokens": list(map(asdict, self.choices)),
        }


def forecast(
    counts: Acceptance, costs: Costs, *, temperature: float, overhead: float = 0.0, doubt: str = ""
) -> Forecast:
    """Compute the expected speedup of every K from the acceptance of runs at the largest K.

    `overhead` is the o of `DEFINITION`, in baseline steps. Raises ConfigError if no round had drafts.
    """
    rates, bounds = counts.rates, counts.intervals()
    if not bounds:
        raise ConfigError("no text was long enough for a round with drafts; give other prompts, or more max_tokens")
    low, high = ([bound[end] for bound in bounds] for end in (0, 1))

    def choice(k: int) -> Choice:
        expected, least, most = (expected_speedup(costs, each, k, overhead=overhead) for each in (rates, low, high))
        return Choice(k, expected, (least, most), break_even(costs, k, overhead=overhead))

    choices = tuple(choice(k) for k in range(1, min(len(bounds), costs.max_speculative_tokens) + 1))
    best_num = best_k(costs, rates, overhead=overhead)
    best = choices[best_num - 1] if best_num else max(choices, key=lambda each: each.speedup)
    return Forecast(temperature, costs, tuple(rates), choices, best, doubt)


def advise(
    model: Model,
    prompts: Sequence[Prompt],
    plan: BenchmarkPlan,
    *,
    batches: Sequence[int] = (1, 2, 4, 8),
    contexts: Sequence[int] = (),
    source: str = "",
    on_run: Callable[[Run], None] = lambda run: None,
    on_costs: Callable[[Costs], None] = lambda costs: None,
) -> "Advice":
    """Decode by the plan, then measure the costs of every batch size and context (none: the mean length of the texts).

    Raises ConfigError, before anything is decoded, if the sizes do not fit the model.
    """
    largest = plan.k_values[-1]
    for context, batch in product(contexts or (1,), batches):
        check_sizes(model, num_speculative_tokens=largest, batch=batch, context=context)
    report, costs = run_benchmark(model, prompts, plan, source=source, on_run=on_run), []
    for context, batch in product(contexts or (report.costs.context,), batches):
        is_measured = (batch, context) == (report.costs.batch, report.costs.context)
        costs.append(report.costs if is_measured else _costs(model, plan, batch, context))
        on_costs(costs[-1])
    return Advice(report, tuple(costs), _other_costs(model, plan, costs[0]))


def _costs(model: Model, plan: BenchmarkPlan, batch: int, context: int) -> Costs:
    k = plan.k_values[-1]
    return measure_costs(
        model, num_speculative_tokens=k, batch=batch, context=context, min_s=REPORT_S, backend=plan.backend
    )


def _other_costs(model: Model, plan: BenchmarkPlan, stored: Costs) -> Costs | None:
    """Measure the costs with `OTHER` weights, right after the stored ones; None if they do not save bytes here."""
    trunk, engine = model.trunk, backend_for(model, plan.backend)
    bits = WEIGHT_BITS[OTHER]
    if engine.name != "native" or trunk.weights != WEIGHTS[0] or step_bytes(trunk, bits) > 0.75 * step_bytes(trunk):
        return None
    trunk.weights = OTHER
    try:
        return _costs(model, plan, stored.batch, stored.context)
    finally:
        trunk.weights = WEIGHTS[0]


@dataclass(frozen=True)
class Advice:
    """Forecasts for every temperature, batch size and context, and the runs behind them."""

    report: BenchmarkReport  # of baseline decoding and the largest K
    costs: tuple[Costs, ...]  # of one or more batch sizes and contexts
    other: Costs | None = None  # with `OTHER` weights, of the first batch size and context
    forecasts: tuple[Forecast, ...] = field(init=False)

    def __post_init__(self) -> None:
        forecasts = [
            forecast(
                figures.acceptance,
                costs,
                temperature=figures.temperature,
                overhead=max(0.0, figures.overhead),
                doubt=REPETITIVE if figures.all_repetitive else OTHER_STEPS if self.report.step_note else "",
            )
            for figures in self._figures
            for costs in self.costs
        ]
        object.__setattr__(self, "forecasts", tuple(forecasts))

    @property
    def _figures(self) -> list[BenchmarkFigures]:
        """Those of the largest K, by temperature."""
        plan = self.report.plan
        return [self.report.figures(temperature, plan.k_values[-1]) for temperature in plan.temperatures]

    @property
    def headlines(self) -> list[Forecast]:
        """The first batch size and context at every temperature."""
        return [self.forecasts[index] for index in range(0, len(self.forecasts), len(self.costs))]

    def by_batch(self, each: Forecast) -> str | None:
        """What is best at the other batch sizes, at this temperature and context; None without any."""
        key = (each.temperature, each.costs.context)
        others = [one for one in self.forecasts if (one.temperature, one.costs.context) == key and one is not each]
        found = (f"K = {one.best.num_speculative_tokens}" if one.pays else "off" for one in others)
        parts = [f"{best} at {one.costs.batch}" for best, one in zip(found, others, strict=True)]
        return f"at other batch sizes: {', '.join(parts)}" if parts else None

    def other_speeds(self, each: Forecast) -> tuple[float, float, int] | None:
        """Return the speed with `OTHER` weights: without MTP, at the best K, and that K; None if it was not measured.

        The unit is plain decoding with the model's own weights. Acceptance and overhead are assumed to be the same.
        """
        if self.other is None:
            return None
        ratio = each.costs.steps[0].median / self.other.steps[0].median
        overhead = max(0.0, self.report.figures(each.temperature, self.report.plan.k_values[-1]).overhead) * ratio
        speeds = {
            choice.num_speculative_tokens: ratio
            * expected_speedup(self.other, each.rates, choice.num_speculative_tokens, overhead=overhead)
            for choice in each.choices
        }
        best = max(speeds, key=speeds.__getitem__)
        return ratio, speeds[best], best

    def other_summary(self, each: Forecast) -> str | None:
        """The speeds with `OTHER` weights in one sentence, and whether these are faster than MTP; None without them."""
        if (speeds := self.other_speeds(each)) is None:
            return None
        without, with_mtp, k = speeds
        text = f"with --weights {OTHER}: {without:.2f} x without MTP, {with_mtp:.2f} x at K = {k}; its text differs"
        if without <= each.best.speedup:
            return text
        stored = f"MTP with the stored weights ({each.best.speedup:.2f} x at K = {each.best.num_speculative_tokens})"
        return f"{text}. Even without MTP, {OTHER} ({without:.2f} x) is faster than {stored}"

    def as_record(self) -> dict[str, object]:
        """Return the JSON document, with the first forecast's advice at its top."""
        return {
            "model": self.report.source,
            "summary": self.forecasts[0].summary,
            "pays": self.forecasts[0].pays,
            "definitions": DEFINITIONS,
            "machine": vars(self.report.machine),
            "plan": asdict(self.report.plan),
            "warnings": self.report.warnings,
            "measured": [figures.as_record() for figures in self._figures],
            "costs": [costs.as_record() for costs in self.costs],
            "forecasts": [each.as_record() for each in self.forecasts],
            "other_weights": self.other and {OTHER: [self.other_speeds(each) for each in self.headlines]},
        }
