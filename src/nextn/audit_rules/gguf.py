"""Audit a GGUF file: metadata against tensors, the appended blocks, copies, precision, norm weights.

llama.cpp stores a head in blocks after the trunk's: `blk.N.nextn.*` next to the block's own tensors, included in
`block_count`. Its names do not carry the family, so the row is looked up by architecture.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from nextn.audit_rules.absent_head import no_head
from nextn.audit_rules.findings import CONVERT, SEVERITIES, AuditReport, Finding, Severity
from nextn.audit_rules.norm_weights import NormValues, Values, shifts
from nextn.audit_rules.values import nonfinite_or_garbage, norm_shift_finding, zero_or_constant
from nextn.checkpoint.draft_models import in_gguf
from nextn.checkpoint.gguf_file import GgufFile, GgufTensor, bits, readable_kinds
from nextn.checkpoint.head_inventory import HEADLIKE
from nextn.checkpoint.provenance import evenly_spaced
from nextn.edit.gguf_layout import HEAD, is_read
from nextn.errors import CheckpointError
from nextn.family_table import EngineSupport, Family, rows
from nextn.text_format import counted, some

# `blk.N.nextn.<part>` -> role; every graph reads NEEDED.
PARTS = {part: role for role, part in HEAD.items()}
_COPIED = ("embed_tokens", "shared_head_head")
NEEDED = ("eh_proj", "enorm", "hnorm")
TRUNK = {"embed_tokens": "token_embd.weight", "shared_head_head": "output.weight"}
# Architectures whose row cites the converter (the usual GGUF has no head), or whose file several families use.
_ROWS = {"deepseek4": "deepseek_v4", "deepseek2": "glm4_moe_lite"}
_MAX_BLOCKS = 10_000
# Below: llama-imatrix never runs the head, so that its block is quantized without weights (llama.cpp#23476).
FEW_BITS = 4.0
ENOUGH = 8.5  # bits per weight of Q8_0
MUCH_LESS = 0.75  # of the trunk's bits per weight
# What llama.cpp's converter leaves out with --no-mtp, or does not find in a fine-tune that lost it.
_PUBLISHED_HEAD = (
    "Models of this architecture, if not all, are published with a head. To draft, use a file that holds it, or one of "
    "the head alone beside this one (--spec-draft-model). llama.cpp's convert_hf_to_gguf.py writes both from a "
    "checkpoint that has the head; to a fine-tune, `nextn restore` gives it back."
)
_ORIGINAL = (
    "To draft, make a head for the safetensors checkpoint that the file was converted from: `nextn train RUN --from "
    "MODEL --freeze-trunk --init-head`."
)
# Lists with an entry for each block, after `<architecture>.`.
_LISTS = (
    "attention.head_count", "attention.head_count_kv", "attention.recurrent_layers", "expert_feed_forward_length",
    "feed_forward_length",
)  # fmt: skip
LAYERS_PER_NORM = 4
MATRICES = 48  # of the head, of which some rows are read


@dataclass(frozen=True)
class GgufHead:
    """One GGUF file, seen as trunk and head."""

    file: GgufFile
    arch: str
    row: Family | None
    declared: range  # indices of the blocks that the metadata declares as the head's
    blocks: Mapping[int, Mapping[str, GgufTensor]] = field(repr=False)  # index -> rest of the name -> tensor

    @classmethod
    def of(cls, file: GgufFile) -> "GgufHead":
        arch = file.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise CheckpointError(f"{file.path}: general.architecture is {arch!r}, it must be a name. {CONVERT}")
        if not file.tensors:
            raise CheckpointError(f"{file.path}: it holds no tensor, as a vocabulary alone. Give the model's own file.")
        if (found := in_gguf(arch)) is not None:
            raise CheckpointError(f"{file.path}: {found.sentence}")
        count, modules = _count(file, f"{arch}.block_count"), _count(file, f"{arch}.nextn_predict_layers", default=0)
        if modules > count:
            raise CheckpointError(f"{file.path}: {arch}.nextn_predict_layers is {modules} of {count} blocks. {CONVERT}")
        blocks: dict[int, dict[str, GgufTensor]] = defaultdict(dict)
        for name, tensor in file.tensors.items():
            if match := re.fullmatch(r"blk\.(\d{1,6})\.(.+)", name):
                blocks[int(match[1])][match[2]] = tensor
        return cls(file, arch, _row(arch), range(count - modules, count), blocks)

    @property
    def heads(self) -> tuple[int, ...]:
        """The blocks that hold any `nextn.*` tensor."""
        return tuple(sorted(index for index, block in self.blocks.items() if any(map(_is_own, block))))

    @property
    def draft_map(self) -> GgufTensor | None:
        """The tensor with the vocabulary's number of each draft token, of a head that drafts a part of it."""
        return next((info for name, info in self.file.tensors.items() if "d2t" in name.split(".")), None)

    @property
    def trunk(self) -> tuple[int, ...]:
        """The other blocks, last first."""
        return tuple(sorted(self.blocks.keys() - set(self.heads) - set(self.declared), reverse=True))

    @property
    def is_read(self) -> bool:
        """Whether nextn decodes, measures and trains with the model of this file."""
        return is_read(self.arch, self.file.metadata)

    @property
    def engine(self) -> EngineSupport | None:
        return self.row.engines["llamacpp"] if self.row else None


