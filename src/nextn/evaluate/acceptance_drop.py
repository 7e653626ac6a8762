"""Compare a measurement of acceptance with an earlier one of the same prompts and settings. Imports no torch.

A drop counts once it is larger than the limit and larger than the noise of both measurements: an interval of 24 texts
is often as wide as a limit of 5 %. The figures are tested together, so intervals are widened (Bonferroni): where
nothing changed, all of them together exceed their noise in at most FALSE_ALARMS of the runs. AL has half of that, as
it decides the speed; the many and noisier a_k share the other half.

Whether training would help is another question: by the rule `argmax`, acceptance also falls if the trunk became less
sure of its tokens, and a perfect head would lose as much.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from nextn.bounded_json import JsonLimits, JsonObject, parse_json
from nextn.errors import ConfigError
from nextn.evaluate.acceptance_curve import length_of
from nextn.stats.intervals import FEW_TEXTS, Estimate, jackknife, student_t
from nextn.text_format import counted

SERVER_RULES = ("greedy", "ratio", "argmax")  # the acceptance rules that servers use
OTHER_TOKENS = (
    "their tokenizers or chat templates differ, and rates of other tokens do not compare. Compare with a checkpoint "
    "that has the same, or leave the templates out (--no-chat)"
)
FALSE_ALARMS = 0.05  # share of comparisons that report a drop although nothing changed, at most
_OTHER_PROMPTS = "Pass the same --prompts, or measure the baseline again"
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
    half_width: float  # of the 95 % interval of `symmetric`
    num_texts: int
    ceiling_before: float  # the figure of a perfect head on the earlier trunk
    ceiling: float  # the figure of a perfect head on the present trunk
    ceiling_error: float = 0.0  # of the ratio of the two, above no accepted draft; half of its 95 % interval, relative
    noise: float = math.inf  # `symmetric` of all figures exceeds theirs by chance in at most FALSE_ALARMS

    @property
    def value(self) -> float:
        """The relative drop; negative if the figure rose."""
        return (self.before - self.now) / self.before

    @property
    def symmetric(self) -> float:
        """The drop relative to the mean of both: chance makes it as often positive as negative, unlike `value`."""
        return _symmetric(self.before, self.now)

    @property
    def change(self) -> Estimate:
        """The relative change with the interval by which it is tested."""
        low, high = (min(2.0, max(-1.999, self.symmetric + sign * self.noise)) for sign in (1, -1))
        return Estimate(0.0 - self.value, (2 - low) / (2 + low) - 1, (2 - high) / (2 + high) - 1)  # not -0.0

    @property
    def improvement(self) -> Estimate:
        """The relative increase by a head that comes as close to the ceiling as the earlier one did to its own."""
        if not self.now:
            return Estimate(math.inf, math.inf, math.inf)
        base = 1.0 if self.figure == "AL" else 0.0  # of no draft accepted
        share = (self.before - base) / (self.ceiling_before - base) if self.ceiling_before > base else 0.0
        reached = min(1.0, share) * (self.ceiling - base)
        error = self.half_width * (self.before + self.now) ** 2 / (4 * self.before * self.now)  # of before / now
        error = math.hypot(error, self.ceiling_error * reached / (base + reached or 1.0))
        ratio, most = (base + reached) / self.now, self.increase_to(self.ceiling)
        return Estimate(*(max(0.0, min(most, ratio * (1 + sign * error) - 1)) for sign in (0, -1, 1)))

    def increase_to(self, value: float) -> float:
        """Return the relative increase from the figure now; infinite where no draft was accepted."""
        return value / self.now - 1 if self.now else math.inf

    def exceeds(self, limit: float) -> bool:
        """Whether the drop is above the limit and not noise."""
        return self.value > limit and self.symmetric > self.noise

    def tested_at(self, error: float) -> "Drop":
        """Return it with the noise that chance exceeds in this share of comparisons, by Student's t over texts."""
        # Rounds of one text are taken as independent; t of many texts is the normal distribution's.
        degrees = self.num_texts - 1 if 1 < self.num_texts < 1000 else math.inf
        return replace(self, noise=self.half_width * student_t(degrees, 2 * error) / student_t(degrees, 0.05))

    def texts_needed(self, limit: float) -> int:
        """Return an estimate of the number of texts that would make the noise as small as the limit."""
        return math.ceil(self.num_texts * max(1.0, self.noise / limit) ** 2)

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
    is_other_head: bool = False  # of the same trunk

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
            drops = _tested([drop for each in found for drop in each])
            is_other_head = _is_other_head(baseline, now)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{source}: not a record of this version's `nextn measure --out` ({error!r})") from error
        if not drops:
            raise ConfigError(
                f"{source}: no figure has an interval in both measurements: measure both with more prompts, so that "
                "more than one text is left"
            )
        return cls(source, limit, drops, tuple(sorted(degenerate)), is_other_head)

    @property
    def fallen(self) -> list[Drop]:
        """The figures that fell by more than the limit and the noise."""
        return [drop for drop in self.drops if drop.exceeds(self.limit)]

    @property
    def outcome(self) -> str:
        """`fell`, `kept`, or `inconclusive`: most texts are degenerate, or too few to show a drop of the limit."""
        if self._is_degenerate or self._has_few_texts:
            return "inconclusive"
        return "fell" if self.fallen else "inconclusive" if self._noise else "kept"

    @property
    def _is_degenerate(self) -> bool:
        return self.drops[0].temperature in self.degenerate

    @property
    def _has_few_texts(self) -> bool:
        """Whether a figure is of so few texts that their spread may be small by chance; the same weights have none."""
        return any(drop.num_texts < FEW_TEXTS and drop.half_width > 0 for drop in self.drops)

    @property
    def _too_few(self) -> str:
        drop = min(self.drops, key=lambda drop: drop.num_texts)
        texts = f"{drop.label} is of {counted(drop.num_texts, 'text')} without repetition"
        return f"{texts}, and {FEW_TEXTS} or more show how texts differ: use more --prompts"

    @property
    def most_trainable(self) -> Drop:
        """The AL that training may raise most: of a rule by which a figure fell, if any did."""
        fell = {_rule(drop) for drop in self.fallen}
        drops = [drop for drop in self.drops if not fell or _rule(drop) in fell]
        return max(_lengths(drops), key=lambda drop: drop.improvement.value)

    @property
    def conclusion(self) -> str:
        """Fell, kept or inconclusive as `outcome` is, the expected improvement, and how many texts would decide."""
        names, limit = ", ".join(drop.label for drop in self.fallen), f"{self.limit:.1%}"
        if self._is_degenerate:
            others = "" if any(self.degenerate) else ", or --temperatures 1"
            fell = f", though {names} fell by more than {limit}" if names else ""
            return (
                f"inconclusive{fell}: most texts are degenerate (repetitive), which any head drafts: use other "
                f"prompts{others}"
            )
        if self._has_few_texts:
            return f"inconclusive: {self._too_few}, and measure a --baseline again with them"
        if self.outcome == "fell":
            # This trunk may be less sure of its tokens, or only deep drafts fell.
            is_trainable = self.most_trainable.improvement.value > self.limit
            choice = "train the head" if is_trainable else f"training would raise AL by no more than {limit}"
            if self.is_other_head:
                other = "the trunk is the same and the head another one"
                choice = f"{other}: put the earlier one back (nextn restore MODEL --from BASE --force), or {choice}"
            return f"acceptance fell by more than {limit}: {names}; {choice}: {self._expectation}"
        choice = "acceptance kept, keep the head" if self.outcome == "kept" else "inconclusive"
        known = "; ".join(filter(None, (self._expectation, self._noise)))
        return f"{choice}: no drop exceeds both {limit} and the noise; by training: {known}"

    @property
    def _expectation(self) -> str:
        """The improvement of AL, or of what has an interval, by every rule."""
        rows = ((drop, drop.improvement, drop.increase_to(drop.ceiling)) for drop in _lengths(self.drops))
        each = (
            f"{drop.label} +{more.value:.1%} ({more.low:.1%} to {more.high:.1%}; a perfect head: {best:.1%})"
            for drop, more, best in rows
        )
        return f"expected {', '.join(each)}"

    @property
    def _noise(self) -> str:
        widest = max(_lengths(self.drops), key=lambda drop: drop.noise)
        if widest.noise <= self.limit:
            return ""
        return (
            f"{widest.num_texts} texts are too few to show a drop of {self.limit:.1%} in AL reliably (interval "
            f"+-{widest.noise:.1%}): about {widest.texts_needed(self.limit)} texts would, of more --prompts"
        )

    def as_record(self) -> dict[str, object]:
        """Return the comparison for JSON reports."""
        figures = [
            asdict(drop)
            | {"drop": drop.value, "expected_improvement": _finite(drop.improvement.value)}
            | {"expected_improvement_95": [_finite(drop.improvement.low), _finite(drop.improvement.high)]}
            | {"fell": drop.exceeds(self.limit)}
            for drop in self.drops
        ]
        record = {"against": self.source, "max_drop": self.limit, "degenerate_temperatures": list(self.degenerate)}
        record |= {"false_alarms": FALSE_ALARMS}
        return record | {"outcome": self.outcome, "conclusion": self.conclusion, "figures": figures}


