"""Parts of texts whose rounds are counted separately: bands of context length, and thinking against answer."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from nextn.data.chat_template import THINK_TAGS
from nextn.evaluate.teacher_forced import ReferenceText, ScoredText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT_BANDS = (0, 2048, 8192, 32768, 131072)  # first tokens in the cache of each
ThinkTokens = tuple[int, int]  # of the opening and of the closing tag


def think_tokens(tokenizer: "PreTrainedTokenizerBase | None") -> ThinkTokens | None:
    """Return the tokens of `THINK_TAGS`; None if the tokenizer does not have one token for each."""
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    opened, closed = (vocabulary.get(tag) for tag in THINK_TAGS)
    return None if opened is None or closed is None else (opened, closed)


def part_counts(
    scored: ScoredText, rule: str, k: int, tokens: ThinkTokens | None
) -> Mapping[str, tuple[list[float], list[float]]]:
    """Return (num_drafted, num_accepted) by depth of the rounds that start in each part of one text."""
    drafted, accepted = scored.survivals[rule].counts_by_start(scored.remaining, k)
    counts = {}
    for labels in (_bands(scored.text), _thinking(scored.text, tokens)):
        by_start = [label for label, _ in zip(labels, scored.remaining, strict=False)]
        for label in dict.fromkeys(by_start):
            here = torch.tensor([each == label for each in by_start])
            counts[label] = (drafted[here].sum(0).tolist(), accepted[here].sum(0).tolist())
    return counts


def _bands(text: ReferenceText) -> Iterator[str]:
    """Per new token, the band that the number of tokens before it is in."""
    for length in range(len(text.prompt), len(text.tokens)):
        index = sum(length >= first for first in CONTEXT_BANDS)
        ends = [f"{first // 1024}k" if first else "0" for first in CONTEXT_BANDS[index - 1 : index + 1]]
        yield f"context {'-'.join(ends)}" if len(ends) > 1 else f"context {ends[0]} and more"


def _thinking(text: ReferenceText, tokens: ThinkTokens | None) -> Iterator[str]:
    """Per new token, whether the text is thinking behind it."""
    if tokens is None:
        return
    tags = [token for token in text.prompt if token in tokens]
    thinking = bool(tags) and tags[-1] == tokens[0]
    for token in text.new:
        thinking = token == tokens[0] if token in tokens else thinking
        yield "thinking" if thinking else "answer"
