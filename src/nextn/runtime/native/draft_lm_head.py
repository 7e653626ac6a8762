"""The lm_head of drafts in four bits, beside the lm_head of the verification, which keeps its own.

With a large vocabulary, the lm_head is most of what a draft step reads. A draft is only a proposal, so few bits cannot
change the text. The best candidates get the logits of the lm_head itself, so that few drafts change, either.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from nextn.checkpoint.mapped_memory import release_pages
from nextn.model.head import Head
from nextn.runtime.native.rounded_weights import RoundedFormat
from nextn.speculative.draft_vocabulary import DraftVocabulary

FORMAT = RoundedFormat(4, 128)
# Fewer rows are not worth a format of their own. An MTP layer has about 16 weights per square of the hidden size, so by
# the second rule the lm_head is a third of what a draft step reads.
_LEAST_ROWS, _LEAST_ROWS_PER_CHANNEL = 4096, 8
_NUM_CANDIDATES = 2  # with exact logits; more bring no more acceptance (bench/log.md)


def has_four_bits(head: Head, num_tokens: int | None = None) -> bool:
    """Return whether the native backend drafts with an lm_head of four bits.

    Args:
        head: The head.
        num_tokens: Rows of the lm_head. Default: those of the draft vocabulary, else all.
    """
    output, trunk = head.output(0), head.trunk
    is_rounded = trunk.weights != "stored" or trunk.dtype == torch.bfloat16
    if head.exact or not is_rounded or type(output) is not nn.Linear or output.weight.dtype != trunk.dtype:
        return False
    num_rows = num_tokens or num_draft_rows(head)
    return num_rows >= max(_LEAST_ROWS, _LEAST_ROWS_PER_CHANNEL * output.in_features)


def num_draft_rows(head: Head) -> int:
    """Return how many rows of the lm_head a draft step reads: those of the draft vocabulary, else all."""
    return head.output(0).out_features if head.draft_vocabulary is None else len(head.draft_vocabulary)


@dataclass(frozen=True, eq=False)
class DraftLMHead:
    """The rows of an lm_head that drafts are made with.

    Attributes:
        output: The lm_head.
        vocabulary: Its tokens; None for all.
        linear: What takes the place of `output` in passes that are recorded. It has those rows only, and its weight is
            a stand-in, as `StoredCodes` has one.
    """

    output: nn.Linear
    vocabulary: DraftVocabulary | None
    linear: nn.Linear

    @classmethod
    def of(cls, output: nn.Linear, vocabulary: DraftVocabulary | None) -> "DraftLMHead":
        num_rows = output.out_features if vocabulary is None else len(vocabulary)
        stand_in = torch.full((), torch.nan, dtype=output.weight.dtype).expand(num_rows, output.in_features)
        linear = nn.Linear(output.in_features, num_rows, bias=False, device="meta")
        linear.weight, linear.bias = nn.Parameter(stand_in, requires_grad=False), output.bias
        return cls(output, vocabulary, linear)

    @property
    def name(self) -> str:
        return "the lm_head of drafts"

    @property
    def stand_in(self) -> Tensor:
        """The weight [N, H] of `linear`."""
        return self.linear.weight.detach()

    @property
    def memory(self) -> Tensor:
        """The memory of the stand-in, which is that of one element."""
        return self.stand_in[:1, :1]

    def parts(self, weight: Tensor) -> "list[list[DraftLMHead]] | None":
        """Return itself; None if `weight` is a part of the stand-in."""
        return [[self]] if weight.shape == self.stand_in.shape else None

    def rescore(self, logits: Tensor, states: Tensor) -> Tensor:
        """Replace the highest logits by those that the lm_head itself gives.

        Args:
            logits: [n, N] of `linear`, overwritten.
            states: Final hidden states [n, H].

        Returns:
            The logits.
        """
        places = logits.topk(_NUM_CANDIDATES).indices
        ids = places if self.vocabulary is None else self.vocabulary.ids[places]
        rows = embedding(ids, self.output.weight.detach())
        exact = (rows.float() * states[:, None].float()).sum(-1)
        if self.output.bias is not None:
            exact = exact + self.output.bias[ids]
        return logits.scatter_(-1, places, exact.to(logits.dtype))

    def dequantize(self) -> Tensor:
        """Return the rows [N, H] that the stand-in stands for."""
        weight = self.output.weight.detach()
        if self.vocabulary is None:
            return weight
        rows = self.vocabulary.rows(weight)
        release_pages([weight])
        return rows


def draft_lm_heads(head: Head) -> list[DraftLMHead]:
    """Return the lm_heads that have four bits in drafts, none where that does not pay."""
    if not has_four_bits(head):
        return []
    outputs: Mapping[int, nn.Linear] = {id(output): output for output in map(head.output, range(head.num_modules))}
    return [DraftLMHead.of(output, head.draft_vocabulary) for output in outputs.values()]
