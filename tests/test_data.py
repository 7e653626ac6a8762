"""Data: what is read, how it is split, that batches are exact and resumable, and that loops are told from code."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nextn.corpus.bytelevel import byte_tokenizer
from nextn.corpus.data import (
    Batches,
    Corpus,
    Document,
    degeneracy,
    divided,
    encoder,
    openings,
    prompts,
    split,
    standard_library,
)
from nextn.errors import ConfigError

EOS = 999


def numbered(*lengths):
    """A corpus in which every token is its own position, so that a batch shows where it was cut."""
    starts = np.cumsum([0, *lengths[:-1]])
    return Corpus(np.arange(sum(lengths)), starts, tuple(map(str, starts)), EOS, None)


def epoch_rows(batches, epoch):
    """Token ids of the real columns of each row of one epoch; batch_size must divide the epoch."""
    steps = batches.num_windows // batches.batch_size
    made = [batches.batch(epoch * steps + step) for step in range(steps)]
    return [row[real >= 0].numpy() for batch in made for row, real in zip(batch.tokens, batch.documents, strict=True)]


@pytest.fixture(scope="module")
def library():
    return split(standard_library())


@pytest.fixture(scope="module")
def held_out(library):
    return Corpus.from_files(library[1], byte_tokenizer())


def test_import_is_light():
    """Catches a torch or transformers import at module level, which costs seconds at each `--help`."""
    code = "import nextn.corpus.data, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_standard_library(library):
    """Catches tests, installed packages or build settings in the default corpus, and an order that the disk decides."""
    paths = standard_library()
    root = Path(subprocess.__file__).parent
    names = [path.relative_to(root).as_posix() for path in paths]
    assert names == sorted(names)
    assert {"subprocess.py", "json/decoder.py", "unittest/case.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__", "_bundled"}
    assert not [name for name in names if "_sysconfigdata" in name or "config-" in name]
    size, held = (sum(path.stat().st_size for path in part) for part in (paths, library[1]))
    assert size > 5e6
    assert 0.02 < held / size < 0.1


def test_library_leaves_out_what_is_not_text(tmp_path, monkeypatch):
    """Catches a source in another encoding that stops the default workload, and tests=True that changes nothing."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "b.py").write_text("b")
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "latin.py").write_bytes("# é".encode("latin-1"))
    monkeypatch.setattr("nextn.corpus.data.sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert [path.name for path in standard_library()] == ["a.py"]
    assert [path.name for path in standard_library(tests=True)] == ["a.py", "b.py"]


def test_library_without_sources(tmp_path, monkeypatch):
    """Catches an empty default corpus that is only noticed later."""
    monkeypatch.setattr("nextn.corpus.data.sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match="holds no Python sources"):
        standard_library()


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


def test_corpus_of_files(tmp_path):
    """Catches newline translation, a missing eos, empty documents, and special-looking text that becomes special."""
    texts = {"a.txt": "é\r\n<|endoftext|>", "b.txt": "", "c.txt": "z"}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
    corpus = Corpus.from_files([tmp_path / name for name in texts], byte_tokenizer())
    assert corpus.ids.tolist() == [*texts["a.txt"].encode(), 257, ord("z"), 257]
    assert corpus.ids.dtype == np.uint16
    assert corpus.starts.tolist() == [0, 18]
    assert corpus.lengths.tolist() == [18, 2]
    assert [Path(name).name for name in corpus.names] == ["a.txt", "c.txt"]
    assert (corpus.eos, corpus.newline, corpus.num_tokens) == (257, 10, 20)


def word_tokenizer():
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<": 2, "eos": 3, ">": 4, "<eos>": 70000}, unk_token="<"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def test_corpus_of_another_tokenizer(tmp_path):
    """Catches ids that overflow uint16, special tokens read out of a text, and order lost between batches."""
    paths = [tmp_path / f"{index}.txt" for index in range(70)]
    for index, path in enumerate(paths):
        path.write_text("a" if index < 69 else "b <eos>")
    corpus = Corpus.from_files(paths, word_tokenizer())
    assert corpus.ids.dtype == np.int32
    assert corpus.ids.tolist() == [0, 70000] * 69 + [1, 2, 3, 4, 70000]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe", "not UTF-8 text \\(byte 0\\)"), (b"a\x00b", "NUL"), (None, "cannot be read"), (b"", "empty")],
)
def test_corpus_refuses(tmp_path, content, message):
    """Catches a binary, absent or empty file that is trained on, or that ends in a traceback."""
    path = tmp_path / "x.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Corpus.from_files([path], byte_tokenizer())


def test_corpus_needs_eos(tmp_path):
    """Catches documents that run into each other because the tokenizer has no eos."""
    tokenizer = word_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no eos"):
        Corpus.from_files([], tokenizer)


def test_fast_path_is_the_tokenizer():
    """Catches a raw-bytes path that differs from what the byte tokenizer itself says."""
    tokenizer = byte_tokenizer()
    text = Path(__file__).read_text()
    assert encoder(tokenizer)([text])[0].tolist() == tokenizer(text, split_special_tokens=True)["input_ids"]


LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=8)


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
    for step in range(batches.num_windows):
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


