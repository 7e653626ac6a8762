"""A checkpoint's tokenizer in a GGUF, as llama.cpp's convert_hf_to_gguf.py writes it.

The converter knows a pre-tokenizer by a hash of what the whole tokenizer makes of a text; here it is known by its
steps, which llama.cpp's src/llama-vocab.cpp repeats as comments ("original regex from tokenizer.json").
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nextn.data.byte_tokenizer import is_byte_tokenizer
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedTokenizerBase

_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_BYTES, _GPT2, _DIGITS = "bytes", "bytes of GPT-2's words", "single digits"  # steps without a regular expression
# Steps of a pre-tokenizer -> its name in llama.cpp.
_NAMES = {
    (_GPT2,): "gpt-2",
    (_DIGITS, _GPT2): "smollm",
    (rf"{_WORDS}|\p{{N}}{{1,3}}{_END}", _BYTES): "llama-bpe",
    (rf"{_WORDS}|\p{{N}}{_END}", _BYTES): "qwen2",
    (
        rf"{_FIRST}{_UPPER}*{_LOWER}+|{_FIRST}{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        _BYTES,
    ): "tekken",
}


def add_tokenizer(writer: "GGUFWriter", folder: Path, vocab_size: int) -> None:
    """Add the tokenizer of a folder, with chat template and special tokens.

    Raises ConfigError for one that is not byte-level BPE with a known pre-tokenizer.
    """
    from gguf import SpecialVocab
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    name = _pre_tokenizer(tokenizer)
    if name is None:
        raise ConfigError(
            f"{folder}: its tokenizer is none of those that nextn writes into a GGUF ({', '.join(_NAMES.values())}). "
            f"Let llama.cpp write it, `python convert_hf_to_gguf.py {folder} --vocab-only --outfile vocab.gguf`, and "
            "give that file, or any GGUF of this trunk, with --tokenizer"
        )
    tokens, types = _tokens(tokenizer, vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = SpecialVocab(folder, load_merges=True)
    if "bos" not in special.add_special_token:  # where it is not written, llama.cpp decides by the pre-tokenizer
        special.add_special_token["bos"] = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    special.add_to_gguf(writer, quiet=True)


def copy_tokenizer(writer: "GGUFWriter", source: Path, vocab_size: int) -> None:
    """Copy the tokenizer of another GGUF as it is.

    Raises ConfigError for a file that is no GGUF, or has another number of tokens than the model.
    """
    from gguf import GGUFReader

    try:
        fields = {name: field for name, field in GGUFReader(source).fields.items() if name.startswith("tokenizer.")}
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"--tokenizer {source}: not a GGUF file with a tokenizer: {error}") from error
    tokens = fields.get("tokenizer.ggml.tokens")
    count = 0 if tokens is None else len(tokens.data)
    if count != vocab_size:
        raise ConfigError(
            f"--tokenizer {source}: it has {count} tokens, the model {vocab_size}; give one of this model"
        )
    for name, each in fields.items():
        writer.add_key_value(name, each.contents(), each.types[0], each.types[-1] if each.types[1:] else None)


def _pre_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """llama.cpp's name for what splits a text before the merges; None for what is not byte-level BPE, or unknown."""
    if is_byte_tokenizer(tokenizer):  # it merges nothing, so that no split matters
        return "qwen2"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    spec = json.loads(backend.to_str())
    model, decoder, normalizer = spec["model"], spec["decoder"] or {}, spec["normalizer"] or {"type": "NFC"}
    if (model["type"], decoder.get("type"), normalizer["type"]) != ("BPE", "ByteLevel", "NFC"):
        return None
    outer = spec["pre_tokenizer"] or {}
    return _NAMES.get(tuple(_step(each) for each in outer.get("pretokenizers", [outer])))


def _step(spec: Mapping[str, Any]) -> str:
    match spec:
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            return str(pattern)
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}:
            return _GPT2 if use_regex else _BYTES
        case {"type": "Digits", "individual_digits": True}:
            return _DIGITS
    return ""


def _tokens(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> tuple[list[str], list[int]]:
    """Tokens and their types by id: llama.cpp matches added tokens as written, after the normalizer."""
    from gguf import TokenType

    by_id = {id: token for token, id in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens, types = [], []
    for id in range(vocab_size):
        token, type = by_id.get(id), TokenType.NORMAL
        if token is None:
            token, type = f"[PAD{id}]", TokenType.UNUSED
        elif id in added:
            if not added[id].normalized:
                token = str(tokenizer.decode(tokenizer.encode(token, add_special_tokens=False)))
            is_control = added[id].special or (token.startswith("<|") and token.endswith("|>"))
            type = TokenType.CONTROL if is_control else TokenType.USER_DEFINED
        tokens.append(token)
        types.append(int(type))
    return tokens, types
