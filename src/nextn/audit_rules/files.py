"""Compare the index with the files: what index-based loaders miss, side files, and tensors stored twice."""

import fnmatch
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from nextn.audit_rules.findings import Finding, Severity, convert, restore, same, verb
from nextn.checkpoint.checkpoint import ADAPTER, INDEX, SINGLE, Checkpoint
from nextn.checkpoint.file_index import FileIndex, adapters, file_index, lost_files, mixed_files
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.trained_heads import SIDE_HEAD
from nextn.edit.reindex import side_files
from nextn.text_format import counted, some

IDS = ("index", "side-file", "stored-twice")
_MOST_COMPARED = 4  # tensors that two files hold
_VALID = "Each tensor in the file that the index gives: loaders that follow it see no others."


def index(inventory: Inventory) -> Iterator[Finding]:
    """Report an index that does not lead to the files' tensors, files that are absent, and tensors in several files."""
    checkpoint = inventory.checkpoint
    derived = file_index(checkpoint, inventory.family)
    heads = side_files(inventory)
    is_head_alone = checkpoint.index is None and not inventory.layers  # as `extract` writes it, and read by its file
    if not is_head_alone and any(derived.weight_map[name] not in heads for name in derived.unlisted):
        yield _index_wrong(inventory, derived, derived.unlisted)
    yield from _paths(inventory)
    named = _by_file(checkpoint.index or {})
    stored = {name for header in checkpoint.headers.values() for name in header.tensors}  # under names as they are
    for file in lost_files(checkpoint):
        lost = [name for name in named[file] if name not in stored]
        yield _absent(
            inventory, file, f"The index puts {counted(len(lost), 'tensor')} in {file}, which is absent", lost
        )
    is_head = partial(inventory.family.canonical, num_layers=inventory.num_layers)
    for file in sorted(named.keys() & checkpoint.headers.keys()):
        # What the head lacks is a finding of its own, wherever the index puts it.
        if lost := [name for name in named[file] if name not in stored and is_head(name) is None]:
            found = f"The index puts {some(lost)} in {file}, which does not hold {'it' if len(lost) == 1 else 'them'}"
            yield _absent(inventory, file, found, lost)
    yield from _consolidated(inventory)
    yield from list(_adapter(inventory)) or _beside_single(inventory, derived)
    yield from _duplicates(inventory)


def _paths(inventory: Inventory) -> Iterator[Finding]:
    """Report an index with paths in place of the names of files: of subfolders, or of any folder."""
    checkpoint = inventory.checkpoint
    paths = [problem.file for problem in checkpoint.problems if problem.kind == "path"]
    if below := sorted(
        file for file in {*(checkpoint.index or {}).values()} & checkpoint.headers.keys() if "/" in file
    ):
        # One file for all has no paths at all.
        yield Finding(
            "index", "error" if paths else "warning", f"{INDEX}: {below[0]}",
            f"The index names files in subfolders, such as {below[0]}: transformers opens them, and vLLM, SGLang and "
            "llama.cpp's converter read the folder's own files alone.",
            "All files beside the index.", convert(inventory, "--form single-file"),
        )  # fmt: skip
    elif paths:
        yield Finding(
            "index", "error", f"{INDEX}: {paths[0]}",
            f"The index names files by paths, such as {some(paths[:1])}: vLLM compares them with the names in the "
            "folder and finds none, and a path of another machine leads nowhere.",
            "The names of the files beside the index.", _reindex(checkpoint),
        )  # fmt: skip


def _reindex(checkpoint: Checkpoint) -> str:
    """Return how to write the index from the files, once all of them are there."""
    command, lost = f"nextn convert {shlex.quote(checkpoint.path)} --reindex", lost_files(checkpoint)
    return f"Download {some(lost)} again (`hf download`), and then run `{command}`." if lost else command


def _adapter(inventory: Inventory) -> Iterator[Finding]:
    """Report an adapter in the folder of a model."""
    files = adapters(inventory.checkpoint)
    if ADAPTER in inventory.checkpoint.sources and files:
        yield Finding(
            "index", "warning", ADAPTER,
            f"{some(files)} and {ADAPTER} beside the model: transformers applies the adapter on load, and engines and "
            "nextn read the model alone, so that their texts differ.",
            "The model alone, with the adapter merged or in another folder.",
            "Merge it with PEFT's `merge_and_unload`, or move both files to another folder.",
        )  # fmt: skip


