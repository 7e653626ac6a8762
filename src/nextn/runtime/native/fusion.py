"""Fusion of operations in a lowered pass: RMSNorm, rotary embeddings, SwiGLU and linear layers, alone and together.

Fused kernels give the same bits as the separate operations. Anything that is written differently is left as it is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.runtime.native import head_parallel
from nextn.runtime.native.graph_analysis import (
    FLOATS,
    UseDefs,
    are_dense_and_alike,
    eliminate_copies,
    is_same_view,
    single_instruction,
    split_concatenations,
)
from nextn.runtime.native.lowering import Instruction, Lowered
from nextn.runtime.native.trace import storage_key

IsConstant = Callable[[Tensor], bool]
WeightType = Callable[[Tensor], object]  # weights of different types cannot be in one matrix
# Modes of `rms_norm` (norm.cpp): the norm weight multiplies the rounded row, or the float row before its one rounding.
_WEIGHT_AFTER_ROUNDING, _WEIGHT_IN_FLOAT = 0, 2
# What may follow the scaled row of an RMSNorm, longest first. `weight`: a product with a constant vector.
_NORM_TAILS = (("copy", "weight"), ("weight", "copy"), ("weight",), ("copy",), ())
_ROPE_OPS = ["mul", "neg", "copy", "copy", "mul", "add"]
_NORM_ROPE_VIEWS = 5  # out, x, cosine, sine, weight


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
    return head_parallel.split_by_heads(fuse_add_norm(out, UseDefs(out, live)))


def fuse_rms_norms(groups: Sequence[Lowered], use_defs: UseDefs, is_constant: IsConstant) -> list[Lowered]:
    """Fuse the operations of each RMSNorm into one `rms_norm`."""
    return use_defs.replace_matches(groups, lambda index: _match_norms(groups, index, is_constant))


class _NormMatch:
    """A matched RMSNorm, ending before `end`; `out` is its result so far."""

    def __init__(self, source: Tensor, eps: float, results: Sequence[Tensor], end: int) -> None:
        self.source, self.eps, self.end = source, eps, end
        self.intermediates, self.out = list(results[:-1]), results[-1]
        self._weights: list[Tensor] = []
        self._mode = _WEIGHT_IN_FLOAT

    def extend(self, groups: Sequence[Lowered], part: str, is_constant: IsConstant) -> bool:
        """Extend the match by the next group, if that is this part of a tail."""
        step = single_instruction(groups, self.end)
        if step is None:
            return False
        return self._extend_by_copy(step) if part == "copy" else self._extend_by_weight(step, is_constant)

    def _extend_by_copy(self, step: Instruction) -> bool:
        """A rounding of the result so far."""
        if step.op != "copy" or not is_same_view(step.tensors[1], self.out):
            return False
        return self._advance(step.tensors[0])

    def _extend_by_weight(self, step: Instruction, is_constant: IsConstant) -> bool:
        """A product of the result so far with a constant vector."""
        if step.op != "mul" or len(step.tensors) != 3:
            return False
        out, *factors = step.tensors
        weights = [factor for factor in factors if is_constant(factor)]
        if len(weights) != 1 or not any(is_same_view(factor, self.out) for factor in factors):
            return False
        is_rounded = self.out.dtype != torch.float32
        if not _is_vector(weights[0]) or (is_rounded and out.dtype != self.out.dtype):
            return False
        self._weights, self._mode = weights, _WEIGHT_AFTER_ROUNDING if is_rounded else _WEIGHT_IN_FLOAT
        return self._advance(out)

    def _advance(self, out: Tensor) -> bool:
        self.intermediates.append(self.out)
        self.out, self.end = out, self.end + 1
        return True

    @property
    def is_supported(self) -> bool:
        """Whether the kernel supports the views."""
        return (
            all(tensor.dtype in FLOATS for tensor in (self.out, self.source, *self._weights))
            and self.out.shape == self.source.shape
            and (self.out.stride(-1) == 1 or self.out.shape[-1] == 1)
            and storage_key(self.out) != storage_key(self.source)
        )

    @property
    def lowered(self) -> Lowered:
        vectors = [weight[(0,) * (weight.ndim - 1)] for weight in self._weights]
        return Lowered.native(Instruction("rms_norm", (self.out, self.source, *vectors), (self._mode,), (self.eps,)))


def _match_norms(groups: Sequence[Lowered], index: int, is_constant: IsConstant) -> Iterator[_NormMatch]:
    """Every RMSNorm that starts with this group, longest first."""
    for tail in _NORM_TAILS:
        match = _match_scaled_row(groups, index)
        if match is None:
            return
        if all(match.extend(groups, part, is_constant) for part in tail) and match.is_supported:
            yield match


def _match_scaled_row(groups: Sequence[Lowered], index: int) -> _NormMatch | None:
    """x * rsqrt(mean(x^2) + eps), with x copied to float first, or float already."""
    steps = [step for at in range(index, index + 6) if (step := single_instruction(groups, at)) is not None]
    has_copy = len(steps) == 6 and steps[0].op == "copy"
    if len(steps) < 5 + has_copy:
        return None
    head, body = steps[:has_copy], steps[has_copy : has_copy + 5]
    ops = [step.op for step in body]
    if ops not in (["pow", "mean", "add", "rsqrt", "mul"], ["mul", "mean", "add", "rsqrt", "mul"]):
        return None
    source = (head or body)[0].tensors[1]
    wide = head[0].tensors[0] if head else source
    if source.shape != wide.shape or not _is_rms_norm(wide, *body):
        return None
    results = [step.tensors[0] for step in (*head, *body)]
    return _NormMatch(source, body[2].reals[0], results, index + has_copy + 5)


def _is_rms_norm(
    wide: Tensor, square: Instruction, mean: Instruction, add: Instruction, rsqrt: Instruction, scale: Instruction
) -> bool:
    squares, means, sums, roots, out = (step.tensors[0] for step in (square, mean, add, rsqrt, scale))
    if any(tensor.dtype != torch.float32 for tensor in (wide, squares, means, sums, roots, out)):
        return False
    factors = scale.tensors[1:]
    return (
        all(is_same_view(factor, wide) for factor in square.tensors[1:])
        and (square.reals == (2.0,) if square.op == "pow" else len(square.tensors) == 3)
        and is_same_view(mean.tensors[1], squares)
        and mean.ints == (1 << (wide.ndim - 1),)
        and len(add.tensors) == 2
        and is_same_view(add.tensors[1], means)
        and add.reals[1] == 1.0
        and is_same_view(rsqrt.tensors[1], sums)
        and len(factors) == 2
        and _is_pair(factors, wide, roots.expand(out.shape))
    )


def _is_vector(tensor: Tensor) -> bool:
    """Whether it is one vector over the last dim, repeated along the others."""
    return all(size == 1 or stride == 0 for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True))


def _is_pair(pair: Sequence[Tensor], first: Tensor, second: Tensor) -> bool:
    """Whether the pair consists of these two views, in either order."""
    return any(is_same_view(first, a) and is_same_view(second, b) for a, b in (pair, pair[::-1]))


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
        (
            out,
            *terms,
        ),
    ) = (step.tensors for step in steps)
    if steps[5].reals != (1.0,) or not is_same_view(copied, negated) or not _is_pair(terms, x_cos, x_sin):
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
    matches = {
        index: match for index in range(len(groups)) if (match := _match_swiglu(groups, use_defs, index)) is not None
    }
    products = dict(matches.values())
    return [products.get(index, group) for index, group in enumerate(groups) if index not in matches]


def _match_swiglu(groups: Sequence[Lowered], use_defs: UseDefs, index: int) -> tuple[int, Lowered] | None:
    """For a silu: the index of its product, and the fused group."""
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
    out: list[Lowered | None] = list(groups)
    for index in range(len(groups)):
        layers = _find_mergeable(groups, use_defs, index, weight_type) if out[index] is not None else []
        if len(layers) > 1:
            out[index] = _merge([groups[layer].instructions[0] for layer in layers])
            for layer in layers[1:]:
                out[layer] = None
    return [group for group in out if group is not None]


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
    out: list[Lowered | None] = list(groups)
    for index in range(len(groups)):
        match = _match_gated_linear(groups, use_defs, index)
        if match is not None:
            layer_index, instruction = match
            out[layer_index], out[index] = None, Lowered.native(instruction)
    return [group for group in out if group is not None]


def _match_gated_linear(groups: Sequence[Lowered], use_defs: UseDefs, index: int) -> tuple[int, Instruction] | None:
    """For a `silu_mul`: the index of its linear layer, and the fused instruction."""
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


def fuse_qk_norm_rope(groups: Sequence[Lowered], use_defs: UseDefs) -> list[Lowered]:
    """Fuse the RMSNorm of each head with its rotary embedding into one `norm_rope`, at the position of the latter.
    Those of queries and keys become one call."""
    out: list[Lowered | None] = list(groups)
    for index in range(len(groups)):
        match = _match_norm_rope(groups, use_defs, index)
        if match is not None:
            indices, instruction = match
            for replaced in (index, *indices):
                out[replaced] = None
            out[indices[0]] = Lowered.native(instruction)
    return _merge_norm_ropes([group for group in out if group is not None])


def _match_norm_rope(groups: Sequence[Lowered], use_defs: UseDefs, index: int) -> tuple[list[int], Instruction] | None:
    """For an `rms_norm`: the index of its `rope`, that of the copy of unrotated channels if there is one, and the fused
    instruction."""
    norm = single_instruction(groups, index)
    if norm is None or norm.op != "rms_norm" or len(norm.tensors) != 3:
        return None
    normed, x, weight = norm.tensors
    uses = use_defs.uses(normed) - {index}
    readers = {step.op: use for use in uses if (step := single_instruction(groups, use)) is not None}
    if len(readers) != len(uses) or readers.keys() not in ({"rope"}, {"rope", "copy"}):
        return None
    indices = [readers[op] for op in ("rope", "copy") if op in readers]
    rope, *copy = (groups[reader].instructions[0] for reader in indices)
    out = _norm_rope_out(rope, copy[0] if copy else None, normed)
    source = None if out is None else _reorder_dims(x, normed, rope.tensors[1], out.shape[-1])
    if out is None or source is None or min(indices) < index or x.dtype != normed.dtype or normed.dtype not in FLOATS:
        return None
    between = {use for use in use_defs.uses(out) | use_defs.definitions(x) if index < use < max(indices)}
    if storage_key(out) == storage_key(x) or between - set(indices):
        return None
    return indices, Instruction("norm_rope", (out, source, *rope.tensors[2:], weight), norm.ints, norm.reals)


def _norm_rope_out(rope: Instruction, copy: Instruction | None, normed: Tensor) -> Tensor | None:
    """The output [..., D]: the rotated channels and, after them, the copied ones; None if they are not adjacent."""
    rotated, x, size = *rope.tensors[:2], normed.shape[-1]
    count = rotated.shape[-1]
    if x.data_ptr() != normed.data_ptr() or x.stride(-1) != 1 or count > size:
        return None
    if storage_key(rotated) == storage_key(normed):
        return None
    if copy is None:
        return rotated if count == size else None
    rest, source = copy.tensors
    if storage_key(rest) != storage_key(rotated) or rest.shape != (*rotated.shape[:-1], size - count):
        return None
    if not (_is_adjacent(rotated, rest) and _is_adjacent(x, source)):
        return None
    return rotated.as_strided((*rotated.shape[:-1], size), rotated.stride(), rotated.storage_offset())


def _is_adjacent(first: Tensor, rest: Tensor) -> bool:
    """Whether each row of `rest` begins where that of `first` ends."""
    return rest.data_ptr() == first[..., -1:].data_ptr() + first.itemsize and rest.stride() == first.stride()


def _reorder_dims(x: Tensor, normed: Tensor, view: Tensor, size: int) -> Tensor | None:
    """x [..., D] with its dims in the order in which `view` has those of `normed`, which has x's shape."""
    strides = []
    for length, stride in zip(view.shape[:-1], view.stride()[:-1], strict=True):
        dims = [dim for dim in range(normed.ndim - 1) if (normed.shape[dim], normed.stride(dim)) == (length, stride)]
        if length > 1 and len(dims) != 1:
            return None
        strides.append(x.stride(dims[0]) if length > 1 else 0)
    if view[..., 0].numel() * size != x.numel():
        return None
    return x.as_strided((*view.shape[:-1], size), (*strides, x.stride(-1)), x.storage_offset())


