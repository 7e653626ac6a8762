"""The benchmarks at a tiny size, the tables that the documentation has of them, and what their records name."""

import json
import re
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import adapters
import eagle3
import initial_heads
import objectives
import pytest
import rl
import torch
import trunk_effect
from record import origin, write_record
from test_kv_cache import rollout, slow
from tiny import build, refrains
from trunk_effect import Run

from nextn.data.batches import Batch
from nextn.errors import ConfigError
from nextn.evaluate.decoding_costs import processor_name
from nextn.family_table import generic
from nextn.model.head import Head
from nextn.model.trunk import Trunk
from nextn.train.config import TrainConfig
from nextn.train.joint_task import JointTask
from nextn.train.loop import Trainer

ROOT = Path(__file__).parents[1]
SHAPE = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 8,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def trunk():
    torch.manual_seed(0)
    return Trunk.from_config(SHAPE)


def test_eagle3_features_enter_the_low_middle_and_high_layer(trunk):
    tokens = torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        output = eagle3.features(trunk, Batch(tokens, torch.zeros_like(tokens)))
        states = trunk.model(tokens, output_hidden_states=True).hidden_states  # [0]: the embedding
    torch.testing.assert_close(output.head_input, torch.cat([states[index] for index in (2, 4, 5)], dim=-1))
    torch.testing.assert_close(output.final_hidden, states[-1])


def test_eagle3_trains_as_it_decodes(trunk):
    """Training-time test: all chains at once give what the decoder's caches and its own outputs give, step by step."""
    head = eagle3.Eagle3Head(generic(SHAPE), trunk, 64)
    tokens, hidden = torch.randint(0, 64, (2, 11)), torch.randn(2, 11, 3 * 32)
    with torch.no_grad():
        torch.testing.assert_close(
            rollout(head, tokens, hidden, 4), slow(head, tokens, hidden, 4), atol=1e-4, rtol=1e-4
        )


def test_eagle3_has_as_many_parameters_as_ours(trunk):
    family = generic(SHAPE)
    heads = Head(family, trunk), eagle3.same_size_head(family, trunk), eagle3.Eagle3Head(family, trunk, 80)
    ours, same, full = map(eagle3.num_parameters, heads)
    assert abs(same - ours) < 3 * 32 + 32 < full - ours


@pytest.mark.parametrize(
    ("variant", "source"), [("fitted", 7), ("sum", 7), ("state", 7), ("middle", 4), ("random", None)]
)
def test_initial_heads_copy_the_layer_that_the_variant_names(trunk, variant, source):
    model = SimpleNamespace(family=generic(SHAPE), trunk=trunk)
    head = initial_heads.VARIANTS[variant](model, torch.randint(0, 64, (2, 40)))
    own = head.stack[0].layers[0].self_attn.q_proj.weight
    copied = [
        index for index, layer in enumerate(trunk.decoder.layers) if torch.equal(own, layer.self_attn.q_proj.weight)
    ]
    assert copied == ([] if source is None else [source])


@pytest.mark.slow
def test_layouts_at_a_tiny_size(tmp_path):
    """The joint head is not trained; a head in each layout is, on the trunks that can have it."""
    size = eagle3.Size(
        trunk_steps=1, trunk_batch=2, head_steps=1, length=48, prompt_tokens=16, answers=110, held_out=3, num_files=30
    )
    out = tmp_path / "out.json"
    cells = {name: each for name, each in eagle3.LAYOUT_CELLS.items() if name != "mtp"}
    eagle3.measure(eagle3.Experiment(tmp_path / "work", size), out, cells=cells)
    rows = json.loads(out.read_text())["cells"]
    assert set(rows) == {"tiny/joint", "tiny/mtp, generic layout", "llama/mtp, layout=mimo", "qwen3/mtp, layout=mimo"}
    assert rows["tiny/joint"]["cpu_seconds"] == 0
    assert rows["tiny/joint"]["sampled"]["AL"] > rows["tiny/mtp, generic layout"]["sampled"]["AL"]
    assert rows["tiny/joint"]["parameters"] == rows["tiny/mtp, generic layout"]["parameters"]


def test_lengths_by_number_of_drafts():
    cell = {"acceptance": [0.5, 0.5, 0.0, 1.0]}
    record = {"cells": {"tiny/joint": {"sampled": cell, "greedy": {"acceptance": [1.0] * 4}}}}
    *_, row = eagle3.markdown_by_drafts(record, ["joint"]).splitlines()
    assert row == "| tiny | joint | 1.50 | 1.75 | 1.75 | 1.75 | 2.00 | 3.00 | 4.00 | 5.00 |"


@pytest.mark.slow
def test_both_heads_are_measured_beside_a_policy(tmp_path):
    """Before the first step both are the same."""
    size = rl.Size(steps=2, window=1, prompts=2, completions=2, tokens=8)
    first, second = rl.measure(str(ROOT / "src/nextn/assets/tiny"), tmp_path, size)["rows"]
    assert first["follows"] == first["as it was"] > 1
    assert second["follows"] != second["as it was"]


@pytest.mark.slow
def test_adapters_at_a_tiny_size(tmp_path):
    """Strength 0 is the model itself, the adapter changes it, and what is recorded is not measured twice."""
    size = adapters.Size(tune_steps=3, answers=100, held_out=3, answer_tokens=16, prompt_tokens=24)
    experiment, out = adapters.Experiment(str(ROOT / "src/nextn/assets/tiny"), tmp_path, size), tmp_path / "out.json"
    adapters.measure(experiment, out, strengths=(0.0, 2.0), steps=(2,))
    rows = json.loads(out.read_text())["strengths"]
    for row in rows.values():
        assert all(1 < row[steps]["sampled"]["AL"] <= 5 for steps in ("0", "2"))
    assert rows["0"]["bits_per_byte"] != rows["2"]["bits_per_byte"]
    before = out.read_text()
    adapters.measure(experiment, out, strengths=(0.0, 2.0), steps=(2,))
    assert out.read_text() == before


