"""The C interface of the native runtime (csrc/) through ctypes: structures, programs and single ops.

It knows no model: tensors are passed as views and ops by name. csrc/layout.cpp lists the same structures.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from nextn.checkpoint.mapped_memory import slices_released_after_use
from nextn.errors import ConfigError
from nextn.runtime.native import LOCK
from nextn.runtime.native.build import BuildStatus, build_library, cache_folder, status_of
from nextn.runtime.native.memory import HugePages, rows_per_slice

_SOURCES = Path(__file__).parent / "csrc"
_NO_TILES = "the operating system does not grant this process the AMX tile registers that the native runtime needs"
# Types of product.h: packed weights of 7 bits; in groups of 4 and 8 bits and in fp8, one type per group size; then
# K-quants, of 4 bits and of 5 and 6; then groups of 4 bits with minima, and of 8; then fp8 of a model in float32.
BYTES, INT4, INT8, FP8, Q4_K, INT4_MINIMA, FP8_FLOATS = 4, 6, 9, 12, 15, 18, 21
_MAX_DIMS = 6
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int64: 2, torch.bool: 3}
_INT, _REAL, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_ARRAY = _INT * _MAX_DIMS
_LETTERS = {_INT: "i", _REAL: "d", _POINTER: "p", _ARRAY: "a"}


def type_of(dtype: torch.dtype) -> int:
    """Return the `Type` of runtime.h; -1 for a dtype that no kernel supports."""
    return _TYPES.get(dtype, -1)


class View(ctypes.Structure):
    """`View` of runtime.h. Sizes and strides count elements."""

    _fields_ = (("data", _POINTER), ("type", _INT), ("ndim", _INT), ("size", _ARRAY), ("stride", _ARRAY))

    @classmethod
    def of(cls, tensor: Tensor) -> "View | None":
        """Return a view of the tensor; None for a dtype or number of dims that no kernel supports."""
        if tensor.dtype not in _TYPES or tensor.ndim > _MAX_DIMS:
            return None
        pad = (0,) * (_MAX_DIMS - tensor.ndim)
        sizes = _ARRAY(*tensor.shape, *pad)
        strides = _ARRAY(*tensor.stride(), *pad)
        return cls(tensor.data_ptr(), _TYPES[tensor.dtype], tensor.ndim, sizes, strides)


def _fields(field_type: type, *names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, field_type) for name in names)


class HeadOutputStruct(ctypes.Structure):
    """`HeadOutput` of chain.h."""

    _fields_ = (("logits", _POINTER), ("type", _INT), *_fields(_POINTER, "best", "confidence"))


class PendingStruct(ctypes.Structure):
    """`Pending` of chain.h."""

    _fields_ = (
        *_fields(_INT, "batch_size", "capacity", "state_bytes"),
        *_fields(_POINTER, "counts", "starts", "tokens", "states"),
    )


class RefreshStruct(ctypes.Structure):
    """`Refresh` of chain.h."""

    _fields_ = (("program", _POINTER), ("size", _INT), *_fields(_POINTER, "tokens", "starts", "states"))


class ChainStruct(ctypes.Structure):
    """`Chain` of chain.h."""

    _fields_ = (
        *_fields(_INT, "batch_size", "vocab_size", "max_speculative_tokens", "mode"),
        *_fields(_REAL, "temperature", "top_p", "min_p"),
        *_fields(_INT, "top_k", "num_bins"),
        *_fields(_POINTER, "edges", "table", "take", "go", "limits", "uniforms", "next_tokens"),
        ("num_steps", _INT),
        *_fields(_POINTER, "drafts", "num_draft_tokens", "num_confidences", "confidences", "distributions"),
        *_fields(_POINTER, "survival", "ended"),
    )


class StepsStruct(ctypes.Structure):
    """`Steps` of chain.h."""

    _fields_ = _fields(_POINTER, "refreshes", "draft_step", "output", "starts", "states")


class BlockStruct(ctypes.Structure):
    """`Block` of rounds.h."""

    _fields_ = (
        *_fields(_POINTER, "forward", "lm_head", "verify"),
        ("size", _INT),
        *_fields(_POINTER, "tokens", "starts", "best", "states"),
        ("num_positions", _INT),
        *_fields(_POINTER, "drafts", "limits", "uniforms", "num_accepted", "next_tokens"),
    )


class BatchStruct(ctypes.Structure):
    """`Batch` of rounds.h."""

    _fields_ = (
        ("size", _INT),
        *_fields(_POINTER, "last_tokens", "lengths", "remaining"),
        *_fields(_INT, "max_speculative_tokens", "max_length"),
        ("pending", _POINTER),
        ("num_eos", _INT),
        ("eos", _POINTER),
        ("num_uniforms", _INT),
        *_fields(_POINTER, "num_used", "uniforms", "num_copied", "copied", "distributions"),
        ("vocab_size", _INT),
    )


class RoundOutputStruct(ctypes.Structure):
    """`RoundOutput` of rounds.h."""

    _fields_ = (
        ("max_speculative_tokens", _INT),
        *_fields(_POINTER, "drafts", "num_draft_tokens", "num_accepted", "next_tokens", "num_confidences"),
        *_fields(_POINTER, "confidences", "seconds"),
    )


STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    View,
    HeadOutputStruct,
    PendingStruct,
    RefreshStruct,
    ChainStruct,
    StepsStruct,
    BlockStruct,
    BatchStruct,
    RoundOutputStruct,
)


def check_layouts(library: ctypes.CDLL) -> None:
    """Compare the structures with those of the compiled library. Raises ConfigError if one differs."""
    compiled = dict(line.split(": ") for line in library.nextn_layouts().decode().splitlines())
    ours = {structure.__name__.removesuffix("Struct"): _layout(structure) for structure in STRUCTURES}
    for name in sorted(ours.keys() | compiled.keys()):
        if ours.get(name) != compiled.get(name):
            raise ConfigError(
                f"the native runtime has structure {name} as ({compiled.get(name)}), this version of nextn as "
                f"({ours.get(name)}): delete {library._name} so that it is built again, or reinstall nextn"
            )


def _layout(structure: type[ctypes.Structure]) -> str:
    """Format the size, then offset and type letter of each field, as layout.cpp does."""
    fields = [
        f"{name} {getattr(structure, name).offset}{_LETTERS[field_type]}" for name, field_type, *_ in structure._fields_
    ]
    return ", ".join([str(ctypes.sizeof(structure)), *fields])


class Program:
    """A list of op calls over fixed memory: added once, run often."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self.handle: int = runtime.library.nextn_program()  # its address, valid as long as this object
        self._tensors: list[Tensor] = []

    def __del__(self) -> None:
        self._runtime.library.nextn_program_free(self.handle)

    def add(
        self,
        op: str,
        tensors: Sequence[Tensor],
        ints: Sequence[int] = (),
        reals: Sequence[float] = (),
        num_shards: int = 0,
    ) -> bool:
        """Append a call with its views, outputs first, and parameters in the op's order, and keep its tensors alive.

        `num_shards` is of this call and the one before it, see `Call` of runtime.h; 0: not sharded. Return whether a
        kernel supports the call; if not, the program is unchanged.
        """
        arguments = _arguments(tensors, ints, reals)
        if arguments is None or self._runtime.library.nextn_program_add(self.handle, op.encode(), *arguments):
            return False
        if num_shards:
            self._runtime.library.nextn_program_shard(self.handle, num_shards)
        self._tensors += [tensor.detach() for tensor in tensors]  # a parameter may get other memory
        return True

    def run(self) -> None:
        with self._runtime.lock:
            self._runtime.library.nextn_program_run(self.handle, self._runtime.team)


