"""Which text is held out: a share that hangs on names and the seed, so that it stays when other text comes or goes."""

import hashlib
import os
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from nextn.errors import ConfigError

T = TypeVar("T")


def split(paths: Sequence[Path], *, held_out: float = 0.05, seed: int = 0) -> tuple[list[Path], list[Path]]:
    """(train, held out), each in the given order; a file's side hangs on the seed and its name below the common folder.

    So the side is the same on every machine, and stays when other files come or go. Unless held_out is 0, both sides
    get at least one file. Raises ConfigError for a share outside [0, 1), or one file alone.
    """
    if not 0 <= held_out < 1:
        raise ConfigError(f"held_out = {held_out}: expected a share of the files, 0 <= held_out < 1")
    if held_out == 0:
        return list(paths), []
    if len(paths) < 2:
        raise ConfigError(f"{len(paths)} file(s) cannot be split by file; add files, or set held_out to 0")
    return divided(paths, path_marks(paths, seed=seed), held_out=held_out)


def path_marks(paths: Sequence[Path], *, seed: int = 0) -> list[float]:
    """The mark of each file: it hangs on the seed and the file's name below the common folder."""
    root = os.path.commonpath([path.absolute().parent for path in paths]) if paths else ""
    return [mark(f"{seed}:{path.absolute().relative_to(root).as_posix()}".encode()) for path in paths]


def mark(name: bytes) -> float:
    """A number in [0, 1) that hangs on the name alone; over many names it is uniform."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest()) / 2**48


def divided(items: Sequence[T], marks: Sequence[float], *, held_out: float) -> tuple[list[T], list[T]]:
    """(train, held out), each in the given order: held out are those marked below that share of [0, 1).

    Each side gets at least one mark, if there are two; items of one mark, such as copies of a text, stay together.
    """
    distinct = sorted(set(marks))
    held = set(distinct[: min(max(bisect_left(distinct, held_out), 1), len(distinct) - 1)])
    pairs = list(zip(items, marks, strict=True))
    return [item for item, mark in pairs if mark not in held], [item for item, mark in pairs if mark in held]
