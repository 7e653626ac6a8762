"""Move a head between layouts that mean the same computation, and between files; take it out into one file.

Bytes, dtypes and scales stay as they are, unless norm gains are to be shifted by one.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from nextn.checkpoints.checkpoint import CONFIG, SINGLE, Checkpoint, opened
from nextn.checkpoints.inventory import Inventory
from nextn.checkpoints.provenance import Provenance, staged_head, trained_with, trunk_fingerprint
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.families import Family, by_name, rows
from nextn.moving.fit import ABOUT_HEAD, SIZES, absent, quantised_without
from nextn.moving.links import refuse_links
from nextn.moving.staging import (
    Files,
    Piece,
    Plan,
    Progress,
    changes,
    divide,
    execute,
    index_document,
    into_new_folder,
    quiet,
    visible,
    with_config,
)
from nextn.words import some

Form = Literal["shards", "side-file", "single-file"]
Shift = Literal["add-1", "subtract-1"]
SIDE_FILE = "mtp.safetensors"
_ALSO = ("model_type", "quantization_config", "tie_word_embeddings", "torch_dtype", "dtype")  # beside SIZES

# What decides what a head computes; two layouts that agree on these hold the same numbers under other names.
_FACTS = ("concat", "hidden", "recycled", "gain", "position0", "order", "experts", "own")
_GAIN = re.compile(r"norm\w*(\.m)?\.weight$")
_SHIFTS: Mapping[tuple[str, str], Shift] = {("1+w", "w"): "add-1", ("w", "1+w"): "subtract-1"}


def convert(
    source: "str | Path | Checkpoint",
    out: str | Path,
    *,
    to: str | None = None,
    now: str | None = None,
    form: Form | None = None,
    gain: Shift | None = None,
    follow_links: bool = False,
    dry_run: bool = False,
    on_bytes: Progress = quiet,
) -> Plan:
    """Write `source` into the new folder `out`, its head under the names of the family `to` -> what was done.

    to: left out, the model's own family: a head under another known layout's names gets its own back. now: the layout
    that the head has, where its names do not tell. form: the head
    in an indexed file of its own (shards, also if left out), in mtp.safetensors that the index does not name, or all
    in one file. gain: shift the head's norm gains by one, in fp32, rounded to their dtype. Weight files that hold
    nothing of the head are hard-linked. follow_links: see `restore`. Raises FamilyError that names what differs where
    the layouts do not compute the same.
    """
    checkpoint = opened(source)
    refuse_links(checkpoint, follow=follow_links)
    own = Inventory.of(checkpoint)
    layout = by_name(to) if to else own.family
    here = find_head(own, layout, by_name(now) if now else None)
    _refuse_other(here.family, layout, gain, len(here.modules))
    fresh, notes = _renamed(own, here, layout)
    if gain is not None:
        fresh, told = _shifted(fresh, here, gain)
        notes.append(told)
    elif form is None and all(name == piece.name for name, piece in fresh.items()):
        raise ConfigError(f"{checkpoint.path}: its head has the names of {layout.name} already; nothing to convert")
    plan = replace(_plan(own, here, layout, fresh, form), notes=tuple(notes), follow_links=follow_links)
    plan = into_new_folder(plan, out)
    if not dry_run:
        execute(plan, seal=partial(_seal, own=own, here=here, layout=layout), on_bytes=on_bytes)
    return plan


def find_head(own: Inventory, layout: Family, now: Family | None = None) -> Inventory:
    """The head as the layout sees it whose names it has: `now`, else the model's own, else the likest to `layout`.

    Raises CheckpointError for a head that is partial in every layout, or not there.
    """
    families = (now,) if now else (own.family, *rows())
    found = [each for family in families if (each := _seen_by(family, own)) and each.stored and not absent(each)]
    if found:
        return min(found, key=partial(_distance, own=own, layout=layout))
    if own.stored:
        raise CheckpointError(
            f"{own.checkpoint.path}: its head is partial, without {some(absent(own), 5)}. `nextn restore` puts it back."
        )
    raise CheckpointError(f"{own.checkpoint.path}: holds no head in any known layout. `nextn restore` puts one back.")


def _distance(here: Inventory, own: Inventory, layout: Family) -> tuple[int, bool, int, int]:
    """Blocks are called as the trunk's layers are; then the model's own layout, one that computes the same as `layout`,
    and one that knows more of the names inside the block.
    """
    paths = {path for layer in own.layers.values() for path in layer}
    stem = own.family.names["block"].format(module=0, layer=own.num_layers)
    fits, known = 0, 0
    for canonical, name in here.stored.items():
        if rest := canonical.partition(".block.")[2]:
            path = own.family.published(f"0.block.{rest}", own.num_layers).removeprefix(f"{stem}.")
            fits += path in paths
            known += not name.endswith(rest)
    return -fits, here.family.name != own.family.name, len(_differences(here.family, layout, len(here.modules))), -known


def _seen_by(family: Family, own: Inventory) -> Inventory | None:
    """What the tensors that are not the trunk's are to `family`; None if it has no room for so many modules."""
    trunk = {info.name for layer in own.layers.values() for info in layer.values()} | set(own.shared.values())
    rest = {name: info for name, info in own.checkpoint.tensors.items() if name not in trunk}
    try:
        config = family.with_count({"num_hidden_layers": own.num_layers}, own.promised)
        found = Inventory.of(replace(own.checkpoint, tensors=rest, config=config), family=family)
    except FamilyError:
        return None
    return replace(found, checkpoint=own.checkpoint, shared=own.shared, layers=own.layers)


