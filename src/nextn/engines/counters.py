"""What an engine has counted of its drafts, in one form for all engines, and the acceptance that follows.

Engines count per position without condition: accepted[j] / drafts is the share of rounds that kept depths 1..j+1, the
product a_1 ... a_{j+1}. The conditional a_k is accepted[k-1] / accepted[k-2].
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, zip_longest

from nextn.errors import EngineError
from nextn.figures.acceptance import Acceptance

MAX_POSITIONS = 256  # draft tokens per round: engines draft 1 to 64
_COUNTS = ("drafts", "draft_tokens", "accepted", "emitted")
SHORTER = "some rounds drafted fewer tokens than the engine's limit: a_2, a_3, ... are lower bounds"


@dataclass(frozen=True)
class Counters:
    """What an engine says of its drafts; None or () for what it does not say.

    drafts: rounds that drafted. draft_tokens, accepted: tokens drafted, and those of them that were kept.
    per_position[j]: rounds that kept depth j + 1. per_position_offered[j]: rounds that drafted depth j + 1.
    emitted: tokens of those rounds, the trunk's own included. length: the engine's own AL, for one that tells no
    counts. since: when the counting began, in Unix seconds. notes: what to know about the figures.
    """

    engine: str
    drafts: int | None = None
    draft_tokens: int | None = None
    accepted: int | None = None
    per_position: tuple[int, ...] = ()
    per_position_offered: tuple[int, ...] = ()
    emitted: int | None = None
    length: float | None = None
    since: float | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if max(len(self.per_position), len(self.per_position_offered)) > MAX_POSITIONS:
            num = max(len(self.per_position), len(self.per_position_offered))
            raise EngineError(f"{self.engine}: counts of {num:,} positions; expected at most {MAX_POSITIONS}")
        counts = [*(() if self.drafts is None else (self.drafts,)), *self.per_position]
        # A reading under load is not of one instant, so a few rounds may be counted in part.
        if any(later > earlier + 2 + earlier // 50 for earlier, later in pairwise(counts)):
            said = f"drafts {self.drafts}, accepted per position {list(self.per_position[:16])}"
            raise EngineError(f"{self.engine}: no counts, as a position is kept more often than one above it: {said}")

    def minus(self, before: "Counters") -> "Counters":
        """What was counted since an earlier reading.

        Raises EngineError where the counters were set back in between, as a restart of the engine does.
        """
        now, then = self._all(), before._all()
        if self.since != before.since or any(new < old for new, old in zip(now, then, strict=False)):
            said = ", ".join(f"{name} {old} -> {new}" for name, old, new in zip(_COUNTS, then, now, strict=False))
            raise EngineError(f"{self.engine}: the counters were reset in mid-run ({said}); measure again")
        return replace(
            self,
            drafts=_difference(self.drafts, before.drafts),
            draft_tokens=_difference(self.draft_tokens, before.draft_tokens),
            accepted=_difference(self.accepted, before.accepted),
            emitted=_difference(self.emitted, before.emitted),
            per_position=_differences(self.per_position, before.per_position),
            per_position_offered=_differences(self.per_position_offered, before.per_position_offered),
        )

    def _all(self) -> tuple[int, ...]:
        return (*(getattr(self, name) or 0 for name in _COUNTS), *self.per_position)

    @property
    def drafted(self) -> bool | None:
        """Whether anything was drafted; None where the engine tells no counts."""
        counts = [each for each in (self.drafts, self.draft_tokens) if each is not None]
        return any(counts) if counts else None

    def acceptance(self) -> Acceptance:
        """Conditional acceptances with their intervals; no depths where the engine does not count by position.

        Raises EngineError where there are no counts at all, or nothing was drafted.
        """
        if not self.drafts:
            told = f"; its own acceptance length is {self.length:.2f}" if self.length is not None else ""
            raise EngineError(f"{self.engine}: counts no round that drafted{told}; is MTP on, and was anything asked?")
        offered = tuple(_offered(self, depth) for depth in range(len(self.per_position)))
        kept = tuple(map(min, self.per_position, offered))
        emitted = self.emitted if self.emitted is not None else self.drafts + (self.accepted or 0)
        return Acceptance(offered, kept, self.drafts, emitted)

    def as_record(self) -> dict[str, object]:
        """What goes into JSON reports; `sources.from_json` reads it."""
        return asdict(self)


def _offered(counters: Counters, depth: int) -> int:
    """Rounds that drafted this depth and kept every shallower one."""
    if depth == 0:
        return counters.per_position_offered[0] if counters.per_position_offered else counters.drafts or 0
    return counters.per_position[depth - 1]


def counted(counters: Counters) -> Counters:
    """Fill in what follows from the rest, and note where rounds were shorter than the longest."""
    drafts, tokens, accepted, places = counters.drafts, counters.draft_tokens, counters.accepted, counters.per_position
    if not places and drafts is not None and tokens == drafts and accepted is not None:
        counters = replace(counters, per_position=(accepted,))  # one draft a round: the first position is the whole
    if drafts and tokens is not None and len(places) > 1 and tokens < drafts * len(places):
        counters = replace(counters, notes=(*counters.notes, SHORTER))
    return counters


def summed(parts: Iterable[Counters]) -> Counters | None:
    """Counts over several requests or log intervals of one engine; None for none.

    Lengths are averaged, as the engine weighs them by nothing that it tells. Only the sums are held, as a log may have
    millions of lines.
    """
    sums = Sums()
    for part in parts:
        sums.add(part)
    return sums.counters()


@dataclass
class Sums:
    """Running sums of `Counters`."""

    engine: str | None = None
    counts: list[int | None] = field(default_factory=lambda: [0] * len(_COUNTS))
    per_position: list[int] = field(default_factory=list)
    per_position_offered: list[int] = field(default_factory=list)
    length: float = 0.0
    num_lengths: int = 0
    notes: dict[str, None] = field(default_factory=dict)

    def add(self, part: Counters) -> None:
        self.engine = part.engine if self.engine is None else self.engine
        new = [getattr(part, name) for name in _COUNTS]
        # A count that one part does not tell is known of none.
        self.counts = [None if None in (a, b) else a + b for a, b in zip(self.counts, new, strict=True)]
        self.per_position = _added(self.per_position, part.per_position)
        self.per_position_offered = _added(self.per_position_offered, part.per_position_offered)
        if part.length is not None:
            self.length += part.length
            self.num_lengths += 1
        self.notes |= dict.fromkeys(part.notes)

    def counters(self) -> Counters | None:
        if self.engine is None:
            return None
        drafts, draft_tokens, accepted, emitted = self.counts
        return Counters(
            self.engine,
            drafts,
            draft_tokens,
            accepted,
            per_position=tuple(self.per_position),
            per_position_offered=tuple(self.per_position_offered),
            emitted=emitted,
            length=self.length / self.num_lengths if self.num_lengths else None,
            notes=tuple(self.notes),
        )


def _added(sums: list[int], row: tuple[int, ...]) -> list[int]:
    return [a + b for a, b in zip_longest(sums, row, fillvalue=0)]


def _difference(now: int | None, then: int | None) -> int | None:
    return None if now is None else now - (then or 0)


def _differences(now: tuple[int, ...], then: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(value - (then[place] if place < len(then) else 0) for place, value in enumerate(now))
