"""Files of a checkpoint's folder that are not its own regular files: links that lead outside, pipes, devices.

An untrusted checkpoint may have links to any file of this machine; copies of them would publish their contents.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.remote import ByteSource, LocalFile
from nextn.errors import CheckpointError
from nextn.text_format import some


def refuse_links(checkpoint: Checkpoint, *, follow: bool) -> None:
    """Raise CheckpointError for links that lead out of the checkpoint's folder, unless `follow`.

    Links of a hub cache into its own `blobs` are allowed, and so is a link given as a single-file checkpoint.
    """
    local = [source for source in all_files(checkpoint).values() if isinstance(source, LocalFile)]
    outside = [file for file in local if is_outside(file) and file.path != Path(checkpoint.path)]
    if outside and not follow:
        raise CheckpointError(
            f"{checkpoint.path}: links lead out of the folder: {some([file.name for file in outside])} (the first to "
            f"{outside[0].path.resolve()}). The output would contain those files. If that is intended, set "
            "NEXTN_FOLLOW_LINKS=1 (in Python, follow_links=True); else replace the links with the files."
        )


def all_files(checkpoint: Checkpoint) -> dict[str, ByteSource]:
    """Return the checkpoint's files, including subfolders, without hidden ones."""
    root = Path(checkpoint.path)
    if not root.is_dir():
        return dict(checkpoint.sources)
    return {name: LocalFile(path, name) for name, path in _entries(root).items() if path.is_file()}


def left_out(checkpoint: Checkpoint) -> list[str]:
    """Return notes of what a copy of the folder lacks: pipes, sockets, devices, broken links, links to folders."""
    special = [name for name, path in _entries(Path(checkpoint.path)).items() if not path.is_file()]
    return [f"left out, as neither regular files nor folders: {some(special, 5)}"] if special else []


def is_outside(file: LocalFile) -> bool:
    """Whether the file, links followed, is outside of the folder that lists it."""
    root, real = file.path.parents[file.name.count("/")].resolve(), file.path.resolve()
    return not any(real.is_relative_to(folder) for folder in _own_folders(root))


def _own_folders(root: Path) -> Iterator[Path]:
    """Yield the folder, and where the hub's cache keeps the files of `<repository>/snapshots/<commit>`."""
    yield root
    blobs = root.parent.parent / "blobs"
    if root.parent.name == "snapshots" and not blobs.is_symlink():
        yield blobs


def _entries(root: Path) -> dict[str, Path]:
    """Return all entries except folders, by relative name, without hidden ones; links to folders are entries.

    Folders that another process removes meanwhile are skipped.
    """
    paths: list[Path] = []
    for parent, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names = [*files, *(name for name in folders if Path(parent, name).is_symlink())]
        paths += [Path(parent, name) for name in names if not name.startswith(".")]
    return {path.relative_to(root).as_posix(): path for path in sorted(paths)}
