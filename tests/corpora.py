"""Small corpora whose ids tell where they stand, and Python's own library, split."""

from functools import cache
from pathlib import Path

import numpy as np

from nextn.data.corpus import Corpus, Document, standard_library
from nextn.data.sources import path_hashes, split_by_hash

EOS = 999


def numbered(*lengths):
    """A corpus in which every token is its own position, so that a batch shows where it was cut."""
    starts = np.cumsum([0, *lengths[:-1]])
    return Corpus(np.arange(sum(lengths)), starts, tuple(map(str, starts)), EOS, None)


def masked(*marks):
    """A document of ids 0.. for each string; + marks the tokens that count."""
    documents = [Document(each, np.arange(len(each)), np.array([sign == "+" for sign in each])) for each in marks]
    return Corpus.from_documents(documents, lambda texts: [[10] for _ in texts], EOS)


@cache
def library() -> tuple[list[Path], list[Path]]:
    """(train, held out) of the standard library."""
    paths = standard_library()
    return split_by_hash(paths, path_hashes(paths), held_out=0.05)