def _differences(old: Family, new: Family, count: int) -> list[str]:
    said = ((fact, getattr(old, fact), getattr(new, fact)) for fact in _FACTS)
    differs = [f"{fact} is {mine!r} against {other!r}" for fact, mine, other in said if mine != other]
    mine, other = ({*family.names} - {*family.copies} for family in (old, new))
    if mine != other:
        differs.append(f"only one of them has {', '.join(sorted(mine ^ other))}")
    if new.max_modules is not None and count > new.max_modules:
        differs.append(f"{count} modules, room for {new.max_modules}")
    return differs


def _refuse_other(old: Family, new: Family, gain: Shift | None, count: int) -> None:
    """`gain` bridges layouts that differ in the gain."""
    shift = _SHIFTS.get((old.gain, new.gain))
    bridged = replace(old, gain=new.gain) if shift is not None and gain == shift else old
    if differs := _differences(bridged, new, count):
        way = f" --gain {shift} bridges the gain." if shift is not None and gain is None else ""
        raise FamilyError(f"{old.name} and {new.name} do not compute the same: {'; '.join(differs)}.{way}")


def _renamed(own: Inventory, here: Inventory, layout: Family) -> tuple[dict[str, Piece], list[str]]:
    """Name in `layout` -> piece, and which copies it has no place for."""
    wrapper = own.wrapper if own.wrapper in layout.wrappers else ""
    placed = {canonical: name for canonical, name in here.stored.items() if here.role(canonical) in layout.names}
    pieces = {layout.published(canonical, own.num_layers, wrapper=wrapper): Piece(own.checkpoint, name)
              for canonical, name in placed.items()}  # fmt: skip
    left = sorted(here.stored.keys() - placed.keys())
    return pieces, [
        f"left out: {some([here.stored[each]])}, a copy that {layout.name} has no place for" for each in left
    ]


def _shifted(fresh: Mapping[str, Piece], here: Inventory, gain: Shift) -> tuple[dict[str, Piece], str]:
    by = 1.0 if gain == "add-1" else -1.0
    gains = {name for canonical, name in here.stored.items() if is_gain(canonical)}
    pieces = {name: replace(piece, edit=shifting(piece.info.dtype, by)) if piece.name in gains else piece
              for name, piece in fresh.items()}  # fmt: skip
    exact = "exact in bf16 for gains from 0.5 to 2" if gain == "subtract-1" else "which rounds what lies near 0"
    return pieces, f"{gain} on {len(gains)} norm gains of the head, in fp32 rounded to their dtype: {exact}"


def is_gain(canonical: str) -> bool:
    """Whether a tensor of the head is a norm's gain, which some families store as w for 1 + w."""
    return _GAIN.search(canonical) is not None


