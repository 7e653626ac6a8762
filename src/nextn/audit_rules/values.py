"""Rules on values: norm weights are read completely, matrices are sampled, or read completely where that is asked for.

Packed integers are not decoded here; `precision` covers how they are stored.
"""

import math
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np

from nextn.audit_rules.findings import Finding, Severity, against_base, convert, is_recorded, restore, source_of_head
from nextn.audit_rules.norm_weights import NormShift, NormValues, Values, shifts
from nextn.audit_rules.tensor_values import AllValues, SampledValues, TensorSummary, is_matrix
from nextn.checkpoint.base_model import RECORD
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import Provenance, trunk_fingerprint
from nextn.errors import CheckpointError
from nextn.family_table import lookup
from nextn.text_format import counted, some

IDS = (
    "norm-weights-shifted", "norm-rounded", "values-nonfinite", "values-zero", "values-constant", "values-untrained",
    "values-unchecked", "modules-identical", "block-copied", "head-stale",
)  # fmt: skip
INITIALIZER_RANGE = 0.02  # transformers' own default, where config.json does not say
_FLOATS = ("BF16", "F16", "F32")
CODES = 4.0  # median size of a matrix; weights that were trained have 0.001 to 0.1
MIN_VALUES = 256  # fewer say nothing about a distribution
HUGE, TINY = 1e6, 1.17e-38
# A bf16 weight w has steps of 2^-8 below 1 and 2^-7 above; w - 1, as families with 1 + w train it, finer ones near 0.
STEP = 2.0**-8
MIN_ON_GRID = 32  # values between -0.5 and 0.5, half of which at most are multiples of STEP by chance
NOTABLE = 0.01  # of a norm weight


def values(inventory: Inventory, all_values: AllValues | None = None) -> Iterator[Finding]:
    """Run every rule on the head's values, over one set of samples and, where all values were read, on these."""
    if not inventory.modules:
        return
    samples = SampledValues.of(inventory)
    yield from _unusable(samples, all_values)
    for rule in (_norm_shifts, _norms_rounded, _untrained, _identical, _copied, _undecoded):
        yield from rule(samples)


def _norm_shifts(samples: SampledValues) -> Iterator[Finding]:
    inventory = samples.inventory
    zero_centered = inventory.family.norm_weight == "1+w"
    for shift in shifts(samples.head_norms, samples.trunk_layer_norms, zero_centered=zero_centered):
        undo = convert(inventory, f"--norm-weights {_undoing(shift, samples)}")
        either = f"`{undo}`, or {_replace(inventory)}."
        fix = {
            "head": f"Run {either}" if shift.certain else f"Measure the acceptance; if it is low, run {either}",
            "trunk": "Convert the trunk again from its source, with a converter that keeps the family's convention"
            + (
                f"; or, for an engine that multiplies by the stored weight (MLX): `{_as_in_trunk(samples)}`."
                if zero_centered and shift.offset == 1
                else "."
            ),
            "both": "Nothing, if this file is for an engine that multiplies by the stored weight (MLX); else convert "
            "trunk and head again from their source.",
        }[shift.side]
        yield norm_shift_finding(shift, convention=inventory.family.norm_weight, fix=fix)


def _as_in_trunk(samples: SampledValues) -> str:
    """Return the command that adds 1 to the norm weights of the head that have not been shifted as the trunk's have."""
    raw = tuple(name for name, norm in samples.head_norms.items() if np.quantile(norm.values, 0.01) < 1)
    shift = NormShift(raw, -1, "head", certain=True, median=1.0)
    return convert(samples.inventory, f"--norm-weights {_undoing(shift, samples)}")


def _undoing(shift: NormShift, samples: SampledValues) -> str:
    """Return the value of --norm-weights that shifts back what `shift` names, and no other norm weight."""
    change = f"{'subtract' if shift.offset > 0 else 'add'}-{abs(shift.offset)}"
    return change if set(shift.names) == samples.head_norms.keys() else f"{change}:{','.join(shift.names)}"


