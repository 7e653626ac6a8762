"""The benchmarks of heads at a tiny size: trunks that change or never had one, and the table of objectives."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import adapters
import eagle3
import initial_heads
import objectives
import pytest
import rl
import torch
from test_kv_cache import rollout, slow

from nextn.data.batches import Batch
from nextn.errors import ConfigError
from nextn.family_table import generic
from nextn.model.head import Head
from nextn.model.trunk import Trunk

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
    root = Path(__file__).parents[1]
    cells = json.loads((root / "bench/results/objectives.json").read_text())["cells"]
    assert objectives.markdown(cells) in (root / "docs/reference/objectives.md").read_text()
    text = (root / "docs/reference/objectives.md").read_text()
    (long,) = json.loads((root / "bench/results/objectives-long.json").read_text())["cells"].values()
    for k, words in ((4, "AL@4 {:.2f} at T = 0 and {:.2f} at T = 1"), (8, "{:.2f} and {:.2f}; `joint`")):
        assert words.format(*(long[key][k - 1] for key in ("AL_T0", "AL_T1"))) in text
    assert cells.keys() <= {"joint/as it is", "stale/as it is", *(cell.name for cell in objectives.cells())}
