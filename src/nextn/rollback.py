"""Caches that can be put back exactly: keys and values, sliding windows, convolution and recurrent state, per row.

A forward pass writes a *window* of columns provisionally; `Cache.keep` then says how many of them stand, per row.
Rows are left-aligned and may differ in length, so column == position and a prompt is never padded on the left.
It does not know what the tokens are.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from nextn.errors import RollbackError


class _Layer(Protocol):
    def begin(self, lengths: Sequence[int], num_columns: int) -> None: ...
    def keep(self, counts: Sequence[int], num_columns: int) -> None: ...
    def drop(self, counts: Sequence[int]) -> None: ...
    def select(self, rows: Tensor) -> None: ...


class AttentionLayer(CacheLayerMixin):
    """Keys and values [B, heads, columns, dim] in slabs that double when full; a rejected column is overwritten.

    Sliding-window layers use it as well: the window lives in the mask, so the columns that a rollback needs are there.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    is_initialized: bool
    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._starts: Sequence[int] = ()
        self._end = 0

    def begin(self, lengths: Sequence[int], num_columns: int) -> None:
        self._starts, self._end = lengths, max(lengths) + num_columns

    def keep(self, counts: Sequence[int], num_columns: int) -> None:
        """Nothing to undo: the columns beyond a row's length are masked and overwritten."""

    def drop(self, counts: Sequence[int]) -> None:
        """Nothing to undo, either."""

    def select(self, rows: Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            states.new_empty(*states.shape[:2], 0, states.shape[3]) for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = written(self.keys, key_states, self._starts)
        self.values = written(self.values, value_states, self._starts)
        return self.keys[:, :, : self._end], self.values[:, :, : self._end]

    def get_seq_length(self) -> int:
        return max(self._starts, default=0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class IndexedLayer(AttentionLayer):
    """Keys and values, and the keys [B, columns, dim] by which an indexer picks the columns to attend to."""

    _index: Tensor | None = None

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        return self.update_index(indexer_key_states[:, None])[:, 0]

    def update_index(self, idx_k: Tensor) -> Tensor:
        """MiniMax-M3's name for it, with an axis of one head: [B, 1, m, dim]."""
        self._index = written(self._index, idx_k, self._starts)
        return self._index[:, :, : self._end]

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self._index = None if self._index is None else self._index[rows]


class PooledLayer(IndexedLayer):
    """For an indexer that pools columns (GLM-5-Next): it asks for their number when its own are among them."""

    def get_seq_length(self) -> int:
        return self._end


class AngledLayer(IndexedLayer):
    """For a trunk (Qwen4) that puts the positions of all columns into its first indexed layer: they are the columns."""

    @property
    def indexer_position_ids(self) -> Tensor | None:
        start = max(self._starts)
        return torch.arange(start, device=self.device).expand(3, len(self._starts), -1) if start else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None: ...


def written(slab: Tensor | None, states: Tensor, starts: Sequence[int]) -> Tensor:
    """The slab [B, heads, capacity, dim] with states [B, heads, m, dim] in the columns from starts[row] on; a larger
    one if they do not fit, so the slab given is not to be used again."""
    slab = states[:, :, :0] if slab is None else slab
    num_columns = states.shape[2]
    if (end := max(starts) + num_columns) > slab.shape[2]:
        # Zeros, not garbage: a masked column still meets 0 * value in the weighted sum, and 0 * NaN is NaN.
        grown = slab.new_zeros(*slab.shape[:2], max(end, 2 * slab.shape[2], 64), slab.shape[3])
        grown[:, :, : slab.shape[2]] = slab
        slab = grown
    if len(set(starts)) == 1:
        slab[:, :, starts[0] : end] = states
    else:
        for row, start in enumerate(starts):
            slab[row, :, start : start + num_columns] = states[row]
    return slab


class RecurrentLayer(LinearAttentionLayer):
    """Convolution and recurrent state. Neither can be cropped, so a partial acceptance puts the state before the window
    back and runs the layer's mixer again over the kept columns only: same inputs, no second pass through the trunk.

    States are replaced, so holding on to the old ones costs nothing; but in steps of one column Mamba writes its
    recurrent state in place, and Ling's delta attention its convolution state.
    """

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states=number_of_states)
        # Sends one-token steps through update_conv_state; transformers' fused step writes the state in place.
        self.record_past = True
        self._mark: _States | None = None
        self._replay: dict[nn.Module, _Call] = {}

    def begin(self, lengths: Sequence[int], num_columns: int) -> None:
        self._mark, self._replay = _States.of(self, copy=num_columns == 1), {}

    def record(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Remember the window's mixer call; called by a hook before the mixer runs."""
        if module in self._replay:
            raise RollbackError(f"{type(module).__name__} ran twice in one window; its state cannot be put back")
        self._replay[module] = _Call(module, args, kwargs)

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> Tensor:
        size = self.conv_kernel_size[state_idx] = conv_kernel_size or conv_states.shape[-1]
        past = self.conv_states[state_idx]
        if past is None:
            past = conv_states.new_zeros(*conv_states.shape[:-1], size)
        full = torch.cat([past, conv_states], dim=-1)
        self.conv_states[state_idx] = full[..., -size:]
        self.is_conv_states_initialized[state_idx] = self.has_previous_state[state_idx] = True
        self.dtype, self.device = conv_states.dtype, conv_states.device
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = self.has_previous_state[state_idx] = True
        return recurrent_states

    def keep(self, counts: Sequence[int], num_columns: int) -> None:
        for count in sorted({count for count in counts if count < num_columns}):
            rows = torch.tensor([row for row, kept in enumerate(counts) if kept == count], device=self.device)
            self._put_back(rows, count)
        self._mark, self._replay = None, {}

    def _put_back(self, rows: Tensor, count: int) -> None:
        if self._mark is None or not self._replay:
            raise RollbackError("a recurrent layer was not watched during this window; its state cannot be put back")
        states = self._mark.rows(rows)
        if count:
            for call in self._replay.values():
                states = call.run(states, rows, count)
        elif not states.known:
            raise RollbackError("a row cannot keep 0 columns of its first window: there is no state to go back to")
        states.write(self, rows)

    def drop(self, counts: Sequence[int]) -> None:
        raise RollbackError("recurrent state cannot be truncated; keep fewer columns of the last window instead")

    def select(self, rows: Tensor) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                states[index] = None if state is None else state[rows]


class _States:
    """The states of one recurrent layer at one moment."""

    def __init__(self, conv: list[Tensor | None], recurrent: list[Tensor | None], sizes: list[int | None]) -> None:
        self.conv, self.recurrent, self.sizes = conv, recurrent, sizes

    @classmethod
    def of(cls, layer: LinearAttentionLayer, *, copy: bool = False) -> "_States":
        conv, recurrent = (
            [state.clone() if copy and state is not None else state for state in states.values()]
            for states in (layer.conv_states, layer.recurrent_states)
        )
        return cls(
            conv,
            recurrent,
            list(layer.conv_kernel_size.values()),
        )

    @property
    def known(self) -> bool:
        return any(state is not None for state in [*self.conv, *self.recurrent])

    def rows(self, rows: Tensor) -> "_States":
        conv, recurrent = (
            [None if state is None else state[rows] for state in states] for states in (self.conv, self.recurrent)
        )
        return _States(conv, recurrent, self.sizes)

    def layer(self) -> RecurrentLayer:
        layer = RecurrentLayer(len(self.conv))
        for index, (conv, recurrent) in enumerate(zip(self.conv, self.recurrent, strict=True)):
            layer.conv_states[index], layer.recurrent_states[index] = conv, recurrent
            layer.conv_kernel_size[index] = self.sizes[index]
            layer.has_previous_state[index] = conv is not None or recurrent is not None
        return layer

    def write(self, layer: RecurrentLayer, rows: Tensor) -> None:
        for target, states in ((layer.conv_states, self.conv), (layer.recurrent_states, self.recurrent)):
            for index, state in enumerate(states):
                if state is not None:
                    target[index] = target[index].index_copy(0, rows, state)


class _Call:
    """One call of a mixer, to be run again over some rows and their first columns."""

    def __init__(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.module, self.args, self.kwargs = module, args, kwargs

    def run(self, states: _States, rows: Tensor, count: int) -> _States:
        cache = next(value for value in [*self.args, *self.kwargs.values()] if isinstance(value, Cache))
        index = self.module.layer_idx
        layer, cache.layers[index] = cache.layers[index], states.layer()

        def cut(value: object) -> object:
            # States [B, T, H] and tokens [B, T].
            if isinstance(value, Tensor) and (value.ndim == 3 or value.dtype == torch.int64):
                return value[rows, :count]
            return value

        try:
            # forward, not __call__: the recording hook must not see the replay.
            self.module.forward(*map(cut, self.args), **{name: cut(value) for name, value in self.kwargs.items()})
            return _States.of(cache.layers[index])
        finally:
            cache.layers[index] = layer


class Cache(TransformersCache):
    """One row-wise cache over all layers. lengths [B]: columns that stand, per row.

    Use: `begin(m)`, run m columns through the model, `keep(counts)` with 0 <= counts[row] <= m.
    """

    def __init__(self, layers: Sequence[_Layer], batch_size: int, *, device: torch.device | str = "cpu") -> None:
        super().__init__(layers=list(layers))
        self.lengths = [0] * batch_size
        self.device = torch.device(device)
        self._window = 0

    @property
    def is_recurrent(self) -> bool:
        return any(isinstance(layer, RecurrentLayer) for layer in self.layers)

    def begin(self, num_columns: int) -> None:
        """Open a window of num_columns provisional columns behind each row's length."""
        assert not self._window, "the last window was not closed with keep()"
        self._window = num_columns
        for layer in self.layers:
            layer.begin(self.lengths, num_columns)

    def keep(self, counts: Sequence[int]) -> None:
        """Close the window: the first counts[row] columns stand, the others never were. Raises RollbackError."""
        assert len(counts) == len(self.lengths)
        assert all(0 <= count <= self._window for count in counts)
        for layer in self.layers:
            layer.keep(counts, self._window)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._window = 0

    def truncate(self, lengths: Sequence[int]) -> None:
        """Drop columns that stood. Raises RollbackError where a layer's state forgot them."""
        counts = [old - new for new, old in zip(lengths, self.lengths, strict=True)]
        assert min(counts) >= 0
        for layer in self.layers if any(counts) else ():
            layer.drop(counts)
        self.lengths = list(lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order."""
        index = torch.tensor(list(rows), device=self.device)
        for layer in self.layers:
            layer.select(index)
        self.lengths = [self.lengths[row] for row in rows]

    def positions(self, num_columns: int) -> Tensor:
        """[B, m] int64: the columns that the next m tokens of each row go to."""
        return torch.tensor(self.lengths, device=self.device)[:, None] + torch.arange(num_columns, device=self.device)

    def mask(self, num_columns: int, *, window: int | None = None, always: bool = False) -> Tensor | None:
        """[B, 1, m, columns] bool, True = may be seen; None where causal attention needs no mask, unless always.

        window: how many columns a sliding layer sees, its own included.
        """
        end = max(self.lengths) + num_columns
        even = len(set(self.lengths)) == 1
        if not always and even and (num_columns == 1 or end == num_columns) and (window is None or end <= window):
            return None
        return causal(self.positions(num_columns), end, window=window)


class Apart(Cache):
    """A cache of its own for each row: for attention that cannot take rows of different lengths in one pass."""

    def __init__(self, rows: Sequence[Cache]) -> None:
        super().__init__([], len(rows))
        self.rows = list(rows)

    def keep(self, counts: Sequence[int]) -> None:
        for row, count in zip(self.rows, counts, strict=True):
            row.keep([count])
        self._measure()

    def truncate(self, lengths: Sequence[int]) -> None:
        for row, length in zip(self.rows, lengths, strict=True):
            row.truncate([length])
        self._measure()

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        self._measure()

    def _measure(self) -> None:
        self.lengths = [row.lengths[0] for row in self.rows]


def causal(queries: Tensor, num_columns: int, *, window: int | None = None) -> Tensor:
    """queries [B, m]: the column each stands in -> [B, 1, m, num_columns] bool, True = may be seen."""
    queries = queries[:, None, :, None]
    columns = torch.arange(num_columns, device=queries.device)
    mask = columns <= queries
    return mask if window is None else mask & (columns > queries - window)
