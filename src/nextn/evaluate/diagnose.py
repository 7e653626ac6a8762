"""The report on an engine's low acceptance: its draft counts beside those of the head with and without faults."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property

from nextn import __version__
from nextn.engines.check_result import CheckReport, CheckResult, Outcome
from nextn.engines.counters import COPIED
from nextn.evaluate.engine_probe import DOCUMENTED_PRIOR, next_checks
from nextn.evaluate.faults import CONTEXT, FAULTS, OVERRIDDEN, WEIGHTS, cause_found
from nextn.evaluate.likelihoods import (
    MIN_FAULT_FIT,
    MIN_FIT,
    NO_FAULT,
    Cause,
    Evidence,
    NeededEvidence,
    can_decide,
    combine_causes,
    indistinguishable_from,
    name_causes,
    needed_evidence,
    without_fault,
)
from nextn.evaluate.observed_case import ObservedCase
from nextn.evaluate.reference_report import ReferenceReport
from nextn.text_format import some

_POOR_RATE = 0.2  # a reference with a lower a_1 is a poor head, whatever an engine does with it
INCONCLUSIVE = "inconclusive"

DEFINITIONS = {
    "ratio": "likelihood of the engine's counts under this cause, divided by that under the likeliest cause",
    "p_value": "probability of counts at least this far off if the cause is true",
    "named": "no-fault unless a fault is 100 times likelier; else the faults that fit (p_value of 0.01 or more), are "
    "likelier than no-fault and, where acceptance by position is known, at least a tenth as likely as the likeliest "
    "cause; [] = there are none; acceptance-overridden = a setting of the engine decides the acceptance; weights = the "
    "counts are as expected, but the head is poor; context-length = only long prompts fall short; inconclusive = no "
    "fault is 100 times likelier than no-fault, but there is too little data to exclude that half of the drafts are "
    "lost (see needed), rounds of fewer than K drafts may explain the counts, more drafts are accepted than the head "
    "should have accepted, which is no fault, or the run was interrupted (see untested)",
    "untested": "causes that were not compared, as the run was interrupted; [] = all were",
    "needed": "estimate of the data that would decide: new tokens and texts of the reference, rounds of the engine "
    "(null: its counts are enough); null = decided, or more data of this kind would not decide",
    "indistinguishable": "causes that this many rounds cannot distinguish from the named ones: the expected ratio is "
    "below 100",
    "undetectable": "faults that fit and that this many rounds cannot distinguish from no-fault",
    "acceptance": "a_1..a_K, conditional on the shallower depths",
}


@dataclass(frozen=True, eq=False)
class Diagnosis(CheckReport):
    """The likeliest causes of what an engine counted.

    Attributes:
        source: Name of the checkpoint.
        reference: The acceptance that its head should reach.
        cases: One per temperature, or two if prompts are of very different length: the short ones first.
        audit_notes: Findings of the audit, one line each.
        priors: Fault -> prior odds, from what is documented of the engine.
        documented: Faults that the engine's published code for this family has.
        untested: Faults that were not compared, as the run was interrupted.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("answer.json").write_text('{"timings": {"draft_n": 1000, "draft_n_accepted": 20}}')  # of llama.cpp
        >>> plan = nextn.ReferencePlan(temperatures=(0.0,), max_tokens=8, backend="torch")
        >>> found = nextn.diagnose("tiny", "answer.json", ["def add(a, b):"], plan, num_speculative_tokens=2)
        >>> found.engine, found.has_no_fault
        ('llama.cpp', False)
    """

    source: str
    reference: ReferenceReport
    cases: tuple[ObservedCase, ...]
    audit_notes: tuple[str, ...] = ()
    priors: Mapping[str, float] = field(default_factory=dict)
    documented: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()

    @property
    def engine(self) -> str:
        """Name of the engine, by its counters."""
        return self.cases[0].observation.counters.engine

    @cached_property
    def causes(self) -> list[Cause]:
        """All hypotheses over all cases, the likeliest first."""
        return combine_causes([case.causes for case in self.cases], priors=self.priors)

    def cause(self, name: str) -> Cause:
        """Return the hypothesis of this name, over all cases."""
        return next(cause for cause in self.causes if cause.name == name)

    @cached_property
    def named(self) -> tuple[str, ...]:
        """("no-fault",), or the faults found, by AL alone all that fit: () if no known cause explains the counts.

        Four are not among the hypotheses: `acceptance-overridden`, if a setting of the engine decides the acceptance,
        `weights`, if the counts are as expected, but the head itself is poor, `context-length`, if only long prompts
        fall short, and `inconclusive`, if the evidence cannot exclude that half of the drafts are lost, if rounds of
        fewer than K drafts or of copies may explain the counts, or more drafts are accepted than without a fault.
        """
        if self.overrides:
            return (OVERRIDDEN,)
        if self.untested:
            return (INCONCLUSIVE,)
        names = self._supported
        if names != (NO_FAULT,) and (self._may_be_short or self._copies):
            return (INCONCLUSIVE,)
        if names == (NO_FAULT,) and self.reference_rate < _POOR_RATE:
            return (WEIGHTS,)
        if names == (NO_FAULT,) and not can_decide(self._evidence):
            return (INCONCLUSIVE,)
        if not names and self._falls_with_length:
            return (CONTEXT,)
        return (INCONCLUSIVE,) if self._is_above else names

    @cached_property
    def _supported(self) -> tuple[str, ...]:
        return name_causes(self.causes, only_length=self._has_only_length)

    @property
    def _has_only_length(self) -> bool:
        return not any(case.counts.num_drafted for case in self.cases)

    @property
    def _is_above(self) -> bool:
        """Whether more drafts were accepted than without a fault, beyond chance, and in no case less."""
        return self._supported != (NO_FAULT,) and all(
            case.num_accepted > without_fault(case.expected).accepted_per_round[0]
            or name_causes(case.causes) == (NO_FAULT,)
            for case in self.cases
        )

    @property
    def _may_be_short(self) -> bool:
        """Whether an engine without fault may accept as much in rounds of fewer than K drafts: at least a_1 in each."""
        return all(
            case.has_short_rounds and case.num_accepted >= without_fault(case.expected).raw_rates[0]
            for case in self.cases
        )

    @property
    def _copies(self) -> bool:
        """Whether the engine also copied drafts, in rounds that the counts leave out."""
        return any(COPIED in note for case in self.cases for note in case.observation.counters.notes)

    @property
    def overrides(self) -> tuple[str, ...]:
        """Settings of the engine that force or relax acceptance."""
        return tuple(dict.fromkeys(each for case in self.cases for each in case.observation.counters.overrides))

    @cached_property
    def indistinguishable(self) -> tuple[str, ...]:
        """Causes that fit, not named, that this many rounds cannot distinguish from the likeliest of the named.

        None beside an engine without fault: those are the `undetectable`.
        """
        best = self.named[0] if self.named else ""
        if self.has_no_fault or not any(cause.name == best for cause in self.causes):
            return ()
        like = [self.cause(name) for name in self._like(best) if name not in self.named]
        near = [cause for cause in like if not cause.is_separated(self.cause(best))]
        return tuple(cause.name for cause in near if cause.p_value >= MIN_FAULT_FIT)

    @property
    def _evidence(self) -> list[Evidence]:
        return [case.evidence for case in self.cases]

    def _like(self, name: str) -> tuple[str, ...]:
        return indistinguishable_from(name, *self._evidence)

    @cached_property
    def undetectable(self) -> tuple[str, ...]:
        """Faults that the counts do not exclude, and that would not show, or hardly, in this many rounds."""
        faultless = self.cause(NO_FAULT)
        listed = {NO_FAULT, *self.named, *self.indistinguishable}
        fit = [cause for cause in self.causes if cause.name not in listed and cause.p_value >= MIN_FIT]
        near = [cause for cause in fit if not any(map(cause.is_separated, (faultless, self.causes[0])))]
        return tuple(cause.name for cause in near if NO_FAULT in self._like(cause.name))

    @property
    def has_no_fault(self) -> bool:
        """Whether the engine shows what this head should give."""
        return self.named == (NO_FAULT,)

    @property
    def is_inconclusive(self) -> bool:
        """Whether the evidence cannot tell an engine without fault from one that loses half of its drafts."""
        return self.named == (INCONCLUSIVE,)

    @cached_property
    def needed(self) -> NeededEvidence | None:
        """The evidence that would decide; None if the case is decided, or more of the same would not decide it."""
        if not self.is_inconclusive or self.untested or self._may_be_short or self._copies or self._is_above:
            return None
        return needed_evidence(self._evidence, driven=not any(case.other_workload for case in self.cases))

    @property
    def outcome(self) -> Outcome:
        return "passed" if self.has_no_fault else "inconclusive" if self.is_inconclusive else "failed"

    @property
    def checks(self) -> list[CheckResult]:
        """What to report about the named causes."""
        return [cause_found(name) for name in self.named if name not in (NO_FAULT, INCONCLUSIVE)]

    @property
    def reference_rate(self) -> float:
        """a_1 of the head at the lowest temperature without a fault."""
        return float(without_fault(self.cases[0].expected).raw_rates[0])

    @property
    def _falls_with_length(self) -> bool:
        """Whether short prompts show what they should, and long ones less."""
        halves = [case for case in self.cases if case.observation.temperature == self.cases[0].observation.temperature]
        if len(halves) < 2:
            return False
        short, long = halves
        expected = without_fault(long.expected).accepted_per_round[0]
        return (
            name_causes(short.causes) == (NO_FAULT,)
            and name_causes(long.causes) != (NO_FAULT,)
            and long.num_accepted < expected
        )

    @property
    def _deciding_case(self) -> ObservedCase:
        """The case that speaks most for the named fault, or most against every cause if none fits; else the first."""
        best = self.named[0] if self.named else self.causes[0].name
        if not self.named:
            return min(self.cases, key=lambda case: case.cause(best).p_value)
        if any(cause.name == best for cause in self.causes):
            return max(
                self.cases, key=lambda case: case.cause(best).log_likelihood - case.cause(NO_FAULT).log_likelihood
            )
        return self.cases[0]

    @property
    def summary(self) -> str:
        """The diagnosis, in one sentence."""
        case = self._deciding_case
        expected, counted = 1 + without_fault(case.expected).accepted_per_round[0], 1 + case.num_accepted
        temperature, several = case.observation.temperature, len({each.observation.temperature for each in self.cases})
        where = f" at temperature {temperature:g}" if several > 1 else ""
        figures = f"AL {counted:.2f} where this head should give {expected:.2f}{where}"
        if self.has_no_fault:
            return f"the engine shows what this head should give: {figures}"
        if self.overrides:
            return f"the acceptance is not the head's: {', '.join(self.overrides)}; {figures}"
        if self.untested:
            return (
                f"interrupted, so no cause is named: {figures}; the likeliest so far: {self.causes[0].name}; faults "
                f"not compared: {len(self.untested)}"
            )
        if self.is_inconclusive and self._is_above and not self._may_be_short:
            return f"the data cannot decide: {figures}, above it, which no fault causes: {self._above_text}"
        if self.is_inconclusive:
            doubt = "an engine that loses half of the accepted drafts is not excluded"
            return f"the data cannot decide: {figures}, and {doubt}; {self._needed_text}"
        if self.named == (WEIGHTS,):
            return f"the head is poor and the engine shows it: {figures}; a_1 = {self.reference_rate:.2f} at best"
        if self.named == (CONTEXT,):
            return f"short prompts give the expected acceptance, long ones do not ({figures} on the short ones)"
        if not self.named:
            side = "above" if counted > expected else "below"
            return f"no known fault explains it: {figures}, {side} it; none of {len(self.causes)} causes fits"
        return f"{' or '.join(self.named)}: {figures}; {self._odds}{self._assumed}"

    @property
    def _above_text(self) -> str:
        """What may have more drafts accepted than the head in a correct engine."""
        if all(case.other_workload for case in self.cases):
            return "easier prompts do, or another head; ask the same prompts with --drive"
        return (
            "another head or trunk does, or an engine that accepts drafts which the trunk would not generate; "
            "`nextn verify` compares the text"
        )

    @property
    def _odds(self) -> str:
        """How much likelier the named fault is than the next cause, and than no fault."""
        best, faultless = self.cause(self.named[0]), self.cause(NO_FAULT)
        group = {*self.named, *self.indistinguishable}  # the others are excluded, or nearly
        less = self.causes[self.causes.index(best) :]
        after = next((cause for cause in less if cause.name not in group), None)
        odds = f"{best.ratio_text(faultless)} likelier than an engine without fault"
        if self._has_only_length:
            return odds if len(self.named) < 2 else f"AL alone cannot distinguish causes that fit it; {odds}"
        if after is None or after.name == NO_FAULT:
            return odds
        apart = " that these counts tell apart" if self.indistinguishable else ""
        return f"{best.ratio_text(after)} likelier than the next cause{apart}, {after.name}, and {odds}"

    @property
    def _assumed(self) -> str:
        """What the comparison assumes of an engine that was not driven, or samples."""
        case = self._deciding_case
        temperature, driven = case.observation.temperature, case.observation.prompt_indices is not None
        parts = [] if driven else ["greedy" if not temperature else f"at temperature {temperature:g}"]
        parts += [f"of rule {case.rule}"] if temperature and case.rule else []
        return f", if the engine is {' and '.join(parts)}" if parts else ""

    @property
    def next_checks(self) -> list[str]:
        """What to check next, the cheapest first; none without a fault, or if a setting of the engine decides."""
        if self.has_no_fault or self.is_inconclusive or self.overrides:
            return []
        case = self.cases[0]
        driven = case.observation.prompt_indices is not None
        return next_checks(
            [*self.named, *self.indistinguishable], driven=driven, temperature=case.observation.temperature
        )

    @property
    def _needed_text(self) -> str:
        """The advice on data that would decide, as text."""
        needed = self.needed
        if self._copies:
            return "the engine copies drafts from the text in other rounds: serve without --copy"
        if self._may_be_short:
            return (
                "in some rounds the engine drafts fewer than K tokens: fix its K (nextn serve --fixed-k), or, as some "
                "engines do so at the end of a text, ask for longer texts (--max-tokens)"
            )
        if needed is None:
            other = self.cases[0].other_workload
            same_prompts = "ask the same prompts with --drive" if other else "compare longer runs"
            return f"no number of tokens of this kind would decide: {same_prompts}"
        text = (
            f"about {needed.reference_tokens:,} tokens in {needed.reference_texts:,} texts would decide (the reference "
            f"has {needed.reference_tokens_now:,}: raise --max-tokens, add --prompts)"
        )
        if needed.engine_rounds is not None:
            text += (
                f", and about {needed.engine_rounds:,} rounds of the engine (it counted {needed.engine_rounds_now:,})"
            )
        return text

    @property
    def notes(self) -> list[str]:
        """Notes on the comparison, for the user."""
        counted = dict.fromkeys(note for case in self.cases for note in case.observation.counters.notes)
        return [*counted, *self._notes_on_prompts(), *self._notes_on_evidence(), *self._notes_on_causes(),
                *self.audit_notes]  # fmt: skip

    def _notes_on_prompts(self) -> Iterator[str]:
        """Yield in what the engine's prompts and texts differ from the reference's."""
        if self.cases[0].observation.prompt_indices is None:
            yield (
                "the engine's prompts are not those of the reference, so workloads are compared too"
                f"{self._domain_range}: ask the same prompts with --drive"
            )
        for case in self.cases:
            yield from case.notes

    def _notes_on_evidence(self) -> Iterator[str]:
        """Yield what the reference and the engine's counts cannot show, or show only in part."""
        case = self.cases[0]
        if self.has_no_fault:
            length = f"{1 + case.num_accepted:.2f}"
            yield (
                f"AL {length} is faster than plain decoding only where a round takes less than {length} times as long: "
                "`nextn advise --engine URL --against URL` measures that for each number of streams"
            )
        other = "the engine has other weights, or a quantized trunk"
        yield from (f"{warning}; {other}" for warning in self.reference.origin_warnings)
        if self.reference.stream is not None:
            decoded = ", ".join(fault.name for fault in FAULTS if fault.contract)
            yield f"not checked, as they show only in decoding, which a streamed trunk cannot do: {decoded}"
        if case.counts.num_drafted:
            return
        shorter = "drafts fewer than K tokens in some rounds, so its counts by position are not comparable"
        why = shorter if case.has_short_rounds else "counts no positions"
        yield f"{self.engine} {why}: only AL is compared, which hardly distinguishes causes"
        if case.counts.rounds is None:
            yield (
                f"{self.engine} shows no number of rounds: as many as the reference has are assumed, and one line of a "
                "log may be of far fewer"
            )

    def _notes_on_causes(self) -> Iterator[str]:
        """Yield what is documented of the engine, and which other causes fit or are not excluded."""
        if self.untested:
            yield f"interrupted before these were compared: {', '.join(self.untested)}"
        unlikely = [cause.name for cause in self.causes if cause.name in self.priors]
        if unlikely and not self.has_no_fault:
            yield (
                f"{self.engine}'s published code for this family does not have these faults, so their likelihoods are "
                f"multiplied by {DOCUMENTED_PRIOR:g}: {', '.join(unlikely)}"
            )
        if published := [name for name in self.named if name in self.documented]:
            yield f"{self.engine}'s published code for this family has {', '.join(published)}"
        best = self.causes[0]
        if better := [each.name for each in self.causes[1:] if each.p_value > max(0.05, 2 * best.p_value)]:
            yield (
                f"better fit, but less likely: {some(better)}. A cause that expects a wide range of counts fits most "
                "of them, and makes each improbable"
            )
        if self.undetectable:
            names = ", ".join(self.undetectable)
            yield f"faults that this many rounds would not show, so they are not excluded: {names}"

    @property
    def _domain_range(self) -> str:
        """How far the domains of the reference differ."""
        temperature, domains = self.cases[0].observation.temperature, self.reference.domains[1:]
        found = (self.reference.figures(temperature, domain=domain).rates[0].value for domain in domains)
        rates = [rate for rate in found if not math.isnan(rate)]
        return f" (a_1 {min(rates):.2f} to {max(rates):.2f} between the reference's domains)" if rates else ""

    def to_dict(self) -> dict[str, object]:
        """Return the JSON of `nextn diagnose --json`."""
        return {
            "model": self.source,
            "nextn": __version__,
            "engine": self.engine,
            "definitions": DEFINITIONS,
            **super().to_dict(),
            "complete": not self.untested,
            "untested": list(self.untested),
            "overrides": list(self.overrides),
            "needed": self.needed and asdict(self.needed),
            "named": list(self.named),
            "indistinguishable": list(self.indistinguishable),
            "causes": [cause.as_record() for cause in self.causes],
            "undetectable": list(self.undetectable),
            "cases": [case.as_record() for case in self.cases],
            "settings": asdict(self.reference.plan),
            "next_checks": self.next_checks,
            "notes": self.notes,
        } | self.reference.published_record()
