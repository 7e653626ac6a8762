"""The native runtime (csrc/), called through ctypes.

Knows no model: tensors go in as views, ops by name. Without a compiler there is none, and `load` says why.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextn.errors import ConfigError
from nextn.fast.build import BuildStatus, built, cache_folder, status_of
from nextn.fast.locks import LOCK
from nextn.fast.pages import Pages
from nextn.fast.structures import View, check_layouts, type_of

_SOURCES = Path(__file__).parent / "csrc"
_NO_TILES = "the system does not lend this process the tile registers that the native runtime uses"
BYTES = 4  # of product.h: packed weights of a byte each


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
        with self._runtime.lock:
            self._runtime.library.nextn_program_run(self._handle, self._runtime.team)


class Runtime:
    """The library and its team of threads. lock: to be held while the team runs."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.library, self.lock, self._threads = library, LOCK, threads
        self._process, self._team = os.getpid(), library.nextn_team(threads)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # modules are gone at exit
        # The threads of a parent process are not here to be joined, and at exit one may be in a run of a daemon thread.
        if not is_finalizing() and self._process == os.getpid():
            self.library.nextn_team_free(self._team)

    @property
    def team(self) -> int:
        """The threads, of this process: a fork copies none of them, so a child starts its own."""
        if self._process != os.getpid():
            self._process, self._team = os.getpid(), self.library.nextn_team(self._threads)
        return self._team

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
        size = self.library.nextn_packed_bytes(type_of(weight.dtype), n, k)
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
        with self.lock:
            failed = arguments is None or self.library.nextn_call(self.team, op.encode(), *arguments)
        if failed:
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
    library.nextn_layouts.restype = ctypes.c_char_p
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
    """Build the runtime (once a machine, about 40 s) and load it.

    Raises:
        ConfigError: It cannot be built or loaded, with the reason.
    """
    path = built(_SOURCES, cache_folder())
    try:
        library = bound(path)
    except (OSError, AttributeError) as error:  # made for another C library, or on a disk mounted without execution
        raise ConfigError(f"the native runtime cannot be loaded: {error}; remove {path} to build it anew") from error
    if library.nextn_ready():
        raise ConfigError(_NO_TILES)
    check_layouts(library)
    return Runtime(library, torch.get_num_threads())


def build_status() -> BuildStatus:
    """Report whether the runtime is built, where, and by which compiler it would be built; nothing is built."""
    status = status_of(_SOURCES, cache_folder())
    if not status.is_built:
        return status
    try:
        problem = _NO_TILES if bound(status.library).nextn_ready() else ""
    except (OSError, AttributeError) as error:
        problem = f"the library cannot be loaded: {error}"
    return replace(status, problem=problem)
