"""Batches: every token once an epoch, rows that cross nothing, exact resuming, one order for ever."""

import numpy as np
import pytest
from corpora import EOS, numbered
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.data.batches import Batches
from nextn.errors import ConfigError

LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=8)


def epoch_rows(batches, epoch):
    """Token ids of the real columns of each row of one epoch; batch_size must divide the epoch."""
    steps = batches.rows_per_epoch // batches.batch_size
    made = [batches.batch(epoch * steps + step) for step in range(steps)]
    return [row[real >= 0].numpy() for batch in made for row, real in zip(batch.tokens, batch.documents, strict=True)]


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
