"""Trunk and head of the native backend, with the signatures of `Trunk` and `Head` as decoding uses them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, cast

import torch
from torch import Tensor

from nextn.model.head import Head, HeadStep
from nextn.model.shared_kv_head import SharedKVHead
from nextn.model.trunk import Trunk, TrunkOutput
from nextn.runtime.native.abi import Runtime
from nextn.runtime.native.draft_chain import NativeDraftChain
from nextn.runtime.native.kv_buffers import KVBuffers, TrunkBuffers
from nextn.runtime.native.lm_head import DraftLMHead, LMHead, with_confidence
from nextn.runtime.native.memory import Scratch
from nextn.runtime.native.passes import BLOCK_SIZES, Inputs, Passes
from nextn.runtime.native.program import Replay
from nextn.runtime.native.rounds import NativeRounds, NativeVerifier, VerifyBlock
from nextn.runtime.native.trace_hooks import (
    RecordingCache,
    RecordingTrunkKV,
    Shape,
    copy_for_recording,
    record_delta_rules,
)
from nextn.runtime.native.weight_packing import PackedWeights
from nextn.runtime.protocols import RoundsStart
from nextn.settings import Sampling
from nextn.speculative.sampling import HeadOutput, Prediction
from nextn.speculative.verification import Verifier

HeadBuffers: TypeAlias = KVBuffers | TrunkBuffers
_MAX_VERIFIERS, _MAX_BLOCKS = 8, 512  # cached for later texts


def _allocate_cache(all_passes: Sequence[Passes], batch_size: int) -> KVBuffers:
    """Allocate a cache for every layer that any of these passes over one stack uses. Raises Untraceable."""
    layers = zip(*(passes.shapes(batch_size) for passes in all_passes), strict=True)
    shapes = [next((shape for shape in layer if shape is not None), (1, 1, 1)) for layer in layers]
    return all_passes[0].buffers(shapes, batch_size)


@dataclass(frozen=True)
class _NativeTrunkOutput(TrunkOutput):
    source: tuple[Replay, int] | None  # the replay that computed the states, and their number; None: several replays


class NativeTrunk:
    """`Trunk` as decoding uses it. Several threads may share it, see `pass_context`."""

    records_passes = True

    def __init__(self, trunk: Trunk, runtime: Runtime, weights: PackedWeights) -> None:
        self.recorded = copy_for_recording(trunk)
        self.vocab_size, self.max_length, self.hidden_shape = trunk.vocab_size, trunk.max_length, trunk.hidden_shape
        self.dtype, self.device, self.int8_cache = trunk.dtype, trunk.device, trunk.kv_cache_dtype == "int8"
        self.predict = LMHead(runtime, weights, trunk.logits, trunk.output.weight)
        self._runtime, self.weights = runtime, weights
        self._passes = Passes(
            runtime, weights, trunk.layer_types, self._run_pass, dtype=trunk.dtype, int8_cache=self.int8_cache
        )
        self.max_block_size = self._passes.max_block_size
        self._blocks: dict[tuple[object, ...], VerifyBlock | None] = {}
        self._verifiers: dict[tuple[Sampling, bool], NativeVerifier] = {}
        self._verifier_scratch, self._distributions_scratch = Scratch(), Scratch()

    def cache(self, batch_size: int) -> KVBuffers:
        return _allocate_cache([self._passes], batch_size)

    def shapes(self, layers: Iterable[int]) -> dict[int, Shape]:
        """Return what these layers store per position, by index. Raises Untraceable."""
        return {layer: cast(Shape, self._passes.shapes(1)[layer]) for layer in layers}

    def prepare(self, batch_size: int, block_sizes: Sequence[int], *, exact: bool) -> None:
        """Record passes of these sizes, see `DecodingTrunk.prepare`."""
        for replay in self._passes.prepare(batch_size, block_sizes, exact=exact):
            self.predict.prepare(replay)

    def verifier(self, sampling: Sampling, *, block_verification: bool) -> Verifier:
        """Return the verifier for a round's drafts, see `DecodingTrunk.verifier`."""
        if sampling.needs_seen or sampling.greedy:
            return Verifier(sampling, block_verification=block_verification)
        return NativeVerifier(self._runtime, sampling, block_verification=block_verification)

    def rounds(
        self, cache: KVBuffers, sampling: Sampling, start: RoundsStart, *, block_verification: bool
    ) -> NativeRounds | None:
        """Return native rounds, see `DecodingTrunk.rounds`; None if Python must run between the parts of a round."""
        batch_size, longest = len(start.tokens), max(start.max_speculative_tokens, start.max_copy_tokens)
        if cache.is_recurrent or sampling.needs_seen or not NativeRounds.fits(start.pending, longest):
            return None
        verifier = None if sampling.greedy else self._verifier(sampling, block_verification)
        blocks = partial(self._block, batch_size, verifier)
        if blocks(1, None) is None or self._native_lm_head(batch_size, longest + 1) is None:
            return None
        vocab_size = None if sampling.greedy else self.vocab_size
        sizes = {"max_length": self.max_length, "vocab_size": vocab_size}
        return NativeRounds(self._runtime, blocks, self._passes, cache, start, self._distributions_scratch, **sizes)

    def _verifier(self, sampling: Sampling, block_verification: bool) -> NativeVerifier:
        """One per sampling parameters: its programs are used for all texts."""
        if (sampling, block_verification) not in self._verifiers:
            if len(self._verifiers) >= _MAX_VERIFIERS:
                self._verifiers.clear()
                self._blocks.clear()
            self._verifiers[sampling, block_verification] = NativeVerifier(
                self._runtime, sampling, block_verification=block_verification, scratch=self._verifier_scratch
            )
        return self._verifiers[sampling, block_verification]

    def _native_lm_head(self, batch_size: int, num_positions: int) -> Replay | None:
        """The LM head after a block of this size, if both are fully native."""
        _, replay = self._passes.replay(batch_size, num_positions)
        lm_head = self.predict.replay_after(replay)
        return None if replay.program is None or lm_head is None or lm_head.program is None else lm_head

    def _block(
        self, batch_size: int, verifier: NativeVerifier | None, num_positions: int, distributions: Tensor | None
    ) -> VerifyBlock | None:
        address = None if distributions is None else distributions.data_ptr()
        key = (batch_size, num_positions, verifier, address, self._passes.replay(batch_size, num_positions)[1])
        if key not in self._blocks:
            if len(self._blocks) >= _MAX_BLOCKS:
                self._blocks.clear()
            self._blocks[key] = self._build_block(batch_size, verifier, num_positions, distributions)
        return self._blocks[key]

    def _build_block(
        self, batch_size: int, verifier: NativeVerifier | None, num_positions: int, distributions: Tensor | None
    ) -> VerifyBlock | None:
        inputs, replay = self._passes.replay(batch_size, num_positions)
        if (lm_head := self._native_lm_head(batch_size, num_positions)) is None:
            return None
        verification = None
        if verifier is not None:
            q = None if distributions is None else distributions[: num_positions - 1].transpose(0, 1)
            q = None if num_positions == 1 else q
            verification = verifier.verification(self.predict.views(replay, num_positions)[0], q)
        return VerifyBlock.of(inputs, replay, lm_head, verification)

    @contextmanager
    def pass_context(self) -> Iterator[None]:
        """Reserve for this thread the runtime and everything that recorded passes share (inputs, scratch memory).

        Hold it for a whole round, but not across a `yield`. Meanwhile torch is limited to one thread, as its own
        threads would compete with the runtime's team for the cores.
        """
        with self._runtime.lock:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                yield
            finally:
                torch.set_num_threads(threads)

    def __call__(self, tokens: Tensor, cache: KVBuffers) -> TrunkOutput:
        """Run a block of tokens [B, T] over the cache; the next pass overwrites the returned states."""
        final_hidden, head_input = self._passes.run(tokens, cache)
        return _NativeTrunkOutput(final_hidden, head_input, self._passes.last)

    def read(self, hidden: TrunkOutput) -> Prediction:
        """Return the prediction at each position of the last pass, without copying its states."""
        source = hidden.source if isinstance(hidden, _NativeTrunkOutput) else None
        return self.predict(hidden.final_hidden) if source is None else self.predict.predict_from(*source)

    def _run_pass(self, inputs: Inputs, cache: RecordingCache) -> list[Tensor]:
        with record_delta_rules(self.recorded):
            hidden = self.recorded(inputs.tokens, cache)
        return [hidden.final_hidden, hidden.head_input]


