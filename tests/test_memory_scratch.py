"""Scratch memory: the same for all, larger if one needs it; the old stays valid for its users."""

from nextn.runtime.native.memory import _RESERVED, Scratch


def test_the_same_memory_again():
    scratch = Scratch()
    first, second = scratch.take(100), scratch.take(10)
    assert first.data_ptr() == second.data_ptr()
    assert first.data_ptr() % 64 == 0
    assert (len(first), len(second)) == (100, 10)


def test_larger_memory_leaves_the_old_one_be():
    """A replay recorded earlier keeps the memory that it was given."""
    scratch = Scratch()
    old = scratch.take(100)
    old.fill_(7)
    new = scratch.take(_RESERVED + 1)
    new.fill_(1)
    assert old.tolist() == [7] * 100
    assert scratch.take(100).data_ptr() == new.data_ptr()
