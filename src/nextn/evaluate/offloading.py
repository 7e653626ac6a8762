"""Models larger than memory: whether one fits, how long a streamed pass takes, and the best K if experts are offloaded.

Times are calculated from bytes and this machine's rates. The offloaded experts that a pass loads are counted in a pass
over the texts, in which each position selects its own.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from math import inf, isnan, prod
from typing import Any

import torch
from torch import Tensor, nn

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.packed_layout import with_whole_weights
from nextn.checkpoint.remote import LocalFile
from nextn.checkpoint.safetensors_file import TensorInfo
from nextn.checkpoint.snapshot import PartialFile
from nextn.checkpoint.tensors import FLOATS
from nextn.devices import available_bytes
from nextn.errors import ConfigError
from nextn.evaluate.advice import DEFINITIONS, Forecast, forecast_rates
from nextn.evaluate.decoding_costs import draft_bytes, stacked_experts, step_bytes
from nextn.evaluate.given_texts import MAX_POSITIONS
from nextn.evaluate.reference_report import ReferenceReport
from nextn.evaluate.teacher_forced import ReferenceText
from nextn.model.head import Head
from nextn.model.layer_states import LayerProgress
from nextn.model.stored_experts import EXPERT, STACKED
from nextn.model.streamed_trunk import StreamedTrunk
from nextn.model.trunk import Trunk
from nextn.stats.speedup import Costs, Spread

OFFLOAD_DEFINITIONS = {name: DEFINITIONS[name] for name in ("speedup", "break_even", "best_num_speculative_tokens")} | {
    "acceptance": "a_k over the texts, as `nextn measure` computes it",
    "interval": "the same with every a_k at the low, and at the high end of its 95 % interval between texts",
    "pays": "the low end of the interval, at the best K, is above 1, and not all texts are repetitive",
    "distinct": "routed experts that a block of m consecutive new positions of the texts needs, a layer: the mean over "
    "all blocks",
    "step_s": "seconds of an m-position trunk pass: distinct experts x bytes of an expert / offload_bandwidth + all "
    "other bytes, the embedding left out / memory_bandwidth. Bytes as stored in the checkpoint; one sequence; no "
    "arithmetic, no KV cache, no experts kept from one pass to the next",
    "draft_s": "seconds of a draft step, in the same way: the experts of one position in the head",
    "overhead": "o is taken as 0",
}


Sums = list[list[int]]  # [texts][m - 1]: distinct experts, summed over a text's blocks of m positions
_USABLE_SHARE = 0.9  # of the available memory, for the model; the rest is for states and logits
_READ_BYTES = 64 * 2**20  # to measure the rate of reading
_NUM_ROWS, _MATRIX_SIZE = 512, 2048  # to measure the rate of products
_MEASURED_S, _NUM_COPIES = 0.3, 4  # seconds of a measurement of products, and matrices that it alternates between


class ExpertRouting:
    """Distinct routed experts of blocks of 1..max_positions new tokens, per layer and text.

    A block of m positions is what a round of K = m - 1 drafts verifies if all of them are the text's own tokens.
    """

    def __init__(self, num_experts: Mapping[int, int], max_positions: int) -> None:
        """num_experts: Stored routed experts by trunk layer; selected experts beyond these load nothing."""
        self.num_experts, self.max_positions = dict(num_experts), max_positions
        self.texts: tuple[ReferenceText, ...] = ()
        self._sums: dict[int, Sums] = {}
        self._tokens = torch.empty(0, 0, dtype=torch.long)  # of the current pass

    @contextmanager
    def watch(self, trunk: Trunk, texts: Sequence[ReferenceText]) -> Iterator[None]:
        """While open, count the experts selected in passes over rows that begin with one of the texts.

        A repeated pass replaces the counts. Raises ConfigError for a layer whose experts are not a separate module.
        """
        self.texts, self._sums = tuple(texts), {index: [[] for _ in texts] for index in self.num_experts}
        hooks = [trunk.embedding.register_forward_pre_hook(self._start_pass)]
        try:
            for index in self.num_experts:
                layer = trunk.decoder.layers[index]
                parts = [part for name, part in layer.named_modules() if name.rpartition(".")[2] == "experts"]
                if len(parts) != 1:
                    raise ConfigError(
                        f"layer {index} has {len(parts)} modules of routed experts, so which ones a token takes cannot "
                        "be counted; expected one"
                    )
                hooks.append(parts[0].register_forward_pre_hook(partial(self._count, index)))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def counts(self, index: int) -> Sums | None:
        """Return the counts of a layer; None for one without routed experts."""
        return self._sums.get(index)

    def restore(self, index: int, counts: Any) -> None:
        """Set the `counts` of a layer that an earlier process ran."""
        if index in self.num_experts:
            self._sums[index] = counts

    def distinct(self, temperature: float) -> dict[int, list[float]]:
        """Return the mean number of distinct experts of a block of m = 1, 2, ... positions, by layer.

        Sizes for which no text of this temperature is long enough are omitted.
        """
        chosen = [place for place, text in enumerate(self.texts) if text.temperature == temperature]
        lengths = [len(self.texts[place].new) for place in chosen]
        blocks = [sum(max(0, length - size) for length in lengths) for size in range(self.max_positions)]
        return {
            index: [sum(sums[place][size] for place in chosen) / num for size, num in enumerate(blocks) if num]
            for index, sums in self._sums.items()
        }

    def _start_pass(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._tokens = args[0]
        rows = self._tokens.tolist()
        self._places = [
            (row, place)
            for place, text in enumerate(self.texts)
            for row, tokens in enumerate(rows)
            if tuple(tokens[: len(text.tokens)]) == text.tokens
        ]

    def _count(self, index: int, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        chosen = args[1].view(*self._tokens.shape, -1)
        for row, place in self._places:
            text = self.texts[place]
            new = chosen[row, len(text.prompt) : len(text.tokens)]
            self._sums[index][place] = sum_distinct(new, self.num_experts[index], self.max_positions)


def sum_distinct(chosen: Tensor, num_experts: int, max_positions: int) -> list[int]:
    """Return for m = 1..max_positions the distinct experts of m consecutive positions, summed over all such blocks.

    chosen [T, k]: the experts of each position; indices from num_experts on do not count.
    """
    used = torch.zeros(len(chosen), num_experts + 1, dtype=torch.bool, device=chosen.device)
    used = used.scatter_(1, chosen.clamp(max=num_experts), True)[:, :num_experts]
    union, sums = used, []
    for size in range(1, max_positions + 1):
        sums.append(int(union.sum()))
        union = union[:-1] | used[size:]
    return sums


@dataclass(frozen=True)
class LayerExperts:
    """The routed experts of one layer."""

    num_experts: int
    num_bytes: float  # of one


@dataclass(frozen=True)
class StoredWeights:
    """Bytes of stored weights that passes read."""

    experts: Mapping[int, LayerExperts]  # by trunk layer; layers without experts are omitted
    trunk_bytes: int  # of a trunk pass, without routed experts: decoder layers and lm_head
    draft_expert_bytes: float  # of one routed expert of the head, the mean over its MTP layers; 0 without
    draft_bytes: int  # of a draft step, without routed experts: one MTP layer, their mean, and lm_head

    @classmethod
    def of(cls, trunk: Inventory, head: Inventory) -> "StoredWeights":
        """Sum over the headers of the trunk's checkpoint and the head's. Raises ConfigError for a dense trunk."""
        experts, others = {}, 0
        for index, layer in trunk.layers.items():
            count, expert_bytes = _routed_experts(layer)
            others += sum(info.nbytes for info in layer.values()) - expert_bytes
            if count:
                experts[index] = LayerExperts(count, expert_bytes / count)
        if not experts:
            raise ConfigError(
                f"--offload-bandwidth: {trunk.checkpoint.path} ({trunk.family.name}) is dense: it has no routed "
                "experts to keep outside of memory. Leave the option out to measure decoding on this machine"
            )
        table = trunk.shared.get("output") or trunk.shared["embedding"]  # tied
        lm_head = trunk.checkpoint.info(table).nbytes
        own = {name: head.info(name) for name in head.own if head.role(name) not in ("embedding", "output")}
        layers = [{name: info for name, info in own.items() if name in head.of_module(m)} for m in head.modules]
        routed = [_routed_experts(layer) for layer in layers]
        size = sum(info.nbytes for info in own.values()) - sum(num_bytes for _, num_bytes in routed)
        each = [num_bytes / count for count, num_bytes in routed if count]
        return cls(experts, others + lm_head, sum(each) / len(routed), size // len(routed) + lm_head)


def _routed_experts(layer: Mapping[str, TensorInfo]) -> tuple[int, int]:
    """The number of routed experts of a layer and their total bytes, including scales."""
    names, stacked, num_bytes = set(), 0, 0
    for path, info in layer.items():
        single = EXPERT.search(f".{path}")
        if single:
            names.add(single[1])
        elif STACKED.search(path):
            stacked = max(stacked, info.shape[0])
        else:
            continue
        num_bytes += info.nbytes
    return len(names) or stacked, num_bytes


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per second at which weights are read."""

    offload: float  # routed experts
    memory: float  # everything else


