"""Building transformers' models, from a config or from a checkpoint's files."""

import copy
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import LoadStateDictInfo, convert_and_load_state_dict_in_model
from transformers.initialization import no_init_weights
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from nextn.checkpoint.mapped_memory import release_pages
from nextn.checkpoint.tensors import StoredTensor
from nextn.errors import CheckpointError, NextnError
from nextn.model.expert_groups import EXPERT, STACKED, check_finite
from nextn.model.family_layers import add_unused_experts, remove_unused_experts
from nextn.model.packed_linear import StandIns
from nextn.model.stored_experts import StoredExperts, find_layout

_EXPERTS_AT_ONCE = 4  # converted together


class LazyTensor(Protocol):
    """A stored tensor, read by `[...]`; dtype is that of the result, None where it does not indicate the model's."""

    @property
    def dtype(self) -> torch.dtype | None: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, key: object, /) -> Tensor: ...

    def release(self) -> None:
        """Release the memory that reading it took, see `release_pages`."""


def model_from_config(config: Mapping[str, object], dtype: torch.dtype) -> PreTrainedModel:
    """Build a freshly initialized model from a transformers config, a dict with `model_type`."""
    typed = AutoConfig.for_model(**copy.deepcopy(dict(config)))  # some configs modify the dicts that they are given
    return _loader(typed).from_config(typed, dtype=dtype)


def model_from_folder(
    folder: Path,
    state: Mapping[str, LazyTensor] | None,
    dtype: torch.dtype | None,
    packed: Mapping[str, StoredTensor] = {},
) -> PreTrainedModel:
    """Load the model of a checkpoint folder.

    Args:
        folder: The checkpoint.
        state: Tensors by stored name, not quantized, whatever the config says; None: transformers reads the files.
        dtype: None: the config's, else the stored one.
        packed: Tensors of `state` whose codes linear layers of the decoder keep, if transformers loads them as they
            are. Of others, which it merges or splits, the dequantized values are loaded.

    Raises:
        CheckpointError: if a tensor would stay uninitialized, or if transformers cannot load the model.
    """
    if state is not None and packed:
        return _with_codes(folder, state, dtype, packed)
    load = _from_files if state is None else partial(_from_state, state=state)
    with _transformers_errors(folder):
        model, info = load(folder, dtype)
    _check_complete(folder, [*info["missing_keys"], *info["mismatched_keys"]])
    return model


