"""The byte tokenizer: round trips, ids that are bytes, and a copy on disk that behaves the same."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nextn.data.byte_tokenizer import byte_tokenizer, is_byte_tokenizer, vocab_size

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
