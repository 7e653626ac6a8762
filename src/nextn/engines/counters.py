"""Speculative-decoding counters in one form for all engines, the acceptance rates that follow, and Prometheus text.

Engines count unconditionally per position: per_position[j] / num_drafts is the share of rounds that accepted positions
1..j+1, the product a_1 ... a_{j+1}. The conditional rate a_k is per_position[k-1] / per_position[k-2]. The text format
is https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, zip_longest

from nextn.bounded_json import short_repr
from nextn.errors import ConfigError, EngineError
from nextn.stats.acceptance import Acceptance
from nextn.text_format import some

UNKNOWN = "an engine"  # whose counts do not say which
MAX_POSITIONS = 256  # draft tokens per round: engines draft 1 to 64
COUNTS = ("num_drafts", "draft_tokens", "accepted", "emitted")
FULL_SHARE = 0.95  # of K, drafted per round on average: the last rounds of texts are shorter
SHORTER = "some rounds drafted fewer tokens than the engine's limit: a_2, a_3, ... are lower bounds"
ADAPTIVE = "the engine adapts the number of drafts of a round: its acceptance length is not that of K drafts in each"
ROUNDED = "from rates rounded in the log: counts are approximate"
FIRST_TOKENS = "generated tokens include the first of each request, which comes from no round: AL is slightly too high"
ESTIMATED_ROUNDS = "the rounds of entries that show none are estimated from the draft tokens per round of the others"
ADDED = "the counts of several processes are added"
RISING = "each line has more than the one before, and all are added: if they are running totals, give the last alone"
RISING_AGAIN = "nearly each line has more than the one before: of totals that began anew, give the last of each run"
RUNS = "runs or requests are added; if their models or settings differ, give one of them alone"
COPIED = "rounds that copied drafts from the text are not counted, which leaves the head the harder ones"
SOME_POSITIONS = "acceptance of some positions or entries is missing: only the totals are compared"
NOTHING_DRAFTED = (
    "counts no round that drafted; check that MTP is on, and that requests were sent (`nextn serve` stops drafting "
    "where it does not pay, unless --fixed-k is given)"
)
# Limits of a page of Prometheus text.
MAX_BYTES = 16 * 1024 * 1024
MAX_LINES = 50_000
MAX_LABELS = 200_000  # in all lines together
_MAX_LABELS_A_LINE = 64
MAX_LINE = 16 * 1024  # characters
MAX_LABEL = 1024  # characters of its value
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,199}+")
# Possessive quantifiers never backtrack: linear in the length of a line, whatever the text.
_LABEL = re.compile(r'\s*+([a-zA-Z_][a-zA-Z0-9_]*+)="((?:[^"\\]++|\\.)*+)"\s*+,?+')
# With a colon or an arrow before it, as brpc's /vars and promtool have, and an exemplar behind it.
_VALUE = re.compile(
    r"[\s|]++(?:(?::|=>)\s++)?+([0-9A-Za-z.+-]{1,400})(?:\s++(?:-?[0-9.]++|@\[[0-9.]++\]))?+[\s|]*+(?:#.*+)?+"
)
_BEFORE = re.compile(r"[ \t>|]*+(?:[0-9]{1,6}[:-](?=[a-zA-Z_#]))?+")  # of a quote, a table, or `grep -n`


@dataclass(frozen=True)
class Counters:
    """Counters of an engine's drafts; None or () for those that it does not report."""

    engine: str
    num_drafts: int | None = None  # rounds that drafted
    draft_tokens: int | None = None
    accepted: int | None = None  # draft tokens; bonus tokens not counted
    per_position: tuple[int, ...] = ()  # [j]: rounds that accepted draft position j + 1
    per_position_offered: tuple[int, ...] = ()  # [j]: rounds that drafted position j + 1
    emitted: int | None = None  # tokens of those rounds, bonus tokens included
    length: float | None = None  # the engine's own mean acceptance length (AL), for one that reports no counts
    since: float | None = None  # when the counting began, in Unix seconds
    notes: tuple[str, ...] = ()  # caveats about the figures
    k: int | None = None  # draft tokens per round at most (K), where the source says it
    source: str = field(default="", compare=False)  # the format that they were read from, see `counter_formats.FORMATS`
    version: str = field(default="", compare=False)  # of the engine, where the source says it
    # Settings of the engine that decide the acceptance in place of the head, or make the text another than the trunk's.
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if max(len(self.per_position), len(self.per_position_offered)) > MAX_POSITIONS:
            num_positions = max(len(self.per_position), len(self.per_position_offered))
            raise EngineError(f"{self.engine}: counts of {num_positions:,} positions; expected at most {MAX_POSITIONS}")
        counts = [*(() if self.num_drafts is None else (self.num_drafts,)), *self.per_position]
        # Under load a reading does not show one instant: a few rounds may be counted in part.
        if any(later > earlier + 2 + earlier // 50 for earlier, later in pairwise(counts)):
            counts_text = f"drafts {self.num_drafts}, accepted per position {list(self.per_position[:16])}"
            raise EngineError(
                f"{self.engine}: invalid counts, a position is accepted more often than an earlier one: {counts_text}"
            )

    def minus(self, before: "Counters") -> "Counters":
        """Return the counts since an earlier reading.

        Raises EngineError where the counters were reset in between, as a restart of the engine does.
        """
        now, then = self._all(), before._all()
        if self.since != before.since or any(new < old for new, old in zip(now, then, strict=False)):
            changes = ", ".join(f"{name} {old} -> {new}" for name, old, new in zip(COUNTS, then, now, strict=False))
            raise EngineError(f"{self.engine}: the counters were reset during the run ({changes}); measure again")
        since = replace(
            self,
            num_drafts=_difference(self.num_drafts, before.num_drafts),
            draft_tokens=_difference(self.draft_tokens, before.draft_tokens),
            accepted=_difference(self.accepted, before.accepted),
            emitted=_difference(self.emitted, before.emitted),
            per_position=_differences(self.per_position, before.per_position),
            per_position_offered=_differences(self.per_position_offered, before.per_position_offered),
            notes=tuple(
                note
                for note in self.notes  # but for those of the totals, and of copies that were all before
                if note != SHORTER and not note.startswith(ADDED) and not (COPIED in note and note in before.notes)
            ),
        )
        return _with_shorter(since)

    def _all(self) -> tuple[int, ...]:
        return (*(getattr(self, name) or 0 for name in COUNTS), *self.per_position)

    @property
    def has_drafts(self) -> bool | None:
        """Whether anything was drafted; None where the engine reports no counts."""
        counts = [count for count in (self.num_drafts, self.draft_tokens) if count is not None]
        return all(counts) if counts else None

    @property
    def mean_length(self) -> float | None:
        """The mean acceptance length by the counts, else the engine's own."""
        if not self.num_drafts or self.accepted is None:
            return self.length
        return 1 + self.accepted / self.num_drafts

    def acceptance(self) -> Acceptance:
        """Return conditional acceptance rates with intervals; no positions where the engine does not count by position.

        Raises EngineError where there are no counts, or nothing was drafted.
        """
        if not self.num_drafts:
            own = f"; its own acceptance length is {self.length:.2f}" if self.length is not None else ""
            raise EngineError(f"{self.engine}: {NOTHING_DRAFTED}{own}")
        offered = tuple(_offered(self, depth) for depth in range(len(self.per_position)))
        accepted = tuple(map(min, self.per_position, offered))
        emitted = self.emitted if self.emitted is not None else self.num_drafts + (self.accepted or 0)
        return Acceptance(offered, accepted, self.num_drafts, emitted)

    def as_record(self) -> dict[str, object]:
        """Return the JSON form; `counter_formats.from_json` reads it."""
        return asdict(self)


def refuse_model(model: str | None, source: str) -> None:
    """Raise ConfigError where a model was chosen in a file that does not say which model its counts are of."""
    if model is not None:
        raise ConfigError(
            f"{source}#{model}: it names no model, as only metrics and AIPerf's matrix do; leave #{model} out"
        )


def _offered(counters: Counters, depth: int) -> int:
    """Rounds that drafted this depth (from 0) and accepted every shallower one."""
    if depth == 0:
        return counters.per_position_offered[0] if counters.per_position_offered else counters.num_drafts or 0
    return counters.per_position[depth - 1]


def drafting_rounds(generated: int, drafted: int, accepted: int, *, num_texts: int = 1) -> int:
    """Return the rounds with drafts of an engine that counts none, from the tokens that it generated after the prefill.

    A round gives its accepted drafts and a bonus token. The last one of a text may have had no room for a draft.
    """
    rounds = max(int(drafted > 0), generated - accepted)
    return drafted if 0 < rounds - drafted <= num_texts else rounds


def one_round(engine: str, accepted: int, drafted: int) -> Counters:
    """Return the counts of one round. Raises EngineError for more accepted drafts than drafts, or too many."""
    if not accepted <= drafted <= MAX_POSITIONS:
        raise EngineError(
            f"{engine}: a round accepted {accepted} of {drafted} drafts; expected at most {MAX_POSITIONS}"
        )
    positions = tuple(int(index < accepted) for index in range(drafted))
    return Counters(engine, int(drafted > 0), drafted, accepted, positions, (1,) * drafted)


def fill_in_derived(counters: Counters) -> Counters:
    """Add the counts that follow from the others, and a note where some rounds drafted less than the longest."""
    drafted, kept = counters.draft_tokens, counters.accepted or 0
    if drafted is not None and kept > drafted + 2 + drafted // 50:  # a reading under load does not show one instant
        raise EngineError(
            f"{counters.engine}: {kept:,} of {drafted:,} draft tokens accepted is impossible; they are not of one run"
        )
    num_drafts, tokens, accepted = counters.num_drafts, counters.draft_tokens, counters.accepted
    if not counters.per_position and num_drafts and tokens == num_drafts and accepted is not None:
        counters = replace(counters, per_position=(accepted,))  # one draft per round: all are of the first position
    return _with_shorter(counters)


def _with_shorter(counters: Counters) -> Counters:
    """Add the note on rounds that drafted less than the longest, where it is true."""
    num_drafts, tokens, depth = counters.num_drafts, counters.draft_tokens, len(counters.per_position)
    is_shorter = num_drafts and tokens is not None and depth > 1 and tokens < FULL_SHARE * num_drafts * depth
    return replace(counters, notes=(*counters.notes, SHORTER)) if is_shorter else counters


def with_all_positions(counters: Counters) -> Counters:
    """Add the last position where the text was cut before it, as the totals show; drop all if more are missing."""
    num_drafts, tokens, accepted = counters.num_drafts, counters.draft_tokens, counters.accepted
    positions = counters.per_position
    if not (num_drafts and tokens and positions) or counters.per_position_offered:
        return counters
    missing = math.ceil(tokens / num_drafts - 0.05) - len(positions)
    if missing <= 0:
        return counters
    last = (accepted or 0) - sum(positions)
    if missing == 1 and accepted is not None and 0 <= last <= positions[-1] * 1.02 + 2:
        return replace(counters, per_position=(*positions, min(last, positions[-1])))
    return replace(counters, per_position=(), notes=(*counters.notes, SOME_POSITIONS))


def sum_counters(parts: Iterable[Counters]) -> Counters | None:
    """Sum the counts of several requests or log intervals of one engine; None for none.

    Lengths are averaged without weights, as engines report none. Only the sums are held, as a log may have millions of
    lines.
    """
    sums = CounterSums()
    for part in parts:
        sums.add(part)
    return sums.counters()


def added_note(parts: Mapping[str, Counters]) -> tuple[str, ...]:
    """Return a note that the counts of several processes were added, and how far apart they are; () for one."""
    if len(parts) < 2:
        return ()
    lengths = sorted((part.mean_length, name or "others") for name, part in parts.items() if part.mean_length)
    ends = " to ".join(f"{length:.2f} ({name})" for length, name in lengths[:: max(1, len(lengths) - 1)])
    return (f"{ADDED}, {len(parts)} in all{': AL ' if ends else ''}{ends}",)


@dataclass
class CounterSums:
    """Running sums of `Counters`."""

    engine: str | None = None
    counts: list[int | None] = field(default_factory=lambda: [0] * len(COUNTS))
    # Rounds of the parts that show them, and the draft tokens of these: the others draft as many in a round.
    shown_rounds: int = 0
    shown_tokens: int = 0
    per_position: list[int] = field(default_factory=list)
    per_position_offered: list[int] = field(default_factory=list)
    lacks_positions: bool = False  # of drafts that were accepted
    length: float = 0.0
    num_lengths: int = 0
    notes: dict[str, None] = field(default_factory=dict)
    k: int | None = None  # the largest
    source: str = ""

    def add(self, part: Counters) -> None:
        self.engine = part.engine if self.engine is None else self.engine
        new = [getattr(part, name) for name in COUNTS]
        # A count that one part lacks is unknown for the sum.
        self.counts = [None if None in (a, b) else a + b for a, b in zip(self.counts, new, strict=True)]
        if part.num_drafts is not None and part.draft_tokens is not None:
            self.shown_rounds += part.num_drafts
            self.shown_tokens += part.draft_tokens
        self.lacks_positions |= part.accepted != 0 and not part.per_position
        self.per_position = _added(self.per_position, part.per_position)
        self.per_position_offered = _added(self.per_position_offered, part.per_position_offered)
        if part.length is not None:
            self.length += part.length
            self.num_lengths += 1
        self.notes |= dict.fromkeys(part.notes)
        self.k = part.k if self.k is None else max(self.k, part.k or 0)
        self.source = self.source or part.source

    def counters(self) -> Counters | None:
        if self.engine is None:
            return None
        num_drafts, draft_tokens, accepted, emitted = self.counts
        notes, positions, offered = dict(self.notes), tuple(self.per_position), tuple(self.per_position_offered)
        if num_drafts is None and draft_tokens and self.shown_tokens:
            num_drafts = round(draft_tokens * self.shown_rounds / self.shown_tokens)
            notes[ESTIMATED_ROUNDS] = None
        if positions and self.lacks_positions:
            positions, offered = (), ()
            notes[SOME_POSITIONS] = None
        return Counters(
            self.engine,
            num_drafts,
            draft_tokens,
            accepted,
            per_position=positions,
            per_position_offered=offered,
            emitted=emitted,
            length=self.length / self.num_lengths if self.num_lengths else None,
            notes=tuple(notes),
            k=self.k,
            source=self.source,
        )


def _added(sums: list[int], counts: tuple[int, ...]) -> list[int]:
    return [a + b for a, b in zip_longest(sums, counts, fillvalue=0)]


def _difference(now: int | None, then: int | None) -> int | None:
    return None if now is None else now - (then or 0)


def _differences(now: tuple[int, ...], then: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(value - (then[index] if index < len(then) else 0) for index, value in enumerate(now))


@dataclass(frozen=True, slots=True)
class Series:
    """One sample line: a name, its labels, a finite value."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse_series(text: str, *, model: str | None = None) -> list[Series]:
    """Parse all finite series; with `model`, those of that served model and those without a model_name.

    Raises EngineError for a model that no series has, though some have a model_name, and for text beyond the limits.
    """
    parsed: list[Series] = []
    num_labels = 0
    for line in filter(None, map(_line, _lines(text))):
        num_labels += len(line.labels)
        if num_labels > MAX_LABELS:
            raise EngineError(f"the metrics have more than {MAX_LABELS:,} labels; not those of an engine")
        parsed.append(line)
    names = {sample.labels["model_name"] for sample in parsed if "model_name" in sample.labels}
    if model is None or not names:
        return parsed
    if model not in names:
        raise EngineError(f"the metrics have no model_name {model!r}; they have {some(sorted(names), 10)}")
    return [sample for sample in parsed if sample.labels.get("model_name", model) == model]


def _lines(text: str) -> Iterator[str]:
    """The lines without comments."""
    if len(text) > MAX_BYTES:
        raise EngineError(f"the metrics have {len(text):,} characters; at most {MAX_BYTES:,} are read")
    if text.count("\n") > MAX_LINES:
        raise EngineError(f"the metrics have more than {MAX_LINES:,} lines; not those of an engine")
    for match in re.finditer(r"[^\n]++", text):
        if match.end() - match.start() > MAX_LINE:
            start = short_repr(text[match.start() : match.start() + 60])
            raise EngineError(f"the metrics have a line of more than {MAX_LINE:,} characters, which begins {start}")
        before = _BEFORE.match(match[0])
        line = match[0][before.end() if before else 0 :]
        if line[:1] not in ("#", ""):
            yield line


def _line(line: str) -> Series | None:
    """One series; None for another line, or a value that is not finite."""
    name = _NAME.match(line)
    if name is None:
        return None
    labels, end = _labels(line, name.end())
    value = _VALUE.fullmatch(line, end)
    try:
        number = math.nan if value is None else float(value[1])
    except ValueError:
        return None
    return Series(name[0], labels, number) if math.isfinite(number) else None


def _labels(line: str, end: int) -> tuple[dict[str, str], int]:
    """The labels that begin at `end`, and the index after them; other text is left to the value, which then fails."""
    labels: dict[str, str] = {}
    if line[end : end + 1] != "{":
        return labels, end
    end += 1
    for _ in range(_MAX_LABELS_A_LINE + 1):
        label = _LABEL.match(line, end)
        if label is None:
            return labels, end + (line[end : end + 1] == "}")
        if len(label[2]) > MAX_LABEL:
            raise EngineError(f"the metrics have a label {label[1][:100]} of more than {MAX_LABEL} characters")
        labels[label[1]] = _unescaped(label[2])
        end = label.end()
    raise EngineError(f"the metrics have a series of more than {_MAX_LABELS_A_LINE} labels; not those of an engine")


def _unescaped(text: str) -> str:
    """Backslash, quote and line break are the three escapes of the format."""
    parts = text.split(r"\\")
    return "\\".join(part.replace(r"\"", '"').replace(r"\n", "\n") for part in parts)


def sum_series(parsed: list[Series], *names: str) -> float | None:
    """Sum the series of the first of these names that exists; None without any. A name may have the suffix `_total`."""
    for name in names:
        values = [sample.value for sample in parsed if sample.name.removesuffix("_total") == name]
        if values:
            return sum(values)
    return None
