"""The list of mutations: `python tests/mutations.py` runs them."""

from mutations import MUTATIONS, ROOT, problems


def test_each_still_applies():
    """Text that has changed, or tests that have gone: the list would prove nothing."""
    assert [*problems(ROOT)] == []
    assert len(set(MUTATIONS)) == len(MUTATIONS) >= 60
