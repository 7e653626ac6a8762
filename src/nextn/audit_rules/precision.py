"""Compare how the head is stored with the quantization config, with what engines build, and with the trunk.

Reads names, dtypes and shapes only; how good quantized weights are, only a measurement of the acceptance can show.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from nextn.audit_rules.findings import Finding, engines, restore, verb
from nextn.audit_rules.layer_reference import LayerReference
from nextn.checkpoint.checkpoint import CONFIG
from nextn.checkpoint.expert_forms import expert_path
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.module_lists import FUSED, with_fused
from nextn.checkpoint.packed_layout import PackedWeight, with_logical_weights
from nextn.checkpoint.quant_formats import TRANSFORMERS_METHODS, Mlx
from nextn.checkpoint.quantization import (
    PLAIN,
    QuantConfig,
    QuantSection,
    Storage,
    declared,
    fp4_group_size,
    may_be_packed,
    scale_of,
    scale_shape,
    split_name,
    storage,
)
from nextn.checkpoint.safetensors_file import DTYPES, TensorInfo
from nextn.errors import CheckpointError
from nextn.family_table import ASKS_FOR_FUSED, PLAIN_IN_NVFP4, PLAIN_PROJECTION
from nextn.text_format import counted, some

IDS = ("quantization", "quantization-unused", "scale-missing", "precision-lower", "precision-higher")
_NARROW = 16  # bits; with fewer, heads stored below the trunk's precision are known to fail
# Methods that engines also apply to unquantized files when they load them, and MLX, whose tensors decide.
APPLIED_ON_LOAD = frozenset({"bitsandbytes", "torchao", "mlx", *TRANSFORMERS_METHODS})


@dataclass(frozen=True)
class Part:
    """A matrix of the head."""

    module: str  # name without ".weight"
    role: str
    storage: Storage
    counterpart: str  # the trunk's module of the same path; "" without one
    asked: str  # the name that engines look up in a config: of fused experts, that of one expert's matrix


def precision(inventory: Inventory) -> Iterator[Finding]:
    """Run every rule on how the head's matrices are stored."""
    reference = LayerReference(inventory)
    parts = _parts(inventory, reference)
    unused = list(_quantization_unused(inventory))
    yield from unused or _quantization(inventory, parts)
    yield from () if unused else _unreadable(inventory)
    yield from _built_plain(inventory, parts)
    yield from _scales(inventory, parts)
    bare = {f"{part.module}.weight" for part in parts if part.storage == "fp8-bare"}
    yield from _precision_lower(inventory, reference, bare)
    yield from _precision_higher(reference)


def _quantization(inventory: Inventory, parts: list[Part]) -> Iterator[Finding]:
    """Report matrices that the quantization config covers and that are stored unquantized, or the reverse."""
    try:
        config = QuantConfig.of(inventory.checkpoint)
        mismatches = _mismatches(inventory, config, parts)
        fused = _fused_names(inventory, config, parts)
    except CheckpointError as error:
        yield Finding(
            "quantization", "error", f"{CONFIG}: quantization_config", f"{error}",
            "A section that engines can read.", "Take the quantization config of the model's own release.",
        )  # fmt: skip
        return
    place = _place(config) if config else f"{CONFIG}: quantization_config"
    method = config.method if config else "no quantization"
    for (covered, kind, failing), names in mismatches.items():
        claim = "quantized" if covered else "unquantized"
        effect = "find no scales, and fail or draft noise" if covered else "read packed values without their scales"
        if covered and not failing and method in TRANSFORMERS_METHODS:
            yield _by_transformers(method, place, names)
            continue
        yield Finding(
            "quantization", "warning" if failing else "error", place,
            f"The head stores {counted(len(names), 'matrix')}, such as {some(names)}, {_describe(kind)}, and the "
            f"config ({method}) has {engines(failing) if failing else 'engines'} build them {claim}: they {effect}.",
            f"The head in {method}'s list of unquantized modules." if covered
            else "Floating-point values." if kind == "unknown" else f"A config that declares {kind}.",
            # From itself: its values stay, and the config lists them.
            restore(inventory, force=True, own=covered and kind == "plain"),
        )  # fmt: skip

    if config is not None and fused:
        listed = ", ".join(f'"{name}"' for name in fused)
        yield Finding(
            "quantization", "warning", place,
            f"SGLang joins projections of the head, such as {some(fused)}, and looks in the list for these names: it "
            "builds them quantized, skips the stored weights, and no draft is accepted.",
            "The names of the joined projections, too.", f"Add {listed} to the list; other engines skip these names.",
        )  # fmt: skip


