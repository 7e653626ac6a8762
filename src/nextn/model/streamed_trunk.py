"""Trunks whose decoder layers are loaded one at a time, to run models that do not fit into memory.

`StreamedTrunk` reads each layer once for all texts and drops it after use: it runs whole texts without a cache, and
cannot generate. The layers of `DeferredTrunk` are on the meta device until they are loaded.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict, Unpack, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from nextn.cache.kv_cache import KVCache
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.mapped_memory import released_after_use, return_freed_memory, slices_released_after_use
from nextn.checkpoint.tensors import StoredTensor, TensorReader
from nextn.devices import free_cached_memory, is_out_of_memory
from nextn.errors import ConfigError, NextnError
from nextn.family_table import Stage
from nextn.model.layer_loader import LayerLoader
from nextn.model.layer_states import LayerProgress, StateFolder, StatesInMemory, hash_batches, join_rows, take_rows
from nextn.model.logits import float_linear
from nextn.model.stored_experts import check_finite, run_in_groups, separable_experts
from nextn.model.trunk import Trunk, TrunkOutput

_MAX_STATE_BYTES = 2**30  # of hidden states in memory; more are in files
_MAX_RECALLED = 16  # batches whose states after the final norm are in memory
_STATES = ("final_hidden", "head_input")
_VOCAB_ROWS = 16384  # of an lm_head that are cast at once


class ReadOptions(TypedDict, total=False):
    """Options of `StreamedTrunk.read_layers`."""

    folder: Path | None
    max_state_bytes: int
    on_layer: Callable[[LayerProgress], None]
    observe: Callable[[int], object]


class DeferredTrunk(Trunk):
    """A trunk with embedding, final norm and lm_head, for processes that shard each decoder layer when it is loaded."""

    def __init__(self, loader: LayerLoader, weights: TensorReader, *, stage: Stage = "post") -> None:
        """Wrap the model of `loader`, whose layers are read through `weights`, which must stay open."""
        super().__init__(loader.model, stage=stage)
        self._loader, self._weights = loader, weights
        # By name, the parameters of layers that are placed on the host or on disk for good, see `spread_layers`.
        self.offloaded: Mapping[str, Tensor] = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DeferredTrunk":
        # Layers follow to another device when they are loaded.
        super()._apply(lambda value: value if value.is_meta else fn(value), recurse)
        return self

    def loaded_layers(self, devices: Sequence[torch.device] | None = None) -> Iterator[nn.Module]:
        """Load the decoder layers for good, frozen, and yield each; a layer that is sharded meanwhile takes its shard.

        devices: Of each layer; None: the trunk's. Raises CheckpointError if a layer cannot be read or has values that
        are not finite.
        """
        for index, device in enumerate(devices or [self.device] * len(self.decoder.layers)):
            yield self._load(index, device)
            self._loader.release(index)
            return_freed_memory()  # of the parts that other processes have

    def close(self) -> None:
        """Close the checkpoint's files, when all layers are loaded, so that nothing of them stays in memory."""
        self._weights.close()

    def state_items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's state, sorted by name, while one decoder layer is loaded at a time."""
        for index, names in groupby(sorted(self.model.state_dict()), self._loader.layer_index):
            to_load = None if self.layer_places else index
            if to_load is not None:
                self._load(to_load, self.device)
            state = self.model.state_dict()
            yield from ((name, self.offloaded[name] if state[name].is_meta else state[name]) for name in names)
            if to_load is not None:
                self._loader.unload(to_load)

    def _load(self, index: int, device: torch.device) -> nn.Module:
        self._loader.load(index, device)
        layer = self.decoder.layers[index]
        check_finite(f"layer {index}", layer.state_dict())
        return layer.requires_grad_(False)


