"""Models larger than memory: whether one fits, and the time of a streamed pass, by bytes and this machine's rates."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import inf, prod

import torch
from torch import Tensor

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.packed_layout import with_logical_weights
from nextn.checkpoint.remote import LocalFile
from nextn.checkpoint.snapshot import PartialFile
from nextn.checkpoint.tensors import FLOATS
from nextn.devices import available_bytes
from nextn.evaluate.decoding_costs import draft_bytes, stacked_experts, step_bytes
from nextn.evaluate.given_texts import MAX_POSITIONS
from nextn.model.head import Head
from nextn.model.layer_states import LayerProgress
from nextn.model.streamed_trunk import StreamedTrunk

_USABLE_SHARE = 0.9  # of the available memory, for the model; the rest is for states and logits
_READ_BYTES = 64 * 2**20  # to measure the rate of reading
_NUM_ROWS, _MATRIX_SIZE = 512, 2048  # to measure the rate of products
_MEASURED_S, _NUM_COPIES = 0.3, 4  # seconds of a measurement of products, and matrices that it alternates between


def loaded_bytes(checkpoint: Checkpoint, dtype: torch.dtype | None) -> int:
    """Return the bytes of the checkpoint's tensors in memory. dtype: None: as stored, quantized ones as bfloat16."""
    total = 0
    logical, packed = with_logical_weights(checkpoint)
    for name, info in logical.tensors.items():
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
    if available is None or needed <= _USABLE_SHARE * available:
        return None
    return f"the model takes {needed / 1e9:.1f} GB, and {available / 1e9:.1f} GB are available"


@dataclass(frozen=True)
class StreamEstimate:
    """The time that streaming and scoring take, if reading and arithmetic do not overlap.

    Not in it: starting, checking the head's values, and the states of earlier layers that a run resumes from.
    """

    num_bytes: int  # of the trunk's layers
    flops: float  # of the trunk, for all tokens, including lm_head
    bytes_per_s: float
    flops_per_s: float  # in products of many rows
    head_flops: float = 0.0
    expert_flops: float = 0.0  # the part of `flops` and `head_flops` in routed experts, which have few rows each
    expert_flops_per_s: float = inf
    head_bytes: int = 0  # of experts that the passes of the head read

    @classmethod
    def of(
        cls, trunk: StreamedTrunk, num_tokens: int, *, head: Head | None = None, num_passes: int = 0
    ) -> "StreamEstimate":
        """Estimate a pass over this many tokens, and `num_passes` of head and lm_head, by this machine's rates."""
        size = trunk.dtype.itemsize
        flops = 2 * step_bytes(trunk) / size * num_tokens
        drafting = 0.0 if head is None else 2 * draft_bytes(head) / size * num_tokens * num_passes
        routed, drafted = ([] if part is None else stacked_experts(part, trunk) for part in (trunk.model, head))
        layers = 1 if head is None else head.num_modules
        expert_flops = 2 * num_tokens * (_taken(routed) + _taken(drafted) / layers * num_passes)
        in_files = sum(value.numel() for value, _ in drafted if value.is_meta) * size * num_passes // layers
        rate = _flop_rate(trunk, [(_MATRIX_SIZE, _MATRIX_SIZE)], _NUM_ROWS)
        expert_rate = _expert_rate(trunk, routed or drafted, num_tokens) if expert_flops else rate
        return cls(trunk.num_bytes, flops, _read_rate(trunk), rate, drafting, expert_flops, expert_rate, in_files)

    @property
    def seconds(self) -> float:
        others = self.flops + self.head_flops - self.expert_flops
        reading = (self.num_bytes + self.head_bytes) / self.bytes_per_s
        return reading + others / self.flops_per_s + self.expert_flops / self.expert_flops_per_s

    def __str__(self) -> str:
        flops, num_bytes = self.flops + self.head_flops, self.num_bytes + self.head_bytes
        experts = f" ({self.expert_flops / 1e12:.3g} of experts at {self.expert_flops_per_s / 1e12:.2g})"
        return (
            f"{num_bytes / 1e9:.1f} GB at {self.bytes_per_s / 1e9:.2g} GB/s and {flops / 1e12:.3g} TFLOP at "
            f"{self.flops_per_s / 1e12:.2g} TFLOP/s{experts if self.expert_flops else ''}: about "
            f"{self.seconds / 60:.1f} min"
        )


def _taken(experts: Sequence[tuple[Tensor, float]]) -> float:
    """The number of expert weights that one token uses."""
    return sum(value.numel() * share for value, share in experts)


def stream_record(layers: Sequence[LayerProgress], estimate: StreamEstimate) -> dict[str, object]:
    """Return the bytes and times of a streamed pass, for JSON reports."""
    records = [{name: value for name, value in asdict(layer).items() if name != "observed"} for layer in layers]
    return {
        "num_bytes": sum(layer.num_bytes for layer in layers),
        "seconds": sum(layer.read_seconds + layer.run_seconds for layer in layers),
        "num_resumed": sum(layer.resumed for layer in layers),
        "estimate": asdict(estimate) | {"seconds": estimate.seconds},
        "layers": records,
    }


def _read_rate(trunk: StreamedTrunk) -> float:
    """Bytes per second of the downloads so far, or of reading the middle of the largest file from disk."""
    downloads = [source.download for source in trunk.checkpoint.sources.values() if isinstance(source, PartialFile)]
    if downloads and downloads[0].rate:
        return downloads[0].rate
    files = [source for source in trunk.checkpoint.sources.values() if isinstance(source, LocalFile)]
    largest = max(files, key=lambda file: file.path.stat().st_size)
    size = largest.path.stat().st_size
    begin = max(0, size - _READ_BYTES) // 2
    buffer = memoryview(bytearray(min(_READ_BYTES, size)))
    if hasattr(os, "posix_fadvise"):
        with largest.path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), begin, len(buffer), os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    largest.read_ahead(begin, begin + len(buffer))
    largest.read_into(begin, buffer)
    return len(buffer) / max(time.perf_counter() - started, 1e-6)


def _expert_rate(trunk: StreamedTrunk, experts: Sequence[tuple[Tensor, float]], num_tokens: int) -> float:
    """FLOP/s of one layer's experts, with the average number of rows per expert."""
    (first, share), *others = experts
    shapes = [tuple(first.shape[1:]), *(tuple(value.shape[1:]) for value, _ in others[:1])]
    return _flop_rate(trunk, shapes, max(1, round(min(num_tokens, MAX_POSITIONS) * share)))


def _flop_rate(trunk: StreamedTrunk, shapes: Sequence[tuple[int, ...]], num_rows: int) -> float:
    """Mean FLOP/s of products with matrices of these shapes, including the effect of other work on the machine."""
    ones = partial(torch.ones, dtype=trunk.dtype, device=trunk.device)
    pairs = [[(ones((num_rows, shape[-1])), ones(shape)) for shape in shapes] for _ in range(_NUM_COPIES)]

    def run(count: int) -> None:
        for states, weight in pairs[count % _NUM_COPIES]:
            torch.nn.functional.linear(states, weight)[-1, -1].item()

    run(0)
    count, started = 0, time.perf_counter()
    while (seconds := time.perf_counter() - started) < _MEASURED_S or not count:
        run(count)
        count += 1
    return count * 2 * num_rows * sum(prod(shape) for shape in shapes) / seconds
