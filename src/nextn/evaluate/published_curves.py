"""Acceptance that others published, beside a measured curve: AL and rates of the data file, and AL of a file in
InferenceX's form (golden_al_distribution) or AIPerf's (the matrix of `aiperf speed-bench-report`). Imports no torch.

They are no target: prompts, sampling, precision and engine move AL, and two runs of one model differ by 0.1 to 0.3 at
K >= 7. So the conditions that differ are named, and those that are not stated.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import accumulate, takewhile
from math import isnan
from operator import mul
from pathlib import Path

from nextn.bounded_json import JsonObject
from nextn.engines.counters import MAX_POSITIONS
from nextn.engines.csv_formats import MATRIX_FORMAT, is_matrix, read_matrix
from nextn.errors import ConfigError
from nextn.family_table import by_name
from nextn.text_format import some

ENGINE = "nextn, teacher-forced"  # of what is measured here
FORMS = f"a record of `nextn measure --out`, InferenceX's YAML or {MATRIX_FORMAT}"
# Words after a model's name by which it is another, smaller or larger one.
_OTHER_SIZE = r"(?![^a-z0-9]*(?:air|flash|lite|max|mini|nano|pro|small|\d+(?:\.\d+)?[bmt])(?![a-z]))"
# What follows a model's folder in a path: a snapshot in the hub's cache, or a file.
_INSIDE = re.compile(r"(?:/snapshots/[^/]+)?(?:/[^/]+\.safetensors)?/*$")
_FILE = Path(__file__).with_name("published_curves.jsonl")
_MAX_SIZE = 1024 * 1024  # bytes of a file: InferenceX's have 2 KiB
_MODES: dict[str | None, bool] = {"thinking_on": True, "thinking_off": False}
# Condition -> how the comments of InferenceX's files state it.
_STATED = {
    "temperature": r"\btemp(?:erature)?[ :=]+([0-9]{1,3}(?:\.[0-9]{1,9})?)",
    "top_p": r"\btop_p[ :=]+([0-9]{1,3}(?:\.[0-9]{1,9})?)",
    "top_k": r"\btop_k[ :=]+([0-9]{1,9})",
    "max_tokens": r"\boutput(?:_len|[ ]length)[ :=]+([0-9]{1,9})",
    "prompts": r"\bdataset: ([^|]+)",
    "precision": r"\bprecision: ([^|]+)",
    "engine": r"\bMeasured on [^(]+\(([^)]+)\)",
    "draft": r"\((?:native )?(MTP|DSpark|EAGLE-?3) level\)",
}


@dataclass(frozen=True)
class PublishedCurve:
    """AL of one model in one mode by K or category, with or without rates; conditions that are not stated are None."""

    model: str
    lengths: Mapping[str, float]  # by K, such as "3", or by category: then K is not known
    source: str
    rates: tuple[float, ...] = ()  # a_1, a_2, ...: each of the rounds that accepted all before, at K = their number
    size: tuple[int, int] | None = None  # hidden size and decoder layers of the model
    family: str | None = None  # of `nextn.family_table`; None for a model whose drafts are of no MTP head
    draft: str | None = None  # MTP, or another kind of drafter
    precision: str | None = None  # of the checkpoint
    thinking: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    prompts: str | None = None
    max_tokens: int | None = None
    engine: str | None = None
    run: str | None = None
    retrieved: str | None = None

    @classmethod
    def of_record(cls, record: JsonObject) -> "PublishedCurve":
        """Return the curve of a line of the data file; AL that is not stated follows from the rates, at their K."""
        rates, size = (tuple(record.get(name) or ()) for name in ("rates", "size"))
        lengths = {str(len(rates)): round(1 + sum(accumulate(rates, mul)), 3)} if rates else {}
        return cls(**{"lengths": lengths, **record, "rates": rates, "size": size or None})

    def is_of(self, *names: str) -> bool:
        """Return whether one of a checkpoint's names or paths is this model's, in any precision."""
        letters = "[^a-z0-9]*".join(re.findall("[a-z0-9]", self.model.lower()))
        pattern = re.compile(rf"(?<![a-z0-9]){letters}(?![0-9]|\.[0-9]){_OTHER_SIZE}")
        return any(pattern.search(_last(name)) for name in names)

    def shared(self, measured: Collection[str]) -> list[str]:
        """Return the K and categories that were measured, too."""
        return [key for key in self.lengths if key in measured]

    def figures(self, measured: "MeasuredCurve") -> str:
        """Return the published AL and rates beside the measured; "" where there is no pair of both."""
        lengths = ", ".join(
            f"{measured.lengths[key]:.2f} {f'at K = {key}' if key.isdecimal() else f'on {key}'} "
            f"(published {self.lengths[key]:.2f})"
            for key in self.shared(measured.lengths)
            if not isnan(measured.lengths[key])
        )
        both = zip(measured.rates_at(len(self.rates)), self.rates, strict=False)
        pairs = list(takewhile(lambda pair: not isnan(pair[0]), both))
        here = ", ".join(f"a_{k} {rate:.2f}" for k, (rate, _) in enumerate(pairs, 1))
        rates = f"{here} (published {', '.join(f'{rate:.2f}' for _, rate in pairs)})" if pairs else ""
        return "; ".join(part for part in (lengths and f"AL {lengths}", rates) if part)

    def text(self, measured: "MeasuredCurve") -> str:
        """Return one line: the figures, and what differs."""
        differences = "; ".join(self.differences(measured)) or "nothing"
        return f"{measured.name}: {self.figures(measured)}; {self.model}, {self.source}; differs: {differences}"

    def differences(self, measured: "MeasuredCurve") -> list[str]:
        """Return the conditions that are not alike, or not known to be, published against measured."""
        mode = {True: "on", False: "off", None: None}
        pairs = [
            ("model", self.model, self.model if self.is_of(measured.source) else measured.source),
            ("draft", self.draft, "MTP"),
            ("precision", self.precision, measured.precision),
            ("thinking", mode[self.thinking], mode[measured.thinking] or "the template's default"),
            ("temperature", _shown(self.temperature), f"{measured.temperature:g}"),
            ("top_p", _shown(self.top_p), "1"),
            ("top_k", _shown(self.top_k), "0"),
            ("prompts", self.prompts, measured.prompts),
            ("max_tokens", _shown(self.max_tokens), str(measured.max_tokens)),
            ("engine", self.engine, measured.engine),
        ]
        if self.rates:
            pairs.append(("K", str(len(self.rates)), str(min(len(self.rates), measured.num_speculative_tokens))))
        elif not any(key.isdecimal() for key in self.lengths):
            pairs.append(("K", None, str(measured.num_speculative_tokens)))
        return [
            f"{name} {ours or 'not stated'} (here {theirs or 'not known'})"
            for name, ours, theirs in pairs
            if ours != theirs
        ]

    def as_record(self, measured: "MeasuredCurve") -> dict[str, object]:
        """Return the curve and the differences for JSON reports."""
        return asdict(self) | {"measured_as": measured.name, "differences": self.differences(measured)}


@dataclass(frozen=True)
class MeasuredCurve:
    """Measured AL by K, and by category at the largest K, and the conditions."""

    name: str  # rule and temperature, as tables show them
    lengths: Mapping[str, float]
    source: str  # the checkpoint
    precision: str | None
    thinking: bool | None
    temperature: float
    prompts: str
    max_tokens: int
    num_speculative_tokens: int
    engine: str = ENGINE
    rates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by K

    def rates_at(self, num_depths: int) -> tuple[float, ...]:
        """Return the rates at this K, or at the largest that was measured, if that is smaller."""
        return self.rates.get(str(min(num_depths, self.num_speculative_tokens)), ())


@cache
def published_curves() -> tuple[PublishedCurve, ...]:
    """Return all curves of the data file."""
    lines = _FILE.read_text(encoding="utf-8").splitlines()
    return tuple(PublishedCurve.of_record(json.loads(line)) for line in lines)


def curves_of(names: Sequence[str], family: str, size: tuple[int, int] | None = None) -> list[PublishedCurve]:
    """Return the curves of the data file that are of the checkpoint's model, or of one that it may be made from.

    names: The checkpoint's, and that of the model that its files name as its base.
    family, size: A model with both may be the base of a checkpoint whose names are of no released model.
    """
    if size is not None and _is_released(names, family):
        size = None
    return [
        curve
        for curve in published_curves()
        if curve.is_of(*names) or (size is not None and (curve.family, curve.size) == (family, size))
    ]


def _last(name: str) -> str:
    """Return the name of a hub id, or of a path's folder, in lower case."""
    return _INSIDE.sub("", name).rpartition("/")[2].lower()


