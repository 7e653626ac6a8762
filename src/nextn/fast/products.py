"""Linear layers of one input in a lowered pass, as queries, keys and values have it, or a gate and its other half: one
native `linear` makes all of them, so workers meet once."""

from collections.abc import Sequence

from nextn.fast.lower import Instruction, Lowered
from nextn.fast.touched import Touched, same, single


def fused(groups: Sequence[Lowered], touched: Touched) -> list[Lowered]:
    """The groups with such layers in one, where the first stood."""
    out: list[Lowered | None] = list(groups)
    for at in range(len(groups)):
        places = _together(groups, touched, at) if out[at] is not None else []
        if len(places) > 1:
            out[at] = _joined([groups[place].instructions[0] for place in places])
            for place in places[1:]:
                out[place] = None
    return [group for group in out if group is not None]


def _together(groups: Sequence[Lowered], touched: Touched, at: int) -> list[int]:
    """The groups from `at` on that are linear layers of one input and touch it one after the other: none changes it."""
    first = _layer(groups, at)
    if first is None:
        return []
    places = [at]
    for place in sorted(each for each in touched.by(first.tensors[1]) if each > at):
        layer = _layer(groups, place)
        if layer is None or not _alike(first, layer) or min(touched.by(layer.tensors[0])) < place:
            break
        places.append(place)
    return places


def _layer(groups: Sequence[Lowered], at: int) -> Instruction | None:
    layer = single(groups, at)
    return layer if layer is not None and layer.op == "linear" else None


def _alike(first: Instruction, layer: Instruction) -> bool:
    one_output = len(first.ints) == len(layer.ints) == 3
    return (
        one_output
        and first.ints[1:] == layer.ints[1:]
        and same(first.tensors[1], layer.tensors[1])
        and len(first.tensors) == len(layer.tensors)
    )


def _joined(layers: Sequence[Instruction]) -> Lowered:
    """Tensors: outs, x, weights, biases; ints: rows of each weight, then what all have in common."""
    outs, rows, *rest = zip(*(layer.tensors for layer in layers), strict=True)
    tensors = (*outs, rows[0], *(each for several in rest for each in several))
    ints = (*(layer.ints[0] for layer in layers), *layers[0].ints[1:])
    return Lowered.native(Instruction("linear", tensors, ints), outs=outs)
