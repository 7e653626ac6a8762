"""The LM head over final hidden states as native replays: logits, their argmax and its probability.

With a large vocabulary, the lm_head is most of what a draft step reads, so drafts have one of four bits beside that of
the verification: a draft is only a proposal. The best candidates get the logits of the lm_head itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from nextn.checkpoint.mapped_memory import release_pages
from nextn.model.head import Head
from nextn.runtime.native.abi import Runtime
from nextn.runtime.native.grouped import RoundedFormat
from nextn.runtime.native.memory import Scratch
from nextn.runtime.native.passes import BLOCK_SIZES
from nextn.runtime.native.program import Replay
from nextn.runtime.native.trace import TraceRecorder, current_trace
from nextn.runtime.native.weight_packing import PackedWeights
from nextn.speculative.draft_vocabulary import DraftVocabulary
from nextn.speculative.sampling import HeadOutput, Prediction

FORMAT = RoundedFormat(4, 128)
# Fewer rows are not worth a format of their own. An MTP layer has about 16 weights per square of the hidden size, so by
# the second rule the lm_head is a third of what a draft step reads.
_LEAST_ROWS, _LEAST_ROWS_PER_CHANNEL = 4096, 8
_NUM_CANDIDATES = 2  # with exact logits; more bring no more acceptance (bench/log.md)


def with_confidence(logits: Tensor, vocabulary: DraftVocabulary | None = None) -> list[Tensor]:
    """Return logits [n, V], their argmax [n] and its probability [n]. Only for use in a recording.

    With a draft vocabulary, the given logits are those of its tokens, and the others are -inf.
    """
    best, confidence = torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits))
    current_trace().add_native("confidence", [best, confidence, logits], outs=2)
    if vocabulary is None:
        return [logits, best, confidence]
    return [vocabulary.expand(logits), vocabulary.ids[best], confidence]


class LMHead:
    """Final hidden states -> predictions. Each prediction overwrites the last one of the same size."""

    def __init__(
        self,
        runtime: Runtime,
        weights: PackedWeights,
        logits: Callable[[Tensor], Tensor],
        weight: Tensor,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        """Prepare to record logits of the tokens of `vocabulary`; None for all."""
        self._runtime, self._weights, self._logits, self._vocabulary = runtime, weights, logits, vocabulary
        self._hidden_size = weight.shape[1]
        self._scratch = Scratch()
        self._by_size: dict[int, tuple[Tensor, Replay]] = {}
        self._by_source: dict[Replay, Replay | None] = {}
        self._views: dict[tuple[Replay, int], list[Tensor]] = {}

    def __call__(self, final_hidden: Tensor) -> Prediction:
        """Predict from final_hidden [..., H]."""
        shape, flat = final_hidden.shape[:-1], final_hidden.reshape(-1, final_hidden.shape[-1])
        if len(flat) > BLOCK_SIZES[-1]:
            parts = [self(part).logits.clone() for part in flat.split(BLOCK_SIZES[-1])]
            return Prediction(torch.cat(parts).unflatten(0, shape))
        states, replay = self.replay_for(len(flat))
        states[: len(flat)] = flat
        replay.run()
        return HeadOutput(*(out[: len(flat)].unflatten(0, shape) for out in replay.outputs))

    def replay_for(self, num_states: int) -> tuple[Tensor, Replay]:
        """Return a replay for at least this many states, and the tensor that it reads them from."""
        size = next(size for size in BLOCK_SIZES if size >= num_states)
        if size not in self._by_size:
            states = torch.zeros(size, self._hidden_size)
            self._by_size[size] = states, self._record(states)
        return self._by_size[size]

    def predict_from(self, source: Replay, num_positions: int) -> Prediction:
        """Predict at the first positions of the states [B, m, H] that are the first output of a pass, in place."""
        replay = self.replay_after(source)
        if replay is None:
            return self(source.outputs[0][:, :num_positions])
        replay.run()
        return HeadOutput(*self.views(source, num_positions))

    def replay_after(self, source: Replay) -> Replay | None:
        """Return the replay that reads the output of a pass in place; None if the pass has too many states for one."""
        self.prepare(source)
        return self._by_source[source]

    def views(self, source: Replay, num_positions: int) -> list[Tensor]:
        """Return logits [B, m, V], argmax [B, m] and its probability [B, m] of the first positions after a pass."""
        if (source, num_positions) not in self._views:
            replay, shape = self._by_source[source], source.outputs[0].shape[:2]
            assert replay is not None
            views = [out.unflatten(0, shape)[:, :num_positions] for out in replay.outputs]
            self._views[source, num_positions] = views
        return self._views[source, num_positions]

    def prepare(self, source: Replay) -> None:
        """Record the replay of `replay_after` now."""
        if source not in self._by_source:
            flat = source.outputs[0].flatten(0, 1)
            self._by_source[source] = self._record(flat) if len(flat) <= BLOCK_SIZES[-1] else None

    @torch.inference_mode(False)
    def _record(self, states: Tensor) -> Replay:
        run = lambda: with_confidence(self._logits(states), self._vocabulary)  # noqa: E731
        return Replay.of(self._runtime, TraceRecorder([states]), run, self._weights, self._scratch)


def has_four_bits(head: Head, num_tokens: int | None = None) -> bool:
    """Return whether the native backend drafts with an lm_head of four bits.

    It has `num_tokens` rows; None: those of the draft vocabulary, else all.
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
    """The rows of an lm_head that drafts are made with."""

    output: nn.Linear  # the lm_head
    vocabulary: DraftVocabulary | None  # its tokens; None for all
    # What takes the place of `output` in passes that are recorded. It has those rows only, and its weight is a stand-
    # in, as `StoredCodes` has one.
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

    def rescore(
        self, logits: Tensor, states: Tensor, capped: Callable[[Tensor], Tensor] = lambda logits: logits
    ) -> Tensor:
        """Replace the highest logits [n, N] of `linear`, in place, by those that the lm_head gives for states [n, H].

        `capped` is what becomes of the lm_head's products, see `Head.capped`.
        """
        places = logits.topk(_NUM_CANDIDATES).indices
        ids = places if self.vocabulary is None else self.vocabulary.ids[places]
        rows = embedding(ids, self.output.weight.detach())
        exact = (rows.float() * states[:, None].float()).sum(-1)
        if self.output.bias is not None:
            exact = exact + self.output.bias[ids]
        return logits.scatter_(-1, places, capped(exact).to(logits.dtype))

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
