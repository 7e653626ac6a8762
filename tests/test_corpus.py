"""Corpora of token ids, and reading text files."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from corpora import EOS, library, masked, numbered
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.data.corpus import Corpus, Document, encoder, standard_library
from nextn.errors import ConfigError


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


def test_a_document_ends_once():
    """Catches a second eos behind one that the text has, and an eos nobody said that counts."""
    said = Document("", np.array([1, EOS]), np.array([False, True])).with_eos(EOS)
    assert (said.ids.tolist(), said.mask.tolist()) == ([1, EOS], [False, True])
    unsaid = Document("", np.array([1, 2]), np.array([False, True])).with_eos(EOS)
    assert (unsaid.ids.tolist(), unsaid.mask.tolist()) == ([1, 2, EOS], [False, True, False])
    assert Document("", np.array([1, 2])).with_eos(EOS).mask is None


def test_texts_beside_answers_count_whole():
    """One document with a mask gives the whole corpus one; the others, their eos included, count."""
    parts = [Document("a", np.array([5])), Document("b", np.array([1, 2]), np.array([False, True]))]
    corpus = Corpus.from_documents(parts, lambda texts: [[] for _ in texts], EOS)
    assert corpus.mask.tolist() == [True, True, False, True, False]
    assert (corpus.num_labels, corpus.newline) == (3, None)


def test_a_fingerprint_covers_what_a_batch_holds():
    """Catches a cache that is taken for another corpus: other tokens, cuts or labels; names do not matter."""
    base = masked("--++", "+-")
    assert base.fingerprint == masked("--++", "+-").fingerprint
    others = [masked("--++", "++"), masked("--+", "++-"), numbered(4, 2)]
    assert len({each.fingerprint for each in (base, *others)}) == 4


def test_standard_library():
    """Catches tests, installed packages or build settings in the default corpus, and an order that the disk decides."""
    paths = standard_library()
    root = Path(subprocess.__file__).parent
    names = [path.relative_to(root).as_posix() for path in paths]
    assert names == sorted(names)
    assert {"subprocess.py", "json/decoder.py", "unittest/case.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__", "_bundled"}
    assert not [name for name in names if "_sysconfigdata" in name or "config-" in name]
    size, held = (sum(path.stat().st_size for path in part) for part in (paths, library()[1]))
    assert size > 5e6
    assert 0.02 < held / size < 0.1


def test_library_leaves_out_what_is_not_text(tmp_path, monkeypatch):
    """Catches a source in another encoding that stops the default workload, and tests=True that changes nothing."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "b.py").write_text("b")
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "latin.py").write_bytes("# é".encode("latin-1"))
    monkeypatch.setattr("nextn.data.corpus.sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert [path.name for path in standard_library()] == ["a.py"]
    assert [path.name for path in standard_library(tests=True)] == ["a.py", "b.py"]


def test_library_without_sources(tmp_path, monkeypatch):
    """Catches an empty default corpus that is only noticed later."""
    monkeypatch.setattr("nextn.data.corpus.sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match="has no Python sources"):
        standard_library()
