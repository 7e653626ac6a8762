"""The LM head over final hidden states as native replays: logits, their argmax and its probability."""

from collections.abc import Callable

import torch
from torch import Tensor

from nextn.runtime.native.abi import Runtime
from nextn.runtime.native.memory import Scratch
from nextn.runtime.native.passes import BLOCK_SIZES
from nextn.runtime.native.program import Replay
from nextn.runtime.native.trace import TraceRecorder
from nextn.runtime.native.trace_hooks import record_op
from nextn.runtime.native.weight_packing import PackedWeights
from nextn.speculative.draft_vocabulary import DraftVocabulary
from nextn.speculative.sampling import HeadOutput, Prediction


def with_confidence(logits: Tensor, vocabulary: DraftVocabulary | None = None) -> list[Tensor]:
    """Return logits [n, V], their argmax [n] and its probability [n]. Only for use in a recording.

    With a draft vocabulary, the given logits are those of its tokens, and the others are -inf.
    """
    best, confidence = torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits))
    record_op("confidence", [best, confidence, logits], outs=2)
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
        """Prepare to record.

        Args:
            runtime: The native runtime.
            weights: Packs weights.
            logits: Computes the logits of states.
            weight: The weight [V, H] that it uses.
            vocabulary: The tokens that the logits are of; None for all.
        """
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