def test_prompts(held_out):
    """Catches prompts that begin inside a line, cross documents, overlap, or cannot be reproduced."""
    options = {"count": 40, "length": 64, "continuation": 100}
    made = prompts(held_out, seed=0, **options)
    assert [len(ids) for ids in made] == [164] * 40
    begins = sorted(_position(held_out, ids) for ids in made)
    assert (np.diff(begins) >= 164).all()
    starts = set(held_out.starts.tolist())
    assert all(begin in starts or held_out.ids[begin - 1] == 10 for begin in begins)
    assert not any(held_out.eos in ids for ids in made)
    assert np.array_equal(made, prompts(held_out, seed=0, **options))
    assert not np.array_equal(made, prompts(held_out, seed=1, **options))


def _position(corpus, ids):
    """Where a view of the corpus begins."""
    return (ids.ctypes.data - corpus.ids.ctypes.data) // corpus.ids.itemsize


def test_prompts_spread():
    """Catches a long document that gives most prompts while others give none."""
    encode = encoder(byte_tokenizer())
    texts = [("long", "abcdefg\n" * 500), *[(f"short{index}", "0123456789\n" * 4) for index in range(5)]]
    corpus = Corpus.from_texts(texts, encode, 257)
    made = prompts(corpus, count=8, length=10, seed=0, continuation=10)
    documents = [int(np.searchsorted(corpus.starts, _position(corpus, ids), side="right")) for ids in made]
    assert set(documents[:6]) == {1, 2, 3, 4, 5, 6}


def test_prompts_fill_all_room_and_no_more():
    """Catches overlapping prompts, an eos inside one, and room at the end of a document that is left unused."""
    texts = [("lines", "ab\n" * 10), ("exact", "123456789\n"), ("short", "12345678\n")]
    corpus = Corpus.from_texts(texts, encoder(byte_tokenizer()), 257)
    made = prompts(corpus, count=3, length=4, seed=0, continuation=6)
    assert sorted(_position(corpus, ids) for ids in made) == [0, 12, 31]
    with pytest.raises(ConfigError, match="has room for 3"):
        prompts(corpus, count=4, length=4, seed=0, continuation=6)


def test_prompts_refuse(held_out):
    """Catches fewer prompts than asked for, without a word."""
    with pytest.raises(ConfigError, match="has room for"):
        prompts(held_out, count=10**6, length=64, seed=0)
    with pytest.raises(ConfigError, match="length=0"):
        prompts(held_out, count=1, length=0, seed=0)


LINE = "    return self._value.encode('utf-8', errors='strict') + other[index]\n"
CODE = Path(degeneracy.__code__.co_filename).read_text()[1000:]


@pytest.mark.parametrize(
    ("text", "period"),
    [
        ("_" * 400, 1),
        (CODE[:200] + "_" * 200, 1),
        (CODE[:280] + "x = 1\n" * 20, 6),
        (CODE[:100] + "-" * 150 + CODE[100:250], 1),
        (LINE * 5, len(LINE)),
        (CODE[:80] + (LINE + "    x = self.other(1)\n") * 4, len(LINE) + 22),
    ],
    ids=["ruler", "code then ruler", "short lines", "loop that ended", "repeated line", "repeated pair of lines"],
)
def test_loops_are_flagged(text, period):
    """Catches a check that misses a loop because it began late, ended early, or has a long period."""
    found = degeneracy(text)
    assert found.looping
    assert found.period == period
    assert degeneracy(list(text.encode())) == found


