"""Draft counts in lines that are not of one engine, found by the words beside them."""

import re

from nextn.engines.counters import MAX_POSITIONS, UNKNOWN, Counters
from nextn.engines.log_format import (
    EQUALS,
    INT,
    IS,
    Fields,
    LogFormat,
    float_field,
    int_field,
    integer,
    rounds_by_length,
)
from nextn.engines.named_counts import MAX_BARE
from nextn.errors import EngineError

_GROUPED = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]{1,12})"  # of two counts that follow words
# Of progress, and parts of a run that are counted, too.
_NO_PROGRESS = r"(?![^0-9\n(]{0,40}?(?:(?<![a-z])(?:shards?|ranks?|layers?|steps?|prompts?|gpus?|epochs?|path)\b|[|█]))"
_ACCEPTED = (  # and two counts
    rf"accept(?:ed|ance)?\b(?: \((?:mtp|nextn)\))?{_NO_PROGRESS}"
    r"[^0-9\n(]{0,40}(?:\(?(?:[0-9.,]{1,12}\s*%|[01]\.[0-9]{1,9} (?=\())[^0-9\n(|█]{0,20})?\(?"
)
# Things that are counted, other than drafts: engines mean rounds or draft tokens by attempts.
_OTHERS = r"(?!draft|tok|accept)[a-z]{3,20}s\b"
_DRAFTING = r"mtp|draft(?:s|ed|ing)?|spec\w{0,12}|nextn"
# Without other words after "draft", as of a draft PR.
_DRAFTING_HERE = rf"(?!draft (?!tokens?\b|accept|model|stat|rate|head|layer|depth|step)[a-z])(?:{_DRAFTING})"
_OF = r"\s*(?:/|(?:out )?of)\s*"
_COUNT = rf"(?<![\w.,]){INT}(?!\s*%)"
_DRAFTED = (
    r"(?:(?:total[ _])?(?:drafted(?:[ _]tokens)?|draft[ _]tokens(?: (?:proposed|speculated|offered))?)|"
    r"draft_n(?:_total)?|total_draft|proposed(?:_tokens)?)"
)
_KEPT = (
    r"(?:(?!\w{0,20}(?:un|not|non)_?accept)(?:total |draft tokens )?\w{0,20}accept(?:ed)?"
    r"(?:[ _]drafts|[ _](?:draft[ _])?tokens)?)"
)
_REST = rf"(?:{_DRAFTED}|rejected(?:[ _](?:draft[ _])?tokens)?)"


def _pair(one: str, other: str) -> str:
    """Two counts, each after its name (`drafted 24, accepted 0`) or before it (`0 accepted / 24 drafted`)."""
    first = rf"(?<![a-z])(?:{one}{EQUALS}|(?<![0-9] ){one} {{1,6}}){_COUNT}(?: tokens)?"
    after = rf"{first}[\s,;|/-]{{1,6}}(?:\[\w{{1,12}}\] )?['\"]?{other}{IS}{_COUNT}"
    words = "(?:draft )?(?:tokens )?"
    return rf"{after}|{_COUNT} {words}{one}\s*(?:[,;/|(]|and|of|out of)\s*{_COUNT} {words}{other}"


