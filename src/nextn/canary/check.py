"""An engine against a canary: which clause of the contract its texts and counters break, and which fault would do so.

Greedy texts and counts on the same prompts are the same in every engine that does the same arithmetic, so counts are
compared with those of every reading of the head, one by one; no statistics are needed, but for what rounding may flip.
Texts above temperature 0 are drawn: the rule of acceptance alone is told by likelihoods (`rules`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from nextn.canary.contract import CLAUSES, Clause, Outcome, clause_of
from nextn.canary.drive import Drawn, Seen
from nextn.canary.kit import Canary, Range, Told
from nextn.canary.rules import judged
from nextn.engines.counters import Counters
from nextn.errors import ConfigError

# Kept drafts that rounding may add or take, of those that should be kept.
_SLACK, _LEAST = 0.03, 2
# A fault is named within the slack if its counts are so many times nearer than the right ones.
_CLEARLY = 4
# The fact of a family's row that an engine's convention changes -> the clause that it is about.
_FACTS = {"embedded": "C2", "hidden": "C3", "position0": "C4", "recycled": "C7", "order": "C11"}
_BY_TEXT, _BY_COUNTS, _SAMPLED = "C8", "C14", "C13"


@dataclass(frozen=True)
class Fit:
    """off: kept drafts by which the engine's counts differ from a reading's, all prompts together."""

    reading: Told
    off: int


@dataclass(frozen=True)
class Text:
    """The first difference of one text: near = the two tokens are nearly level there."""

    prompt: int
    place: int
    near: bool


@dataclass(frozen=True)
class Report:
    """What one check found. drafts: K. fits: every reading, the nearest first; empty without counters. drawn: what was
    seen above temperature 0, if it was asked for."""

    canary: Canary
    seen: Seen
    drafts: int
    texts: tuple[Text, ...]
    fits: tuple[Fit, ...] = field(repr=False)
    slack: int = 0
    drawn: Drawn | None = None

    @cached_property
    def named(self) -> tuple[Told, ...]:
        """The readings that explain the counts: the right one where it does; several where they cannot be told apart;
        none where nothing known is near."""
        if not self.fits:
            return ()
        right = min(fit.off for fit in self.fits if fit.reading.name in ("right", "rounded"))
        best = self.fits[0].off
        if right == best or (right <= self.slack and _CLEARLY * best >= right):
            return (self.canary.right,)
        if best > self.slack and 2 * best > right:
            return ()
        return tuple(fit.reading for fit in self.fits if fit.off == best)

    @property
    def is_right(self) -> bool:
        return self.named == (self.canary.right,)

    @cached_property
    def outcomes(self) -> tuple[Outcome, ...]:
        """One a clause, in their order."""
        return tuple(self._outcome(clause) for clause in CLAUSES)

    @property
    def broken(self) -> tuple[Outcome, ...]:
        return tuple(each for each in self.outcomes if each.said == "broken")

    @property
    def failed(self) -> bool:
        return bool(self.broken) or (bool(self.fits) and not self.named)

    @property
    def words(self) -> str:
        """The verdict, in a sentence."""
        if self.broken:
            return "breaks " + ", ".join(f"{each.clause.id} ({each.clause.name})" for each in self.broken)
        if self.fits and not self.named:
            nearest = self.fits[0]
            return (
                f"the counts are those of no known fault: {self._off('right')} kept drafts away from what is right, "
                f"{nearest.off} from {nearest.reading.name}, the nearest"
            )
        return "holds every clause that these counts can tell"

    def as_record(self) -> dict[str, object]:
        """The JSON document."""
        return {
            "canary": self.canary.folder,
            "family": self.canary.family,
            "drafts": self.drafts,
            "verdict": self.words,
            "failed": self.failed,
            "fits": [each.reading.name for each in self.fits if each.reading in self.named],
            "clauses": [each.as_record() for each in self.outcomes],
            "expected": self.counts(self.canary.right),
            "seen": [counters.as_record() | {"prompts": list(places)} for places, counters in self.seen.counts],
            "off": {each.reading.name: each.off for each in self.fits},
            "texts": [vars(each) for each in self.texts],
            "sampled": None if self.drawn is None else self.drawn.as_record(),
        }

    def counts(self, reading: Told) -> dict[str, str]:
        """Rounds, kept drafts and kept by position of one reading over the prompts that are compared."""
        if not self._groups:
            return {}
        places = [place for group, _ in self._groups for place in group]
        tally = self.canary.tally(reading, self.drafts, places)
        positions = ", ".join(each.words for each in tally.positions)
        return {"rounds": tally.rounds.words, "accepted": tally.accepted.words, "per_position": positions}

    @property
    def _groups(self) -> list[tuple[tuple[int, ...], Counters]]:
        return comparable(self.seen, self.texts)

    def _off(self, name: str) -> int:
        return next(fit.off for fit in self.fits if fit.reading.name == name)

    def _outcome(self, clause: Clause) -> Outcome:
        if clause.id == _BY_TEXT:
            return self._texts(clause)
        if clause.id == _BY_COUNTS:
            return self._metrics(clause)
        if clause.id == _SAMPLED:
            return self._sampling(clause)
        if not self.fits:
            return Outcome(clause, "untold", "no counts to compare: the engine tells none, or its texts are others")
        for reading in self.named:
            if clause.id in clauses(reading):
                return self._broken(clause, reading)
        return self._excluded(clause)

    def _sampling(self, clause: Clause) -> Outcome:
        """A fault that greedy counts show would move those of sampled texts, too."""
        if self.drawn is None:
            return Outcome(clause, "untold", "greedy texts do not show it; --sampled asks an engine for others")
        if self.fits and not self.is_right:
            return Outcome(clause, "untold", "the greedy counts are not right, so those above temperature 0 are not")
        return judged(clause, self.canary, self.drafts, self.drawn)

    def _broken(self, clause: Clause, reading: Told) -> Outcome:
        other = [each.name for each in self.named if each != reading and clause.id not in clauses(each)]
        alike = f"; the same counts as {', '.join(other)}" if other else ""
        return Outcome(
            clause,
            "broken",
            f"counts as with {reading.name} ({reading.says}){alike}",
            _line(self.counts(self.canary.right)),
            _line(_counted([counters for _, counters in self._groups])),
            reading.name,
            reading.issues,
        )

    def _excluded(self, clause: Clause) -> Outcome:
        """Held where a break would have shown in these counts."""
        known = [fit for fit in self.fits if fit.reading.name in clause.faults]
        if not known:
            return Outcome(clause, "untold", "this head cannot show it")
        if not self.named:
            return Outcome(clause, "untold", "the counts are those of no known fault")
        least = min(known, key=lambda fit: fit.off)
        if least.off <= max(self.fits[0].off, self._off(self.named[0].name)):
            return Outcome(clause, "untold", f"{least.reading.name} gives the same counts at K = {self.drafts}")
        return Outcome(clause, "held", f"{least.reading.name} would be {least.off} kept drafts away")

    def _texts(self, clause: Clause) -> Outcome:
        total, near = len(self.canary.prompts), sum(each.near for each in self.texts)
        wrong = [each for each in self.texts if not each.near]
        alike = f"{total - len(self.texts)} of {total} texts identical" + (
            f", {near} part at a near-tie" if near else ""
        )
        if not wrong:
            return Outcome(clause, "held" if len(self.texts) < total else "untold", alike)
        first = wrong[0]
        asked, text = self.canary.prompts[first.prompt], self.seen.texts[first.prompt]
        told = text[first.place] if first.place < len(text) else "the end"
        return Outcome(
            clause,
            "broken",
            f"{alike}; if the same engine without MTP gives this text, too, its trunk or tokenizer differs",
            f"prompt {first.prompt}, new token {first.place}: {asked.tokens[first.place]}, "
            f"{asked.gaps[first.place]:.2f} nats ahead",
            f"{told}",
            "other-text",
        )

    def _metrics(self, clause: Clause) -> Outcome:
        if not self.seen.counts:
            return Outcome(clause, "broken", self.seen.without or "the engine tells no counts", fault="no-counts")
        for places, counters in self._groups:
            if counters.drafts is None:
                continue
            tokens = counters.drafts + (counters.accepted or 0) + len(places)
            # One round of each text may draft nothing and be left out, one may go on behind the end.
            room = Range(
                len(places) * (self.canary.max_tokens - 1), len(places) * (self.canary.max_tokens + self.drafts)
            )
            if room.off(tokens):
                return Outcome(
                    clause,
                    "broken",
                    f"prompts {', '.join(map(str, places))}: rounds + accepted + the first tokens are not the tokens",
                    f"{room.words} tokens",
                    f"{counters.drafts} rounds, {counters.accepted} accepted: {tokens} tokens",
                    "counts-off",
                )
        return Outcome(clause, "held", "rounds and kept drafts add up to the tokens")


def check(canary: Canary, seen: Seen, *, drafts: int | None = None, drawn: Drawn | None = None) -> Report:
    """drafts: K; None: as the counters say. drawn: for the clause that greedy texts do not show.

    Raises ConfigError where the counters do not say K, or tell of drafts beyond it, or it was not recorded.
    """
    texts = tuple(
        found for place in range(len(canary.prompts)) if (found := _differs(canary, place, seen.texts[place]))
    )
    groups = comparable(seen, texts)
    deepest = max((at for _, each in seen.counts for at, kept in enumerate(each.per_position, 1) if kept), default=0)
    if drafts is not None and deepest > drafts:
        raise ConfigError(
            f"K = {drafts}, but the engine kept drafts at position {deepest}: give the K that it runs with, or none"
        )
    drafts = drafts or _drafts([counters for _, counters in seen.counts])
    if drafts not in canary.drafts:
        known = ", ".join(map(str, canary.drafts))
        raise ConfigError(f"K = {drafts}; the canary holds counts for K = {known}: let the engine draft so many")
    fits = [
        Fit(reading, sum(canary.tally(reading, drafts, places).off(counters) for places, counters in groups))
        for reading in canary.readings
        if groups
    ]
    kept = sum(canary.tally(canary.right, drafts, places).accepted.high for places, _ in groups)
    slack = max(_LEAST, round(_SLACK * kept))
    return Report(canary, seen, drafts, texts, tuple(sorted(fits, key=lambda fit: fit.off)), slack, drawn)


def clauses(reading: Told) -> tuple[str, ...]:
    """Ids of the clauses that a reading breaks."""
    found = clause_of(reading.name)
    return tuple(_FACTS[fact] for fact in reading.facts) if found is None else (found.id,)


def comparable(seen: Seen, texts: Sequence[Text]) -> list[tuple[tuple[int, ...], Counters]]:
    """Counters of prompts whose texts are the canary's; all of them where they are of all prompts at once."""
    parted = {each.prompt for each in texts}
    return [(places, found) for places, found in seen.counts if len(places) > 1 or places[0] not in parted]


