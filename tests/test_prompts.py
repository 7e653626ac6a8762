"""Prompts: whole lines of one document each, apart from each other, and the leading_prompts of answers."""

import numpy as np
import pytest
from corpora import library, masked, numbered

from nextn.data.batches import leading_prompts, sample_prompts
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.data.corpus import Corpus, encoder
from nextn.errors import ConfigError


@pytest.fixture(scope="module")
def held_out():
    return Corpus.from_files(library()[1], byte_tokenizer())


def test_prompts(held_out):
    """Catches prompts that begin inside a line, cross documents, overlap, or cannot be reproduced."""
    options = {"count": 40, "length": 64, "continuation": 100}
    made = sample_prompts(held_out, seed=0, **options)
    assert [len(ids) for ids in made] == [164] * 40
    begins = sorted(_position(held_out, ids) for ids in made)
    assert (np.diff(begins) >= 164).all()
    starts = set(held_out.starts.tolist())
    assert all(begin in starts or held_out.ids[begin - 1] == 10 for begin in begins)
    assert not any(held_out.eos in ids for ids in made)
    assert np.array_equal(made, sample_prompts(held_out, seed=0, **options))
    assert not np.array_equal(made, sample_prompts(held_out, seed=1, **options))


def _position(corpus, ids):
    """Where a view of the corpus begins."""
    return (ids.ctypes.data - corpus.ids.ctypes.data) // corpus.ids.itemsize


def test_prompts_spread():
    """Catches a long document that gives most prompts while others give none."""
    encode = encoder(byte_tokenizer())
    texts = [("long", "abcdefg\n" * 500), *[(f"short{index}", "0123456789\n" * 4) for index in range(5)]]
    corpus = Corpus.from_texts(texts, encode, 257)
    made = sample_prompts(corpus, count=8, length=10, seed=0, continuation=10)
    documents = [int(np.searchsorted(corpus.starts, _position(corpus, ids), side="right")) for ids in made]
    assert set(documents[:6]) == {1, 2, 3, 4, 5, 6}


def test_prompts_fill_all_room_and_no_more():
    """Catches overlapping prompts, an eos inside one, and room at the end of a document that is left unused."""
    texts = [("lines", "ab\n" * 10), ("exact", "123456789\n"), ("short", "12345678\n")]
    corpus = Corpus.from_texts(texts, encoder(byte_tokenizer()), 257)
    made = sample_prompts(corpus, count=3, length=4, seed=0, continuation=6)
    assert sorted(_position(corpus, ids) for ids in made) == [0, 12, 31]
    with pytest.raises(ConfigError, match="has only 3"):
        sample_prompts(corpus, count=4, length=4, seed=0, continuation=6)


def test_prompts_refuse(held_out):
    """Catches fewer prompts than asked for, without a word."""
    with pytest.raises(ConfigError, match="has only"):
        sample_prompts(held_out, count=10**6, length=64, seed=0)
    with pytest.raises(ConfigError, match="length=0"):
        sample_prompts(held_out, count=1, length=0, seed=0)


def test_leading_prompts_are_the_prompts_of_answers():
    """Catches an opening that holds a token of the answer, and documents without a prompt or an answer in it."""
    corpus = masked("--++-", "+++", "---", "-+-+-", "----+")
    found = [ids.tolist() for ids in leading_prompts(corpus, count=9, seed=0)]
    assert sorted(found) == [[0], [0, 1], [0, 1, 2, 3]]
    assert [ids.tolist() for ids in leading_prompts(corpus, count=2, seed=0)] == found[:2]
    orders = {tuple(map(len, leading_prompts(corpus, count=9, seed=seed))) for seed in range(9)}
    assert len(orders) > 1
    assert leading_prompts(numbered(20), count=3, seed=0) == []
