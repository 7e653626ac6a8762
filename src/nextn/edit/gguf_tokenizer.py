"""A checkpoint's tokenizer in a GGUF, as llama.cpp's convert_hf_to_gguf.py writes it.

The converter knows a pre-tokenizer by a hash of what the whole tokenizer makes of a text; here it is known by its
steps, which llama.cpp's src/llama-vocab.cpp repeats as comments ("original regex from tokenizer.json").
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nextn.bounded_json import JsonObject
from nextn.checkpoint.gguf_file import GgufFile
from nextn.data.byte_tokenizer import is_byte_tokenizer
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from tokenizers.pre_tokenizers import PreTokenizer
    from tokenizers.processors import PostProcessor
    from transformers import PreTrainedTokenizerBase

_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_BYTES, _GPT2, _DIGITS = "bytes", "bytes of GPT-2's words", "single digits"  # steps without a regular expression
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WHOLE_WORDS = ("llama-bpe", "tekken")  # pre-tokenizers whose words are tokens, if the vocabulary has them, unmerged
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


def writable_tokenizer(folder: Path) -> tuple["PreTrainedTokenizerBase", str]:
    """Return the tokenizer of a folder, and llama.cpp's name of its pre-tokenizer.

    Raises ConfigError for one that is not byte-level BPE with a known pre-tokenizer.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    name = _pre_tokenizer(tokenizer)
    if name is None:
        raise ConfigError(
            f"{folder}: its tokenizer is none of those that nextn writes into a GGUF ({', '.join(_NAMES.values())}). "
            f"Let llama.cpp write it, `python convert_hf_to_gguf.py {folder} --vocab-only --outfile vocab.gguf`, and "
            "give that file, or any GGUF of this trunk, to `nextn export` with --tokenizer"
        )
    return tokenizer, name


def add_tokenizer(writer: "GGUFWriter", folder: Path, vocab_size: int) -> None:
    """Add the tokenizer of a folder, with chat template and special tokens; see `writable_tokenizer`."""
    from gguf import SpecialVocab

    tokenizer, name = writable_tokenizer(folder)
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
        message = f"--tokenizer {source}: it has {count} tokens, the model {vocab_size}; give one of this model"
        raise ConfigError(message)
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


def _step(spec: JsonObject) -> str:
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


def write_tokenizer(folder: Path, file: GgufFile, source: Path | None, vocab_size: int) -> None:
    """Write the tokenizer of a GGUF into a checkpoint's folder, or that of the folder `source`.

    Raises ConfigError for a tokenizer that is not known, or of another model.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if source is not None:
            tokenizer = AutoTokenizer.from_pretrained(source)
        elif (steps := _steps(file)) is None:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(file.path.parent, gguf_file=file.path.name)
        else:
            tokenizer = _byte_level_bpe(file.path, steps)
    # What is wrong in a file may be found by the tokenizers library, whose errors are plain exceptions.
    except Exception as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{source or file.path}: its tokenizer cannot be read: {str(error)[:500]}") from error
    if len(tokenizer) > vocab_size:
        raise ConfigError(f"{source or file.path}: its tokenizer has {len(tokenizer)} tokens, the model {vocab_size}")
    tokenizer.save_pretrained(folder)


def _byte_level_bpe(path: Path, steps: tuple[str, ...]) -> "PreTrainedTokenizerBase":
    """Build the tokenizer. transformers' own adds GPT-2's `<|endoftext|>` to those that have none."""
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import get_gguf_tokenizer

    _, stored, config = get_gguf_tokenizer(str(path))
    tokens, types = stored["tokens"], stored.get("token_type") or [TokenType.NORMAL] * len(stored["tokens"])
    used = [(id, token, kind) for id, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind != TokenType.UNUSED]  # fmt: skip
    merges = [tuple(merge.split(" ")) for merge in stored.get("merges", ())]
    vocabulary = {token: id for id, token, _ in used}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=_NAMES.get(steps) in _WHOLE_WORDS))
    backend.normalizer = normalizers.NFC() if _NAMES.get(steps) == "qwen2" else None
    backend.pre_tokenizer = _splitter(steps)
    backend.decoder = decoders.ByteLevel()
    special = {name: config.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    first, last = (special[name] if config.get(f"add_{name}") else None for name in ("bos_token", "eos_token"))
    if first or last:
        backend.post_processor = _template(first, last, vocabulary)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, **{name: token for name, token in special.items() if token is not None}
    )
    added = [AddedToken(token, normalized=False, special=kind == TokenType.CONTROL) for _, token, kind in used
             if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)]  # fmt: skip
    tokenizer.add_tokens(added)
    tokenizer.chat_template = config.get("chat_template")
    return tokenizer


def _template(first: str | None, last: str | None, vocabulary: Mapping[str, int]) -> "PostProcessor":
    """Return what adds a first and a last token to a text."""
    from tokenizers import processors

    single = " ".join(filter(None, [first, "$A", last]))
    ids = [(token, vocabulary[token]) for token in (first, last) if token]
    pair = f"{single} {single.replace('$A', '$B')}"
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def _steps(file: GgufFile) -> tuple[str, ...] | None:
    """Steps of the pre-tokenizer of a byte-level BPE; None for a SentencePiece model, which has none.

    Raises ConfigError for others.
    """
    model, name = (file.metadata.get(f"tokenizer.ggml.{key}", "default") for key in ("model", "pre"))
    by_name = {each: steps for steps, each in _NAMES.items()}
    by_name |= {"default": by_name["gpt-2"], "glm4": by_name["llama-bpe"], "chatglm-bpe": by_name["llama-bpe"]}
    by_name |= {"qwen35": (_QWEN35, _BYTES)}
    if model == "llama":
        return None
    if model == "gpt2" and name in by_name:
        return by_name[str(name)]
    raise ConfigError(
        f"{file.path}: its tokenizer is {model!r:.40} with the pre-tokenizer {name!r:.40}; nextn reads llama, and gpt2 "
        f"with {', '.join(by_name)}. Give `nextn convert` a folder with the original tokenizer's files with --tokenizer"
    )


def _splitter(steps: tuple[str, ...]) -> "PreTokenizer":
    from tokenizers import Regex, pre_tokenizers

    made: list[PreTokenizer] = []
    for step in steps:
        if step in (_BYTES, _GPT2):
            made.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=step == _GPT2))
        elif step == _DIGITS:
            made.append(pre_tokenizers.Digits(individual_digits=True))
        else:
            made.append(pre_tokenizers.Split(Regex(step), behavior="isolated"))
    return pre_tokenizers.Sequence(made)
