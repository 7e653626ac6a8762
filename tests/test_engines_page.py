"""docs/benchmarks/engines.md holds the figures of the committed record, and no others."""

import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(DOCS))

import make_engines as made  # noqa: E402

ROW = {
    "drafts": 2,
    "identical": 3,
    "engine": [0.5, None],
    "ours": [0.5, 0.25],
    "inside": True,
    "same_counts": False,
    "counts": [9, 4, 0],
    "row_counts": [9, 4, 1],
    "same_under_convention": True,
}
RECORD = {"pairs": {"f e": {"prompts": 4, "date": "2026-11-22", "versions": {"e": "1"}, "by_drafts": [ROW]}}}


def test_page_is_fresh():
    """The record changed and the page not, or a figure was written by hand."""
    text = made.PAGE.read_text()
    assert made.page(text, made.records()) == text, "stale: run docs/make_engines.py"


def test_what_was_not_run_is_listed():
    """An absent section is no empty table."""
    assert made.page("<!-- head -->\n<!-- / -->", RECORD) == "<!-- head -->\nNot run yet.\n<!-- / -->"


def test_a_table_from_a_record():
    """A cell per figure; what was never reached is a dash; counts are told where they differ."""
    page = made.page("before\n<!-- pairs -->\nold\n<!-- / -->\nbehind\n", RECORD)
    assert page.startswith("before\n<!-- pairs -->\n| | K |")
    assert page.endswith("\n<!-- / -->\nbehind\n")
    assert "old" not in page
    row = "| f e | 2 | 3/4 | 0.50, - | 0.50, 0.25 | yes | [9, 4, 0], nextn [9, 4, 1] | yes |"
    assert row in page.splitlines()
    widths = {line.count("|") for line in page.splitlines() if line.startswith("|")}
    assert len(widths) == 1
    assert made.page(page, RECORD) == page


def test_a_fault_that_the_engine_refuses():
    reported = {"does": "d", "audit": ["head-absent"], "refused": "ValueError: a | b"}
    line = list(made.faults({"faults": {"dropped": reported}}))[-1]
    assert line == "| dropped | d | refuses: ValueError: a \\| b | `head-absent` |  |  |"


def test_every_table_is_on_the_page():
    text = made.PAGE.read_text()
    assert [mark for mark in made.TABLES if f"<!-- {mark} -->" not in text] == []


def test_a_clients_figure_outside_the_interval_is_marked():
    """An AL that no one marks reads like one that agrees."""
    ours = {"nextn": {"value": 2, "low": 1.9, "high": 2.1}, "nextn_counts": {"num_drafts": 4, "accepted": 4}}
    row = {"num_speculative_tokens": 2, "mean_acceptance_length": 1.5, "num_drafts": 4, "accepted": 2, **ours}
    found = {"prompts": {"num": 3}, "clients": {"a": [row | {"inside": False}], "b": [row | {"inside": True}]}}
    line = list(made.clients({"clients": {"data_sets": {"questions": found}}}))[-1]
    assert line == "| 3 of questions | 2 | 2.00 (1.90-2.10) | 4, 4 | 1.50, outside | 4, 2 | 1.50 | 4, 2 |"


@pytest.mark.parametrize(("best", "cell"), [(0, "off"), (2, "2, estimated"), (4, "4")])
def test_a_best_k_that_was_not_measured_is_marked(best, cell):
    """K, the length of answers and the number of requests are beside the speed that depends on them."""
    row = {"batch": 16, "speedup": {"median": 1, "low": 1, "high": 1}, "middle_repeat": [1, 1], "round_cost": 2}
    row |= {"mean_acceptance_length": 2, "best_num_speculative_tokens": best}
    each = {"num_speculative_tokens": 4, "tokens": 24, "requests": {"16": 32}, "forecasts": [row]}
    line = list(made.loads({"loads": {"e": each}}))[-1]
    assert line.startswith("| e | 4 | 24 | 16 | 32 | ")
    assert line.endswith(f" | {cell} |")