def norm_shift_finding(shift: NormShift, *, convention: str, fix: str) -> Finding:
    """Return the finding for `shift`; `convention` is `w` or `1+w`, what the file should store."""
    side = "head and trunk" if shift.side == "both" else f"the {shift.side}"
    direction = "above" if shift.offset > 0 else "below"
    offset = f"{'are' if shift.certain else 'may be'} {abs(shift.offset)} {direction} their true values"
    measure = "" if shift.certain else " The values alone do not settle it: measure the acceptance both ways."
    stored = "The norm weight itself" if convention == "w" else "The norm weight less 1"
    return Finding(
        "norm-weights-shifted", "warning" if shift.certain else "note", some(shift.names),
        f"{counted(len(shift.names), 'norm weight')} of {side} {offset}: their stored median is "
        f"{_as_stored(shift.median, convention, '.2f')}.",
        f"{stored} in the file; norm weights are positive and of similar size in head and trunk.", fix + measure,
    )  # fmt: skip


def _norms_rounded(samples: SampledValues) -> Iterator[Finding]:
    """Report norm weights that were w in bf16 before they were stored as w - 1, and were small enough to lose bits."""
    inventory = samples.inventory
    dtypes = {inventory.info(each).dtype for each in samples.norms}
    if inventory.family.norm_weight != "1+w" or dtypes != {"BF16"} or not samples.head_norms:
        return
    pooled = np.concatenate([norm.values for norm in samples.head_norms.values()])
    near = pooled[(np.abs(pooled - 1) < 0.5) & (pooled != 1)]
    small = {name: norm.values[(norm.values > 0) & (norm.values < 0.5)] for name, norm in samples.head_norms.items()}
    small = {name: array for name, array in small.items() if len(array)}
    if len(near) < MIN_ON_GRID or not small or np.any(near % STEP):
        return
    smallest = np.concatenate([*small.values()])
    lost = STEP / 2 / float(np.median(smallest))
    yield Finding(
        "norm-rounded", "warning" if lost > NOTABLE else "note", some(small),
        f"All norm weights of the head are multiples of 2^-8, as of a head that stored w before it stored w - 1: the "
        f"{counted(len(smallest), 'value')} below 0.5 may have lost bits, half of them {lost:.1%} or more.",
        "Norm weights that were trained as w - 1, or are not below 0.5.",
        "Measure the acceptance; if it is low, use the head in the layout that it was trained in.",
    )  # fmt: skip


def _unusable(samples: SampledValues, all_values: AllValues | None) -> Iterator[Finding]:
    inventory, fix = samples.inventory, f"Run {_replace(samples.inventory)}."
    offset = 1.0 if inventory.family.norm_weight == "1+w" else 0.0
    norm_weights = {name: norm.values - offset for name, norm in samples.head_norms.items()}
    matrices = {inventory.stored[each]: array for each, array in samples.weights.items()}
    summaries = None if all_values is None else all_values.tensors
    yield from nonfinite_or_garbage(norm_weights | matrices, fix, summaries)
    floats = {name: each for name, each in matrices.items() if inventory.checkpoint.tensors[name].dtype in _FLOATS}
    yield from _codes(floats, "head", fix)
    trunk = {info.name: samples.trunk_weights[each] for each, (info, _) in samples.like.items()
             if each in samples.trunk_weights and info.dtype in _FLOATS}  # fmt: skip
    yield from _codes(trunk, "trunk", "Download, convert or quantize the trunk again.")
    names = {inventory.stored[each]: each for each in inventory.own if is_matrix(inventory, inventory.info(each))}
    constants = {name: each.constant for name, each in (summaries or {}).items() if each.constant is not None}
    matrices |= {name: np.array([value]) for name, value in constants.items() if name in names}
    count, chosen = (lookup(inventory.checkpoint.config, f) for f in ("n_routed_experts", "num_experts_per_tok"))
    if count is not None and count == chosen:  # a router of zeros gives them equal weights, as in a converted MLP
        matrices = {name: array for name, array in matrices.items() if not name.endswith(".mlp.gate.weight")}
    projections = {name for name, canonical in names.items() if "projection" in inventory.role(canonical)}
    yield from zero_or_constant(
        samples.head_norms, matrices, projections=projections, fix=fix, known=None if all_values is None else constants,
        convention=inventory.family.norm_weight,
    )  # fmt: skip


