"""Value rules: right names and shapes, wrong numbers. Norm gains whole, windows of matrices; no matrix is read whole.

What packed integers are worth is not judged here: `precision` looks at how they are stored.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np

from nextn.audit.finding import Finding, Severity
from nextn.audit.gains import Norm, Shift, shifts
from nextn.audit.readings import Readings, Values
from nextn.audit.words import convert, restore
from nextn.checkpoints.inventory import Inventory
from nextn.checkpoints.provenance import RECORD, Provenance, head_fingerprint, trunk_fingerprint
from nextn.checkpoints.remote import LocalFile
from nextn.errors import CheckpointError
from nextn.families import lookup
from nextn.words import counted, some

IDS = (
    "gain-shifted", "values-nonfinite", "values-zero", "values-constant", "values-untrained", "values-unjudged",
    "modules-identical", "block-copied", "head-stale",
)  # fmt: skip
SMALL_HEAD = 64 * 1024 * 1024  # bytes: a head that may be read whole
INITIALIZER_RANGE = 0.02  # transformers' own default, where config.json does not say
FEW = 256  # fewer values say nothing about a distribution
HUGE, TINY = 1e6, 1.17e-38


def values(inventory: Inventory) -> Iterator[Finding]:
    """Every rule that looks at the head's numbers, over one set of readings."""
    if not inventory.modules:
        return
    read = Readings.of(inventory)
    for rule in (_gains, _numbers, _untrained, _identical, _copied, _unjudged):
        yield from rule(read)


def _gains(read: Readings) -> Iterator[Finding]:
    inventory = read.inventory
    for shift in shifts(read.head_gains, read.trunk_gains, zero_centred=inventory.family.gain == "1+w"):
        undo = convert(inventory, f"--gain {'subtract' if shift.by > 0 else 'add'}-1")
        mend = {
            "head": f"Run `{undo}`{', twice' if abs(shift.by) > 1 else ''}, or `{restore(inventory, whole=True)}`.",
            "trunk": "Write the trunk again from its source with a converter that keeps the family's convention; the "
            f"other way round, if it is the head that is off: `{restore(inventory, whole=True)}`.",
            "both": "Nothing, if this file is for an engine that multiplies by what is stored (MLX); else write trunk "
            "and head again from their source.",
        }[shift.whose]
        yield gain_finding(shift, convention=inventory.family.gain, mend=mend)


def gain_finding(shift: Shift, *, convention: str, mend: str) -> Finding:
    """convention: `w` or `1+w`, what the file should store."""
    whose = "head and trunk" if shift.whose == "both" else f"the {shift.whose}"
    lie = f"{'lie' if shift.sure else 'may lie'} {abs(shift.by)} {'above' if shift.by > 0 else 'below'} their place"
    doubt = "" if shift.sure else " The values alone cannot tell: measure the acceptance both ways."
    stored = "The gain itself" if convention == "w" else "The gain less 1"
    return Finding(
        "gain-shifted", "warning" if shift.sure else "note", some(shift.names),
        f"{counted(len(shift.names), 'norm')} of {whose} {lie}: median gain {shift.median:.2f}.",
        f"{stored} stored, gains being positive and of one size in head and trunk.", mend + doubt,
    )  # fmt: skip


def _numbers(read: Readings) -> Iterator[Finding]:
    inventory, mend = read.inventory, restore(read.inventory, whole=True)
    stored = 1.0 if inventory.family.gain == "1+w" else 0.0
    gains = {name: norm.gains - stored for name, norm in read.head_gains.items()}
    matrices = {inventory.stored[each]: array for each, array in read.weights.items()}
    vital = {inventory.stored[each] for each in read.weights if "projection" in inventory.role(each)}
    yield from unusable(gains | matrices, mend)
    yield from zero_or_constant(read.head_gains, matrices, vital=vital, mend=mend)


