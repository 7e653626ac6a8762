"""Write the model of a GGUF file as a checkpoint folder, a slice of a tensor in memory at a time.

Values are those that the gguf package dequantizes, rounded once to the new dtype. Q8_0 and Q4_0 are compressed-tensors'
weights of 8 and 4 bits in groups of 32 without zero points, so codes and scales of Linears are stored as they are. On
request, Linears stay in the file's blocks, of more types, which only nextn loads.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch

from nextn.checkpoint.checkpoint import CHUNK, CONFIG, SINGLE, Checkpoint
from nextn.checkpoint.gguf_file import BLOCK_TYPES, GgufFile, GgufTensor, readable_kinds
from nextn.checkpoint.remote import LocalFile
from nextn.checkpoint.safetensors_file import DTYPES
from nextn.edit.execute import carry_out
from nextn.edit.gguf_architectures import Architecture, architecture_of
from nextn.edit.gguf_layout import HEAD, HEAD_FOLDER
from nextn.edit.gguf_metadata import Config, Metadata, common_config
from nextn.edit.gguf_pieces import PACKED, GgufPiece, Part
from nextn.edit.gguf_tokenizer import write_tokenizer
from nextn.edit.plan import EditPlan, Files, Piece, Progress, index_document, quiet
from nextn.edit.quantize import Rounding, is_linear, quantization_config
from nextn.errors import CheckpointError, ConfigError
from nextn.family_table import Family, find
from nextn.text_format import counted, some

DTYPE_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
STORED = "stored"  # in place of a dtype: as in the file
_SHARD = 5 * 10**9  # bytes
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # fmt: skip
_IGNORED = ("rope_freqs.weight",)  # its content is in the config
_ROLES = {part: role for role, part in HEAD.items()}
# Name in a block -> role, and the tensor of the trunk.
_COPIES = {
    f"nextn.{HEAD[role]}.weight": (role, name)
    for role, name in (("embedding", "token_embd.weight"), ("output", "output.weight"))
}

_PACKED_PARTS: tuple[Part, ...] = ("weight_packed", "weight_scale", "weight_shape")


def convert_gguf(
    path: Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    dry_run: bool = False,
    on_bytes: Progress = quiet,
) -> EditPlan:
    """Write the model of a GGUF file, any of a split model, with its head and tokenizer, into the new folder `out`.

    `dtype` is of all weights, so that none stay packed. Default: F32 or F16 as most of the file's values are, else
    bfloat16, and Q8_0 and Q4_0 as they are. `STORED`: the same, but Linears of more types and of several types stay in
    the file's blocks. By default, the tokenizer is made from the metadata, not taken from a folder's files.

    Raises CheckpointError if the file is damaged, or holds a tensor that its architecture has not; ConfigError for
    another dtype, a tokenizer that is not known, or without the gguf package; FamilyError for an architecture that is
    not read.
    """
    if dtype not in (None, STORED, *DTYPE_NAMES):
        raise ConfigError(f"--dtype {dtype}; expected {', '.join(DTYPE_NAMES)}, or {STORED}")
    file = GgufFile.open(path)
    architecture, meta = architecture_of(file)
    plan, vocab_size = _plan(file, architecture, meta, dtype), file.tensors["token_embd.weight"].shape[1]
    seal = partial(write_tokenizer, file=file, source=tokenizer, vocab_size=vocab_size)
    return carry_out(plan, out, dry_run=dry_run, seal=seal, on_bytes=on_bytes)


def _plan(file: GgufFile, architecture: Architecture, meta: Metadata, dtype: str | None) -> EditPlan:
    config: Config = {"architectures": [architecture.model_class], "model_type": architecture.model_type}
    config |= {**common_config(meta), **architecture.config(meta)}
    family = find({**config, **architecture.separate_head}) if meta.num_modules else None
    stored = DTYPE_NAMES.get(dtype or "") or _common_dtype(file)
    config["dtype"] = next(name for name, each in DTYPE_NAMES.items() if each == stored)
    sources = {each.file.name: LocalFile.at(each.file, each.file.name) for each in file.tensors.values()}
    source = Checkpoint(str(file.path), {}, None, {}, {}, (), sources)
    pieces, notes = _pieces(source, file, architecture, config, family, stored)
    config["tie_word_embeddings"] = "lm_head.weight" not in pieces
    kept = set[str]()
    if rounded := {} if dtype in DTYPE_NAMES else _rounded(pieces):
        infos, kinds = {name: piece.info for name, piece in pieces.items()}, list(rounded.values())
        main = max(PACKED.values(), key=kinds.count)
        embedding = _OUTER["token_embd.weight"]
        config["quantization_config"] = quantization_config(infos, rounded, main, embedding=embedding)
        notes.append(f"{counted(len(rounded), 'weight')} stay at their 8 or 4 bits (compressed-tensors, groups of 32)")
    elif dtype == STORED and (kept := {name for name, piece in pieces.items() if _keeps_blocks(piece)}):
        config["quantization_config"] = {"quant_method": "gguf"}
        notes += _notes_on_blocks(pieces, kept, str(config["dtype"]))
    elif dtype not in DTYPE_NAMES:
        notes += _notes_on_values(pieces, str(config["dtype"]))
    written: dict[str, GgufPiece] = {}
    for name, piece in pieces.items():
        parts: tuple[Part, ...] = _PACKED_PARTS if name in rounded else ("blocks",) if name in kept else ("weight",)
        for each in (replace(piece, part=part) for part in parts):
            written[each.info.name] = each
    origin = replace(source, sources={})
    apart = {name: piece for name, piece in written.items() if piece.is_head} if architecture.separate_head else {}
    files = _shards({name: piece for name, piece in written.items() if name not in apart})
    documents = {CONFIG: config} | index_document(files, origin)
    if apart:
        files = replace(files, weights={**files.weights, f"{HEAD_FOLDER}/head.safetensors": apart})
        documents[f"{HEAD_FOLDER}/{CONFIG}"] = {**config, **architecture.separate_head}
        notes.append(f"the head is in the folder {HEAD_FOLDER}: with the folder that was written, give it with --head")
    name = architecture.model_type if family is None else family.name
    return EditPlan(origin, Path(), name, files, documents, notes=tuple(notes))


def _pieces(
    source: Checkpoint, file: GgufFile, architecture: Architecture, config: Config, family: Family | None, dtype: str
) -> tuple[dict[str, GgufPiece], list[str]]:
    """Return a piece for each tensor of the checkpoint, and notes of copies that the family does not store."""
    _refuse_unreadable(file)
    _refuse_missing(file, config)
    pieces, unknown, left, rounded = dict[str, GgufPiece](), list[str](), list[str](), list[str]()
    joined = {architecture.joined_to(name) for name in file.tensors}
    for name, tensor in file.tensors.items():
        block, rest = _place(name)
        module = -1 if block is None else block - config["num_hidden_layers"]
        if name in _IGNORED or name in joined or (name == "output.weight" and _is_copy(file, architecture)):
            continue
        if (path := _path(block, rest, module, architecture, family)) is None:
            (left if rest in _COPIES else unknown).append(name)
            continue
        if (original := _original(file, rest, tensor, family)) is not tensor:
            rounded.append(name)
        change, tensor = architecture.change(rest, config), original
        beside = file.tensors.get(architecture.joined_to(name) or "")
        stacked = GgufPiece(source, path, tensor=tensor, beside=beside, change=change, dtype=dtype, is_head=module >= 0)
        _refuse_misshapen(stacked, config)
        slices = range(tensor.shape[-1]) if "{}" in path else (None,)
        pieces |= {path.format(each): replace(stacked, name=path.format(each), expert=each) for each in slices}
    if unknown:
        message = f"{file.path}: {config['model_type']} has no place for {some(unknown)}. Give the original checkpoint"
        raise CheckpointError(message)
    notes = [f"left out: {some(left)}, copies that the family does not store"] if left else []
    if rounded:
        notes.append(f"as the trunk's: {some(rounded)}, which the file has in another type")
    return pieces, notes


def _original(file: GgufFile, rest: str, tensor: GgufTensor, family: Family | None) -> GgufTensor:
    """Return the trunk's tensor for a copy of it in another type: llama-quantize gives each its own."""
    role, name = _COPIES.get(rest, ("", ""))
    if not role or family is None or role in family.own:
        return tensor
    other = file.tensors.get(name) or file.tensors["token_embd.weight"]
    is_rounded = other.shape == tensor.shape and other.kind != tensor.kind and tensor.agrees_with(other)
    return other if is_rounded else tensor


