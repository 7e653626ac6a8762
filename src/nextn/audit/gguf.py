"""The same questions of a GGUF file: metadata against tensors, the appended blocks, copies, precision, gains.

llama.cpp keeps a head in blocks behind the trunk's: `blk.N.nextn.*` beside the block's own tensors, and counts them in
`block_count`. Its names carry no family, so that the row is found by the architecture.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nextn.audit import Report
from nextn.audit.finding import SEVERITIES, Finding, Severity
from nextn.audit.gains import Norm, shifts
from nextn.audit.gguf_file import GgufFile, GgufTensor, bits
from nextn.audit.values import gain_finding, unusable, zero_or_constant
from nextn.errors import CheckpointError
from nextn.families import Engine, Family, rows
from nextn.words import counted, some

# Role in `blk.N.nextn.<part>`; every graph reads the first three.
PARTS = {"eh_proj": "projection", "enorm": "token_norm", "hnorm": "hidden_norm", "shared_head_norm": "final_norm",
         "embed_tokens": "embedding", "shared_head_head": "output"}  # fmt: skip
NEEDED = ("eh_proj", "enorm", "hnorm")
TRUNK = {"embed_tokens": "token_embd.weight", "shared_head_head": "output.weight"}
# Architectures whose row cites the converter, as the head is not in the usual GGUF, or whose file several families use.
_ROWS = {"deepseek4": "deepseek_v4", "deepseek2": "glm4_moe_lite"}
_MAX_BLOCKS = 10_000
# At 4 bits heads kept 0 to 4 % of their drafts, at 8 bits 39 to 59 % (colibri#8); one of Q6_K kept none (GSQ#11).
FEW_BITS, SAFE_BITS = 5.0, 8.0
LAYERS = 4
CONVERT = "Convert the model again with llama.cpp's convert_hf_to_gguf.py, from a checkpoint that `nextn audit` passes."


@dataclass(frozen=True)
class Gguf:
    """blocks: index -> rest of the name -> tensor. promised: indices of the blocks that the metadata gives the head."""

    file: GgufFile
    arch: str
    row: Family | None
    promised: range
    blocks: Mapping[int, Mapping[str, GgufTensor]] = field(repr=False)

    @classmethod
    def of(cls, file: GgufFile) -> "Gguf":
        arch = file.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise CheckpointError(f"{file.path}: general.architecture is {arch!r}, it must be a name. {CONVERT}")
        count, modules = _count(file, f"{arch}.block_count"), _count(file, f"{arch}.nextn_predict_layers", default=0)
        if modules > count:
            raise CheckpointError(f"{file.path}: {arch}.nextn_predict_layers is {modules} of {count} blocks. {CONVERT}")
        blocks: dict[int, dict[str, GgufTensor]] = defaultdict(dict)
        for name, tensor in file.tensors.items():
            if found := re.fullmatch(r"blk\.(\d{1,6})\.(.+)", name):
                blocks[int(found[1])][found[2]] = tensor
        return cls(file, arch, _row(arch), range(count - modules, count), blocks)

    @property
    def heads(self) -> tuple[int, ...]:
        """Blocks that hold any tensor of a head's own."""
        return tuple(sorted(index for index, block in self.blocks.items() if any(map(_is_own, block))))

    @property
    def trunk(self) -> tuple[int, ...]:
        """The other blocks, last first."""
        return tuple(sorted(self.blocks.keys() - set(self.heads) - set(self.promised), reverse=True))

    @property
    def engine(self) -> Engine | None:
        return self.row.engines["llamacpp"] if self.row else None


def audit_gguf(path: Path) -> Report:
    """Judge a GGUF file; one file of a split model stands for all. Modules count from 0, as everywhere.

    Raises ConfigError without the gguf package, CheckpointError for a file that is damaged or says too little.
    """
    gguf = Gguf.of(GgufFile.open(path))
    rules = (_promise, _parts, _block, _copies, _precision, _values, _engine)
    found = [finding for rule in rules for finding in rule(gguf)]
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    family = gguf.row.name if gguf.row else gguf.arch
    modules = tuple(index - gguf.promised.start for index in gguf.heads)
    return Report(str(path), family, len(gguf.promised), modules, tuple(found))


def _count(file: GgufFile, key: str, *, default: int | None = None) -> int:
    value = file.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_BLOCKS:
        raise CheckpointError(f"{file.path}: {key} is {value!r}, it must be a whole number to {_MAX_BLOCKS}. {CONVERT}")
    return value


