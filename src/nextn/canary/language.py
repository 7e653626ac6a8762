"""The language that canaries speak: a random word, again and again, behind it a digit that counts.

`qxze4 qxze7 qxze0 ...`: what comes next stands in the row itself, so a head that never saw the prompt, sees it at other
places, or is given another state cannot know it. The digits keep texts from being loops.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.random import PCG64, SeedSequence

from nextn.corpus.batches import shuffled

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SHORTEST, _LONGEST = 3, 6  # letters of a word


def text(length: int, *, seed: Sequence[int]) -> str:
    """`length` characters; the same for the same seed in every version of numpy."""
    bits = PCG64(SeedSequence(list(seed)))
    size, first, step = (int(each) for each in bits.random_raw(3) % np.array([_LONGEST - _SHORTEST, 10, 3], np.uint64))
    size, step = size + _SHORTEST, step + 1
    word = "".join(_LETTERS[place] for place in shuffled(bits, len(_LETTERS))[:size])
    times = length // (size + 2) + 1
    return "".join(f"{word}{(first + step * turn) % 10} " for turn in range(times))[:length]


def documents(count: int, length: int, *, seed: int) -> Iterator[tuple[str, str]]:
    """(name, text) of texts to learn from."""
    return ((str(place), text(length, seed=(seed, 0, place))) for place in range(count))


def prompts(count: int, *, seed: int, shortest: int = 12, longest: int = 44) -> list[str]:
    """Texts that no document is, of lengths spread evenly between the two."""
    lengths = np.linspace(shortest, longest, count).round().astype(int).tolist()
    return [text(length, seed=(seed, 1, place)) for place, length in enumerate(lengths)]