def baseline_note(record: _Record, limit: float) -> str:
    """Return how many texts a later comparison with this record needs, if it has too few; else "".

    It is an estimate for texts that differ as other prompts' do: a model that writes almost the same ones needs fewer.
    """
    unpaired = {**record, "by_text": {}}
    try:
        expected = AcceptanceChange.of(unpaired, unpaired, source="this record", limit=limit)
    except ConfigError as error:
        return f"as a --baseline, {error}"
    if expected._is_degenerate:
        return ""
    if expected._has_few_texts:
        return f"as a --baseline, it is of too little: {expected._too_few}"
    few = expected._noise
    return few and f"as a --baseline, {few}; fewer if the two models write almost the same texts"


def _rule(drop: Drop) -> tuple[float, str]:
    return drop.temperature, drop.rule


def _lengths(drops: Sequence[Drop]) -> Sequence[Drop]:
    """AL by every rule; of a single text, where it has no interval, what has one."""
    return [drop for drop in drops if drop.figure == "AL"] or drops


def _tested(drops: Sequence[Drop]) -> tuple[Drop, ...]:
    """Give the figures their noise: half of FALSE_ALARMS is shared by AL of all rules, half by all a_k."""
    lengths = [drop.figure == "AL" for drop in drops]
    groups = {is_length: lengths.count(is_length) for is_length in set(lengths)}
    pairs = zip(drops, lengths, strict=True)
    return tuple(drop.tested_at(FALSE_ALARMS / len(groups) / groups[is_length]) for drop, is_length in pairs)


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


