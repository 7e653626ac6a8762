"""The gate of an MLP in a lowered pass and the linear layers that it is made of, of experts, too: one native product,
which leaves the gated values alone."""

from collections.abc import Sequence

from torch import Tensor

from nextn.fast.lower import Instruction, Lowered
from nextn.fast.touched import Touched, same, single


def fused(groups: Sequence[Lowered], touched: Touched) -> list[Lowered]:
    """The groups with each such pair in one, where the gate stood."""
    out: list[Lowered | None] = list(groups)
    for at in range(len(groups)):
        found = _found(groups, touched, at)
        if found is not None:
            place, instruction = found
            out[place], out[at] = None, Lowered.native(instruction)
    return [group for group in out if group is not None]


def _found(groups: Sequence[Lowered], touched: Touched, at: int) -> tuple[int, Instruction] | None:
    """Of a gate: where its layers stand, and what does it all."""
    gate = single(groups, at)
    if gate is None or gate.op != "silu_mul":
        return None
    out, *halves = (_as_rows(each) for each in gate.tensors)
    others = {place for half in gate.tensors[1:] for place in touched.by(half)} - {at}
    place = min(others) if len(others) == 1 else at
    layer = single(groups, place) if place < at else None
    if out is None or layer is None:
        return None
    made = _made(layer)
    if made is None or len(made[0]) != 2 or out.dtype != made[0][0].dtype:
        return None
    parts, rest, weights = made
    changed = any(place < each < at for tensor in rest for each in touched.written(tensor))
    order = [i for half in halves for i, part in enumerate(parts) if half is not None and same(half, part)]
    if changed or sorted(order) != [0, 1] or out.shape != parts[0].shape:
        return None
    pair = [weights[i] for i in order]
    size = (out.shape[1], pair[0].shape[-1])
    return place, Instruction(f"gated_{layer.op}", (out, *rest, *pair), size)


def _as_rows(tensor: Tensor) -> Tensor | None:
    """[rows, channels]; None where that is no view."""
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return None


def _made(layer: Instruction) -> tuple[list[Tensor], list[Tensor], list[Tensor]] | None:
    """What a layer without biases makes, in halves where it is one, what it reads beside weights, and the weights of
    what it makes."""
    if layer.op == "linear":
        count = len(layer.ints) - 2
        outs, rest, weights = layer.tensors[:count], [layer.tensors[count]], layer.tensors[count + 1 :]
    elif layer.op == "expert_linear":
        count, outs, rest, weights = 1, layer.tensors[:1], list(layer.tensors[1:3]), layer.tensors[3:]
    else:
        return None
    if len(weights) != count:
        return None
    if count > 1:
        return list(outs), rest, list(weights)
    half = outs[0].shape[1] // 2
    if half * 2 != outs[0].shape[1]:
        return None
    return list(outs[0].split(half, dim=1)), rest, list(weights[0].split(half, dim=-2))
