"""What was observed of one part of an engine's work, in the form in which hypotheses judge it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from nextn.errors import ConfigError
from nextn.measuring.causes import Cause, ranked
from nextn.measuring.drive import Seen
from nextn.measuring.hypotheses import Expected, Observed, depth_of
from nextn.measuring.measured import Measured

# Greedy texts of one model part at near-ties, late; those of another model early.
_OTHER = 0.5


@dataclass(frozen=True)
class Case:
    """What was observed of one part of the work, and what each hypothesis expects there.

    fresh: the share of the engine's text that is not the reference's. templated: prompts that the engine's own template
    made other tokens of than the checkpoint's.
    """

    seen: Seen
    observed: Observed
    expected: tuple[Expected, ...]
    fresh: float
    templated: int

    @property
    def workload(self) -> bool:
        """Whether the engine's work was other work than the reference's."""
        return self.seen.places is None or not self.seen.alone or self.templated > 0

    @property
    def kept(self) -> float:
        """Drafts kept per round: AL - 1."""
        return self.observed.al - 1

    @cached_property
    def causes(self) -> list[Cause]:
        return ranked(self.observed, self.expected, fresh=self.fresh, workload=self.workload)

    @property
    def notes(self) -> list[str]:
        """What was seen of the work itself."""
        said = []
        if not self.seen.alone:
            said.append(
                "the counters rose by more than these answers hold: others asked at the same time; drive it alone"
            )
        if self.templated:
            said.append(
                f"template: of {self.templated} of {len(self.seen.answers)} prompts the engine makes other tokens than "
                "this checkpoint's chat template; compare the two, and ask without --own-template"
            )
        if self.fresh > _OTHER and tells_texts(self.seen):
            said.append(
                f"{self.fresh:.0%} of the engine's greedy text is not what this checkpoint says: other weights, a "
                "quantised trunk, or another template"
            )
        return said

    def as_record(self) -> dict[str, object]:
        """What goes into JSON."""
        places = self.seen.places
        return {
            "temperature": self.seen.temperature,
            "prompts": None if places is None else len(places),
            "counters": self.seen.counters.as_record(),
            "observed": vars(self.observed),
            "fresh": self.fresh,
            "workload": self.workload,
        }


def fresh(seen: Seen, measured: Measured) -> float:
    """The share of the engine's text that is not the reference's own; 1 where it is sampled, or not told."""
    if not tells_texts(seen):
        return 1.0
    texts = [measured.drawn[seen.temperature].texts[place].new for place in seen.places or ()]
    same = sum(_common(text, answer.ids or ()) for text, answer in zip(texts, seen.answers, strict=True))
    return 1 - same / max(1, sum(map(len, texts)))


def tells_texts(seen: Seen) -> bool:
    """Whether the engine's text can be compared with the reference's: greedy, and told as token ids."""
    return not seen.temperature and bool(seen.answers) and all(answer.ids for answer in seen.answers)


def templated(seen: Seen, measured: Measured) -> int:
    """Prompts of which the engine made other tokens."""
    texts = [measured.drawn[seen.temperature].texts[place].prompt for place in seen.places or ()]
    return sum(
        answer.prompt_ids is not None and answer.prompt_ids != text
        for text, answer in zip(texts, seen.answers, strict=False)
    )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def check_drafts(seen: Sequence[Seen], drafts: int | None) -> None:
    """Raises ConfigError where neither the engine nor the user says how many drafts a round has, or they disagree."""
    told = next((depth for each in seen if (depth := depth_of(each.counters)) is not None), None)
    if told is None and drafts is None:
        raise ConfigError("the engine does not tell how many drafts a round has; give its number with --drafts")
    if told is not None and drafts is not None and told != drafts:
        raise ConfigError(f"--drafts {drafts}, but the engine's counters are of {told}; leave it out, or correct it")
