"""The index against a search of the whole text, and its bounds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.speculative import copy_drafts
from nextn.speculative.copy_drafts import MAX_MATCH, CopyIndex, CopyMatch


def searched(tokens):
    """The match by its definition: every place, compared token by token."""
    end, places = len(tokens), []
    for place in range(1, end):
        length = next((n for n in range(place) if tokens[place - 1 - n] != tokens[end - 1 - n]), place)
        if length >= 2:
            places.append(CopyMatch(place, min(length, MAX_MATCH)))
    latest = places[::-1][: copy_drafts._MAX_PLACES]
    return max(latest, key=lambda match: match.length, default=None)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=12))
def test_the_index_finds_what_a_search_of_the_whole_text_finds(parts):
    tokens = []
    index = CopyIndex(tokens)
    for part in parts:  # it grows by several tokens between searches
        tokens += part
        match = index.find()
        assert match == searched(tokens)
        if match is not None:
            longer = list(tokens)
            for token in index.copy(match, 9):  # of each token the one that a longer text has there
                assert token == longer[match.start + len(longer) - len(tokens)]
                longer.append(token)


def test_long_and_repeated_texts_cost_a_bounded_number_of_comparisons(monkeypatch):
    compared = 0
    common = CopyIndex._common

    def counted(self, place):
        nonlocal compared
        length = common(self, place)
        compared += length
        return length

    monkeypatch.setattr(CopyIndex, "_common", counted)
    tokens = [7] * 100_000
    index = CopyIndex(tokens)
    assert index.find() == CopyMatch(99_999, MAX_MATCH)
    assert index.copy(CopyMatch(99_999, MAX_MATCH), 3) == [7, 7, 7]
    assert compared <= MAX_MATCH * copy_drafts._MAX_PLACES
    assert len(index._latest) == 1
    assert len(index._before) == len(tokens)


def test_texts_without_a_match():
    for tokens in ([], [1], [1, 1], [1, 2, 3], [1, 2, 3, 1]):
        assert CopyIndex(tokens).find() is None, tokens