def _by_transformers(method: str, place: str, names: Sequence[str]) -> Finding:
    """Return the note on an unquantized head beside a trunk that transformers alone reads."""
    return Finding(
        "quantization", "note", place,
        f"The head is stored unquantized, such as {some(names)}, and the config ({method}) does not leave it out. "
        f"transformers, which alone reads {method}, does not load the head, and no engine drafts with it.",
        "A trunk that an engine with MTP reads.", "To draft, take the head into the trunk before it was quantized.",
    )  # fmt: skip


def _fused_names(inventory: Inventory, config: QuantConfig | None, parts: list[Part]) -> list[str]:
    """Return what compressed-tensors' list lacks of the names that SGLang's loader of the head asks for."""
    if config is None or inventory.family.name not in ASKS_FOR_FUSED or config.method != "compressed-tensors":
        return []
    plain = [part.module for part in parts if part.storage == "plain" and config.covers(part.module) is False]
    return [name for name in with_fused(plain, ()) if name.endswith(tuple(FUSED)) and config.covers(name)]


def _unreadable(inventory: Inventory) -> Iterator[Finding]:
    """Report packed weights of trunk and head whose sizes are not the config's, or of a variant that nextn cannot read.

    Tensors that are lost are `head-partial`, `scale-missing` or `trunk-partial`.
    """
    try:
        _, packed = with_logical_weights(inventory.checkpoint)
        undeclared = inventory.trunk_codes if QuantConfig.of(inventory.checkpoint) is None else []
    except CheckpointError:  # which `_quantization` reports
        return
    if undeclared:
        yield Finding(
            "quantization", "error", f"{CONFIG}: quantization_config",
            f"The trunk stores {counted(len(undeclared), 'matrix')}, such as {some(undeclared)}, as codes with scales, "
            "and the config declares no quantization: engines read the codes as weights.",
            "The quantization config of the release that was quantized so.",
            "Take that config, or the unquantized model.",
        )  # fmt: skip
    yield from _scales_misfit(inventory, {weight.module for weight in packed.values()})
    yield from _settings_misfit(inventory)
    groups: dict[str, list[PackedWeight]] = defaultdict(list)
    for weight in packed.values():
        kind = (weight.problem or "").partition(":")[0]
        if kind and weight.module not in inventory.lost_parts:
            groups[kind].append(weight)
    for kind, weights in groups.items():
        variant = kind == "unsupported"
        yield Finding(
            "quantization", "warning" if variant else "error", weights[0].module,
            f"{counted(len(weights), 'packed weight')}, such as {weights[0].module}: {weights[0].problem}.",
            "A variant that nextn reads too: it loads no other, and no rule has looked at these weights." if variant
            else "Weights with the sizes that the config declares.",
            "Load the unquantized model to measure or train." if variant
            else "Correct the quantization config, or take the complete checkpoint.",
        )  # fmt: skip


def _scales_misfit(inventory: Inventory, packed: Collection[str]) -> Iterator[Finding]:
    """Report weights of four bits, and in blocks of fp8, whose scales are too many or too few for their size.

    packed: The modules whose sizes are checked with all that nextn reads of them.
    """
    tensors, block = inventory.checkpoint.tensors, declared(inventory.checkpoint.config).get("weight_block_size")
    wrong: list[tuple[TensorInfo, tuple[int, ...]]] = []
    for name, info in tensors.items():
        stem = name.removesuffix("_packed")
        is_checked = stem.endswith(".weight") and len(info.shape) == 2 and stem.removesuffix(".weight") not in packed
        scale = tensors.get(scale_of(stem, tensors) or "") if is_checked else None
        if scale is not None and (shape := _scale_shape(info, scale, block)) not in (None, scale.shape):
            wrong.append((scale, shape))
    if wrong:
        scale, shape = wrong[0]
        yield Finding(
            "quantization", "error", scale.name,
            f"{counted(len(wrong), 'tensor')} of scales, such as {scale.name} {list(scale.shape)}, where the weight's "
            f"size needs {list(shape)}: of a faulty export, or of another module.",
            "One scale for each block of values.",
            "Quantize again with a newer version of the tool, or take the release.",
        )  # fmt: skip


