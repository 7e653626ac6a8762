"""Why an engine keeps fewer drafts than it should: its counters against a checkpoint's head, right and under faults."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nextn import __version__
from nextn.audit import audit
from nextn.benchmarking.workload import Prompt
from nextn.checkpoints.checkpoint import Checkpoint
from nextn.measuring.cases import Case, fresh, templated
from nextn.measuring.causes import FINE, Cause, alike, joined, named
from nextn.measuring.drive import Seen
from nextn.measuring.hypotheses import Expected, depth_of, observation
from nextn.measuring.measure import reference
from nextn.measuring.measured import Measured
from nextn.measuring.plan import Plan
from nextn.measuring.suspects import CONTEXT, TEMPLATE, WEIGHTS, Suspect, expectation, expectations, suspect
from nextn.model import Model

# A reference below this a_1 is a poor head, whatever an engine does with it.
_POOR = 0.2

DEFINITIONS = {
    "ratio": "of likelihoods: this cause's of what the engine counted, to that of the likeliest",
    "misfit": "how probable counts as far off as these are where the cause holds",
    "named": "fine unless a fault is 100 times likelier; else the faults that the likeliest does not beat ten times; "
    "[] = even the likeliest does not fit (misfit below 0.001)",
    "alike": "what the named cannot be told from here: so many rounds are expected to give a ratio below 100",
    "hidden": "faults that cannot be told from fine in the same way",
    "acceptance": "a_1..a_K, conditional on the shallower depths",
}


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """cases: one for each temperature, or two where prompts are of very different length: the short ones first."""

    source: str
    measured: Measured
    cases: tuple[Case, ...]
    audited: tuple[str, ...] = ()

    @property
    def engine(self) -> str:
        return self.cases[0].seen.counters.engine

    @cached_property
    def causes(self) -> list[Cause]:
        """All hypotheses, the likeliest first, over all cases."""
        return joined([case.causes for case in self.cases])

    @cached_property
    def named(self) -> tuple[str, ...]:
        """What is the matter: ("fine",), faults, or () where nothing that is known explains it."""
        found = named(self.causes)
        if found == (FINE,) and self.reference_rate < _POOR:
            return (WEIGHTS,)
        return (CONTEXT,) if not found and self._falls_with_length else found

    @cached_property
    def alike(self) -> tuple[str, ...]:
        """What so many rounds cannot tell from the likeliest of the named, and is not named itself."""
        best = self.named[0] if self.named else ""
        known = any(each.name == best for each in self.causes)
        return tuple(name for name in self._like(best) if name not in self.named) if known else ()

    def _like(self, name: str) -> tuple[str, ...]:
        first = self.cases[0]
        pairs = [(case.observed, case.expected) for case in self.cases]
        return alike(name, *pairs, fresh=first.fresh, workload=first.workload)

    @cached_property
    def hidden(self) -> tuple[str, ...]:
        """Faults that would not show on this head in so many rounds, or hardly."""
        return tuple(each.name for each in self.causes if each.name != FINE and FINE in self._like(each.name))

    @property
    def is_fine(self) -> bool:
        return self.named == (FINE,)

    @property
    def suspects(self) -> list[Suspect]:
        return [suspect(name) for name in self.named if name != FINE]

    @property
    def reference_rate(self) -> float:
        """a_1 of the head at the lowest temperature where all is right."""
        return float(self._fine(self.cases[0]).raw[0])

    @property
    def _falls_with_length(self) -> bool:
        """Whether short prompts are as they should be, and long ones are not, and lower."""
        halves = [case for case in self.cases if case.seen.temperature == self.cases[0].seen.temperature]
        if len(halves) < 2:
            return False
        short, long = halves
        fine = self._fine(long).per_round[0]
        return named(short.causes) == (FINE,) and named(long.causes) != (FINE,) and long.kept < fine

    def _fine(self, case: Case) -> Expected:
        return next(each for each in case.expected if each.name == FINE)

    @property
    def words(self) -> str:
        """The verdict, in a sentence."""
        ours, theirs = 1 + self._fine(self.cases[0]).per_round[0], 1 + self.cases[0].kept
        figures = f"AL {theirs:.2f} where this head should give {ours:.2f}"
        if self.is_fine:
            return f"the engine shows what this head should give: {figures}"
        if self.named == (WEIGHTS,):
            return f"the head is poor and the engine shows it: {figures}; a_1 = {self.reference_rate:.2f} at best"
        if self.named == (CONTEXT,):
            return f"short prompts are as they should be, long ones are not ({figures} on the short ones)"
        if not self.named:
            side = "above" if theirs > ours else "below"
            return f"no known fault explains it: {figures}, {side} what is expected of any of {len(self.causes)} causes"
        best = self.causes[0]
        fine = next(each for each in self.causes if each.name == FINE)
        return f"{' or '.join(self.named)}: {figures}; {best.times(fine)} likelier than an engine without fault"

    @property
    def notes(self) -> list[str]:
        """What to know about the comparison."""
        said = list(dict.fromkeys(note for case in self.cases for note in case.seen.counters.notes))
        if self.cases[0].seen.places is None:
            said.append(
                "the engine's prompts are not those of the reference, so workloads are compared, too"
                f"{self._spread}: ask the same prompts with --drive"
            )
        for case in self.cases:
            said += case.notes
        if not self.cases[0].observed.offered:
            said.append(
                f"{self.engine} counts no positions, so there is one figure to go by: causes are hard to tell apart"
            )
        if self.hidden:
            said.append(f"would not show in so many rounds, and may be there: {', '.join(self.hidden)}")
        return said + list(self.audited)

    @property
    def _spread(self) -> str:
        """How far the domains of the reference lie from each other."""
        temperature = self.cases[0].seen.temperature
        rates = [self.measured.figures(temperature, domain=each).rates[0].value for each in self.measured.domains[1:]]
        return f" (a_1 {min(rates):.2f} to {max(rates):.2f} between the reference's domains)" if rates else ""

    def as_record(self) -> dict[str, object]:
        """The JSON document."""
        return {
            "model": self.source,
            "nextn": __version__,
            "engine": self.engine,
            "definitions": DEFINITIONS,
            "verdict": self.words,
            "fine": self.is_fine,
            "named": list(self.named),
            "alike": list(self.alike),
            "suspects": [vars(each) | {"issues": list(each.issues)} for each in self.suspects],
            "causes": [each.as_record() for each in self.causes],
            "hidden": list(self.hidden),
            "cases": [case.as_record() for case in self.cases],
            "settings": vars(self.measured.plan),
            "notes": self.notes,
        }


def diagnose(
    model: Model,
    prompts: Sequence[Prompt],
    seen: Sequence[Seen],
    plan: Plan,
    *,
    source: str = "",
    audited: Sequence[str] = (),
    on_text: Callable[[], None] = lambda: None,
    on_fault: Callable[[], None] = lambda: None,
) -> Diagnosis:
    """Compare what was seen of an engine with the head's reference and with every fault that the head can have.

    plan: of the reference; its K gives way to the engine's, where the engine tells it, and its temperatures to those
    that were seen. Raises ConfigError without a head, EngineError for counters that hold no figures.
    """
    drafts = max(depth_of(each.counters) or plan.drafts for each in seen)
    plan = replace(plan, drafts=drafts, temperatures=tuple(each.temperature for each in seen))
    observed = [observation(each.counters, drafts) for each in seen]
    measured = reference(model, prompts, plan, on_text=on_text)
    expected = expectations(measured, model, on_fault=on_fault)
    if seen[0].places is None and (other := _other_template(model, prompts, plan)) is not None:
        wrong = reference(model, prompts, other)
        for temperature, hypotheses in expected.items():
            hypotheses.append(expectation(TEMPLATE, wrong, temperature))
    cases = [
        Case(
            each,
            what,
            _of_places(expected[each.temperature], measured, each),
            fresh(each, measured),
            templated(each, measured),
        )
        for each, what in zip(seen, observed, strict=True)
    ]
    return Diagnosis(source, measured, tuple(cases), tuple(audited))


def _other_template(model: Model, prompts: Sequence[Prompt], plan: Plan) -> Plan | None:
    """The plan with the chat template where it has none, or without; None where only one of them is possible."""
    has_template = model.tokenizer is not None and bool(model.tokenizer.chat_template)
    if not has_template or not all(isinstance(prompt.text, str) for prompt in prompts):
        return None
    return replace(plan, chat=plan.chat is False)


def _of_places(expected: Sequence[Expected], measured: Measured, seen: Seen) -> tuple[Expected, ...]:
    """Loops count where the engine was given the same prompts: it counted them, too."""
    places = sorted(measured.places(seen.temperature)) if seen.places is None else seen.places
    return tuple(each.only(places) for each in expected)


def audited(source: str) -> list[str]:
    """What `audit` finds to mend in the checkpoint, a line each."""
    found = audit(Checkpoint.open(source)).findings
    return [f"audit: {each.severity}, {each.rule}: {each.found}" for each in found if each.severity != "note"]
