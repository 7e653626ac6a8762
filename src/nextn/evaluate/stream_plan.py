"""Does a model fit into memory, and how long does it take to stream it: bytes, arithmetic and this machine's rates."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod

import torch

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.packed_layout import with_whole_weights
from nextn.checkpoint.partial_download import PartialFile
from nextn.checkpoint.remote import LocalFile
from nextn.checkpoint.tensors import FLOATS
from nextn.devices import available_bytes
from nextn.evaluate.decoding_costs import step_bytes
from nextn.model.layer_states import LayerProgress
from nextn.model.streamed_trunk import StreamedTrunk

_USABLE = 0.9  # share of the available memory that a model may take: the rest is for states and logits
_READ, _ROWS, _SIZE = 64 * 2**20, 512, 2048  # bytes of the read, and sizes of the product, that rates are measured by


def loaded_bytes(checkpoint: Checkpoint, dtype: torch.dtype | None) -> int:
    """Return the bytes of the checkpoint's tensors in memory. dtype: None: as stored, quantized ones as bfloat16."""
    total = 0
    whole, packed = with_whole_weights(checkpoint)
    for name, info in whole.tensors.items():
        if name in packed:
            total += prod(info.shape) * (dtype or torch.bfloat16).itemsize
            continue
        stored = FLOATS.get(info.dtype)
        size = (dtype or stored or torch.bfloat16).itemsize
        is_float = stored is not None or info.dtype.startswith("F8")
        elements = info.nbytes // (stored.itemsize if stored else 1)
        total += elements * size if is_float else info.nbytes
    return total


def reason_to_stream(checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device) -> str | None:
    """Return why the model cannot be loaded; None if it fits, or where the system does not say what is available."""
    needed, available = loaded_bytes(checkpoint, dtype), available_bytes(device)
    if available is None or needed <= _USABLE * available:
        return None
    return f"the model takes {needed / 1e9:.1f} GB, and {available / 1e9:.1f} GB are available"


@dataclass(frozen=True)
class StreamEstimate:
    """The time that a streamed pass takes at least: reading and arithmetic overlap only in part."""

    num_bytes: int
    flops: float
    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def of(cls, trunk: StreamedTrunk, num_tokens: int) -> "StreamEstimate":
        """Measure this machine's rates, which takes a tenth of a second, for a pass over this many tokens."""
        flops = 2 * step_bytes(trunk) / trunk.dtype.itemsize * num_tokens
        return cls(trunk.num_bytes, flops, _read_rate(trunk), _flop_rate(trunk.dtype, trunk.device))

    @property
    def seconds(self) -> float:
        return self.num_bytes / self.bytes_per_s + self.flops / self.flops_per_s

    def __str__(self) -> str:
        return (
            f"{self.num_bytes / 1e9:.1f} GB at {self.bytes_per_s / 1e9:.2g} GB/s and {self.flops / 1e12:.3g} TFLOP at "
            f"{self.flops_per_s / 1e12:.2g} TFLOP/s: about {self.seconds / 60:.1f} min"
        )


def stream_record(layers: Sequence[LayerProgress], estimate: StreamEstimate) -> dict[str, object]:
    """Return what a streamed pass took, for JSON reports."""
    records = [{name: value for name, value in asdict(layer).items() if name != "observed"} for layer in layers]
    return {
        "num_bytes": sum(layer.num_bytes for layer in layers),
        "seconds": sum(layer.read_seconds + layer.run_seconds for layer in layers),
        "num_resumed": sum(layer.resumed for layer in layers),
        "estimate": asdict(estimate) | {"seconds": estimate.seconds},
        "layers": records,
    }


def _read_rate(trunk: StreamedTrunk) -> float:
    """Bytes per second: of what was downloaded so far, or of the middle of the largest file, not from the cache."""
    downloads = [source.download for source in trunk.checkpoint.sources.values() if isinstance(source, PartialFile)]
    if downloads and downloads[0].rate:
        return downloads[0].rate
    files = [source for source in trunk.checkpoint.sources.values() if isinstance(source, LocalFile)]
    path = max((file.path for file in files), key=lambda path: path.stat().st_size)
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        begin = max(0, size - _READ) // 2
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), begin, _READ, os.POSIX_FADV_DONTNEED)
        file.seek(begin)
        started, buffer = time.perf_counter(), bytearray(min(_READ, size))
        num = file.readinto(buffer) or 0
    return num / max(time.perf_counter() - started, 1e-6)


def _flop_rate(dtype: torch.dtype, device: torch.device) -> float:
    states, weight = (torch.ones(rows, _SIZE, dtype=dtype, device=device) for rows in (_ROWS, _SIZE))
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        torch.nn.functional.linear(states, weight)[-1, -1].item()
        best = min(best, time.perf_counter() - started)
    return 2 * _ROWS * _SIZE * _SIZE / best