class StreamedTrunk(DeferredTrunk):
    """A trunk whose decoder layers are loaded while they run, and dropped after that."""

    def __init__(
        self, loader: LayerLoader, weights: TensorReader, *, stage: Stage = "post", fingerprint: str = ""
    ) -> None:
        """See `DeferredTrunk`; fingerprint identifies the checkpoint in a folder of states."""
        super().__init__(loader, weights, stage=stage)
        self._fingerprint = fingerprint
        self._max_positions = sys.maxsize  # of one pass of a layer; less after it took too much memory
        self._last_run: list[tuple[Tensor, object]] = []  # batches and their states after the decoder layers
        self._recalled: dict[tuple[int, Stage], TrunkOutput] = {}
        self.embedding.register_forward_hook(lambda module, args, out: out.to(self.dtype))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the trunk computes in; embedding and lm_head may be stored in another one."""
        return self._loader.dtype

    @property
    def checkpoint(self) -> Checkpoint:
        return self._weights.checkpoint

    @property
    def num_bytes(self) -> int:
        """Bytes of the checkpoint that a run reads."""
        return sum(self._weights.num_bytes(self._names(index)) for index in range(len(self.decoder.layers)))

    def forward(self, tokens: Tensor, cache: KVCache | None = None, *, documents: Tensor | None = None) -> TrunkOutput:
        """Return the states of rows [B, T] of the last `run`; raise ConfigError for others, as `recall` does."""
        rows = [self.recall(row) for row in (tokens.tolist() if cache is None else [[]])]
        return TrunkOutput(*(torch.stack([getattr(row, name) for row in rows]) for name in _STATES))

    def embed(self, tokens: Tensor, *, raw: bool = False) -> Tensor:
        return super().embed(tokens, raw=raw).to(self.dtype)

    def logits(self, final_hidden: Tensor) -> Tensor:
        if self.output.weight.dtype == self.embedding.weight.dtype == self.dtype or type(self.output) is not nn.Linear:
            return super().logits(final_hidden)
        # The bits of a cast copy of the whole, which is never made.
        states = final_hidden.to(self.dtype)
        slices = slices_released_after_use(self.lm_head, _VOCAB_ROWS)
        logits = torch.cat([float_linear(states, rows.to(self.dtype)) for _, rows in slices], dim=-1)
        return self.capped(logits if self.lm_head_bias is None else logits + self.lm_head_bias.to(self.dtype))

    @torch.inference_mode()
    def run(
        self, batches: Sequence[Tensor], *, documents: Sequence[Tensor] | None = None, **options: Unpack[ReadOptions]
    ) -> list[TrunkOutput]:
        """Read each decoder layer once, as `read_layers` with these options, and return the states of every batch."""
        self.read_layers(batches, documents=documents, **options)
        groups: Sequence[Tensor | None] = documents or [None] * len(batches)
        return [self._finish(*each, group) for each, group in zip(self._last_run, groups, strict=True)]

    @torch.inference_mode()
    def read_layers(
        self,
        batches: Sequence[Tensor],
        *,
        documents: Sequence[Tensor] | None = None,
        folder: Path | None = None,
        max_state_bytes: int = _MAX_STATE_BYTES,
        on_layer: Callable[[LayerProgress], None] = lambda progress: None,
        observe: Callable[[int], object] = lambda index: None,
    ) -> None:
        """Run each batch of tokens [B, T], padded on the right, through the layers, each read once, for `recall`.

        States are those of `Trunk.forward` with these documents, bit for bit where torch computes with one thread. They
        are kept after each layer in `folder`, so that an interrupted run resumes (see `remove_states`); without one,
        those of more than about `max_state_bytes` are kept in temporary files. `on_layer` is called after each layer,
        first for those that an earlier run has done. `observe` is called with a layer's index after it ran, and its
        result, as JSON, kept with the states; give runs that observe another thing another folder.

        Raises CheckpointError if a layer cannot be read or has values that are not finite, or states cannot be written;
        ConfigError if the folder holds the states of another run.
        """
        groups: Sequence[Tensor | None] = documents or [None] * len(batches)
        inputs = list(zip(batches, groups, strict=True))
        with ExitStack() as stack:
            store: StatesInMemory | StateFolder = StatesInMemory()
            size = sum(batch.numel() for batch in batches) * prod(self.hidden_shape) * self.dtype.itemsize
            if folder is not None or size > max_state_bytes:
                place = folder or Path(stack.enter_context(TemporaryDirectory(prefix="nextn-states-")))
                store = stack.enter_context(StateFolder.locked(place, self.identity(batches, documents)))
            done, states = store.start(len(batches))
            for progress in done:
                on_layer(progress)
            try:
                self._run_layers(len(done), inputs, states, store, on_layer, observe)
            except NextnError as error:
                kept = f"The states of complete layers are in {folder}; the same command resumes."
                raise error if folder is None else type(error)(f"{str(error).rstrip('.')}. {kept}") from error
        self._last_run = list(zip(batches, states, strict=True))
        self._recalled.clear()

    @torch.inference_mode()
    def recall(self, tokens: Sequence[int]) -> TrunkOutput:
        """Return the states [T, ...] of a text, or of its beginning, that was in a batch of the last `run`.

        They are those of the current `stage`, whatever it was in that run. Raises ConfigError for another text.
        """
        requested = torch.tensor(tokens, device=self.device)
        for place, (batch, states) in enumerate(self._last_run):
            if not 0 < len(requested) <= batch.shape[1]:
                continue
            for row in (batch[:, : len(requested)].to(self.device) == requested).all(1).nonzero().flatten().tolist():
                if len(self._recalled) > _MAX_RECALLED:
                    self._recalled.clear()
                if (place, self.stage) not in self._recalled:
                    self._recalled[place, self.stage] = self._finish(batch, states)
                output = self._recalled[place, self.stage]
                return TrunkOutput(output.final_hidden[row, : len(tokens)], output.head_input[row, : len(tokens)])
        raise ConfigError(
            "a streamed trunk cannot run single passes or generate text, as each would read every layer again: it has "
            "the states only of texts that it was run over; load the model without streaming"
        )

    @contextmanager
    def loaded_layer(self, index: int) -> Iterator[nn.Module]:
        """While open, a decoder layer is loaded as a whole, with all experts, and frozen.

        Raises CheckpointError if the layer cannot be read or has values that are not finite.
        """
        try:
            with self._reading():
                self._fetch(index)
            yield self._load(index, self.device)
        finally:
            self._loader.unload(index)
            self._weights.forget(self._names(index))

    def _finish(self, tokens: Tensor, state: object, documents: Tensor | None = None) -> TrunkOutput:
        """Compute what follows the decoder layers."""
        with self._only(None, state):
            return super().forward(tokens, documents=documents)

    def identity(self, batches: Sequence[Tensor], documents: Sequence[Tensor] | None = None) -> dict[str, object]:
        """Return what the states after each layer depend on."""
        return {
            "checkpoint": self._fingerprint,
            "dtype": str(self.dtype),
            "texts": hash_batches([*batches, *(documents or ())]),
        }

    def _run_layers(
        self,
        first: int,
        inputs: Sequence[tuple[Tensor, Tensor | None]],
        states: list[object],
        store: StatesInMemory | StateFolder,
        on_layer: Callable[[LayerProgress], None],
        observe: Callable[[int], object],
    ) -> None:
        """Run the layers from `first` over all batches, replacing `states`."""
        num_layers = len(self.decoder.layers)  # LongCat-Flash's config counts two in each
        if first == num_layers:
            return
        with ThreadPoolExecutor(1) as reader, self._reading():
            reading = reader.submit(self._fetch, first)
            for index in range(first, num_layers):
                started = time.perf_counter()
                num_bytes = reading.result()
                # One layer ahead: the kernel's file cache holds it, not this process.
                if index + 1 < num_layers:
                    reading = reader.submit(self._fetch, index + 1)
                with self._loaded(index):
                    loaded = time.perf_counter()
                    for place, (tokens, documents) in enumerate(inputs):
                        states[place] = store.keep(place, self._run_layer(index, tokens, documents, states[place]))
                self._weights.forget(self._names(index))
                seconds = loaded - started, time.perf_counter() - loaded
                progress = LayerProgress(index, num_bytes, *seconds, observed=observe(index))
                store.finish_layer(progress)
                on_layer(progress)

    def _run_layer(self, index: int, tokens: Tensor, documents: Tensor | None, state: object) -> object:
        """Run a loaded layer over a batch; a few sequences at a time where the device has no memory for all of them.

        Raises ConfigError if one sequence is too much.
        """
        count, length = tokens.shape
        while True:
            num_rows = max(1, min(count, self._max_positions // length))
            try:
                parts = []
                for rows in (slice(start, start + num_rows) for start in range(0, count, num_rows)):
                    own = state if num_rows == count else take_rows(state, rows, count)
                    with self._only(index, own) as produced:
                        super().forward(tokens[rows], documents=None if documents is None else documents[rows])
                    parts.append(produced[0])
                return join_rows(parts)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error)
            if num_rows == 1:
                raise ConfigError(
                    f"layer {index}: {self.device} has not enough memory for one text of {length} tokens: {reason}; "
                    "use shorter texts (--max-tokens), or another device (--device)"
                )
            # Outside of `except`, whose traceback holds the tensors of the failed pass.
            self._max_positions = num_rows // 2 * length
            free_cached_memory(self.device)

    def _fetch(self, index: int) -> int:
        return self._weights.fetch(self._names(index), should_stop=lambda: not self._is_reading)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """While open, layers are read ahead; after an interrupt, nothing waits for a layer that is not needed."""
        self._is_reading = True
        try:
            yield
        finally:
            self._is_reading = False

    def _names(self, index: int) -> list[str]:
        return [cast(StoredTensor, tensor).name for tensor in self._loader.tensors(index)]

    @contextmanager
    def _loaded(self, index: int) -> Iterator[None]:
        """While open, the decoder layer has its weights, or loads those of its experts when they run."""
        layer = self.decoder.layers[index]
        self._weights.check_unchanged(self._names(index))
        experts = separable_experts(layer, getattr(self.config, "_experts_implementation", None))
        try:
            with self._fits(index):
                self._loader.load(index, self.device, experts=experts is None)
            check_finite(f"layer {index}", layer.state_dict())
            if experts is not None:
                groups = partial(self._loader.expert_groups, index, self.device)
                experts.forward = partial(run_in_groups, experts, lambda experts: groups())
            yield
        finally:
            if experts is not None:
                vars(experts).pop("forward", None)
            self._loader.unload(index)

    @contextmanager
    def _fits(self, index: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            size = self._weights.num_bytes(self._names(index)) / 1e9
            raise ConfigError(
                f"layer {index}: {self.device} has not enough memory for its weights, {size:.1f} GB as stored; use "
                "another device (--device), or --dtype bfloat16"
            ) from error

    @contextmanager
    def _only(self, index: int | None, state: object) -> Iterator[list[object]]:
        """While open, a pass runs this decoder layer alone; earlier layers return `state`, later ones its own output.

        So transformers' own forward makes masks, positions and whatever else the layer gets, for each layer anew.
        With None, all layers return `state`.

        Yields:
            A list that the layer's output is appended to.
        """
        produced: list[object] = []
        state = tree_map_only(Tensor, lambda leaf: leaf.to(self.device), state)  # those in files are on the host
        layers = list(self.decoder.layers)

        def run(layer: nn.Module, *args: object, **kwargs: object) -> object:
            produced.append(type(layer).forward(layer, *args, **kwargs))
            return produced[0]

        for layer in layers:
            layer.forward = lambda *args, **kwargs: produced[0] if produced else state
        if index is not None:
            layers[index].forward = partial(run, layers[index])
        try:
            yield produced
        finally:
            for layer in layers:
                del layer.forward


def run_batches(trunk: Trunk, batches: Sequence[Tensor], **options: Unpack[ReadOptions]) -> Sequence[TrunkOutput]:
    """Run each batch in one pass without a cache, as `StreamedTrunk.run` does: loaded or streamed, the same bits."""
    if isinstance(trunk, StreamedTrunk):
        return trunk.run(batches, **options)
    with released_after_use(trunk.decoder.layers):
        return [trunk(batch) for batch in batches]
