"""Texts that exist already, to measure a head on: from files, run whole through the trunk, and checked to be its own.

A streamed trunk cannot generate, so its texts come from a copy of the model that an engine serves, or from elsewhere.
Rounds are counted by bands of context length, and for thinking and answers separately.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from nextn.checkpoint.mapped_memory import release_pages
from nextn.data.chat_template import THINK_TAGS
from nextn.data.records import RecordReader
from nextn.data.sources import Source, answers_header, has_records, read_records
from nextn.errors import ConfigError
from nextn.evaluate.teacher_forced import ReferenceText, ScoredText
from nextn.model.streamed_trunk import ReadOptions, StreamedTrunk, run_batches
from nextn.model.trunk import Trunk, TrunkOutput

MAX_POSITIONS = 4096  # of one pass: texts are batched up to this number of padded positions
_MAX_ROWS = 64  # positions whose distributions are in memory at once
_MIN_AGREEMENT = 0.95  # of greedy texts: near ties differ between implementations
_MAX_EXCESS, _MAX_ERRORS = 0.05, 4  # of sampled texts: nats per token, and standard errors
CONTEXT_BANDS = (0, 2048, 8192, 32768, 131072)  # first tokens in the cache of each
ThinkTokens = tuple[int, int]  # of the opening and of the closing tag


@dataclass(frozen=True)
class GivenTexts:
    """Texts of one temperature, and the domain that each one's figures are reported under."""

    texts: tuple[ReferenceText, ...]
    domains: tuple[str, ...]
    source: str  # a file, or the engine that wrote them

    @property
    def num_tokens(self) -> int:
        return sum(len(text.tokens) for text in self.texts)


def read_texts(
    source: Source,
    trunk: Trunk,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    temperature: float | None = None,
    max_tokens: int = 256,
) -> GivenTexts:
    """Read a file of `nextn answer`, or other records with labels, whose last labels are the continuation.

    The first `max_tokens` new tokens of each text are kept. Records of token ids need no tokenizer. Raises ConfigError
    for a source that cannot be read or does not fit the trunk, or that says no temperature or another one than
    `temperature`.
    """
    temperature = _temperature(source, temperature)
    reader = RecordReader(tokenizer, context=trunk.max_length)
    if has_records(source):
        records = read_records(source)
    else:
        records = iter([(str(source), {"text": Path(source).read_text(encoding="utf-8")})])
    texts, domains = [], []
    for location, record in records:
        document = reader.document(record, location)
        ids = document.ids.tolist()
        if ids and max(ids) >= trunk.vocab_size:
            raise ConfigError(
                f"{location}: token {max(ids)} is not in the model's vocabulary of {trunk.vocab_size}; give text, or "
                "ids of this model's tokenizer"
            )
        start, end = _last_labels(document.mask, len(ids))
        cut = min(end, start + max_tokens, trunk.max_length or end)
        has_ended = cut == end and record.get("finish") in ("eos", "context")
        texts.append(ReferenceText(tuple(ids[:start]), tuple(ids[start:cut]), temperature, has_ended))
        domains.append(str(record.get("domain", "own")))
    if not any(text.remaining for text in texts):
        raise ConfigError(f"{source}: none of its {len(texts)} texts has three new tokens, which a draft needs")
    return GivenTexts(tuple(texts), tuple(domains), str(source))


def _temperature(source: Source, given: float | None) -> float:
    header = answers_header(source) or {}
    stored = header.get("settings", {}).get("sampling", {}).get("temperature")
    if stored is None and given is None:
        raise ConfigError(
            f"{source} does not say at which temperature its texts were sampled: give one, such as --temperatures 1"
        )
    if stored is not None and given is not None and given != stored:
        raise ConfigError(f"--temperatures {given:g}: the texts of {source} were sampled at {stored:g}; leave it out")
    return float(stored if given is None else given)


def _last_labels(mask: NDArray[np.bool_] | None, length: int) -> tuple[int, int]:
    """The last run of labels, or all of a text without a mask, but for the first token, which nothing predicts."""
    if mask is None:
        return min(1, length), length
    labels = np.flatnonzero(mask)
    if not len(labels):
        return length, length
    gaps = np.flatnonzero(np.diff(labels) > 1)
    return max(1, int(labels[gaps[-1] + 1 if len(gaps) else 0])), int(labels[-1]) + 1


@torch.inference_mode()
def full_text_outputs(
    trunk: Trunk, texts: Sequence[ReferenceText], **options: Unpack[ReadOptions]
) -> list[TrunkOutput]:
    """Run each text in one pass, see `run_batches`."""
    groups = _groups(texts)
    outputs = run_batches(trunk, _batches(texts, groups), **options)
    by_index = {}
    for group, output in zip(groups, outputs, strict=True):
        for row, index in enumerate(group):
            end = len(texts[index].tokens)
            by_index[index] = TrunkOutput(output.final_hidden[row, :end], output.head_input[row, :end])
    return [by_index[index] for index in range(len(texts))]