def _merge_norm_ropes(groups: Sequence[Lowered]) -> list[Lowered]:
    """Merge adjacent `norm_rope` calls of one dtype."""
    out: list[Lowered] = []
    for group in groups:
        step, before = single_instruction([group], 0), single_instruction(out, len(out) - 1) if out else None
        if step is None or before is None or not _can_merge_norm_ropes(before, step):
            out.append(group)
        else:
            parameters = (before.tensors + step.tensors, before.ints + step.ints, before.reals + step.reals)
            merged = Instruction("norm_rope", *parameters)
            out[-1] = Lowered.native(merged, outs=merged.tensors[::_NORM_ROPE_VIEWS])
    return out


def _can_merge_norm_ropes(before: Instruction, step: Instruction) -> bool:
    """Whether both are `norm_rope` and the second reads nothing that the first writes."""
    if before.op != "norm_rope" or step.op != "norm_rope" or before.tensors[0].dtype != step.tensors[0].dtype:
        return False
    written = {storage_key(out) for out in before.tensors[::_NORM_ROPE_VIEWS]}
    return not any(storage_key(tensor) in written for tensor in step.tensors)


@dataclass(frozen=True)
class _AddNormMatch:
    lowered: Lowered
    end: int
    intermediates: tuple[Tensor, ...] = ()


def fuse_add_norm(groups: Sequence[Lowered], use_defs: UseDefs) -> list[Lowered]:
    """Fuse each residual sum with the RMSNorm that follows it into one `add_rms_norm`, which writes both results."""
    return use_defs.replace_matches(groups, lambda index: _match_add_norm(groups, index))


def _match_add_norm(groups: Sequence[Lowered], index: int) -> Iterator[_AddNormMatch]:
    add, norm = single_instruction(groups, index), single_instruction(groups, index + 1)
    if add is None or norm is None or (add.op, norm.op) != ("add", "rms_norm"):
        return
    if len(add.tensors) != 3 or add.reals != (1.0,) or len(norm.tensors) != 3:
        return
    (total, a, b), (out, source, weight) = add.tensors, norm.tensors
    is_separate = storage_key(out) not in {storage_key(tensor) for tensor in add.tensors}
    if is_separate and is_same_view(source, total) and total.dtype in FLOATS and are_dense_and_alike(out, total, a, b):
        fused = Instruction("add_rms_norm", (out, total, a, b, weight), norm.ints, norm.reals)
        yield _AddNormMatch(Lowered.native(fused, outs=fused.tensors[:2]), index + 2)
