"""A byte-level tokenizer: ids 0..255 are the byte values. It needs no training, no download and has no chat template.

It is saved and loaded like any other tokenizer.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_EOS = "<|endoftext|>"


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """Build the tokenizer of 258 tokens: 256 bytes (id == byte value), an unused merge (256), `<|endoftext|>` (257).

    `<|endoftext|>` is eos, bos and pad; encoding adds no special token. Next to a config.json of type `qwen3_5`,
    transformers 5.23 loads a saved copy with Qwen's NFC normalizer, which composes decomposed text before encoding it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(_vocabulary(), [_merge()]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_EOS, bos_token=_EOS, pad_token=_EOS)


def is_byte_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether the ids of a text are its UTF-8 bytes; tokens added later (chat markers) do not matter."""
    added = tokenizer.get_added_vocab()
    return _vocabulary() == {token: id for token, id in tokenizer.get_vocab().items() if token not in added}


def vocab_size(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the rows that an embedding needs: the largest id + 1, added tokens and gaps included, not rounded up."""
    return 1 + max(map(int, tokenizer.get_vocab().values()))


def byte_alphabet() -> list[str]:
    """Return the printable character that represents each byte, as in GPT-2's encoder.py `bytes_to_unicode`."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _merge() -> tuple[str, str]:
    # 0xC0 and 0xC1 never occur in UTF-8, so this merge is never applied; llama.cpp rejects a BPE without merges.
    return byte_alphabet()[0xC0], byte_alphabet()[0xC1]


def _vocabulary() -> dict[str, int]:
    return {token: id for id, token in enumerate([*byte_alphabet(), "".join(_merge())])}
