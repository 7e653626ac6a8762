"""Loading single decoder layers, and experts of one, into a model that is on the meta device."""

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import LoadStateDictInfo, convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from nextn.checkpoint.mapped_memory import release_pages
from nextn.checkpoint.tensors import StoredTensor
from nextn.errors import CheckpointError
from nextn.model.family_layers import add_unused_experts, remove_unused_experts
from nextn.model.packed_linear import LazyTensor, LazyValue, StandIns
from nextn.model.stored_experts import EXPERT, STACKED, StoredExperts, check_finite, find_layout
from nextn.model.transformers_loading import check_complete, empty_model, transformers_errors

_EXPERTS_AT_ONCE = 4  # converted together


class LayerLoader:
    """A model whose decoder layers are on the meta device, and what loads single ones from stored tensors.

    Names, conversions and casts are transformers' own, so that a layer has the bits that it has in a loaded model.
    """

    def __init__(
        self,
        folder: Path,
        state: Mapping[str, LazyTensor],
        dtype: torch.dtype | None,
        layer_of: Callable[[str], int | None],
        *,
        vocabulary: Mapping[str, str] = {},
        packed: Mapping[str, StoredTensor] = {},
    ) -> None:
        """Build the model and load all but its decoder layers; arguments as of `model_from_folder`.

        `layer_of` gives the index of the decoder layer that a stored name belongs to; None if to no layer. `vocabulary`
        has the stored names of `embedding` and `output`, which keep their stored dtype where plain modules hold them,
        so that no cast copy of them is made. `stand_ins` are loaded in the place of packed tensors. Raises
        CheckpointError if any tensor, those of layers included, is missing or has another shape, or if transformers
        cannot build the model.
        """
        self._folder = folder
        with transformers_errors(folder):
            self.model, self.dtype = empty_model(folder, state, dtype)
            self.stand_ins = StandIns(self.dtype)
            state = {**state, **{name: self.stand_ins.lazy(stored) for name, stored in packed.items()}}
            self._config = LoadStateDictConfig(
                device_map={"": "cpu"},
                dtype=self.dtype,
                dtype_plan=self.model._get_dtype_plan(self.dtype),
                weight_mapping=get_model_conversion_mapping(self.model),
            )
            self._states: dict[int | None, dict[str, LazyTensor]] = defaultdict(dict)
            for name, tensor in add_unused_experts(state, self.model.config.get_text_config()).items():
                self._states[layer_of(name)][name] = tensor
            self._load_outer(vocabulary)
        self._experts: dict[int, StoredExperts | None] = {}  # of loaded layers
        # What a layer consists of before it is loaded; its own buffers that no file stores have values by now.
        self._unloaded = [dict(_stored_tensors(layer)) for layer in self._layers]

    def tensors(self, index: int) -> list[LazyTensor]:
        """Return the stored tensors of a decoder layer."""
        return list(dict.fromkeys(self._states[index].values()))

    def load(self, index: int, device: torch.device, *, experts: bool = True) -> None:
        """Load a decoder layer. Raises CheckpointError if its tensors cannot be read.

        experts: False: leave out experts that are stored one by one, see `stored_experts`.
        """
        self.unload(index)  # with the rows of unused experts, which a trunk removes
        others, parts = self._parts(index)
        self._convert(others, self._on(device))
        layer = self._layers[index]
        if experts and parts:
            self._load_experts(index, device)
        missing = {name for name, value in _stored_tensors(layer) if value.is_meta}
        check_complete(self._folder, missing if experts else missing - {name for name, _ in self._stacked(index)})
        remove_unused_experts(layer)

    def lacks_experts(self, index: int) -> bool:
        """Whether parameters of all experts of a layer are not loaded."""
        return bool(self._stacked(index))

    def expert_groups(self, index: int, device: torch.device) -> Generator[tuple[int, int], None, None]:
        """Yield (first, end) of a few experts of a loaded layer, while the layer's parameters hold only these.

        Raises CheckpointError if they cannot be read or have values that are not finite.
        """
        if index not in self._experts:
            self._experts[index] = self.stored_experts(index)
        if (experts := self._experts[index]) is None:
            yield from self._converted_groups(index, device)
            return
        stacked = dict(self._stacked(index))
        with closing(experts.groups()) as groups:
            try:
                for first, end, values in groups:
                    for name, value in values.items():
                        _assign(self._layers[index], name, nn.Parameter(value.to(device), requires_grad=False))
                    yield first, end
            finally:
                for name, value in stacked.items():
                    _assign(self._layers[index], name, value)

    def stored_experts(self, index: int) -> StoredExperts | None:
        """Return experts that are not loaded, whose parameters are stored tensors one after the other; else None.

        transformers converts the first expert, and its values show how.
        """
        layer, stacked = self._layers[index], dict(self._stacked(index))
        by_expert: dict[int, dict[str, StoredTensor]] = defaultdict(dict)
        for name, tensor in self._states[index].items():
            if (expert := EXPERT.search(name)) and isinstance(tensor, StoredTensor):
                by_expert[int(expert[1])][EXPERT.sub(".experts.*.", name)] = tensor
        experts = [by_expert[number] for number in sorted(by_expert)]
        if not stacked or any(len(value) != len(experts) for value in stacked.values()):
            return None
        if any(each.keys() != experts[0].keys() for each in experts):
            return None
        first = {name.replace("*", str(min(by_expert))): tensor for name, tensor in experts[0].items()}
        try:
            for name, value in stacked.items():
                _assign(layer, name, nn.Parameter(value[:1], requires_grad=False))
            self._convert(first, self._config)
            made = {name: layer.get_parameter(name).detach()[0] for name in stacked}
        finally:
            for name, value in stacked.items():
                _assign(layer, name, value)
        if any(value.is_meta for value in made.values()):
            return None
        layout = find_layout(made, {kind: tensor[...] for kind, tensor in experts[0].items()})
        for tensor in first.values():
            tensor.release()
        if layout is None:
            return None
        names = [{kind: tensor.name for kind, tensor in each.items()} for each in experts]
        forms = {name: (value.shape, value.dtype) for name, value in made.items()}
        return StoredExperts(next(iter(first.values())).weights, layout, names, forms)

    def _converted_groups(self, index: int, device: torch.device) -> Iterator[tuple[int, int]]:
        """The same by transformers' own conversion of every expert, or of experts that are stored as one tensor."""
        layer, start = self._layers[index], 0
        parts, stacked = self._parts(index)[1], dict(self._stacked(index))
        if not parts:  # stored as one tensor: the loaded parameter is a part of the mapped file
            stacked = {name: value for name, value in _stored_tensors(layer) if STACKED.search(name)}
            num_experts = max(map(len, stacked.values()), default=0)
            parts = [{} for _ in range(0, num_experts, _EXPERTS_AT_ONCE)]
        try:
            for part in parts:
                experts = {cast(re.Match[str], EXPERT.search(name))[1] for name in part}
                end = start + len(experts) if part else min(start + _EXPERTS_AT_ONCE, num_experts)
                for name, value in stacked.items():
                    _assign(layer, name, nn.Parameter(value[start:end], requires_grad=False))
                if part:
                    self._convert(part, self._on(device))
                check_finite(f"layer {index}", {name: layer.get_parameter(name) for name in stacked})
                yield start, end
                release_pages(layer.get_parameter(name) for name in stacked)
                for tensor in part.values():
                    tensor.release()
                start = end
        finally:
            for name, value in stacked.items():
                _assign(layer, name, value)

    def unload(self, index: int) -> None:
        """Put a decoder layer back on the meta device, and release its part of the mapped files."""
        self.release(index)
        self._experts.pop(index, None)
        for name, value in self._unloaded[index].items():
            _assign(self._layers[index], name, value)

    def release(self, index: int) -> None:
        """Release a decoder layer's part of the mapped files."""
        for tensor in self._states[index].values():
            tensor.release()

    def layer_index(self, name: str) -> int | None:
        """Return the index of the decoder layer that a name in the model's state belongs to; None if to no layer."""
        return int(name.removeprefix(self._prefix).partition(".")[0]) if name.startswith(self._prefix) else None

    @property
    def _layers(self) -> nn.ModuleList:
        return cast(nn.ModuleList, self.model.get_decoder().layers)

    def _parts(self, index: int) -> tuple[dict[str, LazyTensor], list[dict[str, LazyTensor]]]:
        """The layer's tensors without experts that are stored one by one, and those, a few experts at a time."""
        parts: dict[int | None, dict[str, LazyTensor]] = defaultdict(dict)
        for name, tensor in self._states[index].items():
            expert = EXPERT.search(name)
            parts[int(expert[1]) // _EXPERTS_AT_ONCE if expert else None][name] = tensor
        others = parts.pop(None, {})
        return others, [parts[key] for key in sorted(cast(dict[int, dict[str, LazyTensor]], parts))]

    def _stacked(self, index: int) -> list[tuple[str, Tensor]]:
        """Parameters of all experts that are not loaded."""
        tensors = _stored_tensors(self._layers[index])
        return [(name, value) for name, value in tensors if STACKED.search(name) and value.is_meta]

    def _load_experts(self, index: int, device: torch.device) -> None:
        """Load experts that are stored one by one, a few at a time: the layer is in memory once, not twice."""
        layer, stacked = self._layers[index], dict(self._stacked(index))
        filled: dict[str, Tensor] = {}
        for start, end in self.expert_groups(index, device):
            for name, value in stacked.items():
                rows = layer.get_parameter(name)
                if not rows.is_meta:  # others are of experts that are stored in one tensor
                    filled.setdefault(name, torch.empty(value.shape, dtype=value.dtype, device=rows.device))
                    filled[name][start:end] = rows.detach()
        for name, value in filled.items():
            _assign(layer, name, nn.Parameter(value, requires_grad=False))

    def _on(self, device: torch.device) -> LoadStateDictConfig:
        return replace(self._config, device_map={"": device})

    def _load_outer(self, vocabulary: Mapping[str, str]) -> None:
        everything = {name: _on_meta_device(each) for state in self._states.values() for name, each in state.items()}
        # All names and shapes are compared before any value is read.
        info = self._convert(everything, _on_meta(self._config))
        layers = next(name for name, part in self.model.named_modules() if part is self._layers)
        self._prefix = f"{layers}."
        missing = {name for name in info.missing_keys if name.startswith(self._prefix)}
        check_complete(self._folder, missing | info.mismatched_keys)
        outer = self._states.pop(None, {})
        tables = {"embedding": self.model.get_input_embeddings(), "output": self.model.get_output_embeddings()}
        is_plain = all(type(table) in (nn.Embedding, nn.Linear) for table in tables.values())
        kept = {
            role: name
            for role, name in vocabulary.items()
            if is_plain and name in outer and outer[name].dtype not in (None, self.dtype)
        }
        unkept = {name: tensor for name, tensor in outer.items() if name not in kept.values()}
        self._convert(unkept, self._config)
        # Materializes and initializes what no file stores, such as the frequencies of rotary embeddings.
        info = self.model._finalize_model_loading(self.model, self._config, info)
        check_complete(self._folder, info.missing_keys)
        is_tied = tables["output"].weight is tables["embedding"].weight
        for role, name in kept.items():
            tables[role].weight = nn.Parameter(outer[name][...], requires_grad=False)
        if is_tied and "embedding" in kept:
            tables["output"].weight = tables["embedding"].weight

    def _convert(self, state: Mapping[str, LazyTensor], config: LoadStateDictConfig) -> LoadStateDictInfo:
        with transformers_errors(self._folder):
            info, _ = convert_and_load_state_dict_in_model(self.model, dict(state), config)
        if info.conversion_errors:
            raise CheckpointError(f"{self._folder}: {'; '.join(map(str, info.conversion_errors.values()))}")
        return info


def _on_meta_device(stored: LazyTensor) -> LazyValue:
    make = partial(torch.empty, stored.shape, dtype=stored.dtype, device="meta")
    return LazyValue(stored.shape, stored.dtype, make)


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, own = name.rpartition(".")
    setattr(module.get_submodule(path), own, value)


def _on_meta(config: LoadStateDictConfig) -> LoadStateDictConfig:
    conversions = copy.deepcopy(config.weight_mapping or [])
    for conversion in conversions:
        if getattr(conversion, "force_cpu", False):
            conversion.force_cpu = False
    return replace(config, device_map={"": "meta"}, weight_mapping=conversions)


def _stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    names = set(module.state_dict())
    return ((name, value) for name, value in [*module.named_parameters(), *module.named_buffers()] if name in names)
