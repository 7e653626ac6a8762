"""Benchmark: baseline and MTP decoding of the same prompts in turn, with the figures and the JSON record.

Prompts are decoded one by one. What a reader must know to trust a figure (repetitive texts, short texts, outputs that
differ from the baseline's) is reported beside it.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product

from nextn.data.degeneracy import MIN_TOKENS, degeneracy, degeneracy_notes
from nextn.decoding.generate import eos_tokens
from nextn.evaluate.benchmark_runs import Run, benchmark_runs
from nextn.evaluate.decoding_costs import REPORT_S, Machine, measure_costs
from nextn.evaluate.reference import reference_of_texts
from nextn.evaluate.reference_report import ReferenceReport
from nextn.evaluate.reference_texts import GeneratedTexts, check_thinking, play_turns, prompt_tokens
from nextn.evaluate.teacher_forced import ReferenceText
from nextn.evaluate.workload import ADAPTIVE, BenchmarkPlan, Prompt, ReferencePlan, by_domain, indices_without
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.speculative.draft_vocabulary import DraftVocabulary
from nextn.stats import acceptance
from nextn.stats.acceptance import Acceptance, expected_length, mean_length
from nextn.stats.speedup import DEFINITION, Costs, Spread, expected_speedup

DEFINITIONS = {
    "num_speculative_tokens": "K; -1: as many as pay in each round (draft_policy.AdaptiveLength), up to the largest",
    "tokens_per_s": "new tokens per second of one prompt after the prefill and its token; median and quartiles",
    "speedup": "tokens/s of MTP over baseline decoding of the same prompt in the same turn; median and quartiles",
    "tokens_per_round": "new tokens per pass of the trunk after the prefill, whatever was drafted",
    "acceptance": acceptance.DEFINITION + "; 95 % Wilson intervals",
    "copied": "acceptance in rounds whose drafts were copied from the text, which `acceptance` leaves out",
    "expected_speedup": DEFINITION + "; here o = 0, with the AL that was measured at this K",
    "achieved": "speedup / expected_speedup",
    "plain_step": "seconds per baseline step, median: while decoding the texts, and in the cost curve, whose steps are "
    "the unit of v, c and expected_speedup; where they differ, so do expected and measured speedup",
    "overhead": "o: seconds per round over those of baseline decoding of the same prompt in the same turn, median, "
    "- v(K+1) - K c; it includes the refresh of the head's KV cache over accepted positions, and host work",
    "share": "of the wall time after the prefill: drafting, verifying, and everything else (host)",
    "bytes_per_token": "weights read per new token: (trunk's pass + K draft steps) / AL",
    "bandwidth_used": "bytes_per_token * tokens_per_s / the bandwidth of a copy on this machine, measured in this run; "
    "weights that stay in a cache can make it exceed 1",
    "repetitive": "prompts with a repetitive text (degeneracy.degeneracy) at this temperature: left out of the figures",
    "only_repetitive": "all of these texts are repetitive, so none could be left out: the figures say little",
    "short": f"prompts with a text of fewer than {MIN_TOKENS} tokens, too short to detect repetition reliably",
    "draft_vocab": "tokens that the head drafts from, and the share of emitted tokens that are not among them",
    "identical": "greedy texts with MTP that equal baseline decoding's; below float32, near-ties may differ",
    "one_pass": "acceptance at every K, scored in one pass over the texts of baseline decoding, as by `nextn measure`",
    "peak_memory": "bytes: resident peak of the process on a CPU, the allocator's peak on a GPU",
}


# Steps in the texts and in the cost curve differ by more than this factor: `expected_speedup` misleads.
_MAX_STEP_RATIO = 1.25
# AL of greedy decoding and of one pass over the same texts, which are equal but for rounding, differ by more.
_MAX_LENGTH_RATIO = 1.05


@dataclass(frozen=True)
class BenchmarkFigures:
    """Figures of one K at one temperature over a domain's prompts, or all; `DEFINITIONS` says what each number is.

    Prompts with repetitive texts are left out, unless all have one (`all_repetitive`).
    """

    temperature: float
    num_speculative_tokens: int
    domain: str
    all_repetitive: bool
    tokens_per_s: Spread
    speedup: Spread
    tokens_per_round: float
    acceptance: Acceptance
    copied: Acceptance
    share: dict[str, float]
    expected_speedup: float
    overhead: float
    bytes_per_token: float
    bandwidth_used: float

    def as_record(self) -> dict[str, object]:
        """Return the figures for JSON reports, with null for nan."""
        acceptance, copied = self.acceptance.as_record(), self.copied.as_record()
        del acceptance["definition"], copied["definition"]
        numbers = {
            "expected_speedup": self.expected_speedup,
            "achieved": self.speedup.median / self.expected_speedup,
            "overhead": self.overhead,
            "bytes_per_token": self.bytes_per_token,
            "bandwidth_used": self.bandwidth_used,
        }
        return {
            "temperature": self.temperature,
            "num_speculative_tokens": self.num_speculative_tokens,
            "domain": self.domain,
            "only_repetitive": self.all_repetitive,
            "tokens_per_s": self.tokens_per_s.as_record(),
            "speedup": self.speedup.as_record(),
            "tokens_per_round": None if math.isnan(self.tokens_per_round) else self.tokens_per_round,
            **acceptance,
            **({"copied": copied} if self.copied.num_rounds else {}),
            "share": self.share,
            **{name: None if math.isnan(value) else value for name, value in numbers.items()},
        }


@dataclass(frozen=True)
class BenchmarkReport:
    """The runs of one benchmark, from which all figures follow."""

    source: str  # name of the model
    plan: BenchmarkPlan
    prompts: tuple[Prompt, ...]
    runs: tuple[Run, ...] = field(repr=False)
    costs: Costs
    machine: Machine
    torch_reason: str = ""  # why the torch backend decoded; empty for the native one
    draft_vocabulary: DraftVocabulary | None = None
    one_pass: ReferenceReport | None = None  # acceptance at every K on the texts of baseline decoding

    @property
    def undraftable_share(self) -> float:
        """The share of emitted tokens that are not in the draft vocabulary."""
        if self.draft_vocabulary is None:
            return 0.0
        draftable = set(self.draft_vocabulary.ids.tolist())
        emitted = [token for run in self.runs if run.num_speculative_tokens for token in run.tokens]
        return sum(token not in draftable for token in emitted) / len(emitted)

    def num_positions(self, model: Model) -> int:
        """Return the length of the longest text, prompt included, in tokens."""
        prompts = [len(prompt_tokens(model, prompt, self.plan)) for prompt in self.prompts]
        return max(prompts[run.prompt] + len(run.tokens) for run in self.runs)

    @cached_property
    def repetitive(self) -> dict[float, set[int]]:
        """Temperature -> indices of the prompts with a repetitive text."""
        return {
            temperature: {run.prompt for run in self._runs_at(temperature) if degeneracy(run.tokens).is_degenerate}
            for temperature in self.plan.temperatures
        }

    @cached_property
    def short(self) -> dict[float, set[int]]:
        """Temperature -> indices of the prompts with a text too short to detect repetition."""
        return {
            temperature: {run.prompt for run in self._runs_at(temperature) if len(run.tokens) < MIN_TOKENS}
            for temperature in self.plan.temperatures
        }

    @property
    def identical(self) -> tuple[int, int]:
        """(greedy texts with MTP that equal baseline decoding's, all greedy texts with MTP)."""
        greedy = {(run.prompt, run.repeat, run.num_speculative_tokens): run.tokens for run in self._runs_at(0.0)}
        same = [tokens == greedy[prompt, repeat, 0] for (prompt, repeat, k), tokens in greedy.items() if k]
        return sum(same), len(same)

    @property
    def plain_step_s(self) -> float:
        """Median seconds of a baseline step while decoding the texts; nan without one."""
        return Spread.of([run.round_s for run in self.runs if not run.num_speculative_tokens]).median

    @property
    def step_note(self) -> str | None:
        """A warning if a baseline step took another time in the texts than in the cost curve."""
        texts_s, curve_s = self.plain_step_s, self.costs.steps[0].median
        ratio = texts_s / curve_s
        if math.isnan(ratio) or 1 / _MAX_STEP_RATIO <= ratio <= _MAX_STEP_RATIO:
            return None
        return (
            f"a step of plain decoding took {texts_s * 1e3:.2f} ms in the texts and {curve_s * 1e3:.2f} ms in the cost "
            f"curve, which was measured after them; in steps of the texts, `expected` is {ratio:.2f} x the one shown. "
            "The machine's load or memory bandwidth changed: run it again before you trust `expected`"
        )

    @property
    def one_pass_note(self) -> str | None:
        """A warning if greedy decoding accepted more or fewer drafts than one pass over its own texts says."""
        k = self.plan.k_values[-1]
        if self.one_pass is None or 0.0 not in self.plan.temperatures or self.plan.num_copy_tokens:
            return None  # rounds that verify copies are left out, so those of the head are others
        # From the rates: the round that the end of a text cuts short lowers the mean of what rounds emitted.
        decoded = expected_length(self.figures(0.0, k).acceptance.rates)
        scored = self.one_pass.figures(0.0, k=k).length.value
        if not max(decoded / scored, scored / decoded) > _MAX_LENGTH_RATIO:
            return None
        return (
            f"greedy decoding at K = {k} has AL {decoded:.2f}, and one pass over the same texts {scored:.2f}: the head "
            "drafts from fewer bits or tokens than it was trained with, or its cache differs. Decode with --backend "
            "torch: if AL is then the same, `nextn measure` gives the head's own"
        )

    @property
    def warnings(self) -> list[str]:
        """Reasons to trust the figures less."""
        warnings = []
        for temperature in self.plan.temperatures:
            repetitive, num_short = self.repetitive[temperature], len(self.short[temperature])
            warnings += degeneracy_notes(
                temperature, len(self.prompts), degenerate=repetitive, short=num_short, measured=self.plan.temperatures
            )
        if self.torch_reason and self.plan.backend == "auto":
            warnings.append(f"decoded by the torch backend: {self.torch_reason}")
        if self.draft_vocabulary is not None:
            warnings.append(
                f"the draft vocabulary has {len(self.draft_vocabulary)} tokens; {self.undraftable_share:.1%} of the "
                "emitted tokens are not among them, and at most that much acceptance is lost"
            )
        same, texts = self.identical
        if same < texts:
            ties = "" if self.machine.dtype == "float32" else f"; near-ties in {self.machine.dtype} can cause this"
            warnings.append(f"greedy: {texts - same} of {texts} texts differ from baseline decoding's{ties}")
        return [*warnings, *filter(None, (self.one_pass_note, self.step_note, self.machine.busy_note))]

    def figures(self, temperature: float, k: int, domain: str = "all") -> BenchmarkFigures:
        """Compute figures of one K over a domain's prompts without repetitive texts, or all if every one has one."""
        indices = indices_without(self.repetitive[temperature], self.prompts, domain)
        plain, mtp = ([run for run in self._runs_at(temperature, each) if run.prompt in indices] for each in (0, k))
        baselines = {(run.prompt, run.repeat): run for run in plain}
        pairs = [(run, baselines[run.prompt, run.repeat]) for run in mtp]
        # A repeated greedy text is the same text: it counts once.
        log = [each for run in mtp if run.temperature or not run.repeat for each in run.rounds]
        counts = Acceptance.of(log)
        rows = [each.rows[0] for run in mtp for each in run.rounds[1:]]
        drafted = [0 if row.copied else len(row.drafts) for row in rows]
        # Rounds without drafts count, too.
        tokens_per_round = mean_length(sum(len(run.tokens) - 1 for run in mtp), sum(len(run.rounds) - 1 for run in mtp))
        if k and self.plan.num_copy_tokens:
            length, cost = tokens_per_round, math.nan  # rounds that verify copies are not in the cost curve
        elif k == ADAPTIVE:
            length = tokens_per_round
            cost = statistics.mean(map(self.costs.round_cost, drafted)) if drafted else self.costs.round_cost(0)
        else:
            length, cost = counts.length if k else 1.0, self.costs.round_cost(k)
        speed = Spread.of([run.tokens_per_s for run in mtp])
        bytes_read = self.machine.step_bytes + statistics.mean(drafted or [0]) * self.machine.draft_bytes
        bytes_per_token = bytes_read / length
        return BenchmarkFigures(
            temperature=temperature,
            num_speculative_tokens=k,
            domain=domain,
            all_repetitive=indices <= self.repetitive[temperature],
            tokens_per_s=speed,
            speedup=Spread.of([run.tokens_per_s / other.tokens_per_s for run, other in pairs]),
            tokens_per_round=tokens_per_round,
            acceptance=counts,
            copied=Acceptance.of(log, copied=True),
            share=_time_shares(mtp),
            expected_speedup=length / cost,
            overhead=Spread.of([run.round_s / other.round_s for run, other in pairs]).median - cost,
            bytes_per_token=bytes_per_token,
            bandwidth_used=bytes_per_token * speed.median / self.machine.bandwidth,
        )

    def table(self) -> list[BenchmarkFigures]:
        """Compute the figures of every temperature and K, over all prompts and by domain."""
        domains = ["all", *by_domain(self.prompts)]
        return [self.figures(*key) for key in product(self.plan.temperatures, self.plan.choices, domains)]

    def theory(self, temperature: float) -> list[tuple[int, float]]:
        """Compute (K, expected speedup) for every K up to the largest, from the a_k of the runs at the largest."""
        rates = self.figures(temperature, self.plan.k_values[-1]).acceptance.rates
        return [(k, expected_speedup(self.costs, rates, k)) for k in range(len(rates) + 1)]

    def as_record(self) -> dict[str, object]:
        """Return the JSON document."""
        same, texts = self.identical
        counts = {
            f"{temperature:g}": {
                "prompts": len(self.prompts),
                "repetitive": sorted(self.repetitive[temperature]),
                "short": sorted(self.short[temperature]),
            }
            for temperature in self.plan.temperatures
        }
        vocabulary = self.draft_vocabulary
        return {
            "model": self.source,
            "definitions": DEFINITIONS,
            "machine": vars(self.machine),
            "plan": asdict(self.plan),
            "backend": "torch" if self.torch_reason else "native",
            "draft_vocab": None if vocabulary is None else [len(vocabulary), self.undraftable_share],
            "domains": {domain: len(indices) for domain, indices in by_domain(self.prompts).items()},
            "texts": counts,
            "identical": {"same": same, "texts": texts},
            "warnings": self.warnings,
            "costs": self.costs.as_record(),
            "plain_step": {
                "texts_s": None if math.isnan(self.plain_step_s) else self.plain_step_s,
                "costs_s": self.costs.steps[0].median,
            },
            "figures": [figures.as_record() for figures in self.table()],
            "theory": {f"{temperature:g}": self.theory(temperature) for temperature in self.plan.temperatures},
            **({} if self.one_pass is None else {"one_pass": self.one_pass.to_dict()}),
        }

    def _runs_at(self, temperature: float, k: int | None = None) -> list[Run]:
        return [run for run in self.runs if run.temperature == temperature and k in (None, run.num_speculative_tokens)]


def _time_shares(runs: Sequence[Run]) -> dict[str, float]:
    wall = sum(run.wall_s for run in runs if len(run.rounds) > 1)
    if not wall:
        return {}
    draft, verify = sum(run.draft_s for run in runs) / wall, sum(run.verify_s for run in runs) / wall
    return {"draft": draft, "verify": verify, "host": 1 - draft - verify}


def run_benchmark(
    model: Model,
    prompts: Sequence[Prompt],
    plan: BenchmarkPlan,
    *,
    source: str = "",
    on_run: Callable[[Run], None] = lambda run: None,
) -> BenchmarkReport:
    """Decode by the plan, then measure the costs at the mean length of the texts.

    `source` names the model in the report. Raises ConfigError if the prompts or the plan do not fit the model.
    """
    check_thinking(model, plan)
    prompts = play_turns(model, prompts, _reference_plan(plan))
    log = []
    for run in benchmark_runs(model, prompts, plan):
        log.append(run)
        on_run(run)
    lengths = [len(prompt_tokens(model, prompts[run.prompt], plan)) + len(run.tokens) // 2 for run in log]
    max_context = (model.trunk.max_length or max(lengths) * 2) - plan.k_values[-1] - 1
    context = min(round(statistics.mean(lengths)), max_context)
    costs = measure_costs(
        model, num_speculative_tokens=plan.k_values[-1], context=context, min_s=REPORT_S, backend=plan.backend
    )
    engine, draft_vocabulary = backend_for(model, plan.backend), model.head.draft_vocabulary if model.head else None
    machine = Machine.of(model, engine)
    return BenchmarkReport(source, plan, tuple(prompts), tuple(log), costs, machine, engine.reason, draft_vocabulary)


def _reference_plan(plan: BenchmarkPlan) -> ReferencePlan:
    return ReferencePlan(
        plan.k_values[-1], plan.temperatures, max(3, plan.max_tokens), chat=plan.chat, seed=plan.seed,
        backend=plan.backend, thinking=plan.thinking,
    )  # fmt: skip


def with_one_pass(
    report: BenchmarkReport, model: Model, *, on_score: Callable[[], None] = lambda: None
) -> BenchmarkReport:
    """Add the acceptance at every K, scored in one pass over each text of baseline decoding."""
    plan, eos = report.plan, eos_tokens(model)
    reference = _reference_plan(plan)
    prompts = [prompt_tokens(model, prompt, plan) for prompt in report.prompts]
    generated = {
        temperature: GeneratedTexts(
            tuple(
                ReferenceText(prompts[run.prompt], run.tokens, temperature, run.tokens[-1] in eos)
                for run in report.runs
                if (run.temperature, run.num_speculative_tokens, run.repeat) == (temperature, 0, 0)
            ),
            (),
            None,
        )
        for temperature in reference.temperatures
    }
    one_pass = reference_of_texts(model, report.prompts, generated, reference, on_score=on_score)
    return replace(report, one_pass=one_pass)
