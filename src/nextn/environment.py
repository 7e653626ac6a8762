"""Describe the machine for bug reports: versions, processor, memory, GPUs, and which backend decodes.

Nothing here raises and nothing is built: a section that cannot be read says why.
"""

import os
import platform
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from nextn import __version__
from nextn.settings import available_cores

Section = dict[str, object] | list[object] | str | int

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "httpx2")
# By which the native kernels are selected, as /proc/cpuinfo spells them: x86-64 first, then Arm.
_INSTRUCTION_SETS = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_tile",
    "amx_bf16", "asimd", "asimdhp", "bf16", "i8mm", "sve",
)  # fmt: skip


def report() -> dict[str, Section]:
    """Describe the installation and the machine as JSON-serializable data; a section that cannot be read says why."""
    sections: dict[str, Callable[[], Section]] = {
        "nextn": lambda: __version__,
        "python": lambda: f"{platform.python_version()} ({platform.python_implementation()})",
        "packages": lambda: {name: _version(name) for name in _PACKAGES},
        "extras": _extras,
        "system": platform.platform,
        "processor": processor,
        "memory": _memory,
        "gpus": _gpus,
        "backend": _backend,
    }
    return {name: _guarded(section) for name, section in sections.items()}


def _guarded(section: Callable[[], Section]) -> Section:
    try:
        return section()
    except Exception as error:  # the command must work on broken installations
        reason = next(iter(str(error).splitlines()), "")
        return f"unknown: {type(error).__name__}: {reason}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _extras() -> Section:
    """The packages of each optional extra by the metadata of the installed wheel."""
    extras: dict[str, object] = {}
    for line in metadata.requires("nextn") or ():
        match = re.match(r"([\w.-]+).*;\s*extra == ['\"]([\w-]+)['\"]", line)
        if match and match[2] != "dev":
            packages = extras.setdefault(match[2], {})
            assert isinstance(packages, dict)
            packages[match[1]] = _version(match[1])
    return extras


def processor() -> dict[str, object]:
    """Describe the processor: its name and model, the number of cores and threads, and its instruction sets."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    keys = ("model name", "cpu family", "model", "CPU implementer", "CPU part")  # the last two of Arm
    parts = [fields[key] if key == "model name" else f"{key} {fields[key]}" for key in keys if key in fields]
    return {
        "name": ", ".join(parts) or platform.processor() or "unknown",
        "architecture": platform.machine(),
        "cores": available_cores(),
        "threads": _guarded(_default_threads),
        "instruction_sets": [name for name in _INSTRUCTION_SETS if name in flags],
        "torch_capability": _guarded(_torch_capability),
    }


def _default_threads() -> int:
    """The threads that decode without --threads; the number is torch's, which OMP_NUM_THREADS sets."""
    import torch

    return torch.get_num_threads()


def _torch_capability() -> Section:
    import torch

    return torch.backends.cpu.get_cpu_capability()


def _memory() -> Section:
    page = os.sysconf("SC_PAGE_SIZE")
    sizes = {"total_bytes": "SC_PHYS_PAGES", "available_bytes": "SC_AVPHYS_PAGES"}
    return {name: page * os.sysconf(key) for name, key in sizes.items() if key in os.sysconf_names}


def _gpus() -> Section:
    import torch

    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus: list[object] = [
        {"name": gpu.name, "memory_bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"}
        for gpu in properties
    ]
    if torch.backends.mps.is_available():
        gpus.append({"name": "Apple MPS", "memory_bytes": None, "capability": None})
    return gpus


def _backend() -> Section:
    """Which backend decodes on the default device, if the model allows it, and why. Builds nothing."""
    from nextn.devices import resolve_device
    from nextn.runtime.native.abi import build_status

    status, device = build_status(), resolve_device().type
    if device != "cpu":
        name, reason = "torch", f"the native runtime runs on CPUs (--device cpu); on {device} torch decodes"
    elif status.problem:
        name, reason = "torch", status.problem
    elif status.is_built:
        name, reason = "native", "the native runtime is built"
    elif status.missing:
        name, reason = "torch", f"the native runtime cannot be built without {' and '.join(status.missing)}"
    else:
        name, reason = "native", "the first command that decodes builds the native runtime (about a minute)"
    return {
        "device": device,
        "name": name,
        "reason": reason,
        "is_built": status.is_built,
        "library": str(status.library).replace(str(Path.home()), "~", 1),
        "compiler": status.compiler,
    }
