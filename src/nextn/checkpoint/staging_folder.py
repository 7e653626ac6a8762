"""Hidden folders ("stages") in which one process at a time prepares files; leftovers of dead processes are removed.

A stage is inside the folder that is changed in place, or next to the one that is created, so that files are moved by
renaming. It holds a lock file, whose lock the system releases when its owner ends, however it ends. The stage of a
target always has the same name, so the next process that changes the target finds the leftovers.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from nextn.errors import CheckpointError, NextnError

SUFFIX = ".nextn-stage"
_LOCK, _OLD = "lock", "old"
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def owned(target: Path, *, inside: bool = False) -> Iterator[Path]:
    """Hold the stage of `target`, a folder that is empty except for its lock, and remove it at the end.

    With `inside` the stage is in the folder `target`, for changes in place; else next to it, for a new folder. Raises
    CheckpointError if another process holds it, OSError if it cannot be created.
    """
    stage = target / SUFFIX if inside else target.with_name(f".{target.name}{SUFFIX}")
    lock = _lock(stage, target)
    try:
        if not inside and (stage / _OLD).is_dir() and not os.path.lexists(target):
            (stage / _OLD).rename(target)  # its owner died between the two renames of `atomic_folder`
        _empty(stage)
        yield stage
    finally:
        with suppress(OSError):
            _empty(stage)
            (stage / _LOCK).unlink()
            stage.rmdir()  # fails if the next owner already uses it
        os.close(lock)


@contextmanager
def staged(target: Path, *, inside: bool = False, needed: int = 0) -> Iterator[Path]:
    """Hold a stage as `owned` does; failures become CheckpointErrors that name `target` instead of the stage.

    `needed` is the number of bytes to be written, which must be free at the start; 0 if unknown. In messages, a path
    in the stage's folder `new` becomes the same path in `target`.
    """
    try:
        need_room(target, needed)
        with owned(target, inside=inside) as stage, named_after(target, stage, needed=needed):
            yield stage
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error.strerror or error}. It is unchanged.") from error


@contextmanager
def named_after(target: Path, stage: Path, *, needed: int = 0) -> Iterator[None]:
    """Turn failures in `stage` into errors that name `target`, and for a full disk the number of missing bytes."""
    try:
        yield
    except (OSError, SafetensorError, NextnError) as error:
        raise _failure(error, target, stage, needed) from error


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; when the block ends without an exception, it replaces `folder`.

    After an exception `folder` is unchanged and nothing else is left. The leftovers of a
    killed process are removed by the next one that writes the same folder, and an old folder moved aside is restored.
    """
    with staged(folder) as stage:
        new, old = stage / "new", stage / _OLD
        new.mkdir()
        yield new
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise


def clear_stages(folder: Path) -> None:
    """Remove the stages of dead processes next to the entries of `folder`; those in use stay."""
    for stage in folder.glob(f".?*{SUFFIX}"):
        with suppress(CheckpointError, OSError), owned(folder / stage.name[1 : -len(SUFFIX)]):
            pass


def need_room(target: Path, needed: int) -> None:
    """Raise CheckpointError where the disk of `target` has less than `needed` bytes left."""
    if needed and needed > (free := free_bytes(target)):
        raise CheckpointError(
            f"{target}: not enough disk space: {needed:,} bytes are to be written and the disk has {free:,} left, "
            f"{needed - free:,} too few. Nothing was written. Free them, or choose a folder on another disk."
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def free_bytes(target: Path) -> int:
    """Return the bytes that this user may still write on the disk of `target`, which need not exist yet."""
    existing = next(path for path in (target.absolute(), *target.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def renamed(error: NextnError, old: Path, new: Path) -> NextnError:
    """Return the error with another path in its message."""
    text = str(error).replace(str(old), str(new))
    return error if text == str(error) else type(error)(text)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the path."""
    try:
        yield
    except OSError as error:
        message = f"{path}: cannot be written: {error.strerror or error}; free some space, or choose another folder"
        raise CheckpointError(message) from error


@contextmanager
def folder_lock(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a folder, which is created, until the end of the block or of the process; wait for others.

    Raises CheckpointError if the folder cannot be created.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def explain_full_disk(advice: Callable[[], str]) -> Iterator[None]:
    """Add the advice to a CheckpointError that a full disk caused."""
    try:
        yield
    except CheckpointError as error:
        if not _is_full(error):
            raise
        raise CheckpointError(f"{error} {advice()}") from error


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if isinstance(error, SafetensorError) and any(f"(os error {code})" in str(error) for code in _FULL):
            return True
        error = error.__cause__
    return False


def _lock(stage: Path, target: Path) -> int:
    """Create or take over the stage; return the file descriptor that holds its lock."""
    while True:
        with suppress(FileExistsError):  # `exist_ok` would check again, when it may be gone
            stage.mkdir(parents=True)
        if stage.is_symlink():  # its contents would be removed
            raise CheckpointError(f"{stage}: is a link, which is not followed. Remove it.")
        try:
            lock = os.open(stage / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # the previous owner removed the stage just now
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), (stage / _LOCK).lstat()):
                return lock
        except FileNotFoundError:
            pass
        except OSError as error:
            os.close(lock)
            if not isinstance(error, BlockingIOError):
                raise
            raise CheckpointError(
                f"{target}: another process is changing this folder. Nothing was written; try again when the other "
                "process has ended."
            ) from error
        os.close(lock)


def _empty(stage: Path) -> None:
    for path in stage.iterdir():
        if path.name != _LOCK:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _failure(error: Exception, target: Path, stage: Path, needed: int) -> Exception:
    """Return the failure in terms of `target`, and for a full disk how much is missing."""
    if _is_full(error):
        written = sum(path.lstat().st_size for path in stage.rglob("*") if path.is_file())
        missing = max(0, needed - written - free_bytes(target))
        how_much = f"{missing:,} more bytes are needed" if missing else f"{free_bytes(target):,} bytes are free"
        return CheckpointError(
            f"{target}: cannot be written: {os.strerror(errno.ENOSPC)}; {how_much}. It is unchanged. Free some disk "
            "space, or choose a folder on another disk."
        )
    if isinstance(error, NextnError):
        return renamed(renamed(error, stage / "new", target), stage, target)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return CheckpointError(f"{target}: cannot be written: {reason}. It is unchanged.")
