"""Head-parallel attention: a worker computes the queries, keys and values of its own heads and attends with them, so no
barrier is needed between these steps."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from nextn.runtime.native.graph_analysis import is_same_view, single_instruction
from nextn.runtime.native.lowering import Instruction, Lowered
from nextn.runtime.native.trace import Entry
from nextn.runtime.native.weight_packing import MAX_BLOCK_COLUMNS

_NORM_ROPE_VIEWS = 5  # out, x, cosine, sine, weight
_INPUTS = {"attention": slice(1, 4), "store_kv": slice(0, 2)}  # views computed per head, values last
_MAX_BETWEEN = 2  # groups that may lie between, such as the copy of Qwen3.5's gates


def split_by_heads(groups: Sequence[Lowered]) -> list[Lowered]:
    """Fuse linear layers, qk-norm+rope and attention into one group sharded by heads, where nothing else must run
    between them."""
    out, index = [], 0
    while index < len(groups):
        candidates = range(index + 1, index + 2 + _MAX_BETWEEN)
        norm_rope = next((at for at in candidates if _op(groups, at) == "norm_rope"), index)
        fused = _fuse(groups, index, norm_rope) if norm_rope > index else None
        out += [groups[index]] if fused is None else [fused, *groups[index + 1 : norm_rope]]
        index = index + 1 if fused is None else norm_rope + 2
    return out


def _fuse(groups: Sequence[Lowered], linear: int, norm_rope: int) -> Lowered | None:
    """Fuse three groups (linear, qk-norm+rope, attention) into one. The groups between them are moved after the fused
    one; returns None if that would reorder a data dependency."""
    indices, between = (linear, norm_rope, norm_rope + 1), groups[linear + 1 : norm_rope]
    steps = [step for index in indices if (step := single_instruction(groups, index)) is not None]
    sharded = _shard(*steps) if len(steps) == len(indices) else None
    later = groups[norm_rope : norm_rope + 2]
    if sharded is None or _depend(between, later) or _depend(later, between):
        return None
    tensors = tuple(tensor for step in sharded for tensor in step.tensors)
    outs = [out for index in indices for out in groups[index].entry.outs]
    return Lowered(Entry("attention", tensors, {}, outs), sharded)


def _op(groups: Sequence[Lowered], index: int) -> str:
    step = single_instruction(groups, index)
    return "" if step is None else step.op


def _depend(writers: Sequence[Lowered], groups: Sequence[Lowered]) -> bool:
    """Whether the groups use anything that the writers write."""
    written = frozenset().union(*(group.entry.out_keys for group in writers))
    return any(written & group.keys for group in groups)


def _shard(linear: Instruction, norm_rope: Instruction, attention: Instruction) -> list[Instruction] | None:
    """The three instructions sharded by kv heads; None if they are other ops, or if a head does not read only its own
    output channels."""
    if linear.op != "linear" or attention.op not in _INPUTS:
        return None
    inputs = attention.tensors[_INPUTS[attention.op]]
    heads, num_layers = inputs[-1].shape[1], len(linear.ints) - 2
    outs, weights = linear.tensors[:num_layers], linear.tensors[num_layers + 1 : 2 * num_layers + 1]
    if any(len(weight) % (heads * MAX_BLOCK_COLUMNS) for weight in weights):
        return None
    starts = range(0, len(norm_rope.tensors), _NORM_ROPE_VIEWS)
    rotated = [norm_rope.tensors[start : start + 2] for start in starts]
    if any(out.ndim != 4 or out.shape[1] % heads or not _is_split_by_heads(x, outs) for out, x in rotated):
        return None
    for view in inputs:
        if not _is_split_by_heads(view, outs) and not any(is_same_view(view, out) for out, _ in rotated):
            return None
    return [
        replace(linear, ints=(*linear.ints[:-1], heads)),
        replace(norm_rope, tensors=tuple(map(_heads_first, norm_rope.tensors)), num_shards=heads),
        replace(attention, num_shards=heads),
    ]


def _is_split_by_heads(view: Tensor, outs: Sequence[Tensor]) -> bool:
    """Whether the heads of the view [B, heads, T, D] are, in order, equal shares of the channels of one of the outs."""
    for out in outs:
        start = (view.data_ptr() - out.data_ptr()) // out.itemsize
        stride = view.stride(1)
        if start >= 0 and start + view.shape[3] <= stride and stride * view.shape[1] == out.shape[1]:
            return True
    return False


def _heads_first(view: Tensor) -> Tensor:
    """The view with its rows in the order in which workers share them."""
    return view.transpose(0, 1) if view.ndim == 4 else view