class Runtime:
    """The library and its team of threads. `lock` must be held while the team runs."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.library, self.lock, self.num_threads = library, LOCK, threads
        self._process = os.getpid()
        self._team: int = library.nextn_team(threads)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # modules are gone at exit
        # A forked child has no such threads to join, and at exit a daemon thread may still be running the team.
        if not is_finalizing() and self._process == os.getpid():
            self.library.nextn_team_free(self._team)

    @property
    def team(self) -> int:
        """The threads of this process. A fork copies no threads, so a child starts its own team."""
        if self._process != os.getpid():
            self._process, self._team = os.getpid(), self.library.nextn_team(self.num_threads)
        return self._team

    @property
    def has_bf16_pair_products(self) -> bool:
        """Whether bf16 is multiplied as pairs on vector registers, where one-byte weights are cheap to widen. With tile
        registers it is not; the gain of one-byte weights there has not been measured."""
        return bool(self.library.nextn_pairs())

    def takes_floats(self, weight_type: int) -> bool:
        """Whether products with packed weights of this type use all bits of float32 activations, as fast as bf16."""
        return bool(self.library.nextn_takes_floats(weight_type))

    def block_columns(self, weight_type: int) -> int:
        """Return how many output channels of a weight of this type are packed, and padded, together."""
        return int(self.library.nextn_block_columns(weight_type))

    def pack(self, weight: Tensor, take: Callable[[int], Tensor] | None = None) -> Tensor:
        """Return the weight [N, K] of a linear layer, or [E, N, K] of E experts, in the layout of the linear ops.

        `take(size)` allocates memory aligned to 64 bytes; by default huge pages of its own. Pages of a weight in a
        mapped file are released as they are packed.
        """
        *_, n, k = weight.shape
        weight_type = type_of(weight.dtype)
        if (size := self.library.nextn_packed_bytes(weight_type, n, k)) < 0:
            raise ConfigError(
                f"native linear layers do not support {weight.dtype} weights, only torch.float32 and torch.bfloat16"
            )
        matrices = weight.reshape(-1, n, k)
        packed = (take or HugePages().take)(size * len(matrices))
        num_rows = rows_per_slice(weight, self.block_columns(weight_type))
        for index, matrix in enumerate(matrices):
            for start, rows in slices_released_after_use(matrix, num_rows):
                begin = index * size + self.library.nextn_packed_bytes(weight_type, start, k)
                length = self.library.nextn_packed_bytes(weight_type, len(rows), k)
                self.call("pack", [packed[begin : begin + length], rows])
        return packed

    def call(self, op: str, tensors: Sequence[Tensor], ints: Sequence[int] = (), reals: Sequence[float] = ()) -> None:
        """Run one op immediately. Raises ConfigError if no kernel supports these types, sizes or strides."""
        arguments = _arguments(tensors, ints, reals)
        with self.lock:
            failed = arguments is None or self.library.nextn_call(self.team, op.encode(), *arguments)
        if failed:
            given = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)
            raise ConfigError(f"native op {op!r} does not support ({given}), {list(ints)}, {list(reals)}")


def _arguments(tensors: Sequence[Tensor], ints: Sequence[int], reals: Sequence[float]) -> tuple[object, ...] | None:
    views = [view for tensor in tensors if (view := View.of(tensor)) is not None]
    if len(views) < len(tensors):
        return None
    return (
        (View * len(views))(*views),
        len(views),
        (ctypes.c_int64 * len(ints))(*ints),
        len(ints),
        (ctypes.c_double * len(reals))(*reals),
        len(reals),
    )


def open_library(path: Path) -> ctypes.CDLL:
    """Open the compiled library and declare its functions."""
    library = ctypes.CDLL(str(path))
    library.nextn_layouts.restype = ctypes.c_char_p
    for name in ("nextn_team", "nextn_program"):
        getattr(library, name).restype = ctypes.c_void_p
    programs = (f"nextn_program_{name}" for name in ("free", "shard", "run"))
    for name in ("nextn_team_free", *programs, "nextn_chain"):
        getattr(library, name).restype = None
    views, ints, reals = ctypes.POINTER(View), ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_double)
    arrays = views, ctypes.c_int64, ints, ctypes.c_int64, reals, ctypes.c_int64
    library.nextn_program_add.argtypes = library.nextn_call.argtypes = [ctypes.c_void_p, ctypes.c_char_p, *arrays]
    library.nextn_packed_bytes.argtypes, library.nextn_packed_bytes.restype = [ctypes.c_int64] * 3, ctypes.c_int64
    library.nextn_takes_floats.argtypes = [ctypes.c_int64]
    library.nextn_zero_lost_pages.argtypes = [ctypes.POINTER(_INT), _INT]
    library.nextn_block_columns.argtypes, library.nextn_block_columns.restype = [ctypes.c_int64], ctypes.c_int64
    library.nextn_team_free.argtypes = library.nextn_program_free.argtypes = [ctypes.c_void_p]
    library.nextn_program_shard.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.nextn_program_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.nextn_chain.argtypes = [ctypes.c_void_p] * 4
    library.nextn_rounds.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_int64, ctypes.c_void_p]
    library.nextn_rounds.restype = ctypes.c_int64
    return library


@cache
def load() -> Runtime:
    """Build the runtime (once per machine, about 40 s) and load it; raise ConfigError with the reason if that fails."""
    path = build_library(_SOURCES, cache_folder())
    try:
        library = open_library(path)
    except (OSError, AttributeError) as error:  # built for another C library, or on a disk mounted noexec
        raise ConfigError(f"the native runtime cannot be loaded: {error}; delete {path} to rebuild it") from error
    if library.nextn_ready():
        raise ConfigError(_NO_TILES)
    check_layouts(library)
    return Runtime(library, torch.get_num_threads())


def build_status() -> BuildStatus:
    """Return whether the runtime is built, where, and which compiler would build it, without building it."""
    status = status_of(_SOURCES, cache_folder())
    if not status.is_built:
        return status
    try:
        problem = _NO_TILES if open_library(status.library).nextn_ready() else ""
    except (OSError, AttributeError) as error:
        problem = f"the library cannot be loaded: {error}"
    return replace(status, problem=problem)


_MAPS = Path("/proc/self/maps")


def zero_lost_pages(files: Iterable[Path]) -> bool:
    """Let pages of these files that are lost by a truncation read as zeros, for as long as the process runs.

    Otherwise the first access ends the process with SIGBUS. The caller has to look at the files before it uses what was
    computed (`FileStamps`). Files that are mapped later are not covered. Return whether it was possible: on Linux, with
    the native library, once per process.
    """
    names = {str(file.resolve()) for file in files}
    bounds = [bound for name, *pair in _mappings() if name in names for bound in pair]
    try:
        library = load().library
    except ConfigError:
        return False
    return (
        bool(bounds) and library.nextn_zero_lost_pages((ctypes.c_int64 * len(bounds))(*bounds), len(bounds) // 2) == 0
    )


def _mappings() -> Iterable[tuple[str, int, int]]:
    """Yield the file, begin and end of each mapping of a file (proc(5))."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        addresses, *_, name = line.split(maxsplit=5)
        if name.startswith("/"):
            begin, end = (int(part, 16) for part in addresses.split("-"))
            yield name, begin, end
