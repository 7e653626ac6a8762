"""How the next token of one served sequence is chosen: the same rule for the trunk's logits and the head's.

A draft is accepted if the trunk chooses the same token, so text never depends on the head, on K or on other sequences.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import torch
from torch import Tensor

from nextn.serve.request import GenerationRequest, TokenLogprob
from nextn.speculative.coupled_sampling import sample_coupled
from nextn.speculative.sampling import to_probs


class TokenSampler:
    """Chooses the tokens of one sequence."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._sampling = replace(request.sampling, repetition_penalty=1.0)
        self._grammar = None if request.grammar is None else request.grammar()
        self._masks: dict[tuple[int, ...], Tensor | None] = {}  # by drafts, of the current position
        self._generated: Counter[int] = Counter()
        self._length = 0
        self._prompt = torch.tensor(sorted(set(request.prompt)))
        self._bias_ids = torch.tensor(list(request.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(request.logit_bias.values()), dtype=torch.float32)

    @staticmethod
    def is_plain(request: GenerationRequest) -> bool:
        """Return whether the rule is the argmax of the logits as they are, and nothing else is asked of them."""
        return (
            request.sampling.greedy
            and not request.sampling.needs_seen
            and not (request.presence_penalty or request.frequency_penalty or request.logit_bias)
            and request.grammar is None
            and request.logprobs is None
        )

    def verify(self, logits: Tensor, drafts: Sequence[int]) -> tuple[int, int]:
        """Return (number of accepted drafts, next token), from the trunk's logits [K + 1, V] or more rows."""
        for depth in range(len(drafts) + 1):
            token = self.choose(logits[depth], drafts[:depth])
            if depth == len(drafts) or token != drafts[depth]:
                return depth, token
        raise AssertionError

    def choose(self, logits: Tensor, drafted: Sequence[int]) -> int:
        """Choose the token after the drafted ones, from its logits [V]."""
        scores = self._scores(logits, drafted)
        if self._sampling.greedy:
            return int(scores.argmax())
        return sample_coupled(to_probs(scores, self._sampling), self._request.seed, self._length + len(drafted))

    def advance(self, tokens: Sequence[int]) -> None:
        """Move past emitted tokens."""
        self._generated.update(tokens)
        self._length += len(tokens)
        self._masks = {}
        if self._grammar is not None:
            self._grammar.advance(tuple(tokens))

    def logprob(self, logits: Tensor, token: int) -> TokenLogprob:
        """Return the log probability of a token under the unmodified logits [V], and the requested alternatives."""
        logprobs = logits.float().log_softmax(-1)
        count = min(self._request.logprobs or 0, len(logprobs))
        values, ids = logprobs.topk(count)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return TokenLogprob(token, float(logprobs[token]), top)

    def _scores(self, logits: Tensor, drafted: Sequence[int]) -> Tensor:
        """Apply penalties, bias and grammar. The repetition penalty applies to the prompt's tokens, too, as in vLLM."""
        request, scores = self._request, logits.to(torch.float32, copy=True)
        generated = self._generated + Counter(drafted) if drafted else self._generated
        new = torch.tensor(list(generated), dtype=torch.int64)
        if (penalty := request.sampling.repetition_penalty) != 1:
            seen = torch.cat([self._prompt, new]).unique()
            scores[seen] = torch.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
        if request.frequency_penalty:
            scores[new] -= request.frequency_penalty * torch.tensor(list(generated.values()), dtype=torch.float32)
        if request.presence_penalty:
            scores[new] -= request.presence_penalty
        if len(self._bias_ids):
            scores[self._bias_ids] += self._bias
        if (mask := self._mask(tuple(drafted))) is not None:
            scores[~mask] = -inf
        return scores

    def _mask(self, drafted: tuple[int, ...]) -> Tensor | None:
        """The tokens that the grammar allows after the drafts; None where there is none, or it forbids a draft."""
        if self._grammar is None:
            return None
        if drafted not in self._masks:
            masks = self._grammar.allowed(drafted)
            self._masks[drafted] = masks[len(drafted)] if len(masks) > len(drafted) else None
        return self._masks[drafted]
