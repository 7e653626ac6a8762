"""What a checkpoint's folder holds besides regular files of its own: links to places outside, pipes, devices.

A checkpoint from a stranger may have links to any file of this machine; copies of them would publish its contents.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from nextn.checkpoints.checkpoint import Checkpoint
from nextn.checkpoints.remote import LocalFile, Source
from nextn.errors import CheckpointError
from nextn.words import some


def refuse_links(checkpoint: Checkpoint, *, follow: bool) -> None:
    """Raise CheckpointError for files that are links out of the checkpoint's folder, unless they are to be followed.

    Links of a hub cache into its own `blobs` are its files. A single file that was named itself may be a link.
    """
    local = [source for source in all_files(checkpoint).values() if isinstance(source, LocalFile)]
    outside = [file for file in local if leaves(file) and file.path != Path(checkpoint.path)]
    if outside and not follow:
        raise CheckpointError(
            f"{checkpoint.path}: links lead out of the folder: {some([file.name for file in outside])} (the first to "
            f"{outside[0].path.resolve()}). What is written would hold the contents of files that lie elsewhere. If "
            "that is wanted, give --follow-links (follow_links=True); else put the files themselves there."
        )


def all_files(checkpoint: Checkpoint) -> dict[str, Source]:
    """The checkpoint's files, those in subfolders too, hidden ones aside."""
    root = Path(checkpoint.path)
    if not root.is_dir():
        return dict(checkpoint.sources)
    return {name: LocalFile(path, name) for name, path in _entries(root).items() if path.is_file()}


def left_out(checkpoint: Checkpoint) -> list[str]:
    """Notes of what a copy of the folder does not get: pipes, sockets, devices, broken links, links to folders."""
    odd = [name for name, path in _entries(Path(checkpoint.path)).items() if not path.is_file()]
    return [f"left out, as neither files nor folders of their own: {some(odd, 5)}"] if odd else []


def leaves(file: LocalFile) -> bool:
    """Whether the file lies outside of the folder that it is listed in, links followed."""
    root, real = file.path.parents[file.name.count("/")].resolve(), file.path.resolve()
    return not any(real.is_relative_to(home) for home in _homes(root))


def _homes(root: Path) -> Iterator[Path]:
    """The folder, and where the hub's cache keeps the files of `<repository>/snapshots/<commit>`."""
    yield root
    blobs = root.parent.parent / "blobs"
    if root.parent.name == "snapshots" and not blobs.is_symlink():
        yield blobs


def _entries(root: Path) -> dict[str, Path]:
    """What is in the folder and its subfolders by name, hidden ones aside, but the subfolders; links are entries.

    Folders that another process removes meanwhile are as if they had not been there.
    """
    found: list[Path] = []
    for at, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names = [*files, *(name for name in folders if Path(at, name).is_symlink())]
        found += [Path(at, name) for name in names if not name.startswith(".")]
    return {path.relative_to(root).as_posix(): path for path in sorted(found)}
