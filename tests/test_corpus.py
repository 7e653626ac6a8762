"""Corpora of token ids: reading text files, bytes as tokens, and repetitive text."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from corpora import EOS, library, masked, numbered
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nextn.data.byte_tokenizer import byte_tokenizer, is_byte_tokenizer, vocab_size
from nextn.data.corpus import Corpus, Document, encoder, standard_library
from nextn.data.degeneracy import degeneracy, degeneracy_notes
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
    """Catches a source in another encoding that stops the default workload."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "b.py").write_text("b")
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "latin.py").write_bytes("# é".encode("latin-1"))
    monkeypatch.setattr("nextn.data.corpus.sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert [path.name for path in standard_library()] == ["a.py"]


def test_library_without_sources(tmp_path, monkeypatch):
    """Catches an empty default corpus that is only noticed later."""
    monkeypatch.setattr("nextn.data.corpus.sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match="has no Python sources"):
        standard_library()


TEXTS = [
    "def f(a , b):\n\treturn a . b  # can 't ?\n",
    "line\r\nline\rline\n\n",
    "   leading, trailing   ",
    "emoji 😀👩‍👩‍👧, é (composed), e\u0301 (not), 日本語, \u202e",
    "\ufeffbyte order mark and \x00 nul",
    "say <|endoftext|> aloud",
]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def plain(tokenizer, text):
    return tokenizer(text, split_special_tokens=True)["input_ids"]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_the_bytes(tokenizer, text):
    """Catches a shuffled alphabet, a prefix space, a pre-tokenizer that drops bytes, an added bos, and clean-up."""
    assert plain(tokenizer, text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


@pytest.mark.more
@given(text=st.text())
@settings(max_examples=80, deadline=None)
def test_any_text_comes_back(tokenizer, text):
    """Catches a character whose bytes map to the wrong ids, or meet the merge."""
    assert plain(tokenizer, text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


@pytest.mark.parametrize("model_type", [None, "glm4_moe", "qwen3_next", "deepseek_v3", "llama"])
def test_a_saved_copy_is_the_same(tokenizer, tmp_path, model_type):
    """Catches settings that are lost in tokenizer.json, and a config.json beside it that changes the tokenizer."""
    tokenizer.save_pretrained(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.bos_token_id) == (257, 257, 257)
    for text in TEXTS:
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert plain(loaded, text) == list(text.encode())
        assert loaded.decode(list(text.encode())) == text
    assert is_byte_tokenizer(loaded)


def test_specials(tokenizer):
    """Catches a special token that is parsed wrongly or takes a byte's id, and a size that leaves it without a row."""
    assert tokenizer("a<|endoftext|>")["input_ids"] == [97, 257]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 257
    assert vocab_size(tokenizer) == 258
    assert tokenizer.convert_ids_to_tokens(256) == "ÀÁ"


def test_size_counts_added_tokens_and_is_byte_ignores_them():
    """Catches `tokenizer.vocab_size`, which leaves added tokens out, and a fast path lost to a chat mark."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    assert vocab_size(tokenizer) == 259
    assert is_byte_tokenizer(tokenizer)


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
def test_repetitive_text_is_flagged(text, period):
    """Catches a check that misses a loop because it began late, ended early, or has a long period."""
    found = degeneracy(text)
    assert found.is_degenerate
    assert found.period == period
    assert degeneracy(list(text.encode())) == found


def test_counting_lines_are_flagged():
    """Catches near-loops, where a number changes in each line, so that no stretch repeats exactly."""
    found = degeneracy("".join(f"    self.assertEqual(value, {index})\n" for index in range(20)))
    assert found.is_degenerate
    assert found.loop < 0.25


def test_figures():
    """Catches wrong figures beside a right result: 12 letters, of which the last 9 are three times abc."""
    found = degeneracy("xyzabcabcabc")
    assert (found.loop, found.period) == (0.75, 3)
    assert found.distinct == 1.0
    assert degeneracy("abcdefgh" * 2).distinct == 8 / 9
    assert not degeneracy("").is_degenerate


@pytest.mark.more
def test_python_source_is_not_flagged():
    """Catches thresholds that call ordinary code degenerate: less than 2 % of windows of 400 bytes may be flagged."""
    stream = np.concatenate([np.frombuffer(path.read_bytes(), np.uint8) for path in library()[1]])
    windows = [stream[begin : begin + 400] for begin in range(0, len(stream) - 400, 800)]
    flagged = [degeneracy(window).is_degenerate for window in windows]
    assert len(flagged) > 300
    assert np.mean(flagged) < 0.02


@pytest.mark.parametrize(
    ("degenerate", "short", "said"),
    [(0, 0, []), (7, 0, ["(prompts 1, 2, 3, 4, 5, 6, 7): the figures are of 1 text, too few"]),
     (8, 0, ["every text is degenerate"]), (3, 0, ["(prompts 1, 2, 3): the figures are of 5 texts"]),
     (8, 2, ["every text is degenerate",
             "2 of 8 prompts gave texts below 200"]), (0, 1, ["1 of 8 prompts gave texts"])],
)  # fmt: skip
def test_degeneracy_notes(degenerate, short, said):
    """Catches figures over a part of the texts that are reported as if they were of all."""
    found = degeneracy_notes(0.0, 8, degenerate=range(degenerate), short=short)
    assert len(found) == len(said)
    assert all(each.startswith("temperature 0: ") and part in each for each, part in zip(found, said, strict=True))


def test_no_note_advises_what_was_done():
    for measured, advised in (((0.0,), "--temperatures 1"), ((0.0, 0.7), "at temperature 0.7")):
        (note,) = degeneracy_notes(0.0, 8, degenerate=range(8), short=0, measured=measured)
        assert f"compare {'at ' if advised[0] == '-' else ''}{advised}" in note
    (note,) = degeneracy_notes(1.0, 8, degenerate=range(8), short=0, measured=(0.0, 1.0))
    assert "compare" not in note
