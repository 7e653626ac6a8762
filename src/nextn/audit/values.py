"""Value rules: right names and shapes, wrong numbers. Norm gains whole, windows of matrices; no matrix is read whole.

What quantised integers hold is not judged here: `precision` looks at their dtypes.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np

from nextn.audit.finding import Finding, Severity
from nextn.audit.gains import Norm, Shift, shifts
from nextn.audit.readings import Readings, Values
from nextn.errors import CheckpointError
from nextn.families import lookup
from nextn.inventory import Inventory
from nextn.provenance import RECORD, Provenance, head_fingerprint, trunk_fingerprint
from nextn.remote import LocalFile

IDS = (
    "gain-shifted", "values-nonfinite", "values-zero", "values-constant", "values-untrained", "values-unjudged",
    "modules-identical", "block-copied", "head-stale",
)  # fmt: skip
RESTORE = "put the head back from the model that this one comes from: nextn restore"
SMALL_HEAD = 64 * 1024 * 1024  # bytes: a head that may be read whole
# transformers' own default where config.json does not say.
INITIALIZER_RANGE = 0.02
FEW = 256  # fewer values say nothing about a distribution
HUGE = 1e6


def values(inventory: Inventory) -> Iterator[Finding]:
    """Every rule that looks at the head's numbers, over one set of readings."""
    if not inventory.modules:
        return
    read = Readings.of(inventory)
    for rule in (_gains, _numbers, _untrained, _identical, _copied, _unjudged):
        yield from rule(read)


def named(names: Iterable[str]) -> str:
    """The first three names, and how many more."""
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _gains(read: Readings) -> Iterator[Finding]:
    zero_centred = read.inventory.family.gain == "1+w"
    for shift in shifts(read.head_gains, read.trunk_gains, zero_centred=zero_centred):
        sign = "subtract" if shift.by > 0 else "add"
        again = ", twice" if abs(shift.by) > 1 else ""
        convert = f"nextn convert {read.inventory.checkpoint.path} OUT --gain {sign}-1{again}"
        mend = {
            "head": f"nextn restore from the model that this one comes from, or {convert}",
            "trunk": "write the trunk again from its source, with a converter that knows the family's convention; if "
            "it is the head that is off the other way, nextn restore",
            "both": "nothing, if this file is for an engine that multiplies by the stored gains (MLX); else write "
            "trunk and head again from their source",
        }[shift.whose]
        yield gain_finding(shift, convention=read.inventory.family.gain, mend=mend)


def gain_finding(shift: Shift, *, convention: str, mend: str) -> Finding:
    """convention: `w` or `1+w`, what the file should store."""
    whose = "head and trunk" if shift.whose == "both" else f"the {shift.whose}"
    lie = "lie" if shift.sure else "may lie"
    side = "below" if shift.by < 0 else "above"
    found = (
        f"{len(shift.names)} norm gains of {whose} {lie} {abs(shift.by)} {side} their place: median {shift.median:.2f}"
    )
    doubt = "" if shift.sure else "; the values alone cannot tell: measure the acceptance with and without the shift"
    stored = "the gain itself" if convention == "w" else "the gain less 1"
    return Finding(
        "gain-shifted", "warning" if shift.sure else "note", named(shift.names), found,
        f"{stored} is stored, gains being mostly positive and alike in head and trunk", mend + doubt,
    )  # fmt: skip


def _numbers(read: Readings) -> Iterator[Finding]:
    inventory = read.inventory
    yield from unusable(_floats(read))
    matrices = {inventory.stored[each]: array for each, array in read.weights.items()}
    vital = {inventory.stored[each] for each in read.weights if "projection" in inventory.role(each)}
    yield from zero_or_constant(read.head_gains, matrices, vital=vital)


def _floats(read: Readings) -> dict[str, Values]:
    """Tensor name -> values, of gains and matrices; gains as stored."""
    less = 1.0 if read.inventory.family.gain == "1+w" else 0.0
    gains = {name: norm.gains - less for name, norm in read.head_gains.items()}
    return gains | {read.inventory.stored[each]: array for each, array in read.weights.items()}


