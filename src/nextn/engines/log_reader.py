"""Read the entries of a log and add their counts, of each process apart."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import takewhile
from typing import TextIO

from nextn.engines.counters import (
    COPIED,
    COUNTS,
    MAX_POSITIONS,
    RISING,
    RISING_AGAIN,
    RUNS,
    UNKNOWN,
    Counters,
    CounterSums,
    added_note,
    fill_in_derived,
)
from nextn.engines.llama_formats import HEAD_STATISTICS
from nextn.engines.log_format import NUMBER, LogFormat, to_number
from nextn.engines.log_formats import LOG_FORMATS
from nextn.engines.named_counts import copied_error, copier_of, without_copied
from nextn.errors import EngineError

_CHUNK = 1024 * 1024  # characters of a log that are held at once, plus the rest of their last line
_MAX_LINE = 64 * 1024
_MAX_ENTRY = 8 * 1024  # characters
_MAX_UNREADABLE = 1000  # entries of a format, after which several in one line are read as one
_MAX_DEPTH_LINES = 2000  # of SGLang's, from which K is read
_SPACES = str.maketrans("\t\u00a0\u202f\uff1a\uff0c\uff08\uff09\uff05", "   :,()%")  # and signs of Chinese text
_COLORS = re.compile(r"(?:\x1b|\^\[)\[[0-9;]{0,20}[A-Za-z]")  # of a terminal, or as `cat -v` shows them
_MIN_DRAFTS = 50  # draft tokens of an entry without an accepted one, which is not chance where others accept many
_MIN_RISING = 5  # entries with more than the one before for one with fewer, which chance has seldom
_MORE = 1.02  # times as many draft tokens as the head's: of other drafters
_MANY = 0.2  # of the draft tokens of those others
_MAX_PREFIX = 500  # characters of a line before its entry, and of the line before it
_MAX_PROCESSES = 1000
_ALL_POSITIONS = ("vLLM", "LMDeploy")  # which print those that no round accepted, too
# What distinguishes the processes of one log: vLLM's and SGLang's ranks, llama.cpp's router, compose, grep, Kubernetes,
# syslog.
_PROCESS = re.compile(
    r"\bpid=[0-9]+|\bDP[0-9]+|\[[0-9]+\](?= +[0-9.]+ [A-Z] )|(?m:^)[\w.@-]+(?= +\| )|"
    r"(?m:^)[\w./-]+\.\w+(?=:)|\[pod/[^\]\s]+\]|\w\[[0-9]+\](?=:)|"
    r"(?m:^)[a-z][\w-]*-[a-z0-9]{5}(?= [a-z])"
)
_NAME = re.compile(r"([A-Za-z][A-Za-z_ -]{0,40})[^A-Za-z]*\Z")  # of a row, before its figures
_RANK = re.compile(r"\bEngine [0-9]+(?=:)")  # in the line before the counts, of a process with several ranks


@dataclass
class _Reader:
    """Sums the entries of one format; the last of cumulative ones, and of each run where the counts begin anew."""

    format: LogFormat
    sums: CounterSums = field(default_factory=CounterSums)
    processes: dict[str, CounterSums] = field(default_factory=dict)  # the same counts, of each
    last: dict[str, Counters] = field(default_factory=dict)  # of each process, not added yet
    start: int = -1  # of the last entry, in the text at hand
    end: int = -1
    process: str = ""  # of the last entry
    missing: str = ""  # field of an entry that could not be read
    num_unreadable: int = 0
    has_entries: bool = False
    counts: tuple[int, int] = (-1, -1)  # drafted and accepted tokens of the last entry
    num_rising: int = 0  # entries with more than the one before
    num_falling: int = 0  # and with fewer
    copier: str = ""  # what drafted in entries that are left out, as their lines say
    num_empty: int = 0  # entries of many draft tokens without an accepted one
    others: tuple[int, int, int] = (0, 0, 0)  # number, drafted and accepted tokens of the other entries
    runs: Counter[str] = field(default_factory=Counter)  # entries with drafts, by the name before them
    depths: Counter[int] = field(default_factory=Counter)  # entries by number of positions, where they have all

    @cached_property
    def marker(self) -> re.Pattern[str]:
        return re.compile(self.format.marker)

    @cached_property
    def patterns(self) -> dict[str, re.Pattern[str]]:
        return {name: re.compile(pattern) for name, pattern in self.format.fields.items()}

    def add(self, entry: str, process: str, name: str) -> None:
        self.has_entries = True
        if self.format.is_general:
            entry, copier = without_copied(entry)
            self.copier = copier or self.copier
        fields = {name: pattern.findall(entry) for name, pattern in self.patterns.items()}
        if missing := next((name for name in self.format.required if not fields[name]), ""):
            self.missing, self.num_unreadable = missing, self.num_unreadable + 1
            return
        counters = self.format.counters(fields)
        if counters is None:
            return
        depth = len(counters.per_position) if counters.engine in _ALL_POSITIONS else 0
        if depth := depth or (counters.engine == UNKNOWN and counters.k) or 0:
            self.depths[depth] += 1
        if self.format.is_run and counters.has_drafts is not False:
            self.runs[name if name in self.runs or len(self.runs) < _MAX_PROCESSES else ""] += 1
        before, self.counts = self.counts, (counters.draft_tokens or 0, counters.accepted or 0)
        is_rising = self.counts[0] > before[0] and self.counts[1] >= before[1]
        self.num_rising, self.num_falling = self.num_rising + is_rising, self.num_falling + (not is_rising)
        if self.counts[0] >= _MIN_DRAFTS and counters.accepted == 0:
            self.num_empty += 1
        else:
            self.others = (self.others[0] + 1, self.others[1] + self.counts[0], self.others[2] + self.counts[1])
        if len({*self.processes, *self.last}) >= _MAX_PROCESSES:
            process = ""
        if not self.format.is_cumulative:
            self._count(process, counters)
            return
        last = self.last.get(process)
        if last is not None and any((getattr(counters, name) or 0) < (getattr(last, name) or 0) for name in COUNTS):
            self._count(process, last)  # the engine was started again
            self.runs[process] += 1 + (process not in self.runs)
        self.last[process] = counters

    def leaves_out(self, text: str, start: int, end: int) -> bool:
        """Whether the line of an entry says that its drafts were copied from the text."""
        first = max(text.rfind("\n", max(0, start - _MAX_PREFIX), start) + 1, start - _MAX_PREFIX, 0)
        stop = _line_end(text, end, min(len(text), end + _MAX_PREFIX))
        if copier := copier_of(text[first:stop]):
            self.copier, self.end = copier, stop
        return copier != ""

    def _count(self, process: str, counters: Counters) -> None:
        self.sums.add(counters)
        self.processes.setdefault(process, CounterSums()).add(counters)

    def counters(self) -> Counters | None:
        for process, last in self.last.items():
            self._count(process, last)
        self.last = {}
        found = self.sums.counters()
        if found is None:
            return None
        found, parts = fill_in_derived(found), {name: sums.counters() for name, sums in self.processes.items()}
        notes = added_note({name: part for name, part in parts.items() if part is not None})
        if self.copier:
            notes += (COPIED,)
        if (num_runs := max(self.runs.values(), default=0)) > 1:
            notes += (f"{num_runs} {RUNS}",)
        if found.engine == UNKNOWN and self.num_rising > 1 and self.num_falling <= self.num_rising // _MIN_RISING:
            notes += (RISING_AGAIN if self.num_falling else RISING,)
        num, drafted, accepted = self.others
        if self.num_empty and not self.format.is_cumulative and accepted > _MANY * drafted:
            notes += (
                f"{self.num_empty} of {num + self.num_empty} entries accepted no draft, the others "
                f"{accepted / drafted:.0%}: compare their requests (length of context, sampling, time); a wrong head "
                "accepts few in all",
            )
        return replace(found, source=self.format.name, notes=(*found.notes, *notes))

    def check_depths(self) -> None:
        """Raise EngineError where the entries are of several K; one line alone may be cut."""
        depths = sorted(depth for depth, number in self.depths.items() if number > 1 or self.format.is_run)
        if len(depths) > 1:
            found = " and ".join(map(str, depths[:9]))
            raise EngineError(f"the counts are of runs with K = {found}; give those of one alone")


@dataclass(frozen=True)
class LogReading:
    """What a log holds."""

    counters: Counters | None
    incomplete: tuple[tuple[str, str], ...] = ()  # (format, missing field) of entries that could not be read
    has_entries: bool = False  # whether any was there, even one whose figures contradict each other


def read_log(file: TextIO, *, general: bool = False) -> LogReading:
    """Sum the counts of all entries of the first format that the log has; others are named in a note.

    Args:
        file: The log.
        general: Look for the formats that are not of one engine, and for no others.
    """
    readers = [_Reader(each) for each in LOG_FORMATS]
    depths = _read_entries(file, readers, general=general)
    found = [(reader, counters) for reader in readers if (counters := reader.counters()) is not None]
    incomplete = tuple((reader.format.name, reader.missing) for reader in readers if reader.missing)
    if not found and (copier := next((reader.copier for reader in readers if reader.copier), "")):
        raise copied_error(copier)
    if not found:
        return LogReading(None, incomplete, any(reader.has_entries for reader in readers))
    (reader, counters), *others = sorted(  # counts before a length alone
        found, key=lambda each: (each[1].has_drafts is None, _has_other_drafters(each[1], found))
    )
    reader.check_depths()
    # llama.cpp's logs have all of its formats.
    others = [other for other in others if other[1].engine != "llama.cpp" or counters.engine != "llama.cpp"]
    if others:
        names = ", ".join(other.format.name for other, _ in others)
        note = f"read from {reader.format.name}; also there, and not added: {names}"
        counters = replace(counters, notes=(*counters.notes, note))
    if counters.engine in ("SGLang", "TokenSpeed") and counters.k is None:
        counters = replace(counters, k=depths.k)
    return LogReading(counters, incomplete)


def _read_entries(file: TextIO, readers: Sequence[_Reader], *, general: bool) -> "_SglangDepth":
    """Read the log a part at a time, and add each entry to the reader of its format; return what shows SGLang's K."""
    depths, ahead, begin = _SglangDepth(), "", 0
    while text := (ahead + file.read(_CHUNK) + file.readline(_MAX_LINE)).translate(_SPACES):
        is_last = len(text) < _CHUNK
        text = _COLORS.sub("", text)
        # An entry of several lines may go on in the text after this one.
        body = len(text) if is_last else max(1, len(text) - _MAX_ENTRY)
        body = body if is_last else max(text.rfind("\n", begin + 1, body), 0) or body
        passed = 0
        for match in _matches(text, begin, body, readers, general=general):
            passed = match.end()
            reader = readers[int((match.lastgroup or "_0")[1:])]
            if match.start() < reader.end:
                continue
            name = _name(text, match.start(), reader) if reader.format.is_run else ""
            if general and reader.leaves_out(text, *match.span()):
                continue
            entry, reader.end = _entry(text, *match.span(), reader)
            reader.process = _process(text, match.start(), reader)
            reader.start = match.start()
            reader.add(entry, reader.process, name)
            depths.add(entry)
        if is_last:
            break
        kept = max(text.rfind("\n", max(0, body - _MAX_PREFIX), body), 0) or body  # with the line before the next entry
        ahead, begin = text[kept:], max(body, passed) - kept  # a marker may go on behind the body
    return depths