def _differs(canary: Canary, prompt: int, text: Sequence[int]) -> Text | None:
    asked = canary.prompts[prompt]
    wanted = asked.tokens[: canary.max_tokens]
    if tuple(text) == wanted:
        return None
    pairs = zip(wanted, text, strict=False)
    place = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(text)))
    near = place < len(text) and place < len(wanted) and asked.gaps[place] <= canary.tie
    return Text(prompt, min(place, len(wanted) - 1), near)


def _drafts(found: Sequence[Counters]) -> int:
    """K, as far as counters tell it: positions, or the drafts of a round, the last ones of a text may be fewer."""
    positions = max((len(each.per_position) for each in found), default=0)
    if positions:
        return positions
    known = [(each.draft_tokens, each.drafts) for each in found]
    pairs = [(tokens, rounds) for tokens, rounds in known if tokens and rounds]
    if not pairs:
        raise ConfigError("the counters do not say how many tokens a round drafts; give --drafts")
    return -(-sum(tokens for tokens, _ in pairs) // sum(rounds for _, rounds in pairs))


def _counted(found: Sequence[Counters]) -> dict[str, str]:
    width = max((len(each.per_position) for each in found), default=0)
    places = [sum(each.per_position[at] for each in found if at < len(each.per_position)) for at in range(width)]
    rounds, accepted = (sum(getattr(each, name) or 0 for each in found) for name in ("drafts", "accepted"))
    told = {"rounds": str(rounds), "accepted": str(accepted)}
    return told | ({"per_position": ", ".join(map(str, places))} if places else {})


def _line(counts: Mapping[str, str]) -> str:
    names = {"rounds": "rounds", "accepted": "kept", "per_position": "by position"}
    return "; ".join(f"{names[name]} {value}" for name, value in counts.items())
