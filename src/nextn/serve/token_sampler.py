"""How the next token of one served sequence is chosen: the same rule for the trunk's logits and the head's.

A draft is accepted if the trunk chooses the same token, so text never depends on the head, on K or on other sequences.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import inf

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nextn.data.byte_tokenizer import byte_alphabet
from nextn.decoding.text_stream import BROKEN, BYTE_TOKEN
from nextn.errors import ConfigError
from nextn.serve.request import GenerationRequest, GrammarState, TokenLogprob, failure_message
from nextn.settings import Sampling
from nextn.speculative.sampling import sample_coupled, to_probs

_LOG = logging.getLogger(__name__)


class TokenSampler:
    """Chooses the tokens of one sequence, on the device of its logits."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.sampling = replace(request.sampling, repetition_penalty=1.0)
        self._grammar = None if request.grammar is None else request.grammar()
        self._changes_scores = self._changes(request)
        self.failure = ""  # why the sequence has to end, such as a grammar that can no longer be followed
        self._tokens: list[int] = []  # emitted
        self._generated: Counter[int] = Counter()  # of them, as penalties need it at each token
        self._masks_drafts = True
        self._prompt = torch.tensor(sorted(set(request.prompt)))
        self._bias_ids = torch.tensor(list(request.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(request.logit_bias.values()), dtype=torch.float32)

    @classmethod
    def is_argmax(cls, request: GenerationRequest) -> bool:
        """Return whether the rule is the argmax of the logits as they are, and nothing else is asked of them."""
        return request.sampling.greedy and request.logprobs is None and not cls._changes(request)

    @staticmethod
    def _changes(request: GenerationRequest) -> bool:
        penalties = request.presence_penalty or request.frequency_penalty or request.sampling.needs_seen
        has_min = request.min_tokens and request.stop_token_ids
        return bool(penalties or request.logit_bias or request.grammar is not None or has_min)

    def advance(self, tokens: Sequence[int]) -> None:
        """Move past emitted tokens."""
        self._generated.update(tokens)
        self._tokens += tokens
        if self._grammar is not None:
            self._advance_grammar(self._grammar, tuple(tokens))

    def logprob(self, logits: Tensor, token: int) -> TokenLogprob:
        """Return the log probability of a token under the unmodified logits [V], and the requested alternatives."""
        logprobs = logits.float().log_softmax(-1)
        count = min(self.request.logprobs or 0, len(logprobs))
        values, ids = logprobs.topk(count)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return TokenLogprob(token, float(logprobs[token]), top)

    def position(self, drafted: Sequence[int]) -> int:
        """Return the index of the token after the drafted ones within the generated text."""
        return len(self._tokens) + len(drafted)

    def scores(self, logits: Tensor, drafted: Sequence[int], *, is_draft: bool = False) -> Tensor:
        """Apply penalties, bias, grammar and `min_tokens` to the logits [V] after the drafted tokens.

        The repetition penalty applies to the prompt's tokens, too, as in vLLM. is_draft: the scores are for one more
        draft, and the drafted tokens are not verified yet. Where that fails, the sequence has a `failure`.
        """
        if not self._changes_scores or self.failure:
            return logits
        scores = logits.to(torch.float32, copy=True)
        try:
            self._penalize(scores, drafted)
            if (mask := self._mask(tuple(drafted), is_draft=is_draft and bool(drafted))) is not None:
                scores.masked_fill_(~mask.to(scores.device), -inf)
            if self.position(drafted) < self.request.min_tokens:
                ends = [token for token in self.request.stop_token_ids if token < len(scores)]
                scores[torch.tensor(ends, dtype=torch.int64, device=scores.device)] = -inf
        except Exception as error:  # the other sequences of the batch go on
            self.fail(error)
        return scores

    def fail(self, error: Exception) -> None:
        """Record that this sequence has to end; the others of the batch go on."""
        if not isinstance(error, ConfigError):
            _LOG.error("a generation failed", exc_info=error)
        self._grammar, self.failure = None, failure_message(error)

    def _penalize(self, scores: Tensor, drafted: Sequence[int]) -> None:
        """Apply penalties and bias, in place."""
        request, device = self.request, scores.device
        # They stay where the logits are: no copy from the host with each token.
        moved = (each.to(device) for each in (self._prompt, self._bias_ids, self._bias))
        self._prompt, self._bias_ids, self._bias = moved
        generated = self._generated + Counter(drafted) if drafted else self._generated
        new = torch.tensor(list(generated), dtype=torch.int64, device=device)
        if (penalty := request.sampling.repetition_penalty) != 1:
            seen = torch.cat([self._prompt, new]).unique()
            scores[seen] = torch.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
        if request.frequency_penalty:
            counts = torch.tensor(list(generated.values()), dtype=torch.float32, device=device)
            scores[new] -= request.frequency_penalty * counts
        if request.presence_penalty:
            scores[new] -= request.presence_penalty
        if len(self._bias_ids):
            scores[self._bias_ids] += self._bias

    def _advance_grammar(self, grammar: GrammarState, tokens: tuple[int, ...]) -> None:
        try:
            grammar.advance(tokens)
        except ConfigError as error:
            self.fail(error)

    def _restart_grammar(self) -> None:
        """Take the grammar back to the emitted tokens. Only the text itself, not drafts, may become too complex."""
        assert self.request.grammar is not None
        self._masks_drafts, self._grammar = False, self.request.grammar()
        self._advance_grammar(self._grammar, tuple(self._tokens))

    def _mask(self, drafted: tuple[int, ...], *, is_draft: bool) -> Tensor | None:
        """The tokens that the grammar allows after the drafts; None where there is none, or it forbids a draft."""
        if self._grammar is None or (is_draft and not self._masks_drafts):
            return None
        try:
            masks = self._grammar.allowed(drafted)
        except ConfigError as error:
            if is_draft:
                self._restart_grammar()
            else:
                self.fail(error)
            return None
        return masks[len(drafted)] if len(masks) > len(drafted) else None


def choose_tokens(
    samplers: Sequence[TokenSampler],
    logits: Tensor | Sequence[Tensor],
    drafted: Sequence[Sequence[int]],
    *,
    are_drafts: bool = False,
) -> list[int]:
    """Choose the next token of each sequence, or its next draft, after its drafted ones, from its logits [V].

    Rows with equal parameters are sampled together; what a row gets does not depend on the others.
    """
    rows_of: dict[Sampling, list[int]] = {}
    for row, sampler in enumerate(samplers):
        rows_of.setdefault(sampler.sampling, []).append(row)
    tokens = [0] * len(samplers)
    for sampling, rows in rows_of.items():
        each = [samplers[row].scores(logits[row], drafted[row], is_draft=are_drafts).float() for row in rows]
        scores = torch.stack(each)
        if sampling.greedy:
            chosen = scores.argmax(-1).tolist()
        else:
            # Not together where sums would be over as many tokens as the row with the most needs.
            parts = [scores] if sampling.top_p == 1 else scores.split(1)
            probs = torch.cat([to_probs(part, sampling) for part in parts])
            seeds = [samplers[row].request.seed for row in rows]
            chosen = sample_coupled(probs, seeds, [samplers[row].position(drafted[row]) for row in rows])
        for row, token in zip(rows, chosen, strict=True):
            tokens[row] = token
    return tokens


def verify_drafts(
    samplers: Sequence[TokenSampler], logits: Tensor | Sequence[Tensor], drafts: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """Return (number of accepted drafts, next token) of each sequence, from the trunk's logits [K + 1, V] of each."""
    results: dict[int, tuple[int, int]] = {}
    depth, open_rows = 0, list(range(len(samplers)))
    while open_rows:
        tokens = choose_tokens(
            [samplers[row] for row in open_rows],
            [logits[row][depth] for row in open_rows],
            [drafts[row][:depth] for row in open_rows],
        )
        for row, token in zip(open_rows, tokens, strict=True):
            if len(drafts[row]) == depth or token != drafts[row][depth]:
                results[row] = depth, token
        open_rows = [row for row in open_rows if row not in results]
        depth += 1
    return [results[row] for row in range(len(samplers))]


class TokenTexts:
    """Decodes tokens one by one, each only once; without a tokenizer, tokens have no text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Return the token's text; U+FFFD stands for bytes that are not a whole character."""
        if token not in self._texts:
            self._texts[token] = self._decode(token)
        return self._texts[token]

    def texts(self, tokens: Sequence[int]) -> list[str]:
        return [self.text(token) for token in tokens]

    def running_text(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of consecutive tokens."""
        if self._tokenizer is None:
            return ""
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(tokens), **options))

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return 0 if self._tokenizer is None else len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def spelled(self, token: int) -> str:
        r"""Return a text that is unique per token; incomplete characters are like `bytes:\xe2\x82`, as OpenAI does."""
        text = self.text(token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.utf8(token)) if BROKEN in text else text

    def utf8(self, token: int) -> list[int]:
        """Return the token's UTF-8 bytes."""
        text = self.text(token)
        return list(text.encode() if BROKEN not in text else self._raw(token))

    def _raw(self, token: int) -> bytes:
        """The bytes that a byte-level or byte-fallback tokenizer means by a piece that is no valid text alone."""
        piece = self._piece(token) or ""
        if match := BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        table = _byte_level()
        return bytes(table[char] for char in piece) if all(char in table for char in piece) else piece.encode()

    def _piece(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.convert_ids_to_tokens(token)

    def _decode(self, token: int) -> str:
        if self._tokenizer is None or self._piece(token) is None:  # ids that only pad the vocabulary
            return ""
        return self.running_text([token])


@cache
def _byte_level() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_alphabet())}
