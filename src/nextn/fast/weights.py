"""Packed weights, one copy for all replays."""

import torch
from torch import Tensor

from nextn.fast import quantized
from nextn.fast.lower import Packed
from nextn.fast.native import BYTES, Runtime, type_of
from nextn.fast.pages import Pages

_TELLING = 16  # values that tell most weights apart


class Weights:
    """Packed weights by the tensor that they were made from, shared by all replays.

    What a model makes of its weights as it runs (a router's in float32, some rows of an output head) is another tensor
    in each recording, so those are told by their values.
    """

    def __init__(self, runtime: Runtime, *, rounds: bool = False) -> None:
        """rounds: bf16 weights to seven bits, see `quantized`."""
        self._runtime, self._pages, self._rounds = runtime, Pages(), rounds
        self._packed: dict[tuple[object, ...], Packed] = {}
        self._alike: dict[tuple[object, ...], list[tuple[Tensor, Packed]]] = {}  # weights that begin alike, and packed

    def pack(self, weight: Tensor) -> Packed:
        """weight [N, K], or [E, N, K] of experts; not written into from now on."""
        place = (weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
        if place not in self._packed:
            begin = weight[(0,) * (weight.ndim - 1)][:_TELLING].tolist()
            alike = self._alike.setdefault((weight.shape, weight.dtype, *begin), [])
            for known, packed in alike:
                if torch.equal(known, weight):
                    return packed  # not noted by its place, which the next recording may give to another one
            self._packed[place] = self._made(weight)
            alike.append((weight, self._packed[place]))  # kept alive: its place stays its own
        return self._packed[place]

    def _made(self, weight: Tensor) -> Packed:
        if self._rounds and weight.dtype == torch.bfloat16:
            return Packed(quantized.packed(weight, self._pages.take), BYTES)
        return Packed(self._runtime.pack(weight, self._pages.take), type_of(weight.dtype))
