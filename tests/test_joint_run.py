"""A joint run of two stages: what each makes, where it lies, how it goes on, and what is refused before it begins."""

import json
from itertools import count

import pytest
import torch
from test_cli import TINY

from nextn.errors import ConfigError
from nextn.model.model import Model
from nextn.train.evaluation import BestTracker
from nextn.train.joint_run import prepare_joint_run

SMALL = {
    "steps": 3,
    "batch_size": 2,
    "length": 32,
    "depths": 1,
    "compile": False,
    "eval_batches": 1,
    "dtype": "float32",
}
REFINE = {"steps": 4, "depths": 3, "warmup": 0, "eval_every": 0}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "text").mkdir()
    for index in range(24):
        (folder / "text" / f"{index}.txt").write_text(f"line {index} of the text\n" * 40)
    return folder


@pytest.fixture
def of(given, tmp_path):
    """A run in tmp_path/out with some settings changed."""

    def make(**settings):
        files = {"data": [given / "text"], "model": given / "config.json"}
        return prepare_joint_run(tmp_path / "out", recipe="demo", **files, settings=SMALL | settings)

    return make


def went(run, model, *, stop=lambda: False):
    """Run the stages -> (folder, last step) of each that began; the next one begins only where one is over."""
    reported = []
    for trainer in run.stages(model):
        trainer.resume()
        list(trainer.run(stop))
        reported.append((trainer.folder.path.name, trainer.step))
        if not trainer.is_over:
            break
    return reported


def head_of(folder):
    return Model.load(folder).head.state_dict()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.mark.more
def test_the_second_stage_trains_the_head_alone(of, tmp_path):
    """Catches a second stage that moves the trunk, starts from another head, or is not what is written."""
    run = of(refine=REFINE)
    assert went(run, tmp_path / "model") == [("out", 3), ("head", 4)]
    joint, made = tmp_path / "out" / "joint", tmp_path / "model"
    assert same(Model.load(joint).trunk.state_dict(), Model.load(made).trunk.state_dict())
    assert same(head_of(joint), run.trainer.task.model.head.state_dict())
    assert not same(head_of(joint), head_of(made))
    assert Model.load(made).tokenizer is not None
    lines = [json.loads(line) for line in (tmp_path / "out" / "head" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 4]
    assert len(lines[1]["loss"]) == 3


@pytest.mark.more
def test_the_second_stage_reads_the_same_batches(of, tmp_path):
    """What its settings do not say is the first stage's; what they say stands."""
    run = of(refine=REFINE | {"length": 24}, seed=5)
    first, second = (trainer.config for trainer in consumed(run, tmp_path / "model"))
    assert (second.batch_size, second.seed, second.dtype, second.compile) == (2, 5, "float32", False)
    assert (first.length, second.length) == (32, 24)


def consumed(run, model):
    for trainer in run.stages(model):
        list(trainer.run())
        yield trainer


@pytest.mark.more
def test_one_stage_writes_no_other_folder(of, tmp_path):
    assert went(of(), tmp_path / "model") == [("out", 3)]
    assert Model.load(tmp_path / "model").head is not None
    assert not (tmp_path / "out" / "joint").exists()


@pytest.mark.parametrize("refine", [None, {"steps": 0}, {}])
def test_left_out(of, refine):
    assert of(refine=refine).refine is None


def test_a_trunk_alone_has_no_head_to_refine(of):
    assert of(refine=REFINE, depths=0).refine is None


@pytest.mark.more
def test_only_the_recipes_own_model_has_its_second_stage(given, tmp_path):
    """Catches steps of the recipe's behind a user's own model that nobody asked for."""

    def second(model=None, **settings):
        text = {"data": [given / "text"], "settings": SMALL | settings}
        return prepare_joint_run(tmp_path / "own", recipe="code", model=model, **text).refine

    assert second() is not None
    assert second(refine=None) is None
    assert second(given / "config.json") is None
    assert second(given / "config.json", refine={"steps": 2}) is not None


@pytest.mark.parametrize(
    ("refine", "words"),
    [
        (7, "refine = 7; expected settings such as refine.steps=300, or null"),
        ({"step": 3}, "unknown setting 'step'"),
        ({"steps": 3, "objective": "l2"}, "objective = 'l2'; expected one of ce, kl"),
        ({"steps": 3, "length": 900}, "length = 900; the model's context holds 256"),
    ],
)
def test_settings_are_refused_before_the_first_stage(of, refine, words):
    with pytest.raises(ConfigError, match=words):
        of(refine=refine)


@pytest.mark.more
def test_a_worse_head_is_not_written(of, tmp_path, monkeypatch):
    """The first stage's head is what is left then, bit for bit."""
    monkeypatch.setattr(BestTracker, "is_worse", True)
    went(of(refine=REFINE), tmp_path / "model")
    assert same(head_of(tmp_path / "out" / "joint"), head_of(tmp_path / "model"))


@pytest.mark.parametrize("stops", [2, 6], ids=["in the first stage", "in the second"])
@pytest.mark.slow
def test_interrupted_in_either_stage(of, tmp_path, stops):
    """What a resumed run writes is what one that nobody stopped writes, to the last bit."""
    asked = count(1)
    began = went(of(refine=REFINE), tmp_path / "model", stop=lambda: next(asked) > stops)
    assert len(began) == (1 if stops == 2 else 2)
    assert not (tmp_path / "model").exists()
    went(of(refine=REFINE), tmp_path / "model")
    (tmp_path / "out").rename(tmp_path / "before")
    went(of(refine=REFINE), tmp_path / "whole")
    resumed, whole = (Model.load(tmp_path / name) for name in ("model", "whole"))
    assert same(resumed.trunk.state_dict(), whole.trunk.state_dict())
    assert same(resumed.head.state_dict(), whole.head.state_dict())


def test_the_command(given, tmp_path, here):
    files = ["--data", given / "text", "--model", given / "config.json"]
    small = [word for key, value in SMALL.items() for word in ("--set", f"{key}={json.dumps(value).strip(chr(34))}")]
    refine = [word for key, value in REFINE.items() for word in ("--set", f"refine.{key}={value}")]
    code, out, err = here("train", tmp_path / "run", *files, *small, *refine, "--json")
    assert code == 0, err
    reported = json.loads(out)
    assert reported["model"] == str(tmp_path / "run" / "model")
    assert reported["best_step"] == 4
    assert len(reported["best"]["greedy"]["acceptance"]) == 3
    code, out, err = here("train", tmp_path / "run", *files, *small, *refine)
    assert code == 2
    assert "holds a run already; use --resume" in err
    code, out, err = here("train", tmp_path / "run", *files, *small, *refine, "--resume")
    assert code == 0, err
    assert f"{tmp_path}/run is finished: {tmp_path}/run/model is its result, and nothing was changed" in out
    code, _, err = here("train", tmp_path / "run", "--resume", "--set", "refine.lr=0.9")
    assert code == 2
    assert "--set refine.lr: the run was started with" in err
    code, _, err = here("train", tmp_path / "other", *files, *small, "--set", "steps.x=1")
    assert code == 2
    assert "--set 'steps.x=1': steps is 3, not a group of settings" in err
