"""The pages that are made from the code are what the code says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import CONFIGS

from nextn.audit import IDS
from nextn.families import rows
from nextn.verify import CHECKS

DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(DOCS))

import make_families as made  # noqa: E402


def test_families_page_is_fresh():
    """A row changed and the page not."""
    assert made.PAGE.read_text() == made.page(), "docs/families.md is stale: run `make docs`"


def test_page_needs_no_torch():
    """The script is run where torch is not installed."""
    check = "import sys; sys.path.insert(0, 'docs'); import make_families; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], cwd=DOCS.parent, check=True)


def test_what_the_tests_cover_is_read_right():
    """The matrix names families that no test trains, or engines that no test asked."""
    assert made.trained() == set(CONFIGS)
    names = {row.name for row in rows()}
    assert made.checked().keys() <= names
    assert {engine for engines in made.checked().values() for engine in engines} <= made.NAMES.keys()


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_each_family_is_told_whole(row):
    """A section without a fact of its row: a name, a source, a reason, a doubt."""
    told = "\n".join(made.section(row))
    facts = [*row.model_types, *row.names.values(), *row.sources, *row.count_fields, *row.wrappers]
    facts += [made.text(each) for each in (*row.unverified, *row.disagreements, row.cannot_run)]
    facts += [made.text(note) for engine in row.engines.values() for note in engine.notes]
    assert [fact for fact in facts if fact not in told] == []


def test_tables_are_tables():
    """A sign in a cell that ends it: every line of a table has as many cells as its head."""
    width = 0
    for line in made.page().splitlines():
        cells = line.replace("\\|", "").count("|")
        assert not width or cells in (0, width), line
        width = cells


def test_every_rule_is_explained():
    """A finding that its reader cannot look up."""
    told = (DOCS / "checkpoints.md").read_text()
    named = {rule for cell in re.findall(r"^\| (`.*?) \|", told, re.M) for rule in re.findall(r"`([a-z-]+)`", cell)}
    assert named == set(IDS)


def test_every_check_is_explained():
    """A check that its reader cannot look up, in the order in which they run."""
    told = (DOCS / "verify.md").read_text()
    assert re.findall(r"^\| `([a-z-]+)` \|", told, re.M) == list(CHECKS)
