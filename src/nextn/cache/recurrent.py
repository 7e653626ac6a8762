"""Convolution and recurrent states of a layer, with exact rollback by a replay of the layer's mixer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from nextn.errors import RollbackError


class RecurrentLayer(LinearAttentionLayer):
    """Convolution and recurrent state.

    Neither can be cropped, so a partial acceptance restores the state from before the block and runs the layer's mixer
    again over the accepted positions only: same inputs, no second pass through the trunk. States are replaced, not
    written to, so keeping a reference to the old ones costs nothing; but in steps of one position Mamba writes its
    recurrent state in place, and Ling's delta attention its convolution state, so there they are copied.
    """

    has_blocks = True

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states=number_of_states)
        # Sends one-token steps through update_conv_state; transformers' fused step writes the state in place.
        self.record_past = True
        self._before: _States | None = None
        self._replay: dict[nn.Module, _Call] = {}

    def begin(self, lengths: Sequence[int], num_positions: int) -> None:
        self._before, self._replay = _States.of(self, copy=num_positions == 1), {}

    def record(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Remember the block's mixer call; called by a hook before the mixer runs."""
        if module in self._replay:
            raise RollbackError(f"{type(module).__name__} ran twice in one block; its state cannot be rolled back")
        self._replay[module] = _Call(module, args, kwargs)

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> Tensor:
        size = self.conv_kernel_size[state_idx] = conv_kernel_size or conv_states.shape[-1]
        past = self.conv_states[state_idx]
        if past is None:
            past = conv_states.new_zeros(*conv_states.shape[:-1], size)
        full = torch.cat([past, conv_states], dim=-1)
        # Of a long block, a copy: a view would keep all of it.
        self.conv_states[state_idx] = full[..., -size:].clone() if full.shape[-1] > 2 * size else full[..., -size:]
        self.is_conv_states_initialized[state_idx] = self.has_previous_state[state_idx] = True
        self.dtype, self.device = conv_states.dtype, conv_states.device
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = self.has_previous_state[state_idx] = True
        return recurrent_states

    def commit(self, counts: Sequence[int], num_positions: int) -> None:
        for count in sorted({count for count in counts if count < num_positions}):
            sequences = [seq for seq, num_accepted in enumerate(counts) if num_accepted == count]
            self._restore(torch.tensor(sequences, device=self.device), count)
        self._before, self._replay = None, {}

    @property
    def num_bytes(self) -> int:
        return sum(per_sequence * len(state) for per_sequence, state in self._sizes())

    @property
    def bytes_per_position(self) -> int:
        return 0

    @property
    def bytes_per_state(self) -> int:
        return sum(per_sequence for per_sequence, _ in self._sizes())

    def _sizes(self) -> list[tuple[int, Tensor]]:
        """The bytes per sequence of each state, and the state.

        Twice its size, before and after an open block; a convolution's may be a view of a tensor twice as large.
        """
        pairs = (4, self.conv_states), (2, self.recurrent_states)
        return [
            (count * state[0].nbytes, state)
            for count, states in pairs
            for state in states.values()
            if state is not None
        ]

    def _restore(self, sequences: Tensor, count: int) -> None:
        if self._before is None or not self._replay:
            raise RollbackError("a recurrent layer's inputs were not recorded; its state cannot be rolled back")
        states = self._before.select(sequences)
        if count:
            for call in self._replay.values():
                states = call.run(states, sequences, count)
        elif not states.known:
            raise RollbackError("a sequence cannot commit 0 positions of its first block: it has no earlier state")
        states.write(self, sequences)

    def drop(self, counts: Sequence[int]) -> None:
        raise RollbackError("recurrent state cannot be cropped; commit fewer positions of the last block instead")

    def read_block(self, start: int, end: int) -> tuple[Tensor, ...]:
        """Copy the states after the last committed position, with an empty tensor for each missing state."""
        states = [*self.conv_states.values(), *self.recurrent_states.values()]
        return tuple(torch.empty(0) if state is None else state.clone() for state in states)

    def write_block(self, start: int, block: tuple[Tensor, ...]) -> None:
        """Set copies of these states: some mixers write in place."""
        conv, recurrent = block[: self.number_of_states], block[self.number_of_states :]
        for index, state in enumerate(conv):
            if state.numel():
                self.update_conv_state(state[..., :0], index, state.shape[-1])  # creates an empty state
                self.conv_states[index] = state.clone()
        for index, state in enumerate(recurrent):
            if state.numel():
                self.update_recurrent_state(state.clone(), index)

    def select(self, sequences: Tensor) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                states[index] = None if state is None else state[sequences]

    def append(self, other: "RecurrentLayer", counts: tuple[int, int]) -> None:
        pairs = ((self.conv_states, other.conv_states), (self.recurrent_states, other.recurrent_states))
        for states, others in pairs:
            for index, state in states.items():
                if state is not None:
                    states[index] = torch.cat([state, others[index]])


@dataclass(frozen=True, eq=False)
class _States:
    """A snapshot of the states of one recurrent layer."""

    conv: list[Tensor | None]
    recurrent: list[Tensor | None]
    sizes: list[int | None]

    @classmethod
    def of(cls, layer: LinearAttentionLayer, *, copy: bool = False) -> "_States":
        conv, recurrent = (
            [state.clone() if copy and state is not None else state for state in states.values()]
            for states in (layer.conv_states, layer.recurrent_states)
        )
        return cls(conv, recurrent, list(layer.conv_kernel_size.values()))

    @property
    def known(self) -> bool:
        return any(state is not None for state in [*self.conv, *self.recurrent])

    def select(self, sequences: Tensor) -> "_States":
        conv, recurrent = (
            [None if state is None else state[sequences] for state in states] for states in (self.conv, self.recurrent)
        )
        return _States(conv, recurrent, self.sizes)

    def layer(self) -> RecurrentLayer:
        layer = RecurrentLayer(len(self.conv))
        for index, (conv, recurrent) in enumerate(zip(self.conv, self.recurrent, strict=True)):
            layer.conv_states[index], layer.recurrent_states[index] = conv, recurrent
            layer.conv_kernel_size[index] = self.sizes[index]
            layer.has_previous_state[index] = conv is not None or recurrent is not None
        return layer

    def write(self, layer: RecurrentLayer, sequences: Tensor) -> None:
        for target, states in ((layer.conv_states, self.conv), (layer.recurrent_states, self.recurrent)):
            for index, state in enumerate(states):
                if state is not None:
                    target[index] = target[index].index_copy(0, sequences, state)


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a mixer, to be run again over some sequences and their first positions."""

    module: nn.Module
    args: tuple[object, ...]
    kwargs: dict[str, object]

    def run(self, states: _States, sequences: Tensor, count: int) -> _States:
        cache = next(value for value in [*self.args, *self.kwargs.values()] if isinstance(value, Cache))
        index = self.module.layer_idx
        layer, cache.layers[index] = cache.layers[index], states.layer()

        def prefix(value: object) -> object:
            # States [B, T, H] and tokens [B, T].
            if isinstance(value, Tensor) and (value.ndim == 3 or value.dtype == torch.int64):
                return value[sequences, :count]
            return value

        try:
            # forward, not __call__: the recording hook must not see the replay.
            self.module.forward(*map(prefix, self.args), **{name: prefix(value) for name, value in self.kwargs.items()})
            return _States.of(cache.layers[index])
        finally:
            cache.layers[index] = layer
