"""Loops are told from code."""

from pathlib import Path

import numpy as np
import pytest
from corpora import library

from nextn.data.degeneracy import degeneracy, degeneracy_notes

LINE = "    return self._value.encode('utf-8', errors='strict') + other[index]\n"
CODE = Path(degeneracy.__code__.co_filename).read_text()[1000:]


@pytest.mark.parametrize(
    ("text", "period"),
    [
        ("_" * 400, 1),
        (CODE[:200] + "_" * 200, 1),
        (CODE[:280] + "x = 1\n" * 20, 6),
        (CODE[:100] + "-" * 150 + CODE[100:250], 1),
        (LINE * 5, len(LINE)),
        (CODE[:80] + (LINE + "    x = self.other(1)\n") * 4, len(LINE) + 22),
    ],
    ids=["ruler", "code then ruler", "short lines", "loop that ended", "repeated line", "repeated pair of lines"],
)
def test_repetitive_text_is_flagged(text, period):
    """Catches a check that misses a loop because it began late, ended early, or has a long period."""
    found = degeneracy(text)
    assert found.is_degenerate
    assert found.period == period
    assert degeneracy(list(text.encode())) == found


def test_counting_lines_are_flagged():
    """Catches near-loops, where a number changes in each line, so that no stretch repeats exactly."""
    found = degeneracy("".join(f"    self.assertEqual(value, {index})\n" for index in range(20)))
    assert found.is_degenerate
    assert found.loop < 0.25


def test_figures():
    """Catches wrong figures beside a right verdict: 12 letters, of which the last 9 are three times abc."""
    found = degeneracy("xyzabcabcabc")
    assert (found.loop, found.period) == (0.75, 3)
    assert found.distinct == 1.0
    assert degeneracy("abcdefgh" * 2).distinct == 8 / 9
    assert not degeneracy("").is_degenerate


@pytest.mark.more
def test_python_source_is_not_flagged():
    """Catches thresholds that call ordinary code degenerate: less than 2 % of windows of 400 bytes may be flagged."""
    stream = np.concatenate([np.frombuffer(path.read_bytes(), np.uint8) for path in library()[1]])
    windows = [stream[begin : begin + 400] for begin in range(0, len(stream) - 400, 800)]
    flagged = [degeneracy(window).is_degenerate for window in windows]
    assert len(flagged) > 300
    assert np.mean(flagged) < 0.02


@pytest.mark.parametrize(
    ("degenerate", "short", "said"),
    [(0, 0, []), (7, 0, ["(prompts 1, 2, 3, 4, 5, 6, 7): the figures are of 1 text, too few"]),
     (8, 0, ["every text is degenerate"]), (3, 0, ["(prompts 1, 2, 3): the figures are of 5 texts"]),
     (8, 2, ["every text is degenerate",
             "2 of 8 prompts gave texts below 200"]), (0, 1, ["1 of 8 prompts gave texts"])],
)  # fmt: skip
def test_degeneracy_notes(degenerate, short, said):
    """Catches figures over a part of the texts that are reported as if they were of all."""
    found = degeneracy_notes(0.0, 8, degenerate=range(degenerate), short=short)
    assert len(found) == len(said)
    assert all(each.startswith("temperature 0: ") and part in each for each, part in zip(found, said, strict=True))


def test_no_note_advises_what_was_done():
    for measured, advised in (((0.0,), "--temperatures 1"), ((0.0, 0.7), "at temperature 0.7")):
        (note,) = degeneracy_notes(0.0, 8, degenerate=range(8), short=0, measured=measured)
        assert f"compare {'at ' if advised[0] == '-' else ''}{advised}" in note
    (note,) = degeneracy_notes(1.0, 8, degenerate=range(8), short=0, measured=(0.0, 1.0))
    assert "compare" not in note
