"""Write a checkpoint with the Linears of its decoder layers in 4 or 8 bits: of compressed-tensors, or blocks of GGUF.

Weights are read, rounded and written in slices of rows, so memory does not depend on the model's size. Facts about
engines: compressed-tensors 0.20 decompresses the files to the values that nextn reads.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from nextn.checkpoint.checkpoint import CONFIG, Checkpoint
from nextn.checkpoint.gguf_blocks import round_to_blocks
from nextn.checkpoint.gguf_file import BLOCK_TYPES, blocks_name
from nextn.checkpoint.head_inventory import Inventory, count_layers
from nextn.checkpoint.module_lists import Section, with_fused
from nextn.checkpoint.provenance import (
    Provenance,
    head_fingerprint,
    trained_length,
    trained_with,
    trunk_family,
    trunk_fingerprint,
)
from nextn.checkpoint.quantization import QuantConfig, stored_modules
from nextn.checkpoint.quantized_weights import UNQUANTIZED_PARTS, pack_codes, round_to_nearest
from nextn.checkpoint.safetensors_file import DTYPES, TensorInfo
from nextn.checkpoint.tensors import FLOATS, bytes_of
from nextn.edit.execute import carry_out
from nextn.edit.expert_pieces import with_split_experts
from nextn.edit.plan import (
    EditPlan,
    Files,
    Piece,
    Progress,
    changes,
    index_document,
    quiet,
    with_config,
)
from nextn.edit.reindex import opened
from nextn.errors import CheckpointError, ConfigError
from nextn.text_format import counted, some

W8A8 = "w8a8"  # codes of int8, with which engines multiply activations of 8 bits
BITS = {"int8": 8, W8A8: 8, "int4": 4}
BLOCKS = "q4_1"  # the weights that only nextn reads
# Of four bits in blocks, these have eight: they are 3 % of a small Llama's layers, and cause a third of its divergence
# (bench/log.md).
_VALUES = re.compile(r"\.v_proj\.weight$")
GROUP_SIZE = 32  # of int4, as `--weights int4` has them (runtime/native/grouped.py)
# By decoder layer and name in it, how much the squared error of each input channel [K] of a weight counts.
Importance = Mapping[tuple[int, str], Tensor]
_DTYPES = ("BF16", "F16", "F32")
_SLICE = 2**22  # values that are rounded at once


@dataclass(frozen=True)
class Rounding:
    """How one weight is rounded. group_size: None means one scale per output channel. activation_bits: 16 or 8."""

    bits: int
    group_size: int | None
    activation_bits: int = 16

    @classmethod
    def of(cls, bits: int, group_size: int, activation_bits: int = 16) -> "Rounding":
        """Eight bits have one scale per output channel, four one for each group."""
        return cls(bits, group_size if bits == 4 else None, activation_bits)

    @property
    def format(self) -> str:
        """The name of the storage format in compressed-tensors."""
        return "int-quantized" if self.activation_bits == 8 else "pack-quantized"

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors that store a weight."""
        packed = ("weight_packed", "weight_scale", "weight_shape")
        return packed if self.format == "pack-quantized" else ("weight", "weight_scale")

    def fits(self, columns: int) -> bool:
        """Whether rows of this many values divide into groups and into words of 32 bits."""
        return columns % (self.group_size or 1) == 0 and columns * self.bits % 32 == 0

    def tensor(self, part: str, weight: TensorInfo) -> tuple[str, tuple[int, ...]]:
        """Return dtype and shape of one of the parts of a weight."""
        rows, columns = weight.shape
        return {
            "weight_packed": ("I32", (rows, columns * self.bits // 32)),
            "weight": ("I8", weight.shape),
            "weight_scale": (weight.dtype, (rows, columns // (self.group_size or columns))),
            "weight_shape": ("I64", (2,)),
        }[part]

    def scheme(self, targets: Sequence[str]) -> Section:
        """Return a group of compressed-tensors' config_groups."""
        weights: Section = {
            "num_bits": self.bits, "type": "int", "symmetric": True, "group_size": self.group_size,
            "strategy": "channel" if self.group_size is None else "group", "dynamic": False, "observer": "minmax",
        }  # fmt: skip
        per_token: Section = {
            "num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "strategy": "token", "dynamic": True,
            "observer": None,
        }  # fmt: skip
        return {
            "targets": list(targets), "weights": weights, "output_activations": None, "format": self.format,
            "input_activations": per_token if self.activation_bits == 8 else None,
        }  # fmt: skip


@dataclass(frozen=True)
class BlockRounding(Rounding):
    """Rounding to blocks of GGUF."""

    @property
    def kind(self) -> str:
        return "Q8_0" if self.bits == 8 else "Q4_1"

    @property
    def parts(self) -> tuple[str, ...]:
        return (blocks_name(self.kind),)

    def fits(self, columns: int) -> bool:
        return columns % BLOCK_TYPES[self.kind].size == 0

    def tensor(self, part: str, weight: TensorInfo) -> tuple[str, tuple[int, ...]]:
        rows, columns = weight.shape
        return "U8", (rows, columns // BLOCK_TYPES[self.kind].size * BLOCK_TYPES[self.kind].num_bytes)


@dataclass(frozen=True, slots=True)
class RoundedPiece(Piece):
    """One of the tensors that a rounded weight is stored as; `name` is the weight's in the source."""

    part: str = "weight_packed"
    rounding: Rounding = Rounding(8, None)
    # Of the weight, shared by its parts: kept from when the codes are written, mostly before the scales.
    scales: list[Tensor] = field(default_factory=list)
    importance: Tensor | None = None  # [K], see `round_to_nearest`

    @property
    def info(self) -> TensorInfo:
        weight = self.source.info(self.name)
        dtype, shape = self.rounding.tensor(self.part, weight)
        name = f"{self.name.removesuffix('weight')}{self.part}"
        return TensorInfo(name, dtype, shape, weight.file, 0, prod(shape) * DTYPES[dtype] // 8)

    def chunks(self) -> Iterator[bytes]:
        weight = self.source.info(self.name)
        parts = (torch.tensor(weight.shape),) if self.part == "weight_shape" else self._rounded(weight)
        return map(bytes_of, parts)

    def _rounded(self, weight: TensorInfo) -> Iterator[Tensor]:
        if self.part == "weight_scale" and self.scales:
            yield from self.scales
            self.scales.clear()
            return
        columns, dtype = weight.shape[1], FLOATS[weight.dtype]
        for chunk in self.source.chunks(weight, max(1, _SLICE // columns) * columns * dtype.itemsize):
            rows = torch.frombuffer(bytearray(chunk), dtype=dtype).view(-1, columns)
            if isinstance(self.rounding, BlockRounding):
                yield round_to_blocks(rows, self.rounding.kind, self.importance)
                continue
            quantized = round_to_nearest(rows, self.rounding.bits, self.rounding.group_size or columns, self.importance)
            if self.part == "weight_scale":
                yield quantized.scales
            else:
                self.scales.append(quantized.scales)
                # Codes of int-quantized are signed.
                yield pack_codes(quantized) if self.part == "weight_packed" else quantized.codes ^ quantized.middle


def quantize(
    source: "str | Path | Checkpoint",
    out: str | Path,
    *,
    weights: str,
    group_size: int = GROUP_SIZE,
    head_bits: int = 16,
    importance: Importance | None = None,
    follow_links: bool = False,
    dry_run: bool = False,
    on_bytes: Progress = quiet,
) -> EditPlan:
    """Write `source` into the new folder `out` with the Linears of its decoder layers rounded to nearest.

    Embedding, lm_head, norms, routers, convolutions and the head's projections keep their dtype.

    Args:
        source: A folder, .safetensors file, hub id, `tiny` or opened checkpoint, not quantized.
        out: A new folder.
        weights: `int8`: one scale per output channel; `w8a8`: the same, and 8 bits per token for engines' activations;
            `int4`: one scale per group of input channels; `q4_1`: blocks of GGUF in Q4_1, those of attention values
            (v_proj) in Q8_0, which nextn alone reads.
        group_size: Input channels of a group of int4.
        head_bits: The same for the Linears in the head's decoder layer: 16 (as they are), 8 or 4.
        importance: Of weights of four bits in the trunk, see `input_squares`; what it lacks counts alike.
        follow_links: See `restore`.
        dry_run: Write nothing.
        on_bytes: Called with the bytes written so far and in all.

    Returns:
        What was, or with `dry_run` would be, written.

    Raises:
        ConfigError: For other weights, bits or group sizes.
        CheckpointError: The checkpoint is quantized already, or holds no weights that can be rounded.

    Example:
        >>> plan = nextn.quantize("tiny", "tiny-int8", weights="int8")
        >>> nextn.load("tiny-int8").head.num_modules
        1
    """
    if weights not in (*BITS, BLOCKS) or head_bits not in (16, 8, 4) or group_size < 8 or group_size % 8:
        raise ConfigError(
            f"weights {weights}, head bits {head_bits}, group size {group_size}; expected weights int8, w8a8, int4 "
            "or q4_1, head bits 16, 8 or 4, and a group size that is a multiple of 8, such as 32"
        )
    if weights == BLOCKS and group_size != GROUP_SIZE:
        raise ConfigError(f"group size {group_size}; blocks of {BLOCKS} have groups of 32")
    if weights == W8A8 and head_bits == 4:
        raise ConfigError("weights w8a8, head bits 4; expected head bits 16 or 8 with activations of 8 bits")
    checkpoint, repairs = opened(source, trunk_family, follow_links=follow_links)
    plan = _plan(checkpoint, _roundings(weights, head_bits, group_size), importance or {})
    plan = replace(plan, notes=(*repairs, *plan.notes))
    seal = partial(_seal, checkpoint=checkpoint, config=plan.documents[CONFIG])
    return carry_out(plan, out, follow_links=follow_links, dry_run=dry_run, seal=seal, on_bytes=on_bytes)


def _roundings(weights: str, head_bits: int, group_size: int) -> dict[str, Rounding]:
    """Return how the trunk, its attention values and the head are rounded, where they are and not alike."""
    if weights == BLOCKS:
        blocks: dict[str, Rounding] = {"trunk": BlockRounding(4, None), "values": BlockRounding(8, None)}
        return blocks if head_bits == 16 else {**blocks, "head": BlockRounding(head_bits, None)}
    rounding = partial(Rounding.of, group_size=group_size, activation_bits=8 if weights == W8A8 else 16)
    return {"trunk": rounding(BITS[weights])} | ({} if head_bits == 16 else {"head": rounding(head_bits)})


def is_linear(path: str) -> bool:
    """Whether a tensor at this path in a decoder layer is, by its name, the weight of a Linear, or of all experts."""
    is_weight = path.endswith(".weight") or re.search(r"\.experts\.\w+$", path) is not None
    return is_weight and UNQUANTIZED_PARTS.search(path) is None


def _part_of(inventory: Inventory, num_layers: int, name: str) -> str | None:
    """Return `trunk` or `head` for the weight of a Linear in a decoder layer; None for other tensors."""
    canonical = inventory.family.canonical(name, num_layers)
    if canonical is not None:
        # Projections stay as they are, as engines build them unquantized whatever the config says.
        _, role, rest = (*canonical.split(".", 2), "", "")[:3]
        return "head" if role == "block" and is_linear(rest) else None
    layer = inventory.family.trunk_layer(name)
    return "trunk" if layer is not None and layer[0] < num_layers and is_linear(layer[1]) else None


def _plan(checkpoint: Checkpoint, roundings: Mapping[str, Rounding], importance: Importance) -> EditPlan:
    if (config := QuantConfig.of(checkpoint)) is not None:
        raise CheckpointError(f"{checkpoint.path}: already quantized ({config.method}). Give the unquantized model.")
    inventory = Inventory.of(checkpoint, family=trunk_family(checkpoint))
    if codes := inventory.trunk_codes:
        raise CheckpointError(
            f"{checkpoint.path}: {counted(len(codes), 'matrix')}, such as {some(codes)}, already quantized, though "
            f"{CONFIG} declares no method. Give the unquantized model."
        )
    checkpoint, left = with_split_experts(inventory)
    notes = [f"left out: {counted(len(left), 'tensor')} in another form than split: {some(left)}"] if left else []
    rounded, misfits = _rounded(inventory, checkpoint, roundings)
    if not rounded:
        groups = f"; --group-size {roundings['trunk'].group_size} must divide their input channels" if misfits else ""
        raise CheckpointError(f"{checkpoint.path}: no Linear of a decoder layer can be quantized{groups}.")
    if misfits:
        notes.append(
            f"{counted(len(misfits), 'matrix')} whose rows do not divide into groups stay as they are: {some(misfits)}"
        )
    is_blocks = isinstance(roundings["trunk"], BlockRounding)
    if not is_blocks and any(".experts." in name for name in rounded):
        notes.append("experts are quantized: vLLM's build for CPUs has no kernel for them and refuses the checkpoint")
    counts = {name: importance.get(inventory.family.trunk_layer(name) or (-1, "")) for name in rounded}
    files = _files(checkpoint, rounded, counts)
    embedding = inventory.shared.get("embedding", "")
    declared = partial(quantization_config, checkpoint.tensors, rounded, roundings["trunk"], embedding=embedding)
    section: Section = {"quant_method": "gguf"} if is_blocks else declared()
    new = {**checkpoint.config, "quantization_config": section}
    documents = with_config(checkpoint, new) | index_document(files, checkpoint)
    lines = changes(checkpoint, documents)
    family = inventory.family.name
    return EditPlan(checkpoint, Path(), family, files, documents, changes=lines, notes=tuple(notes))


def _rounded(
    inventory: Inventory, checkpoint: Checkpoint, roundings: Mapping[str, Rounding]
) -> tuple[dict[str, Rounding], list[str]]:
    """Return how each Linear is rounded, by the name of its weight, and those whose rows do not divide into groups."""
    rounded, misfits, num_layers = dict[str, Rounding](), list[str](), count_layers(checkpoint)
    for name, info in checkpoint.tensors.items():
        part = _part_of(inventory, num_layers, name) or ""
        part = "values" if part == "trunk" and _VALUES.search(name) and "values" in roundings else part
        rounding = roundings.get(part)
        if rounding is None or info.dtype not in _DTYPES or len(info.shape) != 2:
            continue
        if rounding.fits(info.shape[1]):
            rounded[name] = rounding
        else:
            misfits.append(name)
    return rounded, misfits


def _files(checkpoint: Checkpoint, rounded: Mapping[str, Rounding], importance: Mapping[str, Tensor | None]) -> Files:
    """Plan every weight file anew under its name, with the parts of each rounded weight where the weight was."""
    weights: dict[str, dict[str, Piece]] = {file: {} for file in checkpoint.files}
    for name, info in checkpoint.tensors.items():
        if (rounding := rounded.get(name)) is None:
            weights[info.file][name] = Piece(checkpoint, name)
            continue
        scales: list[Tensor] = []
        for part in rounding.parts:
            piece = RoundedPiece(checkpoint, name, None, part, rounding, scales, importance[name])
            weights[info.file][piece.info.name] = piece
    hidden = set(checkpoint.unindexed)
    index = {name: file for file, pieces in weights.items() if file not in hidden for name in pieces}
    return Files(weights, None if checkpoint.index is None else index, gone=frozenset(rounded))


def quantization_config(
    stored: Mapping[str, TensorInfo], rounded: Mapping[str, Rounding], main: Rounding, *, embedding: str
) -> Section:
    """Return the quantization_config of a checkpoint with these tensors, the rounded ones under the weights' names.

    At most one kind of rounding differs from `main`, that of Linears; those that have another are named.
    """
    groups = {"group_0": main.scheme(["Linear"])}
    others = {name: rounding for name, rounding in rounded.items() if rounding != main}
    if others:
        groups["group_1"] = next(iter(others.values())).scheme([name.removesuffix(".weight") for name in others])
    quantized = {name.removesuffix(".weight") for name in rounded}
    plain = [module for module, _ in stored_modules(stored) if module not in quantized]
    # A tied lm_head is a Linear that no file stores.
    listed = with_fused([module for module in plain if module != embedding.removesuffix(".weight")], quantized)
    ignore = dict.fromkeys([*listed, "lm_head"])
    return {
        "quant_method": "compressed-tensors", "format": main.format, "quantization_status": "compressed",
        "config_groups": groups, "ignore": list(ignore), "kv_cache_scheme": None,
    }  # fmt: skip


def _seal(stage: Path, checkpoint: Checkpoint, config: Mapping[str, object]) -> None:
    """Record a head that the new folder has: it was trained with the trunk before it was rounded."""
    source = Inventory.of(checkpoint, family=trunk_family(checkpoint))
    if not source.stored:
        return
    new = Inventory.of(replace(Checkpoint.open(stage), config={**config}), family=source.family)
    trained = trained_with(source) or trunk_fingerprint(source)
    Provenance(
        head_fingerprint(new), trained, trunk_fingerprint(new), checkpoint.path, checkpoint.revision, "quantize",
        trained_length=trained_length(source),
    ).write(stage)  # fmt: skip