def _with_codes(
    folder: Path, state: Mapping[str, LazyTensor], dtype: torch.dtype | None, packed: Mapping[str, StoredTensor]
) -> PreTrainedModel:
    with _transformers_errors(folder):
        *_, dtype = _class_of_state(folder, state, dtype)
    stand_ins = StandIns(dtype)
    lazy = {name: stand_ins.lazy(stored) for name, stored in packed.items()}
    model = model_from_folder(folder, {**state, **lazy}, dtype)
    if not (others := stand_ins.install(model.get_decoder().layers)):
        return model
    del model
    fewer = {name: stored for name, stored in packed.items() if stored not in others}
    return model_from_folder(folder, state, dtype, fewer)


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
        """Build the model and load all but its decoder layers.

        Args:
            folder: The checkpoint, for its config.
            state: Tensors by stored name, not quantized.
            dtype: None: the config's, else the stored one.
            layer_of: The index of the decoder layer that a stored name belongs to; None if to no layer.
            vocabulary: Stored names of `embedding` and `output`, which keep their stored dtype where plain modules
                hold them, so that no cast copy of them is made.
            packed: As for `model_from_folder`; `stand_ins` are loaded in their place.

        Raises:
            CheckpointError: if any tensor, those of layers included, is missing or has another shape, or if
                transformers cannot build the model.
        """
        self._folder = folder
        with _transformers_errors(folder):
            model_class, config, dtype = _class_of_state(folder, state, dtype)
            with no_init_weights(), torch.device("meta"):
                self.model: PreTrainedModel = model_class._from_config(config, dtype=dtype)
            self.model.eval()
            self.dtype, self.stand_ins = dtype, StandIns(dtype)
            state = {**state, **{name: self.stand_ins.lazy(stored) for name, stored in packed.items()}}
            _read_generation_config(self.model, folder)
            self._config = LoadStateDictConfig(
                device_map={"": "cpu"},
                dtype=dtype,
                dtype_plan=self.model._get_dtype_plan(dtype),
                weight_mapping=get_model_conversion_mapping(self.model),
            )
            self._states: dict[int | None, dict[str, LazyTensor]] = defaultdict(dict)
            for name, tensor in add_unused_experts(state, config.get_text_config()).items():
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

        experts: False: leave out experts that are stored one by one, see `expert_groups`.
        """
        self.unload(index)  # with the rows of unused experts, which a trunk removes
        others, parts = self._parts(index)
        self._convert(others, self._on(device))
        layer = self._layers[index]
        if experts and parts:
            self._load_experts(index, device)
        missing = {name for name, value in _stored_tensors(layer) if value.is_meta}
        _check_complete(self._folder, missing if experts else missing - {name for name, _ in self._stacked(index)})
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
        everything = {name: _MetaTensor(each) for state in self._states.values() for name, each in state.items()}
        # All names and shapes are compared before any value is read.
        info = self._convert(everything, _on_meta(self._config))
        layers = next(name for name, part in self.model.named_modules() if part is self._layers)
        self._prefix = f"{layers}."
        missing = {name for name in info.missing_keys if name.startswith(self._prefix)}
        _check_complete(self._folder, missing | info.mismatched_keys)
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
        _check_complete(self._folder, info.missing_keys)
        is_tied = tables["output"].weight is tables["embedding"].weight
        for role, name in kept.items():
            tables[role].weight = nn.Parameter(outer[name][...], requires_grad=False)
        if is_tied and "embedding" in kept:
            tables["output"].weight = tables["embedding"].weight

    def _convert(self, state: Mapping[str, LazyTensor], config: LoadStateDictConfig) -> LoadStateDictInfo:
        with _transformers_errors(self._folder):
            info, _ = convert_and_load_state_dict_in_model(self.model, dict(state), config)
        if info.conversion_errors:
            raise CheckpointError(f"{self._folder}: {'; '.join(map(str, info.conversion_errors.values()))}")
        return info


@dataclass(frozen=True, eq=False)
class _MetaTensor:
    """Shape and dtype of a stored tensor."""

    stored: LazyTensor

    @property
    def dtype(self) -> torch.dtype | None:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def release(self) -> None:
        self.stored.release()

    def __getitem__(self, key: object) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


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


def _check_complete(folder: Path, incomplete: Collection[object]) -> None:
    if incomplete:
        bad = sorted(map(str, incomplete))
        raise CheckpointError(
            f"{folder}: {len(bad)} trunk tensors are missing or have another shape: {', '.join(bad[:8])}"
        )


@contextmanager
def _transformers_errors(folder: Path) -> Iterator[None]:
    with _quiet():
        try:
            yield
        except NextnError:
            raise
        except Exception as error:  # an untrusted config is passed to any of hundreds of classes
            raise CheckpointError(f"{folder}: transformers cannot load the trunk: {_reason(error)}") from error


def _from_files(folder: Path, dtype: torch.dtype | None) -> tuple[PreTrainedModel, dict[str, list[str]]]:
    loader = _loader(_config(folder))
    return loader.from_pretrained(folder, dtype=dtype or "auto", output_loading_info=True, trust_remote_code=False)


def _from_state(
    folder: Path, dtype: torch.dtype | None, *, state: Mapping[str, LazyTensor]
) -> tuple[PreTrainedModel, dict[str, list[str]]]:
    loader, config, dtype = _class_of_state(folder, state, dtype)
    model, info = loader.from_pretrained(
        None,
        config=config,
        state_dict=add_unused_experts(state, config.get_text_config()),
        dtype=dtype,
        output_loading_info=True,
    )
    _read_generation_config(model, folder)
    return model, info


def _read_generation_config(model: PreTrainedModel, folder: Path) -> None:
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)


def _class_of_state(
    folder: Path, state: Mapping[str, LazyTensor], dtype: torch.dtype | None
) -> tuple[type[PreTrainedModel], PreTrainedConfig, torch.dtype]:
    config = _config(folder)
    loader = _loader(config)._model_mapping[type(config)]
    if loader.config_class is not type(config):  # a vision-language type whose text model has its own class
        config = config.get_text_config()
    for part in (config, config.get_text_config()):
        vars(part).pop("quantization_config", None)
    # The most frequent one: routers may be fp32 in any model.
    dtypes = Counter(tensor.dtype for tensor in state.values() if tensor.dtype is not None)
    return loader, config, dtype or config.dtype or config.get_text_config().dtype or dtypes.most_common(1)[0][0]


def _config(folder: Path) -> PreTrainedConfig:
    # Without it, transformers would ask at the terminal whether to run the checkpoint's own code.
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _reason(error: Exception) -> str:
    message = " ".join(str(error).split())
    if "trust_remote_code" in message:
        return "it has no model of this type, and code in a checkpoint is never run"
    return message if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {message}"


def _loader(config: PreTrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    # Some vision-language types have no class for only their text model.
    return AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText


@contextmanager
def _quiet() -> Iterator[None]:
    # transformers reports the head's tensors as unexpected; the strict loader accounts for every one of them.
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