def _settings_misfit(inventory: Inventory) -> Iterator[Finding]:
    """Report MLX's codes that are not of the bits and group size that the config has for their module.

    A row of K values of b bits has K b / 32 words, and K / g scales in groups of g.
    """
    config, tensors = QuantConfig.of(inventory.checkpoint), inventory.checkpoint.tensors
    formats = (each.format for each in config.sections) if config else ()
    section = next((each for each in formats if isinstance(each, Mlx)), None)
    if section is None:
        return
    wrong: list[tuple[str, str]] = []
    for name, info in tensors.items():
        module = name.removesuffix(".weight")
        scales = tensors.get(f"{module}.scales")
        if info.dtype == "U32" and info.shape and scales is not None and scales.shape and scales.shape[-1]:
            bits, size, *_ = section.settings(module)
            mode = section.mode(module)
            if mode != "affine" and f"{module}.biases" in tensors:
                wrong.append((module, f"the codes have biases, as of mode affine, and {CONFIG} has mode {mode}"))
            elif bits and size and 32 * info.shape[-1] != bits * size * scales.shape[-1]:
                stored = 32 * info.shape[-1] // scales.shape[-1]
                wrong.append(
                    (module, f"bits times group size is {stored}, and {CONFIG} has {bits} in groups of {size}")
                )
    if wrong:
        module, what = wrong[0]
        yield Finding(
            "quantization", "error", module,
            f"{counted(len(wrong), 'matrix')} of other bits or groups than the config has for them, such as {module}, "
            f"where {what}: engines on MLX build them so, and the weights do not fit.",
            "An entry for each under its name in the files, with the group_size and bits that it was quantized with.",
            f"Add the entries to `quantization` in {CONFIG}.",
        )  # fmt: skip


def _scale_shape(weight: TensorInfo, scale: TensorInfo, block: object) -> tuple[int, ...] | None:
    """Return the shape of the scales that the format defines for a weight; None where it is not known."""
    rows, columns = weight.shape
    if weight.dtype in ("U8", "I8", "F4") and scale.dtype in ("F8_E4M3", "F8_E8M0", "U8"):  # NVFP4, MXFP4
        per_byte = 1 if weight.dtype == "F4" else 2
        return scale_shape((rows, per_byte * columns), (1, fp4_group_size(scale.dtype)))
    if weight.dtype.startswith("F8") and scale.name.endswith("_inv") and len(scale.shape) == 2:
        match block:
            case [int(height), int(width)] if height > 0 and width > 0:
                return scale_shape((rows, columns), (height, width))
    return None


def _quantization_unused(inventory: Inventory) -> Iterator[Finding]:
    """Report a quantization config of a checkpoint, trunk and head, that stores nothing quantized."""
    try:
        config = QuantConfig.of(inventory.checkpoint)
        if config is None or not _nothing_packed(inventory) or not _is_trunk_covered(inventory, config):
            return
    except CheckpointError:  # `_quantization` reports it
        return
    sections = [f"the key {'.'.join(each.keys)} from {each.file}" for each in config.sections]
    yield Finding(
        "quantization-unused", "error", _place(config),
        f"The config declares {config.method}, and no tensor of trunk or head is quantized: engines look for scales "
        "that do not exist, and fail or multiply by values that were never set.",
        f"A config without {'.'.join(config.sections[0].keys)}, as the weights are unquantized.",
        f"Remove {' and '.join(sections)}. If the weights were meant to be {config.method}, take the files of that "
        "release instead.",
    )  # fmt: skip


def _nothing_packed(inventory: Inventory) -> bool:
    """Whether trunk layers are stored, and all matrices of the checkpoint are unquantized."""
    tensors = inventory.checkpoint.tensors.values()
    return bool(inventory.layers) and not any(may_be_packed(info) for info in tensors if len(info.shape) > 1)


def _is_trunk_covered(inventory: Inventory, config: QuantConfig) -> bool:
    """Whether engines that follow the config build a stored matrix of the trunk's layers from quantized values."""
    if any(section.form in APPLIED_ON_LOAD for section in config.sections):
        return False
    matrices = (info.name for layer in inventory.layers.values() for info in layer.values() if _is_matrix(info))
    return any(config.covers(name.removesuffix(".weight")) for name in matrices)


def _place(config: QuantConfig) -> str:
    return ": ".join(filter(None, (config.sections[0].file, ".".join(config.sections[0].keys))))


