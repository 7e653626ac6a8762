"""Check an engine against a canary: which clauses of the contract its texts and counters break, and by which fault.

Greedy texts and counts on the same prompts are the same in every engine that does the same arithmetic. So counts are
compared with those of every reading of the head; no statistics are needed, except a tolerance for what rounding may
change. Texts above temperature 0 are random: only the acceptance rule is inferred by likelihood.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

from nextn.conformance.engine_run import ConformanceRun, SampledRun
from nextn.conformance.record import CLAUSES, Canary, Clause, Range, RecordedReading, clause_of
from nextn.conformance.sampled_check import check_acceptance_rule
from nextn.engines.answers import common_prefix
from nextn.engines.check_result import CheckReport, CheckResult, Outcome
from nextn.engines.counters import Counters
from nextn.errors import ConfigError
from nextn.evaluate.hypotheses import engine_depth

# Accepted drafts that rounding may add or remove: a share of those expected, and the least number of them.
_TOLERANCE, _MIN_TOLERANCE = 0.03, 2
# Within the tolerance a fault is named if its counts are this many times nearer than the right ones.
_MIN_RATIO = 4
# The fact of a family that an engine's convention changes -> the clause that it is about.
_FACTS = {"embedded": "C2", "hidden": "C3", "position0": "C4", "next_hidden": "C7", "order": "C11"}
_BY_TEXT, _BY_COUNTS, _SAMPLED = "C8", "C14", "C13"


@dataclass(frozen=True)
class ReadingFit:
    """How far an engine's counts are from those of a reading."""

    reading: RecordedReading
    distance: int  # accepted drafts, over all prompts


@dataclass(frozen=True)
class TextDifference:
    """The first difference of one text."""

    prompt: int
    position: int
    is_near_tie: bool


