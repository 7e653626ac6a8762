"""What a round verifies: the head's drafts, or tokens that are copied from the text. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CopyRun:
    """Tokens that may follow, copied from the text so far."""

    tokens: tuple[int, ...] = ()
    reach: tuple[float, ...] = ()  # the probability that this token and all before it are accepted

    def expected(self, count: int) -> float:
        """Return how many of the first `count` tokens are expected to be accepted."""
        return sum(self.reach[:count])


@dataclass(frozen=True)
class RoundValues:
    """What rounds without copies bring, and what those with copies cost: of a batch, in any unit of time."""

    rate: float  # tokens per time of rounds without copies, of all sequences
    # [n] is the time of a round without the head over n drafts per sequence, for 0 and every length to choose from.
    verify: Mapping[int, float]
    # Drafts of the head in a round without copies, a key of `verify`; 0: it does not draft, or not beside copies.
    num_head_tokens: int = 0
    expected: float = 1.0  # tokens of a sequence in such a round


@dataclass(frozen=True)
class CopyChoice:
    """What a round drafts."""

    drafts: tuple[tuple[int, ...], ...] = ()  # of each sequence the copied tokens; none where the head drafts
    uses_head: bool = True  # whether the head drafts for the sequences without copies

    @property
    def num_draft_tokens(self) -> int:
        """The most copied tokens of a sequence."""
        return max(map(len, self.drafts), default=0)


NO_COPIES = CopyChoice()


def choose_copies(runs: Sequence[CopyRun], values: RoundValues) -> CopyChoice:
    """Choose between head and copies, per sequence, and how many tokens to copy: what brings the most tokens beyond
    those that its time brings at `rate`.

    Copies beside the head's drafts are free up to their number; a round without the head takes less time.
    """
    options = [_best(runs, values, uses_head=False)]
    if values.num_head_tokens:
        options.append(_best(runs, values, uses_head=True))
    value, choice = max(options, key=lambda option: option[0])
    return choice if value > 0 else CopyChoice(((),) * len(runs))


def choose_alone(runs: Sequence[CopyRun], values: RoundValues) -> CopyChoice:
    """Choose for each sequence as if it were the only one, so that its drafts do not depend on the others."""
    drafts = tuple(choose_copies([run], values).drafts[0] for run in runs)
    return CopyChoice(drafts, uses_head=not all(drafts))


def _best(runs: Sequence[CopyRun], values: RoundValues, *, uses_head: bool) -> tuple[float, CopyChoice]:
    """Return the best rounds with some copies, and their tokens beyond `rate`."""
    verify, best = values.verify, (0.0, CopyChoice(((),) * len(runs)))
    shortest, others = (values.num_head_tokens, values.expected) if uses_head else (0, 1.0)
    base = 0.0 if uses_head else len(runs) - values.rate * verify[0]
    for length in sorted(each for each in verify if each >= max(1, shortest)):
        extra = [run.expected(length) - (others - 1) for run in runs]
        value = base + sum(each for each in extra if each > 0) - values.rate * (verify[length] - verify[shortest])
        if value > best[0] and max(extra) > 0:
            drafts = tuple(run.tokens[:length] if more > 0 else () for run, more in zip(runs, extra, strict=True))
            best = value, CopyChoice(drafts, uses_head)
    return best
