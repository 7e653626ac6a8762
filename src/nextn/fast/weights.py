"""Packed weights, one copy for all replays."""

from torch import Tensor

from nextn.fast.native import Runtime
from nextn.fast.pages import Pages


class Weights:
    """Packed weights by the tensor that they were made from, shared by all replays."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._pages = runtime, Pages()
        self._packed: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def pack(self, weight: Tensor) -> Tensor:
        """weight [N, K], or [E, N, K] of experts."""
        key = (weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
        if key not in self._packed:
            self._packed[key] = self._runtime.pack(weight, self._pages.take), weight
        return self._packed[key][0]
