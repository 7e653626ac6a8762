"""Passes of a stack of layers over blocks of positions: one replay per batch size and block size.

A block is padded to the next size that has a replay; the next block overwrites the padding.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nextn.model.layer_types import LayerType
from nextn.runtime.native.abi import Runtime
from nextn.runtime.native.kv_buffers import KVBuffers
from nextn.runtime.native.memory import Scratch
from nextn.runtime.native.program import Replay
from nextn.runtime.native.trace import TraceRecorder
from nextn.runtime.native.trace_hooks import MAX_RECURRENT_BLOCK, RecordingCache, Shape, StateShape
from nextn.runtime.native.weight_packing import PackedWeights

# Block sizes: one more than usual numbers of drafts (and 16, because products process 16 rows at once), then the sizes
# of prompt chunks.
BLOCK_SIZES: tuple[int, ...] = (1, 2, 3, 5, 7, 9, 11, 12, 14, 16, 17, 24, 32, 64, 128)
# A block runs on a larger existing replay, instead of one recorded for its size, if that has at most this many rows
# over all sequences: these cost little more than one row.
_MAX_PADDED = 17

Array = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Inputs:
    """Input buffers of a replay over m positions."""

    tokens: Tensor  # [B, m]
    positions: Tensor  # [B, m], computed from the starts
    starts: Tensor  # [B]: position of the first token
    states: Tensor | None  # [B, m, ...] hidden states, of a head

    @classmethod
    def of(cls, batch_size: int, size: int, states: Tensor | None) -> "Inputs":
        tokens, positions = (torch.zeros(batch_size, size, dtype=torch.int64) for _ in range(2))
        return cls(tokens, positions, torch.zeros(batch_size, dtype=torch.int64), states)

    @property
    def size(self) -> int:
        return self.tokens.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.tokens, self.positions, self.starts, *([] if self.states is None else [self.states])]

    @cached_property
    def arrays(self) -> tuple[Array, Array]:
        """Tokens and starts as NumPy arrays: writing them takes a tenth of the time of writing a tensor."""
        return self.tokens.numpy(), self.starts.numpy()


RunPass = Callable[[Inputs, RecordingCache], Iterable[Tensor]]


class Passes:
    """Blocks of any size through one stack of layers."""

    def __init__(
        self,
        runtime: Runtime,
        weights: PackedWeights,
        layer_types: Sequence[LayerType],
        run_pass: RunPass,
        *,
        dtype: torch.dtype,
        int8_cache: bool = False,
        state_shape: tuple[int, ...] | None = None,
        make_cache: Callable[..., RecordingCache] = RecordingCache,
    ) -> None:
        """Create passes (`run_pass`: inputs, cache -> outputs) without recording any.

        What neither the outputs nor the cache need is not computed. `dtype` and `state_shape` (None for a trunk) are
        those of a hidden state that is an input; with `int8_cache`, attention layers store keys and values in 8 bits.
        """
        self._make_cache = make_cache
        self._runtime, self._weights, self._layer_types, self._run_pass = runtime, weights, list(layer_types), run_pass
        self._dtype, self._int8_cache, self._state_shape = dtype, int8_cache, state_shape
        self._scratch = Scratch()
        self._attached: object = None  # `allocation` of the cache that the replays use
        self.last: tuple[Replay, int] | None = None  # the last replay and its number of valid positions
        self._headers = torch.zeros(len(layer_types), 3, dtype=torch.int64)
        self._replays: dict[tuple[int, int], tuple[Inputs, Replay]] = {}  # by batch size and replay size
        self._selected: dict[tuple[int, int], tuple[Inputs, Replay]] = {}  # by batch size and block size
        self._shapes: list[Shape | StateShape | None] = []
        # Larger blocks run in pieces. Not with recurrent layers: a rollback could reach beyond the last piece.
        self.max_block_size = MAX_RECURRENT_BLOCK if any(each.is_recurrent for each in layer_types) else None
        self._sizes = [size for size in BLOCK_SIZES if size <= (self.max_block_size or size)]

    def shapes(self, batch_size: int) -> list[Shape | StateShape | None]:
        """Return what each layer stores per position; None if the pass skips the layer. Raises Untraceable."""
        if not self._shapes:
            self.replay(batch_size, 1)  # the sizes are known after a recording
        return self._shapes

    def buffers(self, shapes: Sequence[Shape | StateShape], batch_size: int) -> KVBuffers:
        """Return an empty cache for layers that store this per position."""
        return KVBuffers(shapes, batch_size, dtype=self._dtype, runtime=self._runtime, int8=self._int8_cache)

    def run(self, tokens: Tensor, cache: KVBuffers, *, states: Tensor | None = None) -> list[Tensor]:
        """Run tokens [B, m] with states [B, m, ...]; return outputs [B, m, ...], which the next pass overwrites."""
        cache.begin(tokens.shape[1])
        if tokens.shape[1] <= self._sizes[-1]:
            return self._run_piece(tokens, states, cache, 0)
        pieces = []
        for start in range(0, tokens.shape[1], self._sizes[-1]):
            part = slice(start, start + self._sizes[-1])
            outs = self._run_piece(tokens[:, part], None if states is None else states[:, part], cache, start)
            pieces.append([out.clone() for out in outs])
        self.last = None
        return [torch.cat(outs, dim=1) for outs in zip(*pieces, strict=True)]

    def bind(self, cache: KVBuffers, *, num_positions: int = 1, offset: int = 0) -> tuple[Inputs, Replay]:
        """Return the replay for a block `offset` positions after the cache's lengths, bound to the cache."""
        inputs, replay = self.replay(len(cache.lengths), num_positions)
        cache.reserve(max(cache.lengths) + offset + inputs.size)
        self.attach(cache)
        _, starts = inputs.arrays
        starts[:] = [length + offset for length in cache.lengths]
        return inputs, replay

    def attach(self, cache: KVBuffers) -> None:
        """Let all replays use the buffers of this cache, at their current addresses."""
        if self._attached is not cache.allocation:
            self._headers.copy_(cache.headers)
            self._attached = cache.allocation

    def _run_piece(self, tokens: Tensor, states: Tensor | None, cache: KVBuffers, offset: int) -> list[Tensor]:
        num_positions = tokens.shape[1]
        inputs, replay = self.bind(cache, num_positions=num_positions, offset=offset)
        inputs.arrays[0][:, :num_positions] = tokens.numpy()
        if inputs.states is not None and states is not None:
            inputs.states[:, :num_positions] = states
        replay.run()
        self.last = replay, num_positions
        return replay.outputs if num_positions == inputs.size else [out[:, :num_positions] for out in replay.outputs]

    def replay(self, batch_size: int, num_positions: int) -> tuple[Inputs, Replay]:
        """Return a replay for a block of this size, and its inputs. Raises Untraceable."""
        key = batch_size, num_positions
        if key not in self._selected:
            default = self._round_up(num_positions)
            existing = [size for batch, size in self._replays if batch == batch_size and size >= num_positions]
            size = min(existing, default=default)
            most = max(default, _MAX_PADDED // batch_size)
            self._selected[key] = self._get(batch_size, size if size <= most else default)
        return self._selected[key]

    def prepare(self, batch_size: int, block_sizes: Iterable[int], *, exact: bool) -> list[Replay]:
        """Record replays for these block sizes now, so that no round waits; `exact`: not for the next BLOCK_SIZES."""
        block_sizes = [size for size in block_sizes if size <= self._sizes[-1]]
        for size in block_sizes:
            self._get(batch_size, size if exact else self._round_up(size))
        return [self.replay(batch_size, size)[1] for size in block_sizes]

    def _get(self, batch_size: int, size: int) -> tuple[Inputs, Replay]:
        if (batch_size, size) not in self._replays:
            self._replays[batch_size, size] = self._record(batch_size, size)
            self._selected.clear()
        return self._replays[batch_size, size]

    def _round_up(self, num_positions: int) -> int:
        return next(size for size in self._sizes if size >= num_positions)

    @torch.inference_mode(False)
    def _record(self, batch_size: int, size: int) -> tuple[Inputs, Replay]:
        shape = self._state_shape
        states = None if shape is None else torch.zeros(batch_size, size, *shape, dtype=self._dtype)
        inputs = Inputs.of(batch_size, size, states)
        layers = self._layer_types, self._headers
        cache = self._make_cache(*layers, inputs.starts, inputs.positions, int8=self._int8_cache)
        trace = TraceRecorder(inputs.tensors, cache.layers)
        run = partial(self._run_recorded, inputs, cache)
        replay = Replay.of(self._runtime, trace, run, self._weights, self._scratch, num_wide=1)
        self._shapes = [layer.shape for layer in cache.layers]
        return inputs, replay

    def _run_recorded(self, inputs: Inputs, cache: RecordingCache) -> Iterable[Tensor]:
        inputs.positions.copy_(inputs.starts[:, None] + torch.arange(inputs.size))  # the first recorded operation
        return self._run_pass(inputs, cache)
