"""Held-out text: the split hangs on names alone, and leaves no side empty."""

from pathlib import Path

import pytest

from nextn.corpus.split import divided, split
from nextn.errors import ConfigError


def test_split_hangs_on_names_alone():
    """Catches a split that depends on the folder, the order, Python's salted hash, or what else is there."""
    names = [f"pkg/m{index}.py" for index in range(400)]
    train, held = split([Path("/a", name) for name in names], held_out=0.1)
    assert len(train) + len(held) == 400
    assert 20 < len(held) < 60
    moved = split([Path("/b/c", name) for name in reversed(names)], held_out=0.1)
    assert {path.name for path in moved[1]} == {path.name for path in held}
    fewer = split([Path("/a", name) for name in names[::2]], held_out=0.1)
    assert fewer[1] == [path for path in held if path in {*fewer[0], *fewer[1]}]
    assert split([Path("/a", name) for name in names], held_out=0.1, seed=1)[1] != held
    assert [path.name for path in held[:3]] == ["m3.py", "m10.py", "m14.py"]


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_split_leaves_no_side_empty(share):
    """Catches training on nothing, or a held-out figure over no text, when there are few files."""
    train, held = split([Path("a.txt"), Path("b.txt"), Path("c.txt")], held_out=share)
    assert min(len(train), len(held)) == 1


def test_split_refuses():
    """Catches a share that is a percentage, and a single file that would silently be on one side only."""
    with pytest.raises(ConfigError, match="held_out = 5"):
        split([Path("a"), Path("b")], held_out=5)
    with pytest.raises(ConfigError, match="cannot be split"):
        split([Path("a")])
    assert split([Path("a")], held_out=0) == ([Path("a")], [])


def test_divided_keeps_copies_together():
    """Catches a text that is trained on and held out, and a side that stays empty though it need not."""
    assert divided("abcd", [0.5, 0.01, 0.7, 0.01], held_out=0.05) == (["a", "c"], ["b", "d"])
    assert divided("abc", [0.9, 0.9, 0.8], held_out=0.05) == (["a", "b"], ["c"])
    assert divided("abc", [0.0, 0.0, 0.01], held_out=0.5) == (["c"], ["a", "b"])
    assert divided("ab", [0.3, 0.3], held_out=0.5) == (["a", "b"], [])