def _recorded_head(head: Head, recorded_trunk: Trunk, lm_heads: Sequence[DraftLMHead]) -> Head:
    """Copy a head for recording, with these LM heads; the trunk that verifies keeps its own."""
    outputs = [(each.output, each.linear) for each in lm_heads]
    if any(each.output is head.trunk.output for each in lm_heads):
        recorded_trunk = copy_for_recording(head.trunk, outputs)
    return copy_for_recording(head, [(head.trunk, recorded_trunk), *outputs])


class NativeHead:
    """`Head` as decoding uses it."""

    def __init__(
        self,
        head: Head,
        trunk: NativeTrunk,
        runtime: Runtime,
        weights: PackedWeights,
        *,
        own_lm_head: bool = False,
        lm_heads: Sequence[DraftLMHead] = (),
    ) -> None:
        """Record the head, with `lm_heads` in another form than the trunk's, which `weights` knows.

        `own_lm_head`: use these weights for the LM head even if the family shares the trunk's.
        """
        self._recorded = _recorded_head(head, trunk.recorded, lm_heads)
        self._draft_lm_heads = {id(each.linear): each for each in lm_heads}
        self.num_modules = head.num_modules
        self._runtime, self.weights = runtime, weights
        self.layer_index, self.uses_next_hidden, self.family = head.layer_index, head.uses_next_hidden, head.family
        layer_types = [layer_type for index in range(head.num_modules) for layer_type in head.layer_types(index)]
        make_cache: Callable[..., RecordingCache] = RecordingCache
        self.read_layers: list[int] = []  # of the trunk's, by a head without keys of its own
        if isinstance(head, SharedKVHead):
            self.read_layers = list(head.read_layers.values())
            layer_types = [replace(each, window=head.visible_window(each)) for each in head.read_layers]
            make_cache = partial(RecordingTrunkKV, trunk.shapes(self.read_layers), trunk.dtype)
        make = partial(
            Passes,
            runtime,
            weights,
            layer_types,
            dtype=trunk.dtype,
            int8_cache=trunk.int8_cache,
            state_shape=trunk.hidden_shape,
            make_cache=make_cache,
        )
        self._passes = [make(partial(self._run_pass, index)) for index in range(head.num_modules)]
        self._step_passes, self._refresh_passes = make(self._run_step), make(self._run_refresh)
        self._distributions_scratch = Scratch()
        own = own_lm_head or bool(lm_heads) or "output" in head.family.own or head.draft_vocabulary is not None
        self._lm_heads = [self._lm_head(index, weights) if own else trunk.predict for index in range(head.num_modules)]

    def _lm_head(self, index: int, weights: PackedWeights) -> LMHead:
        logits, weight = partial(self._draft_logits, index), self._recorded.output(index).weight
        return LMHead(self._runtime, weights, logits, weight, self._recorded.draft_vocabulary)

    def cache(self, batch_size: int, trunk_cache: KVBuffers | None = None) -> HeadBuffers:
        """Return a cache for any of the MTP layers."""
        if self.read_layers:
            return TrunkBuffers(trunk_cache, batch_size, self.read_layers)
        return _allocate_cache(self._passes, batch_size)

    def step(self, index: int, tokens: Tensor, hidden: Tensor, *, cache: HeadBuffers) -> HeadStep:
        """Run an MTP layer over a block of the cache; the next pass overwrites the returned states."""
        return HeadStep(*self._passes[index].run(tokens, cache, states=hidden))

    def refresh(self, index: int, tokens: Tensor, hidden: Tensor, *, cache: HeadBuffers) -> None:
        """Run an MTP layer as `step` does, without the operations that only its outputs need."""
        if self.read_layers:  # there is nothing to store
            return cache.begin(tokens.shape[1])
        is_separate = self.num_modules == 1 and not cache.is_recurrent
        passes = self._refresh_passes if is_separate else self._passes[index]
        passes.run(tokens, cache, states=hidden)

    def predict(self, index: int, final_hidden: Tensor) -> Prediction:
        return self._lm_heads[index](final_hidden)

    def prepare(self, batch_size: int, block_sizes: Sequence[int]) -> None:
        """Record refreshes of these sizes, see `DecodingHead.prepare`."""
        largest = self._passes[0].max_block_size or BLOCK_SIZES[-1]
        sizes = range(1, min(largest, max(block_sizes) + self.num_modules - 1) + 1)
        # For both ways to draft: which one will be used is not known here, and recordings of a head are short.
        for passes in [*self._passes, *([self._refresh_passes] if self.num_modules == 1 else [])]:
            passes.prepare(batch_size, sizes, exact=False)
        self._step_passes.prepare(batch_size, [1], exact=False)
        for lm_head in self._lm_heads:
            lm_head.replay_for(batch_size)

    def recursion(self, cache: HeadBuffers, state: Tensor) -> "NativeRecursion":
        return NativeRecursion(self._step_passes, cache, state, offset=-1 if self.read_layers else 0)

    def chain(self, cache: HeadBuffers, sampling: Sampling, *, sampled: bool) -> NativeDraftChain | None:
        """Return a chain that drafts in one native call; None if Python must run between the drafts."""
        if self.num_modules > 1 or cache.is_recurrent or sampling.needs_seen:
            return None
        both = self._refresh_passes, self._step_passes
        if any(passes.replay(len(cache.lengths), 1)[1].program is None for passes in both):
            return None
        scratch = self._distributions_scratch
        return NativeDraftChain(self._runtime, *both, cache, sampling, sampled=sampled, scratch=scratch)

    def _run_pass(self, index: int, inputs: Inputs, cache: RecordingCache) -> list[Tensor]:
        assert inputs.states is not None
        head = self._recorded
        with record_delta_rules(head, head.trunk):
            step = head.step(index, inputs.tokens, inputs.states, cache=cache)
        return [step.final_hidden, step.next_hidden]

    def _run_step(self, inputs: Inputs, cache: RecordingCache) -> list[Tensor]:
        """A step of the last MTP layer that leaves in its inputs those of the next step of a greedy chain."""
        assert inputs.states is not None
        index = self.num_modules - 1
        final_hidden, next_hidden = self._run_pass(index, inputs, cache)
        head = self._recorded
        outs = with_confidence(self._draft_logits(index, final_hidden[:, 0]), head.draft_vocabulary)
        inputs.tokens.copy_(outs[1][:, None])
        inputs.states.copy_(next_hidden)
        if not self.read_layers:  # whose chain of drafts stays at one position
            inputs.starts.add_(1)
        return outs

    def _draft_logits(self, index: int, states: Tensor) -> Tensor:
        """Return `Head.draft_logits`; if the lm_head has few bits, only the highest are exact. For recordings."""
        logits = self._recorded.draft_logits(index, states)
        lm_head = self._draft_lm_heads.get(id(self._recorded.output(index)))
        return logits if lm_head is None else lm_head.rescore(logits, states, self._recorded.capped)

    def _run_refresh(self, inputs: Inputs, cache: RecordingCache) -> list[Tensor]:
        """The only MTP layer without outputs: dead-code elimination leaves what the KV cache needs."""
        if not self.read_layers:
            self._run_pass(0, inputs, cache)
        return []


class NativeRecursion:
    """`Recursion` with one native program per step, which prepares the inputs of the next step."""

    def __init__(self, passes: Passes, cache: HeadBuffers, state: Tensor, *, offset: int) -> None:
        self._passes, self._cache = passes, cache
        self._inputs, self._replay = passes.bind(cache, offset=offset)
        assert self._inputs.states is not None
        self._inputs.states[:, 0] = state
        self._next_tokens: list[int] | None = None  # already in the inputs

    def step(self, tokens: Sequence[int]) -> Prediction:
        if tokens != self._next_tokens:
            self._inputs.tokens[:, 0] = torch.tensor(tokens)
        self._cache.begin(1)
        self._passes.attach(self._cache)  # the buffers may have grown
        self._replay.run()
        self._cache.commit([1] * len(tokens))
        prediction = HeadOutput(*self._replay.outputs)
        self._next_tokens = prediction.best
        return prediction
