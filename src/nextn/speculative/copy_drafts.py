"""The copies of one sequence: drafts from its own text so far, and how often they were accepted. Imports no torch."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from nextn.speculative.copy_choice import CopyRun
from nextn.speculative.copy_index import CopyIndex, CopyMatch
from nextn.speculative.draft_policy import ConfidenceCalibration

# Bins of the match's length: their lower edges, and the acceptance rates at first (bench/copies.py).
_EDGES = (0, 3, 4, 6, 9, 17, 32)
_PRIORS = (0.45, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97)


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
