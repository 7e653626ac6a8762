"""A trunk whose decoder layers are on the meta device until they are loaded, one at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from nextn.checkpoint.mapped_memory import return_freed_memory
from nextn.checkpoint.tensors import TensorReader
from nextn.families import Stage
from nextn.model.expert_groups import check_finite
from nextn.model.transformers_loading import LayerLoader
from nextn.model.trunk import Trunk


class DeferredTrunk(Trunk):
    """A trunk with embedding, final norm and lm_head, for processes that shard each decoder layer when it is loaded."""

    def __init__(self, loader: LayerLoader, weights: TensorReader, *, stage: Stage = "post") -> None:
        """Wrap the model of `loader`, whose layers are read through `weights`, which must stay open."""
        super().__init__(loader.model, stage=stage)
        self._loader, self._weights = loader, weights
        # By name, the parameters of layers that are placed on the host or on disk for good, see `spread_layers`.
        self.offloaded: Mapping[str, Tensor] = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DeferredTrunk":
        # Layers follow to another device when they are loaded.
        return super()._apply(lambda value: value if value.is_meta else fn(value), recurse)

    def loaded_layers(self, devices: Sequence[torch.device] | None = None) -> Iterator[nn.Module]:
        """Load the decoder layers for good, frozen, and yield each; a layer that is sharded meanwhile takes its shard.

        devices: Of each layer; None: the trunk's. Raises CheckpointError if a layer cannot be read or has values that
        are not finite.
        """
        for index, device in enumerate(devices or [self.device] * len(self.decoder.layers)):
            yield self._load(index, device)
            self._loader.release(index)
            return_freed_memory()  # of the parts that other processes have

    def close(self) -> None:
        """Close the checkpoint's files, when all layers are loaded, so that nothing of them stays in memory."""
        self._weights.close()

    def state_items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's state, sorted by name, while one decoder layer is loaded at a time."""
        for index, names in groupby(sorted(self.model.state_dict()), self._loader.layer_index):
            to_load = None if self.layer_places else index
            if to_load is not None:
                self._load(to_load, self.device)
            state = self.model.state_dict()
            yield from ((name, self.offloaded[name] if state[name].is_meta else state[name]) for name in names)
            if to_load is not None:
                self._loader.unload(to_load)

    def _load(self, index: int, device: torch.device) -> nn.Module:
        self._loader.load(index, device)
        layer = self.decoder.layers[index]
        check_finite(f"layer {index}", layer.state_dict())
        return layer.requires_grad_(False)
