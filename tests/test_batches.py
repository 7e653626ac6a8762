"""Batches: every token once an epoch, exact resuming, one order for ever; prompts: whole lines of one document each."""

import numpy as np
import pytest
from corpora import EOS, library, masked, numbered
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.data.batches import Batches, leading_prompts, sample_prompts
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.data.corpus import Corpus, encoder
from nextn.errors import ConfigError

LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=8)


def epoch_rows(batches, epoch):
    """Token ids of the real columns of each row of one epoch; batch_size must divide the epoch."""
    steps = batches.rows_per_epoch // batches.batch_size
    made = [batches.batch(epoch * steps + step) for step in range(steps)]
    return [row[real >= 0].numpy() for batch in made for row, real in zip(batch.tokens, batch.documents, strict=True)]


@pytest.mark.more
@given(lengths=LENGTHS, length=st.integers(2, 12), seed=st.integers(0, 3), epoch=st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_packed_epoch_sees_every_token_once(lengths, length, seed, epoch):
    """Catches overlapping or lost windows: an epoch must miss only the remainder, and nothing may come twice."""
    corpus = numbered(*lengths)
    if corpus.num_tokens < length:
        return
    rows = epoch_rows(Batches(corpus, batch_size=1, length=length, seed=seed), epoch)
    seen = np.concatenate(rows)
    assert len(seen) == len(set(seen.tolist())) == corpus.num_tokens // length * length
    assert all(((row[1:] - row[:-1]) % corpus.num_tokens == 1).all() for row in rows)


@pytest.mark.more
@given(lengths=LENGTHS, length=st.integers(2, 12), seed=st.integers(0, 3), epoch=st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_unpacked_epoch_sees_every_token_once_and_crosses_nothing(lengths, length, seed, epoch):
    """Catches a row that crosses a document, padding in the wrong place, and lost or repeated tokens."""
    corpus = numbered(*lengths)
    batches = Batches(corpus, batch_size=1, length=length, seed=seed, pack=False)
    rows = epoch_rows(batches, epoch)
    assert sorted(np.concatenate(rows).tolist()) == list(range(corpus.num_tokens))
    for row in rows:
        document = np.searchsorted(corpus.starts, row, side="right")
        assert len(row) >= 1
        assert (document == document[0]).all()
    for step in range(batches.rows_per_epoch):
        made = batches.batch(step)
        padding = made.documents[0] == -1
        assert (made.documents[0][~padding] == 0).all()
        assert (made.tokens[0][padding] == EOS).all()
        assert padding.tolist() == sorted(padding.tolist())


def test_documents_of_a_packed_row():
    """Catches document ids that do not change at a boundary or where the ring closes, or that go on from row to row."""
    corpus = numbered(3, 5, 4)
    made = Batches(corpus, batch_size=50, length=7, seed=0).batch(0)
    for tokens, documents in zip(made.tokens.tolist(), made.documents.tolist(), strict=True):
        expected = [0]
        for token in tokens[1:]:
            expected.append(expected[-1] + (token in (0, 3, 8)))
        assert documents == expected
    assert any(11 in tokens[:-1] for tokens in made.tokens.tolist())


def test_one_document_ring_is_a_boundary():
    """Catches the end of the only document running into its own beginning as if it were text."""
    made = Batches(numbered(6), batch_size=40, length=4, seed=1).batch(0)
    across = [(t, d) for t, d in zip(made.tokens.tolist(), made.documents.tolist(), strict=True) if 0 in t[1:]]
    assert across
    assert all(documents[tokens.index(0)] == 1 for tokens, documents in across)


def test_dtypes():
    """Catches tensors that an embedding or a mask cannot take."""
    import torch

    made = Batches(numbered(30), batch_size=2, length=5, seed=0).batch(0)
    assert (made.tokens.dtype, made.documents.dtype) == (torch.int64, torch.int32)
    assert made.tokens.shape == made.documents.shape == (2, 5)


@pytest.mark.parametrize("pack", [True, False])
def test_resume_is_exact(pack):
    """Catches hidden state: a fresh object, asked for late steps in any order, must agree with a run from the start."""
    corpus = numbered(50, 7, 90)
    options = {"batch_size": 4, "length": 8, "seed": 3, "pack": pack}
    run = [Batches(corpus, **options).batch(step).tokens for step in range(20)]
    fresh = Batches(corpus, **options)
    for step in (19, 2, 11, 2):
        assert fresh.batch(step).tokens.equal(run[step])
    assert not Batches(corpus, **{**options, "seed": 4}).batch(0).tokens.equal(run[0])


def test_order_stays():
    """Catches a change of the order itself, which would break resuming a run that an older version began."""
    corpus = numbered(10, 20)
    assert Batches(corpus, batch_size=4, length=4, seed=0).batch(3).tokens[:, 0].tolist() == [23, 27, 3, 11]
    assert Batches(corpus, batch_size=4, length=4, seed=0, pack=False).batch(3).tokens[:, 0].tolist() == [22, 14, 0, 3]


def test_epochs_differ():
    """Catches one permutation, or one set of cuts, that serves all epochs."""
    for pack in (True, False):
        batches = Batches(numbered(*[23] * 20), batch_size=1, length=5, seed=0, pack=pack)
        first, second = (epoch_rows(batches, epoch) for epoch in (0, 1))
        assert [row.tolist() for row in first] != [row.tolist() for row in second]
        assert {tuple(row.tolist()) for row in first} != {tuple(row.tolist()) for row in second}


def test_ranks_share_the_global_batch():
    """Catches ranks that see the same rows, or a global batch that depends on the number of ranks."""
    batches = Batches(numbered(200), batch_size=6, length=5, seed=0)
    whole = batches.batch(4).tokens
    for world in (2, 3):
        for rank in range(world):
            assert batches.batch(4, rank=rank, world=world).tokens.equal(whole[rank::world])


def test_batches_refuse():
    """Catches windows that do not fit, ranks with unequal rows, and settings without a meaning."""
    corpus = numbered(20)
    with pytest.raises(ConfigError, match="only 20 tokens"):
        Batches(corpus, batch_size=1, length=21, seed=0)
    with pytest.raises(ConfigError, match="seed=-1"):
        Batches(corpus, batch_size=1, length=4, seed=-1)
    with pytest.raises(ConfigError, match="multiple of world"):
        Batches(corpus, batch_size=3, length=4, seed=0).batch(0, world=2)
    with pytest.raises(ConfigError, match="rank=2"):
        Batches(corpus, batch_size=4, length=4, seed=0).batch(0, rank=2, world=2)


@pytest.fixture(scope="module")
def held_out():
    return Corpus.from_files(library()[1], byte_tokenizer())


def test_prompts(held_out):
    """Catches prompts that begin inside a line, cross documents, overlap, or cannot be reproduced."""
    options = {"count": 40, "length": 164}
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
    made = sample_prompts(corpus, count=8, length=20, seed=0)
    documents = [int(np.searchsorted(corpus.starts, _position(corpus, ids), side="right")) for ids in made]
    assert set(documents[:6]) == {1, 2, 3, 4, 5, 6}


def test_prompts_fill_all_room_and_no_more():
    """Catches overlapping prompts, an eos inside one, and room at the end of a document that is left unused."""
    texts = [("lines", "ab\n" * 10), ("exact", "123456789\n"), ("short", "12345678\n")]
    corpus = Corpus.from_texts(texts, encoder(byte_tokenizer()), 257)
    made = sample_prompts(corpus, count=3, length=10, seed=0)
    assert sorted(_position(corpus, ids) for ids in made) == [0, 12, 31]
    with pytest.raises(ConfigError, match="has only 3"):
        sample_prompts(corpus, count=4, length=10, seed=0)


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