def _built_plain(inventory: Inventory, parts: list[Part]) -> Iterator[Finding]:
    """Report quantized matrices that an engine builds unquantized, whatever the config says."""
    for role in sorted({part.role for part in parts if part.storage != "plain"}):
        names = [part.module for part in parts if part.role == role and part.storage != "plain"]
        stored = _describe(storage(inventory.checkpoint.tensors, names[0]) or "unknown")
        builders = [name for name, engine in inventory.family.engines.items() if role in engine.unquantized]
        if builders:
            yield Finding(
                "quantization", "error", names[0],
                f"The head stores {some(names)} {stored}; "
                f"{verb(builders, 'build')} the {role} unquantized, and would read it without its scales.",
                f"The {role} in bf16.", restore(inventory, force=True),
            )  # fmt: skip


def _scales(inventory: Inventory, parts: list[Part]) -> Iterator[Finding]:
    """Report fp8 matrices without a scale."""
    names = [part.module for part in parts if part.storage == "fp8-bare"]
    if names:
        scale = inventory.family.fp8.scale if inventory.family.fp8 else "weight_scale"
        yield Finding(
            "scale-missing", "error", f"{names[0]}.weight",
            f"The head stores {counted(len(names), 'matrix')}, such as {some(names)}, in fp8 without a scale.",
            f"{names[0]}.{scale} for each weight: without its scale it is off by orders of magnitude.",
            restore(inventory, force=True),
        )  # fmt: skip


def _precision_lower(inventory: Inventory, reference: LayerReference, bare: Collection[str]) -> Iterator[Finding]:
    """Report matrices of the head's block, but the `bare` ones, with fewer bits than the trunk's of the same path."""
    trunk = {path: max(map(_bits, forms.values())) for path, forms in reference.forms.items()}
    fewer: dict[tuple[int, int], list[str]] = defaultdict(list)
    for block in reference.of_head.values():
        for path, info in block.items():
            # Unquantized dtypes are not compared: programs save routers in fp32, with the same values.
            if info.name not in bare and len(info.shape) > 1 and 0 < _bits(info) < min(_NARROW, trunk.get(path, 0)):
                fewer[_bits(info), trunk[path]].append(info.name)
    for (bits, trunk_bits), names in fewer.items():
        yield Finding(
            "precision-lower", "warning", names[0],
            f"The head stores {counted(len(names), 'matrix')}, such as {some(names)}, in {bits} bits, the trunk in "
            f"{trunk_bits}.",
            f"The trunk's {trunk_bits} bits: fewer can cost the head its acceptance, without an error.",
            f"Measure the acceptance; if it is low, take the head of a release that stores it in {trunk_bits} bits, as "
            f"BASE: `{inventory.restore_command(force=True, base='BASE')}`.",
        )  # fmt: skip


def _precision_higher(reference: LayerReference) -> Iterator[Finding]:
    """Report a head whose matrices are mostly in fp32 where the trunk has 16 bits; a router alone is no finding."""
    trunk = {path: max(map(_bits, forms.values())) for path, forms in reference.forms.items()}
    pairs = [pair for block in reference.of_head.values() for pair in block.items() if len(pair[1].shape) > 1]
    wide = [info for path, info in pairs if info.dtype == "F32" and trunk.get(path) == _NARROW]
    if 2 * sum(info.nbytes for info in wide) > sum(info.nbytes for _, info in pairs):
        yield Finding(
            "precision-higher", "note", wide[0].name,
            f"The head stores {counted(len(wide), 'matrix')}, such as {some([info.name for info in wide])}, in fp32, "
            "the trunk in 16 bits: twice the bytes, and slower drafts in an engine that keeps them so.",
            "The trunk's dtype, to which most engines cast the head when they load it.",
            "Save the head in the trunk's dtype, as `nextn train` does; it works as it is.",
        )  # fmt: skip