def unusable(floats: Mapping[str, Values], mend: str = RESTORE) -> Iterator[Finding]:
    """Training never leaves NaN, or magnitudes below the smallest normal fp32; memory that nobody wrote does both.

    floats: tensor name -> values as stored.
    """
    if broken := [name for name, array in floats.items() if not np.isfinite(array).all()]:
        yield Finding(
            "values-nonfinite", "error", named(broken), f"{len(broken)} tensors hold NaN or infinity",
            "finite values", mend,
        )  # fmt: skip
    garbage = [name for name, array in floats.items() if name not in broken and _is_garbage(array)]
    if garbage:
        yield Finding(
            "values-untrained", "error", named(garbage),
            f"{len(garbage)} tensors hold denormal or huge numbers, as memory does that was never written",
            f"magnitudes below {HUGE:g} and above 1e-38", mend,
        )  # fmt: skip


def _is_garbage(array: Values) -> bool:
    size = np.abs(array)
    return bool(np.max(size) > HUGE or np.mean((size > 0) & (size < 1.17e-38)) > 0.01)


def zero_or_constant(
    gains: Mapping[str, Norm], matrices: Mapping[str, Values], *, vital: Collection[str], mend: str = RESTORE
) -> Iterator[Finding]:
    """vital: matrices without which nothing is left. A gain of 1 everywhere is where training starts."""
    kinds: dict[tuple[str, Severity], list[str]] = defaultdict(list)
    for name, norm in gains.items():
        if np.all(norm.gains == norm.gains[0]) and norm.gains[0] != 1:
            kinds[("values-zero", "error") if norm.gains[0] == 0 else ("values-constant", "warning")].append(name)
    for name, array in matrices.items():
        if np.all(array == array[0]):
            severity: Severity = "error" if name in vital else "warning"
            kinds["values-zero" if array[0] == 0 else "values-constant", severity].append(name)
    for (rule, severity), names in kinds.items():
        what = "nothing but 0" if rule == "values-zero" else "one value alone"
        yield Finding(
            rule, severity, named(names), f"{len(names)} tensors hold {what}, where they were read",
            "values that training spread", mend,
        )  # fmt: skip


def _untrained(read: Readings) -> Iterator[Finding]:
    """Two signs, neither enough alone: matrices distributed as when they were made, and gains of exactly 1.

    A trunk of the same kind is one that nobody has trained, which is no fault of the head.
    """
    like = read.trunk_weights
    made = len(like) > 0 and _share_made(read, read.weights) >= 0.75 and _share_made(read, like) < 0.5
    ones = _all_ones(read.head_gains) and not _all_ones(read.trunk_gains)
    if made or ones:
        signs = ["matrices are distributed as a fresh initialisation"] * made + ["all norm gains are exactly 1"] * ones
        yield Finding(
            "values-untrained", "warning" if made and ones else "note", named(read.inventory.stored[each] for each in
            read.weights), f"{' and '.join(signs)}, unlike the trunk's", "a trained head",
            f"{RESTORE}, or train it: nextn train --freeze-trunk",
        )  # fmt: skip


def _share_made(read: Readings, weights: Mapping[str, Values]) -> float:
    """Which share of the matrices looks freshly made; fp8 is unknown without its scales."""
    infos = {
        each: read.like[each][0] if weights is read.trunk_weights else read.inventory.info(each) for each in weights
    }
    long = [each for each in weights if len(weights[each]) >= FEW and np.isfinite(weights[each]).all()]
    judged = [each for each in long if not infos[each].dtype.startswith("F8")]
    said = lookup(read.inventory.checkpoint.config, "initializer_range")
    std = float(said) if isinstance(said, int | float) and said > 0 else INITIALIZER_RANGE
    made = [each for each in judged if _is_made(weights[each], std, fan_in=infos[each].shape[-1])]
    return len(made) / len(judged) if len(judged) > 1 else 0.0


def _is_made(array: Values, std: float, *, fan_in: int) -> bool:
    """Normal of the config's width, or torch's uniform over +-1/sqrt(fan_in): within 4 standard errors each."""
    count = len(array)
    width = float(np.std(array))
    kurtosis = float(np.mean((array - np.mean(array)) ** 4)) / max(width, 1e-30) ** 4
    near = 4 / np.sqrt(2 * count)
    if abs(width / std - 1) < near and abs(kurtosis - 3) < 4 * np.sqrt(24 / count):
        return True
    bound = fan_in**-0.5
    return bool(np.max(np.abs(array)) <= bound * 1.005 and abs(width / bound * 3**0.5 - 1) < near and kurtosis < 2.2)


