"""What a trunk's decoder layers take in over a text: the RMS of each layer's input, and the inputs of some layers;
and decoder layers that store only their input, to recompute the rest in the backward pass.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nextn.cache.kv_cache import CACHE_ARGUMENT
from nextn.checkpoint.safetensors_file import atomic
from nextn.model.layer_states import LayerProgress, input_file
from nextn.model.streamed_trunk import StreamedTrunk
from nextn.model.trunk import Trunk


@torch.no_grad()
def measure_layers(
    trunk: Trunk,
    tokens: Tensor,
    indices: Collection[int],
    folder: Path | None = None,
    on_layer: Callable[[LayerProgress], None] = lambda progress: None,
) -> tuple[list[float], dict[int, Tensor], Tensor]:
    """Run a trunk over tokens [B, T]; return each layer's RMS, inputs of some layers, and the head's input state.

    The RMS of a layer's input is the median of all positions, because the first one's may be a hundred times the
    others'. The inputs [B, T, ...] are those of the layers at `indices`; with the states of a streamed trunk, they are
    kept in `folder`, see `StreamedTrunk.read_layers`. `on_layer` is called as each layer of a trunk in memory begins,
    or a streamed one ends.
    """
    recorder = _Recorder(len(tokens), indices, folder)
    with ExitStack() as hooks:
        for index, layer in enumerate(trunk.decoder.layers):
            record = partial(recorder.record, index)
            hooks.enter_context(layer.register_forward_pre_hook(record, with_kwargs=True))
        if isinstance(trunk, StreamedTrunk):

            def finish_layer(progress: LayerProgress) -> None:
                recorder.finish(progress)
                on_layer(progress)

            trunk.read_layers([tokens], folder=folder, observe=recorder.observe, on_layer=finish_layer)
        else:
            for index, layer in enumerate(trunk.decoder.layers):
                progress = LayerProgress(index, 0, 0.0, 0.0)
                hooks.enter_context(layer.register_forward_pre_hook(lambda *_, progress=progress: on_layer(progress)))
        states = trunk(tokens).head_input
    return [recorder.rms[index] for index in range(len(recorder.rms))], recorder.inputs, states


class _Recorder:
    def __init__(self, count: int, indices: Collection[int], folder: Path | None) -> None:
        self.rms: dict[int, float] = {}
        self.inputs: dict[int, Tensor] = {}
        self._count, self._indices, self._folder = count, indices, folder

    def record(self, index: int, layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        if all(value.is_meta for value in layer.parameters()):
            return  # a streamed trunk passes the states through its other layers
        states = args[0] if args else kwargs["hidden_states"]
        self.rms[index] = states.float().square().mean(-1).sqrt().median().item()
        if index in self._indices:
            # A streamed trunk may run a few rows at a time, and again after it was out of memory: the last ones count.
            parts = [self.inputs[index], states] if index in self.inputs else [states]
            self.inputs[index] = torch.cat(parts)[-self._count :]

    def observe(self, index: int) -> float:
        if index in self.inputs and self._folder is not None:
            with atomic(self._folder / input_file(index)) as file:
                file.write(save({"input": self.inputs[index].contiguous()}))
        return self.rms[index]

    def finish(self, progress: LayerProgress) -> None:
        index = progress.index
        self.rms[index] = cast(float, progress.observed)  # by an earlier process, perhaps
        if index in self._indices and index not in self.inputs and self._folder is not None:
            self.inputs[index] = load_file(self._folder / input_file(index))["input"]


def checkpoint_layers(layers: Iterable[nn.Module]) -> None:
    """Make each layer recompute its activations in the backward pass; gradients are unchanged.

    Call it before compiling layers. Layers that are already wrapped are skipped.
    """
    for layer in layers:
        if not isinstance(layer.forward, _Checkpointed):
            layer.forward = _Checkpointed(layer.forward)


class _Checkpointed:
    """Replaces the `forward` of one layer."""

    def __init__(self, forward: Callable[..., object]) -> None:
        self.forward = forward

    def __call__(self, *args: object, **kwargs: Any) -> object:
        if not torch.is_grad_enabled() or kwargs.get(CACHE_ARGUMENT) is not None:
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
