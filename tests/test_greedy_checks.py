"""Near-ties against faults: the gap at the first difference, from whichever side tells the most."""

import pytest

from nextn.engines.answers import AnswerToken, EngineAnswer, TopLogprob
from nextn.verify_checks.greedy_checks import compare_answers, first_difference


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
    """The end is no likelier than the second choice of the side that goes on."""
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