def _matches(text: str, begin: int, end: int, readers: Sequence[_Reader], *, general: bool) -> Iterator[re.Match[str]]:
    """Yield where an entry of any format begins in this part of the log, which its readers see anew."""
    for reader in readers:
        reader.start = reader.end = -1
    here = tuple(index for index, each in enumerate(LOG_FORMATS) if each.literal in text and each.is_general == general)
    found = _markers(here).finditer(text, begin) if here else iter(())
    yield from takewhile(lambda match: match.start() < end, found)


def _has_other_drafters(counters: Counters, found: list[tuple[_Reader, Counters]]) -> bool:
    """Whether llama.cpp's own statistics of the head have fewer draft tokens than these counts, of any drafter."""
    heads = next((each.draft_tokens or 0 for reader, each in found if reader.format.name == HEAD_STATISTICS), None)
    return heads is not None and counters.engine == "llama.cpp" and (counters.draft_tokens or 0) > _MORE * heads


def _process(text: str, start: int, reader: _Reader) -> str:
    """Return what the line of an entry says of its process, and the line before it of its rank; "" for nothing.

    Processes that write at once may share a line: each has its name before its entry.
    """
    begin = _line_start(text, start)
    own: list[str] = _PROCESS.findall(text, max(begin, reader.start), start)
    if not own and reader.start >= begin:
        return reader.process
    before = text[_line_start(text, max(0, begin - 1)) : begin]
    rank = _RANK.search(before)
    if rank is not None and _PROCESS.findall(before, 0, rank.start()) == own:
        own.append(rank[0])
    return " ".join(dict.fromkeys(own))