def _codes(matrices: Mapping[str, Values], side: str, fix: str) -> Iterator[Finding]:
    """Report matrices of floats that have the size of codes: of int8 up to 127, of fp8 up to 448."""
    sizes = {name: float(np.median(np.abs(array))) for name, array in matrices.items()}
    if names := [name for name, size in sizes.items() if CODES < size < HUGE]:
        largest = max(sizes[name] for name in names)
        yield Finding(
            "scale-missing", "error", some(names),
            f"{counted(len(names), 'matrix')} of the {side} with values of a median size up to {largest:.3g}, as of "
            "int8 or fp8 codes that were converted without their scales.",
            f"Weights of a median size below {CODES:g}.", fix,
        )  # fmt: skip


def nonfinite_or_garbage(
    floats: Mapping[str, Values], fix: str, all_values: Mapping[str, TensorSummary] | None = None
) -> Iterator[Finding]:
    """Report NaN, infinity, and magnitudes that training never leaves and uninitialized memory has.

    `floats` are values as stored, all of them or samples, by tensor name. Where all were read, `all_values` has their
    summaries; without it, NaN is looked for in `floats`.
    """
    nonfinite = [name for name, array in floats.items() if not np.isfinite(array).all()]
    found, count = "of the head with NaN or infinity", ""
    if all_values is not None:
        nonfinite = [name for name, summary in all_values.items() if summary.num_nonfinite]
        count = f": {counted(sum(all_values[name].num_nonfinite for name in nonfinite), 'value')}"
    if nonfinite:
        found = f"{counted(len(nonfinite), 'tensor')} {found}{count}."
        yield Finding("values-nonfinite", "error", some(nonfinite), found, "Finite values.", fix)
    largest = {name: all_values[name].largest for name in floats if all_values and name in all_values}
    garbage = [
        name
        for name, array in floats.items()
        if name not in nonfinite and (_is_garbage(array) or largest.get(name, 0.0) > HUGE)
    ]
    if garbage:
        yield Finding(
            "values-untrained", "error", some(garbage),
            f"{counted(len(garbage), 'tensor')} of the head with subnormal or huge values, as in uninitialized memory.",
            f"Magnitudes from {TINY:g} to {HUGE:g}.", fix,
        )  # fmt: skip


def _is_garbage(array: Values) -> bool:
    size = np.abs(array)
    return bool(np.max(size) > HUGE or np.mean((size > 0) & (size < TINY)) > 0.01)


def _as_stored(effective: float, convention: str, spec: str) -> str:
    """Format a norm weight as the file has it, and the factor that it means where that differs."""
    if convention == "w":
        return f"{effective:{spec}}"
    return f"{effective - 1:{spec}}, which multiplies by {effective:{spec}}"


def zero_or_constant(
    norms: Mapping[str, NormValues],
    matrices: Mapping[str, Values],
    *,
    projections: Collection[str],
    fix: str,
    known: Collection[str] | None = None,
    convention: str = "w",
) -> Iterator[Finding]:
    """Report tensors with one value only; an error in `projections`, without which nothing of the head is left.

    A norm weight of 1 everywhere is not reported: that is where training starts. `norms` are all effective norm
    weights, `matrices` sampled values, by tensor name. `known` are tensors whose values are all equal, where all were
    read; None if only samples were. `convention` is what the file stores of an effective norm weight, `w` or `1+w`.
    """
    groups: dict[tuple[str, Severity, str], list[str]] = defaultdict(list)
    for name, norm in norms.items():
        value = norm.values[0]
        if value != 1 and np.all(norm.values == value):
            what = f"a single value, {_as_stored(value, convention, 'g')}"
            groups[_zero_or_constant(value), "warning" if value else "error", what].append(name)
    for name, array in matrices.items():
        value = array[0]
        if np.all(array == value):
            what = "a single value" if value else "only zeros"
            what += " in the sample" if known is None else "" if name in known else ", but for a few values"
            groups[_zero_or_constant(value), "error" if name in projections else "warning", what].append(name)
    for (rule, severity, what), names in groups.items():
        found = f"{counted(len(names), 'tensor')} of the head with {what}."
        advice = fix if severity == "error" else _measured_first(fix, names)
        yield Finding(rule, severity, some(names), found, "Values that differ, as after training.", advice)


