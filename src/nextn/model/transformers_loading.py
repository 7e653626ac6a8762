"""Building transformers' models, from a config or from a checkpoint's files."""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from nextn.errors import CheckpointError, NextnError
from nextn.model.family_layers import add_unused_experts


class LazyTensor(Protocol):
    """A stored tensor, read by `[...]`; dtype is that of the result, None where it does not indicate the model's."""

    @property
    def dtype(self) -> torch.dtype | None: ...

    def __getitem__(self, key: object, /) -> Tensor: ...


def model_from_config(config: Mapping[str, object], dtype: torch.dtype) -> PreTrainedModel:
    """Build a freshly initialized model from a transformers config, a dict with `model_type`."""
    typed = AutoConfig.for_model(**copy.deepcopy(dict(config)))  # some configs modify the dicts that they are given
    return _loader(typed).from_config(typed, dtype=dtype)


def model_from_folder(
    folder: Path, state: Mapping[str, LazyTensor] | None, dtype: torch.dtype | None
) -> PreTrainedModel:
    """Load the model of a checkpoint folder.

    Args:
        folder: The checkpoint.
        state: Tensors by stored name, not quantized, whatever the config says; None: transformers reads the files.
        dtype: None: the config's, else the stored one.

    Raises:
        CheckpointError: if a tensor would stay uninitialized, or if transformers cannot load the model.
    """
    load = _from_files if state is None else partial(_from_state, state=state)
    with _quiet():
        try:
            model, info = load(folder, dtype)
        except NextnError:
            raise
        except Exception as error:  # an untrusted config is passed to any of hundreds of classes
            raise CheckpointError(f"{folder}: transformers cannot load the trunk: {_reason(error)}") from error
    bad = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if bad:
        raise CheckpointError(
            f"{folder}: {len(bad)} trunk tensors are missing or have another shape: {', '.join(bad[:8])}"
        )
    return model


def _from_files(folder: Path, dtype: torch.dtype | None) -> tuple[PreTrainedModel, dict[str, list[str]]]:
    loader = _loader(_config(folder))
    return loader.from_pretrained(folder, dtype=dtype or "auto", output_loading_info=True, trust_remote_code=False)


def _from_state(
    folder: Path, dtype: torch.dtype | None, *, state: Mapping[str, LazyTensor]
) -> tuple[PreTrainedModel, dict[str, list[str]]]:
    config = _config(folder)
    loader = _loader(config)._model_mapping[type(config)]
    if loader.config_class is not type(config):  # a vision-language type whose text model has its own class
        config = config.get_text_config()
    for part in (config, config.get_text_config()):
        vars(part).pop("quantization_config", None)
    # The most frequent one: routers may be fp32 in any model.
    dtypes = Counter(tensor.dtype for tensor in state.values() if tensor.dtype is not None)
    model, info = loader.from_pretrained(
        None,
        config=config,
        state_dict=add_unused_experts(state, config.get_text_config()),
        dtype=dtype or config.dtype or config.get_text_config().dtype or dtypes.most_common(1)[0][0],
        output_loading_info=True,
    )
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, info


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
