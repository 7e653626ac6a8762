"""The native runtime (csrc/): built once through torch's extension loader, called through ctypes.

Knows no model: tensors go in as views, ops by name. Without a compiler there is none, and `load` says why.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
_STALE = 900  # seconds after which a lock of the build is taken for left over
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int64: 2, torch.bool: 3}
BYTES = 4  # of product.h: packed weights of a byte each


def type_of(dtype: torch.dtype) -> int:
    """`Type` of runtime.h."""
    return _TYPES[dtype]


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

    def add(
        self,
        op: str,
        tensors: Sequence[Tensor],
        ints: Sequence[int] = (),
        reals: Sequence[float] = (),
        owners: int = 0,
    ) -> bool:
        """Append a call; False, and nothing appended, where no kernel takes it. The tensors are kept alive. owners: of
        what it reads of the call before, see `Call` of runtime.h; 0 = none."""
        arguments = _arguments(tensors, ints, reals)
        if arguments is None or self._runtime.library.nextn_program_add(self._handle, op.encode(), *arguments):
            return False
        if owners:
            self._runtime.library.nextn_program_own(self._handle, owners)
        self._kept += tensors
        return True

    @property
    def handle(self) -> int:
        """For native code that runs it; it lives as long as this object."""
        return self._handle

    def run(self) -> None:
        self._runtime.library.nextn_program_run(self._handle, self._runtime.team)


class Runtime:
    """The library and its team of threads."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.library, self.team = library, library.nextn_team(threads)

    def __del__(self) -> None:
        self.library.nextn_team_free(self.team)

    @property
    def multiplies_pairs(self) -> bool:
        """Whether bf16 is multiplied as pairs on vector registers, so that weights of a byte cost little to widen. With
        tiles it is not, and what such weights would bring there has not been measured."""
        return bool(self.library.nextn_pairs())

    def block_columns(self, kind: int) -> int:
        """Rows of such a weight that are packed together, and filled up to."""
        return int(self.library.nextn_block_columns(kind))

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
    programs = (f"nextn_program_{name}" for name in ("free", "own", "run"))
    for name in ("nextn_team_free", *programs, "nextn_chain", "nextn_feed"):
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
    library.nextn_block_columns.argtypes, library.nextn_block_columns.restype = [ctypes.c_int64], ctypes.c_int64
    library.nextn_team_free.argtypes = library.nextn_program_free.argtypes = [ctypes.c_void_p]
    library.nextn_program_own.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.nextn_program_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.nextn_chain.argtypes, library.nextn_feed.argtypes = [ctypes.c_void_p] * 4, [ctypes.c_void_p] * 3
    several: list[Any] = [*[ctypes.c_void_p] * 5, ctypes.c_int64, ctypes.c_void_p]
    library.nextn_rounds.argtypes, library.nextn_rounds.restype = several, ctypes.c_int64
    return library


@cache
def load() -> Runtime:
    """Build (once a machine, about a minute) and load the runtime. Raises ConfigError where that cannot be done."""
    with _own_tools():
        missing = [tool for tool in (os.environ.get("CXX", "g++"), "ninja") if shutil.which(tool) is None]
        if missing:
            raise ConfigError(
                f"the native runtime is built by {' and '.join(missing)}, which is not there: install a C++20 compiler "
                "and ninja"
            )
        library = bound(_built())
    if library.nextn_ready():
        raise ConfigError("the system does not lend this process the tile registers that the native runtime uses")
    return Runtime(library, torch.get_num_threads())


def _built() -> Path:
    from torch.utils import cpp_extension

    sources = sorted(_SOURCES.iterdir())
    # By what is built and for which processor: checkouts and machines may share a cache folder.
    identity = [*(path.read_bytes() for path in sources), " ".join(_FLAGS).encode(), _processor().encode()]
    name = f"nextn_runtime_{hashlib.sha256(b''.join(identity)).hexdigest()[:12]}"
    folder = Path(cpp_extension._get_build_directory(name, verbose=False))
    made, lock = folder / f"{name}.so", folder / "lock"
    if made.exists() and not lock.exists():
        return made  # torch would build it again for sources at another place
    if lock.exists() and time.time() - lock.stat().st_mtime > _STALE:
        lock.unlink(missing_ok=True)  # of a build that was killed; torch would wait for it for ever
    try:
        path = cpp_extension.load(
            name,
            [str(path) for path in sources if path.suffix == ".cpp"],
            extra_cflags=_FLAGS,
            build_directory=str(folder),
            is_python_module=False,
        )
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"the native runtime could not be built in {folder}: {str(error)[:2000]}") from error
    return Path(path)


def _processor() -> str:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()} {flags}"


@contextmanager
def _own_tools() -> Iterator[None]:
    """ninja may stand beside the interpreter, in an environment that is not activated."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([before, str(Path(sys.executable).parent)])
    try:
        yield
    finally:
        os.environ["PATH"] = before
