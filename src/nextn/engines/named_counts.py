"""Draft counts by the names of the fields beside them, as engines, scripts and trainers without a known format have.

A name is a set of words: `vllm/spec_num_draft_tokens`, `draftTokens` and `Draft tokens` are all `draft` and `tokens`.
"""

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from nextn.bounded_json import MAX_COUNT, JsonObject
from nextn.engines.counters import MAX_POSITIONS, RISING, UNKNOWN, Counters, sum_counters
from nextn.errors import EngineError
from nextn.text_format import some

Item = TypeVar("Item")
NAMED_FORMAT = "counts by name"
NAMED_COUNTED = (
    "Of other engines, scripts and trainers: accepted with drafted or rejected tokens, or with rounds, in one object "
    "or in a table with a column for each, and positions as counts or as shares of rounds. "
    "`drafts` alone are rounds where more tokens are accepted or a length shows it, tokens where the rate does; "
    "else they are refused."
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FILLERS = _words(
    "total num n number of count counts ct sum cumulative overall spec speculative speculation speculated decode "
    "decoding mtp nextn system"
)
_OF_HEAD = _words("mtp nextn")
_COPIED = _words("lookup ngram suffix pld copy copied")
_DRAFTING = _words("draft drafts drafted drafting spec speculative speculation mtp nextn verify verifier")
_OF_TOKENS = _words("draft drafts drafted tokens")
_ROUNDS = _words("rounds iterations steps cycles calls runs passes windows decodes")
# Role -> a word that identifies it alone, words that do so beside others, and these others.
_ROLES: tuple[tuple[str, frozenset[str], frozenset[str], frozenset[str]], ...] = (
    ("accepted", _words("accepted"), _words("accept acc correct"), _OF_TOKENS),
    ("rejected", _words("rejected"), _words("reject"), _OF_TOKENS),
    ("drafted", _words("drafted proposed"), _words("draft"), _words("draft drafts tokens generated proposed")),
    ("rounds", _words("drafts rounds verify"), _words("verify verifier"), _ROUNDS),
    ("rounds", frozenset(), _words("draft"), _words("rounds iterations cycles")),  # steps may be of each draft
    ("rounds", frozenset(), _words("drafted"), _words("rounds iterations cycles steps")),
)
_BARE_ROUNDS = _words("rounds iterations steps cycles")  # of a decoding that also counts draft and accepted tokens
_DECODES = _words("decodes")  # of the trunk, or of the head, which decodes each draft token
_EMITTED = _words("emitted generated output predicted tokens pred")
MAX_BARE = 8  # draft tokens of each, at most: they are of something else, or K, where there are more
_POSITION = _words("pos position positions")
_OF_POSITIONS = _POSITION | _words("accepted accept acceptance draft tokens rate rates per by")
# What distinguishes runs that are not to be added.
_SETTING = re.compile(
    r"k|(?:(?:mtp|spec|speculative|draft|num|max|target)_)?(?:k|depth|gamma|model|method|temperature)|mode|phase|variant|"
    r"config|label|name|checkpoint|run|engine|backend|head|drafter|algorithm|(?:(?:num|n|max)_)?spec\w*_(?:tokens|steps)|"
    r"num_draft|n_max|draft_(?:max|len|length)|max_draft_(?:len|length|tokens)|block_size"
)
_LENGTH = re.compile(r"(?:\w+_)?accept(?:ance|ed)?_len(?:gth)?|tokens_per_(?:step|round)")
_RATE = re.compile(r"(?:mtp_|spec_|draft_|spec_decode_)?accept(?:ance)?_rate")
_ANY_RATE = re.compile(rf"(?:{_RATE.pattern})(?:_pct|_percent)?|acceptance|hit_rate")  # where the unit is not known
_K = re.compile(r"k|(?:mtp_|draft_|spec_)?depth|gamma|(?:num_)?spec(?:ulative)?_tokens")
_TOLERANCE = 0.1  # of a length, which may be a mean of requests
_RATE_TOLERANCE = 0.03
_MAX_RECORDS = 100_000
_MAX_LINES = 8000  # characters of what is no log
_NUMBERS = r"[0-9]{1,12}(?:\.[0-9]{1,20})?"
_FIELD = re.compile(
    rf"(?<![\w.])([A-Za-z][\w/.-]{{1,60}}(?: [A-Za-z]\w{{0,20}}){{0,3}})['\"]? ?[=:] {{0,40}}"
    rf"(?:(?:\*\*)?({_NUMBERS})[iu]?(?![\w%]|[.,][0-9])|\[({_NUMBERS}(?:, ?{_NUMBERS}){{0,63}})\])"
)
_COPIER = re.compile(
    r"(?i)(?<![a-z])(?:method|mode|type|drafter|algorithm|spec\w*)['\"]?\s?[=:]\s?['\"]?"
    r"(?:[a-z]{1,20}[ _-]){0,2}(?:lookup|n-?gram|suffix|pld|copy|copied)(?![a-z])"
)
# What drafted, as the label of counts: `[pld] drafted=50`, `n-gram draft acceptance position 1: 40/50`, `mtp+ngram: `.
_LABEL = re.compile(
    r"(?i)(?<![\w-])(?:(?:mtp|spec\w{0,12})[ _-])?(?:prompt[ _-]?lookup|n-?gram|pld|lookup|suffix)"
    r"(?:[ _-](?:draft\w{0,4}|decod\w{1,4}|accept\w{0,6}|spec\w{0,12}|tokens|stat\w{0,7}|position [0-9]{1,3})){0,4}"
    r"(?:['\")\]]{0,2}:|\])(?! ?(?:off|false|none|disabled)\b)"
)
_HEAD = re.compile(r"(?i)(?<![a-z])(?:mtp|nextn)(?![a-z])")
# Counts of a drafter that copies, up to those of the head in the same line.
_COPIED_PART = re.compile(
    r"(?i)(?<![a-z0-9+])(?:prompt[ _-]?lookup|n-?gram|pld|suffix)[ _-](?=(?:draft|propos|accept)[^\n]{0,99}[0-9])"
    r"(?=[^\n]{0,99}accept)"
    r"(?:(?!(?<![a-z])(?:mtp|nextn)(?![a-z]))[^\n]){0,500}"
)
_TAG = re.compile(r"(?i)\[(?:spec(?:ulative)?(?:[ _-]?decod\w{1,5})?|mtp|nextn|draft)\]")  # before counts
_WORD = re.compile(r"[a-z]+|[0-9]+")


def words_of(name: str) -> list[str]:
    """Return the words of a name without its group: `vllm/spec_numDrafts` -> spec, num, drafts."""
    own = re.split("[/:.]", re.sub(r"\.(?:count|total|value)$", "", name[-200:]))[-1]
    return _WORD.findall(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", own).lower())


def role_of(name: str) -> str:
    """Return which of the counts a name is of: drafted, accepted, rejected or rounds; "" for none."""
    words = set(words_of(name)) - _FILLERS
    if words == {"draft"} and "total" in words_of(name):
        return "drafted"
    for role, alone, beside, others in _ROLES:
        own = words & (alone | beside)
        if own and words <= own | others and (own & alone or words - beside):
            return role
    return ""


def is_copied(names: Iterable[str]) -> bool:
    """Whether a name says that the drafts were copied from a text."""
    return any(_COPIED.intersection(words_of(name)) for name in names)


@dataclass(frozen=True)
class _Record:
    path: tuple[str, ...]  # names of what it is in, "" for an item of a list
    counters: Counters
    settings: tuple[tuple[str, str], ...]


def in_documents(documents: list[object]) -> Counters | None:
    """Return the counts of parsed documents: of one object, of all items of a list or documents, or of their total.

    Raises EngineError where there are several, and which of them is meant is not clear.
    """
    path = ("",) if len(documents) > 1 else ()
    records = last_parts((answer_id(document), [*_records(document, path)]) for document in documents)
    total = sum_counters(record.counters for record in records)
    if total is None or len(records) == 1:
        return total
    if (whole := _whole(records, total)) is not None:
        return whole
    if len({record.path for record in records}) > 1 or len({record.settings for record in records}) > 1:
        found = ("/".join(filter(None, record.path)) or "an item of a list" for record in records)
        raise EngineError(
            f"draft counts of {len(records):,} runs, parts or settings ({some(list(dict.fromkeys(found)))}), and which "
            "of them are of one run is not clear; give these alone"
        )
    drafted, accepted = (
        [getattr(each.counters, name) or 0 for each in records] for name in ("draft_tokens", "accepted")
    )
    is_rising = sorted({*drafted}) == drafted and sorted(accepted) == accepted
    return replace(total, notes=(*total.notes, RISING)) if is_rising else total


def in_lines(text: str) -> Counters | None:
    """Return the counts in lines or a Python object with a name before each; None without rounds, or for several."""
    record: dict[str, object] = {}
    bare: dict[str, set[int]] = {}
    for name, value, values in _FIELD.findall(text) if len(text) <= _MAX_LINES else ():
        if role_of(name) or _POSITION.intersection(words_of(name)):
            number = [float(each) if "." in each else int(each) for each in re.findall(r"[0-9.]+", values or value)]
            if name in record:
                return None
            record[name] = number if values else number[0]
            continue
        name = re.sub(r"(?i)^(?:mtp|nextn) ", "", name)  # the label of a line
        if value.isdigit() and (_is_bare(name) or _EMITTED.intersection(words_of(name))):
            bare.setdefault(name, set()).add(int(value))
    record |= {name: min(found) for name, found in bare.items() if len(found) == 1}
    tag = ("mtp",) if _TAG.search(text) else ()
    counters = None if is_copied(record) else from_record(record, tag)
    if counters is None or not counters.num_drafts or not counters.draft_tokens:
        return None
    refuse_copied(text)
    return counters


def refuse_copied(text: str) -> None:
    """Raise EngineError where a text names a drafter that copies."""
    if copier := _COPIER.search(text):
        raise copied_error(copier[0])


def copier_of(line: str) -> str:
    """Return the label by which counts behind it in a line are of copied drafts; "" for none, or for the head's."""
    match = _LABEL.search(line)
    return match[0] if match and not _HEAD.search(line, match.end()) else ""


def without_copied(entry: str) -> tuple[str, str]:
    """Return an entry without counts of drafts that were copied, and by what; "" for nothing."""
    match = _COPIED_PART.search(entry)
    return (_COPIED_PART.sub(" ", entry), match[0].strip(" ,;|")[:60]) if match else (entry, "")


def copied_error(copier: str) -> EngineError:
    """Return the error for counts of drafts that were copied, by the words that say so."""
    return EngineError(
        f"the counts are of drafts copied from the text ({copier!r}), which no head made; give those of a run "
        "with MTP alone"
    )


def _whole(records: list[_Record], total: Counters) -> Counters | None:
    """The counts that are the sum of the others, which are in lists or objects beside them."""
    depth = min(len(record.path) for record in records)
    above = [record.counters for record in records if len(record.path) == depth]
    halves = (2 * (above[0].draft_tokens or 0), 2 * (above[0].accepted or 0))
    return above[0] if len(above) == 1 and halves == (total.draft_tokens, total.accepted) else None


def _records(value: object, path: tuple[str, ...]) -> Iterator[_Record]:
    if is_copied(path):
        return
    if isinstance(value, list):
        for item in value[:_MAX_RECORDS]:
            yield from _records(item, (*path, ""))
    elif isinstance(value, Mapping):
        counters = from_record(value, path)
        if counters is not None:
            names = [key for key in value if _SETTING.fullmatch("_".join(words_of(str(key)))) and not role_of(str(key))]
            settings = ((str(key), str(value[key])[:100]) for key in names)
            yield _Record(path, counters, tuple(settings))
            return
        for key, item in value.items():
            yield from _records(item, (*path, str(key)))


def from_record(record: JsonObject, path: tuple[str, ...] = ()) -> Counters | None:
    """Return the counts in an object by the names of its fields; None where they are none of drafts.

    Raises EngineError where they contradict an acceptance rate or length in the same object.
    """
    names: dict[str, list[str]] = {}
    for name in map(str, record):
        if (role := role_of(name)) and _count(record[name]) is not None:
            names.setdefault(role, []).append(name)
    if any(_OF_HEAD.intersection(words_of(name)) for name in names.get("accepted", ())):
        names = {role: _of_head(found) for role, found in names.items()}
    words = {word for found in names.values() for name in found for word in words_of(name)}
    words |= {word for name in path for word in words_of(name)}
    counts = {role: {_count(record[name]) for name in found} for role, found in names.items()}
    if not words & _DRAFTING or any(len(found) > 1 for found in counts.values()):
        return None
    drafted, accepted, rejected, rounds = (
        next(iter(counts.get(role, ())), None) for role in ("drafted", "accepted", "rejected", "rounds")
    )
    if drafted is None and accepted is not None and rejected is not None:
        drafted = accepted + rejected
    rates = _by_position(record)
    if rounds is None and drafted and accepted is not None:
        rounds = _bare_rounds(record, drafted, accepted) or _rounds_of_rates(rates, drafted, accepted)
    if rounds is not None and drafted is None and accepted is not None and not rates:
        drafted, rounds = _unit_of(record, names["rounds"][0], rounds, names["accepted"][0], accepted)
    if accepted is not None and rounds and drafted is None and not rates and _has_bonus(record, accepted, rounds):
        accepted -= rounds
    if drafted and accepted is not None and not _fits_rate(record, drafted, accepted, rounds):
        raise _contradiction(drafted, accepted, rounds, _stated(record, _RATE)[0], "acceptance rate")
    if rounds is not None and not _are_rounds(record, drafted, accepted, rounds):
        if drafted and _has_bonus(record, accepted or 0, rounds):
            raise _contradiction(drafted, accepted, rounds, _stated(record, _LENGTH)[0], "acceptance length")
        rounds = None
    return _checked(drafted, accepted, rounds, rates)


def _bare_rounds(record: JsonObject, drafted: int, accepted: int) -> int | None:
    """The steps or iterations beside both counts of tokens, which are rounds if each drafted some and at most as many.

    With another word before them they are K, as `speculative_num_steps` is. A round gives its accepted drafts and one
    token, so a count of all tokens beside them is sure.
    """
    named = {str(name): _count(value) for name, value in record.items() if not role_of(str(name))}
    found = {count for name, count in named.items() if _is_bare(name, _BARE_ROUNDS)} - {None, 0}
    decodes = {count for name, count in named.items() if _is_bare(name, _DECODES) and count and count < drafted}
    rounds = next(iter(found or decodes), None) if len(found or decodes) == 1 else None
    emitted = {count or 0 for name, count in named.items() if _EMITTED.intersection(words_of(name))}
    is_sure = rounds and any(abs(count - rounds - accepted) <= 1 for count in emitted)
    return rounds if rounds and (is_sure or drafted <= MAX_BARE * rounds) and rounds <= drafted else None


def _is_bare(name: str, rounds: frozenset[str] = _BARE_ROUNDS | _DECODES) -> bool:
    words = {*words_of(name)} - {"total"}
    return len(words - _OF_HEAD if words & _DECODES else words) == 1 and bool(words & rounds)


def _rounds_of_rates(rates: list[float], drafted: int, accepted: int) -> int | None:
    """The rounds of counts beside shares of rounds by position, where the shares give the accepted tokens."""
    rounds = round(drafted / max(1, len(rates)))
    is_shares = len(rates) > 1 and all(rate <= 1 for rate in rates)
    return rounds if is_shares and _is_near(rounds * sum(rates) + 1, accepted + 1) else None


def _unit_of(record: JsonObject, name: str, count: int, other: str, accepted: int) -> tuple[int | None, int | None]:
    """Draft tokens or rounds that `drafts` without a count of tokens are: tokens if they give the rate beside them.

    More accepted tokens than drafts, a length, or tokens in the name of the accepted ones show rounds.
    Raises EngineError where nothing shows which.
    """
    is_sure = {*words_of(name)} - _FILLERS != {"drafts"} or accepted > count or "tokens" in words_of(other)
    if is_sure or _stated(record, _LENGTH):
        return None, count
    if _stated(record, _ANY_RATE):
        return (count, None) if _fits_rate(record, count, accepted, None, names=_ANY_RATE) else (None, count)
    if not accepted:
        return count, None
    if 1 in _stated(record, _K):
        return count, count
    raise EngineError(
        f"{name!r} beside {other!r} may be rounds or draft tokens, and nothing there shows which; give the number of "
        "draft tokens, the acceptance rate or the mean acceptance length, too"
    )


def _contradiction(
    drafted: int | None, accepted: int | None, rounds: int | None, stated: float, name: str
) -> EngineError:
    counts = {"drafted": drafted, "accepted": accepted, "rounds": rounds}
    found = ", ".join(f"{role} {count:,}" for role, count in counts.items() if count is not None)
    return EngineError(
        f"the counts ({found}) contradict the {name} {stated:g} beside them: one of them is of something else, or "
        "includes the bonus tokens; give the counts without it, if they are of draft tokens"
    )


def _stated(record: JsonObject, names: re.Pattern[str]) -> list[float]:
    """The figures that an object states beside its counts."""
    found = (_number(value) for name, value in record.items() if names.fullmatch("_".join(words_of(str(name)))))
    return [value for value in found if value]


def _has_bonus(record: JsonObject, accepted: int, rounds: int) -> bool:
    """Whether the accepted tokens include the bonus token of each round, by the length beside them."""
    return any(length >= 1 and _is_near(length, accepted / (rounds or 1)) for length in _stated(record, _LENGTH))


def _fits_rate(
    record: JsonObject, drafted: int, accepted: int, rounds: int | None, *, names: re.Pattern[str] = _RATE
) -> bool:
    """Whether a stated acceptance rate is that of the counts: of drafts, or with the bonus tokens on both sides."""
    rates = (accepted / drafted, (accepted + (rounds or 0)) / (drafted + (rounds or 0)))
    near = _RATE_TOLERANCE + 1 / drafted
    stated = _stated(record, names)
    return all(any(min(abs(rate - own), abs(rate / 100 - own)) <= near for own in rates) for rate in stated)


def _are_rounds(record: JsonObject, drafted: int | None, accepted: int | None, rounds: int) -> bool:
    """Whether the counts of rounds and tokens fit each other, a stated length, and K."""
    tokens = max(drafted or 0, accepted or 0)
    lengths = _stated(record, _LENGTH) if accepted is not None else []
    return (rounds > 0 or tokens == 0) and (
        all(tokens <= k * rounds for k in _stated(record, _K))
        and all(_is_near(length, 1 + (accepted or 0) / (rounds or 1)) for length in lengths)
    )


def _is_near(stated: float, own: float) -> bool:
    return abs(stated - own) <= _TOLERANCE * own


def _of_head(names: list[str]) -> list[str]:
    """The names that say that they are of the MTP head's drafts, among those of all drafts."""
    return [name for name in names if _OF_HEAD.intersection(words_of(name))] or names


def _checked(drafted: int | None, accepted: int | None, rounds: int | None, rates: list[float]) -> Counters | None:
    if drafted is not None and rounds is not None and rounds > drafted:
        rounds = None
    is_shares = all(rate <= 1 for rate in rates) and not all(type(rate) is int for rate in rates)
    positions = tuple(round(rate * rounds) if is_shares else round(rate) for rate in rates) if rounds else ()
    if accepted is None and rounds and positions and not is_shares:
        accepted = sum(positions)
    if accepted is None or (drafted is None and not rounds) or (drafted is not None and accepted > drafted):
        return None
    if abs(sum(positions) - accepted) > 2 + accepted // 50 + len(positions):  # of rounds that reached them, or shares
        positions = ()
    if positions and sorted((rounds or 0, *positions), reverse=True) != [rounds, *positions]:
        return None
    return Counters(UNKNOWN, rounds, drafted, accepted, positions, k=len(rates) or None, source=NAMED_FORMAT)


def _by_position(record: JsonObject) -> list[float]:
    """The counts or shares of each position: a list, or fields with the number of a position."""
    numbered: dict[int, float] = {}
    for name, value in record.items():
        words = set(words_of(str(name))) - _FILLERS
        if not words & _POSITION:
            continue
        if isinstance(value, Mapping) and [*value] == [str(place) for place in range(len(value))]:
            value = [*value.values()]
        if isinstance(value, list) and words <= _OF_POSITIONS and 0 < len(value) <= MAX_POSITIONS:
            rates = [_number(rate) for rate in value]
            return [rate for rate in rates if rate is not None] if None not in rates else []
        number = next((word for word in words - _OF_POSITIONS if word.isdigit() and len(word) < 4), "")
        rate = _number(value)
        is_rate = "rate" in words or (type(value) is float and 0 <= value <= 1)
        if number and words - {number} <= _OF_POSITIONS and rate is not None and is_rate:
            numbered[int(number)] = rate
    first = min(numbered, default=0)
    places = [*range(first, first + len(numbered))]
    return [numbered[place] for place in places] if first < 2 and sorted(numbered) == places else []


def _number(value: object) -> float | None:
    is_number = type(value) in (int, float) and 0 <= value <= MAX_COUNT  # type: ignore[operator]
    return value if is_number else None  # type: ignore[return-value]


def _count(value: object) -> int | None:
    number = _number(value)
    return None if number is None or number != int(number) else int(number)


def answer_id(document: object) -> str | None:
    """Return the id of the answer that a document is a part of."""
    if not isinstance(document, Mapping):
        return None
    info = document.get("meta_info")  # SGLang's
    name = info.get("id") if isinstance(info, Mapping) else document.get("id")
    return name if isinstance(name, str) and name else None


def last_parts(found: Iterable[tuple[Hashable, Sequence[Item]]]) -> list[Item]:
    """Return what was found in documents, each beside its answer: of several parts of one, what the last has."""
    last: dict[Hashable, Sequence[Item]] = {}
    for place, (answer, items) in enumerate(found):
        if items:
            last[place if answer is None else answer] = items
    return [item for items in last.values() for item in items]