def _is_released(names: Sequence[str], family: str) -> bool:
    """Return whether a name has that of a series of models, with a version or size: Qwen3.5, DeepSeek-R1."""
    models = [*(curve.model for curve in published_curves()), *by_name(family).models]
    series = "|".join({match[0] for model in models if (match := re.match("[a-z]+", model.lower()))})
    pattern = re.compile(rf"(?<![a-z])(?:{series})(?:[^a-z0-9]*[a-z]+)?[^a-z0-9]*v?[0-9]")
    return any(pattern.search(_last(name)) for name in names)


def fitting_curve(
    curves: Sequence[PublishedCurve], names: Sequence[str], measured: MeasuredCurve
) -> PublishedCurve | None:
    """Return the curve that fits best: of this model, of an MTP head, then by mode, precision and temperature.

    names: See `curves_of`. None if no curve has a K or a category that was measured, or rates: a_1 is measured at every
    K.
    """

    def fit(curve: PublishedCurve) -> tuple[object, ...]:
        is_exact = curve.is_of(*names)
        return (
            is_exact,
            len(curve.model) if is_exact else 0,  # the longest name: a later version's contains the earlier one's
            curve.draft == "MTP",
            curve.thinking == (measured.thinking is not False),  # published templates think by default
            measured.precision is not None and curve.precision == measured.precision,
            -1.0 if curve.temperature is None else -abs(curve.temperature - measured.temperature),
            len(curve.shared(measured.lengths)),
        )

    return max((curve for curve in curves if curve.rates or curve.shared(measured.lengths)), key=fit, default=None)