@dataclass(frozen=True)
class ConformanceReport(CheckReport):
    """The results of one check."""

    canary: Canary
    run: ConformanceRun
    num_speculative_tokens: int  # K
    differences: tuple[TextDifference, ...]
    fits: tuple[ReadingFit, ...] = field(repr=False)  # of every reading, the nearest first; empty without counters
    tolerance: int = 0
    sampled_run: SampledRun | None = None  # above temperature 0, if requested

    @cached_property
    def explanations(self) -> tuple[RecordedReading, ...]:
        """The readings that explain the counts: the right one where it does; several where their counts are equal; none
        where no known reading is near."""
        if not self.fits:
            return ()
        right = min(fit.distance for fit in self.fits if fit.reading.name in ("right", "rounded"))
        best = self.fits[0].distance
        if right == best or (right <= self.tolerance and _MIN_RATIO * best >= right):
            return (self.canary.right,)
        if best > self.tolerance and 2 * best > right:
            return ()
        return tuple(fit.reading for fit in self.fits if fit.distance == best)

    @property
    def is_right(self) -> bool:
        return self.explanations == (self.canary.right,)

    @cached_property
    def checks(self) -> tuple[CheckResult, ...]:
        """One per clause, in their order."""
        return tuple(self._check(clause) for clause in CLAUSES)

    @property
    def broken(self) -> tuple[CheckResult, ...]:
        return tuple(check for check in self.checks if check.outcome == "failed")

    @property
    def outcome(self) -> Outcome:
        return "failed" if self.fits and not self.explanations else super().outcome

    @property
    def summary(self) -> str:
        return f"{self.canary.family}, K = {self.num_speculative_tokens}: {self._result}"

    @property
    def _result(self) -> str:
        if self.broken:
            return "breaks " + ", ".join(f"{check.name} ({check.title})" for check in self.broken)
        if self.fits and not self.explanations:
            nearest = self.fits[0]
            return (
                f"the counts are those of no known fault: {self._distance('right')} accepted drafts away from the "
                f"right ones, {nearest.distance} from {nearest.reading.name}, the nearest"
            )
        if self.outcome == "inconclusive":
            return "shows no clause: there are no counts to compare, and no text is the canary's"
        return "conforms to every clause that these counts can show"

    def to_dict(self) -> dict[str, object]:
        """Return the JSON document."""
        counts = [counters.as_record() | {"prompts": list(prompts)} for prompts, counters in self.run.counts]
        return {
            "canary": self.canary.folder,
            "family": self.canary.family,
            "num_speculative_tokens": self.num_speculative_tokens,
            **super().to_dict(),
            "explanations": [fit.reading.name for fit in self.fits if fit.reading in self.explanations],
            "expected": self.expected_counts(self.canary.right),
            "seen": counts,
            "distances": {fit.reading.name: fit.distance for fit in self.fits},
            "texts": [asdict(difference) for difference in self.differences],
            "sampled": None if self.sampled_run is None else self.sampled_run.as_record(),
        }

    def expected_counts(self, reading: RecordedReading) -> dict[str, str]:
        """Return a reading's rounds and accepted drafts, in total and by position, over the prompts compared."""
        if not self._groups:
            return {}
        prompts = [prompt for group, _ in self._groups for prompt in group]
        counts = self.canary.counts(reading, self.num_speculative_tokens, prompts)
        positions = ", ".join(map(str, counts.positions))
        return {"rounds": str(counts.rounds), "accepted": str(counts.accepted), "per_position": positions}

    @property
    def _groups(self) -> list[tuple[tuple[int, ...], Counters]]:
        return comparable(self.run, self.differences)

    def _distance(self, name: str) -> int:
        return next(fit.distance for fit in self.fits if fit.reading.name == name)

    def _check(self, clause: Clause) -> CheckResult:
        if clause.id == _BY_TEXT:
            return self._check_texts(clause)
        if clause.id == _BY_COUNTS:
            return self._check_metrics(clause)
        if clause.id == _SAMPLED:
            return self._check_sampling(clause)
        if not self.fits:
            return clause.result("inconclusive", "no counts to compare: the engine reports none, or its texts differ")
        for reading in self.explanations:
            if clause.id in clauses(reading):
                return self._broken(clause, reading)
        return self._not_broken(clause)

    def _check_sampling(self, clause: Clause) -> CheckResult:
        """A fault that greedy counts show would change those of sampled texts, too."""
        if self.sampled_run is None:
            return clause.result("inconclusive", "greedy texts do not show it; --sampled 8 requests others")
        if self.fits and not self.is_right:
            return clause.result("inconclusive", "the greedy counts are wrong, so those above temperature 0 are, too")
        return check_acceptance_rule(clause, self.canary, self.num_speculative_tokens, self.sampled_run)

    def _broken(self, clause: Clause, reading: RecordedReading) -> CheckResult:
        others = [other.name for other in self.explanations if other != reading and clause.id not in clauses(other)]
        same = f"; the same counts as {', '.join(others)}" if others else ""
        return clause.result(
            "failed",
            f"counts as with {reading.name} ({reading.description}){same}",
            expected=_counts_text(self.expected_counts(self.canary.right)),
            seen=_counts_text(_sum_counts([counters for _, counters in self._groups])),
            fault=reading.name,
            issues=reading.issues,
        )

    def _not_broken(self, clause: Clause) -> CheckResult:
        """Held where a fault would have shown in these counts."""
        known = [fit for fit in self.fits if fit.reading.name in clause.faults]
        if not known:
            return clause.result("inconclusive", "this head cannot show it")
        if not self.explanations:
            return clause.result("inconclusive", "the counts are those of no known fault")
        nearest = min(known, key=lambda fit: fit.distance)
        if nearest.distance <= max(self.fits[0].distance, self._distance(self.explanations[0].name)):
            evidence = f"{nearest.reading.name} gives the same counts at K = {self.num_speculative_tokens}"
            return clause.result("inconclusive", evidence)
        evidence = f"{nearest.reading.name} would differ by {nearest.distance} accepted drafts"
        return clause.result("passed", evidence)

    def _check_texts(self, clause: Clause) -> CheckResult:
        total, num_ties = len(self.canary.prompts), sum(difference.is_near_tie for difference in self.differences)
        wrong = [difference for difference in self.differences if not difference.is_near_tie]
        evidence = f"{total - len(self.differences)} of {total} texts identical"
        evidence += f", {num_ties} diverge at a near-tie" if num_ties else ""
        if not wrong:
            return clause.result("passed" if len(self.differences) < total else "inconclusive", evidence)
        first = wrong[0]
        prompt, text = self.canary.prompts[first.prompt], self.run.texts[first.prompt]
        return clause.result(
            "failed",
            f"{evidence}; if the same engine without MTP gives this text, too, its trunk or tokenizer differs",
            expected=f"prompt {first.prompt}, new token {first.position}: {prompt.tokens[first.position]}, "
            f"{prompt.gaps[first.position]:.2f} nats ahead",
            seen=str(text[first.position]) if first.position < len(text) else "the end",
            fault="other-text",
        )

    def _check_metrics(self, clause: Clause) -> CheckResult:
        if not self.run.counts:
            reason = self.run.no_counts_reason or "the engine reports no counts"
            return clause.result("failed", reason, fault="no-counts")
        counted = [(prompts, counters) for prompts, counters in self._groups if counters.num_drafts is not None]
        for prompts, counters in counted:
            tokens = (counters.num_drafts or 0) + (counters.accepted or 0) + len(prompts)
            # One round of each text may draft nothing and be left out, one may continue beyond the end.
            low, high = self.canary.max_tokens - 1, self.canary.max_tokens + self.num_speculative_tokens
            valid = Range(len(prompts) * low, len(prompts) * high)
            if valid.distance(tokens):
                return clause.result(
                    "failed",
                    f"prompts {', '.join(map(str, prompts))}: rounds + accepted + the first tokens are not the tokens",
                    expected=f"{valid} tokens",
                    seen=f"{counters.num_drafts} rounds, {counters.accepted} accepted: {tokens} tokens",
                    fault="counts-off",
                )
        if not counted:
            return clause.result("inconclusive", "no rounds are counted for a text that is the canary's")
        return clause.result("passed", "rounds and accepted drafts add up to the tokens")


