"""Weights of a lowered pass as native products read them: those of one call in one matrix, so that each worker reads
one run of memory."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from nextn.fast.lower import Instruction, Lowered

GATED = 16  # rows of each weight in turn that gated ops read (csrc/product.h)
WIDEST = 32  # columns of a block, at most (csrc/product.h)


class Packed(NamedTuple):
    """Weights as native products read them: bytes, and what they are (`Type` of runtime.h, or `BYTES` of product.h)."""

    memory: Tensor
    type: int


# (weights [N, K] or [E, N, K] of one K, parts, columns of a block or None: the kernels') -> what `joined` makes, packed
Pack = Callable[[Sequence[Tensor], int, int | None], Packed]


def packed(groups: Sequence[Lowered], pack: Pack) -> list[Lowered]:
    """The groups with packed weights, and their type behind the other ints."""
    return [replace(group, instructions=[_packed(step, pack) for step in group.instructions]) for group in groups]


def joined(weights: Sequence[Tensor], parts: int, columns: int) -> Tensor:
    """One matrix: part 0 of every weight, then part 1 of every weight, and so on; each fills blocks of `columns`."""
    if len(weights) == parts == 1:
        return weights[0]
    each = [torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[-2] % (parts * columns))) for weight in weights]
    return torch.cat([weight.unflatten(-2, (parts, -1)) for weight in each], dim=-2).flatten(-3, -2)


def _packed(step: Instruction, pack: Pack) -> Instruction:
    if step.op == "linear":
        count, parts, columns = len(step.ints) - 2, step.ints[-1], None
        start = count + 1
    elif step.op in ("expert_linear", "gated_linear", "gated_expert_linear"):
        start, count = (2 if step.op == "gated_linear" else 3), (1 if step.op == "expert_linear" else 2)
        parts, columns = (1, None) if count == 1 else (-(-step.ints[0] // GATED), GATED)
    else:
        return step
    memory, kind = pack(step.tensors[start : start + count], parts, columns)
    tensors = (*step.tensors[:start], memory, *step.tensors[start + count :])
    return replace(step, tensors=tensors, ints=(*step.ints, kind))