def _row(arch: str) -> Family | None:
    """By llama.cpp's source file of the row, which is called as the architecture is."""
    for row in rows():
        stem = Path(row.engines["llamacpp"].source).stem
        if row.name == _ROWS.get(arch) or (stem and re.sub(r"[-_]", "", stem) == re.sub(r"[-_]", "", arch)):
            return row
    return None


def _is_own(rest: str) -> bool:
    return rest.startswith("nextn.")


def _places(indices: Iterable[int]) -> str:
    return some([f"blk.{index}" for index in sorted(indices)])


def _promise(gguf: Gguf) -> Iterator[Finding]:
    key = f"{gguf.arch}.nextn_predict_layers"
    promised, heads = set(gguf.promised), set(gguf.heads)
    count, where = counted(len(promised), "module"), f"blk.N.nextn.* in {_places(promised)}."
    if heads and not promised:
        yield Finding(
            "head-unpromised", "error", key,
            f"A head in {_places(heads)}, and no count of modules: llama.cpp takes its blocks for the trunk's.",
            f"{key} = {len(heads)}.", CONVERT,
        )  # fmt: skip
    elif promised and not heads:
        gone = [index for index in promised if not gguf.blocks.get(index)]
        more = f" {_places(gone)} absent as a whole, so that llama.cpp does not load the file." if gone else ""
        yield Finding(
            "head-absent", "error", key, f"{count} promised, none stored.{more}", where,
            f"Run `nextn restore` on the checkpoint first. {CONVERT}",
        )  # fmt: skip
    elif heads - promised:
        found = f"A head in {_places(heads - promised)}, of {gguf.promised.stop} blocks with {count} promised."
        yield Finding("head-elsewhere", "error", _places(heads - promised), found, where, CONVERT)
    elif promised - heads:
        found = f"{count} promised, {len(heads)} stored."
        yield Finding("modules-missing", "error", _places(promised - heads), found, where, CONVERT)


def _parts(gguf: Gguf) -> Iterator[Finding]:
    for index in gguf.heads:
        lacking = [f"blk.{index}.nextn.{part}" for part in NEEDED if f"nextn.{part}.weight" not in gguf.blocks[index]]
        if lacking:
            found = f"{counted(len(lacking), 'tensor')} of the head absent: llama.cpp does not load the file."
            yield Finding("head-partial", "error", some(lacking), found, f"{', '.join(NEEDED)}.", CONVERT)
        final = gguf.row is not None and "final_norm" in gguf.row.names
        if final and not {"nextn.shared_head_norm.weight", "layer_output_norm.weight"} & gguf.blocks[index].keys():
            yield Finding(
                "head-partial", "note", f"blk.{index}.nextn.shared_head_norm",
                "No final norm of the head's own: llama.cpp takes the trunk's, or does not load the file.",
                "The norm that checkpoints of the family store.", CONVERT,
            )  # fmt: skip


def _block(gguf: Gguf) -> Iterator[Finding]:
    """The decoder block that belongs to a head, against the trunk's block that is most like it (llama.cpp#24737)."""
    for index in sorted({*gguf.heads, *gguf.promised} if gguf.heads else ()):
        mine = {rest for rest in gguf.blocks.get(index, {}) if not _is_own(rest)}
        like = max((set(gguf.blocks[each]) for each in gguf.trunk), key=lambda block: len(block & mine), default=set())
        lacking = sorted({rest for rest in like if rest.startswith("attn_")} - mine)
        if lacking:
            yield Finding(
                "head-partial", "error" if "attn_norm.weight" in lacking else "warning",
                some([f"blk.{index}.{rest}" for rest in lacking]),
                f"{counted(len(lacking), 'tensor')} of the head's block absent, which blocks of the trunk have.",
                "A whole decoder block beside nextn.*.", f"Run `nextn restore` on the checkpoint first. {CONVERT}",
            )  # fmt: skip


def _copies(gguf: Gguf) -> Iterator[Finding]:
    """llama.cpp uses the head's embedding and output head where the file holds them, else the trunk's."""
    for index in gguf.heads:
        for part, trunk in TRUNK.items():
            copy = gguf.blocks[index].get(f"nextn.{part}.weight")
            original = gguf.file.tensors.get(trunk) or gguf.file.tensors.get(TRUNK["embed_tokens"])
            if copy is None or original is None or (gguf.row is not None and PARTS[part] in gguf.row.own):
                continue
            differs = copy.shape != original.shape or not _alike(copy, original)
            if differs or copy.kind != original.kind:
                what = "Other numbers than" if differs else f"{copy.kind.name}, not the {original.kind.name} of"
                yield Finding(
                    "copy-differs", "warning" if differs else "note", copy.name,
                    f"{what} {original.name}: llama.cpp drafts with the copy, other engines with the trunk's.",
                    f"No copy, or one of {original.name}.", CONVERT,
                )  # fmt: skip


