"""Prompts from a corpus: the part of documents before their labels, or excerpts of text with their continuation."""

from collections import Counter

import numpy as np
from numpy.random import PCG64, SeedSequence

from nextn.data.batches import permutation
from nextn.data.corpus import Corpus, Ids
from nextn.errors import ConfigError


def leading_prompts(corpus: Corpus, *, count: int, seed: int) -> list[Ids]:
    """Return the tokens before the first label of up to `count` random documents, i.e. the prompts of their answers.

    Documents that begin with a label have no prompt and are skipped.
    """
    if corpus.mask is None:
        return []
    spans = zip(corpus.starts.tolist(), corpus.lengths.tolist(), strict=True)
    sizes = [(start, int(corpus.mask[start : start + length].argmax())) for start, length in spans]
    prompts = [(start, size) for start, size in sizes if size]
    order = permutation(PCG64(SeedSequence(seed)), len(prompts))[:count]
    return [corpus.ids[start : start + size] for start, size in (prompts[index] for index in order)]


def sample_prompts(corpus: Corpus, *, count: int, length: int, seed: int, continuation: int = 256) -> list[Ids]:
    """Sample `count` excerpts of the text, [length + continuation] ids each: a prompt and its actual continuation.

    Each starts at a line or a document and stays inside its document; none overlap. No document gives a second excerpt
    before every document that is long enough has given one. Raises ConfigError if the corpus is too small.
    """
    if min(count, length) < 1 or min(continuation, seed) < 0:
        raise ConfigError(
            f"{count=}, {length=}, {continuation=}, {seed=}: expected count, length >= 1, the others >= 0"
        )
    size = length + continuation
    candidates = _excerpts(corpus, size)
    order = permutation(PCG64(SeedSequence(seed)), len(candidates))
    num_taken: Counter[int] = Counter()
    ranked = []
    for document, start in (candidates[index] for index in order):
        ranked.append((num_taken[document], start))
        num_taken[document] += 1
    if len(ranked) < count:
        raise ConfigError(
            f"{count} prompts of {length} + {continuation} tokens: the corpus has only {len(ranked)}; ask for fewer "
            "or shorter ones, or hold out more text"
        )
    ranked.sort(key=lambda pair: pair[0])
    return [corpus.ids[start : start + size] for _, start in ranked[:count]]


def _excerpts(corpus: Corpus, size: int) -> list[tuple[int, int]]:
    """(document, first token) of disjoint excerpts, in order."""
    lines = np.flatnonzero(corpus.ids == corpus.newline) + 1
    starts = np.union1d(corpus.starts, lines)
    documents = np.searchsorted(corpus.starts, starts, side="right") - 1
    ends = (corpus.starts + corpus.lengths - 1)[documents]
    next_free, excerpts = 0, []
    for document, start, end in zip(documents.tolist(), starts.tolist(), ends.tolist(), strict=True):
        if next_free <= start <= end - size:
            excerpts.append((document, start))
            next_free = start + size
    return excerpts
