"""Read a checkpoint's tensors on demand as torch tensors; quantized weights are dequantized with their scales."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import Any, cast

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from nextn.checkpoint.gguf_blocks import KQuantWeight, block_scales, take_apart
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.mapped_memory import release_pages
from nextn.checkpoint.packed_layout import with_logical_weights
from nextn.checkpoint.quantization import declared, scale_of, scale_shape, split_name, stored_modules
from nextn.checkpoint.quantized_weights import (
    FP8_SCALES,
    FP8_WEIGHT,
    Fp8Weight,
    Groups,
    QuantizedWeight,
    declared_block,
    dequantize_fp8,
    implied_block,
    unpack,
    unpack_groups,
)
from nextn.checkpoint.remote import LocalFile
from nextn.checkpoint.safetensors_file import TensorInfo
from nextn.checkpoint.snapshot import PartialFile
from nextn.errors import CheckpointError

READABLE = "bf16, fp16, fp32, fp8 with scales, NVFP4, GPTQ, AWQ, and compressed-tensors' integers of 4 or 8 bits"
# Storage of a checkpoint `with_logical_weights` that needs no other program; "unknown" is of a wrong dtype.
_READABLE = ("plain", "fp8-block", "fp8-tensor", "fp8-bare", "mxfp8", "unknown")
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
# Scales of activations: unused where products are not computed in fp8.
ACTIVATIONS = (
    "input_scale", "input_global_scale", "input_zero_point", "activation_scale", "output_scale", "k_scale", "v_scale",
    "q_scale",
)  # fmt: skip
_STORED = FLOATS | {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_INTEGERS = ("I32", "I64")
_FETCH = 1024 * 1024  # bytes that are read ahead between calls of `should_stop`
_INFINITIES = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # bits
_PLAIN = {*FLOATS, FP8_WEIGHT, "I64", "BOOL"}  # dtypes of tensors that need no quantization method


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One tensor, read by `stored[...]`. `dtype` is that of the result; None if it is stored quantized."""

    weights: "TensorReader"
    name: str
    dtype: torch.dtype | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weights.checkpoint.info(self.name).shape

    def __getitem__(self, key: object) -> Tensor:
        return self.weights.read(self.name)

    def release(self) -> None:
        """Release the memory of its part of the mapped file; values that were read stay valid."""
        self.weights.release(self.name)


