"""Which trunk a head was made for and where it came from: fingerprints, and the record `nextn.json` beside the weights.

The trunk's fingerprint is of samples, so that it costs a few small reads of a checkpoint of any size.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from nextn import __version__
from nextn.checkpoints.checkpoint import Checkpoint
from nextn.checkpoints.inventory import Inventory
from nextn.checkpoints.tensor_file import write_json
from nextn.errors import CheckpointError
from nextn.families import Family

RECORD = "nextn.json"
# Samples: this many layers, evenly spread, and this many weights of each.
_LAYERS, _WEIGHTS = 8, 16

T = TypeVar("T")


@dataclass(frozen=True)
class Provenance:
    """head: fingerprint of the head's own tensors. trained_with: that of the trunk that it was trained with, empty if
    that is not known. beside: that of the trunk that it was written beside. source, revision: where the head came
    from.
    """

    head: str
    trained_with: str
    beside: str
    source: str
    revision: str | None = None
    made_by: Literal["restore", "train", "convert"] = "restore"
    nextn: str = __version__

    def write(self, folder: Path) -> None:
        write_json(folder / RECORD, asdict(self))

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "Provenance | None":
        """The record beside the weights; None where there is none. Raises CheckpointError for one of another form."""
        record = checkpoint.read_json(RECORD)
        if record is None:
            return None
        try:
            found = cls(**record)  # type: ignore[arg-type]  # checked below
        except TypeError as error:
            raise CheckpointError(f"{checkpoint.path}: {RECORD} is not a record of nextn's: {error}.") from error
        if not all(value is None or isinstance(value, str) for value in record.values()):
            raise CheckpointError(f"{checkpoint.path}: {RECORD} must hold text and nothing else.")
        return found


def head_fingerprint(inventory: Inventory) -> str:
    """SHA-256 over the head's own tensors, by canonical name: the same in every layout. Reads the whole head."""
    digest = hashlib.sha256()
    for canonical in inventory.own:
        info = inventory.info(canonical)
        digest.update(json.dumps([canonical, info.dtype, info.shape]).encode())
        for piece in inventory.checkpoint.chunks(info.name):
            digest.update(piece)
    return digest.hexdigest()


def trunk_fingerprint(inventory: Inventory) -> str:
    """SHA-256 over samples of the trunk: embedding, output head, and weights of a few layers, experts aside.

    Full and LoRA fine-tuning change every layer, so a few layers tell; a change of single experts is not seen.
    """
    names = list(_sampled(inventory))
    digest = hashlib.sha256()
    for name, data in zip(names, inventory.checkpoint.samples(names), strict=True):
        info = inventory.checkpoint.info(name)
        digest.update(json.dumps([info.dtype, info.shape]).encode() + data)
    return digest.hexdigest()


def trained_with(inventory: Inventory) -> str:
    """Fingerprint of the trunk that the head was trained with; empty where neither record nor trunk is there."""
    checkpoint = inventory.checkpoint
    for header in checkpoint.headers.values():
        if said := header.metadata.get("trained_with"):  # an extracted head
            return said
    record = Provenance.read(checkpoint)
    if record is not None:
        return record.trained_with
    return trunk_fingerprint(inventory) if inventory.shared and inventory.layers else ""


def record_training(folder: Path, *, source: str) -> None:
    """Write the record of a head that was trained together with the trunk in this folder. source: what trained it."""
    inventory = Inventory.of(Checkpoint.open(folder))
    trunk = trunk_fingerprint(inventory)
    Provenance(head_fingerprint(inventory), trunk, trunk, source, made_by="train").write(folder)


def staged_head(stage: Path, config: Mapping[str, object], family: Family) -> str:
    """Fingerprint of the head in the new files, read back from this disk."""
    return head_fingerprint(Inventory.of(replace(Checkpoint.open(stage), config={**config}), family=family))


def _sampled(inventory: Inventory) -> Iterator[str]:
    yield from (inventory.shared[role] for role in sorted(inventory.shared))
    for index in spread(sorted(inventory.layers), _LAYERS):
        layer = inventory.layers[index]
        paths = sorted(path for path, info in layer.items() if len(info.shape) > 1 and ".experts." not in path)
        yield from (layer[path].name for path in spread(paths, _WEIGHTS))


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of `items`, evenly spread, the first and (of several) the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[place * (len(items) - 1) // max(1, count - 1)] for place in range(count)]
