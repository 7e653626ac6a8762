"""Building transformers' models, from a config or from a checkpoint's files."""

import copy
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils import logging as transformers_logging

from nextn.checkpoint.tensors import StoredTensor
from nextn.errors import CheckpointError, NextnError
from nextn.model.family_layers import add_unused_experts
from nextn.model.packed_linear import LazyTensor, StandIns
from nextn.text_format import counted


def reads_quantization(method: str) -> bool:
    """Whether transformers has a loader for this quant_method; it reads files of any other as if unquantized."""
    return any(each.startswith(method) for each in AUTO_QUANTIZER_MAPPING)


def model_from_config(config: Mapping[str, object], dtype: torch.dtype) -> PreTrainedModel:
    """Build a freshly initialized model from a transformers config, a dict with `model_type`."""
    typed = AutoConfig.for_model(**copy.deepcopy(dict(config)))  # some configs modify the dicts that they are given
    return model_of_config(typed, dtype)


def model_of_config(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a freshly initialized model from transformers' config."""
    return _loader(config).from_config(config, dtype=dtype)


def model_from_folder(
    folder: Path,
    state: Mapping[str, LazyTensor] | None,
    dtype: torch.dtype | None,
    packed: Mapping[str, StoredTensor] = {},
) -> PreTrainedModel:
    """Load the model of a checkpoint folder in `dtype`; None: the config's, else the stored one.

    `state` has its tensors by stored name, not quantized, whatever the config says; None: transformers reads the files.
    Linear layers of the decoder keep the codes of those in `packed`, if transformers loads them as they are; where it
    merges or splits them, the dequantized values are loaded. Raises CheckpointError if a tensor would stay
    uninitialized, or if transformers cannot load the model.
    """
    if state is not None and packed:
        return _with_codes(folder, state, dtype, packed)
    load = _from_files if state is None else partial(_from_state, state=state)
    with transformers_errors(folder):
        model, info = load(folder, dtype)
    check_complete(folder, [*info["missing_keys"], *info["mismatched_keys"]])
    return model


def empty_model(
    folder: Path, state: Mapping[str, LazyTensor], dtype: torch.dtype | None
) -> tuple[PreTrainedModel, torch.dtype]:
    """Build the model of a checkpoint folder on the meta device; return it and its dtype, as `model_from_folder`."""
    model_class, config, dtype = _class_of_state(folder, state, dtype)
    with no_init_weights(), torch.device("meta"):
        model: PreTrainedModel = model_class._from_config(config, dtype=dtype)
    _read_generation_config(model, folder)
    return model.eval(), dtype


def _with_codes(
    folder: Path, state: Mapping[str, LazyTensor], dtype: torch.dtype | None, packed: Mapping[str, StoredTensor]
) -> PreTrainedModel:
    with transformers_errors(folder):
        *_, dtype = _class_of_state(folder, state, dtype)
    stand_ins = StandIns(dtype)
    lazy = {name: stand_ins.lazy(stored) for name, stored in packed.items()}
    model = model_from_folder(folder, {**state, **lazy}, dtype)
    if not (others := stand_ins.install(model.get_decoder().layers)):
        return model
    del model
    fewer = {name: stored for name, stored in packed.items() if stored not in others}
    return model_from_folder(folder, state, dtype, fewer)


def check_complete(folder: Path, incomplete: Collection[object]) -> None:
    """Raise CheckpointError if there are incomplete tensors, and name some."""
    if incomplete:
        bad = sorted(map(str, incomplete))
        raise CheckpointError(
            f"{folder}: {counted(len(bad), 'tensor')} of the trunk missing or of another shape: {', '.join(bad[:8])}"
        )


@contextmanager
def transformers_errors(folder: Path, what: str = "load") -> Iterator[None]:
    """Turn what transformers raises while it does `what` into a CheckpointError, and silence its messages."""
    with _quiet():
        try:
            yield
        except NextnError:
            raise
        except Exception as error:  # an untrusted config is passed to any of hundreds of classes
            raise CheckpointError(f"{folder}: transformers cannot {what} the trunk: {_reason(error)}") from error


def _from_files(folder: Path, dtype: torch.dtype | None) -> tuple[PreTrainedModel, dict[str, list[str]]]:
    loader = _loader(_config(folder))
    model, info = loader.from_pretrained(
        folder, dtype=dtype or "auto", output_loading_info=True, trust_remote_code=False
    )
    return model, info


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
    message = shorten(str(error), 600, placeholder=" ...")  # some quote a value of the config, whatever its length
    if "trust_remote_code" in message:
        return "it has no model of this type, and code in a checkpoint is never run"
    return message if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {message}"


def _loader(config: PreTrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    # Some vision-language types have no class for only their text model.
    is_text = type(config) in AutoModelForCausalLM._model_mapping
    return cast(type[AutoModelForCausalLM], AutoModelForCausalLM if is_text else AutoModelForImageTextToText)


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