def check(
    canary: Canary,
    run: ConformanceRun,
    *,
    num_speculative_tokens: int | None = None,
    sampled_run: SampledRun | None = None,
) -> ConformanceReport:
    """Check an engine's run, and one above temperature 0 if there is one, against a canary's record.

    num_speculative_tokens: K; None takes it from the counters.
    Raises ConfigError where the counters do not show K, have drafts beyond it, or it was not recorded.
    """
    candidates = [_difference(canary, index, run.texts[index]) for index in range(len(canary.prompts))]
    differences = tuple(difference for difference in candidates if difference is not None)
    groups = comparable(run, differences)
    positions = (position for _, counters in run.counts for position, num in enumerate(counters.per_position, 1) if num)
    deepest = max(positions, default=0)
    if num_speculative_tokens is not None and deepest > num_speculative_tokens:
        raise ConfigError(
            f"K = {num_speculative_tokens}, but the engine accepted drafts at position {deepest}: give the K that it "
            "runs with, or none"
        )
    k = num_speculative_tokens
    if k is None:
        # Any mean shows K here: the texts are short, and the last round of each may draft fewer tokens.
        k = engine_depth([counters for _, counters in run.counts], None, full_share=0)
    if k not in canary.k_values:
        known = ", ".join(map(str, canary.k_values))
        raise ConfigError(f"K = {k}; the canary holds counts for K = {known}: set the engine to one of these")
    fits = [
        ReadingFit(reading, sum(canary.counts(reading, k, prompts).distance(counts) for prompts, counts in groups))
        for reading in canary.readings
        if groups
    ]
    num_accepted = sum(canary.counts(canary.right, k, prompts).accepted.high for prompts, _ in groups)
    tolerance = max(_MIN_TOLERANCE, round(_TOLERANCE * num_accepted))
    ordered = tuple(sorted(fits, key=lambda fit: fit.distance))
    return ConformanceReport(canary, run, k, differences, ordered, tolerance, sampled_run)


def clauses(reading: RecordedReading) -> tuple[str, ...]:
    """Return the ids of the clauses that a reading breaks."""
    clause = clause_of(reading.name)
    return tuple(_FACTS[fact] for fact in reading.facts) if clause is None else (clause.id,)


def comparable(run: ConformanceRun, differences: Sequence[TextDifference]) -> list[tuple[tuple[int, ...], Counters]]:
    """Return the counters of prompts whose texts are the canary's, and all that cover several prompts at once."""
    diverging = {difference.prompt for difference in differences}
    return [(prompts, counts) for prompts, counts in run.counts if len(prompts) > 1 or prompts[0] not in diverging]


def _difference(canary: Canary, index: int, text: Sequence[int]) -> TextDifference | None:
    prompt = canary.prompts[index]
    expected = prompt.tokens[: canary.max_tokens]
    if tuple(text) == expected:
        return None
    position = common_prefix(expected, text)
    is_near_tie = position < len(text) and position < len(expected) and prompt.gaps[position] <= canary.tie
    return TextDifference(index, min(position, len(expected) - 1), is_near_tie)


def _sum_counts(parts: Sequence[Counters]) -> dict[str, str]:
    num_positions = max((len(part.per_position) for part in parts), default=0)
    positions = [sum(part.per_position[at] for part in parts if at < len(part.per_position))
                 for at in range(num_positions)]  # fmt: skip
    rounds, accepted = (sum(getattr(part, name) or 0 for part in parts) for name in ("num_drafts", "accepted"))
    totals = {"rounds": str(rounds), "accepted": str(accepted)}
    return totals | ({"per_position": ", ".join(map(str, positions))} if positions else {})


def _counts_text(counts: Mapping[str, str]) -> str:
    names = {"rounds": "rounds", "accepted": "accepted", "per_position": "by position"}
    return "; ".join(f"{names[name]} {value}" for name, value in counts.items())
