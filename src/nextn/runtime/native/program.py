"""Replays: a recorded pass as native programs, with memory for its tensors and calls of torch where there is no kernel.

Memory of tensors that are no longer read is reused, so the arena stays small enough for the processor's caches.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from nextn.runtime.native.abi import Program, Runtime
from nextn.runtime.native.fusion import fuse
from nextn.runtime.native.graph_analysis import eliminate_dead_code
from nextn.runtime.native.lowering import Lowered, Lowering
from nextn.runtime.native.memory import Scratch
from nextn.runtime.native.precision import widen
from nextn.runtime.native.trace import Entry, Trace, Untraceable, record, storage_key
from nextn.runtime.native.weight_packing import PackedWeights, pack_weights

_ALIGNMENT = 64  # bytes: a cache line, and the alignment of the widest loads
Step = Callable[[], None]
_Lifetime = tuple[int, int]  # first and last group that uses a storage


class Replay:
    """A recorded pass that runs again on other values: fill the inputs of its trace, call `run`, read `outputs`.

    Attributes:
        outputs: Overwritten by the next run of this replay, or of another one that shares its scratch memory.
        torch_ops: Names of the operations without a native form, in order; each run calls them through torch.
        program: The whole pass as one native program; None if there are torch_ops.
    """

    def __init__(self, steps: Sequence[Program | Step], outputs: Sequence[Tensor], torch_ops: Sequence[str]) -> None:
        self._steps = [step.run if isinstance(step, Program) else step for step in steps]
        self.outputs, self.torch_ops = list(outputs), list(torch_ops)
        first = steps[0] if steps else None
        self.program = first if isinstance(first, Program) and not torch_ops else None

    @classmethod
    def of(
        cls,
        runtime: Runtime,
        trace: Trace,
        run: Callable[[], Iterable[Tensor]],
        weights: PackedWeights,
        scratch: Scratch | None = None,
        *,
        num_wide: int = 0,
    ) -> "Replay":
        """Record `run()` in a fresh trace with its inputs, and lower it; other tensors that it reads become constants.

        Of the outputs, the first `num_wide` are in float32 if that keeps bits of theirs that are rounded to bfloat16 in
        the recording. `scratch` is memory shared with other replays. Raises Untraceable for a pass that cannot be
        replayed for other inputs.
        """
        outputs = record(run, trace)
        lowering = Lowering(trace)
        live = [*trace.inputs, *outputs]
        groups = eliminate_dead_code(lowering.lower(), live)
        groups = fuse(groups, live=live, is_constant=lowering.is_constant, weight_type=weights.merge_key)
        groups, narrow = pack_weights(groups, weights), set[int]()
        while True:
            widened = widen(groups, trace, outputs, takes_floats=runtime.takes_floats, num_wide=num_wide, narrow=narrow)
            try:
                arena = _Arena(trace, widened.groups, widened.outputs, scratch or Scratch())
                steps, torch_ops = _compile(runtime, widened.groups, arena, widened.keys)
            except _NoKernel as error:
                narrow |= error.keys
                continue
            return cls(steps, [arena.view(out) for out in widened.outputs], torch_ops)

    def run(self) -> None:
        for step in self._steps:
            step()


class _NoKernel(Exception):
    """No kernel has these operands in float32; `keys` are those of their storages in bf16."""

    def __init__(self, keys: set[int]) -> None:
        super().__init__(keys)
        self.keys = keys


def _compile(
    runtime: Runtime, groups: Sequence[Lowered], arena: "_Arena", wide: Mapping[int, int]
) -> tuple[list["Program | Step"], list[str]]:
    """Return programs and calls of torch in order, and the names of the latter. wide: see `Widened.keys`."""
    steps: list[Program | Step] = []
    torch_ops: list[str] = []
    program: Program | None = None
    for group in groups:
        if program is None:
            program = Program(runtime)
            steps.append(program)
        if not _add_native(program, group, arena):
            if widened := group.keys & wide.keys():
                raise _NoKernel({wide[key] for key in widened})
            torch_ops.append(str(group.entry.func))
            steps.append(_torch_call(group.entry, arena))
            program = None
    return steps, torch_ops


def _add_native(program: Program, group: Lowered, arena: "_Arena") -> bool:
    """Whether native ops do the whole group. If only the first ones are supported they are harmless: torch then repeats
    the operation after them."""
    return bool(group.instructions) and all(
        program.add(step.op, [arena.view(tensor) for tensor in step.tensors], step.ints, step.reals, step.num_shards)
        for step in group.instructions
    )


def _torch_call(entry: Entry, arena: "_Arena") -> Step:
    """The operation itself over tensors in the arena, its results copied to their memory."""
    if isinstance(entry.func, str):
        shapes = ", ".join(f"{view.dtype} {tuple(view.shape)}" for view in entry.args)
        raise Untraceable(f"no native {entry.func} for {shapes}")

    def in_arena(value: object) -> object:
        return arena.view(value) if isinstance(value, Tensor) else value

    args, kwargs = tree_map(in_arena, entry.args), tree_map(in_arena, entry.kwargs)
    func, outs = entry.func, [arena.view(out) for out in entry.outs]
    if entry.mutates:
        return lambda: func(*args, **kwargs)

    def step() -> None:
        result = func(*args, **kwargs)
        for out, value in zip(outs, result if isinstance(result, (tuple, list)) else (result,), strict=True):
            out.copy_(value)

    return step


class _Arena:
    """Memory for the tensors that a trace's operations write, planned by size and lifetime (first fit)."""

    def __init__(self, trace: Trace, groups: Sequence[Lowered], outputs: Sequence[Tensor], scratch: Scratch) -> None:
        self._fixed = {storage_key(tensor) for tensor in trace.inputs}
        self._offsets: dict[int, int] = {}
        self._dynamic = trace.dynamic
        lifetimes, sizes = self._lifetimes(groups, outputs)
        self._memory = scratch.take(self._plan(lifetimes, sizes))

    def view(self, tensor: Tensor) -> Tensor:
        """Return the tensor's view in the arena; constants and inputs stay where they are."""
        key = storage_key(tensor)
        if key in self._fixed or key not in self._dynamic:
            return tensor
        offset = self._offsets[key] // tensor.itemsize + tensor.storage_offset()
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(self._memory.untyped_storage(), offset, tensor.shape, tensor.stride())

    def _lifetimes(
        self, groups: Sequence[Lowered], outputs: Sequence[Tensor]
    ) -> tuple[dict[int, _Lifetime], dict[int, int]]:
        """The lifetime and the size in bytes of each storage."""
        lifetimes: dict[int, _Lifetime] = {}
        sizes: dict[int, int] = {}
        uses = [(index, tensor) for index, group in enumerate(groups) for tensor in group.tensors]
        uses += [(len(groups), out) for out in outputs]
        for index, tensor in uses:
            key = storage_key(tensor)
            if key in self._dynamic and key not in self._fixed:
                lifetimes[key] = (lifetimes.get(key, (index, index))[0], index)
                sizes[key] = -(-tensor.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
        return lifetimes, sizes

    def _plan(self, lifetimes: dict[int, _Lifetime], sizes: dict[int, int]) -> int:
        """Return the bytes of the arena. Storages that a single group uses have a region of their own: each worker
        writes the same part of it in every layer, so it stays in that core's caches."""
        inner = {key: lifetime for key, lifetime in lifetimes.items() if lifetime[0] == lifetime[1]}
        outer = {key: lifetime for key, lifetime in lifetimes.items() if key not in inner}
        total = self._first_fit(outer, sizes, 0)
        return total + self._first_fit(inner, sizes, total)

    def _first_fit(self, lifetimes: dict[int, _Lifetime], sizes: dict[int, int], base: int) -> int:
        """Assign offsets from `base` on, in order of first use; return the bytes that are used."""
        allocated: list[tuple[int, int, int]] = []  # (offset, end, last use)
        total = 0
        for key, (first, last) in sorted(lifetimes.items(), key=lambda item: item[1]):
            allocated = sorted(block for block in allocated if block[2] >= first)
            offset = 0
            for start, end, _ in allocated:
                if start - offset >= sizes[key]:
                    break
                offset = max(offset, end)
            self._offsets[key] = base + offset
            allocated.append((offset, offset + sizes[key], last))
            total = max(total, offset + sizes[key])
        return total