def run_name(trunk: StreamedTrunk, texts: Sequence[ReferenceText]) -> str:
    """Return a name for a folder of hidden states: equal for equal checkpoints, texts and dtypes."""
    identity = trunk.identity(_batches(texts, _groups(texts)))
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def _batches(texts: Sequence[ReferenceText], groups: Sequence[Sequence[int]]) -> list[Tensor]:
    return [pad_sequence([torch.tensor(texts[index].tokens) for index in group], batch_first=True) for group in groups]


def _groups(texts: Sequence[ReferenceText]) -> list[list[int]]:
    """Indices of texts of similar lengths."""
    groups: list[list[int]] = []
    for index in sorted(range(len(texts)), key=lambda index: -len(texts[index].tokens)):
        if groups and (len(groups[-1]) + 1) * len(texts[groups[-1][0]].tokens) <= MAX_POSITIONS:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


@dataclass(frozen=True)
class TextOrigin:
    """Whether the trunk can have written the texts, by its own distribution."""

    num_tokens: int
    agreement: float | None  # greedy: share of the tokens that are the trunk's argmax
    excess: float | None  # sampled: nats per token by which the texts are less likely than the trunk's own on average
    error: float | None  # its standard error

    @property
    def is_own(self) -> bool:
        """Whether nothing contradicts it."""
        if self.agreement is not None:
            return self.agreement >= _MIN_AGREEMENT
        return abs(self.excess or 0.0) <= max(_MAX_EXCESS, _MAX_ERRORS * (self.error or 0.0))

    @property
    def warnings(self) -> list[str]:
        """Why the figures are not those of decoding."""
        if self.is_own:
            return []
        how = (
            f"{self.agreement:.0%} of its tokens are the trunk's argmax"
            if self.agreement is not None
            else f"its tokens are {self.excess:+.2f} nats less likely than those that the trunk would sample"
        )
        return [f"the text is not the model's own ({how}): acceptance in decoding is another"]

    def as_record(self) -> dict[str, object]:
        return vars(self) | {"is_own": self.is_own}


@torch.inference_mode()
def text_origin(trunk: Trunk, texts: Sequence[ReferenceText], outputs: Sequence[TrunkOutput]) -> TextOrigin:
    """Compare the new tokens with the trunk's distributions at the texts' temperature."""
    temperature, num_tokens = texts[0].temperature, max(1, sum(len(text.new) for text in texts))
    pairs = list(zip(texts, outputs, strict=True))
    if not temperature:  # without the sums over the vocabulary, which take longer than the products
        agreeing = sum(
            int((logits.argmax(-1) == target[:, 0]).sum())
            for text, output in pairs
            for target, logits in _logits(trunk, text, output)
        )
        release_pages([trunk.lm_head])
        return TextOrigin(num_tokens, agreeing / num_tokens, None, None)
    surprise, variance = 0.0, 0.0
    for text, output in pairs:
        for chosen, expected, squares in token_logprobs(trunk, text, output, temperature):
            surprise += float((expected - chosen).sum())
            variance += float((squares - expected.square()).clamp_min(0).sum())
    release_pages([trunk.lm_head])
    return TextOrigin(num_tokens, None, surprise / num_tokens, math.sqrt(variance) / num_tokens)


def _logits(trunk: Trunk, text: ReferenceText, output: TrunkOutput) -> Iterator[tuple[Tensor, Tensor]]:
    """New tokens [n, 1] and the trunk's logits [n, V] for them, a few positions at a time."""
    first, targets = len(text.prompt) - 1, torch.tensor(text.new, device=output.final_hidden.device)
    for start in range(0, len(text.new), _MAX_ROWS):
        target = targets[start : start + _MAX_ROWS, None]
        states = output.final_hidden[first + start : first + start + len(target)]
        yield target, trunk.logits(states).float()


def token_logprobs(
    trunk: Trunk, text: ReferenceText, output: TrunkOutput, temperature: float = 1.0
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return for blocks of new tokens their log-probabilities, and their mean and mean square over the vocabulary in
    the trunk's distribution at each position."""
    blocks = []
    for target, logits in _logits(trunk, text, output):
        logprobs = (logits / temperature).log_softmax(-1).double()
        probs = logprobs.exp()
        weighted = (probs * logprobs).nan_to_num(0)
        squares = (weighted * logprobs).nan_to_num(0)
        blocks.append((logprobs.gather(-1, target)[:, 0], weighted.sum(-1), squares.sum(-1)))
    return blocks


def think_tokens(tokenizer: PreTrainedTokenizerBase | None) -> ThinkTokens | None:
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
