"""The five stories and the examples, as they are printed: they run, and acceptance comes back."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from quick import case

DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(DOCS))

import make_troubleshooting as made  # noqa: E402

FIGURE = re.compile(r"\d+\.\d+(?= s$)|\d\.\d\d\b", re.M)


@pytest.mark.parametrize("story", [case(each, quick=False) for each in made.STORIES], ids=lambda story: story.rule)
def test_story(story, tmp_path):
    """A cause that audit does not name, a command that does not mend, or acceptance that stays where it was."""
    text, before, after = made.tell(story, tmp_path)
    broken, mended = (part.split("$ nextn")[0] for part in text.split("$ nextn audit")[1:])
    assert re.search(rf"^{story.rule} ", broken, re.M), "the rule is named"
    assert not re.search(rf"^{story.rule} ", mended, re.M)
    assert "not clean" in broken
    assert "not clean" not in mended
    assert after > before + 1.4
    written = next(
        part for part in made.PAGE.read_text().split("\n## ") if part.partition("\n")[0].endswith(story.title)
    )
    reported = written.partition("\n")[2]
    assert FIGURE.sub("#", reported).strip() == FIGURE.sub("#", text).strip(), "stale: run `make docs`"
    figures = [[float(each) for each in re.findall(r"\*\*(\d\.\d\d)\*\*", page)] for page in (reported, text)]
    assert figures[0] == pytest.approx(figures[1], abs=0.1), "other machines round otherwise"


def test_every_story_is_in_the_table():
    """The summary leaves one out, or its figures are those of another day."""
    table, *sections = made.PAGE.read_text().split("\n## ")
    for story, section in zip(made.STORIES, sections, strict=True):
        row = next(line for line in table.splitlines() if story.title in line)
        assert re.findall(r"\d\.\d\d", row.rpartition("`")[2]) == re.findall(r"\*\*(\d\.\d\d)\*\*", section)


EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_keep_head(fixture_folder, tmp_path):
    """A fine-tune, in full or merged from LoRA, that comes out without its head."""
    command = [sys.executable, EXAMPLES / "keep_head.py", fixture_folder / "qwen", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 of 1 modules, clean") == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer_head", "sft_head"])
def test_head_beside_a_fine_tune(name, tmp_path):
    """transformers' and TRL's trainers, the latter with LoRA: the head is trained, logged and saved with the model."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "tokens a round" in done.stdout
    assert "head_loss_3" in done.stdout
    assert "1 of 1 modules, clean" in done.stdout
    assert bool(list(tmp_path.glob("run/**/events.*"))) == (name == "trainer_head")
