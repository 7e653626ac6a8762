"""float32 between the kernels of a pass in bfloat16.

A traced pass rounds the result of every operation, as torch does. Here, every tensor that kernels can write and read in
float32 becomes one: sums leave the products, the residual stream, norms and gates as they are, and a value is rounded
once, where a kernel needs bf16: for the KV cache, and for products that processors do in bf16. So results differ from
torch's in bfloat16: they are closer to those in float32.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nextn.runtime.native.lowering import Instruction, Lowered
from nextn.runtime.native.trace import Entry, Trace, storage_key

TakesFloats = Callable[[int], bool]  # whether products with a packed type use all bits of float32 activations
_BF16 = 1  # the packed type

# Operands of an op that can only be float32 together; those in no set keep their dtype.
_Ties = Sequence[tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Widened:
    """A pass with float32 in place of bf16."""

    groups: list[Lowered]  # its groups
    outputs: list[Tensor]  # its outputs
    keys: dict[int, int]  # of storages in float32, with those of the bf16 ones that they replace


def widen(
    groups: Sequence[Lowered],
    trace: Trace,
    outputs: Sequence[Tensor],
    *,
    takes_floats: TakesFloats,
    num_wide: int = 0,
    narrow: Iterable[int] = (),
) -> Widened:
    """Replace bf16 tensors of a lowered pass with packed weights by float32 ones, which are added to its trace.

    Of the outputs, which are read after the pass, the first `num_wide` may be in float32; the others keep their dtype,
    as do storages whose keys are in `narrow`.
    """
    kept = {storage_key(tensor) for tensor in trace.inputs} | set(narrow)
    keys = _wide_keys(groups, trace.dynamic - kept, takes_floats)
    substitutes = _Substitutes(keys)
    out = [_substituted(group, substitutes) for group in groups]
    results = [substitutes(tensor) for tensor in outputs]
    for index in range(num_wide, len(results)):
        if results[index].dtype != outputs[index].dtype:
            rounded = torch.empty_like(outputs[index])
            out.append(Lowered.native(Instruction("copy", (rounded, results[index]))))
            results[index] = rounded
            trace.dynamic.add(storage_key(rounded))
    trace.dynamic.update(substitutes.keys)
    return Widened(out, results, substitutes.keys)


def _wide_keys(groups: Sequence[Lowered], dynamic: set[int], takes_floats: TakesFloats) -> set[int]:
    """The storages that can be float32: those in bf16, without the operands of kernels that need it."""
    wide: set[int] = set()
    others: set[int] = set()
    ties: list[list[Tensor]] = []
    for group in groups:
        for tensor in group.tensors:
            (wide if tensor.dtype == torch.bfloat16 and group.instructions else others).add(storage_key(tensor))
        for step in group.instructions:
            free = [[step.tensors[place] for place in tie] for tie in _ties(step, takes_floats)]
            ties += free
            used = {id(tensor) for tie in free for tensor in tie}
            others.update(storage_key(tensor) for tensor in step.tensors if id(tensor) not in used)
    wide = (wide - others) & dynamic
    while blocked := {storage_key(each) for tie in ties if not _all_float(tie, wide) for each in tie} & wide:
        wide -= blocked
    return wide


def _all_float(tie: Sequence[Tensor], wide: set[int]) -> bool:
    return all(tensor.dtype != torch.bfloat16 or storage_key(tensor) in wide for tensor in tie)


def _ties(step: Instruction, takes_floats: TakesFloats) -> _Ties:
    rule = _RULES.get(step.op)
    return [(place,) for place in range(len(step.tensors))] if rule is None else rule(step, takes_floats)


def _linear(step: Instruction, takes_floats: TakesFloats) -> _Ties:
    """outs, x, packed weights, ...; the packed type is the last int."""
    num_outs = len(step.ints) - 3 if step.op == "linear" else 1
    rows = [(num_outs,)] if takes_floats(step.ints[-1]) else []
    return [*((place,) for place in range(num_outs)), *rows]


def _attention(step: Instruction, takes_floats: TakesFloats) -> _Ties:
    """out, queries, ...: keys and values have the dtype of the cache."""
    return [(0,), (1,)] if takes_floats(_BF16) else [(0,)]


def _tied(*ties: tuple[int, ...]) -> Callable[[Instruction, TakesFloats], _Ties]:
    return lambda step, takes_floats: ties


_RULES: dict[str, Callable[[Instruction, TakesFloats], _Ties]] = {
    **dict.fromkeys(("linear", "gated_linear", "expert_linear", "gated_expert_linear"), _linear),
    **dict.fromkeys(("embedding", "grouped_embedding"), _tied((0,))),
    **dict.fromkeys(("index_select", "gather"), _tied((0, 1))),
    **dict.fromkeys(("attention", "attend_stored"), _attention),
    "store_kv": _tied(),
    "causal_conv": _tied((0,)),  # its history has the dtype of x
    "gated_delta_rule": _tied(*((place,) for place in range(6))),
    "scatter": _tied((0, 2)),
}  # of other ops, each operand may be float32


class _Substitutes:
    """Views of new float32 storages in place of views of bf16 ones."""

    def __init__(self, wide: set[int]) -> None:
        self.wide = wide
        self._storages: dict[int, Tensor] = {}
        self._views: dict[int, tuple[Tensor, Tensor]] = {}  # by id, with the original, which keeps it unique
        self.keys: dict[int, int] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in self.wide:
            return tensor
        if id(tensor) not in self._views:
            if key not in self._storages:
                self._storages[key] = torch.empty(tensor.untyped_storage().nbytes() // tensor.itemsize)
                self.keys[storage_key(self._storages[key])] = key
            view = self._storages[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            self._views[id(tensor)] = tensor, view
        return self._views[id(tensor)][1]


def _substituted(group: Lowered, substitutes: _Substitutes) -> Lowered:
    """The group over the new tensors. What torch would call is left out: these operands have a kernel."""
    if group.keys.isdisjoint(substitutes.wide):
        return group
    steps = [replace(step, tensors=tuple(map(substitutes, step.tensors))) for step in group.instructions]
    tensors = tuple(tensor for step in steps for tensor in step.tensors)
    outs = [substitutes(out) for out in group.entry.outs]
    return Lowered(Entry(steps[0].op if len(steps) == 1 else str(group.entry.func), tensors, {}, outs), steps)