def check_number(baseline: _Record, num_prompts: int, *, source: str) -> None:
    """Refuse a baseline of another number of prompts, before anything is measured. Raises ConfigError."""
    before = baseline.get("prompts", {})
    number = before.get("num") if isinstance(before, dict) else None
    if number not in (None, num_prompts):
        raise ConfigError(f"{source}: measured on {number} prompts, not these {num_prompts}. {_OTHER_PROMPTS}")


def _check_prompts(baseline: _Record, now: _Record, source: str) -> None:
    if baseline["hashes"]["prompts"] != now["hashes"]["prompts"]:
        files = [each.get("prompts", {}).get("sha256") for each in (baseline, now)]
        if files[0] == files[1] is not None:
            raise ConfigError(f"{source}: the same prompts are other tokens to the two checkpoints: {OTHER_TOKENS}")
        raise ConfigError(
            f"{source}: measured on other prompts (their hashes differ): rates on different prompts are not "
            f"comparable. {_OTHER_PROMPTS}"
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


def _ceilings(record: _Record) -> dict[float, list[_Interval | None]]:
    """Temperature -> a_1, ..., AL of a perfect head by rule argmax."""
    return {float(key): _intervals(figures) for key, figures in record["perfect_head"].items()}


def _paired(before: _Record, now: _Record, temperature: float, rule: str) -> list[float]:
    """The half-widths of `Drop.symmetric` of a_1, ..., AL over the texts of both; nan where they do not say.

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
        found = jackknife(partial(_drop, index=index, depths=depths), rows)
        least = 0.0 if is_same else 3 / total if total else math.inf
        widths.append(max((found.high - found.low) / 2, least))
    return widths


def _fingerprints(record: _Record) -> tuple[object, object] | None:
    hashes = record["hashes"]
    return (hashes["head"], hashes["trunk"]) if {"head", "trunk"} <= hashes.keys() else None


def _is_other_head(before: _Record, now: _Record) -> bool:
    old, new = _fingerprints(before), _fingerprints(now)
    return old is not None and new is not None and old[0] != new[0] and old[1] == new[1]


def _drop(sums: Sequence[float], *, index: int, depths: int) -> float:
    """`Drop.symmetric` of a_1, ..., AL: drafted and accepted by depth, before and now."""
    before, now = sums[: 2 * depths], sums[2 * depths :]
    old, new = (
        length_of(each) if index == depths else each[depths + index] / each[index] if each[index] else math.nan
        for each in (before, now)
    )
    return _symmetric(old, new)


def _symmetric(before: float, now: float) -> float:
    return 2 * (before - now) / (before + now) if before + now else math.nan


def _drops(
    before: _Record,
    now: _Record,
    old_ceilings: Mapping[float, list[_Interval | None]],
    new_ceilings: Mapping[float, list[_Interval | None]],
    paired: Sequence[float],
) -> Iterator[Drop]:
    num_texts = int(min(_number(each["num_texts"]) for each in (before, now)))
    (temperature, rule), intervals = _key(now), [_intervals(each) for each in (before, now)]
    depths = len(intervals[0]) - 1
    # A perfect head has every draft accepted by the other rules.
    certain: list[_Interval | None] = [*[(1.0,) * 3] * depths, (depths + 1.0,) * 3]
    ceilings = [each[temperature] if rule == "argmax" else certain for each in (old_ceilings, new_ceilings)]
    for index, (old, new) in enumerate(zip(*intervals, strict=True)):
        if old is None or new is None or not old[0]:  # AL of a single text has no interval
            continue
        # The ends of an interval are about as far from the value on both sides; errors of a ratio add in squares.
        relative = [(high - low) / 2 / value if value else 0.0 for value, low, high in (old, new)]
        alone = math.hypot(*relative) * 4 * old[0] * new[0] / (old[0] + new[0]) ** 2
        width = alone if math.isnan(paired[index]) else paired[index]
        figure = f"a_{index + 1}" if index < depths else "AL"
        best = [each[index] or (math.nan,) * 3 for each in ceilings]
        base = 1.0 if figure == "AL" else 0.0
        errors = ((high - low) / 2 / (value - base) if value > base else 0.0 for value, low, high in best)
        error = 0.0 if best[0] == best[1] else math.hypot(*errors)  # of the same texts by the same trunk there is none
        yield Drop(temperature, rule, figure, old[0], new[0], width, num_texts, best[0][0], best[1][0], error)


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
