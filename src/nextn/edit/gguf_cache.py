"""A cache of checkpoint folders that were converted from GGUF files."""

import re
from collections.abc import Callable
from glob import escape
from hashlib import sha256
from pathlib import Path

from nextn.checkpoint.checkpoint import CONFIG
from nextn.checkpoint.gguf_file import GgufFile
from nextn.checkpoint.staging_folder import clear_stages, folder_lock

_FORMAT = 2  # of the folders; a conversion that stores other tensors than the last one's has the next number
_MAX_STEM = 60  # characters of the file's name in the name of the folder


def converted_gguf(path: Path, cache: Path, *, version: str, note: Callable[[str], None]) -> Path:
    """Return the checkpoint folder of a GGUF file, any of a split model; convert it unless the cache has it.

    Weights stay in the types of the file as far as nextn decodes with them. Other versions of the package use other
    folders, and one process converts at a time; `note` gets lines of text before a conversion, and before waiting for
    another process. Raises as `convert_gguf`, and CheckpointError if the cache is not writable.
    """
    folder = cache / _folder_name(path, version)
    if _is_complete(folder):
        return folder
    GgufFile.open(path)  # refuses an invalid file before torch is imported and the cache is created
    from nextn.edit.gguf_import import STORED, convert_gguf

    with folder_lock(cache, lambda: note(f"waiting for another process that converts a GGUF file in {cache}")):
        clear_stages(cache)
        if not _is_complete(folder):  # else another process has just converted the same file
            plan = convert_gguf(path, folder, dtype=STORED, dry_run=True)
            for line in (f"converting {path} to {folder}, once: {plan.num_bytes:,} bytes", *plan.notes):
                note(line)
            convert_gguf(path, folder, dtype=STORED)
    return folder


def _is_complete(folder: Path) -> bool:
    """Whether the conversion was completed: all files appear by one rename of the folder."""
    return (folder / CONFIG).is_file()


def _folder_name(path: Path, version: str) -> str:
    """Return a name that depends on the paths, sizes and times of all files of the model, whichever is given."""
    path = path.resolve()
    match = re.fullmatch(r"(.+)-\d{5}(-of-\d{5}\.gguf)", path.name)
    files = sorted(path.parent.glob(f"{escape(match[1])}-?????{match[2]}")) if match else [path]
    digest = sha256(f"{version} {_FORMAT}".encode())
    for file in files:
        stat = file.stat()
        digest.update(f"\0{file}\0{stat.st_size}\0{stat.st_mtime_ns}".encode(errors="surrogateescape"))
    stem = re.sub(r"[^\w.-]", "_", match[1] if match else path.stem, flags=re.ASCII)
    return f"{stem[:_MAX_STEM]}-{digest.hexdigest()[:32]}"
