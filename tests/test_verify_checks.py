"""The tests behind verify's checks: near-ties against faults, false alarms as rare as stated."""

import numpy as np
import pytest

from nextn.engines.answers import AnswerToken, EngineAnswer, TopLogprob
from nextn.verify_checks.greedy_checks import compare_answers, first_difference
from nextn.verify_checks.sampling_checks import calibrate, combine, compare, count_table, holm, position_tables


def token(name, **logprobs):
    """A token with its list: token("a", a=-0.1, b=-2.5)."""
    best = tuple(TopLogprob(text, None, value) for text, value in sorted(logprobs.items(), key=lambda each: -each[1]))
    return AnswerToken(name, None, logprobs.get(name), best)


def answer(*tokens):
    return EngineAnswer("".join(each.text for each in tokens), "length", tokens)


SAME = token("x", x=-0.1, y=-3.0)


def test_equal():
    assert first_difference(0, answer(SAME, SAME), answer(SAME, SAME)) is None


def test_the_larger_gap_counts():
    """A fault moves one side by much; the other may think it a tie."""
    one, other = token("a", a=-0.10, b=-3.10), token("b", b=-0.69, a=-0.70)
    for pair in ((one, other), (other, one)):
        found = first_difference(4, answer(SAME, pair[0]), answer(SAME, pair[1]))
        assert (found.prompt, found.position, found.gap) == (4, 1, pytest.approx(3.0))


def test_gaps_of_tokens_that_are_not_the_best_or_not_listed():
    """To the best of the same side; one that is not listed is below the last."""
    worst, best = (token(text, a=-0.1, b=-3.0, c=-4.0) for text in "ca")
    for one, other, gap in ((worst, best, 3.9), (token("a", a=-0.1, b=-3.0), AnswerToken("z"), 2.9)):
        assert first_difference(0, answer(one), answer(other)).gap == pytest.approx(gap)


def test_one_text_ends():
    """The end is no likelier than the second choice of the side that continues."""
    found = first_difference(0, answer(SAME), answer(SAME, token("a", a=-0.1, b=-0.3)))
    assert (found.position, found.one, found.other, found.gap) == (1, None, "a", pytest.approx(0.2))
    assert "the end against 'a'" in found.describe("token")


def test_kinds_that_differ_are_compared_by_character():
    """Ids of one engine and texts of another name nothing in common."""
    ids = EngineAnswer("ab", "length", (AnswerToken("token_id:1", 1), AnswerToken("token_id:2", 2)))
    assert first_difference(0, ids, answer(AnswerToken("a"), AnswerToken("b"))) is None
    found = first_difference(0, ids, answer(AnswerToken("a"), AnswerToken("c")))
    assert (found.position, found.one, found.other, found.gap) == (1, "b", "c", None)


def test_sorted_into_ties_faults_and_unknown():
    near = (answer(token("a", a=-0.6, b=-0.7)), answer(token("b", a=-0.7, b=-0.6)))
    far = (answer(SAME, token("a", a=-0.1, b=-5.0)), answer(SAME, token("b", b=-0.1, a=-5.0)))
    blind = (answer(AnswerToken("a")), answer(AnswerToken("b")))
    found = compare_answers([near, far, blind, (answer(SAME), answer(SAME))], tie_gap=0.25)
    counts = (found.equal, len(found.ties), len(found.faults), len(found.unknown), found.compared, found.num)
    assert counts == (1, 1, 1, 1, 2, 4)
    check = found.check("x", "said", tie_gap=0.25, advice="do")
    assert (check.outcome, check.advice) == ("failed", "do")
    assert compare_answers([near, far], tie_gap=5.0).check("x", "", tie_gap=5.0, advice="do").outcome == "passed"
    assert (
        compare_answers([near, blind], tie_gap=0.25).check("x", "", tie_gap=0.25, advice="do").outcome == "inconclusive"
    )
    assert compare_answers([], tie_gap=0.25).check("x", "", tie_gap=0.25, advice="do").outcome == "inconclusive"


def test_a_new_prompt_decides_what_is_unknown():
    blind = (answer(AnswerToken("a")), answer(AnswerToken("b")))
    asked = []

    def probs(pair, first, place):
        asked.append((pair, first.text, place))
        return token("a", a=-0.5, b=-0.6, c=-4.0)

    assert compare_answers([blind], tie_gap=0.25, token_source=probs).ties[0].gap == pytest.approx(0.1)
    assert asked == [(0, "a", 0)]
    elsewhere = (answer(AnswerToken("a")), answer(AnswerToken("q")))
    assert compare_answers([elsewhere], tie_gap=0.25, token_source=probs).faults[0].gap == pytest.approx(3.5)
    neither = (answer(AnswerToken("p")), answer(AnswerToken("q")))
    assert len(compare_answers([neither], tie_gap=0.25, token_source=probs).unknown) == 1
    assert len(compare_answers([blind], tie_gap=0.25, token_source=lambda *_: None).unknown) == 1


