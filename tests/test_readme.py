"""The README runs, and its figures are those of the committed records."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nextn.cli import app
from nextn.families import rows

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_blocks_run(trained, fixture_folder, tmp_path, monkeypatch):
    """Each Python block runs as written; checkpoint names stand for the fixture."""
    import torch

    monkeypatch.chdir(tmp_path)
    for code in blocks("python"):
        names = {"torch": torch, "tokens": torch.randint(0, 40, (2, 20)), "hidden": torch.randn(2, 20, 256)}
        exec(code.replace('"demo/model"', repr(str(fixture_folder / "glm"))).replace('"def add("', "[1, 2, 3]"), names)
    assert blocks("python")


@pytest.mark.parametrize(
    "line", [line for block in blocks("bash") for line in block.splitlines() if line.startswith("nextn ")]
)
def test_commands_exist(line):
    """Every verb and option that the README shows is there."""
    verb, *rest = line.split("#")[0].split()[1:]
    help_text = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200"})
    assert help_text.exit_code == 0, line
    for option in (word for word in rest if word.startswith("-") and word != "-"):
        assert option in help_text.output, f"{option} in {line!r}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([a-z-]+)`", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_figures_are_the_records():
    """The table of the README is what `make demo` wrote into the committed record."""
    record = json.loads((ROOT / "bench" / "results" / "demo.json").read_text())
    for name, title in (("greedy", "greedy, identical output"), ("temperature_1", "temperature 1, same law")):
        part = record[name]
        rates = ", ".join(f"{rate:.2f}" for rate in part["acceptance"])
        speeds = f"{part['plain_tokens_per_s']:.0f} | {part['mtp_tokens_per_s']:.0f} | **{part['speedup']:.2f} x**"
        assert f"| {title} | {speeds} | {part['acceptance_length']:.2f} | {rates} |" in README
    assert record["identical_output"]


def test_audit_figures_are_the_record():
    """Seconds, memory and bytes of the audit as bench/audit.py last measured them."""
    record = json.loads((ROOT / "bench" / "results" / "audit.json").read_text())
    hub, folder = record["hub"], record["folder"]
    share = f"{100 * hub['share_of_bytes']:.3f} %"
    assert (
        f"| {hub['seconds']:.1f} | {hub['peak_mb']:.0f} MB | {share} of the bytes, {hub['requests']} requests |"
        in README
    )
    assert f"| a local folder | {folder['seconds']:.1f} | {folder['peak_mb']:.0f} MB | |" in README


def test_families_are_counted():
    """How many rows there are, and how many run."""
    running = sum(row.runs for row in rows())
    assert f"* **Families**, {len(rows())} of them" in README
    assert f"; {running} of them, those" in README.replace("\n ", "")
