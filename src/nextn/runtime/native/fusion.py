"""Fusion of operations in a lowered pass: all of it in order, with rotary embeddings, SwiGLU, linear layers, and
attention of which a worker computes whole heads.

Fused kernels give the same bits as the separate operations. Anything that is written differently is left as it is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from nextn.runtime.native.graph_analysis import (
    FLOATS,
    UseDefs,
    are_dense_and_alike,
    eliminate_copies,
    is_pair,
    is_same_view,
    single_instruction,
    split_concatenations,
    with_changes,
)
from nextn.runtime.native.lowering import Instruction, Lowered
from nextn.runtime.native.norm_fusion import IsConstant, fuse_add_norm, fuse_qk_norm_rope, fuse_rms_norms
from nextn.runtime.native.trace import Entry, storage_key
from nextn.runtime.native.weight_packing import MAX_BLOCK_COLUMNS

WeightType = Callable[[Tensor], object]  # weights of different types cannot be in one matrix
_ROPE_OPS = ["mul", "neg", "copy", "copy", "mul", "add"]


def fuse(
    groups: Sequence[Lowered],
    *,
    live: Sequence[Tensor],
    is_constant: IsConstant,
    weight_type: WeightType = lambda weight: weight.dtype,
) -> list[Lowered]:
    """Fuse groups wherever possible. `live`: tensors that are read after the pass, or that exist before it."""
    out = split_concatenations(groups)
    out = fuse_rms_norms(out, UseDefs(out, live), is_constant)
    out = fuse_rope(out, UseDefs(out, live))
    out = fuse_swiglu(out, UseDefs(out, live))
    out = merge_linear_layers(out, UseDefs(out, live), weight_type)
    out = eliminate_copies(out, live)
    out = fuse_gated_linear(out, UseDefs(out, live))
    out = fuse_qk_norm_rope(out, UseDefs(out, live))
    return split_by_heads(fuse_add_norm(out, UseDefs(out, live)))


@dataclass(frozen=True)
class _RopeMatch:
    """A matched rotary embedding. out, x, cosine, sine: [..., 2 * half], of one dtype."""

    out: Tensor
    x: Tensor
    cosine: Tensor
    sine: Tensor
    intermediates: tuple[Tensor, ...]
    end: int

    @property
    def lowered(self) -> Lowered:
        return Lowered.native(Instruction("rope", (self.out, self.x, self.cosine, self.sine)))


def fuse_rope(groups: Sequence[Lowered], use_defs: UseDefs) -> list[Lowered]:
    """Fuse each rotary embedding in rotate-half form, x * cos + [-x2, x1] * sin, into one `rope`."""
    return use_defs.replace_matches(groups, lambda index: _match_rope(groups, index))


def _match_rope(groups: Sequence[Lowered], index: int) -> Iterator[_RopeMatch]:
    """The rotary embedding that starts with this group, if there is one."""
    end = index + len(_ROPE_OPS)
    steps = [step for at in range(index, end) if (step := single_instruction(groups, at)) is not None]
    if [step.op for step in steps] != _ROPE_OPS or any(len(steps[at].tensors) != 3 for at in (0, 4, 5)):
        return
    (
        (x_cos, *cos_factors),
        (negated, upper),
        (to_lower, copied),
        (to_upper, lower),
        (x_sin, *sin_factors),
        (out, *terms),
    ) = (step.tensors for step in steps)
    if steps[5].reals != (1.0,) or not is_same_view(copied, negated) or not is_pair(terms, x_cos, x_sin):
        return
    for x, cosine in (cos_factors, cos_factors[::-1]):
        for rotated, sine in (sin_factors, sin_factors[::-1]):
            fits = out.dtype in FLOATS and are_dense_and_alike(out, x, cosine, sine, rotated)
            if fits and _are_halves(x, lower, upper) and _are_halves(rotated, to_lower, to_upper):
                yield _RopeMatch(out, x, cosine, sine, (x_cos, negated, rotated, x_sin), end)
                return


def _are_halves(tensor: Tensor, lower: Tensor, upper: Tensor) -> bool:
    half = tensor.shape[-1] // 2
    is_even = tensor.shape[-1] == 2 * half
    return is_even and is_same_view(tensor[..., :half], lower) and is_same_view(tensor[..., half:], upper)


def fuse_swiglu(groups: Sequence[Lowered], use_defs: UseDefs) -> list[Lowered]:
    """Fuse silu(a) and its later product with b into one `silu_mul`, at the position of the product."""
    changes = dict[int, Lowered | None]()
    for index in range(len(groups)):
        if (match := _match_swiglu(groups, use_defs, index)) is not None:
            changes |= {index: None, match[0]: match[1]}
    return with_changes(groups, changes)


def _match_swiglu(groups: Sequence[Lowered], use_defs: UseDefs, index: int) -> tuple[int, Lowered] | None:
    """Return the index of a silu's product, and the fused group."""
    silu = single_instruction(groups, index)
    if silu is None or silu.op != "silu":
        return None
    gate, a = silu.tensors
    others = use_defs.uses(gate) - {index}
    product_index = min(others) if len(others) == 1 else index
    product = single_instruction(groups, product_index) if product_index > index else None
    if product is None or product.op != "mul" or len(product.tensors) != 3:
        return None
    out, *factors = product.tensors
    unchanged = not any(index < use < product_index for use in use_defs.uses(a))
    for factor, b in (factors, factors[::-1]):
        is_gate = is_same_view(factor, gate) and storage_key(b) != storage_key(gate)
        if is_gate and unchanged and out.dtype in FLOATS and are_dense_and_alike(out, a, b):
            return product_index, Lowered.native(Instruction("silu_mul", (out, a, b)))
    return None


