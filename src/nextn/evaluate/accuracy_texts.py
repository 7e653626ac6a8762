"""The texts that a model's distributions are compared on: of a file, or of the interpreter's own documentation."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nextn.data.corpus import encoder, read_text
from nextn.data.records import Record, RecordReader
from nextn.data.sources import Source, has_records, read_records
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT = 512  # tokens of a text


@dataclass(frozen=True)
class ComparedTexts:
    """Texts as token ids, each of a few hundred, and where they are from."""

    tokens: tuple[tuple[int, ...], ...]
    source: str

    def as_record(self) -> dict[str, object]:
        """Return what says whether two figures are of the same texts."""
        digest = sha256(repr(self.tokens).encode()).hexdigest()
        return {"source": self.source, "texts": len(self.tokens), "tokens": self.num_tokens, "sha256": digest}

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


def compared_texts(
    tokenizer: "PreTrainedTokenizerBase | None",
    source: Source | None = None,
    *,
    num_tokens: int = 3 * CONTEXT,
    context: int = CONTEXT,
) -> ComparedTexts:
    """Cut documents into texts: first the beginning of each document, then what follows it.

    Args:
        tokenizer: Of the model; records of token ids need none. A token that it begins every text with, does.
        source: .jsonl or .parquet records, a data set or a text file; None: `pydoc_data.topics`, the prose of Python's
            documentation that `help()` shows, its longest topics first.
        num_tokens: Of all texts, at most.
        context: Tokens of a text, at most.

    Raises:
        ConfigError: The source cannot be read or has no text of two tokens, or text meets a model without a tokenizer.
    """
    name = f"pydoc_data.topics of Python {sys.version.split()[0]}" if source is None else str(source)
    start = [] if tokenizer is None else list(tokenizer("")["input_ids"])[:1]
    size, texts, left = context - len(start), list[tuple[int, ...]](), num_tokens
    documents = _enough(_documents(tokenizer, source), num_tokens, size)
    rounds = zip_longest(*([ids[at : at + size] for at in range(0, len(ids), size)] for ids in documents))
    for piece in chain.from_iterable(rounds):
        text = (*start, *(piece or ()))[:left]
        if piece and len(text) > 1:
            texts.append(text)
            left -= len(text)
    if not texts:
        raise ConfigError(f"{name}: no text of two tokens, which a distribution and its next token need")
    return ComparedTexts(tuple(texts), name)


def _enough(documents: Iterable[Sequence[int]], num_tokens: int, size: int) -> Iterator[Sequence[int]]:
    """Yield documents until their beginnings are enough, so that no large data set is read as a whole."""
    for ids in documents:
        yield ids
        num_tokens -= min(size, len(ids))
        if num_tokens <= 0:
            return


def _documents(tokenizer: "PreTrainedTokenizerBase | None", source: Source | None) -> Iterator[Sequence[int]]:
    if source is not None and has_records(source):
        reader = RecordReader(cast(Any, tokenizer))  # records of token ids need none
        yield from (_ids(reader, record, location) for location, record in read_records(source))
        return
    if tokenizer is None:
        raise ConfigError(
            'the checkpoint has no tokenizer: give records of token ids, as {"prompt": [3, 14], "tokens": [15]}, or '
            "add tokenizer.json to its folder"
        )
    encode = encoder(tokenizer)
    for text in _topics() if source is None else [read_text(Path(source))]:
        yield [int(token) for token in encode([text])[0]]


def _ids(reader: RecordReader, record: Record, location: str) -> list[int]:
    if reader.tokenizer is None and not {"prompt", "tokens"} <= record.keys():
        raise ConfigError(
            f'{location}: the checkpoint has no tokenizer, so only records with "prompt" and "tokens" of token ids can '
            "be read; add tokenizer.json to its folder"
        )
    return [int(token) for token in reader.document(record, location).ids]


def _topics() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError("this interpreter has no pydoc_data, the built-in text; give one with --texts") from error
    return sorted(topics.values(), key=len, reverse=True)
