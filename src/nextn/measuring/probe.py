"""Which conventions a head's weights want: other readings, one and two at a time, scored on the same sampled texts.

A reading's score is how many drafts stand per column, summed over depths, by rule `ratio`: at temperature 1 it is
highest where the head's law is the trunk's, so that no reading gains by being surer than it should. Comparisons are
paired by text; an interval is that of all comparisons together (Bonferroni; one half of the error is the single
changes', one the pairs'), as the best of a hundred readings is better than most by chance alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from torch import Tensor

from nextn.drafting import Contract
from nextn.errors import ConfigError
from nextn.families import Stage
from nextn.figures.estimate import Estimate, difference
from nextn.measuring.columns import Scored, Text, scored, states
from nextn.measuring.variants import Variant, read_as, variants
from nextn.model import Model
from nextn.trunk import Hidden

# Pairs are tried on the first texts; so many of the best on all of them.
_FIRST, _BEST = 4, 12
# Drafts per column: below the one no reading can be called right; by less than the other none is worth naming.
_NONE, _WORTH = 0.1, 0.02

DEFINITIONS = {
    "per_column": "drafts that stand per column, depths 1..K together, every column of the texts alike; drawn from the "
    "head and judged one by one (rule ratio)",
    "acceptance": "a_1..a_K over all columns alike, conditional on the shallower depths, by the same rule",
    "gain": "per_column less the family's reading's, paired by text; its interval is of all comparisons together",
    "wanted": "the reading with the fewest changes that the best one does not beat: beyond that interval and by "
    f"{_WORTH} or more; [] = the family's",
    "ties": "readings with as many changes that cannot be told from it",
}


@dataclass(frozen=True)
class Tried:
    """One reading. keys: of its variants; none: the family's. stood [texts]: drafts that stood; columns [texts].
    breadth: how much it changes, to choose among equals."""

    keys: tuple[str, ...]
    says: str
    rates: tuple[float, ...]
    stood: tuple[float, ...] = field(repr=False)
    columns: tuple[int, ...] = field(repr=False)
    breadth: int = 0

    @property
    def per_column(self) -> float:
        return sum(self.stood) / sum(self.columns)


@dataclass(frozen=True)
class Probed:
    """base: the family's reading. tried: all others, best first. partial: pairs that the first texts ruled out."""

    base: Tried
    tried: tuple[Tried, ...]
    partial: int

    def over(self, one: Tried, other: Tried) -> Estimate:
        """How much better one is than the other; of all that are compared, 5 in 100 probes miss one."""
        changes = max(1, len(one.keys), len(other.keys))
        count = sum(len(each.keys) == changes for each in self.tried) + (self.partial if changes == 2 else 0)
        return difference(one.stood, other.stood, one.columns, error=0.025 / max(1, count))

    def beats(self, one: Tried, other: Tried) -> bool:
        """Whether one is better beyond chance, and by what is worth naming."""
        gain = self.over(one, other)
        return gain.low > 0 and gain.value >= _WORTH

    @property
    def wanted(self) -> Tried:
        """The reading with the fewest changes that the best one does not beat; of those, one that changes less."""
        best = max([self.base, *self.tried], key=lambda each: each.per_column)
        equals = [each for each in (self.base, *self.tried) if not self.beats(best, each)]
        return min(equals, key=lambda each: (len(each.keys), each.breadth, -each.per_column))

    @property
    def ties(self) -> tuple[Tried, ...]:
        """What cannot be told from the wanted reading: with as many changes; with one, if it is the family's."""
        wanted = self.wanted
        like = [each for each in self.tried if each != wanted and len(each.keys) == max(1, len(wanted.keys))]
        return tuple(each for each in like if not self.beats(wanted, each))

    @property
    def agrees(self) -> bool:
        """Whether the weights want what the family's row says, or nothing that was tried."""
        return not self.wanted.keys

    @property
    def works(self) -> bool:
        """Whether any reading gives acceptance at all."""
        return self.wanted.per_column >= _NONE

    @property
    def words(self) -> str:
        """The verdict, in a sentence."""
        wanted, base = self.wanted, self.base
        if not self.works:
            return (
                f"no reading works ({wanted.per_column:.2f} drafts per column at best): this is no convention; the "
                "weights are untrained, damaged, or of another trunk"
            )
        if self.agrees:
            return f"the family's reading is the best: {base.per_column:.2f} drafts stand per column"
        gain = self.over(wanted, base)
        return (
            f"the weights want {wanted.says}: {wanted.per_column:.2f} drafts stand per column, {base.per_column:.2f} "
            f"as the family's row reads them ({gain.value:+.2f}, at least {gain.low:+.2f})"
        )

    def as_record(self) -> dict[str, object]:
        """What goes into JSON; nan becomes null."""
        return {
            "definitions": DEFINITIONS,
            "verdict": self.words,
            "agrees": self.agrees,
            "wanted": list(self.wanted.keys),
            "ties": [list(each.keys) for each in self.ties],
            "comparisons": len(self.tried) + self.partial,
            "readings": [self._told(each) for each in (self.base, *self.tried)],
        }

    def _told(self, each: Tried) -> dict[str, object]:
        return {
            "keys": list(each.keys),
            "says": each.says,
            "per_column": each.per_column,
            "acceptance": [None if math.isnan(rate) else rate for rate in each.rates],
            "gain": self.over(each, self.base).as_record(),
        }