def _all_ones(gains: Mapping[str, Norm]) -> bool:
    return bool(gains) and all(np.all(norm.gains == 1) for norm in gains.values())


def _identical(read: Readings) -> Iterator[Finding]:
    """Modules that are one and the same predict one depth, whatever they were promised for."""
    family, inventory = read.inventory.family, read.inventory
    signatures: dict[object, list[int]] = defaultdict(list)
    for index in inventory.modules:
        mine = {
            canonical.partition(".")[2]: (
                inventory.info(canonical),
                read.norms.get(canonical, read.matrices.get(canonical)),
            )
            for canonical in sorted(inventory.of_module(index))
            if "{" in family.names[inventory.role(canonical)] and canonical not in inventory.copies
        }
        key = tuple((path, info.dtype, info.shape, data) for path, (info, data) in mine.items())
        if any(data for *_, data in key):
            signatures[key].append(index)
    for same in signatures.values():
        if len(same) > 1:
            modules = ", ".join(map(str, same))
            yield Finding(
                "modules-identical", "warning", f"modules {modules}", "the same dtypes, shapes and values, where they "
                "were read", "a module of its own for each depth",
                f"{RESTORE}; if one module was copied on purpose, promise one alone: {family.count_fields[0]} = 1",
            )  # fmt: skip


def _copied(read: Readings) -> Iterator[Finding]:
    """How training a new head starts; no published head equals a layer of its trunk."""
    pairs = [(data, read.matrices[each]) for each, (_, data) in read.like.items()]
    if len(pairs) > 1 and all(theirs == ours and any(ours) for theirs, ours in pairs):
        place = named(read.inventory.stored[each] for each in read.like)
        yield Finding(
            "block-copied", "note", place, "the head's block equals a layer of the trunk: copied, not trained since",
            "a block of the head's own", f"{RESTORE}, or train it: nextn train --freeze-trunk",
        )  # fmt: skip


def _unjudged(read: Readings) -> Iterator[Finding]:
    if not read.weights and not read.head_gains:
        dtypes = sorted({read.inventory.info(each).dtype for each in read.inventory.stored})
        yield Finding(
            "values-unjudged", "note", "the head", f"its values were not looked at: {', '.join(dtypes)}",
            "floats of 8 bits or more", "measure the acceptance instead",
        )  # fmt: skip


def head_stale(inventory: Inventory) -> Iterator[Finding]:
    """The record beside the weights against the trunk and the head that are there now."""
    if not inventory.modules:
        return
    try:
        record = Provenance.read(inventory.checkpoint)
    except CheckpointError as error:
        yield Finding("head-stale", "note", RECORD, str(error), "a record that nextn wrote", f"remove {RECORD}")
        return
    if record is None:
        return
    again = f"nextn restore, from {record.source}"
    retrain = "measure the acceptance; if it is low, nextn train --freeze-trunk"
    if trunk_fingerprint(inventory) != record.beside:
        yield Finding(
            "head-stale", "warning", RECORD, "the trunk's weights changed since the head was put beside them",
            f"a trunk with fingerprint {record.beside[:12]}", f"{retrain}, or put the old trunk back",
        )  # fmt: skip
    elif record.trained_with not in ("", record.beside):
        yield Finding(
            "head-stale", "note", RECORD, "the head was trained with another trunk, so fewer drafts may be kept",
            f"a trunk with fingerprint {record.trained_with[:12]}", retrain,
        )  # fmt: skip
    if _is_small(inventory) and head_fingerprint(inventory) != record.head:
        yield Finding(
            "head-stale", "warning", RECORD, "the head's own tensors changed since the record was written",
            f"a head with fingerprint {record.head[:12]}", again,
        )  # fmt: skip


def _is_small(inventory: Inventory) -> bool:
    """Whether the head can be read whole at no cost: on this disk, and no more than SMALL_HEAD bytes."""
    infos = [inventory.info(each) for each in inventory.stored]
    local = all(isinstance(inventory.checkpoint.sources[info.file], LocalFile) for info in infos)
    return local and sum(info.nbytes for info in infos) <= SMALL_HEAD


RULES = (values, head_stale)