def shifting(dtype: str, by: float) -> Callable[[bytes], bytes]:
    """Bytes -> bytes of the same numbers plus `by`, to nearest even. Raises CheckpointError for other dtypes."""
    import numpy as np

    if dtype in ("F16", "F32"):
        kind = np.dtype("<f2" if dtype == "F16" else "<f4")
        return lambda data: (np.frombuffer(data, kind).astype("<f4") + np.float32(by)).astype(kind).tobytes()
    if dtype != "BF16":
        raise CheckpointError(f"a norm gain is {dtype}; gains can be shifted in BF16, F16 and F32")

    def bf16(data: bytes) -> bytes:
        bits = ((np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4") + np.float32(by)).view("<u4")
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()

    return bf16


def _plan(own: Inventory, here: Inventory, layout: Family, fresh: dict[str, Piece], form: Form | None) -> Plan:
    gone = here.spellings(here.own) | set(here.copies.values())
    checkpoint = visible(own.checkpoint, {own.checkpoint.tensors[name].file for name in gone})
    files = divide(checkpoint, gone, fresh)
    if form == "single-file":
        everything = {name: Piece(checkpoint, name) for name in checkpoint.tensors if name not in gone} | fresh
        files = Files({SINGLE: everything}, None, dropped=tuple({info.file for info in checkpoint.tensors.values()}))
    elif form == "side-file":
        files = _beside(files, fresh)
    documents = _configs(replace(own, checkpoint=checkpoint), here, layout, fresh)
    documents |= index_document(files, checkpoint)
    told = changes(checkpoint, documents)
    return Plan(checkpoint, Path(), layout.name, files, documents, changes=told)


def _beside(files: Files, fresh: Mapping[str, Piece]) -> Files:
    """The same with the head in a file that the index does not name."""
    weights = {file: pieces for file, pieces in files.weights.items() if pieces is not fresh}
    index = {name: file for name, file in (files.index or {}).items() if name not in fresh}
    return replace(files, weights={**weights, SIDE_FILE: fresh}, index=index)


def _configs(
    own: Inventory, here: Inventory, layout: Family, fresh: Mapping[str, Piece]
) -> dict[str, Mapping[str, object]]:
    """Where names change, the quantisation config leaves the head's unquantised modules out by their new ones."""
    moved = any(name != piece.name for name, piece in fresh.items())
    edited = quantised_without(own, here, fresh) if moved else {}
    config: Mapping[str, object] = edited.pop(CONFIG, own.checkpoint.config)
    count = len(here.modules)
    if not own.layers and layout.name != own.family.name:  # the head alone: nothing else says what it is
        config = layout.with_count({**config, "model_type": layout.model_types[0]}, count)
    elif own.family.num_modules(config) != count:
        config = own.family.with_count(config, count)
    return {**edited, **with_config(own.checkpoint, config)}


def _seal(stage: Path, own: Inventory, here: Inventory, layout: Family) -> None:
    config = layout.with_count({"num_hidden_layers": own.num_layers}, len(here.modules))
    Provenance(
        staged_head(stage, config, layout), trained_with(own), trunk_fingerprint(own) if own.layers else "",
        own.checkpoint.path, own.checkpoint.revision, "convert",
    ).write(stage)  # fmt: skip


def extract(
    source: "str | Path | Checkpoint",
    out: str | Path,
    *,
    copies: bool = False,
    follow_links: bool = False,
    dry_run: bool = False,
    on_bytes: Progress = quiet,
) -> Plan:
    """Write the head of `source` into the file `out`, with a small config.json beside it -> what was done.

    The file's header says where the head came from; it serves as a base for `restore`. copies: also the modules'
    copies of the trunk's embedding and output. follow_links: see `restore`.
    """
    path = Path(out).expanduser().absolute()
    if path.suffix != ".safetensors" or os.path.lexists(path):
        raise ConfigError(f"{out}: must be the name of a .safetensors file that is not there yet")
    own = Inventory.of(opened(source))
    refuse_links(own.checkpoint, follow=follow_links)
    here = find_head(own, own.family)
    _refuse_other(here.family, own.family, None, len(here.modules))
    fresh, _ = _renamed(own, here, own.family)
    if not copies:
        fresh = {name: piece for name, piece in fresh.items() if piece.name not in here.copies.values()}
    config = small_config(own, len(here.modules))
    refuse_config = partial(_refuse_foreign_config, path.with_name(CONFIG), config)
    refuse_config()
    checkpoint = own.checkpoint
    metadata = {"format": "pt", "family": own.family.name, "source": checkpoint.path,
                "revision": checkpoint.revision or "", "trained_with": trained_with(own)}  # fmt: skip
    files, documents = Files({path.name: fresh}, None), {CONFIG: config}
    plan = Plan(checkpoint, path.parent, own.family.name, files, documents, metadata=metadata)
    if not dry_run:
        execute(plan, seal=lambda _: refuse_config(), on_bytes=on_bytes)
    return plan


def small_config(own: Inventory, count: int) -> dict[str, object]:
    """What tells the head's family, names and sizes, flat."""
    config = own.checkpoint.config
    inner = config.get("text_config")
    fields = {**(inner if isinstance(inner, Mapping) else {}), **config}
    kept = {key: value for key, value in fields.items() if key in _ALSO or key in SIZES or ABOUT_HEAD.search(key)}
    return own.family.with_count({**kept, "num_hidden_layers": own.num_layers}, count)


def _refuse_foreign_config(path: Path, config: Mapping[str, object]) -> None:
    try:
        is_same = not os.path.lexists(path) or (path.is_file() and json.loads(path.read_bytes()) == config)
    except (OSError, ValueError, RecursionError):
        is_same = False
    if not is_same:
        raise CheckpointError(f"{path}: belongs to another model. Give the head a folder of its own.")
