"""A cache layer for attention with short convolutions (Inkling): keys, values, and the convolutions' last inputs.

A convolution's state is its last inputs and nothing else, so it can be moved back as far as inputs are held.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from nextn.errors import RollbackError
from nextn.rollback import AttentionLayer


class ConvolutionLayer(AttentionLayer, LinearAttentionLayer):
    """States [B, C, inputs], the newest last. spare: columns that `drop` can take back, by as many more inputs held."""

    conv_states: dict[int, Tensor | None]

    def __init__(self, number_of_states: int, *, spare: int = 0) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        AttentionLayer.__init__(self)
        self.record_past = True  # sends one-token steps through update_conv_state, too
        self._spare = spare
        self._known: list[int] = []

    def begin(self, lengths: Sequence[int], num_columns: int) -> None:
        super().begin(lengths, num_columns)
        self._known = self._known or [0] * len(lengths)

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> Tensor:
        """conv_states [B, C, m] -> with the kernel's past before it. Before a text there are zeros."""
        past = self.conv_states[state_idx]
        if past is None:
            past = conv_states.new_zeros(*conv_states.shape[:2], int(conv_kernel_size or 0) + self._spare)
        states = self.conv_states[state_idx] = torch.cat([past, conv_states], dim=-1)
        self.has_previous_state[state_idx] = True
        return states[..., self._spare :]

    def keep(self, counts: Sequence[int], num_columns: int) -> None:
        self._move(counts, num_columns)
        self._known = [min(known + count, self._spare) for known, count in zip(self._known, counts, strict=True)]

    def drop(self, counts: Sequence[int]) -> None:
        if any(count > known for count, known in zip(counts, self._known, strict=True)):
            raise RollbackError(
                f"{max(counts)} columns cannot be dropped: the convolutions' inputs are held for {self._spare}; "
                "use fewer drafts"
            )
        self._move([-count for count in counts], 0)
        self._known = [known - count for known, count in zip(self._known, counts, strict=True)]

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self._known = [self._known[row] for row in rows.tolist()]
        self.conv_states = {index: None if state is None else state[rows] for index, state in self.conv_states.items()}

    def _move(self, counts: Sequence[int], num_columns: int) -> None:
        """Let each row's inputs end counts[row] columns later than before the window of num_columns."""
        for index, state in self.conv_states.items():
            if state is not None:
                width = state.shape[-1] - num_columns
                ends = torch.tensor(counts, device=state.device)[:, None] + torch.arange(width, device=state.device)
                # What falls out on the left comes back as anything: it lies beyond what `drop` allows.
                places = ends.clamp(min=0)[:, None].expand(-1, state.shape[1], -1)
                self.conv_states[index] = state.gather(-1, places)