def _read_alone(checkpoint: Checkpoint) -> list[str]:
    """Return the files that vLLM reads in place of all others: `--load-format auto` looks for Mistral's layout first.

    Source: vLLM, model_loader/default_loader.py, _prepare_weights.
    """
    return fnmatch.filter(checkpoint.headers, "consolidated*.safetensors")


def _consolidated(inventory: Inventory) -> Iterator[Finding]:
    """Report a head that vLLM does not find, as it is in none of the files that it reads in place of the others."""
    checkpoint = inventory.checkpoint
    files = _read_alone(checkpoint)
    lost = [name for name in inventory.stored.values() if checkpoint.tensors[name].file not in files
            and not any(name in checkpoint.headers[file].tensors for file in files)]  # fmt: skip
    if files and lost:
        needed = set(files) - set(checkpoint.unindexed)
        yield Finding(
            "index", "warning", files[0],
            f"{some(files)} beside the model: vLLM (`--load-format auto`) reads consolidated*.safetensors alone where "
            f"there is one, and not the {counted(len(lost), 'tensor')} of the head that other files hold, such as "
            f"{lost[0]}.",
            "No file of that name, or the whole model in such files.",
            convert(inventory, "--form single-file") if needed else f"Move {some(files)} to another folder.",
        )  # fmt: skip


def _beside_single(inventory: Inventory, derived: FileIndex) -> Iterator[Finding]:
    """Report files beside model.safetensors that are not the model's, such as adapters and steering vectors."""
    headers = inventory.checkpoint.headers
    if inventory.checkpoint.index is not None or SINGLE not in headers:
        return
    # `absent_head` reports a head of Unsloth with the command that puts it into the model.
    alone = _read_alone(inventory.checkpoint) if inventory.stored else []  # `_consolidated` reports these
    others = [file for file in derived.left_out if file != SIDE_HEAD and file not in alone
              and not headers[file].tensors.keys() <= derived.weight_map.keys()]  # fmt: skip
    if others:
        readers, fail = (
            ("SGLang reads", "fails") if _read_alone(inventory.checkpoint) else ("vLLM and SGLang read", "fail")
        )
        unknown = next(name for name in headers[others[0]].tensors if name not in derived.weight_map)
        yield Finding(
            "index", "warning", others[0],
            f"{some(others)} beside {SINGLE}, without an index: {readers} every .safetensors file of the folder, and "
            f"{fail} at names that the model does not have, such as {unknown}.",
            f"{SINGLE} alone, or an index that lists its tensors.", f"Move {some(others)} to another folder.",
        )  # fmt: skip


def _index_wrong(inventory: Inventory, derived: FileIndex, unlisted: Sequence[str]) -> Finding:
    checkpoint, own = inventory.checkpoint, inventory.checkpoint.index
    files = sorted({derived.weight_map[name] for name in unlisted})
    heads = sum(inventory.family.canonical(name, inventory.num_layers) is not None for name in unlisted)
    where = f"{counted(len(unlisted), 'tensor')} in {some(files)}, such as {some(unlisted[:1])}"
    if own is None:
        found = f"There is no index, and loaders do not find {where}"
    else:
        gone = sorted(set(own.values()) - checkpoint.headers.keys())
        elsewhere = sum(name in own for name in unlisted)
        which = {0: "does not list", len(unlisted): "names other files for"}.get(elsewhere, "lists not or elsewhere")
        found = f"The index {which} {where}: loaders that follow it miss them"
        found += (
            f". It names {counted(len(gone), 'file')} that {'is' if len(gone) == 1 else 'are'} absent" if gone else ""
        )
    if heads:
        found += f"; {counted(heads, 'tensor')} of the head among them"
    mixed = mixed_files(checkpoint)
    fix = f"{mixed[0].upper()}{mixed[1:]}." if mixed else _reindex(checkpoint)
    return Finding("index", "error", INDEX, f"{found}.", _VALID, fix)


def _absent(inventory: Inventory, file: str, found: str, lost: Sequence[str]) -> Finding:
    if heads := sum(inventory.family.canonical(name, inventory.num_layers) is not None for name in lost):
        found += f"; {counted(heads, 'tensor')} of the head among them"
    or_restore = f", or run `{restore(inventory)}`" if heads == len(lost) and not inventory.trunk_lost else ""
    return Finding(
        "index", "error", f"{INDEX}: {file}", f"{found}.", "Every tensor that the index lists, in its file.",
        f"Download {file} again (`hf download`){or_restore}.",
    )  # fmt: skip


