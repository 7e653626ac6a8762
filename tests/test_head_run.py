"""A head's run from files to files: where it starts, what it writes, what is refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from tiny import FIXTURES, build

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.edit.convert import extract
from nextn.errors import CheckpointError, ConfigError, FamilyError, TrainingError
from nextn.model.model import Model
from nextn.train import head_run
from nextn.train.head_run import StartingPoint, load_starting_point, prepare_head_run

SETTINGS = {"steps": 3, "batch_size": 2, "length": 32, "depths": 2, "eval_batches": 1, "dtype": "float32", "warmup": 0}


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    """A byte-level model with a tokenizer and a head."""
    folder = tmp_path_factory.mktemp("trunk") / "model"
    model = build("glm4_moe", vocab_size=264, initializer_range=0.02)
    model.tokenizer = byte_tokenizer()
    model.save(folder, dtype=torch.bfloat16)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for name in "abc":
        (folder / f"{name}.txt").write_text(f"{name} is a letter, and so on. " * 40)
    return folder


def run(out, start, text, **settings):
    return prepare_head_run(out, start, data=[text], settings=SETTINGS | settings)


@pytest.mark.more
def test_an_existing_head_is_trained_on_and_written(trunk, text, tmp_path, monkeypatch):
    monkeypatch.setattr(head_run, "_LARGE_VOCABULARY", 200)
    made = run(tmp_path, StartingPoint(trunk), text)
    before = {name: value.clone() for name, value in made.task.named.items()}
    list(made.trainer.run())
    written = Model.load(made.write(allow_worse=True))
    assert any(not torch.equal(value, before[name]) for name, value in made.task.named.items())
    assert written.trunk.dtype == torch.bfloat16
    again = run(tmp_path, StartingPoint(trunk), text, loss_vocab=0)
    assert ["loss_vocab" in " ".join(each.notes) for each in (made, again)] == [True, False]  # a choice is not advised
    assert again.trainer.resume()
    assert again.write(allow_worse=True).exists()  # over the one that is there
    assert made.write(head_only=True, allow_worse=True) == tmp_path / "head" / "head.safetensors"


@pytest.mark.more
def test_a_fresh_head_for_a_trunk_without_one(trunk, text, tmp_path):
    model = Model.load(trunk)
    model.head = None
    model.save(tmp_path / "bare")
    with pytest.raises(CheckpointError, match="nextn train --freeze-trunk --init-head"):
        run(tmp_path / "run", StartingPoint(tmp_path / "bare"), text)
    made = run(tmp_path / "run", StartingPoint(tmp_path / "bare", fresh=True, num_modules=2), text)
    list(made.trainer.run())
    written = Model.load(made.write())
    assert written.head.num_modules == 2
    assert made.trainer.best_tracker.baseline is None


@pytest.mark.more
def test_a_fresh_head_takes_the_place_of_a_broken_one(trunk, text, tmp_path):
    """What is there of a head is not looked at."""
    shutil.copytree(trunk, tmp_path / "broken")
    config = json.loads((tmp_path / "broken" / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
    (tmp_path / "broken" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="missing"):
        run(tmp_path / "run", StartingPoint(tmp_path / "broken"), text)
    made = run(tmp_path / "run", StartingPoint(tmp_path / "broken", fresh=True), text)
    list(made.trainer.run())
    assert Model.load(made.write()).head.num_modules == 1


@pytest.mark.more
def test_a_head_of_another_file(trunk, text, tmp_path):
    """Its values are what training starts from, on the trunk's own files."""
    model = Model.load(trunk)
    with torch.no_grad():
        model.head.stack[0].projection.weight.fill_(0.5)
    model.save(tmp_path / "other")
    extract(tmp_path / "other", tmp_path / "head.safetensors")
    loaded, origin, _ = load_starting_point(StartingPoint(trunk, tmp_path / "head.safetensors"), near=tmp_path / "run")
    assert (loaded.head.stack[0].projection.weight == 0.5).all()
    assert origin.checkpoint.path == Checkpoint.open(trunk).path
    assert not any((tmp_path / "run").iterdir())


def test_a_head_of_another_family(trunk, text, tmp_path):
    extract(FIXTURES / "qwen", tmp_path / "head.safetensors")
    with pytest.raises(FamilyError, match="a head of family qwen3_5, the target's is glm4_moe"):
        run(tmp_path / "run", StartingPoint(trunk, tmp_path / "head.safetensors"), text)


def test_a_trunk_without_a_row(trunk, text, tmp_path):
    shutil.copytree(trunk, tmp_path / "strange")
    config = json.loads((tmp_path / "strange" / "config.json").read_text()) | {"model_type": "gpt_neox"}
    (tmp_path / "strange" / "config.json").write_text(json.dumps(config))
    with pytest.raises(FamilyError, match="model_type 'gpt_neox' has no known MTP head"):
        run(tmp_path / "run", StartingPoint(tmp_path / "strange"), text)


def test_a_worse_head_is_not_written(trunk, text, tmp_path):
    made = run(tmp_path, StartingPoint(trunk), text, steps=2)
    list(made.trainer.run())
    made.trainer.best_tracker.baseline = better(made.trainer.best_tracker.best)
    with pytest.raises(TrainingError, match=r"worse than the one it started from .*: held-out AL .* --allow-worse"):
        made.write()
    assert not (tmp_path / "model").exists()
    assert made.write(allow_worse=True).exists()


def better(figures):
    """The same figures with half as many rounds."""
    halves = {
        name: replace(each, rounds=tuple(rounds / 2 for rounds in each.rounds))
        for name, each in (("greedy", figures.greedy), ("sampled", figures.sampled))
    }
    return replace(figures, **halves)


@pytest.mark.more
def test_bad_starts(trunk, text, tmp_path):
    with pytest.raises(ConfigError, match="exclude each other"):
        StartingPoint(trunk, tmp_path / "head.safetensors", fresh=True)
    with pytest.raises(ConfigError, match="modules = 2: only for a fresh head"):
        StartingPoint(trunk, num_modules=2)
    with pytest.raises(ConfigError, match="has no tokenizer; give"):
        run(tmp_path, StartingPoint(FIXTURES / "glm"), text)
    with pytest.raises(ConfigError, match="unknown setting 'stepz'"):
        run(tmp_path, StartingPoint(trunk), text, stepz=3)
    with pytest.raises(ConfigError, match=r"length = 4096; the trunk was made for 2048"):
        run(tmp_path, StartingPoint(trunk), text, length=4096)
