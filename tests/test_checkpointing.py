"""A run's folder: which checkpoints count, which go, and what of the log stands."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nextn.checkpoint.safetensors_file import write_json
from nextn.errors import CheckpointError, ConfigError
from nextn.train.checkpointing import RunFolder, read_state
from nextn.train.config import TrainConfig
from nextn.train.metrics import StepRecord

CONFIG = TrainConfig(steps=9, length=8, depths=1)


def checkpoint(run, step):
    folder = run.checkpoint(step)
    folder.mkdir()
    write_json(folder / "trainer.json", {"step": step, "config": asdict(CONFIG)})
    return folder


def record(step):
    return StepRecord(step, 9, step / 9, 1.0, step * 100, (1.0,), 1e-3, 0.3, 1.0, 50.0)


def test_a_best_head_that_was_moved_aside_is_put_back(tmp_path):
    """Killed between the two renames that replace it; what else a killed process left is removed."""
    folder = RunFolder(tmp_path)
    for name in (".best.123.old", ".best.124.tmp", ".step-0000004.5.tmp", ".head-x", ".start-y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "head.safetensors").write_text(name)
    folder.prune()
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert (folder.best / "head.safetensors").read_text() == ".best.123.old"
    (tmp_path / ".best.old").mkdir()  # its successor is in place
    folder.prune()
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_checkpoints_are_found_oldest_first_and_half_ones_are_not(tmp_path):
    run = RunFolder(tmp_path / "run")
    for step in (12, 3):
        checkpoint(run, step)
    run.checkpoint(20).mkdir()
    assert [folder.name for folder in run.checkpoints()] == ["step-0000003", "step-0000012"]


@pytest.mark.parametrize("first", [1, 9_999_998])
def test_the_newest_two_are_kept(tmp_path, first):
    run = RunFolder(tmp_path)
    for step in (first, first + 1, first + 2):
        checkpoint(run, step)
    run.prune()
    assert run.checkpoints() == [run.checkpoint(first + 1), run.checkpoint(first + 2)]


def test_a_killed_writers_leftovers_go(tmp_path):
    """A process that was killed while it wrote leaves a hidden folder, which no later run would name again."""
    run = RunFolder(tmp_path)
    checkpoint(run, 1)
    (tmp_path / ".step-0000002.123.tmp").mkdir()
    (tmp_path / ".step-0000002.123.tmp" / "model.safetensors").write_bytes(b"half")
    run.prune()
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000001"]


def test_state_comes_back(tmp_path):
    folder = checkpoint(RunFolder(tmp_path), 4)
    assert read_state(folder, CONFIG) == {"step": 4}


def test_other_settings_are_named(tmp_path):
    folder = checkpoint(RunFolder(tmp_path), 4)
    with pytest.raises(ConfigError, match=r"trained with another lr \(.*, now .*\); resume with the same settings"):
        read_state(folder, TrainConfig(steps=9, length=8, depths=1, lr=1e-4))


def test_a_checkpoint_older_than_a_setting(tmp_path):
    """It goes on with the setting's default, and with nothing else."""
    file = checkpoint(RunFolder(tmp_path), 4) / "trainer.json"
    state = json.loads(file.read_text())
    del state["config"]["compile"]
    file.write_text(json.dumps(state))
    assert read_state(file.parent, CONFIG) == {"step": 4}
    with pytest.raises(ConfigError, match="another compile"):
        read_state(file.parent, replace(CONFIG, compile=True))


def test_a_line_cut_by_a_kill_is_dropped(tmp_path):
    run = RunFolder(tmp_path)
    with run.log(0) as log:
        log(record(1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "num_st')
    with run.log(1):
        pass
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "run")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_log_on_a_full_disk(tmp_path, monkeypatch):
    """One error, also when the log is closed behind it."""
    run, opened = RunFolder(tmp_path), Path.open
    monkeypatch.setattr(Path, "open", lambda _, *args, **options: opened(Path("/dev/full"), *args, **options))
    with run.log(0) as log, pytest.raises(CheckpointError, match=r"metrics\.jsonl: cannot be written: No space left"):
        log(record(1))