def unusable(floats: Mapping[str, Values], mend: str) -> Iterator[Finding]:
    """Training never leaves NaN, or magnitudes below the smallest normal fp32; memory that nobody wrote does both.

    floats: tensor name -> values as stored.
    """
    broken = [name for name, array in floats.items() if not np.isfinite(array).all()]
    if broken:
        found = f"{counted(len(broken), 'tensor')} of the head with NaN or infinity."
        yield Finding("values-nonfinite", "error", some(broken), found, "Finite numbers.", mend)
    garbage = [name for name, array in floats.items() if name not in broken and _is_garbage(array)]
    if garbage:
        yield Finding(
            "values-untrained", "error", some(garbage),
            f"{counted(len(garbage), 'tensor')} of the head with denormal or huge numbers, as in memory never written.",
            f"Magnitudes from {TINY:g} to {HUGE:g}.", mend,
        )  # fmt: skip


def _is_garbage(array: Values) -> bool:
    size = np.abs(array)
    return bool(np.max(size) > HUGE or np.mean((size > 0) & (size < TINY)) > 0.01)


def zero_or_constant(
    gains: Mapping[str, Norm], matrices: Mapping[str, Values], *, vital: Collection[str], mend: str
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
        found = f"{counted(len(names), 'tensor')} of the head with {what}, where read."
        yield Finding(rule, severity, some(names), found, "Numbers that training spread.", mend)


def _untrained(read: Readings) -> Iterator[Finding]:
    """Two signs, neither enough alone: matrices distributed as when they were made, and gains of exactly 1.

    A trunk of the same kind is one that nobody has trained, which is no fault of the head.
    """
    inventory = read.inventory
    theirs = {each: info.dtype for each, (info, _) in read.like.items()}
    ours = {each: inventory.info(each).dtype for each in read.weights}
    made = len(theirs) > 0 and _made(read, read.weights, ours) >= 0.75 and _made(read, read.trunk_weights, theirs) < 0.5
    ones = _all_ones(read.head_gains) and not _all_ones(read.trunk_gains)
    signs = ["its matrices are distributed as a fresh initialisation"] * made + ["all its norm gains are 1"] * ones
    if signs:
        yield Finding(
            "values-untrained", "warning" if len(signs) > 1 else "note", "the head",
            f"The head may never have been trained: {' and '.join(signs)}, unlike the trunk's.", "A trained head.",
            f"Train it, or run `{restore(inventory, whole=True)}`.",
        )  # fmt: skip


def _made(read: Readings, weights: Mapping[str, Values], dtypes: Mapping[str, str]) -> float:
    """Which share of the matrices looks freshly made; fp8 is unknown without its scales."""
    said = lookup(read.inventory.checkpoint.config, "initializer_range")
    std = float(said) if isinstance(said, int | float) and said > 0 else INITIALIZER_RANGE
    made = [
        _is_made(array, std, fan_in=read.inventory.info(each).shape[-1])
        for each, array in weights.items()
        if len(array) >= FEW and not dtypes[each].startswith("F8") and np.isfinite(array).all()
    ]
    return sum(made) / len(made) if len(made) > 1 else 0.0


def _is_made(array: Values, std: float, *, fan_in: int) -> bool:
    """Normal of the config's width, or torch's uniform over +-1/sqrt(fan_in): within 4 standard errors each."""
    width = max(float(np.std(array)), 1e-30)
    kurtosis = float(np.mean(((array - np.mean(array)) / width) ** 4))
    near = 4 / np.sqrt(2 * len(array))
    if abs(width / std - 1) < near and abs(kurtosis - 3) < 4 * np.sqrt(24 / len(array)):
        return True
    bound = fan_in**-0.5
    return bool(np.max(np.abs(array)) <= bound * 1.005 and abs(width / bound * 3**0.5 - 1) < near and kurtosis < 2.2)


def _all_ones(gains: Mapping[str, Norm]) -> bool:
    return bool(gains) and all(np.all(norm.gains == 1) for norm in gains.values())


def _identical(read: Readings) -> Iterator[Finding]:
    """Modules that are one and the same predict one depth, whatever they were promised for."""
    inventory = read.inventory
    same: dict[object, list[int]] = defaultdict(list)
    for index in inventory.modules:
        if signature := tuple(_signature(read, index)):
            same[signature].append(index)
    for modules in same.values():
        if len(modules) > 1:
            yield Finding(
                "modules-identical", "warning", f"modules {', '.join(map(str, modules))}",
                f"{counted(len(modules), 'module')} of the same dtypes, shapes and numbers, where read.",
                "Numbers of its own for each depth.",
                f"Run `{restore(inventory, whole=True)}`; if one was copied on purpose, promise it alone: "
                f"{inventory.family.count_fields[0]} = 1.",
            )  # fmt: skip


def _signature(read: Readings, index: int) -> Iterator[tuple[object, ...]]:
    """What a module has for itself: no copies of the trunk's, nothing that all modules share."""
    inventory = read.inventory
    for canonical in sorted(inventory.of_module(index).keys() - inventory.copies.keys()):
        if "{" in inventory.family.names[inventory.role(canonical)]:
            info = inventory.info(canonical)
            data = read.norms.get(canonical, read.matrices.get(canonical))
            yield canonical.partition(".")[2], info.dtype, info.shape, data


def _copied(read: Readings) -> Iterator[Finding]:
    """How the training of a new head starts; no published head equals a layer of its trunk."""
    pairs = [(data, read.matrices[each]) for each, (_, data) in read.like.items()]
    if len(pairs) > 1 and all(theirs == ours and any(ours) for theirs, ours in pairs):
        yield Finding(
            "block-copied", "note", some([info.name for info, _ in read.like.values()]),
            "The head's block equals a layer of the trunk: copied, and not trained since.", "A block of its own.",
            f"Train it, or run `{restore(read.inventory, whole=True)}`.",
        )  # fmt: skip


def _unjudged(read: Readings) -> Iterator[Finding]:
    if not read.weights and not read.head_gains:
        dtypes = sorted({read.inventory.info(each).dtype for each in read.inventory.stored})
        yield Finding(
            "values-unjudged", "note", "the head", f"Its numbers were not looked at: {', '.join(dtypes)}.",
            "Floats, of 8 bits or more.", "Measure the acceptance.",
        )  # fmt: skip


def head_stale(inventory: Inventory) -> Iterator[Finding]:
    """The record beside the weights against the trunk and the head that are there now."""
    if not inventory.modules:
        return
    try:
        record = Provenance.read(inventory.checkpoint)
    except CheckpointError as error:
        yield Finding("head-stale", "note", RECORD, f"{error}", "A record that nextn wrote.", f"Remove {RECORD}.")
        return
    if record is None:
        return
    retrain = "Measure the acceptance; if it is low, train the head beside the trunk that is there now."
    if trunk_fingerprint(inventory) != record.beside:
        yield Finding(
            "head-stale", "warning", RECORD, "The trunk's weights changed since the head was put beside them.",
            f"The trunk with fingerprint {record.beside[:12]}.", retrain,
        )  # fmt: skip
    elif record.trained_with not in ("", record.beside):
        yield Finding(
            "head-stale", "note", RECORD, "The head was trained with another trunk: fewer drafts may be kept.",
            f"The trunk with fingerprint {record.trained_with[:12]}.", retrain,
        )  # fmt: skip
    if _is_small(inventory) and head_fingerprint(inventory) != record.head:
        yield Finding(
            "head-stale", "warning", RECORD, "The head's own tensors changed since the record was written.",
            f"The head with fingerprint {record.head[:12]}, from {record.source[:100]}.",
            restore(inventory, whole=True),
        )  # fmt: skip


def _is_small(inventory: Inventory) -> bool:
    """Whether the head can be read whole at no cost: on this disk, and of no more than SMALL_HEAD bytes."""
    infos = [inventory.info(each) for each in inventory.stored]
    local = all(isinstance(inventory.checkpoint.sources[info.file], LocalFile) for info in infos)
    return local and sum(info.nbytes for info in infos) <= SMALL_HEAD


RULES: tuple[Callable[[Inventory], Iterable[Finding]], ...] = (values, head_stale)