def _place(name: str) -> tuple[int | None, str]:
    """Split the name of a tensor into its block and the rest; None for one outside of the blocks."""
    match = re.fullmatch(r"blk\.(\d{1,6})\.(.+)", name)
    return (int(match[1]), match[2]) if match else (None, name)


def _path(block: int | None, rest: str, module: int, architecture: Architecture, family: Family | None) -> str | None:
    """Return the name in the checkpoint of a tensor; None for one that it has not. `{}` stands for experts."""
    if block is None:
        return _OUTER.get(rest)
    if module >= 0 and family is None:
        return None
    num_layers = block - module
    if module >= 0 and family is not None and rest.startswith("nextn."):
        role = _ROLES.get(rest.removeprefix("nextn.").removesuffix(".weight"))
        return family.published(f"{module}.{role}.weight", num_layers) if role in family.names else None
    path = architecture.in_layer(rest)
    if path is None or family is None or module < 0:
        return None if path is None else f"model.layers.{block}.{path}"
    return family.published(f"{module}.block.{path}", num_layers)


def _is_copy(file: GgufFile, architecture: Architecture) -> bool:
    """Whether the lm_head is the embedding again, as step35 needs it, whose file does not say that they are tied."""
    one, other = (file.tensors[name] for name in ("output.weight", "token_embd.weight"))
    if not architecture.separate_head or (one.kind, one.shape) != (other.kind, other.shape):
        return False
    spans = ((begin, min(begin + CHUNK, one.nbytes)) for begin in range(0, one.nbytes, CHUNK))
    return all(one.read(*span) == other.read(*span) for span in spans)