def merge_linear_layers(
    groups: Sequence[Lowered], use_defs: UseDefs, weight_type: WeightType = lambda weight: weight.dtype
) -> list[Lowered]:
    """Merge linear layers of one input (queries, keys and values; gate and up projection) into one `linear`, so that
    workers synchronize once. It takes the position of the first layer."""
    changes = dict[int, Lowered | None]()
    for index in range(len(groups)):
        layers = _find_mergeable(groups, use_defs, index, weight_type) if index not in changes else []
        if len(layers) > 1:
            changes |= dict.fromkeys(layers) | {index: _merge([groups[layer].instructions[0] for layer in layers])}
    return with_changes(groups, changes)


def _find_mergeable(groups: Sequence[Lowered], use_defs: UseDefs, index: int, weight_type: WeightType) -> list[int]:
    """This and the following linear layers of the same input, up to the first other use of that input."""
    first = _linear(groups, index)
    if first is None:
        return []
    mergeable = [index]
    for use in sorted(use for use in use_defs.uses(first.tensors[1]) if use > index):
        layer = _linear(groups, use)
        if layer is None or not _can_merge(first, layer) or min(use_defs.uses(layer.tensors[0])) < use:
            break
        if weight_type(first.tensors[2]) != weight_type(layer.tensors[2]):
            break
        mergeable.append(use)
    return mergeable


def _linear(groups: Sequence[Lowered], index: int) -> Instruction | None:
    step = single_instruction(groups, index)
    return step if step is not None and step.op == "linear" else None


def _can_merge(first: Instruction, layer: Instruction) -> bool:
    return (
        len(first.ints) == len(layer.ints) == 3  # one output each
        and first.ints[1:] == layer.ints[1:]
        and is_same_view(first.tensors[1], layer.tensors[1])
        and len(first.tensors) == len(layer.tensors)
    )


def _merge(layers: Sequence[Instruction]) -> Lowered:
    """Tensors: outs, x, weights, biases. Ints: output size of each layer, then those that all have in common."""
    outs, rows, *rest = zip(*(layer.tensors for layer in layers), strict=True)
    tensors = (*outs, rows[0], *(tensor for tensors in rest for tensor in tensors))
    ints = (*(layer.ints[0] for layer in layers), *layers[0].ints[1:])
    return Lowered.native(Instruction("linear", tensors, ints), outs=outs)


def fuse_gated_linear(groups: Sequence[Lowered], use_defs: UseDefs) -> list[Lowered]:
    """Fuse each `silu_mul` with the linear layer, or expert layer, that computes both of its inputs."""
    changes = dict[int, Lowered | None]()
    for index in range(len(groups)):
        if (match := _match_gated_linear(groups, use_defs, index)) is not None:
            layer_index, instruction = match
            changes |= {layer_index: None, index: Lowered.native(instruction)}
    return with_changes(groups, changes)


def _match_gated_linear(groups: Sequence[Lowered], use_defs: UseDefs, index: int) -> tuple[int, Instruction] | None:
    """Return the index of a `silu_mul`'s linear layer, and the fused instruction."""
    gate = single_instruction(groups, index)
    if gate is None or gate.op != "silu_mul":
        return None
    out, *halves = (_as_rows(tensor) for tensor in gate.tensors)
    others = {use for half in gate.tensors[1:] for use in use_defs.uses(half)} - {index}
    layer_index = min(others) if len(others) == 1 else index
    layer = single_instruction(groups, layer_index) if layer_index < index else None
    split = None if layer is None else _split_layer(layer)
    if out is None or layer is None or split is None:
        return None
    outs, inputs, weights = split
    if len(outs) != 2 or out.dtype != outs[0].dtype:
        return None
    changed = any(layer_index < use < index for tensor in inputs for use in use_defs.definitions(tensor))
    order = [i for half in halves for i, part in enumerate(outs) if half is not None and is_same_view(half, part)]
    if changed or sorted(order) != [0, 1] or out.shape != outs[0].shape:
        return None
    pair = [weights[i] for i in order]
    size = (out.shape[1], pair[0].shape[-1])
    return layer_index, Instruction(f"gated_{layer.op}", (out, *inputs, *pair), size)


def _as_rows(tensor: Tensor) -> Tensor | None:
    """[rows, channels]; None if there is no such view."""
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return None


def _split_layer(layer: Instruction) -> tuple[list[Tensor], list[Tensor], list[Tensor]] | None:
    """The outs, inputs and weights of a layer without biases; a single out is split into halves."""
    if layer.op == "linear":
        count = len(layer.ints) - 2
        outs, inputs, weights = layer.tensors[:count], [layer.tensors[count]], layer.tensors[count + 1 :]
    elif layer.op == "expert_linear":
        count, outs, inputs, weights = 1, layer.tensors[:1], list(layer.tensors[1:3]), layer.tensors[3:]
    else:
        return None
    if len(weights) != count:
        return None
    if count > 1:
        return list(outs), inputs, list(weights)
    half = outs[0].shape[1] // 2
    if half * 2 != outs[0].shape[1]:
        return None
    return list(outs[0].split(half, dim=1)), inputs, list(weights[0].split(half, dim=-2))


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
