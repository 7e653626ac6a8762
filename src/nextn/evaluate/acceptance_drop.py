"""Compare a measurement of acceptance with an earlier one of the same prompts and settings. Imports no torch.

A drop counts once it is larger than the limit and larger than the noise of both measurements: an interval of 24 texts
is often as wide as a limit of 5 %. Whether training would help is another question: by the rule `argmax`, acceptance
also falls if the trunk became less sure of its tokens, and a perfect head would lose as much.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from nextn.bounded_json import JsonLimits, JsonObject, parse_json
from nextn.errors import ConfigError
from nextn.evaluate.acceptance_curve import length_of
from nextn.stats.intervals import jackknife

SERVER_RULES = ("greedy", "ratio", "argmax")  # the acceptance rules that servers use
OTHER_TOKENS = (
    "their tokenizers or chat templates differ, and rates of other tokens do not compare. Compare with a checkpoint "
    "that has the same, or leave the templates out (--no-chat)"
)
RECORD = "measure.json"  # looked for in a folder
_LIMITS = JsonLimits(16 * 1024 * 1024, 500_000)
_IGNORED = ("backend",)  # settings that do not change what is measured

_Record = JsonObject  # of a file: whatever is not as expected raises, see `AcceptanceChange.of`
_Interval = tuple[float, float, float]  # value, low, high


@dataclass(frozen=True)
class Drop:
    """One figure in both measurements."""

    temperature: float
    rule: str
    figure: str  # a_1, ..., or AL
    before: float
    now: float
    half_width: float  # of the 95 % interval of the relative drop
    num_texts: int
    ceiling_before: float  # the figure of a perfect head on the earlier trunk
    ceiling: float  # the figure of a perfect head on the present trunk

    @property
    def value(self) -> float:
        """The relative drop; negative if the figure rose."""
        return (self.before - self.now) / self.before

    @property
    def improvement(self) -> float:
        """The relative increase by a head that comes as close to the ceiling as the earlier one did to its own."""
        base = 1.0 if self.figure == "AL" else 0.0  # of no draft accepted
        share = (self.before - base) / (self.ceiling_before - base) if self.ceiling_before > base else 0.0
        reached = base + min(1.0, share) * (self.ceiling - base)
        return max(0.0, self.increase_to(reached))

    def increase_to(self, value: float) -> float:
        """Return the relative increase from the figure now; infinite where no draft was accepted."""
        return value / self.now - 1 if self.now else math.inf

    def exceeds(self, limit: float) -> bool:
        """Whether the drop is above the limit and not noise."""
        return self.value > limit and self.value > self.half_width

    def texts_needed(self, limit: float) -> int:
        """Return an estimate of the number of texts that would make the interval as narrow as the limit."""
        return math.ceil(self.num_texts * max(1.0, self.half_width / limit) ** 2)

    @property
    def label(self) -> str:
        """The rule and the figure, as tables and messages show them."""
        return f"{self.rule if self.rule == 'greedy' else f'T={self.temperature:g} {self.rule}'} {self.figure}"


@dataclass(frozen=True)
class AcceptanceChange:
    """All figures that two measurements share."""

    source: str  # the earlier measurement: its file, or the checkpoint
    limit: float  # relative drop that is tolerated
    drops: tuple[Drop, ...]
    degenerate: tuple[float, ...] = ()  # temperatures that are left out: most of their texts repeat themselves

    @classmethod
    def of(cls, baseline: _Record, now: _Record, *, source: str, limit: float) -> "AcceptanceChange":
        """Compare every figure of the largest K, over all texts, of the rules that servers use.

        Raises ConfigError if the two are of other prompts or settings, or the baseline is not a valid record.
        """
        baseline, now = (json.loads(json.dumps(record)) for record in (baseline, now))  # tuples become lists
        check_settings(baseline, now["settings"], source=source)
        try:
            _check_prompts(baseline, now, source)
            degenerate = _degenerate(baseline) | _degenerate(now)
            earlier = {_key(each): each for each in _figures(baseline)}
            pairs = [(earlier[_key(each)], each) for each in _figures(now) if _key(each) in earlier]
            # If texts repeat themselves at all temperatures, the figures are shown without a conclusion.
            pairs = [pair for pair in pairs if _key(pair[1])[0] not in degenerate] or pairs
            ceilings = _ceilings(baseline), _ceilings(now)
            found = (_drops(*pair, *ceilings, _paired(baseline, now, *_key(pair[1]))) for pair in pairs)
            drops = tuple(drop for each in found for drop in each)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{source}: not a record of this version's `nextn measure --out` ({error!r})") from error
        if not drops:
            raise ConfigError(
                f"{source}: no figure has an interval in both measurements: measure both with more prompts, so that "
                "more than one text is left"
            )
        return cls(source, limit, drops, tuple(sorted(degenerate)))

    @property
    def fallen(self) -> list[Drop]:
        """The figures that fell by more than the limit and the noise."""
        return [drop for drop in self.drops if drop.exceeds(self.limit)]

    @property
    def outcome(self) -> str:
        """`fell`, `kept`, or `inconclusive`: most texts are degenerate, or too few to show a drop of the limit."""
        if self._is_degenerate:
            return "inconclusive"
        return "fell" if self.fallen else "inconclusive" if self._noise else "kept"

    @property
    def _is_degenerate(self) -> bool:
        return self.drops[0].temperature in self.degenerate

    @property
    def most_trainable(self) -> Drop:
        """The AL that training may raise most: of a rule by which a figure fell, if any did."""
        fell = {_rule(drop) for drop in self.fallen}
        drops = [drop for drop in self.drops if not fell or _rule(drop) in fell]
        return max([drop for drop in drops if drop.figure == "AL"] or drops, key=lambda drop: drop.improvement)

    @property
    def conclusion(self) -> str:
        """Keep, train or inconclusive, the expected improvement, and how many texts would show a drop of the limit."""
        names = ", ".join(drop.label for drop in self.fallen)
        if self._is_degenerate:
            others = "" if any(self.degenerate) else ", or --temperatures 1"
            fell = f", though {names} fell by more than {self.limit:.1%}" if names else ""
            return (
                f"inconclusive{fell}: most texts are degenerate (repetitive), which any head drafts: use other "
                f"prompts{others}"
            )
        best = self.most_trainable
        perfect = f"{best.label}; a perfect head: {best.increase_to(best.ceiling):.1%}"
        expected = f"expected improvement {best.improvement:.1%} ({perfect})"
        if not names:
            known = "keep the head" if self.outcome == "kept" else "inconclusive"
            choice = f"{known}: no figure fell by more than {self.limit:.1%} beyond its interval; training: {expected}"
        elif best.improvement <= self.limit:  # this trunk is less sure of its tokens, or only deep drafts fell
            choice = (
                f"keep the head, though {names} fell by more than {self.limit:.1%}: training would raise "
                f"{best.figure} by less; {expected}"
            )
        else:
            choice = f"train the head: {names} fell by more than {self.limit:.1%}; {expected}"
        return choice if names else f"{choice}{self._noise}"

    @property
    def _noise(self) -> str:
        lengths = [drop for drop in self.drops if drop.figure == "AL"] or self.drops
        widest = max(lengths, key=lambda drop: drop.half_width)
        if widest.half_width <= self.limit:
            return ""
        return (
            f"; {widest.num_texts} texts are too few to show a drop of {self.limit:.1%} in AL reliably (95 % interval "
            f"+-{widest.half_width:.1%}): about {widest.texts_needed(self.limit)} texts would, of more --prompts"
        )

    def as_record(self) -> dict[str, object]:
        """Return the comparison for JSON reports."""
        figures = [
            asdict(drop)
            | {"drop": drop.value, "expected_improvement": _finite(drop.improvement), "fell": drop.exceeds(self.limit)}
            for drop in self.drops
        ]
        record = {"against": self.source, "max_drop": self.limit, "degenerate_temperatures": list(self.degenerate)}
        return record | {"outcome": self.outcome, "conclusion": self.conclusion, "figures": figures}


def _rule(drop: Drop) -> tuple[float, str]:
    return drop.temperature, drop.rule


def read_record(path: Path) -> _Record:
    """Read what `nextn measure --out` wrote: the file, or a folder with measure.json. Raises ConfigError otherwise."""
    file = path / RECORD if path.is_dir() else path
    try:
        _LIMITS.check_size(file.stat().st_size)
        record = parse_json(file.read_bytes(), _LIMITS)
    except OSError as error:
        compare = f"; to compare with a checkpoint: --against {path}" if (path / "config.json").exists() else ""
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}{compare}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error}); give what `nextn measure --out FILE` wrote") from error
    if not isinstance(record, dict) or not {"figures", "hashes", "settings"} <= record.keys():
        raise ConfigError(f"{file}: not a record of `nextn measure --out`: figures, hashes or settings are missing")
    return record


def check_settings(baseline: _Record, settings: Mapping[str, object], *, source: str) -> None:
    """Refuse a baseline that was measured with other settings than these. Raises ConfigError."""
    before, now = baseline["settings"], json.loads(json.dumps(settings))
    if not isinstance(before, dict):
        raise ConfigError(f"{source}: not a record of `nextn measure --out`: settings are {before!r:.40}")
    other = [name for name, value in now.items() if name not in _IGNORED and before.get(name) != value]
    if other:
        stated = "; ".join(f"{name} {before.get(name)} against {now[name]}" for name in other)
        raise ConfigError(f"{source}: measured with other settings: {stated}. Pass the same, or measure it again")


def _check_prompts(baseline: _Record, now: _Record, source: str) -> None:
    if baseline["hashes"]["prompts"] != now["hashes"]["prompts"]:
        files = [each.get("prompts", {}).get("sha256") for each in (baseline, now)]
        if files[0] == files[1] is not None:
            raise ConfigError(f"{source}: the same prompts are other tokens to the two checkpoints: {OTHER_TOKENS}")
        raise ConfigError(
            f"{source}: measured on other prompts (their hashes differ): rates on different prompts are not "
            "comparable. Pass the same --prompts, or measure the baseline again"
        )


def _figures(record: _Record) -> list[_Record]:
    k = record["settings"]["num_speculative_tokens"]
    return [
        each for each in record["figures"]
        if each["domain"] == "all" and each["rule"] in SERVER_RULES and each["num_speculative_tokens"] == k
    ]  # fmt: skip


def _key(figures: _Record) -> tuple[float, str]:
    return _number(figures["temperature"]), str(figures["rule"])


def _finite(value: float) -> float | None:
    """JSON has no infinity, which is any head beside one whose drafts are never accepted."""
    return value if math.isfinite(value) else None


def _degenerate(record: _Record) -> set[float]:
    """The temperatures at which most texts repeat themselves, which are easy to draft and so say little."""
    texts = ((float(key), counts) for key, counts in record["texts"].items())
    return {key for key, counts in texts if 2 * len(counts["repetitive"]) > _number(counts["num"])}


def _ceilings(record: _Record) -> dict[float, list[float]]:
    """Temperature -> a_1, ..., AL of a perfect head by rule argmax."""
    ceilings = {}
    for key, figures in record["perfect_head"].items():
        length = figures["mean_acceptance_length"]["value"]
        ceilings[float(key)] = [*map(_number, figures["acceptance"]), _number(length)]
    return ceilings


def _paired(before: _Record, now: _Record, temperature: float, rule: str) -> list[float]:
    """The half-widths of the drops of a_1, ..., AL over the texts of both records; nan where they do not say.

    A text of one measurement is compared with that of the same prompt in the other, so how texts differ from each other
    is no noise. Where few drafts changed, they may have changed by chance in no text: then at most 3 in all did (95 %).
    """
    depths = int(_number(now["settings"]["num_speculative_tokens"]))
    texts = [each.get("by_text", {}).get(f"{temperature:g}", {}).get(rule, {})
             for each in (before, now)]  # fmt: skip
    rows = [
        [_number(count) for each in texts for counts in each[index] for count in counts]
        for index in sorted(texts[0].keys() & texts[1].keys())
    ]
    if len(rows) < 2 or {len(row) for row in rows} != {4 * depths}:
        return [math.nan] * (depths + 1)
    is_same = _fingerprints(before) == _fingerprints(now) is not None
    old, new = ([sum(row[start + depth] for row in rows) for depth in range(depths)] for start in (depths, 3 * depths))
    # A head that lost all accepted drafts is measured by those that it had.
    totals = [*(b or a for a, b in zip(old, new, strict=True)), sum(new) + sum(row[2 * depths] for row in rows)]
    widths = []
    for index, total in enumerate(totals):
        found = jackknife(partial(_relative_drop, index=index, depths=depths), rows)
        least = 0.0 if is_same else 3 / total if total else math.inf
        widths.append(max((found.high - found.low) / 2, least))
    return widths


def _fingerprints(record: _Record) -> tuple[object, object] | None:
    hashes = record["hashes"]
    return (hashes["head"], hashes["trunk"]) if {"head", "trunk"} <= hashes.keys() else None


def _relative_drop(sums: Sequence[float], *, index: int, depths: int) -> float:
    """The relative drop of a_1, ..., AL: drafted and accepted by depth, before and now."""
    before, now = sums[: 2 * depths], sums[2 * depths :]
    old, new = (
        length_of(each) if index == depths else each[depths + index] / each[index] if each[index] else math.nan
        for each in (before, now)
    )
    return 1 - new / old if old else math.nan


def _drops(
    before: _Record,
    now: _Record,
    old_ceilings: Mapping[float, list[float]],
    new_ceilings: Mapping[float, list[float]],
    paired: Sequence[float],
) -> Iterator[Drop]:
    num_texts = int(min(_number(each["num_texts"]) for each in (before, now)))
    (temperature, rule), intervals = _key(now), [_intervals(each) for each in (before, now)]
    depths = len(intervals[0]) - 1
    certain = [1.0] * depths + [depths + 1.0]  # a perfect head has every draft accepted by the other rules
    ceilings = [each[temperature] if rule == "argmax" else certain for each in (old_ceilings, new_ceilings)]
    for index, (old, new) in enumerate(zip(*intervals, strict=True)):
        if old is None or new is None or not old[0]:  # AL of a single text has no interval
            continue
        # The ends of an interval are about as far from the value on both sides; errors of a ratio add in squares.
        relative = [(high - low) / 2 / value if value else 0.0 for value, low, high in (old, new)]
        width = math.hypot(*relative) * new[0] / old[0] if math.isnan(paired[index]) else paired[index]
        figure = f"a_{index + 1}" if index < depths else "AL"
        yield Drop(temperature, rule, figure, old[0], new[0], width, num_texts, *(each[index] for each in ceilings))


def _intervals(figures: _Record) -> list[_Interval | None]:
    """The intervals of a_1..a_K and of AL; None where there is none."""
    rates = zip(figures["acceptance"], figures["interval_95"], strict=True)
    length = figures["mean_acceptance_length"]
    rows = [[value, *bounds] for value, bounds in rates] + [[length[name] for name in ("value", "low", "high")]]
    return [None if None in row else _interval(row) for row in rows]


def _interval(row: Sequence[object]) -> _Interval:
    value, low, high = map(_number, row)
    return value, low, high


def _number(value: object) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{value!r:.40} is not a number")
    return float(value)