@pytest.mark.parametrize(
    ("script", "page"), [(adapters, "how-to/stale-head"), (eagle3, "benchmarks/heads"), (rl, "how-to/beside-fine-tune")]
)
def test_the_documented_tables_are_the_recorded_ones(script, page):
    record = json.loads(script.OUT.read_text())
    assert script.markdown(record) in (ROOT / f"docs/{page}.md").read_text()


@pytest.mark.parametrize(("out", "labels"), [(eagle3.OUT, eagle3.BY_DRAFTS), (eagle3.LAYOUTS_OUT, eagle3.LAYOUT_CELLS)])
def test_the_documented_lengths_by_drafts_are_the_recorded_ones(out, labels):
    table = eagle3.markdown_by_drafts(json.loads(out.read_text()), labels)
    assert table in (ROOT / "docs/benchmarks/heads.md").read_text()


SIZE = objectives.Size(
    layers=1, hidden=128, trunk_steps=2, tune_steps=1, head_steps=2, batch_size=2, length=48, answers=40, held_out=3,
    answer_tokens=24, files=30,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("bench")


def test_every_cell_has_a_name_of_its_own():
    names = [cell.name for cell in objectives.cells()]
    assert len(set(names)) == len(names) == 2 * (6 + 3 * 7)


CELLS = ["bare/kl/4-step/decode/answers", "stale/tv/4-step/own/data", "joint/"]


@pytest.mark.parametrize("only", CELLS)
@pytest.mark.slow
def test_a_cell_at_a_tiny_size(only, folder):
    out = folder / "objectives.json"
    objectives.measure(out, folder / "work", SIZE, only=only)
    named_cells = {name: cell for name, cell in json.loads(out.read_text())["cells"].items() if name.startswith(only)}
    (cell,) = named_cells.values()
    assert all(len(cell[key]) == 8 and min(cell[key]) >= 1 for key in ("AL_T0", "AL_T1"))
    assert all(0 <= rate <= 1 for rate in cell["acceptance_T0"] + cell["acceptance_T1"])
    before = out.stat().st_mtime_ns
    objectives.measure(out, folder / "work", SIZE, only=only)
    assert out.stat().st_mtime_ns == before  # nothing is made twice
    with pytest.raises(ConfigError, match="cells of another size"):
        objectives.measure(out, folder / "work", replace(SIZE, head_steps=3), only=only)
    assert only in objectives.row(*next(iter(named_cells.items())))


def test_the_documented_table_is_the_recorded_one():
    cells = json.loads((ROOT / "bench/results/objectives.json").read_text())["cells"]
    text = (ROOT / "docs/reference/objectives.md").read_text()
    assert objectives.markdown(cells) in text
    (long,) = json.loads((ROOT / "bench/results/objectives-long.json").read_text())["cells"].values()
    for k, words in ((4, "AL@4 {:.2f} at T = 0 and {:.2f} at T = 1"), (8, "{:.2f} and {:.2f}; `joint`")):
        assert words.format(*(long[key][k - 1] for key in ("AL_T0", "AL_T1"))) in text
    assert cells.keys() <= {"joint/as it is", "stale/as it is", *(cell.name for cell in objectives.cells())}


RUNS = [
    json.loads((ROOT / f"bench/results/trunk-effect-{size}.json").read_text())["runs"] for size in ("1M", "2M", "6M")
]  # fmt: skip
TRUNK_SIZE = trunk_effect.Size(layers=1, hidden=128, steps=2, batch_size=2, length=32, eval_batches=1, compile=False)


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
    trunk_effect.measure(out, TRUNK_SIZE, seeds=1, only=only)
    runs = json.loads(out.read_text())["runs"]
    assert len(runs) == 2
    longer, shorter = (runs[run.name] for run in (Run("prose", 0, as_long_as=3), Run("prose", 0, 1, "0.3")))
    assert longer["steps"] > shorter["steps"] == TRUNK_SIZE.steps
    assert longer["first_loss"] == shorter["first_loss"]
    before = out.stat().st_mtime_ns
    trunk_effect.measure(out, TRUNK_SIZE, seeds=1, only=only)
    assert out.stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="runs of another size"):
        trunk_effect.measure(out, replace(TRUNK_SIZE, steps=3))


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


def test_the_documented_effects_on_the_trunk_are_the_recorded_ones():
    page = (ROOT / "docs/explanation/effect-on-the-trunk.md").read_text()
    assert all(trunk_effect.markdown(runs) in page for runs in RUNS)


def test_a_record_names_its_day_and_machine(tmp_path):
    write_record(tmp_path / "out.json", {"threads": 7, "figure": 1.5})
    found = json.loads((tmp_path / "out.json").read_text())
    date.fromisoformat(found["date"][:10])
    assert (found["machine"], found["figure"]) == (processor_name(), 1.5)
    assert found["threads"] == 7  # its own before torch's
    write_record(None, found)


def test_every_benchmark_that_writes_a_record_names_them():
    """It calls `write_record`, or adds `origin` to what it writes step by step; gpu.py names the GPU itself."""
    text = {
        path.name: path.read_text()
        for path in (ROOT / "bench").glob("*.py")
        if path.name not in ("record.py", "gpu.py")
    }
    writers = {name for name, code in text.items() if re.search(r"write_json\((?:args\.|options\.)?out, ", code)}
    assert writers == {name for name in writers if "origin()" in text[name]}
    assert not [name for name, code in text.items() if re.search(r"\bout\.write_text\(json", code)]
    assert "date" in origin()
