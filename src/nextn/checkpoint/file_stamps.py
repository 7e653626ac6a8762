"""Whether files are still those that were opened: weights that are mapped change with the file below them.

A file that is truncated ends the process at the next access (SIGBUS); one that is overwritten in place gives a model of
mixed weights. Both show in its size or times. A file that is replaced by a rename does neither: the old one stays
mapped.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_Stamp = tuple[int, int, int, int]  # device, inode, size, time of the last change in ns


@dataclass(frozen=True)
class FileStamps:
    """What the file system says of some files."""

    stamps: tuple[tuple[Path, _Stamp | None], ...]

    @classmethod
    def of(cls, paths: Iterable[Path]) -> "FileStamps":
        """Look at the files now."""
        return cls(tuple((path, _stamp(path)) for path in paths))

    @classmethod
    def of_weights(cls, *folders: Path) -> "FileStamps":
        """Look at the weights in these folders, links followed."""
        files = {file.resolve() for folder in folders for file in folder.rglob("*.safetensors")}
        return cls.of(sorted(files))

    def changed(self) -> Path | None:
        """Return the first file that is not as it was and would show in a mapping; None if there is none.

        A file that was replaced or removed keeps its content for those who have it open.
        """
        for path, before in self.stamps:
            now = _stamp(path)
            if now is not None and before is not None and now[:2] == before[:2] and now != before:
                return path
        return None


def _stamp(path: Path) -> _Stamp | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
