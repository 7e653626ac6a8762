"""The tensors of a checkpoint on this disk, as torch tensors: read when asked for, fp8 multiplied by its scales.

Knows dtypes, scales and bytes; not what a tensor is for.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from nextn.checkpoints import fp8
from nextn.checkpoints.checkpoint import Checkpoint
from nextn.checkpoints.quantisation import declared
from nextn.checkpoints.remote import LocalFile
from nextn.checkpoints.storage import scale_of
from nextn.errors import CheckpointError
from nextn.families import Family

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
# How activations were scaled: of no use where products are not computed in fp8.
ACTIVATIONS = ("input_scale", "activation_scale", "output_scale", "k_scale", "v_scale", "q_scale")
_PLAIN = {*FLOATS, fp8.WEIGHT, "I64", "BOOL"}  # what a tensor that is no quantised matrix may be


@dataclass(frozen=True, eq=False)
class Stored:
    """One tensor, read at `stored[...]`; dtype is what comes out, None where that is not a plain floating dtype."""

    weights: "Weights"
    name: str
    dtype: torch.dtype | None

    def __getitem__(self, key: object) -> Tensor:
        return self.weights.read(self.name)


class Weights(AbstractContextManager["Weights"]):
    """The tensors of `checkpoint`, whose files lie on this disk and stay open until `close`.

    scales: fp8 weight -> the tensor that holds its scales. method: how the config says it is quantised; "" = not.
    """

    def __init__(self, checkpoint: Checkpoint, family: Family) -> None:
        self.checkpoint = checkpoint
        section = declared(checkpoint.config)
        self.method = str(section.get("quant_method", "an unnamed method")) if section else ""
        self._block = fp8.declared_block(section, family)
        tensors = checkpoint.tensors
        found = {name: scale_of(name, tensors) for name, info in tensors.items() if info.dtype == fp8.WEIGHT}
        self.scales = {name: scale for name, scale in found.items() if scale is not None}
        self._stack, self._files = ExitStack(), dict[str, safe_open]()

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._files.clear()

    def names(self) -> list[str]:
        """All tensors but those that belong to another: scales of weights and of activations."""
        beside = set(self.scales.values())
        return [name for name in self.checkpoint.tensors if name not in beside and not is_activation_scale(name)]

    def problem(self, name: str) -> str | None:
        """Why a matrix, norm or bias cannot be read as floating numbers; None if it can."""
        info = self.checkpoint.info(name)
        if info.dtype in FLOATS:
            return None
        if info.dtype != fp8.WEIGHT:
            return (
                f"wrong dtype: {name} is {info.dtype}; read are {', '.join(FLOATS)}, and {fp8.WEIGHT} with its scales"
            )
        if name not in self.scales:
            return f"without its scales: {name} is {info.dtype}, and there is no {name}_scale_inv"
        scale = self.checkpoint.info(self.scales[name])
        if scale.dtype not in fp8.SCALES:
            return f"wrong dtype: {scale.name} is {scale.dtype}; scales are {', '.join(fp8.SCALES)}"
        if fp8.block_of(info.shape, scale.shape, self._block) is None:
            want = fp8.grid(info.shape, self._block) if len(info.shape) > 1 else ()
            return (
                f"mis-shaped: {scale.name} {scale.shape}, expected {want} for {info.shape} in blocks of {self._block}"
            )
        return None

    def packed(self, names: Iterable[str]) -> str | None:
        """The first tensor of a kind that only the method which quantised it can read; None if there is none."""
        return next((name for name in names if self.checkpoint.tensors[name].dtype not in _PLAIN), None)

    def stored(self, name: str) -> Stored:
        return Stored(self, name, FLOATS.get(self.checkpoint.info(name).dtype))

    def read(self, name: str) -> Tensor:
        """The tensor as stored; an fp8 weight as fp32, times its scales. Not for one that has a `problem`."""
        value = self._raw(name)
        if name not in self.scales:
            return value
        scale = self._raw(self.scales[name])
        block = fp8.block_of(value.shape, scale.shape, self._block)
        assert block is not None, name
        return fp8.dequantise(value, scale, block)

    def non_finite(self, name: str) -> str:
        """`name`, or its scales if the fault is theirs."""
        scale = self.scales.get(name)
        return name if scale is None or bool(torch.isfinite(self._raw(scale).float()).all()) else scale

    def _raw(self, name: str) -> Tensor:
        file = self.checkpoint.info(name).file
        if file not in self._files:
            source = self.checkpoint.sources[file]
            if not isinstance(source, LocalFile):
                raise CheckpointError(f"{source}: not on this disk. Download it first.")
            self._files[file] = self._stack.enter_context(safe_open(source.path, framework="pt"))
        return self._files[file].get_tensor(name)


def is_activation_scale(name: str) -> bool:
    return name.rpartition(".")[2] in ACTIVATIONS
