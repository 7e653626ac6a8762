"""Experts that are stored separately, read into stacked parameters by a thread ahead of their use.

The thread reads files into its own buffers and never touches mapped memory, which other code releases and unmaps.
Experts of a large layer are loaded a few at a time while they run.
"""

import re
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nextn.checkpoint.mapped_memory import release_pages
from nextn.checkpoint.tensors import TensorReader, is_finite
from nextn.errors import CheckpointError

_GROUP_BYTES = 2**26  # bytes of the experts that are read together; two such groups are in memory
_NUM_BUFFERS = 2

Item = TypeVar("Item")
Buffer = TypeVar("Buffer")
Value = TypeVar("Value")

# Stacked parameter -> the kinds of stored tensors that are concatenated in an expert's part of it.
Layout = Mapping[str, tuple[str, ...]]
_MAX_BYTES = 2**30  # of one layer's experts together; those of larger layers are loaded a few at a time
STACKED = re.compile(r"(^|\.)experts\.\w+$")  # all experts in one parameter, in names of the model
EXPERT = re.compile(r"\.experts\.(\d+)\.")  # in stored names
# Yields (first, end) of a few experts of a module at a time, while the module's parameters hold only these.
# Closing the iterator restores them, and ends what reads ahead.
ExpertGroups = Callable[[nn.Module], Generator[tuple[int, int], None, None]]


def find_layout(stacked: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> Layout | None:
    """Find which stored tensors of an expert, by kind, are concatenated in its part of each stacked parameter.

    The parts are as the model's own code makes them from the stored tensors. None if a parameter is not a
    concatenation, or if several layouts fit the values.
    """
    orders = [order for count in range(1, len(stored) + 1) for order in permutations(stored, count)]
    fitting = {
        name: [order for order in orders if _is_sequence(value, [stored[kind] for kind in order])]
        for name, value in stacked.items()
    }
    if any(len(found) != 1 for found in fitting.values()):
        return None
    layout = {name: found[0] for name, found in fitting.items()}
    used = sorted(kind for order in layout.values() for kind in order)
    return layout if used == sorted(stored) else None


def _is_sequence(value: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether `value` is the concatenation of the parts along the first axis, in its dtype."""
    sizes = [len(part) if part.ndim else 0 for part in parts]
    if any(part.shape[1:] != value.shape[1:] for part in parts) or sum(sizes) != len(value) or 0 in sizes:
        return False
    return all(torch.equal(rows, part.to(value)) for rows, part in zip(value.split(sizes), parts, strict=True))


@dataclass(frozen=True, eq=False)
class StoredExperts:
    """The stored experts of one module."""

    weights: TensorReader
    layout: Layout
    names: Sequence[Mapping[str, str]]  # of each expert: kind -> stored name
    forms: Mapping[str, tuple[torch.Size, torch.dtype]]  # of an expert's part of each stacked parameter

    @property
    def num_bytes(self) -> int:
        """Bytes of one expert in memory."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.forms.values())

    def groups(self) -> Generator[tuple[int, int, dict[str, Tensor]], None, None]:
        """Yield (first, end, stacked parameters) of a few experts at a time; each is valid until the next ones.

        Raises CheckpointError if a file has become shorter, or for values that are not finite.
        """
        count = len(self.names)
        size = max(1, min(count, _GROUP_BYTES // max(1, self.num_bytes)))
        buffers = [
            {name: torch.empty(size, *shape, dtype=dtype) for name, (shape, dtype) in self.forms.items()}
            for _ in range(_NUM_BUFFERS)
        ]
        ranges = [(first, min(first + size, count)) for first in range(0, count, size)]
        with closing(_computed_ahead(self._read, ranges, buffers)) as values:
            yield from ((first, end, value) for (first, end), value in zip(ranges, values, strict=True))

    @torch.inference_mode()
    def _read(self, experts: tuple[int, int], buffer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        first, end = experts
        for number in range(first, end):
            for name, order in self.layout.items():
                rows, start = buffer[name][number - first], 0
                for stored in (self.names[number][kind] for kind in order):
                    part = rows[start : (start := start + self.weights.checkpoint.info(stored).shape[0])]
                    self.weights.read_into(stored, part)
                    if not is_finite(part):
                        raise CheckpointError(f"{stored} holds NaN or Inf")
        return {name: value[: end - first] for name, value in buffer.items()}


def _computed_ahead(
    compute: Callable[[Item, Buffer], Value], items: Sequence[Item], buffers: Sequence[Buffer]
) -> Generator[Value, None, None]:
    """Yield compute(item, buffer) in order, while a thread fills the other buffers with the next values.

    Closing the iterator waits for the thread, which finishes its current item.
    """
    pool, pending = ThreadPoolExecutor(1), deque[Future[Value]]()
    try:
        for index, item in enumerate(items):
            pending.append(pool.submit(compute, item, buffers[index % len(buffers)]))
            if len(pending) == len(buffers):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def separable_experts(layer: nn.Module, implementation: str | None) -> nn.Module | None:
    """Return the module with a layer's experts if they are too large to be loaded together; None if they are not.

    implementation: Of experts, in the model's config: `eager` modules compute in other ways.
    """
    size = sum(value.nbytes for name, value in layer.named_parameters() if STACKED.search(name))
    # `has_gate`: transformers' own implementations compute all experts alike, each token's sum at the end.
    found = [part for part in layer.modules() if hasattr(part, "has_gate")]
    return found[0] if size > _MAX_BYTES and len(found) == 1 and implementation != "eager" else None


def run_in_groups(experts: Any, groups: ExpertGroups, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute what `experts` does for states [N, H], chosen experts [N, K] and weights [N, K].

    The bits are the same where torch computes with one thread; more divide elementwise operations by their size.
    """
    results, num_experts = None, experts.num_experts
    with closing(groups(experts)) as parts:
        try:
            for first, end in parts:
                token, place = ((chosen >= first) & (chosen < end)).nonzero(as_tuple=True)
                if len(token):
                    experts.num_experts = end - first
                    rows, numbers = states[token], (chosen[token, place] - first)[:, None]
                    part: Tensor = type(experts).forward(experts, rows, numbers, torch.ones_like(rows[:, :1]))
                    if results is None:
                        results = part.new_zeros(*chosen.shape, part.shape[-1])
                    results[token, place] = part
        finally:
            experts.num_experts = num_experts
    assert results is not None
    return (results * weights[..., None]).sum(dim=1).to(states.dtype)


def check_finite(what: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for loaded values that are not finite."""
    loaded = {name: value for name, value in tensors.items() if value.is_floating_point() and not value.is_meta}
    bad = [name for name, value in loaded.items() if not is_finite(value)]
    release_pages(loaded.values())
    if bad:
        raise CheckpointError(f"{what}: {len(bad)} tensors hold NaN or Inf: {', '.join(bad[:8])}")
