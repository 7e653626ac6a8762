"""Which trunk a head belongs to: fingerprints, the record `nextn.json`, and heads in their own checkpoints. No torch.

The trunk's fingerprint is of samples, so it needs only a few small reads for a checkpoint of any size.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from nextn import __version__
from nextn.checkpoint.base_model import RECORD
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.expert_forms import split_view
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.remote import LocalFile
from nextn.checkpoint.safetensors_file import DTYPES, TensorInfo, write_json
from nextn.checkpoint.snapshot import on_disk
from nextn.errors import CheckpointError, FamilyError
from nextn.family_table import REPEATED_FIELD, Family, by_name, find, fitted, generic, lookup, lookup_count
from nextn.text_format import some

# The trunk's samples: this many layers, evenly spaced, and this many weights of each.
_LAYERS, _WEIGHTS = 8, 16
_VALUES = 1024  # of each, from its middle
_FORMAT = "v2-"  # begins each fingerprint; another one where they are computed in another way

_MAX_LENGTH = 2**31
_EXPERTS = re.compile(r"\.(?:experts|switch_mlp)\.")

T = TypeVar("T")
GENERIC = by_name("generic").name
FLOATS = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}  # as numpy reads them
_ALL = ("vllm", "sglang", "transformers", "llama.cpp")
# A Qwen2 layer's, which both engines create uninitialized, without checking that a file sets them.
_BIASES = tuple(f"0.block.self_attn.{name}_proj.bias" for name in "qkv")
# What a draft's Qwen2 layer is made of: vLLM reads it in the trunk's config, SGLang in the draft's.
LAYER_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps",
    "hidden_act", "max_position_embeddings", "rope_parameters",
)  # fmt: skip


@dataclass(frozen=True)
class Provenance:
    """The content of nextn.json; the field names are its keys."""

    head: str  # fingerprint of the head's own tensors
    trained_with: str  # fingerprint of the trunk that the head was trained with; empty if unknown
    beside: str  # fingerprint of the trunk in the checkpoint when the head was added
    source: str  # where the head came from
    revision: str | None = None
    made_by: Literal["restore", "train", "convert", "quantize"] = "restore"
    nextn: str = __version__
    trained_length: int | None = None  # tokens of the sequences that the head was trained on; None if unknown

    def write(self, folder: Path) -> None:
        write_json(folder / RECORD, asdict(self))

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "Provenance | None":
        """Read a checkpoint's record; None where there is none, CheckpointError for an invalid one."""
        record = checkpoint.read_json(RECORD)
        if record is None:
            return None
        try:
            provenance = cls(**record)  # type: ignore[arg-type]  # checked below
        except TypeError as error:
            raise CheckpointError(f"{checkpoint.path}: {RECORD} is not a record written by nextn: {error}.") from error
        length = record.pop("trained_length", None)
        if not all(value is None or isinstance(value, str) for value in record.values()):
            raise CheckpointError(f"{checkpoint.path}: {RECORD} must hold only strings, and an integer trained_length.")
        if length is not None and not (type(length) is int and 0 < length < _MAX_LENGTH):
            raise CheckpointError(
                f"{checkpoint.path}: {RECORD}: trained_length = {length!s:.40}; expected a number of tokens from 1 "
                f"to {_MAX_LENGTH - 1}, or null."
            )
        return provenance


def head_fingerprint(inventory: Inventory) -> str:
    """Return the SHA-256 of the head's own values by canonical name, equal in every layout. Reads all of the head.

    Floats of up to 32 bits count by their values, so that a cast without loss changes nothing.
    """
    digest = hashlib.sha256()
    tensors = dict(view for name in inventory.own for view in split_view(name, inventory.info(name)))
    for canonical in sorted(tensors):
        info = tensors[canonical]
        digest.update(json.dumps([canonical, value_dtype(info.dtype), info.shape]).encode())
        for piece in inventory.checkpoint.chunks(info):
            digest.update(as_float32(piece, info.dtype))
    return _FORMAT + digest.hexdigest()


