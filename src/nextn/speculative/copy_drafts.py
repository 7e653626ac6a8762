"""Drafts copied from the text so far: where its end occurred before, and how often they were accepted. No torch."""

from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from operator import mul
from typing import NamedTuple

from nextn.speculative.copy_choice import CopyRun
from nextn.speculative.draft_policy import ConfidenceCalibration

_KEY = 2  # tokens that two places have in common at least


MAX_MATCH = 32  # tokens before a place that are compared


_MAX_PLACES = 8  # places that are compared, the latest first
# Bins of the match's length: their lower edges, and the acceptance rates at first (bench/copies.py).
_EDGES = (0, 3, 4, 6, 9, 17, 32)
_PRIORS = (0.45, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97)


class CopyMatch(NamedTuple):
    """A place whose preceding tokens are the last ones of the text."""

    start: int  # index of the token that followed
    length: int  # of the common tokens, at most MAX_MATCH


class CopyIndex:
    """The index of one text: a hash chain, as LZ77 compressors have it (deflate, RFC 1951, section 4).

    A token takes one entry of the table and one number; a search takes bounded time.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        """tokens: The text, which the caller extends and never shortens."""
        self._tokens = tokens
        self._latest: dict[tuple[int, ...], int] = {}  # last tokens -> the latest place after them
        self._before = [0] * _KEY  # place -> the one before it after the same tokens; 0: none

    def find(self) -> CopyMatch | None:
        """Return the place with the longest match, the latest of several; None without one of `_KEY` tokens."""
        tokens, end = self._tokens, len(self._tokens)
        for place in range(len(self._before), end):  # the end itself is no place to copy from
            key = tuple(tokens[place - _KEY : place])
            self._before.append(self._latest.get(key, 0))
            self._latest[key] = place
        best, place = None, self._latest.get(tuple(tokens[end - _KEY : end]), 0) if end >= _KEY else 0
        for _ in range(_MAX_PLACES):
            if not place or (best is not None and best.length == MAX_MATCH):
                break
            length = self._common(place)
            if best is None or length > best.length:
                best = CopyMatch(place, length)
            place = self._before[place]
        return best

    def copy(self, match: CopyMatch, count: int) -> list[int]:
        """Return the tokens that followed a match; where the text ends, those copied continue (a repetition)."""
        tokens, period = self._tokens, len(self._tokens) - match.start
        return [tokens[match.start + index % period] for index in range(count)]

    def _common(self, place: int) -> int:
        """Count the equal tokens before a place and before the end."""
        tokens, distance = self._tokens, len(self._tokens) - place
        length, most = _KEY, min(place, MAX_MATCH)
        while length < most and tokens[place - 1 - length] == tokens[place + distance - 1 - length]:
            length += 1
        return length


class CopyDrafts:
    """The copies of one sequence, and their acceptance rates by the length of the match: of no other sequence."""

    def __init__(self, tokens: Sequence[int]) -> None:
        """tokens: All tokens of the sequence, which grow."""
        self._index, self._calibration = CopyIndex(tokens), ConfidenceCalibration(_PRIORS)
        self._match: CopyMatch | None = None

    def run(self, most: int) -> CopyRun:
        """Return what may be copied now, at most `most` tokens."""
        self._match = self._index.find() if most > 0 else None
        if self._match is None:
            return CopyRun()
        rates = self._calibration.table
        reach = accumulate((rates[each] for each in self._bins(most)), mul)
        return CopyRun(tuple(self._index.copy(self._match, most)), tuple(reach))

    def learn(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Learn how many of the copied tokens, of the last run, were accepted."""
        if self._match is not None:
            self._calibration.learn(self._bins(min(num_draft_tokens, num_accepted + 1)), num_accepted)

    def _bins(self, count: int) -> list[int]:
        """The bins of the first tokens: each accepted one makes the match longer."""
        assert self._match is not None
        lengths = range(self._match.length, self._match.length + count)
        return [sum(edge <= length for edge in _EDGES) - 1 for length in lengths]


def copied_rounds(prompt: Sequence[int], new: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return (num_drafted, num_accepted) of the rounds behind the prefill that decode a text by copies alone.

    Every copy that is found is verified, of at most `most` tokens.
    """
    tokens = [*prompt, *new[:1]]
    drafts = CopyDrafts(tokens)
    return replayed_rounds(tokens, new, lambda room: drafts.run(min(most, room)).tokens)


def replayed_rounds(
    tokens: list[int], new: Sequence[int], draft: Callable[[int], Sequence[int]]
) -> list[tuple[int, int]]:
    """Return (num_drafted, num_accepted) of the rounds that decode a text by what `draft` proposes.

    tokens: The prompt and the text's first token; grows by the others, round by round.
    draft: Returns at most so many tokens, to follow `tokens`.
    """
    rounds, place = list[tuple[int, int]](), 1
    while place < len(new):
        run = draft(len(new) - place - 1)
        pairs = zip(run, new[place : place + len(run)], strict=True)
        num_accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        rounds.append((len(run), num_accepted))
        tokens += new[place : place + num_accepted + 1]
        place += num_accepted + 1
    return rounds