def audit_gguf(path: Path) -> AuditReport:
    """Audit a GGUF file, or a split model by any one of its files.

    Raises ConfigError without the gguf package, CheckpointError for a file that is damaged or lacks metadata.
    """
    gguf = GgufHead.of(GgufFile.open(path))
    rules = (_declaration, _unknown, _lists, _sections, _experts, _parts, _block, _copies, _precision, _values, _engine)
    findings = [finding for rule in rules for finding in rule(gguf)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    family = gguf.row.name if gguf.row else gguf.arch
    modules = tuple(index - gguf.declared.start for index in gguf.heads)
    return AuditReport(
        str(path), family, len(gguf.declared), modules, tuple(findings), unchecked=tuple(_unchecked(gguf))
    )


def _unknown(gguf: GgufHead) -> Iterator[Finding]:
    """Report tensors like a head's outside the blocks, such as forks write."""
    if names := _foreign_names(gguf):
        yield Finding(
            "names-unknown", "warning", names[0],
            f"{counted(len(names), 'tensor')} like a head's under names that llama.cpp does not read: {some(names)}.",
            "blk.N.nextn.*, behind the trunk's blocks.",
            f"Serve the file with the fork that wrote it, or {CONVERT[0].lower()}{CONVERT[1:]}",
        )  # fmt: skip


def _foreign_names(gguf: GgufHead) -> list[str]:
    return [name for name in gguf.file.tensors if HEADLIKE.search(name) and not name.startswith("blk.")]


def _unchecked(gguf: GgufHead) -> Iterator[str]:
    """Yield what of the file no rule looks at, each without a period."""
    if not gguf.trunk:
        yield "the trunk, of which the file holds no block"
    if "token_embd.weight" not in gguf.file.tensors:
        yield (
            "embedding and output, which the file lacks: llama.cpp takes them from the model given with -m, if it is "
            "new enough, and this file is given with --spec-draft-model"
        )
    if not gguf.is_read:
        yield f"what the model computes: nextn decodes no GGUF file of {gguf.arch[:80]!r}, only its safetensors"
    if gguf.heads and gguf.row is None:
        yield f"what the head of {gguf.arch[:80]!r} should hold, and how it computes: no family is known"
    kinds = {tensor.kind for index in gguf.heads for tensor in gguf.blocks[index].values()}
    if unread := sorted(kind.name for kind in kinds - set(readable_kinds())):
        yield f"the head's values in {', '.join(unread)}, which the gguf package does not decode"


def _count(file: GgufFile, key: str, *, default: int | None = None) -> int:
    value = file.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_BLOCKS:
        raise CheckpointError(f"{file.path}: {key} is {value!r}, it must be a whole number to {_MAX_BLOCKS}. {CONVERT}")
    return value


def _row(arch: str) -> Family | None:
    """Find the row by the llama.cpp source file it cites, which is named after the architecture."""
    for row in rows():
        stem = Path(row.engines["llamacpp"].source).stem
        if row.name == _ROWS.get(arch) or (stem and re.sub(r"[-_]", "", stem) == re.sub(r"[-_]", "", arch)):
            return row
    return None


def _is_own(rest: str) -> bool:
    return rest.startswith("nextn.")


def _block_names(indices: Iterable[int]) -> str:
    return some([f"blk.{index}" for index in sorted(indices)])


def _declaration(gguf: GgufHead) -> Iterator[Finding]:
    key = f"{gguf.arch}.nextn_predict_layers"
    declared, heads = set(gguf.declared), set(gguf.heads)
    count, where = counted(len(declared), "MTP layer"), f"blk.N.nextn.* in {_block_names(declared)}."
    if heads and not declared:
        yield Finding(
            "head-undeclared", "error", key,
            f"A head in {_block_names(heads)}, and no count of MTP layers: llama.cpp treats its blocks as the trunk's.",
            f"{key} = {len(heads)}.", CONVERT,
        )  # fmt: skip
    elif declared and not heads:
        empty = [index for index in declared if not gguf.blocks.get(index)]
        more, instead = f"{_block_names(empty)} has no tensor at all, so llama.cpp does not load the file", ""
        if not empty:
            more = f"llama.cpp leaves {_block_names(declared)} out of the trunk, as the head's"
            instead = f" If it is a layer of the trunk: set {key} to 0, with the gguf package's gguf_set_metadata."
        yield Finding(
            "head-absent", "error", key, f"{count} declared, none stored: {more}.", where,
            f"Run `nextn restore` on the checkpoint first. {CONVERT}{instead}",
        )  # fmt: skip
    elif heads - declared:
        place = _block_names(heads - declared)
        found = f"A head in {place}, of {gguf.declared.stop} blocks with {count} declared."
        yield Finding("head-elsewhere", "error", place, found, where, CONVERT)
    elif declared - heads:
        found = f"{count} declared, {len(heads)} stored."
        yield Finding("modules-missing", "error", _block_names(declared - heads), found, where, CONVERT)


def _lists(gguf: GgufHead) -> Iterator[Finding]:
    """Report lists that are not as long as the model is deep, as llama-quantize --prune-layers leaves them."""
    for key in (f"{gguf.arch}.{each}" for each in _LISTS):
        length = gguf.file.metadata.get(f"{key}[]", gguf.declared.stop)
        if length != gguf.declared.stop:
            yield Finding(
                "config-contradicts", "error", key,
                f"A list of {length} blocks in a file of {gguf.declared.stop}: llama.cpp does not load the file.",
                "An entry for each block.", f"Remove the layers in the checkpoint. {CONVERT}",
            )  # fmt: skip


def _sections(gguf: GgufHead) -> Iterator[Finding]:
    """Report sections of rotary embeddings that are not four, as exports of Ollama have them (llama.cpp#25334)."""
    key = f"{gguf.arch}.rope.dimension_sections"
    if (length := gguf.file.metadata.get(f"{key}[]", 4)) != 4:
        yield Finding(
            "config-contradicts", "error", key, f"A list of {length} sections: llama.cpp does not load the file.",
            "Four sections, the last of which may be 0.", CONVERT,
        )  # fmt: skip


def _experts(gguf: GgufHead) -> Iterator[Finding]:
    """Report groups of one expert: llama-model.cpp:1365 asserts that there are fewer groups than experts."""
    key = f"{gguf.arch}.expert_group_count"
    count, groups = (_count(gguf.file, each, default=0) for each in (f"{gguf.arch}.expert_count", key))
    if 0 < count <= groups:
        yield Finding(
            "single-expert", "error", key,
            f"{counted(count, 'routed expert')} in {counted(groups, 'group')}: llama.cpp does not load the file.",
            "At least two experts in each group.", f"Give the model more experts than groups. {CONVERT}",
        )  # fmt: skip


def _parts(gguf: GgufHead) -> Iterator[Finding]:
    for index in gguf.heads:
        lacking = [f"blk.{index}.nextn.{part}" for part in NEEDED if f"nextn.{part}.weight" not in gguf.blocks[index]]
        if lacking:
            found = f"{counted(len(lacking), 'tensor')} of the head missing: llama.cpp does not load the file."
            yield Finding("head-partial", "error", some(lacking), found, f"{', '.join(NEEDED)}.", CONVERT)
        final = gguf.row is not None and "final_norm" in gguf.row.names
        if final and not {"nextn.shared_head_norm.weight", "layer_output_norm.weight"} & gguf.blocks[index].keys():
            yield Finding(
                "head-partial", "note", f"blk.{index}.nextn.shared_head_norm",
                "The head has no final norm: llama.cpp uses the trunk's, or does not load the file.",
                "The final norm that checkpoints of the family store.", CONVERT,
            )  # fmt: skip


def _block(gguf: GgufHead) -> Iterator[Finding]:
    """Compare the head's decoder block with the most similar block of the trunk (llama.cpp#24737)."""
    for index in sorted({*gguf.heads, *gguf.declared} if gguf.heads else ()):
        block = {rest for rest in gguf.blocks.get(index, {}) if not _is_own(rest)}
        trunk = max(
            (set(gguf.blocks[each]) for each in gguf.trunk), key=lambda other: len(other & block), default=set()
        )
        lacking = sorted({rest for rest in trunk if rest.startswith("attn_")} - block)
        if lacking:
            yield Finding(
                "head-partial", "error" if "attn_norm.weight" in lacking else "warning",
                some([f"blk.{index}.{rest}" for rest in lacking]),
                f"{counted(len(lacking), 'tensor')} of the head's block missing that the trunk's blocks have.",
                "A complete decoder block next to nextn.*.", f"Run `nextn restore` on the checkpoint first. {CONVERT}",
            )  # fmt: skip


def _copies(gguf: GgufHead) -> Iterator[Finding]:
    """Report copies that differ: llama.cpp uses the head's embedding and lm_head where stored, else the trunk's."""
    if gguf.draft_map is not None:
        yield _reduced(gguf, gguf.draft_map)
    for index in gguf.heads:
        for part, trunk in TRUNK.items() if gguf.draft_map is None else ():
            copy = gguf.blocks[index].get(f"nextn.{part}.weight")
            original = gguf.file.tensors.get(trunk) or gguf.file.tensors.get(TRUNK["embed_tokens"])
            if copy is None or original is None or (gguf.row is not None and PARTS[part] in gguf.row.own):
                continue
            differs = copy.shape != original.shape or not copy.agrees_with(original)
            if differs or copy.kind != original.kind:
                what = "Values differ from" if differs else f"{copy.kind.name}, not the {original.kind.name} of"
                yield Finding(
                    "copy-differs", "warning" if differs else "note", copy.name,
                    f"{what} {original.name}: llama.cpp drafts with the copy, other engines with the trunk's.",
                    f"No copy, or one equal to {original.name}.", _copy_fix(copy, original, part),
                )  # fmt: skip


def _reduced(gguf: GgufHead, draft_map: GgufTensor) -> Finding:
    """Return the finding on a head that drafts a part of the vocabulary, and how many of its tokens."""
    heads = [f"blk.{index}.nextn.shared_head_head.weight" for index in gguf.heads]
    outputs = [gguf.file.tensors[name] for name in (*heads, TRUNK["shared_head_head"]) if name in gguf.file.tensors]
    count = draft_map.shape[-1]
    if outputs and all(each.shape[-1] != count for each in outputs):
        return Finding(
            "copy-differs", "error", draft_map.name,
            f"{draft_map.name} maps {count} draft tokens, and {some([each.name for each in outputs])} has "
            f"{outputs[0].shape[-1]} rows: which tokens the head drafts is unknown.",
            "As many entries as the head's lm_head has rows.", CONVERT,
        )  # fmt: skip
    return Finding(
        "copy-differs", "warning", draft_map.name,
        f"The head drafts {count} tokens of the vocabulary, by {draft_map.name}: builds of llama.cpp that do not map "
        "them do not load the file.",
        "A build that maps them (llama.cpp#29143), or an lm_head for every token.",
        "Serve it with such a build; its head cannot be converted here.",
    )  # fmt: skip


def _copy_fix(copy: GgufTensor, original: GgufTensor, part: str) -> str:
    """Return what makes the two equal: of other types, an option of llama-quantize, which chose them."""
    if copy.kind == original.kind:
        return CONVERT
    return f"Quantize again with `llama-quantize --tensor-type nextn.{part}={original.kind.name.lower()}`."


def _precision(gguf: GgufHead) -> Iterator[Finding]:
    """Report matrices of the head with fewer bits than those of the trunk: by name, the projection by the lowest."""
    trunk = _trunk_bits(gguf)
    groups: dict[tuple[Severity, str, float], list[GgufTensor]] = defaultdict(list)
    for index in gguf.heads:
        for rest, tensor in gguf.blocks[index].items():
            if len(tensor.shape) < 2 or rest.removeprefix("nextn.").removesuffix(".weight") in _COPIED:
                continue
            own, other = bits(tensor), min(ENOUGH, trunk.get(rest, min(trunk.values(), default=0.0)))
            severity: Severity = "warning" if own < FEW_BITS or (rest in trunk and own < MUCH_LESS * other) else "note"
            if own < FEW_BITS or own < other:
                groups[severity, tensor.kind.name, round(other, 1)].append(tensor)
    for (severity, kind, other), tensors in groups.items():
        blocks = sorted({tensor.name.split(".")[1] for tensor in tensors})
        option = " ".join(f"--tensor-type 'blk\\.{block}\\.=q8_0'" for block in blocks)
        beside = f", the trunk's in {other} or more" if other else ""
        yield Finding(
            "precision-lower", severity, some([each.name for each in tensors]),
            f"{counted(len(tensors), 'matrix')} of the head in {kind}, {min(map(bits, tensors)):.1f} bits per weight"
            f"{beside}: fewer can cost the head its acceptance, without an error.",
            "The trunk's bits, or Q8_0.",
            f"Measure the acceptance; if it is low, quantize again with `llama-quantize {option}`.",
        )  # fmt: skip


def _trunk_bits(gguf: GgufHead) -> dict[str, float]:
    """Return path in a block -> the fewest bits per weight that any of the trunk's blocks has there."""
    fewest: dict[str, float] = {}
    for index in gguf.trunk:
        for rest, tensor in gguf.blocks[index].items():
            if len(tensor.shape) > 1 and tensor.kind.name not in ("F32", "F16", "BF16") and bits(tensor):
                fewest[rest] = min(fewest.get(rest, 64.0), bits(tensor))
            elif len(tensor.shape) > 1 and bits(tensor):
                fewest.setdefault(rest, bits(tensor))
    return fewest


def _values(gguf: GgufHead) -> Iterator[Finding]:
    """Check values. The converter adds 1 where the family stores w for 1 + w, so a GGUF holds effective weights."""
    head = {name: norm for index in gguf.heads for name, norm in _head_norms(gguf, index)}
    kinds = {norm.kind for norm in head.values()}
    trunk = {name: norm for name, norm in _trunk_norms(gguf) if norm.kind in kinds}
    fix = f"{CONVERT} Where the family stores w for 1 + w, it adds 1 once, to head and trunk."
    zero_centered = gguf.row is not None and gguf.row.norm_weight == "1+w"
    for shift in shifts(head, trunk, zero_centered=zero_centered):
        yield norm_shift_finding(shift, convention="w", fix=fix)
    stored = [tensor for index in gguf.heads for rest, tensor in gguf.blocks[index].items() if _is_matrix(rest, tensor)]
    matrices = {
        tensor.name: array
        for tensor in evenly_spaced(stored, MATRICES)
        if (array := tensor.values()) is not None and len(array)
    }
    projections = {name for name in matrices if name.endswith("nextn.eh_proj.weight")}
    yield from nonfinite_or_garbage({name: norm.values for name, norm in head.items()} | matrices, CONVERT)
    yield from zero_or_constant(head, matrices, projections=projections, fix=CONVERT)


def _is_matrix(rest: str, tensor: GgufTensor) -> bool:
    """Whether it is a matrix of the head's own, not a copy of the trunk's or a router, which may be zero."""
    part = rest.removeprefix("nextn.").removesuffix(".weight")
    return len(tensor.shape) > 1 and part not in (*_COPIED, "ffn_gate_inp")


def _head_norms(gguf: GgufHead, index: int) -> Iterator[tuple[str, NormValues]]:
    for rest, tensor in gguf.blocks[index].items():
        values = _norm_values(tensor)
        if values is not None:
            kind = {"nextn.shared_head_norm.weight": "final"}.get(rest, "" if _is_own(rest) else rest)
            yield tensor.name, NormValues(values, kind)


def _trunk_norms(gguf: GgufHead) -> Iterator[tuple[str, NormValues]]:
    arrays: dict[str, list[Values]] = defaultdict(list)
    for index in gguf.trunk:
        for rest, tensor in gguf.blocks[index].items():
            if len(arrays[rest]) < LAYERS_PER_NORM and (values := _norm_values(tensor)) is not None:
                arrays[rest].append(values)
    yield from ((f"blk.*.{rest}", NormValues(np.concatenate(group), rest)) for rest, group in arrays.items() if group)
    final = gguf.file.tensors.get("output_norm.weight")
    if final is not None and (values := _norm_values(final)) is not None:
        yield final.name, NormValues(values, "final")


def _norm_values(tensor: GgufTensor) -> Values | None:
    is_norm = tensor.name.endswith("norm.weight") and len(tensor.shape) == 1 and "indexer" not in tensor.name
    return tensor.values() if is_norm else None


def _engine(gguf: GgufHead) -> Iterator[Finding]:
    if not (gguf.heads or gguf.declared or _foreign_names(gguf)):
        note = replace(no_head(gguf.arch[:80]), place="general.architecture")
        if gguf.engine is not None and gguf.engine.support == "runs":
            note = replace(note, fix=_PUBLISHED_HEAD)
        elif not gguf.is_read:
            note = replace(note, valid="As it is: llama.cpp decodes it without drafts.", fix=_ORIGINAL)
        yield note
    if not gguf.heads or (gguf.engine is not None and gguf.engine.support == "runs"):
        return
    if gguf.engine is None:
        yield Finding(
            "engine-absent", "warning", "general.architecture",
            f"No family is known for the architecture {gguf.arch[:80]!r}: only its tensor names were checked.",
            "An architecture whose head llama.cpp runs.", "Check whether your engine runs this one.",
        )  # fmt: skip
        return
    notes = "".join(f" ({note})" for note in gguf.engine.notes)
    yield Finding(
        "engine-drops" if gguf.engine.support == "drops" else "engine-loads", "warning", "general.architecture",
        f"llama.cpp has no graph for the head of {gguf.arch}{notes}: it takes memory and drafts nothing.",
        "An architecture whose head llama.cpp runs.", "Serve the safetensors with another engine.",
    )  # fmt: skip
