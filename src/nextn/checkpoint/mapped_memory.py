"""Physical memory of tensors that are views of mapped files, such as those that safetensors reads.

Such a tensor takes memory as it is read, and the kernel counts it as this process's until it is given back. A tensor
whose pages were released stays valid: the next access reads them again, usually from the page cache.
"""

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from ctypes import CDLL, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
from torch import Tensor, nn

_PAGEMAP = Path("/proc/self/pagemap")
# Flags of a page in pagemap (Documentation/admin-guide/mm/pagemap.rst of Linux).
_PRESENT, _SWAPPED, _OF_FILE = np.uint64(1 << 63), np.uint64(1 << 62), np.uint64(1 << 61)


def release_pages(tensors: Iterable[Tensor]) -> int:
    """Release the memory of those tensors whose bytes are all unmodified bytes of mapped files; return how many bytes.

    Tensors in ordinary memory, tensors that were written to, and other systems than Linux are left alone.
    """
    return sum(_release(tensor) for tensor in tensors if tensor.device.type == "cpu" and tensor.numel())


def return_freed_memory() -> None:
    """Return freed memory to the system. glibc keeps it for later allocations: hundreds of MB after large tensors."""
    if (trim := c_function("malloc_trim", c_size_t)) is not None:
        trim(0)


def slices_released_after_use(matrix: Tensor, num_rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yield a matrix in slices of this many rows, each with its first row's index; release each one after its use."""
    for start in range(0, len(matrix), num_rows):
        rows = matrix[start : start + num_rows]
        yield start, rows
        release_pages([rows])


@contextmanager
def released_after_use(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While open, release the parameters of each of these modules whenever its forward has run."""

    def release(module: nn.Module, *_: object) -> None:
        release_pages(module.parameters())

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(release))
        yield


def _release(tensor: Tensor) -> int:
    begin, end = _page_range(tensor)
    if not hasattr(mmap, "MADV_DONTNEED") or not _is_unmodified_file(begin, end):
        return 0
    if (madvise := c_function("madvise", c_void_p, c_size_t, c_int)) is None:
        return 0
    return 0 if madvise(begin, end - begin, mmap.MADV_DONTNEED) else end - begin


def _page_range(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the pages that the tensor's elements are in, strides included."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    return begin, -(-(tensor.data_ptr() + span * tensor.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE


def _is_unmodified_file(begin: int, end: int) -> bool:
    """Whether releasing these pages loses nothing: each that is present belongs to a file, not to this process."""
    try:
        with _PAGEMAP.open("rb", buffering=0) as file:
            file.seek(begin // mmap.PAGESIZE * 8)
            entries = np.frombuffer(file.read((end - begin) // mmap.PAGESIZE * 8), dtype=np.uint64)
    except OSError:
        return False
    is_own = ((entries & _PRESENT) != 0) & ((entries & _OF_FILE) == 0) | ((entries & _SWAPPED) != 0)
    return len(entries) == (end - begin) // mmap.PAGESIZE and not is_own.any()


@cache
def c_function(name: str, *types: type) -> Callable[..., int] | None:
    """Return a function of the C library that takes these types and returns an int; None where it has none."""
    try:
        function = getattr(CDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes, function.restype = types, c_int
    return cast(Callable[..., int], function)
