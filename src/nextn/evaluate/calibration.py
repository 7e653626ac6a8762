"""How much each input channel of a trunk's Linears matters for rounding, by its activations on a text."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from nextn.edit.quantize import Importance
from nextn.model.layer_states import LayerProgress
from nextn.model.streamed_trunk import StreamedTrunk

TOKENS = 4096  # of the texts, by default


@torch.inference_mode()
def input_squares(
    trunk: StreamedTrunk,
    texts: Sequence[Sequence[int]],
    *,
    on_layer: Callable[[LayerProgress], None] = lambda progress: None,
) -> Importance:
    """Run each text through a streamed trunk, and return the mean square [K] of the inputs of every Linear.

    A Linear of experts that are stacked, or that no token reaches, has none.
    """
    sums: dict[tuple[int, str], Tensor] = {}
    counts: dict[tuple[int, str], int] = {}

    def note(key: tuple[int, str], module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].detach().flatten(0, -2).float()
        sums[key] = sums.get(key, 0) + rows.square().sum(0)
        counts[key] = counts.get(key, 0) + len(rows)

    hooks = [
        part.register_forward_pre_hook(partial(note, (index, f"{name}.weight")))
        for index, layer in enumerate(trunk.decoder.layers)
        for name, part in layer.named_modules()
        if isinstance(part, nn.Linear)
    ]
    try:
        trunk.read_layers([torch.tensor([list(text)]) for text in texts], on_layer=on_layer)
    finally:
        for hook in hooks:
            hook.remove()
    return {key: total / counts[key] for key, total in sums.items() if counts[key]}
