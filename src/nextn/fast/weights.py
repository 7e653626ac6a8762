"""Packed weights, one copy for all replays."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nextn.fast import quantized
from nextn.fast.native import BYTES, Runtime
from nextn.fast.packing import Packed, joined
from nextn.fast.pages import Pages
from nextn.fast.structures import type_of

_TELLING = 16  # values that tell most weights apart


class Weights:
    """Packed weights by the tensors that they were made from, shared by all replays.

    What a model makes of its weights as it runs (a router's in float32, some rows of an output head) is another tensor
    in each recording, so those are told by their values.
    """

    def __init__(self, runtime: Runtime, *, rounds: bool = False) -> None:
        """rounds: bf16 weights to seven bits, see `quantized`."""
        self._runtime, self._pages, self._rounds = runtime, Pages(), rounds
        self._packed: dict[tuple[object, ...], Packed] = {}
        # weights that begin alike, and packed
        self._alike: dict[tuple[object, ...], list[tuple[list[Tensor], Packed]]] = {}

    def pack(self, weights: Sequence[Tensor], parts: int = 1, columns: int | None = None) -> Packed:
        """weights [N, K], or [E, N, K] of experts, see `joined`; not written into from now on."""
        place = (parts, columns, *((each.data_ptr(), each.shape, each.stride(), each.dtype) for each in weights))
        if place not in self._packed:
            begins = [tuple(each[(0,) * (each.ndim - 1)][:_TELLING].tolist()) for each in weights]
            shapes = [(each.shape, each.dtype) for each in weights]
            alike = self._alike.setdefault((parts, columns, *shapes, *begins), [])
            for known, packed in alike:
                if all(map(torch.equal, known, weights)):
                    return packed  # not noted by its place, which the next recording may give to another one
            columns = columns or self._runtime.block_columns(self._kind(weights[0]))
            self._packed[place] = self._made(joined(weights, parts, columns))
            alike.append((list(weights), self._packed[place]))  # kept alive: its place stays its own
        return self._packed[place]

    def _made(self, weight: Tensor) -> Packed:
        kind, take = self._kind(weight), self._pages.take
        return Packed(quantized.packed(weight, take) if kind == BYTES else self._runtime.pack(weight, take), kind)

    def _kind(self, weight: Tensor) -> int:
        return BYTES if self._rounds and weight.dtype == torch.bfloat16 else type_of(weight.dtype)
