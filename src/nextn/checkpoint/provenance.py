"""Record which trunk a head belongs to and where it came from: fingerprints, and the file `nextn.json`.

The trunk's fingerprint is of samples, so it needs only a few small reads for a checkpoint of any size.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from nextn import __version__
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.safetensors_file import write_json
from nextn.errors import CheckpointError
from nextn.families import Family

RECORD = "nextn.json"
# The trunk's samples: this many layers, evenly spaced, and this many weights of each.
_LAYERS, _WEIGHTS = 8, 16

T = TypeVar("T")


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
        if not all(value is None or isinstance(value, str) for value in record.values()):
            raise CheckpointError(f"{checkpoint.path}: {RECORD} must hold only strings.")
        return provenance


def head_fingerprint(inventory: Inventory) -> str:
    """Return the SHA-256 of the head's own tensors by canonical name, equal in every layout. Reads all of the head."""
    digest = hashlib.sha256()
    for canonical in inventory.own:
        info = inventory.info(canonical)
        digest.update(json.dumps([canonical, info.dtype, info.shape]).encode())
        for piece in inventory.checkpoint.chunks(info.name):
            digest.update(piece)
    return digest.hexdigest()


def trunk_fingerprint(inventory: Inventory) -> str:
    """Return the SHA-256 of samples of the trunk: embedding, lm_head, and weights of a few layers without experts.

    Full and LoRA fine-tuning change every layer, so a few layers suffice; a change of single experts goes unnoticed.
    """
    names = list(_sampled(inventory))
    digest = hashlib.sha256()
    for name, data in zip(names, inventory.checkpoint.samples(names), strict=True):
        info = inventory.checkpoint.info(name)
        digest.update(json.dumps([info.dtype, info.shape]).encode() + data)
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
    return trunk_fingerprint(inventory) if inventory.shared and inventory.layers else ""


def record_training(folder: Path, *, source: str, made_by: Literal["train", "convert"] = "train") -> None:
    """Write the record of a head from `source` that was trained with the trunk in this folder."""
    inventory = Inventory.of(Checkpoint.open(folder))
    trunk = trunk_fingerprint(inventory)
    Provenance(head_fingerprint(inventory), trunk, trunk, source, made_by=made_by).write(folder)


def staged_head(stage: Path, config: Mapping[str, object], family: Family) -> str:
    """Return the fingerprint of the head in the new files, read back from disk."""
    return head_fingerprint(Inventory.of(replace(Checkpoint.open(stage), config={**config}), family=family))


def _sampled(inventory: Inventory) -> Iterator[str]:
    yield from (inventory.shared[role] for role in sorted(inventory.shared))
    for index in evenly_spaced(sorted(inventory.layers), _LAYERS):
        layer = inventory.layers[index]
        paths = sorted(path for path, info in layer.items() if len(info.shape) > 1 and ".experts." not in path)
        yield from (layer[path].name for path in evenly_spaced(paths, _WEIGHTS))


def evenly_spaced(items: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of `items`, evenly spaced, including the first and (of several) the last."""
    if len(items) <= count:
        return list(items)
    return [items[index * (len(items) - 1) // max(1, count - 1)] for index in range(count)]