def _name(text: str, start: int, reader: _Reader) -> str:
    """Return the words before an entry in its line, as a row has; "" for none."""
    match = _NAME.search(text, max(_line_start(text, start), reader.start), start)
    return match[1].strip() if match else ""


@cache
def _markers(indices: tuple[int, ...]) -> re.Pattern[str]:
    """The markers of these formats, each in a group named after its index."""
    return re.compile("|".join(f"(?P<_{index}>{LOG_FORMATS[index].marker})" for index in indices))


def _entry(text: str, start: int, end: int, reader: _Reader) -> tuple[str, int]:
    """The text of the entry with this marker, up to the next one of its format, and where that may begin."""
    limit = min(start + _MAX_ENTRY, len(text))
    if reader.format.num_lines == 1:
        limit = _line_end(text, start, limit)
    following = reader.num_unreadable < _MAX_UNREADABLE and reader.marker.search(text, end + 1, limit)
    stop = following.start() if following else limit
    lines = text[start:stop].split("\n", reader.format.num_lines)
    # Of many entries in one line, none looks for the end of that line beyond the next entry.
    return "\n".join(lines[: reader.format.num_lines]), _line_end(text, end, stop if following else len(text))


def _line_start(text: str, place: int) -> int:
    """Return where the line of a place begins, or the place `_MAX_PREFIX` before it in a longer line."""
    limit = max(0, place - _MAX_PREFIX)
    return max(limit, text.rfind("\n", limit, place) + 1)