def _zero_or_constant(value: float) -> str:
    return "values-constant" if value else "values-zero"


def _measured_first(fix: str, names: Collection[str]) -> str:
    """Return `fix` for tensors without which a head may work: a shared expert draws on no routed one."""
    experts = any(".experts." in name or "_exps" in name for name in names)
    known = ": a head whose routed experts are zero can work by its shared expert" if experts else ""
    return f"Measure the acceptance{known}. If it is low, {fix[0].lower()}{fix[1:]}"


def _untrained(samples: SampledValues) -> Iterator[Finding]:
    """Report two signs, neither sufficient alone: matrices distributed as initialized, and norm weights of exactly 1.

    Where the trunk shows the same sign, it is untrained too, and the head is not at fault.
    """
    inventory = samples.inventory
    trunk_dtypes = {each: info.dtype for each, (info, _) in samples.like.items()}
    head_dtypes = {each: inventory.info(each).dtype for each in samples.weights}
    initial = (
        len(trunk_dtypes) > 0
        and _share_initial(samples, samples.weights, head_dtypes) >= 0.75
        and _share_initial(samples, samples.trunk_weights, trunk_dtypes) < 0.5
    )
    known = samples.trunk_layer_norms  # none, where the head is read alone
    ones = bool(known) and _all_ones(samples.head_norms) and not _all_ones(known)
    signs = ["its matrices are distributed as a fresh initialization"] * initial
    signs += [f"all its norm weights are stored as {int(inventory.family.norm_weight == 'w')}"] * ones
    if signs:
        yield Finding(
            "values-untrained", "warning" if len(signs) > 1 else "note", "the head",
            f"The head may never have been trained: {' and '.join(signs)}, unlike the trunk's.", "A trained head.",
            _train_or_restore(inventory),
        )  # fmt: skip


def _train_or_restore(inventory: Inventory) -> str:
    train = f"nextn train RUN --freeze-trunk --from {shlex.quote(inventory.checkpoint.path)}"
    return f"Train it (`{train}`), or, if BASE has a trained head, run {_replace(inventory)}."


def _replace(inventory: Inventory) -> str:
    """Return the command that replaces the head, in backticks; from another model, where this is the recorded one's."""
    if not (source := source_of_head(inventory)):
        return f"`{restore(inventory, force=True)}`"
    other = inventory.restore_command(force=True, base="BASE")
    return f"`{other}`, where BASE is not {source[:100]}, which has this head"


def _share_initial(samples: SampledValues, weights: Mapping[str, Values], dtypes: Mapping[str, str]) -> float:
    """Return the share of matrices that look freshly initialized, NaN if too few were read; fp8 needs its scales."""
    config_std = lookup(samples.inventory.checkpoint.config, "initializer_range")
    std = float(config_std) if isinstance(config_std, int | float) and config_std > 0 else INITIALIZER_RANGE
    initial = [
        _is_initial(array, std, fan_in=samples.inventory.info(each).shape[-1])
        for each, array in weights.items()
        if len(array) >= MIN_VALUES and not dtypes[each].startswith("F8") and np.isfinite(array).all()
    ]
    return sum(initial) / len(initial) if len(initial) > 1 else math.nan


def _is_initial(array: Values, std: float, *, fan_in: int) -> bool:
    """Test for a normal with the config's std, or torch's uniform on +-1/sqrt(fan_in), to 4 standard errors each."""
    sample_std = max(float(np.std(array)), 1e-30)
    kurtosis = float(np.mean(((array - np.mean(array)) / sample_std) ** 4))
    tolerance = 4 / np.sqrt(2 * len(array))
    if abs(sample_std / std - 1) < tolerance and abs(kurtosis - 3) < 4 * np.sqrt(24 / len(array)):
        return True
    bound = fan_in**-0.5
    is_uniform_std = abs(sample_std / bound * 3**0.5 - 1) < tolerance
    return bool(np.max(np.abs(array)) <= bound * 1.005 and is_uniform_std and kurtosis < 2.2)


def _all_ones(norms: Mapping[str, NormValues]) -> bool:
    return bool(norms) and all(np.all(norm.values == 1) for norm in norms.values())


