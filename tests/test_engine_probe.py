"""Whether an engine still serves the weights that its stored answers are of."""

import json
from dataclasses import replace

import pytest
from quick import loop

from nextn.evaluate.engine_probe import EngineFolder, EngineProbe

PROBE = EngineProbe((1, 2), "abc", tuple(range(10, 20)), tuple(-0.1 * place for place in range(10)))


def shifted(amount, **changes):
    return replace(PROBE, logprobs=tuple(value + amount for value in PROBE.logprobs), **changes)


@loop(
    ("other", "is_same"),
    [
        (PROBE, True),
        (shifted(0.01), True),  # another batch
        (shifted(0.05), False),
        (replace(PROBE, prompt=(1, 3)), False),
        (shifted(0.01, ids=(*range(10, 18), 5, 6)), True),  # parted at a near tie
        (replace(PROBE, ids=(*range(10, 18), 5, 6), logprobs=(*PROBE.logprobs[:8], -1.4, -0.1)), False),  # not near
        (shifted(0.0, ids=(*range(10, 14), *range(50, 56))), False),  # too early to say
        (replace(PROBE, ids=PROBE.ids[:8], logprobs=PROBE.logprobs[:8]), False),  # ended early
        (EngineProbe((1, 2), "abc"), False),
    ],
)
def test_same_weights(other, is_same):
    assert PROBE.is_same_as(other) is other.is_same_as(PROBE) is is_same


def test_texts_are_compared_where_there_are_no_log_probabilities():
    one = EngineProbe((1, 2), "abc")
    assert one.is_same_as(EngineProbe((1, 2), "abc"))
    assert not one.is_same_as(EngineProbe((1, 2), "abd"))


def test_answers_of_other_weights_are_removed(tmp_path):
    folder = EngineFolder(tmp_path / "answers", PROBE)
    (folder.path / "0.jsonl").write_text("{}")
    again = EngineFolder(tmp_path / "answers", shifted(0.01))
    assert (again.was_cleared, again.probe) == (False, PROBE)  # so that the texts, and the states of them, are the same
    assert (folder.path / "0.jsonl").exists()
    other = EngineFolder(tmp_path / "answers", shifted(0.05))
    assert (other.was_cleared, other.probe) == (True, shifted(0.05))
    assert [path.name for path in folder.path.iterdir()] == ["probe.json"]
    assert EngineFolder(tmp_path / "answers", shifted(0.05)).probe == shifted(0.05)


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"prompt": 1, "ids": 2, "logprobs": 3, "text": ""})])
def test_answers_without_a_readable_probe_are_removed(text, tmp_path):
    (tmp_path / "probe.json").write_text(text)
    (tmp_path / "0.jsonl").write_text("{}")
    assert EngineFolder(tmp_path, PROBE).probe == PROBE
    assert not (tmp_path / "0.jsonl").exists()