def _refuse_unreadable(file: GgufFile) -> None:
    """Raise CheckpointError for tensors without values, and of types that the gguf package does not read."""
    if empty := [name for name, tensor in file.tensors.items() if not tensor.nbytes or not tensor.shape]:
        raise CheckpointError(f"{file.path}: no values in {some(empty)}. Download or convert the file again.")
    unread = [each for each in file.tensors.values() if each.kind not in readable_kinds()]
    if unread:
        kinds = ", ".join(sorted({each.kind.name for each in unread}))
        raise CheckpointError(
            f"{file.path}: {some([each.name for each in unread])}: {kinds}, which the gguf package does not read; it "
            f"reads {', '.join(kind.name for kind in readable_kinds())}"
        )


def _refuse_misshapen(piece: GgufPiece, config: Config) -> None:
    """Raise CheckpointError for a tensor whose sizes are not those of the metadata, as far as it is taken apart."""
    shape, other = piece.stored_shape, piece.beside
    expected: list[int | None] = [None] * len(shape)
    if "{}" in piece.name:
        expected = [config.get("n_routed_experts", config.get("num_experts")), None, None]
    elif piece.change.rows is not None:
        expected[:1] = [len(piece.change.rows)]
    elif piece.change.columns is not None:
        expected = [None, len(piece.change.columns)]
    if other is not None and (len(shape) != 2 or len(other.shape) != 2 or other.shape[0] != shape[1]):
        expected = [None, other.shape[0]]
    if len(expected) != len(shape) or not all(each in (None, size) for each, size in zip(expected, shape, strict=True)):
        sizes = ", ".join("any" if each is None else str(each) for each in expected)
        raise CheckpointError(
            f"{piece.tensor.file}: {piece.tensor.name} has shape {shape}, by the metadata ({sizes}). Download or "
            "convert the file again."
        )


def _refuse_missing(file: GgufFile, config: Config) -> None:
    """Raise CheckpointError for blocks that the metadata counts and the file has not."""
    blocks = {_place(name)[0] for name in file.tensors}
    missing = [f"blk.{index}" for index in range(config["num_hidden_layers"]) if index not in blocks]
    missing += [name for name in ("output_norm.weight",) if name not in file.tensors]
    if missing and 0 not in blocks and any(".nextn." in name for name in file.tensors):
        raise CheckpointError(
            f"{file.path}: this is an MTP head alone, without its trunk, as llama.cpp takes it beside a model "
            "(--spec-draft-model). `nextn audit` checks it; to measure, serve or convert it, give the GGUF file that "
            "holds trunk and head, or the checkpoint that both were converted from."
        )
    if missing:
        raise CheckpointError(f"{file.path}: without {some(missing)}. Download or convert the file again.")


