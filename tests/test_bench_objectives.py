"""The table of objectives at a tiny size: cells are trained, resumed and reported."""

import json
from dataclasses import replace
from pathlib import Path

import objectives
import pytest

from nextn.errors import ConfigError

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