PROBS = np.array([0.4, 0.3, 0.15, 0.1, 0.05])


def texts(rng, probs, num, length=4):
    return [tuple(row) for row in rng.choice(len(probs), p=probs, size=(num, length)).tolist()]


def test_tables():
    """The end of a text is a token of its own; counts are per text."""
    tables = position_tables([(1, 2), (1,), (3, 2)], [0, 1])
    assert tables[0].tolist() == [[1, 0], [1, 0], [0, 1]]
    assert tables[1].tolist() == [[1, 0], [0, 1], [1, 0]]
    assert count_table([["a", "b", "a"], [], ["b"]]).tolist() == [[2, 1], [0, 0], [0, 1]]


@pytest.mark.more
def test_equal_distributions_give_even_p_values():
    """p below x in a share x of runs, also where tokens of one text are all the same, as whole texts are exchanged."""
    rng = np.random.default_rng(0)
    p_values = []
    for seed in range(120):
        rows = [(row[0],) * 4 for row in texts(rng, PROBS, 40)]
        p_values.append(compare(position_tables(rows, range(4)), 20, level=0.05, seed=seed).p)
    assert 0.005 <= np.mean(np.array(p_values) <= 0.05) <= 0.11
    assert 0.4 <= np.mean(p_values) <= 0.6


def test_a_sharpened_distribution_is_found():
    rng = np.random.default_rng(1)
    sharp = PROBS**2 / (PROBS**2).sum()
    found = compare(position_tables(texts(rng, PROBS, 60) + texts(rng, sharp, 60), range(4)), 60, level=0.01, seed=0)
    assert found.p < 0.003
    assert found.power(0.01) > 0.8


def test_place_of_the_difference():
    """Only the third token differs."""
    rng = np.random.default_rng(2)
    ones, others = texts(rng, PROBS, 60), [(a, b, 0, d) for a, b, _, d in texts(rng, PROBS, 60)]
    found = compare(position_tables(ones + others, range(4)), 60, level=0.01, seed=0)
    assert (found.worst, found.p < 0.01) == (2, True)
    assert 0.4 < found.distance < 0.8


def test_prompts_together_find_more():
    """A shift that no prompt shows alone; and prompts of one distribution together show none."""
    rng = np.random.default_rng(6)
    mild = PROBS**1.5 / (PROBS**1.5).sum()
    parts = [compare(position_tables(texts(rng, PROBS, 60) + texts(rng, mild, 60), range(4)), 60, level=0.01, seed=seed)
             for seed in range(12)]  # fmt: skip
    found = combine(parts)
    assert found.p < 0.003 < min(part.p for part in parts)
    assert found.power(0.01) >= max(part.power(0.01) for part in parts)
    alike = [
        compare(position_tables(texts(rng, PROBS, 120), range(4)), 60, level=0.01, seed=seed) for seed in range(12)
    ]
    assert combine(alike).p > 0.05


def test_power_is_what_happens():
    """The stated power against simulated runs of the sharpened distribution."""
    rng = np.random.default_rng(3)
    sharp = PROBS**2 / (PROBS**2).sum()
    stated = compare(position_tables(texts(rng, PROBS, 60, 1), [0]), 30, level=0.05, seed=0).power(0.05)
    hits = [
        compare(position_tables(texts(rng, PROBS, 30, 1) + texts(rng, sharp, 30, 1), [0]), 30, level=0.05, seed=seed).p
        <= 0.05
        for seed in range(100)
    ]
    assert np.mean(hits) == pytest.approx(stated, abs=0.2)


def test_holm():
    """Each p against level / how many are left, in order; the first that passes ends the search."""
    assert holm([0.001, 0.04, 0.02], 0.05) == [True, True, True]
    assert holm([0.03, 0.04, 0.02], 0.05) == [False, False, False]
    assert holm([0.2, 0.001, 0.03], 0.05) == [False, True, False]
    assert holm([], 0.05) == []


def test_calibrated():
    rng = np.random.default_rng(4)
    chances = rng.uniform(0.2, 0.9, 400)
    right = [(bool(rng.random() < chance), float(chance)) for chance in chances]
    found = calibrate(right, level=0.01)
    assert found.p > 0.01
    assert found.num == 400
    assert found.expected == pytest.approx(chances.sum())
    greedy = [(top or rng.random() < 0.3, chance) for top, chance in right]
    assert calibrate(greedy, level=0.01).p < 1e-4
    assert 0.05 < found.smallest < 0.12


def test_calibrated_false_alarms():
    rng = np.random.default_rng(5)
    p_values = [calibrate([(bool(rng.random() < 0.6), 0.6) for _ in range(100)], level=0.05).p for _ in range(400)]
    assert np.mean(np.array(p_values) < 0.05) == pytest.approx(0.05, abs=0.03)


def test_certain_samples_show_nothing():
    assert calibrate([(True, 0.999)] * 1000, level=0.01) is None
    assert calibrate([], level=0.01) is None
