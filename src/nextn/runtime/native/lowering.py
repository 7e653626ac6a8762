"""Lowering of aten operations to native instructions. An operation without a native form is called through torch.

Instructions refer to the recorded tensors; program.py assigns their memory.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nextn.model.logits import FLOAT_LINEAR
from nextn.runtime.native.trace import Entry, Trace, aten, storage_key


@dataclass(frozen=True, eq=False)
class Instruction:
    """A call of a native op."""

    op: str
    tensors: tuple[Tensor, ...]  # those that it writes first
    ints: tuple[int, ...] = ()
    reals: tuple[float, ...] = ()
    num_shards: int = 0  # see `Call` of runtime.h; always 0 in the first instruction of a group


@dataclass(frozen=True, eq=False)
class Lowered:
    """A group: a recorded operation and the instructions that replace it; without any, torch runs the operation."""

    entry: Entry
    instructions: Sequence[Instruction]

    @classmethod
    def native(cls, step: Instruction, *, outs: Sequence[Tensor] = ()) -> "Lowered":
        """Create a group without a torch fallback. `outs`: all tensors that it writes, by default the first."""
        return cls(Entry(step.op, step.tensors, {}, list(outs or step.tensors[:1]), step.ints, step.reals), [step])

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the operation or an instruction reads or writes, in order."""
        steps = (tensor for step in self.instructions for tensor in step.tensors)
        return [*self.entry.inputs, *self.entry.outs, *steps]

    @cached_property
    def keys(self) -> frozenset[int]:
        """Storages that the operation or an instruction reads or writes."""
        steps = frozenset(storage_key(tensor) for step in self.instructions for tensor in step.tensors)
        return self.entry.in_keys | self.entry.out_keys | steps


Rule = Callable[["Lowering", Entry], list[Instruction] | None]
_PRODUCTS = (torch.float32, torch.bfloat16)  # dtypes of weights that native products have


