"""A recorded pass as something that runs: places for its tensors in one arena, native programs, torch where it must.

Tensors whose last reader has run make room for later ones, so the arena stays small enough for a cache.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from nextn.fast.fuse import fused
from nextn.fast.lower import Lowered, Lowering
from nextn.fast.native import Program, Runtime
from nextn.fast.needed import needed
from nextn.fast.packing import Pack, packed
from nextn.fast.scratch import Scratch
from nextn.fast.tape import Entry, Tape, Unrecordable, key, recorded

_ALIGNMENT = 64  # bytes: a cache line, and what the widest loads want
Step = Callable[[], None]


class Replay:
    """Use: fill the inputs of the tape, call `run`, read `outputs`. Outputs are overwritten by the next run,
    its own or that of another replay with its scratch.

    left: the torch operations that have no native form, in order; each run calls them from Python. program: all of it,
    where there are none.
    """

    def __init__(self, steps: Sequence[Program | Step], outputs: Sequence[Tensor], left: Sequence[str]) -> None:
        self._steps = [step.run if isinstance(step, Program) else step for step in steps]
        self.outputs, self.left = list(outputs), list(left)
        first = steps[0] if steps else None
        self.program = first if isinstance(first, Program) and not left else None

    @classmethod
    def of(
        cls,
        runtime: Runtime,
        tape: Tape,
        run: Callable[[], Iterable[Tensor]],
        pack: Pack,
        scratch: Scratch | None = None,
    ) -> "Replay":
        """Record run() and lower it. Tensors that run() reads and that are no inputs of the tape are constants of the
        replay. scratch: of several replays, None: its own. Raises Unrecordable."""
        outputs = recorded(run, tape)
        lowering = Lowering(tape)
        kept = [*tape.inputs, *outputs]
        groups = needed(lowering.lowered(), kept)
        groups = packed(fused(groups, kept=kept, is_constant=lowering.is_constant), pack)
        arena = _Arena(tape, groups, outputs, scratch or Scratch())
        steps: list[Program | Step] = []
        left: list[str] = []
        program: Program | None = None
        for group in groups:
            if program is None:
                program = Program(runtime)
                steps.append(program)
            if not _added(program, group, arena):
                left.append(str(group.entry.func))
                steps.append(_called(group.entry, arena))
                program = None
        return cls(steps, [arena.placed(out) for out in outputs], left)

    def run(self) -> None:
        for step in self._steps:
            step()


def _added(program: Program, group: Lowered, arena: "_Arena") -> bool:
    """Whether native ops do it all. Those before one that does not do no harm: the operation itself comes behind."""
    return bool(group.instructions) and all(
        program.add(each.op, [arena.placed(tensor) for tensor in each.tensors], each.ints, each.reals, each.owners)
        for each in group.instructions
    )


def _called(entry: Entry, arena: "_Arena") -> Step:
    """The operation itself over the placed tensors, its results copied to their places."""
    if isinstance(entry.func, str):
        shapes = ", ".join(f"{view.dtype} {tuple(view.shape)}" for view in entry.args)
        raise Unrecordable(f"no native {entry.func} for {shapes}")

    def place(value: object) -> object:
        return arena.placed(value) if isinstance(value, Tensor) else value

    args, kwargs = tree_map(place, entry.args), tree_map(place, entry.kwargs)
    func, outs = entry.func, [arena.placed(out) for out in entry.outs]
    if entry.mutates:
        return lambda: func(*args, **kwargs)

    def step() -> None:
        made = func(*args, **kwargs)
        for out, value in zip(outs, made if isinstance(made, (tuple, list)) else (made,), strict=True):
            out.copy_(value)

    return step


class _Arena:
    """Places for what the tape's operations write: by size and life, first fit."""

    def __init__(self, tape: Tape, groups: Sequence[Lowered], outputs: Sequence[Tensor], scratch: Scratch) -> None:
        self._fixed = {key(tensor) for tensor in tape.inputs}
        self._offsets: dict[int, int] = {}
        self._dynamic = tape.dynamic
        lives, sizes = self._lives(groups, outputs)
        self._memory = scratch.take(self._plan(lives, sizes))

    def placed(self, tensor: Tensor) -> Tensor:
        """The tensor as it stands in the arena; constants and inputs stand where they are."""
        if key(tensor) in self._fixed or key(tensor) not in self._dynamic:
            return tensor
        start = self._offsets[key(tensor)] // tensor.itemsize
        out = torch.empty(0, dtype=tensor.dtype)
        return out.set_(self._memory.untyped_storage(), start + tensor.storage_offset(), tensor.shape, tensor.stride())

    def _lives(
        self, groups: Sequence[Lowered], outputs: Sequence[Tensor]
    ) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
        """storage -> (first, last group that touches it), and its bytes."""
        lives: dict[int, tuple[int, int]] = {}
        sizes: dict[int, int] = {}
        touched = [(at, tensor) for at, each in enumerate(groups) for tensor in each.tensors]
        touched += [(len(groups), out) for out in outputs]
        for at, tensor in touched:
            where = key(tensor)
            if where in self._dynamic and where not in self._fixed:
                lives[where] = (lives.get(where, (at, at))[0], at)
                sizes[where] = -(-tensor.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
        return lives, sizes

    def _plan(self, lives: dict[int, tuple[int, int]], sizes: dict[int, int]) -> int:
        """Bytes of the arena. What one group alone touches lies apart: its workers write the same of it in each layer,
        and nobody else takes it from the caches near them."""
        inner = {where: life for where, life in lives.items() if life[0] == life[1]}
        outer = {where: life for where, life in lives.items() if where not in inner}
        total = self._fit(outer, sizes, 0)
        return total + self._fit(inner, sizes, total)

    def _fit(self, lives: dict[int, tuple[int, int]], sizes: dict[int, int], base: int) -> int:
        """First fit in order of birth, from `base` on -> bytes."""
        living: list[tuple[int, int, int]] = []  # (offset, end, last)
        total = 0
        for where, (first, last) in sorted(lives.items(), key=lambda item: item[1]):
            living = sorted(each for each in living if each[2] >= first)
            offset = 0
            for start, end, _ in living:
                if start - offset >= sizes[where]:
                    break
                offset = max(offset, end)
            self._offsets[where] = base + offset
            living.append((offset, offset + sizes[where], last))
            total = max(total, offset + sizes[where])
        return total
