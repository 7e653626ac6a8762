"""The trace against the definition of pairs: what sits where, round by round."""

from collections import defaultdict

import pytest
from tiny import build, decode, prompt, refrain

from nextn.decoding.trace import trace
from nextn.settings import Settings


@pytest.mark.parametrize("modules", [1, 2])
def test_every_pair_is_where_it_should_be(modules):
    """At position i the head of depth 1 eats token i + 1 and h_i; the trunk eats token i. In every phase."""
    model = build("glm4_moe", modules=modules)
    start = prompt(6)
    known = start + decode(model, [start], num_speculative_tokens=3, max_tokens=9)[0][0]
    rows = list(trace(model, start, Settings(num_speculative_tokens=3, max_tokens=9)))
    assert {row.phase for row in rows} >= {"prefill", "draft", "verify"}
    for row in rows:
        if row.by == "trunk" and "rolled back" not in row.gives:
            assert row.token == str(known[row.position])
            assert row.gives.startswith(f"h{row.position}")
        elif row.by == "head[0]" and row.hidden.startswith("h"):
            assert row.hidden == f"h{row.position}"
            assert row.token == str(known[row.position + 1])
        elif row.phase == "draft" and row.hidden.startswith("g") and modules == 1:
            assert row.gives.startswith(f"draft {int(row.hidden[1:]) + 1} = ")


def test_every_position_is_refreshed_once_with_true_states():
    """Without gaps: each position of prompt and text gets its final pair exactly once."""
    model = build("glm4_moe")
    rows = list(trace(model, prompt(6), Settings(num_speculative_tokens=2, max_tokens=8)))
    fed = defaultdict(int)
    for row in rows:
        if row.by == "head[0]" and row.hidden.startswith("h"):
            fed[row.position] += 1
    assert set(fed) == set(range(max(fed) + 1))
    assert set(fed.values()) == {1}


def test_accepted_positions_are_refreshed(trained):
    """On a head whose drafts are accepted, each accepted position is refreshed with the true state."""
    model = trained["glm"]
    start = refrain(1, 33, seed=5)[0].tolist()
    rows = list(trace(model, start, Settings(num_speculative_tokens=3, max_tokens=9)))
    again = [row for row in rows if row.phase == "refresh"]
    drafted = [row.position for row in rows if row.phase == "draft" and row.hidden.startswith("g")]
    assert again
    assert all(row.hidden == f"h{row.position}" and row.by == "head[0]" for row in again)
    assert {row.position for row in again} & set(drafted)
    assert any("accepts draft 1" in row.gives for row in rows)


def test_only_the_end_of_a_prompt_predicts_its_first_token():
    """A prompt that is processed in several passes has one position that predicts a new token."""
    model, start = build("glm4_moe"), prompt(11)
    rows = list(trace(model, start, Settings(num_speculative_tokens=1, max_tokens=2, chunk=4)))
    assert [row.position for row in rows if row.round == 0 and "->" in row.gives] == [10]


def test_one_trunk_pass_a_round():
    rows = list(trace(build("qwen3_5"), prompt(5), Settings(num_speculative_tokens=2, max_tokens=8)))
    for number in {row.round for row in rows} - {0}:
        positions = [row.position for row in rows if row.round == number and row.by == "trunk"]
        assert positions == list(range(positions[0], positions[0] + len(positions)))
        assert len(positions) <= 3