def read_curves(path: Path) -> tuple[PublishedCurve, ...]:
    """Read InferenceX's YAML or AIPerf's matrix; nothing for a folder, or a file that is JSON or cannot be read.

    Raises ConfigError for a file in none of these forms.
    """
    try:
        text = path.read_bytes()[: _MAX_SIZE + 1].decode("utf-8-sig", "replace")
    except OSError:
        return ()
    if text.lstrip()[:1] in ("{", "["):
        return ()
    if len(text) > _MAX_SIZE:
        raise ConfigError(f"{path}: larger than {_MAX_SIZE // 2**20} MiB; expected {FORMS}")
    if is_matrix(text):
        return tuple(
            PublishedCurve(model, lengths, str(path), engine="an engine under AIPerf")
            for model, lengths in read_matrix(text, str(path)).items()
        )
    try:
        curves = tuple(_inferencex(text, str(path)))
    except ValueError as error:
        raise ConfigError(f"{path}: expected {FORMS}; as YAML: {error}") from error
    if not curves:
        raise ConfigError(f"{path}: no acceptance length in it; expected {FORMS}")
    return curves


def check_shared(curves: Sequence[PublishedCurve], num_speculative_tokens: int, categories: Sequence[str]) -> None:
    """Raise ConfigError where no curve has a K up to this one, or one of these categories of prompts."""
    ks = {str(k) for k in range(1, num_speculative_tokens + 1)}
    if any(curve.shared({*ks, *categories}) for curve in curves):
        return
    keys = list(dict.fromkeys(key for curve in curves for key in curve.lengths))
    smallest = min((int(key) for key in keys if key.isdecimal()), default=0)
    if smallest:
        raise ConfigError(f"{curves[0].source} begins at K = {smallest}; raise -k from {num_speculative_tokens}")
    given = some([*dict.fromkeys(categories)])
    raise ConfigError(
        f"{curves[0].source} is of the categories {some(keys)}; the prompts are of {given}: "
        "give --prompts of one of its categories, such as those of SPEED-Bench"
    )


def _inferencex(text: str, source: str) -> Iterator[PublishedCurve]:
    """The modes of each model, with the conditions that the comments state. Raises ValueError for another form."""
    from yaml import YAMLError, safe_load  # type: ignore[import-untyped]

    try:
        document = safe_load(text)
    except (YAMLError, RecursionError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())[:200]) from error
    if not isinstance(document, Mapping):
        raise ValueError(f"a {type(document).__name__}; expected models with AL by K")
    comments = [line[1:].strip() for line in text.splitlines() if line.startswith("#")]
    for model, block in document.items():
        modes = block if isinstance(block, Mapping) and block.keys() & _MODES.keys() else {None: block}
        for mode, lengths in modes.items():
            name = f"{model}{'' if mode is None else f', {mode}'}"
            if found := dict(_lengths(lengths, name[:80])):
                thinking = _MODES.get(mode)
                yield PublishedCurve(str(model), found, source, thinking=thinking, **_conditions(comments, mode))  # type: ignore[arg-type]


def _lengths(block: object, name: str) -> Iterator[tuple[str, float]]:
    """AL by K, as a mapping or, in older files, a list of such; those that were not measured (N/A) are left out."""
    parts = [part for part in (block if isinstance(block, list) else [block]) if isinstance(part, Mapping)]
    if not parts or (isinstance(block, list) and len(parts) < len(block)):
        raise ValueError(f"{name} is a {type(block).__name__}; expected AL by K, such as 3: 2.51")
    for k, length in (item for part in parts for item in part.items()):
        if length == "N/A":
            continue
        if type(k) is not int or not 1 <= k <= MAX_POSITIONS:
            raise ValueError(f"{name}: K is {_brief(k)}; expected a whole number from 1 to {MAX_POSITIONS}")
        if type(length) not in (int, float) or not 1 <= length <= k + 1:
            raise ValueError(f"{name}: AL is {_brief(length)} at K = {k}; expected a number from 1 to {k + 1}")
        yield str(k), float(length)


def _conditions(comments: Sequence[str], mode: str | None) -> dict[str, object]:
    """What the comments state for all modes, or for this one."""
    others = [name for name in _MODES if name and name != mode]
    lines = [line for line in comments if not line.startswith(tuple(others))]
    found: dict[str, object] = {}
    for name, pattern in _STATED.items():
        values = (match[1].strip() for line in lines if (match := re.search(pattern, line)))
        if value := next(values, None):
            found[name] = value
    for name, kind in (("temperature", float), ("top_p", float), ("top_k", int), ("max_tokens", int)):
        if name in found:
            found[name] = kind(str(found[name]))
    return found


def _brief(value: object) -> str:
    return f"{value!r:.40}" if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _shown(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"