def trunk_fingerprint(inventory: Inventory) -> str:
    """Return the SHA-256 of samples of the trunk: embedding, lm_head, and weights of a few layers without experts.

    Full and LoRA fine-tuning change every layer, so a few layers suffice; a change of single experts goes unnoticed.
    Values count, as in `head_fingerprint`. "" without a trunk, or with one whose names are unknown.
    """
    if not inventory.layers:
        return ""
    infos = [inventory.checkpoint.info(name) for name in _sampled(inventory)]
    samples = zip(infos, _middles(inventory.checkpoint, infos), strict=True)
    values = (
        json.dumps([value_dtype(info.dtype), info.shape]).encode() + as_float32(data, info.dtype)
        for info, data in samples
    )
    # Each once, as a tied lm_head is stored or not.
    return _FORMAT + hashlib.sha256(b"".join(dict.fromkeys(values))).hexdigest()


def _middles(checkpoint: Checkpoint, infos: Sequence[TensorInfo]) -> list[bytes]:
    """Read the same values from the middle of each tensor, whatever their dtype."""
    widths = [max(1, DTYPES[info.dtype] // 8) for info in infos]
    found: dict[int, bytes] = {}
    for width in sorted(set(widths)):
        places = [place for place, each in enumerate(widths) if each == width]
        starts = [max(0, infos[place].nbytes // width - _VALUES) // 16 * 8 * width for place in places]
        blocks = [(infos[p], start) for p, start in zip(places, starts, strict=True)]
        read = checkpoint.read_blocks(blocks, _VALUES * width)
        found |= dict(zip(places, read, strict=True))
    return [found[place] for place in range(len(infos))]


def value_dtype(dtype: str) -> str:
    """Return the dtype by which values of `dtype` are compared."""
    return "F32" if dtype in FLOATS else dtype


def floats(data: bytes, dtype: str) -> NDArray[np.float32]:
    """Return stored values of one of `FLOATS` as float32."""
    stored = np.frombuffer(data, FLOATS[dtype])
    return (stored.astype("<u4") << 16).view("<f4") if dtype == "BF16" else stored.astype("<f4")


def as_float32(data: bytes, dtype: str) -> bytes:
    """Return the bytes of stored floats as float32, with 0 for -0; those of other dtypes as they are."""
    if value_dtype(dtype) != "F32":
        return data
    with np.errstate(invalid="ignore"):  # NaN
        return (floats(data, dtype) + np.float32(0)).tobytes()


def trunk_identity(inventory: Inventory) -> str:
    """Return the `trunk_fingerprint` with the `files_identity` of the files that hold the trunk, for stored states.

    A shared tensor that only the head stores is the trunk's, too.
    """
    tensors = inventory.checkpoint.tensors
    heads = inventory.spellings(inventory.stored)
    names = [name for name in tensors if name not in heads]
    names += [name for key, name in inventory.copies.items() if inventory.role(key) not in inventory.shared]
    files = files_identity(inventory.checkpoint, {tensors[name].file for name in names})
    return f"{trunk_fingerprint(inventory)}-{files}"


def files_identity(checkpoint: Checkpoint, files: Iterable[str]) -> str:
    """Return the SHA-256 of what identifies these safetensors files, and of the config, without reading values.

    Of a file: name, header, and size and modification time, or the commit where it is a hub's. So an edit of any value
    is noticed, unless it keeps the time; a copy with another time counts as another checkpoint.
    """
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    for file in sorted(files):
        source, tensors = checkpoint.sources[file], checkpoint.headers[file].tensors
        state: object = checkpoint.revision
        if state is None and isinstance(source, LocalFile) and source.stamp is not None:
            state = source.stamp[2:]  # not device and inode, which another mount changes
        header = sorted((info.name, info.dtype, info.shape, info.begin, info.end) for info in tensors.values())
        digest.update(json.dumps([file, state, header]).encode())
    return digest.hexdigest()


def trained_with(inventory: Inventory) -> str:
    """Return the fingerprint of the trunk that the head was trained with; "" without a record and a trunk."""
    checkpoint = inventory.checkpoint
    for header in checkpoint.headers.values():
        if fingerprint := header.metadata.get("trained_with"):  # an extracted head
            return fingerprint
    record = Provenance.read(checkpoint)
    if record is not None:
        return record.trained_with
    return trunk_fingerprint(inventory) if inventory.shared else ""


def trained_length(inventory: Inventory) -> int | None:
    """Return the tokens of the sequences that the head was trained on, from its file or nextn.json; None if unknown."""
    for header in inventory.checkpoint.headers.values():
        length = header.metadata.get("trained_length", "")
        if length.isascii() and length.isdecimal() and len(length) < 10 and int(length):  # an extracted head
            return int(length)
    record = Provenance.read(inventory.checkpoint)
    return record.trained_length if record is not None else None


def record_training(
    folder: Path, *, source: str, made_by: Literal["train", "convert"] = "train", trained_length: int | None = None
) -> None:
    """Write the record of a head from `source` that was trained with the trunk in this folder."""
    inventory = Inventory.of(Checkpoint.open(folder))
    trunk = trunk_fingerprint(inventory)
    Provenance(head_fingerprint(inventory), trunk, trunk, source, made_by=made_by, trained_length=trained_length).write(
        folder
    )


def staged_head(stage: Path, config: Mapping[str, object], family: Family) -> str:
    """Return the fingerprint of the head in the new files, read back from disk."""
    return head_fingerprint(Inventory.of(replace(Checkpoint.open(stage), config={**config}), family=family))


def _sampled(inventory: Inventory) -> Iterator[str]:
    yield from (inventory.shared[role] for role in sorted(inventory.shared))
    for index in evenly_spaced(sorted(inventory.layers), _LAYERS):
        layer = inventory.layers[index]
        paths = sorted(path for path, info in layer.items() if len(info.shape) > 1 and not _EXPERTS.search(path))
        yield from (layer[path].name for path in evenly_spaced(paths, _WEIGHTS))


def evenly_spaced(items: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of `items`, evenly spaced, including the first and (of several) the last."""
    if len(items) <= count:
        return list(items)
    return [items[index * (len(items) - 1) // max(1, count - 1)] for index in range(count)]


@dataclass(frozen=True)
class Misfit:
    """Why a separate head is wrong in these engines, or beside this trunk; fields as those of an audit's finding."""

    rule: str
    place: str
    found: str
    valid: str
    fix: str
    engines: tuple[str, ...] = _ALL  # none: it may accept less, and nothing is wrong


def open_head(source: str | Path, trunk: Inventory) -> Inventory:
    """Return the inventory of a head's checkpoint, with local files, in the layout that it has beside this trunk.

    Without a config.json it is read as the trunk's own family. Raises CheckpointError if it holds no head, or one for
    another number of trunk layers; FamilyError for the head of another family than the trunk.
    """
    checkpoint = Checkpoint.open(source)
    checkpoint = checkpoint if checkpoint.config else with_config_of(checkpoint, trunk.checkpoint)
    head = Inventory.of(checkpoint, family=_family(checkpoint, trunk))
    if not head.own:
        make = f"`{head.restore_command()}` restores" if head.declared and head.layers else "`nextn train` makes"
        raise CheckpointError(f"{checkpoint.path}: holds no head of family {head.family.name}; {make} one")
    if not head.family.trunk_kv and head.num_layers != trunk.num_layers:
        raise CheckpointError(
            f"{checkpoint.path}: its head is for a trunk of {head.num_layers} layers, {trunk.checkpoint.path} has "
            f"{trunk.num_layers}; give the trunk that the head was trained on"
        )
    head = on_disk(head)
    return replace(head, declared=head.declared or len(head.modules))


def with_config_of(head: Checkpoint, trunk: Checkpoint) -> Checkpoint:
    """Return a head's files, which lack a config.json, with the trunk's and what their headers say of the head."""
    kinds = (header.metadata.get(REPEATED_FIELD) for header in head.headers.values())
    kind = next((kind for kind in kinds if kind in ("own", "first")), None)
    return replace(head, config={**trunk.config} if kind is None else {**trunk.config, REPEATED_FIELD: kind})


def is_foreign(head: Inventory, trunk: Inventory) -> bool:
    """Whether the head's record names another trunk than this one."""
    recorded = trained_with(head)
    return recorded not in ("", trunk_fingerprint(trunk))


def misfits(head: Inventory, trunk: Inventory | None) -> Iterator[Misfit]:
    """Yield what is wrong with a separate head, in itself and beside this trunk, if one is given."""
    is_draft = bool(head.family.layer_model)
    if is_draft and (missing := [head.published(name) for name in _BIASES if name not in head.stored]):
        yield Misfit(
            "draft-biases", missing[0],
            f"{some(missing)} {'are' if missing[1:] else 'is'} not stored, and engines leave them at random values.",
            "The biases of q_proj, k_proj and v_proj, which may be zero.",
            "Train it again, or add zeros under these names.", _ALL[:2],
        )  # fmt: skip
    if trunk is None:
        return
    path, alone = trunk.checkpoint.path, head.checkpoint.path
    if is_foreign(head, trunk):
        yield Misfit(
            "draft-trunk", alone, f"It was trained on another trunk than {path}: acceptance may be lower.",
            "The trunk whose fingerprint the head records, or a fine-tune on which it is measured to be good enough.",
            f"Run `nextn measure {shlex.quote(path)} --head {shlex.quote(alone)} --against TRUNK` with the trunk that "
            "it was trained on, and --prompts of its use: it says whether to keep or to train the head.", (),
        )  # fmt: skip
    configs = head.checkpoint.config, trunk.checkpoint.config
    read = tuple(map(_read_sizes, configs)) if head.family.trunk_kv else ({}, {})
    for name in read[0].keys() & read[1].keys():
        if read[0][name] != read[1][name]:
            yield Misfit(
                "draft-sizes", f"config.json: {name}", f"{name} is {read[0][name]}, the trunk's is {read[1][name]}.",
                "The trunk's, whose states, keys and values the head reads.", "Give the head of this trunk's size.",
            )  # fmt: skip
    for name in LAYER_SIZES if is_draft else ():
        own, other = (lookup(config, name) for config in configs)
        if None not in (own, other) and own != other:
            yield Misfit(
                "draft-sizes", f"config.json: {name}", f"{name} is {own}, the trunk's is {other}.",
                "The trunk's, from which vLLM builds the draft's layer.", "Train a head on this trunk.", _ALL[:2],
            )  # fmt: skip
    yield from quantized(head.family, trunk)


def key_sizes(config: Mapping[str, object], index: int) -> tuple[int | None, int | None]:
    """Return the number of heads of keys, and their width, of a layer of a Gemma 4 config.json; None: it has none."""
    types, options = lookup(config, "layer_types"), lookup(config, f"per_layer_config.{index}")
    is_full = isinstance(types, list) and types[index : index + 1] == ["full_attention"]
    heads, width = lookup_count(config, "num_key_value_heads"), lookup_count(config, "head_dim")
    if is_full:  # as published; transformers writes the options of each layer
        own = lookup_count(config, "num_global_key_value_heads") if lookup(config, "attention_k_eq_v") else None
        heads, width = own or heads, lookup_count(config, "global_head_dim") or width
    of_layer = options if isinstance(options, Mapping) else {}
    return of_layer.get("num_key_value_heads", heads), of_layer.get("head_dim", width)


def _read_sizes(config: Mapping[str, object]) -> dict[str, int]:
    """The sizes in which a head that reads the trunk's keys must agree with it, by a name for both."""
    states = lookup_count(config, "backbone_hidden_size") or lookup_count(config, "hidden_size")
    sizes = {"the size of the trunk's states": states, "vocab_size": lookup_count(config, "vocab_size")}
    types = lookup(config, "layer_types")
    for index, name in enumerate(types if isinstance(types, list) else ()):
        heads, width = key_sizes(config, index)
        sizes |= {f"num_key_value_heads of {name}": heads, f"head_dim of {name}": width}
    return {name: size for name, size in sizes.items() if size is not None}


def quantized(family: Family, trunk: Inventory) -> Iterator[Misfit]:
    """Yield what is wrong with a separate head of this family beside this trunk if that is quantized."""
    if family.layer_model and lookup(trunk.checkpoint.config, "quantization_config") is not None:
        yield Misfit(
            "draft-quantized", f"{trunk.checkpoint.path}: quantization_config",
            "The trunk is quantized, and vLLM builds the draft's layer with the trunk's quantization.",
            "An unquantized trunk, or SGLang, which reads the draft's own config.",
            "Serve the unquantized trunk, or use SGLang.", _ALL[:1],
        )  # fmt: skip


def trunk_family(checkpoint: Checkpoint) -> Family:
    """Return the family of a trunk's checkpoint; for a model without one, the generic layout."""
    return find(checkpoint.config) or generic(checkpoint.config)


def _family(checkpoint: Checkpoint, trunk: Inventory) -> Family:
    family = find(checkpoint.config) or trunk.family
    if family.trunk_kv:
        return family
    if family.separate or family.name == GENERIC:
        return fitted(family, trunk.checkpoint.config)
    if family.name != trunk.family.name:
        raise FamilyError(
            f"{checkpoint.path}: a head of family {family.name}, {trunk.checkpoint.path} is of {trunk.family.name}; "
            "give a head that was trained on this trunk"
        )
    return family
