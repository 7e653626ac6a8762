"""Prompts of a corpus: what stands before its answers, or pieces of its text with what follows them."""

from collections import Counter

import numpy as np
from numpy.random import PCG64, SeedSequence

from nextn.corpus.batches import shuffled
from nextn.corpus.data import Corpus, Ids
from nextn.errors import ConfigError


def openings(corpus: Corpus, *, count: int, seed: int) -> list[Ids]:
    """What stands before the first token that counts, of up to count documents drawn by the seed: their prompts.

    Documents whose first token counts have none.
    """
    if corpus.mask is None:
        return []
    pieces = zip(corpus.starts.tolist(), corpus.lengths.tolist(), strict=True)
    sizes = [(begin, int(corpus.mask[begin : begin + length].argmax())) for begin, length in pieces]
    places = [(begin, size) for begin, size in sizes if size]
    order = shuffled(PCG64(SeedSequence(seed)), len(places))[:count]
    return [corpus.ids[begin : begin + size] for begin, size in (places[index] for index in order)]


def prompts(corpus: Corpus, *, count: int, length: int, seed: int, continuation: int = 256) -> list[Ids]:
    """count pieces of real text, each [length + continuation] ids: the prompt, then what really follows it.

    Each begins at a line or a document, stays inside its document, and overlaps no other; no document gives a second
    one before every document with room gave its first. Raises ConfigError if the corpus has not enough room.
    """
    if min(count, length) < 1 or min(continuation, seed) < 0:
        raise ConfigError(
            f"{count=}, {length=}, {continuation=}, {seed=}: expected count, length >= 1, the others >= 0"
        )
    size = length + continuation
    places = _places(corpus, size)
    order = shuffled(PCG64(SeedSequence(seed)), len(places))
    taken: Counter[int] = Counter()
    ranked = []
    for document, begin in (places[index] for index in order):
        ranked.append((taken[document], begin))
        taken[document] += 1
    if len(ranked) < count:
        raise ConfigError(
            f"{count} prompts of {length} + {continuation} tokens: the corpus has room for {len(ranked)}; "
            "ask for fewer or shorter ones, or hold out more text"
        )
    ranked.sort(key=lambda place: place[0])
    return [corpus.ids[begin : begin + size] for _, begin in ranked[:count]]


def _places(corpus: Corpus, size: int) -> list[tuple[int, int]]:
    # (document, first token), disjoint, in order.
    lines = np.flatnonzero(corpus.ids == corpus.newline) + 1
    begins = np.union1d(corpus.starts, lines)
    documents = np.searchsorted(corpus.starts, begins, side="right") - 1
    ends = (corpus.starts + corpus.lengths - 1)[documents]
    free, places = 0, []
    for document, begin, end in zip(documents.tolist(), begins.tolist(), ends.tolist(), strict=True):
        if free <= begin <= end - size:
            places.append((document, begin))
            free = begin + size
    return places