# Of a decoding; with a word before them they are K, as `spec steps` are.
_NOUN = "(?:rounds|iterations|steps|cycles|decodes)"
_ROUNDS = rf"(?<![\w-])(?<!spec )(?<!speculative )(?<!num )(?<!draft )(?<!max ){_NOUN}{IS}{_COUNT}"
_NUM_ROUNDS = rf"{_ROUNDS}|{_COUNT} (?:(?:verif|spec)\w{{1,10}} )?{_NOUN}(?![\w-])"
_OWN_LINE = rf"\W{{0,9}}{_ROUNDS}\W{{0,9}}"  # has nothing else
_OF_ROUNDS = {
    # On a line with counts, or alone.
    "rounds": r"(?im)^(?:(?=[^\n]{0,400}(?:accept|draft))[^\n]{0,400}?"
    rf"|(?={_OWN_LINE}$)[^\n]{{0,20}}?)({_NUM_ROUNDS})",
    # All tokens of a round; a length of accepted ones may be without the bonus token.
    "length": r"(?i)(?<![\w.])([0-9]{1,3}\.[0-9]{2,9}) tok(?:ens?)?(?:/| per )(?:verify )?"
    r"(?:decode|cycle|pass|round)\b",
    "K": r"(?i)(?<![\w.-])(?<!top )k(?: |[:=] ?)([0-9]{1,2})(?![\w.%])",
}
_DRAFT = r"(?<![a-z])draft(?:s|ed)?:\s?"
_TOKENS_FIRST = rf"{_DRAFT}{_COUNT} tokens, {_COUNT} accepted"
_PAIR = (
    rf"{_DRAFT}{_COUNT}{_OF}{_COUNT} (?:tokens )?accepted|{_TOKENS_FIRST}|"
    rf"{_COUNT}{_OF}{_COUNT} (?:accepted draft|drafts? (?:tokens )?accepted)|"
    rf"(?:(?<=[0-9%] )|(?<![a-z])(?:{_DRAFTING})\b[^\n0-9()]{{0,40}})accept(?:ed|ance)\b"
    rf"\s?\({_COUNT}{_OF}{_COUNT} draft|"
    rf"(?:accepted drafts?(?: tokens)?{IS}|(?<![a-z])accepted=){_COUNT}{_OF}{_COUNT}|"
    rf"{_pair(_KEPT, _REST)}|{_pair(_DRAFTED, _KEPT)}"
)

_PAIR_ON_A_LINE = _PAIR.replace(r"\s", " ")


def _positions(fields: Fields) -> Counters | None:
    """Accepted / tested drafts of each position, which all rounds test, or those that accepted the one before."""
    counts = [[integer(part) for part in row.split("/")] for row in fields["accepted/drafted"]]
    accepted, tested = zip(*counts[:MAX_POSITIONS], strict=True)
    numbers = [int(place) for place in fields["number of a position"]]
    if numbers != [*range(numbers[0], numbers[0] + len(counts))]:
        found = ", ".join(map(str, numbers[:10]))
        raise EngineError(f"a table by position has the positions {found}, expected each in turn; copy it whole")
    if tested[1:] == accepted[:-1]:  # conditional
        return Counters(UNKNOWN, tested[0], None, sum(accepted), accepted)
    return Counters(UNKNOWN, tested[0], sum(tested), sum(accepted), accepted, tested)


