"""How the head is stored against what the quantisation config says of it, what engines build, and the trunk.

Goes by names, dtypes and shapes; what quantised numbers are worth only a measurement tells.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nextn.audit.blocks import Blocks
from nextn.audit.finding import Finding, Severity
from nextn.audit.words import restore, verb
from nextn.checkpoints.checkpoint import CONFIG
from nextn.checkpoints.inventory import Inventory
from nextn.checkpoints.quantisation import Quantisation
from nextn.checkpoints.storage import PLAIN, Storage, split_name, storage
from nextn.checkpoints.tensor_file import DTYPES, TensorInfo
from nextn.errors import CheckpointError
from nextn.words import counted, some

IDS = ("quantisation", "scale-missing", "precision-lower")
_NARROW = 16  # bits: below, a trunk's precision has been known to ruin a head


@dataclass(frozen=True)
class Part:
    """A matrix of the head: its module's name, role, how it is stored, and the trunk's module of the same path."""

    module: str
    role: str
    kind: Storage
    like: str


def precision(inventory: Inventory) -> Iterator[Finding]:
    """Every rule that looks at how the head's matrices are stored."""
    blocks = Blocks(inventory)
    parts = _parts(inventory, blocks)
    yield from _quantisation(inventory, parts)
    yield from _built_plain(inventory, parts)
    yield from _scale_missing(inventory, parts)
    yield from _precision_lower(inventory, blocks)


def _quantisation(inventory: Inventory, parts: list[Part]) -> Iterator[Finding]:
    """The quantisation config covers matrices of the head that are stored unquantised, or the reverse."""
    try:
        said = Quantisation.of(inventory.checkpoint)
        wrong = _wrong(inventory, said, parts)
    except CheckpointError as error:
        yield Finding(
            "quantisation", "error", f"{CONFIG}: quantization_config", f"{error}",
            "A section that engines can read.", "Take the quantisation config of the model's own release.",
        )  # fmt: skip
        return
    place = f"{said.places[0].file}: {'.'.join(said.places[0].keys)}" if said else f"{CONFIG}: quantization_config"
    method = said.method if said else "no quantisation"
    for (covered, kind), names in wrong.items():
        claim = "quantised" if covered else "unquantised"
        effect = "find no scales, and fail or draft noise" if covered else "read packed numbers without their scales"
        yield Finding(
            "quantisation", "error", place,
            f"The head stores {counted(len(names), 'matrix')}, such as {some(names)}, {_told(kind)}, and the config "
            f"({method}) has engines build them {claim}: they {effect}.",
            f"The head in the list of what is not converted ({method})." if covered else f"A config that says {kind}.",
            restore(inventory, whole=True),
        )  # fmt: skip


def _built_plain(inventory: Inventory, parts: list[Part]) -> Iterator[Finding]:
    """A quantised matrix that an engine builds unquantised, whatever the config says."""
    for role in sorted({part.role for part in parts if part.kind != "plain"}):
        names = [part.module for part in parts if part.role == role and part.kind != "plain"]
        builders = [name for name, engine in inventory.family.engines.items() if role in engine.plain]
        if builders:
            yield Finding(
                "quantisation", "error", names[0],
                f"The head stores {some(names)} {_told(storage(inventory.checkpoint.tensors, names[0]) or 'unknown')}; "
                f"{verb(builders, 'build')} the {role} unquantised, and would read it without its scales.",
                f"The {role} in bf16.", restore(inventory, whole=True),
            )  # fmt: skip


def _scale_missing(inventory: Inventory, parts: list[Part]) -> Iterator[Finding]:
    """fp8 numbers without the scale that they are to be multiplied by."""
    names = [part.module for part in parts if part.kind == "fp8-bare"]
    if names:
        beside = inventory.family.fp8.scale if inventory.family.fp8 else "weight_scale"
        yield Finding(
            "scale-missing", "error", f"{names[0]}.weight",
            f"The head stores {counted(len(names), 'matrix')}, such as {some(names)}, in fp8 without a scale.",
            f"{names[0]}.{beside} beside each weight: the numbers alone are off by orders of magnitude.",
            restore(inventory, whole=True),
        )  # fmt: skip