def _mismatches(
    inventory: Inventory, config: QuantConfig | None, parts: list[Part]
) -> dict[tuple[bool, Storage, tuple[str, ...]], list[str]]:
    """Return (covered by the config, storage, engines) -> the head's matrices for which the two disagree.

    Engines are those that follow the config where another one builds the matrix unquantized anyway; empty: all do.
    What the config covers and the trunk also stores unquantized, engines are known to build so, such as small routers.
    """
    covers: Callable[[str], bool | None] = config.covers if config else lambda module: False
    mismatches: dict[tuple[bool, Storage, tuple[str, ...]], list[str]] = defaultdict(list)
    plain, tensors = _never_quantized(inventory, config), inventory.checkpoint.tensors
    builders = {name: _built_unquantized(inventory, name, config) for name in ("vllm", "sglang")
                if name in inventory.family.runners}  # fmt: skip
    # Of a method that nextn does not know, or of one that is `_unreadable` in the trunk, too.
    unclear = ("unknown", "fp8-bare") if config or inventory.trunk_codes else ("fp8-bare",)
    for part in parts:
        if part.role not in plain and part.storage not in unclear:
            covered = covers(part.module) and covers(part.asked)
            other = part.counterpart
            known = covered and other and storage(tensors, other) == "plain" and covers(other)
            by_files = config is not None and config.by_files and ".experts." not in part.module
            followers = tuple(
                name for name, roles in builders.items() if part.role not in roles and not (by_files and name == "vllm")
            )
            if covered and part.storage == "plain" and builders and not followers:
                continue
            if covered is not None and covered == (part.storage == "plain") and not known:
                some_only = followers if covered and len(followers) < len(builders) else ()
                mismatches[covered, part.storage, some_only].append(part.module)
    for covered, kind, failing in [*mismatches]:  # one cause, one finding
        if failing and (covered, kind, ()) in mismatches:
            mismatches[covered, kind, ()] += mismatches.pop((covered, kind, failing))
    return mismatches


def _built_unquantized(inventory: Inventory, engine: str, config: QuantConfig | None) -> tuple[str, ...]:
    """Return the roles that an engine builds unquantized in this checkpoint, whatever the config says."""
    name = inventory.family.name
    roles: tuple[str, ...] = ("projection",) if name in PLAIN_PROJECTION[engine] else ()
    if config is not None and any(_is_nvfp4(section) for section in config.sections):
        roles += PLAIN_IN_NVFP4[engine].get(name, ())
    return roles


def _is_nvfp4(section: QuantSection) -> bool:
    """Whether it is ModelOpt's, in NVFP4 or mixed with it."""
    algorithm = str(section.format.section.get("quant_algo")).upper()
    return section.form.startswith("modelopt") and algorithm in ("NVFP4", "MIXED_PRECISION")


def _never_quantized(inventory: Inventory, config: QuantConfig | None) -> set[str]:
    """Return the roles of copies, and those that the family's fp8 release keeps unquantized."""
    family = inventory.family
    roles = {*family.copies, *family.own}
    return roles | set(family.fp8.unquantized if family.fp8 and config and config.method == "fp8" else ())


def _parts(inventory: Inventory, reference: LayerReference) -> list[Part]:
    tensors = inventory.checkpoint.tensors
    trunk = {path: next(iter(forms.values())).name for path, forms in reference.forms.items()}
    like = {info.name: trunk.get(path, "") for block in reference.of_head.values() for path, info in block.items()}
    parts: dict[str, Part] = {}
    for canonical, name in inventory.stored.items():
        if inventory.role(canonical) in inventory.family.orders:
            continue  # integers in every form of the checkpoint
        module = split_name(name, tensors)[0]
        kind, asked = storage(tensors, module), _asked(inventory, canonical)
        if kind is not None and (kind != "plain" or asked or _is_matrix(tensors.get(f"{module}.weight"))):
            same = split_name(like.get(name, ""), tensors)[0]
            parts.setdefault(module, Part(module, inventory.role(canonical), kind, same, asked or module))
    return list(parts.values())


def _asked(inventory: Inventory, canonical: str) -> str:
    """Return the name under which vLLM looks up fused experts in a config (`get_moe_method`); "" for others."""
    path = expert_path(canonical)
    if path is None or path.form != "fused":
        return ""
    return inventory.published(path.of_expert(0, path.halves[0])).removesuffix(".weight")


def _is_matrix(info: TensorInfo | None) -> bool:
    return info is not None and len(info.shape) == 2


def _bits(info: TensorInfo) -> int:
    """Return the bits per value; 0 for packed integers, whose dtype does not show it."""
    return DTYPES[info.dtype] if info.dtype in PLAIN or info.dtype.startswith(("F8", "I8")) else 0


def _describe(kind: Storage) -> str:
    return {"plain": "unquantized", "unknown": "as integers"}.get(kind, f"as {kind}")


RULES = (precision,)