def _line_end(text: str, start: int, limit: int) -> int:
    end = text.find("\n", start, limit)
    return limit if end < 0 else end


class _SglangDepth:
    """K from pairs of accept len and accept rate, which two versions of SGLang define differently.

    In recent versions (0.5.15) the rate is (AL - 1) / K, in older ones AL / (K + 1). Both are rounded to two decimals,
    so one pair may allow several K; K is the one that all pairs allow by one definition, if none is by the other.
    """

    _PAIR = re.compile(rf"accept[ _]len:\s*({NUMBER}), accept[ _]rate:\s*({NUMBER})")

    def __init__(self) -> None:
        self.allowed: list[set[int] | None] = [None, None]
        self.num_lines = 0

    def add(self, entry: str) -> None:
        match = self._PAIR.search(entry)
        if match is None or self.num_lines >= _MAX_DEPTH_LINES:
            return
        length, rate = to_number(match[1]), to_number(match[2])
        if rate < 0.02 or not 1 <= length <= MAX_POSITIONS:
            return
        self.num_lines += 1
        for index, (tokens, extra) in enumerate(((length - 1, 0), (length, 1))):
            low, high = (tokens - 0.005) / (rate + 0.005), (tokens + 0.005) / max(rate - 0.005, 1e-9)
            fitting = {k for k in range(1, 65) if low <= k + extra <= high}
            known = self.allowed[index]
            self.allowed[index] = fitting if known is None else known & fitting

    @property
    def k(self) -> int | None:
        candidates = [found for found in self.allowed if found]
        return next(iter(candidates[0])) if len(candidates) == 1 and len(candidates[0]) == 1 else None