def _drafts_and_tokens(fields: Fields) -> Counters | None:
    """Rounds, of which some accepted a draft, and draft tokens: refused where the figures fit no such meaning."""
    (some, rounds), (accepted, drafted) = (
        [integer(part) for part in fields[f"accepted/all {name}"][0].split("/")] for name in ("drafts", "tokens")
    )
    most = some * -(-drafted // max(rounds, 1))  # if these rounds accepted all of their drafts
    fits = some <= rounds <= drafted and some <= accepted <= min(drafted, most)
    return Counters(UNKNOWN, rounds, drafted, accepted) if fits else None


def _with_rounds(fields: Fields, drafted: int, accepted: int) -> Counters:
    """Both counts, with rounds that are counted beside them or follow from their length."""
    k = int_field(fields, "K")
    k = k if k and k <= min(drafted, MAX_POSITIONS) else None
    counts = {integer(count) for text in fields["rounds"] for count in re.findall(_COUNT, text)}
    rounds = counts.pop() if len(counts) == 1 else 0
    if not rounds <= drafted <= MAX_BARE * rounds:
        rounds = rounds_by_length(accepted, drafted, float_field(fields, "length"), k or 0) or 0
    fits = 0 < rounds <= drafted <= MAX_POSITIONS * rounds
    return Counters(UNKNOWN, rounds if fits else None, drafted, accepted, k=k)


def _ratio(fields: Fields) -> Counters:
    accepted, drafted = (integer(part) for part in re.split(_OF, fields["accepted/drafted"][0]))
    return _with_rounds(fields, drafted, accepted)


def _named(fields: Fields) -> Counters | None:
    """Two counts in the order of their names; a single name has the accepted ones first."""
    text, *others = fields["accepted and drafted"]
    if others:  # of other requests, or totals
        return None
    accepted, other = (integer(count) for count in re.findall(_COUNT, text))
    has_two_names = not re.search(rf"(?i){_COUNT}{_OF}{_COUNT}(?: (?:accepted )?draft|$)", text)
    if has_two_names and re.search(rf"(?is){_DRAFTED}.*accept|{_TOKENS_FIRST}", text):
        accepted, other = other, accepted
    drafted = accepted + other if "rejected" in text.lower() else other
    return _with_rounds(fields, drafted, accepted) if accepted <= drafted else None


def _row(position: str, counts: str = f"{INT}/") -> str:
    """A row of accepted and tested drafts of one position."""
    return rf"[^\n]{{0,80}}?(?<!\w)position {position}\s?[:=] ?\(?{counts}"


GENERAL_FORMATS: tuple[LogFormat, ...] = (
    LogFormat(
        "accepted and tested drafts by position", "osition",
        # Of position 0, or of 1; the position 1 that follows a position 0 is passed over with it.
        rf"(?im:^(?={_row('0')})(?:[^\n]*+(?:\n(?!{_row('[01]')})[^\n]*+){{0,3}}\n(?={_row('1')})[^\n])?|^(?={_row('1')}))",
        {"number of a position": rf"(?i){_row('([0-9]{1,3})')}",
         "accepted/drafted": rf"(?i){_row('[0-9]{1,3}', f'({INT}/{INT})')}(?![/0-9])"},
        ("number of a position", "accepted/drafted"), _positions,
        "as other engines print it, `position 1: 40/50`, a line each: rounds that accepted it, of those that tested it",
        num_lines=MAX_POSITIONS, is_run=True, is_general=True,
    ),
    LogFormat(
        "drafts and tokens with two counts each", "tokens ",
        rf"(?<!\w)(?i:drafts {INT}/{INT}(?=[,;]? tokens {INT}/))",
        {f"accepted/all {name}": rf"(?i)(?<!\w){name} ({INT}/{INT})(?!/)" for name in ("drafts", "tokens")},
        ("accepted/all drafts", "accepted/all tokens"), _drafts_and_tokens,
        "as other engines print it, `drafts 40/50, tokens 90/150`: rounds that accepted a draft, of all, and tokens",
        is_run=True, is_general=True,
    ),
    LogFormat(
        "acceptance with two counts", "ccept",
        rf"(?i:(?<!\w)(?:{_DRAFTING})\b(?:\[[0-9]{{1,9}}\])?"
        rf"(?:[^\n0-9.]|\.(?! )|=[0-9]{{1,9}}(?![0-9.])){{0,40}}?(?={_ACCEPTED}{_GROUPED}{_OF}[0-9]))",
        {"accepted/drafted": rf"(?i:{_ACCEPTED})(?<!/)({_GROUPED}{_OF}{_GROUPED})(?![0-9.]|\s*/)(?!(?i: *{_OTHERS}))",
         **_OF_ROUNDS},
        ("accepted/drafted",), _ratio,
        "as other engines print it, `MTP acceptance 62% (31/50)`: accepted and draft tokens, and rounds beside them",
        is_run=True, is_general=True,
    ),
    LogFormat(
        "accepted and drafted by name", "ccept",
        # A pair on two lines is passed over, as its second line may begin another one with the line after it.
        rf"(?im:^)(?i:{_OWN_LINE}\n)?(?>(?=[^\n]{{0,300}}?(?i:{_PAIR_ON_A_LINE}))|[^\n]{{0,300}}?(?i:{_PAIR}))",
        {"accepted and drafted": rf"(?i)({_PAIR})", "draft": rf"(?i)(?<![a-z])({_DRAFTING_HERE})", **_OF_ROUNDS},
        ("accepted and drafted", "draft"), _named,
        "as other engines print it, `MTP: 31 accepted / 50 drafted`, `drafted=50 accepted=31`: both counts, and "
        "rounds, iterations or steps beside them or on a line of their own",
        num_lines=4, is_run=True, is_general=True,
    ),
)  # fmt: skip
