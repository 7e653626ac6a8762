"""Near-ties against faults: the gap at the first difference, from whichever side tells the most."""

import pytest

from nextn.engines.answers import Answer, Best, Token
from nextn.verify.compare import agreement, difference


def token(name, **logprobs):
    """A token with its list: token("a", a=-0.1, b=-2.5)."""
    best = tuple(Best(text, None, value) for text, value in sorted(logprobs.items(), key=lambda each: -each[1]))
    return Token(name, None, logprobs.get(name), best)


def answer(*tokens):
    return Answer("".join(each.text for each in tokens), "length", tokens)


SAME = token("x", x=-0.1, y=-3.0)


def test_equal():
    assert difference(0, answer(SAME, SAME), answer(SAME, SAME)) is None


def test_the_larger_gap_counts():
    """A fault moves one side by much; the other may think it a tie."""
    one, other = token("a", a=-0.10, b=-3.10), token("b", b=-0.69, a=-0.70)
    for pair in ((one, other), (other, one)):
        found = difference(4, answer(SAME, pair[0]), answer(SAME, pair[1]))
        assert (found.prompt, found.place, found.gap) == (4, 1, pytest.approx(3.0))


def test_a_token_that_is_not_the_best_of_its_own_side():
    found = difference(0, answer(token("c", a=-0.1, b=-3.0, c=-4.0)), answer(token("a", a=-0.1, b=-3.0, c=-4.0)))
    assert found.gap == pytest.approx(3.9)


def test_an_unlisted_token_is_below_the_last_listed():
    found = difference(0, answer(token("a", a=-0.1, b=-3.0)), answer(Token("z")))
    assert found.gap == pytest.approx(2.9)


def test_one_text_ends():
    """The end is no likelier than the second choice of the side that goes on."""
    found = difference(0, answer(SAME), answer(SAME, token("a", a=-0.1, b=-0.3)))
    assert (found.place, found.one, found.other, found.gap) == (1, None, "a", pytest.approx(0.2))
    assert "the end against 'a'" in found.told("token")


def test_kinds_that_differ_are_compared_by_character():
    """Ids of one engine and texts of another name nothing in common."""
    ids = Answer("ab", "length", (Token("token_id:1", 1), Token("token_id:2", 2)))
    assert difference(0, ids, answer(Token("a"), Token("b"))) is None
    found = difference(0, ids, answer(Token("a"), Token("c")))
    assert (found.place, found.one, found.other, found.gap) == (1, "b", "c", None)


def test_sorted_into_ties_faults_and_unknown():
    near = (answer(token("a", a=-0.6, b=-0.7)), answer(token("b", a=-0.7, b=-0.6)))
    far = (answer(SAME, token("a", a=-0.1, b=-5.0)), answer(SAME, token("b", b=-0.1, a=-5.0)))
    blind = (answer(Token("a")), answer(Token("b")))
    found = agreement([near, far, blind, (answer(SAME), answer(SAME))], tie_gap=0.25)
    counts = (found.equal, len(found.ties), len(found.faults), len(found.unknown), found.compared, found.num)
    assert counts == (1, 1, 1, 1, 2, 4)
    check = found.check("x", "said", tie_gap=0.25, advice="do")
    assert (check.outcome, check.advice) == ("failed", "do")
    assert agreement([near, far], tie_gap=5.0).check("x", "", tie_gap=5.0, advice="do").outcome == "passed"
    assert agreement([near, blind], tie_gap=0.25).check("x", "", tie_gap=0.25, advice="do").outcome == "unclear"
    assert agreement([], tie_gap=0.25).check("x", "", tie_gap=0.25, advice="do").outcome == "unclear"


def test_a_law_settles_what_is_unknown():
    blind = (answer(Token("a")), answer(Token("b")))
    asked = []

    def law(pair, first, place):
        asked.append((pair, first.text, place))
        return token("a", a=-0.5, b=-0.6, c=-4.0)

    assert agreement([blind], tie_gap=0.25, law=law).ties[0].gap == pytest.approx(0.1)
    assert asked == [(0, "a", 0)]
    elsewhere = (answer(Token("a")), answer(Token("q")))
    assert agreement([elsewhere], tie_gap=0.25, law=law).faults[0].gap == pytest.approx(3.5)
    neither = (answer(Token("p")), answer(Token("q")))
    assert len(agreement([neither], tie_gap=0.25, law=law).unknown) == 1
    assert len(agreement([blind], tie_gap=0.25, law=lambda *_: None).unknown) == 1
