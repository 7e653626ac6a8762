"""A trunk whose decoder layers are read one after the other, each once for all texts, and dropped after use.

It measures models that do not fit into memory. It runs whole texts without a cache; it cannot generate.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from nextn.cache.kv_cache import KVCache
from nextn.checkpoint.tensors import StoredTensor, TensorReader, is_finite
from nextn.errors import CheckpointError, ConfigError
from nextn.families import Stage
from nextn.model.transformers_loading import LayerLoader
from nextn.model.trunk import Trunk, TrunkOutput

States = TypeVar("States")
_MAX_STATE_BYTES = 2**30  # of hidden states in memory; what exceeds it is in files


@dataclass(frozen=True)
class LayerProgress:
    """What reading and running one decoder layer took."""

    index: int
    num_bytes: int  # read from the checkpoint
    read_seconds: float
    run_seconds: float


class StreamedTrunk(Trunk):
    """A trunk with embedding, final norm and lm_head, whose decoder layers are on the meta device until they run."""

    def __init__(self, loader: LayerLoader, weights: TensorReader, *, stage: Stage = "post") -> None:
        """Wrap the model of `loader`, whose layers are read through `weights`, which must stay open."""
        super().__init__(loader.model, stage=stage)
        self._loader, self._weights = loader, weights

    def forward(self, tokens: Tensor, cache: KVCache | None = None, *, documents: Tensor | None = None) -> TrunkOutput:
        """Raise ConfigError: single passes would read the whole trunk each. See `run`."""
        raise ConfigError(
            "a streamed trunk cannot run single passes or generate text, as each would read every layer again; give "
            "it texts to score, or load the model without streaming"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StreamedTrunk":
        # Layers follow to another device when they are loaded.
        return super()._apply(lambda value: value if value.is_meta else fn(value), recurse)

    @torch.inference_mode()
    def run(
        self,
        batches: Sequence[Tensor],
        *,
        max_state_bytes: int = _MAX_STATE_BYTES,
        on_layer: Callable[[LayerProgress], None] = lambda progress: None,
    ) -> list[TrunkOutput]:
        """Run every batch of tokens [B, T] through the trunk, reading each decoder layer once.

        Args:
            batches: Texts, padded on the right. Results have the bits of `Trunk.forward` on the same batches.
            max_state_bytes: Keep hidden states above this number of bytes in temporary files instead of memory.
            on_layer: Called after each decoder layer.

        Raises:
            CheckpointError: if a layer cannot be read or has values that are not finite.
        """
        states: list[object] = [None] * len(batches)
        outputs: list[TrunkOutput] = []
        store = _StateStore(max_state_bytes)
        num_layers = len(self.decoder.layers)  # LongCat-Flash's config counts two in each
        with ThreadPoolExecutor(1) as reader:
            reading = reader.submit(self._weights.fetch, self._names(0))
            for index in range(num_layers):
                started = time.perf_counter()
                num_bytes = reading.result()
                # One layer ahead: the kernel's file cache holds it, not this process.
                if index + 1 < num_layers:
                    reading = reader.submit(self._weights.fetch, self._names(index + 1))
                with self._loaded(index):
                    loaded = time.perf_counter()
                    outputs = self._run_layer(index, batches, states, store)
                on_layer(LayerProgress(index, num_bytes, loaded - started, time.perf_counter() - loaded))
        return outputs

    def _run_layer(
        self, index: int, batches: Sequence[Tensor], states: list[object], store: "_StateStore"
    ) -> list[TrunkOutput]:
        """Run the layer over all batches, replacing `states`; return the outputs if it is the last one."""
        outputs = []
        for place, tokens in enumerate(batches):
            with self._only(index, states[place]) as produced:
                output = super().forward(tokens)
            if index + 1 < len(self.decoder.layers):
                states[place] = store.keep(place, produced[0])
            else:
                states[place] = None
                outputs.append(TrunkOutput(*store.keep(place, (output.final_hidden, output.head_input))))
        return outputs

    def _names(self, index: int) -> list[str]:
        return [cast(StoredTensor, tensor).name for tensor in self._loader.tensors(index)]

    @contextmanager
    def _loaded(self, index: int) -> Iterator[None]:
        """While open, the decoder layer has its weights."""
        layer = self.decoder.layers[index]
        self._weights.check_unchanged(self._names(index))
        try:
            self._loader.load(index, self.device)
            state = layer.state_dict()
            bad = [name for name, value in state.items() if value.is_floating_point() and not is_finite(value)]
            if bad:
                raise CheckpointError(f"layer {index}: {len(bad)} tensors hold NaN or Inf: {', '.join(bad[:8])}")
            yield
        finally:
            self._loader.unload(index)

    @contextmanager
    def _only(self, index: int, state: object) -> Iterator[list[object]]:
        """While open, a pass runs this decoder layer alone; earlier layers return `state`, later ones its own output.

        So transformers' own forward makes masks, positions and whatever else the layer gets, for each layer anew.

        Yields:
            A list that the layer's output is appended to.
        """
        produced: list[object] = []
        layers = list(self.decoder.layers)

        def run(*args: object, **kwargs: object) -> object:
            produced.append(type(layers[index]).forward(layers[index], *args, **kwargs))
            return produced[0]

        for layer in layers[:index]:
            layer.forward = lambda *args, **kwargs: state
        layers[index].forward = run
        for layer in layers[index + 1 :]:
            layer.forward = lambda *args, **kwargs: produced[0]
        try:
            yield produced
        finally:
            for layer in layers:
                del layer.forward


class _StateStore:
    """Hidden states by batch: in memory up to a limit, above it in mapped temporary files."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._in_memory: dict[int, int] = {}  # batch -> bytes

    def keep(self, place: int, states: States) -> States:
        """Return tensors with these values, which replace those that were kept for the same batch."""
        self._in_memory.pop(place, None)
        size = sum(state.nbytes for state in tree_leaves(states) if isinstance(state, Tensor))
        if sum(self._in_memory.values()) + size <= self._max_bytes:
            self._in_memory[place] = size
            return states
        return cast(States, tree_map_only(Tensor, _in_file, states))


def _in_file(state: Tensor) -> Tensor:
    values = state.cpu().contiguous()
    # Written, not mapped and then filled: a full disk raises OSError here instead of ending the process.
    with tempfile.NamedTemporaryFile(prefix="nextn-states-") as file:
        values.reshape(-1).view(torch.uint8).numpy().tofile(file)
        file.flush()
        mapped = torch.from_file(file.name, shared=True, size=values.numel(), dtype=values.dtype)
    return mapped.view(values.shape)
