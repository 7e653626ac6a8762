"""What MTP training does to the trunk: runs of a seed start alike, are resumed, and are compared seed by seed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trunk_effect
from tiny import build, refrains
from trunk_effect import Run, Size

from nextn.errors import ConfigError
from nextn.train.config import TrainConfig
from nextn.train.joint_task import JointTask
from nextn.train.loop import Trainer

ROOT = Path(__file__).parents[1]
RUNS = [
    json.loads((ROOT / f"bench/results/trunk-effect-{size}.json").read_text())["runs"] for size in ("1M", "2M", "6M")
]  # fmt: skip
SIZE = Size(layers=1, hidden=128, steps=2, batch_size=2, length=32, eval_batches=1, compile=False)


@pytest.mark.more
def test_a_head_without_weight_leaves_the_trunk_alone(tmp_path):
    """lambda = 0 with a head trains the trunk that no head trains; another lambda does not."""
    trunks = []
    for index, (depths, lam) in enumerate(((0, "0.3"), (2, "0"), (2, "0.3"))):
        model = build("glm4_moe", initializer_range=0.02)
        model.head = model.head if depths else None
        config = TrainConfig(steps=4, batch_size=2, length=24, depths=depths, lam=lam, lr=1e-2, dtype="float32")
        for _ in Trainer(JointTask(model, refrains(12, 60, seed=1), config), out=tmp_path / str(index)).run():
            pass
        trunks.append(torch.cat([value.flatten() for value in model.trunk.model.parameters()]))
    alone, without_weight, with_weight = trunks
    torch.testing.assert_close(alone, without_weight, rtol=0, atol=1e-6)
    assert (alone - with_weight).abs().max() > 1e-3


@pytest.mark.more
def test_runs_are_resumed(tmp_path, monkeypatch):
    """At a tiny size: the run of equal compute is longer, starts alike, and no run is made twice."""
    monkeypatch.setattr(trunk_effect, "TEXTS", ("prose",))
    out = tmp_path / "record.json"
    only = ("D1/0.3", "D0/as long as D3")
    trunk_effect.measure(out, SIZE, seeds=1, only=only)
    runs = json.loads(out.read_text())["runs"]
    assert len(runs) == 2
    longer, shorter = (runs[run.name] for run in (Run("prose", 0, as_long_as=3), Run("prose", 0, 1, "0.3")))
    assert longer["steps"] > shorter["steps"] == SIZE.steps
    assert longer["first_loss"] == shorter["first_loss"]
    before = out.stat().st_mtime_ns
    trunk_effect.measure(out, SIZE, seeds=1, only=only)
    assert out.stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="runs of another size"):
        trunk_effect.measure(out, replace(SIZE, steps=3))


def test_the_recorded_runs_of_a_seed_start_alike():
    starts = {}
    for size, runs in enumerate(RUNS):
        for name, run in runs.items():
            text, *_, seed = name.split("/")
            starts.setdefault((size, text, seed), set()).add(run["first_loss"])
    assert len(starts) == 18
    assert all(len(losses) == 1 for losses in starts.values())


def test_differences_are_paired_by_seed():
    losses = {0: (2.0, 1.9), 1: (3.0, 2.8), 2: (1.0, 0.7)}
    setting, baseline = Run("code", 0, 1, "0.3"), Run("code", 0)
    runs = {
        replace(run, seed=seed).name: {"loss": loss}
        for seed, pair in losses.items()
        for run, loss in zip((baseline, setting), pair, strict=True)
    }
    gap = trunk_effect.difference(runs, setting, baseline)
    assert gap.value == pytest.approx(-0.2)
    assert gap.high - gap.value == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)


def test_the_documented_table_is_the_recorded_one():
    page = (ROOT / "docs/explanation/effect-on-the-trunk.md").read_text()
    assert all(trunk_effect.markdown(runs) in page for runs in RUNS)