def probe(
    model: Model,
    texts: Sequence[Text],
    depths: int,
    *,
    contract: Contract | None = None,
    copies: Mapping[str, Tensor] | None = None,
    pairs: bool = True,
    on_tried: Callable[[], None] = lambda: None,
) -> Probed:
    """Try the readings of `variants` alone and two at a time on sampled texts, `depths` deep.

    contract: what decoding does now. copies: see `variants`. pairs: False = one at a time alone. on_tried: called for
    each reading. Raises ConfigError for greedy texts, or too few tokens.
    """
    if not all(text.temperature for text in texts) or not any(text.rooms for text in texts):
        raise ConfigError("readings are compared on sampled texts with three new tokens or more; there are none")
    trial = _Trial(model, contract or Contract(), [text for text in texts if text.rooms], depths, on_tried)
    singles = variants(model, trial.contract, copies=copies)
    both = [pair for pair in combinations(singles, 2) if _differ(*pair)] if pairs else []
    base, tried = trial.of(()), [trial.of((each,)) for each in singles]
    first = [(trial.of(pair, count=_FIRST).per_column, pair) for pair in both]
    first.sort(key=lambda each: -each[0])
    tried += [trial.of(pair) for _, pair in first[:_BEST]]
    return Probed(base, tuple(sorted(tried, key=lambda each: -each.per_column)), max(0, len(first) - _BEST))


def readable(texts: Sequence[Text], *, tokens: int = 48) -> list[Text]:
    """The first new tokens of each text, so that a hundred readings take no longer than they must."""
    return [replace(text, new=text.new[:tokens], ended=text.ended and len(text.new) <= tokens) for text in texts]


def _differ(one: Variant, other: Variant) -> bool:
    """Whether the two can apply together: not two values of one thing, nor a part and the whole."""
    first, second = one.axis, other.axis
    return first != second and not first.startswith(f"{second}:") and not second.startswith(f"{first}:")


class _Trial:
    """Texts and the trunk's states over them, by stage: made once for all readings."""

    def __init__(
        self, model: Model, contract: Contract, texts: Sequence[Text], depths: int, on_tried: Callable[[], None]
    ) -> None:
        self.model, self.contract, self.texts, self.depths, self.on_tried = model, contract, texts, depths, on_tried
        self._states: dict[Stage, list[Hidden]] = {}

    def of(self, changes: tuple[Variant, ...], *, count: int | None = None) -> Tried:
        """The reading with these changes, on the first `count` texts or all."""
        model, contract = read_as(self.model, self.contract, changes)
        stage = model.trunk.stage
        if stage not in self._states:
            self._states[stage] = states(model.trunk, self.texts)
        texts, hiddens = self.texts[:count], self._states[stage][:count]
        found = list(scored(model, texts, hiddens, self.depths, contract=contract))
        self.on_tried()
        chances = [each.survivals["ratio"] for each in found]
        stood = tuple(float(each.expected.sum()) for each in chances)
        rates = tuple(_rate(found, depth) for depth in range(1, self.depths + 1))
        says = " and ".join(each.says for each in changes) or "the family's reading"
        keys, breadth = tuple(each.key for each in changes), sum(each.breadth for each in changes)
        return Tried(keys, says, rates, stood, tuple(len(each.rooms) for each in found), breadth)


def _rate(found: Sequence[Scored], depth: int) -> float:
    """a_k over all columns with room for it; nan where none was offered."""
    offered = stood = 0.0
    for each in found:
        chance, count = each.survivals["ratio"], max(0, len(each.rooms) - depth + 1)
        offered += float(chance.given[:count, depth - 1].sum())
        stood += float(chance.expected[:count, depth - 1].sum())
    return stood / offered if offered else math.nan
