"""Linear layers that keep the codes of a quantized checkpoint: their weights of 4 to 8 bits stay in its files.

The native backend packs the codes as they are; torch computes the dequantized weight whenever a layer runs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from nextn.checkpoint.gguf_blocks import KQuantWeight
from nextn.checkpoint.gguf_file import K_QUANTS, WITH_MINIMA
from nextn.checkpoint.quantized_weights import Fp8Weight, QuantizedWeight
from nextn.checkpoint.tensors import StoredTensor


@dataclass(frozen=True, eq=False)
class StoredCodes(ABC):
    """A quantized weight [N, K] as it is stored. The file must not change.

    `stand_in` [N, K] is expanded from one element, in the dtype of the layer. It identifies the weight while a pass is
    recorded, and is NaN, so that anything else that is computed from it is noticed.
    """

    stored: StoredTensor
    stand_in: Tensor

    @property
    def name(self) -> str:
        """The stored name."""
        return self.stored.name

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored codes, scales and zero points."""
        return self.stored.weights.num_bytes([self.name])

    @property
    def memory(self) -> Tensor:
        """The one element that the stand-in is expanded from, [1, 1]."""
        return self.stand_in[:1, :1]

    @property
    def matrices(self) -> list["StoredCodes"]:
        return [self]

    def parts(self, weight: Tensor) -> list[list["StoredCodes"]] | None:
        """Return the stored matrix of the stand-in; None if `weight` is a part of it. See `StackedCodes.parts`."""
        return [[self]] if weight.shape == self.stand_in.shape else None

    def scales(self) -> Tensor:
        """Read the scales; all are NaN if a code is NaN."""
        scales = self.stored.weights.checked_scales(self.name)
        self.stored.release()
        return scales

    @abstractmethod
    def dequantize(self) -> Tensor:
        """Return the weight in the dtype of the layer, and release the memory of the file."""

    def __deepcopy__(self, memo: object) -> "StoredCodes":
        return self


@dataclass(frozen=True, eq=False)
class StoredIntegers(StoredCodes):
    """A 4-bit or 8-bit weight, one scale per group."""

    bits: int  # bits per code, 4 or 8
    group_size: int  # input channels per group
    num_groups: int  # groups per output channel
    is_reordered: bool  # whether the input channels of a group are not consecutive
    has_minima: bool = False  # whether groups have a minimum instead of a zero point

    @classmethod
    def of(cls, stored: StoredTensor, stand_in: Tensor) -> "StoredIntegers":
        """Read scales, zero points and group index. Raises CheckpointError if there are no such groups."""
        weight = stored.weights.packed[stored.name]
        if weight.kind:  # GGUF's blocks have neither zero points nor a group index
            has_minima = weight.kind in WITH_MINIMA
            return cls(stored, stand_in, weight.bits, weight.group_size, weight.num_groups, False, has_minima)
        scales, _, index = stored.weights.groups(stored.name)
        stored.release()
        return cls(stored, stand_in, weight.bits, weight.group_size, scales.shape[1], index is not None)

    def integers(self) -> QuantizedWeight:
        """Read the whole weight, and release the memory of the file."""
        weight = self.stored.weights.integers(self.name)
        assert isinstance(weight, QuantizedWeight)
        self.stored.release()
        return weight

    def dequantize(self) -> Tensor:
        return self.integers().dequantize().to(self.stand_in.dtype)


@dataclass(frozen=True, eq=False)
class StoredKQuant(StoredCodes):
    """A weight in superblocks of a K-quant of GGUF."""

    kind: str  # one of `K_QUANTS`

    @classmethod
    def of(cls, stored: StoredTensor, stand_in: Tensor) -> "StoredKQuant":
        return cls(stored, stand_in, stored.weights.packed[stored.name].kind)

    def weight(self) -> KQuantWeight:
        """Read the whole weight, and release the memory of the file."""
        weight = self.stored.weights.integers(self.name)
        assert isinstance(weight, KQuantWeight)
        self.stored.release()
        return weight

    def dequantize(self) -> Tensor:
        return self.weight().dequantize().to(self.stand_in.dtype)


@dataclass(frozen=True, eq=False)
class StoredFp8(StoredCodes):
    """An fp8 weight."""

    block: tuple[int, int]  # output and input channels that share a scale

    @classmethod
    def of(cls, stored: StoredTensor, stand_in: Tensor) -> "StoredFp8":
        return cls(stored, stand_in, stored.weights.fp8_block(stored.name))

    def weight(self) -> Fp8Weight:
        """Map the codes from the file and read the scales. `stored.release` releases the memory."""
        return self.stored.weights.fp8(self.name)

    def dequantize(self) -> Tensor:
        weight = self.stored[...].to(self.stand_in.dtype)
        self.stored.release()
        return weight


def stored_codes(stored: StoredTensor, stand_in: Tensor) -> StoredCodes:
    """Return the codes of a tensor for which `TensorReader.has_codes` is true."""
    packed = stored.weights.packed.get(stored.name)
    if packed is None:
        return StoredFp8.of(stored, stand_in)
    return (StoredKQuant if packed.kind in K_QUANTS else StoredIntegers).of(stored, stand_in)


class PackedLinear(nn.Linear):
    """A linear layer that keeps its codes. It has no parameter `weight`, so only its bias can be trained."""

    def __init__(self, linear: nn.Linear, codes: StoredCodes) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate a weight
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.codes, self.is_recorded = codes, False
        self.train(linear.training)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized weight, or the stand-in while a pass is recorded."""
        return self.codes.stand_in if self.is_recorded else self.codes.dequantize()

    def forward(self, states: Tensor) -> Tensor:
        return functional.linear(states, self.weight.to(states), self.bias)

    def as_linear(self) -> nn.Linear:
        """Return the layer with its weight dequantized."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight, linear.bias = nn.Parameter(self.weight), self.bias
        return linear.train(self.training)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight


class StandIns:
    """Tensors that represent packed weights while a module is loaded."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._stored: dict[int, tuple[StoredTensor, Tensor]] = {}

    def of(self, stored: StoredTensor) -> Tensor:
        """Return a new stand-in."""
        value = torch.full((), torch.nan, dtype=self._dtype)
        self._stored[value.data_ptr()] = stored, value  # kept alive, so that the address is not reused
        return value.expand(stored.shape)

    def lazy(self, stored: StoredTensor) -> "LazyValue":
        """Return a lazy tensor whose value is a new stand-in."""
        return LazyValue(stored.shape, None, partial(self.of, stored))

    def install(self, module: nn.Module) -> set[StoredTensor]:
        """Replace the linear layers whose weight is a stand-in; return the stored tensors of all other stand-ins."""
        others = {stored for stored, _ in self._stored.values()}
        for name, part in [*module.named_modules()]:
            if type(part) is nn.Linear and (found := self._stored.get(part.weight.data_ptr())) is not None:
                module.set_submodule(name, PackedLinear(part, stored_codes(found[0], part.weight.detach())))
                others.remove(found[0])
        return others


@dataclass(frozen=True, eq=False)
class LazyValue:
    """A `LazyTensor` whose value is made, not read."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    make: Callable[[], Tensor]

    def __getitem__(self, key: object) -> Tensor:
        return self.make()

    def release(self) -> None:
        """Do nothing: nothing was read."""


# Read by `[...]`; dtype is that of the result, None where it does not indicate the model's.
LazyTensor = StoredTensor | LazyValue


def packed_layers(*modules: nn.Module) -> Iterator[PackedLinear]:
    """Yield the layers that keep their codes."""
    return (part for module in modules for part in module.modules() if isinstance(part, PackedLinear))