class Lowering:
    """Lowers the operations of a trace. Weights stay unpacked; `pack_weights` runs last."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def lower(self) -> list[Lowered]:
        """Return the groups in order, without operations that only create views."""
        return [Lowered(entry, self._lower(entry)) for entry in self.trace.entries if not _creates_views(entry)]

    def is_constant(self, tensor: Tensor) -> bool:
        return storage_key(tensor) not in self.trace.dynamic

    def _lower(self, entry: Entry) -> list[Instruction]:
        if isinstance(entry.func, str):
            return [Instruction(entry.func, tuple(entry.args), entry.ints, entry.reals)]
        rule = _RULES.get(entry.func.overloadpacket)
        return (rule(self, entry) if rule else None) or []


def _creates_views(entry: Entry) -> bool:
    """Whether the operation computes no values: it returns views of its inputs, or uninitialized memory."""
    if isinstance(entry.func, str) or entry.mutates:
        return False
    is_empty = entry.func.overloadpacket in (aten.new_empty, aten.empty_like)
    return is_empty or entry.out_keys <= entry.in_keys


def _rules() -> dict[object, Rule]:
    rules: dict[object, Rule] = {}
    for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "minimum", "maximum", "remainder"):
        rules[getattr(aten, name)] = _binary(name)
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "floor_divide", "pow"):
        rules[getattr(aten, name)] = _binary(name)
    for name in ("add_", "sub_", "mul_", "div_"):
        rules[getattr(aten, name)] = _binary(name[:-1])
    unary = "neg exp log sqrt rsqrt reciprocal abs sign silu sigmoid tanh relu cos sin bitwise_not"
    rules |= {getattr(aten, name): _unary(name) for name in unary.split()}
    for copy in ("_to_copy", "clone", "lift_fresh_copy", "contiguous", "alias_copy", "_unsafe_view"):
        if hasattr(aten, copy):
            rules[getattr(aten, copy)] = _unary("copy")
    rules |= {aten.sum: _reduction("sum"), aten.mean: _reduction("mean"), aten.amax: _reduction("amax")}
    constants = {name: getattr(aten, name) for name in ("zeros_like", "new_zeros", "zero_", "ones_like", "new_ones")}
    rules |= {op: _fill(float("ones" in name)) for name, op in constants.items()}
    return rules | {
        aten.mm: _matmul,
        aten.addmm: _matmul,
        FLOAT_LINEAR: _float_linear,
        aten.copy_: _copy_into,
        aten.embedding: _embedding,
        aten.cat: _cat,
        aten.stack: _stack,
        aten.where: _where,
        aten.masked_fill: _masked_fill,
        aten.masked_fill_: _masked_fill,
        aten._softmax: _softmax,
        aten.topk: _topk,
        aten.argmax: _argmax,
        aten.cumsum: _cumsum,
        aten.gather: _gather,
        aten.scatter: _scatter,
        aten.scatter_: _scatter,
        aten.index: _index,
        aten.index_put_: _index_put,
        aten.index_select: _index_select,
        aten.gelu: _gelu,
        aten.softplus: _softplus,
        aten.clamp: _clamp,
        aten.clamp_min: _clamp,
        aten.full_like: _fill_with(1),
        aten.new_full: _fill_with(2),
        aten.native_layer_norm: _layer_norm,
        aten.constant_pad_nd: _pad,
    }


def _like(tensor: Tensor, out: Tensor) -> Tensor:
    return tensor.expand(out.shape)


def _binary(name: str) -> Rule:
    def rule(lowering: Lowering, entry: Entry) -> list[Instruction] | None:
        left, right = entry.args[:2]
        if entry.kwargs.get("rounding_mode") is not None or not isinstance(left, Tensor):
            return None
        out = entry.outs[0]
        alpha = [float(entry.kwargs.get("alpha", 1))] if name in ("add", "sub") else []
        if isinstance(right, Tensor):
            if name == "pow":
                return None
            return [Instruction(name, (out, _like(left, out), _like(right, out)), reals=tuple(alpha))]
        return [Instruction(name, (out, _like(left, out)), reals=(float(right), *alpha))]

    return rule


def _unary(name: str) -> Rule:
    def rule(lowering: Lowering, entry: Entry) -> list[Instruction]:
        out, source = entry.outs[0], entry.args[0]
        if source.shape != out.shape:  # a reshape that had to copy: both are contiguous
            assert source.is_contiguous()
            source = source.view(out.shape)
        return [Instruction(name, (out, source))]

    return rule


def _copy_into(lowering: Lowering, entry: Entry) -> list[Instruction]:
    target, source = entry.args[:2]
    return [Instruction("copy", (target, _like(source, target)))]


def _fill(value: float) -> Rule:
    return lambda lowering, entry: [Instruction("fill", (entry.outs[0],), reals=(value,))]


def _fill_with(position: int) -> Rule:
    return lambda lowering, entry: [Instruction("fill", (entry.outs[0],), reals=(float(entry.args[position]),))]


def _matmul(lowering: Lowering, entry: Entry) -> list[Instruction] | None:
    *bias, rows, weight = entry.args
    if not lowering.is_constant(weight) or lowering.is_constant(rows) or weight.dtype != rows.dtype:
        return None
    if bias and (not lowering.is_constant(bias[0]) or bias[0].ndim != 1 or entry.kwargs):
        return None
    if weight.dtype not in _PRODUCTS:
        return None
    before: list[Instruction] = []
    if rows.stride(1) != 1:
        dense = torch.empty(rows.shape, dtype=rows.dtype)
        lowering.trace.dynamic.add(storage_key(dense))
        before, rows = [Instruction("copy", (dense, rows))], dense
    size = (weight.shape[1], weight.shape[0], 1)
    return [*before, Instruction("linear", (entry.outs[0], rows, weight.t(), *bias), ints=size)]


def _float_linear(lowering: Lowering, entry: Entry) -> list[Instruction] | None:
    """x is rounded to the dtype of the weight first, if the product has to (see precision.py)."""
    x, weight, bias = entry.args
    if not lowering.is_constant(weight) or lowering.is_constant(x) or weight.dtype not in _PRODUCTS:
        return None
    if bias is not None and not lowering.is_constant(bias):
        return None
    n, k = weight.shape
    out, rows, before = entry.outs[0].view(-1, n), x.reshape(-1, k), []
    if storage_key(rows) != storage_key(x) or rows.stride(1) != 1 or rows.dtype != weight.dtype:
        dense = torch.empty(x.shape, dtype=weight.dtype)
        lowering.trace.dynamic.add(storage_key(dense))
        before, rows = [Instruction("copy", (dense, x))], dense.view(-1, k)
    return [*before, Instruction("linear", (out, rows, weight, *([] if bias is None else [bias])), ints=(n, k, 1))]


def _embedding(lowering: Lowering, entry: Entry) -> list[Instruction] | None:
    weight, ids = entry.args[:2]
    if not ids.is_contiguous():
        return None
    out = entry.outs[0]
    rows = (out.view(-1, out.shape[-1]), weight, ids.view(-1))
    return [Instruction("embedding", rows) if lowering.is_constant(weight) else Instruction("index_select", rows, (0,))]


def _cat(lowering: Lowering, entry: Entry) -> list[Instruction]:
    parts = entry.args[0]
    dim = entry.args[1] if len(entry.args) > 1 else 0
    out, start, steps = entry.outs[0], 0, []
    for part in parts:
        if part.ndim == 1 and not part.numel():
            continue
        steps.append(Instruction("copy", (out.narrow(dim, start, part.shape[dim]), part)))
        start += part.shape[dim]
    return steps


def _stack(lowering: Lowering, entry: Entry) -> list[Instruction]:
    dim = entry.args[1] if len(entry.args) > 1 else 0
    return [Instruction("copy", (entry.outs[0].select(dim, index), part)) for index, part in enumerate(entry.args[0])]


def _where(lowering: Lowering, entry: Entry) -> list[Instruction] | None:
    if len(entry.args) != 3 or not all(isinstance(arg, Tensor) for arg in entry.args):
        return None
    out = entry.outs[0]
    return [Instruction("where", (out, *(_like(arg, out) for arg in entry.args)))]


def _masked_fill(lowering: Lowering, entry: Entry) -> list[Instruction] | None:
    source, mask, value = entry.args
    if isinstance(value, Tensor):
        if not lowering.is_constant(value):
            return None
        value = value.item()
    out = entry.outs[0]
    return [Instruction("masked_fill", (out, _like(source, out), _like(mask, out)), reals=(float(value),))]


def _reduction(name: str) -> Rule:
    def rule(lowering: Lowering, entry: Entry) -> list[Instruction] | None:
        source = entry.args[0]
        dims = entry.args[1] if len(entry.args) > 1 and entry.args[1] else range(source.ndim)
        dims = {dim % source.ndim for dim in dims}
        out = entry.outs[0]
        for dim in sorted(dims) if out.ndim < source.ndim else ():
            out = out.unsqueeze(dim)
        return [Instruction(name, (out, source), ints=(sum(1 << dim for dim in dims),))]

    return rule


def _softmax(lowering: Lowering, entry: Entry) -> list[Instruction] | None:
    source, dim, half_to_float = entry.args
    if dim % source.ndim != source.ndim - 1 or half_to_float:
        return None
    return [Instruction("softmax", (entry.outs[0], source))]


def _topk(lowering: Lowering, entry: Entry) -> list[Instruction] | None:
    source, count, dim, largest = (*entry.args, -1, True)[:4] if len(entry.args) < 4 else entry.args[:4]
    if dim % source.ndim != source.ndim - 1 or not largest:
        return None
    return [Instruction("topk", (*entry.outs, source), ints=(count,))]


def _argmax(lowering: Lowering, entry: Entry) -> list[Instruction] | None:
    source = entry.args[0]
    if len(entry.args) < 2 or entry.args[1] is None or entry.args[1] % source.ndim != source.ndim - 1:
        return None
    out = entry.outs[0]
    return [Instruction("argmax", (out.squeeze(-1) if out.ndim == source.ndim else out, source))]


def _cumsum(lowering: Lowering, entry: Entry) -> list[Instruction] | None:
    source, dim = entry.args[:2]
    return [Instruction("cumsum", (entry.outs[0], source))] if dim % source.ndim == source.ndim - 1 else None


def _gather(lowering: Lowering, entry: Entry) -> list[Instruction]:
    source, dim, index = entry.args[:3]
    return [Instruction("gather", (entry.outs[0], source, index), ints=(dim % source.ndim,))]


def _scatter(lowering: Lowering, entry: Entry) -> list[Instruction] | None:
    target, dim, index, value = entry.args[:4]
    if len(entry.args) > 4 or entry.kwargs:
        return None
    out = entry.outs[0]
    steps = [] if entry.mutates else [Instruction("copy", (out, target))]
    dims = (dim % target.ndim,)
    if isinstance(value, Tensor):
        return [*steps, Instruction("scatter", (out, index, value), ints=dims)]
    return [*steps, Instruction("scatter_value", (out, index), ints=dims, reals=(float(value),))]


def _index(lowering: Lowering, entry: Entry) -> list[Instruction] | None:
    source, indices = entry.args
    if len(indices) != 1 or indices[0].dtype != torch.int64 or not indices[0].is_contiguous():
        return None
    ids, out = indices[0].view(-1), entry.outs[0]
    return [Instruction("index_select", (out.view(ids.shape[0], *source.shape[1:]), source, ids), ints=(0,))]


def _index_put(lowering: Lowering, entry: Entry) -> list[Instruction] | None:
    target, indices, source = entry.args[:3]
    *before, ids = indices
    if len(entry.args) > 3 or any(index is not None for index in before) or ids is None or ids.dtype != torch.int64:
        return None
    if len(indices) != target.ndim or ids.ndim != 1:
        return None
    return [Instruction("scatter", (target, _like(ids, source), source), ints=(target.ndim - 1,))]


def _index_select(lowering: Lowering, entry: Entry) -> list[Instruction]:
    source, dim, ids = entry.args
    return [Instruction("index_select", (entry.outs[0], source, ids), ints=(dim % source.ndim,))]


def _gelu(lowering: Lowering, entry: Entry) -> list[Instruction]:
    is_tanh = entry.kwargs.get("approximate") == "tanh"
    return [Instruction("gelu", (entry.outs[0], entry.args[0]), ints=(int(is_tanh),))]


def _softplus(lowering: Lowering, entry: Entry) -> list[Instruction]:
    beta, threshold = (float(arg) for arg in (*entry.args[1:], *(1, 20)[len(entry.args) - 1 :]))
    return [Instruction("softplus", (entry.outs[0], entry.args[0]), reals=(beta, threshold))]


def _clamp(lowering: Lowering, entry: Entry) -> list[Instruction] | None:
    low, high = (*entry.args[1:], None, None)[:2]
    if isinstance(low, Tensor) or isinstance(high, Tensor) or entry.kwargs:
        return None
    bounds = (-math.inf if low is None else float(low), math.inf if high is None else float(high))
    return [Instruction("clamp", (entry.outs[0], entry.args[0]), reals=bounds)]


def _layer_norm(lowering: Lowering, entry: Entry) -> list[Instruction] | None:
    source, shape, weight, bias, eps = entry.args
    if len(shape) != 1 or weight is None or bias is None:
        return None
    return [Instruction("native_layer_norm", (entry.outs[0], source, weight, bias), reals=(float(eps),))]


def _pad(lowering: Lowering, entry: Entry) -> list[Instruction] | None:
    source, pads = entry.args[:2]
    value = float(entry.args[2]) if len(entry.args) > 2 else 0.0
    if min(pads) < 0:
        return None
    inner = entry.outs[0]
    for back, (low, _) in enumerate(zip(pads[::2], pads[1::2], strict=True), start=1):
        inner = inner.narrow(-back, low, source.shape[-back])
    return [Instruction("fill", (entry.outs[0],), reals=(value,)), Instruction("copy", (inner, source))]


_RULES: dict[object, Rule] = _rules()