def _duplicates(inventory: Inventory) -> Iterator[Finding]:
    """Report files with tensors that other files hold as well; a note where nobody gets other values by it."""
    checkpoint = inventory.checkpoint
    for file, header in checkpoint.headers.items():
        twice = [info for name, info in header.tensors.items() if checkpoint.tensors.get(name, info).file != file]
        if not twice:
            continue
        equal = all(same(checkpoint, info, checkpoint.tensors[info.name]) for info in twice[:_MOST_COMPARED])
        reader = _reader(inventory, file)
        used = sorted({checkpoint.tensors[info.name].file for info in twice})
        keeps = f"`{convert(inventory, '--form single-file')}` keeps the tensors in {some(used)}"
        own = [name for name, at in (checkpoint.index or {}).items() if at == file and name in header.tensors]
        remove = f"Keep {file}, which holds {some(own)}" if own else f"Remove {file}, or the files that it replaces"
        is_harmless, are = equal or not reader, "is" if len(twice) == 1 else "are"
        yield Finding(
            "index", "note" if is_harmless else "warning", f"{INDEX}: {file}" if checkpoint.index else file,
            f"{counted(len(twice), 'tensor')} of {some(used)} {are} in {file}, too, with "
            f"{'equal' if equal else 'other'} values, such as {twice[0].name}: {reader or 'no loader opens it'}.",
            "Each tensor in one file.",
            "Nothing needs to be done." if is_harmless else f"{remove}; {keeps}.",
        )  # fmt: skip


def _reader(inventory: Inventory, file: str) -> str:
    """Say who reads a second file of a tensor; "" if nobody does."""
    index = inventory.checkpoint.index
    if file in _read_alone(inventory.checkpoint):
        return "vLLM (`--load-format auto`) reads it in place of the others"
    if index is None or file in index.values():
        return "which of them is used depends on a loader's order"
    if file == SINGLE:
        return "transformers opens it before any index, other loaders follow the index"
    return "llama.cpp's converter reads every model*.safetensors" if file.startswith("model") else ""


def side_file(inventory: Inventory) -> Iterator[Finding]:
    """Report files that hold tensors of the head and that index-based loaders do not open."""
    family, checkpoint = inventory.family, inventory.checkpoint
    heads: dict[str, list[str]] = defaultdict(list)
    for name in inventory.stored.values():
        heads[checkpoint.tensors[name].file].append(name)
    derived, apart = file_index(checkpoint, family), side_files(inventory)
    if any(derived.weight_map[name] not in apart for name in derived.unlisted):
        return  # `index` reports it with the others
    for file in sorted(apart & heads.keys()):
        readers = [name for name, engine in family.engines.items() if any(file in note for note in engine.notes)]
        published = any(file in remark for remark in family.remarks)
        severity: Severity = "note" if published else "warning" if readers else "error"
        read = f"{verb(readers, 'read')} it nevertheless" if readers else "no engine is known to read it nevertheless"
        unnamed = (
            "which the index does not list"
            if checkpoint.index is not None
            else f"which no loader opens next to {SINGLE}"
        )
        yield Finding(
            "side-file", severity, file,
            f"{counted(len(heads[file]), 'tensor')} of the head in {file}, {unnamed}; {read}.",
            "As it is: the family is published with this file." if published else f"{file} in the index's weight_map.",
            "Nothing needs to be done." if published
            else _reindex(checkpoint),
        )  # fmt: skip


def stored_twice(inventory: Inventory) -> Iterator[Finding]:
    """Report tensors of the head stored under several names."""
    groups: dict[bool, list[Sequence[str]]] = defaultdict(list)
    for names in inventory.duplicates.values():
        groups[all(same(inventory.checkpoint, names[0], other) for other in names[1:])].append(names)
    for equal, twice in groups.items():
        yield Finding(
            "stored-twice", "note" if equal else "warning", twice[0][0],
            f"{counted(len(twice), 'tensor')} of the head under several names, such as {some(twice[0])}, with "
            f"{'equal' if equal else 'different'} values.",
            "One name for each: which one an engine uses depends on its load order.",
            restore(inventory, force=True) if not equal else "Nothing needs to be done.",
        )  # fmt: skip


def _by_file(weight_map: Mapping[str, str]) -> dict[str, list[str]]:
    """Return file -> the tensors that the index assigns to it."""
    names_by_file: dict[str, list[str]] = defaultdict(list)
    for name, file in weight_map.items():
        names_by_file[file].append(name)
    return names_by_file


RULES = (index, side_file, stored_twice)