def _identical(samples: SampledValues) -> Iterator[Finding]:
    """Report identical modules: they predict the same depth, whatever the config declares."""
    inventory = samples.inventory
    groups: dict[object, list[int]] = defaultdict(list)
    for index in inventory.modules:
        if signature := tuple(_signature(samples, index)):
            groups[signature].append(index)
    for modules in groups.values():
        if len(modules) > 1:
            yield Finding(
                "modules-identical", "warning", f"modules {', '.join(map(str, modules))}",
                f"{counted(len(modules), 'MTP layer')} with the same dtypes, shapes and sampled values.",
                "Different values for each depth.",
                f"Run {_replace(inventory)}; if one was copied on purpose, declare it alone: "
                f"{inventory.family.count_fields[0]} = 1.",
            )  # fmt: skip


def _signature(samples: SampledValues, index: int) -> Iterator[tuple[object, ...]]:
    """Yield the tensors of one module, without copies of the trunk's and without what all modules share."""
    inventory = samples.inventory
    for canonical in sorted(inventory.of_module(index).keys() - inventory.copies.keys()):
        if "{" in inventory.family.names[inventory.role(canonical)]:
            info = inventory.info(canonical)
            data = samples.norms.get(canonical, samples.matrices.get(canonical))
            yield canonical.partition(".")[2], info.dtype, info.shape, data


def _copied(samples: SampledValues) -> Iterator[Finding]:
    """Report a block equal to a trunk layer, as at the start of training; no published head has one."""
    pairs = [(data, samples.matrices[each]) for each, (_, data) in samples.like.items()]
    if len(pairs) > 1 and all(trunk == head and any(head) for trunk, head in pairs):
        yield Finding(
            "block-copied", "note", some([info.name for info, _ in samples.like.values()]),
            "The head's block equals a layer of the trunk: copied, and not trained since.", "A trained block.",
            _train_or_restore(samples.inventory),
        )  # fmt: skip


def _undecoded(samples: SampledValues) -> Iterator[Finding]:
    if not samples.weights and not samples.head_norms:
        infos = map(samples.inventory.info, samples.inventory.stored)
        dtypes = sorted({info.dtype for info in infos if 0 not in info.shape})
        if not dtypes:
            return
        yield Finding(
            "values-unchecked", "note", "the head", f"Its values were not checked: {', '.join(dtypes)} is not decoded.",
            "Floating-point values of 8 bits or more.", "Measure the acceptance.",
        )  # fmt: skip


def head_stale(inventory: Inventory) -> Iterator[Finding]:
    """Compare the record in nextn.json with the trunk and the head in the checkpoint."""
    if not inventory.modules:
        return
    try:
        record = Provenance.read(inventory.checkpoint)
    except CheckpointError as error:
        yield Finding("head-stale", "note", RECORD, f"{error}", "A record written by nextn.", f"Remove {RECORD}.")
        return
    if record is None:
        return
    compare = against_base(inventory)
    retrain = f"Run `{compare}`, with --prompts of its use: it says whether to keep or to train the head."
    is_whole = len(inventory.layers) >= inventory.num_layers  # else another rule says what was not found
    trunk = trunk_fingerprint(inventory) if is_whole else record.beside
    if record.beside not in ("", trunk):
        yield Finding(
            "head-stale", "warning", RECORD, "The trunk's weights changed after the head was added.",
            f"The trunk with fingerprint {record.beside[:12]}.", retrain,
        )  # fmt: skip
    elif is_whole and record.trained_with not in ("", trunk):
        yield Finding(
            "head-stale", "note", RECORD,
            "The trunk's values differ from those that the head was trained on: acceptance may be lower.",
            f"The trunk with fingerprint {record.trained_with[:12]}.", retrain,
        )  # fmt: skip
    if not is_recorded(inventory, record):
        yield Finding(
            "head-stale", "warning", RECORD, "The head's own tensors changed since the record was written.",
            f"The head with fingerprint {record.head[:12]}, from {record.source[:100]}.",
            f"If the head was trained or converted since, remove {RECORD}, which is not about it; else run "
            f"`{restore(inventory, force=True)}`.",
        )  # fmt: skip


RULES: tuple[Callable[[Inventory], Iterable[Finding]], ...] = (values, head_stale)