def _is_linear(piece: GgufPiece) -> bool:
    """Whether it is the weight of a Linear in a decoder layer, by its name."""
    path = re.sub(r"^(model|mtp)\.layers\.\d+\.", "", piece.name)
    in_layer = path != piece.name and path.split(".")[0] in ("self_attn", "linear_attn", "mlp")
    return in_layer and len(piece.stored_shape) == 2 and is_linear(path)


def _rounded(pieces: Mapping[str, GgufPiece]) -> dict[str, Rounding]:
    """How the Linears whose codes stay as they are were rounded: all or none, as engines fuse Linears of a layer."""
    linears = {name: piece for name, piece in pieces.items() if _is_linear(piece)}
    if not all(map(_packs, linears.values())):
        return {}
    return {name: PACKED[piece.tensor.kind.name] for name, piece in linears.items()}


def _packs(piece: GgufPiece) -> bool:
    """Whether the codes of a weight can stay as they are in compressed-tensors."""
    return piece.kind in PACKED and _moves_blocks(piece)


def _keeps_blocks(piece: GgufPiece) -> bool:
    return _is_linear(piece) and piece.kind in BLOCK_TYPES and _moves_blocks(piece)


def _moves_blocks(piece: GgufPiece) -> bool:
    """Whether blocks stay whole: values do not change, and columns keep their place or move in whole blocks."""
    if any(each is not None and each.scale is not None for each in (piece.tensor, piece.beside)):
        return False
    if piece.change.values is not None or (columns := piece.change.columns) is None:
        return piece.change.values is None
    size = BLOCK_TYPES[piece.tensor.kind.name].size
    starts = columns[::size]
    is_aligned = torch.equal(columns, starts[:, None].add(torch.arange(size)).flatten())
    return is_aligned and not bool(starts.remainder(size).any())


def _notes_on_values(pieces: Mapping[str, GgufPiece], dtype: str) -> list[str]:
    """Return a note on quantized Linears that are written as values, and why none of them stays packed."""
    kinds = Counter(piece.kind for piece in pieces.values() if _is_linear(piece) and piece.kind not in DTYPES)
    if not kinds:
        return []
    listed = ", ".join(f"{counted(count, 'weight')} in {kind}" for kind, count in sorted(kinds.items()))
    only = f"only files whose Linears are all {' or '.join(PACKED)}, without further scales, stay packed"
    return [f"dequantized to {dtype}: {listed}; {only}"]


def _notes_on_blocks(pieces: Mapping[str, GgufPiece], kept: Iterable[str], dtype: str) -> list[str]:
    """Return notes on the Linears that stay in the file's blocks, and on those that do not."""
    kinds = Counter(pieces[name].kind for name in kept)
    counts = ", ".join(f"{counted(kinds[kind], 'weight')} in {kind}" for kind in BLOCK_TYPES if kind in kinds)
    notes = [f"as in the file: {counts}; only nextn loads them"]
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, piece in pieces.items():
        kind = piece.kind
        if _is_linear(piece) and name not in kept and kind not in DTYPES:
            moves = kind in BLOCK_TYPES and piece.tensor.scale is None
            reasons[f"parts of blocks of {kind} move" if moves else f"blocks of {kind} are not kept"].append(name)
    return notes + [f"dequantized to {dtype}, as {why}: {some(names)}" for why, names in reasons.items()]


def _common_dtype(file: GgufFile) -> str:
    """Return F32 or F16 if most values of the file are, else BF16."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + prod(tensor.shape)
    most = max(sizes, key=lambda kind: sizes[kind])
    return most if most in ("F32", "F16") else "BF16"


def _shards(pieces: Mapping[str, Piece]) -> Files:
    """Plan files of at most `_SHARD` bytes, or one larger tensor; with an index if there are several."""
    shards: list[dict[str, Piece]] = [{}]
    size = 0
    for name, piece in pieces.items():
        if size and size + piece.info.nbytes > _SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = piece
        size += piece.info.nbytes
    if len(shards) == 1:
        return Files({SINGLE: shards[0]}, None)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    weights = dict(zip(names, shards, strict=True))
    return Files(weights, {name: file for file, shard in weights.items() for name in shard})
