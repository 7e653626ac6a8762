"""One observation of an engine beside what each hypothesis expects of it: what a diagnosis is made of."""

from dataclasses import dataclass
from functools import cached_property

from nextn.engines.counters import ADAPTIVE, FULL_SHARE
from nextn.evaluate.engine_run import EngineObservation
from nextn.evaluate.hypotheses import ExpectedCounts, ObservedCounts
from nextn.evaluate.likelihoods import Cause, Evidence, rank_causes

# Greedy texts of one model differ at near-ties, late; those of another model differ early.
_OTHER_MODEL_SHARE = 0.5


@dataclass(frozen=True)
class ObservedCase:
    """One observation of the engine, with what each hypothesis expects of it."""

    observation: EngineObservation
    counts: ObservedCounts
    expected: tuple[ExpectedCounts, ...]  # over the same prompts if they are known
    diverged_share: float  # of the reference's text, see `diverged_text_share`
    num_retokenized: int  # prompts that the engine's own template turned into other tokens than the checkpoint's
    rule: str = ""  # of acceptance above temperature 0 that is assumed of the engine

    @property
    def other_workload(self) -> bool:
        """Whether the engine's prompts were not those of the reference."""
        observation = self.observation
        return observation.prompt_indices is None or not observation.exclusive or self.num_retokenized > 0

    @property
    def has_short_rounds(self) -> bool:
        """Whether the counts do not compare as they are, because rounds drafted fewer tokens than K."""
        counters, depths = self.observation.counters, self.expected[0].depths
        most = depths * (counters.num_drafts or 0)
        is_short = counters.draft_tokens is not None and counters.draft_tokens < FULL_SHARE * most
        return not self.counts.num_drafted and (is_short or ADAPTIVE in counters.notes)

    @property
    def num_accepted(self) -> float:
        """Accepted drafts per round: AL - 1."""
        return self.counts.acceptance_length - 1

    @cached_property
    def causes(self) -> list[Cause]:
        """All hypotheses, the likeliest first."""
        return rank_causes(self.evidence)

    @property
    def evidence(self) -> Evidence:
        """The counts beside what is expected, for `likelihoods`."""
        return Evidence(self.counts, self.expected, self.diverged_share, self.other_workload)

    def cause(self, name: str) -> Cause:
        """Return the hypothesis of this name, by this case alone."""
        return next(cause for cause in self.causes if cause.name == name)

    @property
    def notes(self) -> list[str]:
        """Ways in which the engine's prompts or texts differ from the reference's."""
        notes = []
        if not self.observation.exclusive:
            notes.append(
                "the counters rose by more than these answers hold: other requests were counted too; ask while the "
                "engine is otherwise idle"
            )
        if self.num_retokenized:
            notes.append(
                f"template: for {self.num_retokenized} of {len(self.observation.answers)} prompts the engine makes "
                "other tokens than this checkpoint's chat template; compare the two, and ask without --own-template"
            )
        if self.diverged_share > _OTHER_MODEL_SHARE and self.observation.has_comparable_texts:
            notes.append(
                f"the engine's greedy text differs from this checkpoint's, of which {self.diverged_share:.0%} comes "
                "after a first difference: other weights, a quantized trunk, or another template"
            )
        return notes

    def as_record(self) -> dict[str, object]:
        """Return the case for JSON reports."""
        indices = self.observation.prompt_indices
        return {
            "temperature": self.observation.temperature,
            "prompts": None if indices is None else len(indices),
            "counters": self.observation.counters.as_record(),
            "observed": self.counts.as_record(),
            "diverged_share": self.diverged_share,
            "other_workload": self.other_workload,
        }