def test_counting_lines_are_flagged():
    """Catches near-loops, where a number changes in each line, so that no stretch repeats exactly."""
    found = degeneracy("".join(f"    self.assertEqual(value, {index})\n" for index in range(20)))
    assert found.looping
    assert found.loop < 0.25


def test_figures():
    """Catches wrong figures beside a right verdict: 12 letters, of which the last 9 are three times abc."""
    found = degeneracy("xyzabcabcabc")
    assert (found.loop, found.period, found.longest_run) == (0.75, 3, 1)
    assert found.distinct == 1.0
    assert degeneracy("aaab" * 2).longest_run == 3
    assert degeneracy("abcdefgh" * 2).distinct == 8 / 9
    assert not degeneracy("").looping


def test_python_source_is_not_flagged(library):
    """Catches thresholds that call ordinary code degenerate: less than 2 % of windows of 400 bytes may be flagged."""
    stream = np.concatenate([np.frombuffer(path.read_bytes(), np.uint8) for path in library[1]])
    windows = [stream[begin : begin + 400] for begin in range(0, len(stream) - 400, 800)]
    flagged = [degeneracy(window).looping for window in windows]
    assert len(flagged) > 300
    assert np.mean(flagged) < 0.02


def masked(*marks):
    """A document of ids 0.. for each string; + marks the tokens that count."""
    documents = [Document(each, np.arange(len(each)), np.array([sign == "+" for sign in each])) for each in marks]
    return Corpus.of(documents, lambda texts: [[10] for _ in texts], EOS)


def test_openings_are_the_prompts_of_answers():
    """Catches an opening that holds a token of the answer, and documents without a prompt or an answer in it."""
    corpus = masked("--++-", "+++", "---", "-+-+-", "----+")
    found = [ids.tolist() for ids in openings(corpus, count=9, seed=0)]
    assert sorted(found) == [[0], [0, 1], [0, 1, 2, 3]]
    assert [ids.tolist() for ids in openings(corpus, count=2, seed=0)] == found[:2]
    orders = {tuple(map(len, openings(corpus, count=9, seed=seed))) for seed in range(9)}
    assert len(orders) > 1
    assert openings(numbered(20), count=3, seed=0) == []


def test_a_document_ends_once():
    """Catches a second eos behind one that the text has, and an eos nobody said that counts."""
    said = Document("", np.array([1, EOS]), np.array([False, True])).closed(EOS)
    assert (said.ids.tolist(), said.mask.tolist()) == ([1, EOS], [False, True])
    unsaid = Document("", np.array([1, 2]), np.array([False, True])).closed(EOS)
    assert (unsaid.ids.tolist(), unsaid.mask.tolist()) == ([1, 2, EOS], [False, True, False])
    assert Document("", np.array([1, 2])).closed(EOS).mask is None


def test_texts_beside_answers_count_whole():
    """One document with a mask gives the whole corpus one; the others, their eos included, count."""
    parts = [Document("a", np.array([5])), Document("b", np.array([1, 2]), np.array([False, True]))]
    corpus = Corpus.of(parts, lambda texts: [[] for _ in texts], EOS)
    assert corpus.mask.tolist() == [True, True, False, True, False]
    assert (corpus.num_labels, corpus.newline) == (3, None)


def test_a_fingerprint_tells_what_a_batch_would_show():
    """Catches a cache that is taken for another corpus: other tokens, cuts or labels; names do not matter."""
    base = masked("--++", "+-")
    assert base.fingerprint == masked("--++", "+-").fingerprint
    others = [masked("--++", "++"), masked("--+", "++-"), numbered(4, 2)]
    assert len({each.fingerprint for each in (base, *others)}) == 4


def test_divided_keeps_copies_together():
    """Catches a text that is trained on and held out, and a side that stays empty though it need not."""
    assert divided("abcd", [0.5, 0.01, 0.7, 0.01], held_out=0.05) == (["a", "c"], ["b", "d"])
    assert divided("abc", [0.9, 0.9, 0.8], held_out=0.05) == (["a", "b"], ["c"])
    assert divided("abc", [0.0, 0.0, 0.01], held_out=0.5) == (["c"], ["a", "b"])
    assert divided("ab", [0.3, 0.3], held_out=0.5) == (["a", "b"], [])