def _alike(one: GgufTensor, other: GgufTensor) -> bool:
    """Whether the middle rows agree as well as two quantisations do; unknown ones pass."""
    if one.kind == other.kind:
        return one.middle() == other.middle()
    ours, theirs = one.values(), other.values()
    if ours is None or theirs is None or not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return True
    return bool(np.linalg.norm(ours - theirs) <= 0.5 * np.linalg.norm(theirs))


def _precision(gguf: Gguf) -> Iterator[Finding]:
    few: dict[Severity, list[GgufTensor]] = defaultdict(list)
    for index in gguf.heads:
        projection = gguf.blocks[index].get("nextn.eh_proj.weight")
        if projection is not None and bits(projection) < SAFE_BITS:
            few["warning" if bits(projection) < FEW_BITS else "note"].append(projection)
    for severity, tensors in few.items():
        kinds = ", ".join(sorted({each.kind.name for each in tensors}))
        yield Finding(
            "precision-lower", severity, some([each.name for each in tensors]),
            f"The projection in {kinds}, {min(map(bits, tensors)):.1f} bits a weight: heads of 4 bits have kept 0 "
            "to 4 % of their drafts.", "Q8_0 or more.",
            "Quantise again, with `llama-quantize --tensor-type nextn.eh_proj=q8_0`.",
        )  # fmt: skip


def _values(gguf: Gguf) -> Iterator[Finding]:
    """The converter adds 1 where the family stores w for 1 + w: gains in a GGUF multiply as they are."""
    head = {name: norm for index in gguf.heads for name, norm in _head_norms(gguf, index)}
    kinds = {norm.kind for norm in head.values()}
    trunk = {name: norm for name, norm in _trunk_norms(gguf) if norm.kind in kinds}
    mend = f"{CONVERT} Where the family stores w for 1 + w, it adds 1 once, to head and trunk."
    zero_centred = gguf.row is not None and gguf.row.gain == "1+w"
    for shift in shifts(head, trunk, zero_centred=zero_centred):
        yield gain_finding(shift, convention="w", mend=mend)
    projections = {
        tensor.name: array
        for index in gguf.heads
        if (tensor := gguf.blocks[index].get("nextn.eh_proj.weight")) and (array := tensor.values()) is not None
    }
    yield from unusable({name: norm.gains for name, norm in head.items()} | projections, CONVERT)
    yield from zero_or_constant(head, projections, vital=projections, mend=CONVERT)


def _head_norms(gguf: Gguf, index: int) -> Iterator[tuple[str, Norm]]:
    for rest, tensor in gguf.blocks[index].items():
        gains = _gains(tensor)
        if gains is not None:
            kind = {"nextn.shared_head_norm.weight": "final"}.get(rest, "" if _is_own(rest) else rest)
            yield tensor.name, Norm(gains, kind)


def _trunk_norms(gguf: Gguf) -> Iterator[tuple[str, Norm]]:
    near: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
    for index in gguf.trunk:
        for rest, tensor in gguf.blocks[index].items():
            if len(near[rest]) < LAYERS and (gains := _gains(tensor)) is not None:
                near[rest].append(gains)
    yield from ((f"blk.*.{rest}", Norm(np.concatenate(several), rest)) for rest, several in near.items() if several)
    final = gguf.file.tensors.get("output_norm.weight")
    if final is not None and (gains := _gains(final)) is not None:
        yield final.name, Norm(gains, "final")


def _gains(tensor: GgufTensor) -> NDArray[np.float64] | None:
    is_norm = tensor.name.endswith("norm.weight") and len(tensor.shape) == 1 and "indexer" not in tensor.name
    return tensor.values() if is_norm else None


def _engine(gguf: Gguf) -> Iterator[Finding]:
    if not gguf.heads or (gguf.engine is not None and gguf.engine.support == "runs"):
        return
    if gguf.engine is None:
        yield Finding(
            "engine-absent", "note", "general.architecture",
            f"No family known by the architecture {gguf.arch[:80]!r}: judged by names alone.",
            "An architecture whose head llama.cpp runs.", "See whether your engine runs this one.",
        )  # fmt: skip
        return
    notes = "".join(f" ({note})" for note in gguf.engine.notes)
    yield Finding(
        "engine-drops" if gguf.engine.support == "drops" else "engine-loads", "warning", "general.architecture",
        f"llama.cpp has no graph for the head of {gguf.arch}{notes}: it takes up room and drafts nothing.",
        "An architecture whose head llama.cpp runs.", "Serve the safetensors with another engine.",
    )  # fmt: skip
