"""Event files: every number of a record is there, under a name that tells it apart, at its step."""

import builtins
from dataclasses import asdict, dataclass

import pytest

from nextn.errors import ConfigError
from nextn.train.metrics import TensorBoard, scalars


@dataclass
class Reported:
    step: int
    loss: tuple[float, ...]
    forced: dict[str, object]
    note: str = "text"
    exact: bool = True

    def as_record(self):
        return asdict(self)


def test_numbers_by_their_place():
    reported = Reported(3, (1.5, 2.0), {"match": [0.5, None], "definition": "words", "AL": 2})
    assert dict(scalars(reported.as_record())) == {
        "step": 3.0, "loss/0": 1.5, "loss/1": 2.0, "forced/match/0": 0.5, "forced/AL": 2.0,
    }  # fmt: skip


def test_tensorboard_reads_them(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoard(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.write(Reported(step, (9.0 if step == 3 else 0.5 * step,), {"AL": step}))
    with TensorBoard(tmp_path, step=2) as writer:  # gone on with after step 2
        writer.write(Reported(3, (1.5,), {"AL": 3}))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["forced/AL", "loss/0"]
    assert [(each.step, each.value) for each in events.Scalars("loss/0")] == [(1, 0.5), (2, 1.0), (3, 1.5)]


def test_without_the_package(tmp_path, monkeypatch):
    inner = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.startswith("torch.utils.tensorboard"):
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return inner(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match=r"pip install .tensorboard>="):
        TensorBoard(tmp_path)