@dataclass(frozen=True, eq=False)
class OffloadAdvice:
    """Forecasts for every temperature, from the texts' routing and the head's acceptance on them."""

    report: ReferenceReport
    weights: StoredWeights
    routing: ExpertRouting
    bandwidths: Bandwidths

    @cached_property
    def forecasts(self) -> tuple[Forecast, ...]:
        """One for each temperature."""
        return tuple(map(self._forecast, self.report.plan.temperatures))

    @property
    def headlines(self) -> tuple[Forecast, ...]:
        return self.forecasts

    @cached_property
    def distinct(self) -> dict[float, dict[int, list[float]]]:
        """Temperature -> layer -> mean distinct experts of a block of 1, 2, ... positions."""
        return {temperature: self.routing.distinct(temperature) for temperature in self.report.plan.temperatures}

    def experts_per_layer(self, temperature: float) -> list[float]:
        """Return the mean distinct experts of a layer, by block size."""
        layers = list(self.distinct[temperature].values())
        return [sum(sizes) / len(layers) for sizes in zip(*layers, strict=True)]

    def offloaded_bytes(self, temperature: float) -> list[float]:
        """Return the bytes of experts that a trunk pass loads, by block size."""
        layers = self.distinct[temperature]
        sizes = ([num * self.weights.experts[index].num_bytes for num in row] for index, row in layers.items())
        return list(map(sum, zip(*sizes, strict=True)))

    def _costs(self, temperature: float) -> Costs:
        weights, texts = self.weights, self.report.generated[temperature].texts
        always = weights.trunk_bytes / self.bandwidths.memory
        steps = [always + num_bytes / self.bandwidths.offload for num_bytes in self.offloaded_bytes(temperature)]
        experts = self.experts_per_layer(temperature)[0] * weights.draft_expert_bytes
        draft = weights.draft_bytes / self.bandwidths.memory + experts / self.bandwidths.offload
        context = sum(len(text.tokens) for text in texts) // len(texts)
        return Costs(1, context, tuple(map(_exactly, steps)), _exactly(draft))

    def _forecast(self, temperature: float) -> Forecast:
        estimates = [each for each in self.report.figures(temperature).rates if not isnan(each.value)]
        return forecast_rates(
            [each.value for each in estimates],
            [(each.low, each.high) for each in estimates],
            self._costs(temperature),
            temperature=temperature,
            all_repetitive=len(self.report.repetitive[temperature]) == len(self.report.prompts),
        )

    def as_record(self) -> dict[str, object]:
        """Return the JSON document, with the first forecast's advice at its top."""
        temperatures = self.report.plan.temperatures
        return {
            "model": self.report.source,
            "summary": self.forecasts[0].summary,
            "pays": self.forecasts[0].pays,
            "definitions": OFFLOAD_DEFINITIONS,
            "machine": None if self.report.machine is None else vars(self.report.machine),
            "plan": asdict(self.report.plan),
            "warnings": self.report.warnings,
            "measured": [self.report.figures(temperature).as_record() for temperature in temperatures],
            "weights": asdict(self.weights),
            "experts": [self._experts_record(temperature) for temperature in temperatures],
            "costs": [each.costs.as_record() for each in self.forecasts],
            "forecasts": [each.as_record() for each in self.forecasts],
        } | self.report.given_record()

    def _experts_record(self, temperature: float) -> dict[str, object]:
        return {
            "temperature": temperature,
            "offload_bandwidth": self.bandwidths.offload,
            "memory_bandwidth": self.bandwidths.memory,
            "distinct": self.experts_per_layer(temperature),
            "offloaded_bytes": self.offloaded_bytes(temperature),
            "by_layer": self.distinct[temperature],
        }


def _exactly(seconds: float) -> Spread:
    return Spread(seconds, seconds, seconds, 1)


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
        """Estimate a pass over this many tokens from this machine's rates, whose measurement takes a second.

        num_passes: Passes of the head over all tokens, including lm_head.
        """
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
    options: Any = {"dtype": trunk.dtype, "device": trunk.device}
    pairs = [
        [(torch.ones(num_rows, shape[-1], **options), torch.ones(shape, **options)) for shape in shapes]
        for _ in range(_NUM_COPIES)
    ]

    def run(count: int) -> None:
        for states, weight in pairs[count % _NUM_COPIES]:
            torch.nn.functional.linear(states, weight)[-1, -1].item()

    run(0)
    count, started = 0, time.perf_counter()
    while (seconds := time.perf_counter() - started) < _MEASURED_S or not count:
        run(count)
        count += 1
    return count * 2 * num_rows * sum(prod(shape) for shape in shapes) / seconds