class TensorReader(AbstractContextManager["TensorReader"]):
    """The tensors of a checkpoint whose files are local, or downloaded in part; they stay open until the context ends.

    Attributes:
        inventory: The checkpoint's, in which each weight that is stored as several tensors is one, as in `checkpoint`.
        packed: Weights of four to eight bits by name.
        scales: fp8 weight -> the tensor with its scales.
        method: The config's quantization method; "" if not quantized.
    """

    def __init__(self, inventory: Inventory) -> None:
        self._stored = inventory.checkpoint.tensors
        self.checkpoint, self.packed = with_logical_weights(inventory.checkpoint)
        logical = Inventory.of(self.checkpoint, family=inventory.family) if self.packed else inventory
        self.inventory = replace(logical, declared=inventory.declared)  # which a separate head's config may lack
        section = declared(self.checkpoint.config)
        unnamed = "mlx" if "group_size" in section else "an unnamed method"
        self.method = str(section.get("quant_method", unnamed)) if section else ""
        self._block = declared_block(section, inventory.family)
        tensors = self.checkpoint.tensors
        scales = {name: scale_of(name, tensors) for name, info in tensors.items() if info.dtype == FP8_WEIGHT}
        self.scales = {name: scale for name, scale in scales.items() if scale is not None}
        self._orders = {n for each, n in inventory.stored.items() if inventory.role(each) in inventory.family.orders}
        self._stack, self._files = ExitStack(), dict[str, safe_open]()
        self._views = dict[str, Tensor]()  # that were read, and not released

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; tensors that were read stay valid, and the next one opens its file again."""
        self._views.clear()
        self._stack.close()
        self._files.clear()

    def names(self) -> list[str]:
        """Return all tensors except scales of weights and activations."""
        scales = set(self.scales.values())
        return [name for name in self.checkpoint.tensors if name not in scales and not is_activation_scale(name)]

    def problem(self, name: str) -> str | None:
        """Return why a tensor of the head or a matrix, norm or bias cannot be read as numbers; None if it can."""
        if name in self.packed:
            return self.packed[name].problem
        info = self.checkpoint.info(name)
        if is_torchao(name):
            return (
                f"packed by torchao: {name}; valid are {', '.join(FLOATS)}: restore the head of the unquantized model"
            )
        if info.dtype in FLOATS or (info.dtype in _INTEGERS and name in self._orders):
            return None
        if info.dtype != FP8_WEIGHT:
            return f"wrong dtype: {name} is {info.dtype}; valid are {', '.join(FLOATS)}, and {FP8_WEIGHT} with scales"
        if name not in self.scales:
            return f"without its scales: {name} is {info.dtype}, and there is no {name}_scale_inv"
        scale = self.checkpoint.info(self.scales[name])
        if scale.dtype not in FP8_SCALES:
            return f"wrong dtype: {scale.name} is {scale.dtype}; valid for scales are {', '.join(FP8_SCALES)}"
        if implied_block(info.shape, scale.shape, self._block) is None:
            expected = scale_shape(info.shape, self._block) if len(info.shape) > 1 else ()
            where = f"{info.shape} in blocks of {self._block}"
            return f"mis-shaped: {scale.name} {scale.shape}, expected {expected} for {where}"
        return None

    def unreadable(self, names: Iterable[str]) -> str | None:
        """Return the first tensor that only its quantization method can read; None if there is none.

        Raises CheckpointError for one of a checkpoint that names no method: its codes would be taken for values.
        """
        tensors = self.checkpoint.tensors
        stored = [name for name in names if name in tensors]  # a head's copy may take the place of the others
        found = [name for name in stored if tensors[name].dtype not in _PLAIN or is_torchao(name)]
        weights = [name for name in found if name.endswith(".weight")]
        if weights and not self.method:
            raise CheckpointError(
                f"{self.checkpoint.path}: {weights[0]} is {tensors[weights[0]].dtype}, and config.json names no "
                "quant_method that says how to read it. Add the quantization config of its release, or load the "
                "model that was quantized"
            )
        return found[0] if found and self.method else None

    def packed_otherwise(self, names: Iterable[str]) -> dict[str, tuple[str, str]]:
        """Return those of these tensors whose module is stored in a way that `READABLE` lacks -> module and storage."""
        tensors = self.checkpoint.tensors
        stored = {name: tensors[name] for name in names}
        kinds = {module: kind for module, kind in stored_modules(stored) if kind not in _READABLE}
        modules = {name: split_name(name, stored)[0] for name in stored}
        return {name: (module, kinds[module]) for name, module in modules.items() if module in kinds}

    def stored(self, name: str) -> StoredTensor:
        dtype = None if name in self.packed else FLOATS.get(self.checkpoint.info(name).dtype)
        return StoredTensor(self, name, dtype)

    def is_quantized(self, name: str) -> bool:
        """Whether `read` dequantizes the tensor."""
        if name in self.packed or self.checkpoint.info(name).dtype != FP8_WEIGHT or is_torchao(name):
            return name in self.packed
        return split_name(name, self.checkpoint.tensors)[1] in ("", ".weight")  # not scales in fp8, as of NVFP4

    def has_codes(self, name: str) -> bool:
        """Return whether the tensor is a quantized weight [N, K] that `integers` or `fp8` can read."""
        info = self.checkpoint.info(name)
        return name in self.packed or (info.dtype == FP8_WEIGHT and len(info.shape) == 2)

    def integers(self, name: str) -> QuantizedWeight | KQuantWeight:
        """Read a `packed` weight without a `problem` as integers."""
        return self._integers(name, self._raw)

    def checked_scales(self, name: str) -> Tensor:
        """Read the scales of a weight for which `has_codes` is true; all are NaN if an fp8 code is NaN."""
        if (packed := self.packed.get(name)) is not None:
            if not packed.kind:
                return self.groups(name).scales
            return block_scales(self._raw(packed.parts["codes"].name), packed.kind)
        scales = self.fp8_scales(name)
        return scales if is_finite(self._raw(name)) else torch.full_like(scales, torch.nan)

    def groups(self, name: str) -> Groups:
        """Read what `integers` does, without the codes, of a weight that is not in GGUF's blocks."""
        return unpack_groups(self.packed[name], self._raw)

    def fp8_block(self, name: str) -> tuple[int, int]:
        """Return how many output and input channels of a valid fp8 weight [N, K] share a scale; see `problem`."""
        rows, columns = self.checkpoint.info(name).shape
        scale = self.checkpoint.info(self.scales[name]).shape
        block = implied_block((rows, columns), scale, self._block)
        assert block is not None, name
        return (rows, columns) if prod(scale) == 1 else block

    def fp8_scales(self, name: str) -> Tensor:
        """Read the scales of an fp8 weight [N, K] as float32, one per `fp8_block`."""
        scale = self._raw(self.scales[name])
        scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
        return scale.float().view(scale_shape(self.checkpoint.info(name).shape, self.fp8_block(name)))

    def fp8(self, name: str) -> Fp8Weight:
        """Read the codes and scales of a valid fp8 weight [N, K]; see `problem`."""
        return Fp8Weight(self._raw(name), self.fp8_scales(name), self.fp8_block(name))

    def read(self, name: str) -> Tensor:
        """Read a tensor without a `problem` as stored; a quantized weight as fp32, times its scales."""
        return self._read(name, self._raw)

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a tensor as `read` does, into a contiguous tensor on the host, cast to its dtype.

        The file is not mapped and no state changes, so a thread may do this while others read and release tensors.
        """
        if not self.is_quantized(name) and FLOATS.get(self._stored[name].dtype) is out.dtype:
            self._copy(self._stored[name], out)
        else:
            out.copy_(self._read(name, self._unmapped))

    def _read(self, name: str, raw: Callable[[str], Tensor]) -> Tensor:
        if name in self.packed:
            return self._integers(name, raw).dequantize()
        value = raw(name)
        if name not in self.scales:
            return value
        scale = raw(self.scales[name])
        block = implied_block(value.shape, scale.shape, self._block)
        assert block is not None, name
        return dequantize_fp8(value, scale, block)

    def _integers(self, name: str, raw: Callable[[str], Tensor]) -> QuantizedWeight | KQuantWeight:
        packed = self.packed[name]
        return take_apart(raw(packed.parts["codes"].name), packed.kind) if packed.kind else unpack(packed, raw)

    def release(self, name: str) -> None:
        """Release the memory of a tensor's part of the mapped file, and of its scales'."""
        # Not views made for this: making one reads a page, and the kernel maps those around it, of other tensors.
        views = [self._views.pop(info.name, None) for info in self._infos([name])]
        release_pages(view for view in views if view is not None)

    def fetch(self, names: Iterable[str], should_stop: Callable[[], bool] = lambda: False) -> int:
        """Ask the kernel to read the bytes of these tensors and their scales into the page cache; return how many.

        should_stop: Asked after every few megabytes.
        """
        infos = sorted(self._infos(names), key=lambda info: (info.file, info.begin))
        self.download(names, should_stop)
        for info in infos:
            if isinstance(source := self.checkpoint.sources[info.file], LocalFile):
                for begin in range(info.begin, info.end, _FETCH):
                    if should_stop():
                        break
                    source.read_ahead(begin, min(begin + _FETCH, info.end))
        return sum(info.nbytes for info in infos)

    def download(self, names: Iterable[str], should_stop: Callable[[], bool] = lambda: False) -> None:
        """Download these tensors and their scales, if they are on a hub; `read` does so one by one.

        should_stop: Asked before each request.
        """
        for source, ranges in self._partial(names):
            source.fetch(ranges, should_stop)

    def forget(self, names: Iterable[str]) -> None:
        """Free the disk space of these tensors and their scales, if they were downloaded."""
        for source, ranges in self._partial(names):
            source.forget(ranges)

    def num_bytes(self, names: Iterable[str]) -> int:
        """Return how many bytes `fetch` reads."""
        return sum(info.nbytes for info in self._infos(names))

    def files(self, names: Iterable[str]) -> set[str]:
        """Return the files with these tensors and their scales."""
        return {info.file for info in self._infos(names)}

    def check_unchanged(self, names: Iterable[str]) -> None:
        """Raise CheckpointError if a file of these tensors changed: reading a truncated one would end the process."""
        for file in sorted(self.files(names)):
            source = self.checkpoint.sources[file]
            if isinstance(source, LocalFile) and source.has_changed():
                raise CheckpointError(f"{source}: the file changed while it was in use. Run again on complete files.")

    def non_finite(self, name: str) -> str:
        """Return `name`, or the name of its scales if those are not finite."""
        if name in self.packed:
            parts = self.packed[name].parts
            return parts["scales" if "scales" in parts else "codes"].name
        scale = self.scales.get(name)
        return name if scale is None or is_finite(self._raw(scale)) else scale

    def _partial(self, names: Iterable[str]) -> Iterator[tuple[PartialFile, list[tuple[int, int]]]]:
        """Files that are downloaded in part, with the ranges of these tensors."""
        for file, group in groupby(sorted(self._infos(names), key=attrgetter("file")), key=attrgetter("file")):
            if isinstance(source := self.checkpoint.sources[file], PartialFile):
                yield source, [(info.begin, info.end) for info in group]

    def _infos(self, names: Iterable[str]) -> list[TensorInfo]:
        return [info for name in names for info in self._parts(name)]

    def _parts(self, name: str) -> list[TensorInfo]:
        if name in self.packed:
            return list(self.packed[name].parts.values())
        return [self._stored[stored] for stored in (name, self.scales.get(name)) if stored]

    def _raw(self, name: str) -> Tensor:
        info = self._stored[name]
        file, source = info.file, self.checkpoint.sources[info.file]
        if isinstance(source, PartialFile):
            source.fetch([(info.begin, info.end)])
        if file not in self._files:
            if not isinstance(source, LocalFile | PartialFile):
                raise CheckpointError(f"{source}: not a local file. Download it first.")
            self._files[file] = self._stack.enter_context(safe_open(source.path, framework="pt"))
        view: Tensor = self._files[file].get_tensor(self.checkpoint.stored_names.get(name, name))
        self._views[name] = view
        return view

    def _unmapped(self, name: str) -> Tensor:
        info = self._stored[name]
        value = torch.empty(info.shape, dtype=_STORED[info.dtype])
        self._copy(info, value)
        return value

    def _copy(self, info: TensorInfo, out: Tensor) -> None:
        source = self.checkpoint.sources[info.file]
        if isinstance(source, PartialFile):
            source.fetch([(info.begin, info.end)])
            source = LocalFile(source.path, source.name)
        if not isinstance(source, LocalFile):
            raise CheckpointError(f"{source}: not a local file. Download it first.")
        if info.nbytes != out.nbytes:
            raise CheckpointError(f"{source}: {info.name} has {info.shape}, expected {tuple(out.shape)}")
        source.read_into(info.begin, memoryview(cast(Any, out.view(-1).view(torch.uint8).numpy())))


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor in host memory, as files have them."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def is_finite(tensor: Tensor) -> bool:
    """Whether no value of a floating-point tensor is NaN or infinite.

    The extremes are enough, as they are NaN if any value is; `torch.isfinite` makes a mask and takes 50 times as long.
    """
    if tensor.numel() == 0:
        return True
    if hasattr(tensor, "__tensor_flatten__"):  # a tensor made of others: packed codes and their scales, a shard
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return all(is_finite(part) for part in parts if part.is_floating_point())
    if (infinity := _INFINITIES.get(tensor.dtype)) is not None and tensor.device.type == "cpu":
        # Compare bits, without a conversion: for either sign, values that are not finite sort after all finite ones.
        bits = tensor.detach().view(torch.int16).numpy()
        return bool(bits.max() < infinity and bits.view(np.uint16).max() < infinity | 0x8000)
    extremes = tensor if tensor.itemsize == 1 else torch.stack(tensor.aminmax())  # float8 has no aminmax
    return bool(torch.isfinite(extremes.float()).all())


def is_torchao(name: str) -> bool:
    """Whether it is a part of a weight that torchao packed, which only transformers reads."""
    return "._weight_" in name


def is_activation_scale(name: str) -> bool:
    return name.rpartition(".")[2] in ACTIVATIONS
