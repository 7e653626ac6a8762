"""Which device a model runs on, on how many threads, and the dtype that it trains with there."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

from nextn.errors import ConfigError

_NO_MEMORY = ("out of memory", "can't allocate memory")  # of MPS; of the host


def resolve_device(name: str | torch.device = "auto") -> torch.device:
    """Return the device of a name in torch's spelling; `auto` is the first available of cuda, mps and cpu.

    Raises ConfigError if torch does not know the device or does not find it on this machine.
    """
    if name == "auto":
        return torch.device(next(name for name in ("cuda", "mps", "cpu") if _is_available(torch.device(name))))
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device = {name!r}; expected one of {', '.join(_available_names())}") from error
    if not _is_available(device):
        message = f"device = {str(device)!r} is not available to torch; expected one of {', '.join(_available_names())}"
        raise ConfigError(message)
    return device


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Use this many threads in torch; at the end, as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def available_bytes(device: torch.device) -> int | None:
    """Return the memory that this process may still take: of the GPU, or of the machine and its control group.

    None where the system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = []
    with suppress(OSError, ValueError):
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    with suppress(OSError, ValueError):  # "max" where there is no limit
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text(encoding="utf-8")) - _cached_bytes(group)
        limits.append(int((group / "memory.max").read_text(encoding="utf-8")) - used)
    return min(limits, default=None)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation of torch failed, on a GPU or on the host; here or in what caused the error."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def free_cached_memory(device: torch.device) -> None:
    """Give back what torch keeps of freed memory of a GPU."""
    if device.type in ("cuda", "mps", "xpu"):
        getattr(torch, device.type).empty_cache()


def _cached_bytes(group: Path) -> int:
    """What a control group holds of files, which the kernel drops when memory is needed."""
    fields = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
    return int(fields["inactive_file"]) + int(fields["active_file"])


def _is_available(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return True
    try:
        module = torch.get_device_module(device.type)
    except RuntimeError:  # torch was built without it
        return False
    return bool(module.is_available()) and (device.index or 0) < module.device_count()


def _available_names() -> list[str]:
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return ["auto", *gpus, *(["mps"] if torch.mps.is_available() else []), "cpu"]


def half_precision_pays(device: str = "") -> bool:
    """Return whether matmuls in bfloat16 are faster than in float32.

    They are on GPUs that support it. On a processor that torch has such kernels for, it is measured once a process:
    an Intel Xeon with AVX512-BF16 but no AMX takes 1.8 times as long. Other processors convert around each matmul: an
    EPYC with AVX2 takes eleven times as long.

    device: a torch device type; empty = the one that training uses.
    """
    device = device or resolve_device().type
    if device == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and _is_bfloat16_faster()
    return device == "cuda" and torch.cuda.is_bf16_supported()


@cache
def _is_bfloat16_faster() -> bool:
    return matmul_seconds(torch.bfloat16) < matmul_seconds(torch.float32)


def matmul_seconds(dtype: torch.dtype, *, size: int = 512, repeats: int = 5) -> float:
    """Return the least time of several products of two matrices on the processor."""
    matrix, seconds = torch.ones(size, size, dtype=dtype), list[float]()
    for _ in range(repeats):
        started = time.perf_counter()
        torch.mm(matrix, matrix)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def training_dtype(device: str = "") -> str:
    """Return `bfloat16` if it is faster on this type of device, else `float32`."""
    return "bfloat16" if half_precision_pays(device) else "float32"