def _precision_lower(inventory: Inventory, blocks: Blocks) -> Iterator[Finding]:
    """The head's block in fewer bits than the same matrices of the trunk."""
    trunk = {path: max(map(_bits, forms.values())) for path, forms in blocks.forms.items()}
    fewer: dict[tuple[int, int], list[str]] = defaultdict(list)
    for block in blocks.of_head.values():
        for path, info in block.items():
            if len(info.shape) > 1 and 0 < _bits(info) < trunk.get(path, 0):
                fewer[_bits(info), trunk[path]].append(info.name)
    for (bits, whole), names in fewer.items():
        severity: Severity = "warning" if bits < _NARROW else "note"
        yield Finding(
            "precision-lower", severity, names[0],
            f"The head stores {counted(len(names), 'matrix')}, such as {some(names)}, in {bits} bits, the trunk in "
            f"{whole}.",
            f"The trunk's {whole} bits: a head that is quantised too hard loses its acceptance, with no error.",
            f"Measure the acceptance; if it is low, run `{restore(inventory, whole=True)}`.",
        )  # fmt: skip


def _wrong(inventory: Inventory, said: Quantisation | None, parts: list[Part]) -> dict[tuple[bool, Storage], list[str]]:
    """(what the config says, how it is stored) -> the head's matrices for which the two do not agree.

    What the config covers and the trunk, too, stores unquantised, engines are known to build so, as small routers.
    """
    covers: Callable[[str], bool | None] = said.covers if said else lambda module: False
    wrong: dict[tuple[bool, Storage], list[str]] = defaultdict(list)
    plain, tensors = _never_quantised(inventory, said), inventory.checkpoint.tensors
    for part in parts:
        if part.role not in plain and part.kind not in ("unknown", "fp8-bare"):
            covered = covers(part.module)
            known = covered and part.like and storage(tensors, part.like) == "plain" and covers(part.like)
            if covered is not None and covered == (part.kind == "plain") and not known:
                wrong[covered, part.kind].append(part.module)
    return wrong


def _never_quantised(inventory: Inventory, said: Quantisation | None) -> set[str]:
    """Roles that are unquantised whatever the config says: by an engine that builds them so, or in the fp8 release."""
    family = inventory.family
    roles = {role for engine in family.engines.values() for role in engine.plain} | set(family.copies) | set(family.own)
    return roles | set(family.fp8.plain if family.fp8 and said and said.method == "fp8" else ())


def _parts(inventory: Inventory, blocks: Blocks) -> list[Part]:
    """Every matrix of the head."""
    tensors = inventory.checkpoint.tensors
    trunk = {path: next(iter(forms.values())).name for path, forms in blocks.forms.items()}
    like = {info.name: trunk.get(path, "") for block in blocks.of_head.values() for path, info in block.items()}
    parts: dict[str, Part] = {}
    for canonical, name in inventory.stored.items():
        module = split_name(name, tensors)[0]
        kind = storage(tensors, module)
        if kind is not None and (kind != "plain" or _is_matrix(tensors.get(f"{module}.weight"))):
            same = split_name(like.get(name, ""), tensors)[0]
            parts.setdefault(module, Part(module, inventory.role(canonical), kind, same))
    return list(parts.values())


def _is_matrix(info: TensorInfo | None) -> bool:
    return info is not None and len(info.shape) == 2


def _bits(info: TensorInfo) -> int:
    """Of one number, where the dtype tells; packed integers do not."""
    return DTYPES[info.dtype] if info.dtype in PLAIN or info.dtype.startswith(("F8", "I8")) else 0


def _told(kind: Storage) -> str:
    return "unquantised" if kind == "plain" else f"as {kind}"


RULES = (precision,)
