"""The native runtime (csrc/): built once through torch's extension loader, called through ctypes.

Knows no model: tensors go in as views, ops by name. Without a compiler there is none, and `load` says why.
"""

import ctypes
import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextn.errors import ConfigError
from nextn.fast.pages import Pages

_SOURCES = Path(__file__).parent / "csrc"
# No -ffast-math: -inf in masked scores must stay what it is.
_FLAGS = ["-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"]
_MAX_DIMS = 6
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int64: 2, torch.bool: 3}


class View(ctypes.Structure):
    """`View` of runtime.h: sizes and strides count elements."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int64),
        ("ndim", ctypes.c_int64),
        ("size", ctypes.c_int64 * _MAX_DIMS),
        ("stride", ctypes.c_int64 * _MAX_DIMS),
    )

    @classmethod
    def of(cls, tensor: Tensor) -> "View | None":
        """None for a dtype or number of dimensions that no kernel knows."""
        if tensor.dtype not in _TYPES or tensor.ndim > _MAX_DIMS:
            return None
        pad = (0,) * (_MAX_DIMS - tensor.ndim)
        sizes = (ctypes.c_int64 * _MAX_DIMS)(*tensor.shape, *pad)
        strides = (ctypes.c_int64 * _MAX_DIMS)(*tensor.stride(), *pad)
        return cls(tensor.data_ptr(), _TYPES[tensor.dtype], tensor.ndim, sizes, strides)


class Program:
    """A list of calls over memory that stands still; `add` once, `run` often."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime, self._handle = runtime, runtime.library.nextn_program()
        self._kept: list[Tensor] = []

    def __del__(self) -> None:
        self._runtime.library.nextn_program_free(self._handle)

    def add(self, op: str, tensors: Sequence[Tensor], ints: Sequence[int] = (), reals: Sequence[float] = ()) -> bool:
        """Append a call; False, and nothing appended, where no kernel takes it. The tensors are kept alive."""
        arguments = _arguments(tensors, ints, reals)
        if arguments is None or self._runtime.library.nextn_program_add(self._handle, op.encode(), *arguments):
            return False
        self._kept += tensors
        return True

    def run(self) -> None:
        self._runtime.library.nextn_program_run(self._handle, self._runtime.team)


class Runtime:
    """The library and its team of threads."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.library, self.team = library, library.nextn_team(threads)

    def __del__(self) -> None:
        self.library.nextn_team_free(self.team)

    def pack(self, weight: Tensor, take: Callable[[int], Tensor] | None = None) -> Tensor:
        """The weight [N, K] of a linear layer, or [E, N, K] of E experts, as the linear ops read it: bytes.

        take(size): memory for them, aligned to 64 bytes; left out: pages of their own.
        """
        *_, n, k = weight.shape
        size = self.library.nextn_packed_bytes(_TYPES.get(weight.dtype, -1), n, k)
        if size < 0:
            raise ConfigError(f"no native linear layer has weights of {weight.dtype}: torch.float32 or torch.bfloat16")
        matrices = weight.reshape(-1, n, k)
        packed = (take or Pages().take)(size * len(matrices))
        for place, matrix in enumerate(matrices):
            self.call("pack", [packed[place * size : (place + 1) * size], matrix])
        return packed

    def call(self, op: str, tensors: Sequence[Tensor], ints: Sequence[int] = (), reals: Sequence[float] = ()) -> None:
        """Run one op at once. Raises ConfigError where no kernel takes these types, sizes or strides."""
        arguments = _arguments(tensors, ints, reals)
        if arguments is None or self.library.nextn_call(self.team, op.encode(), *arguments):
            kinds = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)
            raise ConfigError(f"native op {op!r} takes no ({kinds}), {list(ints)}, {list(reals)}")


def _arguments(tensors: Sequence[Tensor], ints: Sequence[int], reals: Sequence[float]) -> tuple[object, ...] | None:
    found = [View.of(tensor) for tensor in tensors]
    views = [view for view in found if view is not None]
    if len(views) < len(found):
        return None
    return (
        (View * len(views))(*views),
        len(views),
        (ctypes.c_int64 * len(ints))(*ints),
        len(ints),
        (ctypes.c_double * len(reals))(*reals),
        len(reals),
    )


def bound(path: Path) -> ctypes.CDLL:
    """The compiled library, its functions declared."""
    library = ctypes.CDLL(str(path))
    for name in ("nextn_team", "nextn_program"):
        getattr(library, name).restype = ctypes.c_void_p
    for name in ("nextn_team_free", "nextn_program_free", "nextn_program_run"):
        getattr(library, name).restype = None
    views, ints, reals = ctypes.POINTER(View), ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_double)
    call: list[Any] = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        views,
        ctypes.c_int64,
        ints,
        ctypes.c_int64,
        reals,
        ctypes.c_int64,
    ]
    library.nextn_program_add.argtypes = library.nextn_call.argtypes = call
    library.nextn_packed_bytes.argtypes, library.nextn_packed_bytes.restype = [ctypes.c_int64] * 3, ctypes.c_int64
    library.nextn_team_free.argtypes = library.nextn_program_free.argtypes = [ctypes.c_void_p]
    library.nextn_program_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library


@cache
def load() -> Runtime:
    """Build (once a machine; some seconds) and load the runtime. Raises ConfigError where that cannot be done."""
    missing = [tool for tool in (os.environ.get("CXX", "g++"), "ninja") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(f"the native runtime needs {' and '.join(missing)} to be built: install a C++20 compiler")
    from torch.utils import cpp_extension

    try:
        path = cpp_extension.load(
            "nextn_runtime",
            [str(path) for path in sorted(_SOURCES.glob("*.cpp"))],
            extra_cflags=_FLAGS,
            is_python_module=False,
        )
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"the native runtime could not be built: {error}") from error
    library = bound(Path(path))
    if library.nextn_ready():
        raise ConfigError("the system does not lend this process the tile registers that the native runtime uses")
    return Runtime(library, torch.get_num_threads())
