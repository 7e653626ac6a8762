"""stages: one process at a time, what a dead one left goes, and a failure names the user's folder."""

import errno
import os
import shutil
import signal
from collections import namedtuple

import pytest
from races import ROUNDS, race

from nextn.checkpoint.staging_folder import atomic_folder, clear_stages, need_room, owned, staged
from nextn.errors import CheckpointError, ConfigError

STAGE = ".nextn-stage"
Usage = namedtuple("Usage", "total used free")


def killed(work):
    """Run `work` in a process that is killed when it ends."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("inside", [True, False])
def test_one_owner(inside, tmp_path):
    """Also within one process; afterwards nothing is left and the next may."""
    target = tmp_path / "target"
    target.mkdir()
    with owned(target, inside=inside):
        with (
            pytest.raises(CheckpointError, match=f"{target}: another process is changing this folder"),
            owned(target, inside=inside),
        ):
            pass
        assert [path.name for path in tmp_path.rglob("lock")] == ["lock"]
    with owned(target, inside=inside) as stage:
        assert stage.parent == (target if inside else tmp_path)
    assert list(tmp_path.rglob("*")) == [target]


@pytest.mark.more
def test_one_of_many_wins(tmp_path):
    """Many times in a row, so that one makes the stage while another removes it."""

    def work():
        for _ in range(20):
            try:
                with owned(tmp_path / "target"):
                    (tmp_path / "shared").mkdir()  # fails if another one is here
                    (tmp_path / "shared").rmdir()
            except CheckpointError as error:
                if "another process is changing" not in str(error):
                    raise

    for _ in range(ROUNDS):
        assert race([work] * 3, tmp_path / "answers") == [""] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["answers"]


def test_what_a_dead_owner_left_is_removed(tmp_path):
    target = tmp_path / "target"
    target.mkdir()

    def work():
        with owned(target, inside=True) as stage:
            (stage / "new").mkdir()
            (stage / "new" / "half.safetensors").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

    killed(work)
    assert (target / STAGE / "new" / "half.safetensors").exists()
    with owned(target, inside=True) as stage:
        assert [path.name for path in stage.iterdir()] == ["lock"]
    assert list(target.iterdir()) == []


def test_a_stage_that_is_a_link_is_not_followed(tmp_path):
    """A folder from a stranger may come with one: what it leads to must not be emptied."""
    precious, target = tmp_path / "precious", tmp_path / "target"
    precious.mkdir()
    (precious / "file").write_text("dear")
    target.mkdir()
    (target / STAGE).symlink_to(precious)
    with pytest.raises(CheckpointError, match="a link"), owned(target, inside=True):
        pass
    (target / STAGE).unlink()
    (target / STAGE).mkdir()
    (target / STAGE / "inner").symlink_to(precious)
    with owned(target, inside=True):
        pass
    assert (precious / "file").read_text() == "dear"


def test_a_folder_is_replaced_whole(tmp_path):
    for text in ("one", "two"):
        with atomic_folder(tmp_path / "out") as new:
            (new / "file").write_text(text)
        assert (tmp_path / "out" / "file").read_text() == text
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "out") as new:
        (new / "file").write_text(str(1 / 0))
    assert (tmp_path / "out" / "file").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_old_folder_that_was_moved_aside_is_put_back(tmp_path):
    """Killed between the two renames; stages of live processes stay."""
    out, other = tmp_path / "out", tmp_path / "other"

    def work():
        with owned(out) as stage:
            (stage / "new").mkdir()
            out.rename(stage / "old")
            os.kill(os.getpid(), signal.SIGKILL)

    out.mkdir()
    (out / "file").write_text("old")
    killed(work)
    assert not out.exists()
    with owned(other) as live:
        (live / "file").write_text("")
        clear_stages(tmp_path)
        assert (live / "file").exists()
    assert (out / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failures_name_the_target(tmp_path):
    target = tmp_path / "target"
    for error in (CheckpointError, ConfigError):
        with pytest.raises(error) as found, staged(target) as stage:
            raise error(f"{stage / 'new' / 'config.json'}: bad; {stage / 'head'}: worse")
        assert str(found.value) == f"{target / 'config.json'}: bad; {target / 'head'}: worse"
    with pytest.raises(CheckpointError, match=f"{target}: cannot be written: Read-only"), staged(target):
        raise OSError(errno.EROFS, "Read-only file system")


def test_a_full_disk_says_how_much_is_missing(tmp_path, monkeypatch):
    free = 10_000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, free))
    with pytest.raises(CheckpointError, match=r"12,000 bytes .* has 10,000 left, 2,000 too few") as found:
        need_room(tmp_path / "not" / "there", 12_000)
    assert "stage" not in str(found.value)

    def fill_up():
        nonlocal free
        with staged(tmp_path / "a", needed=9_000) as stage:
            (stage / "part").write_bytes(b"x" * 4_000)
            free = 0
            raise CheckpointError("part: cannot be written") from OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left on device; 5,000 more bytes"):
        fill_up()
    assert list(tmp_path.iterdir()) == []
