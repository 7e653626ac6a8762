"""transformers' models: the only place that makes them, of a config or of a checkpoint's files."""

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

from nextn.blocks.idle import with_idle
from nextn.errors import CheckpointError, NextnError


class Readable(Protocol):
    """A stored tensor, read at `[...]`; dtype is what comes out, None for what does not tell the model's."""

    @property
    def dtype(self) -> torch.dtype | None: ...

    def __getitem__(self, key: object, /) -> Tensor: ...


def fresh(config: Mapping[str, object], dtype: torch.dtype) -> PreTrainedModel:
    """A freshly initialised model of the given transformers config, a dict with `model_type`."""
    known = AutoConfig.for_model(**copy.deepcopy(dict(config)))  # some configs write into the parts they are given
    return _loader(known).from_config(known, dtype=dtype)


def loaded(folder: Path, state: Mapping[str, Readable] | None, dtype: torch.dtype | None) -> PreTrainedModel:
    """The model of the folder's config; its tensors from state, by stored name, or as transformers reads the files.

    state: plain numbers, whatever the config says of quantisation. dtype None = the config's, else the stored one.
    Raises CheckpointError if a tensor would stay uninitialised, or where transformers cannot load it.
    """
    load = _from_files if state is None else partial(_from_state, state=state)
    with _quiet():
        try:
            model, info = load(folder, dtype)
        except NextnError:
            raise
        except Exception as error:  # a stranger's config goes as it is into hundreds of classes
            raise CheckpointError(f"{folder}: transformers cannot load the trunk: {_reason(error)}") from error
    bad = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if bad:
        raise CheckpointError(
            f"{folder}: {len(bad)} trunk tensors are missing or of another shape: {', '.join(bad[:8])}"
        )
    return model


def _from_files(folder: Path, dtype: torch.dtype | None) -> tuple[PreTrainedModel, dict[str, list[str]]]:
    loader = _loader(_config(folder))
    return loader.from_pretrained(folder, dtype=dtype or "auto", output_loading_info=True, trust_remote_code=False)


def _from_state(
    folder: Path, dtype: torch.dtype | None, *, state: Mapping[str, Readable]
) -> tuple[PreTrainedModel, dict[str, list[str]]]:
    config = _config(folder)
    loader = _loader(config)._model_mapping[type(config)]
    if loader.config_class is not type(config):  # a vision-language type whose text model has a class
        config = config.get_text_config()
    for part in (config, config.get_text_config()):
        vars(part).pop("quantization_config", None)
    kinds = Counter(each.dtype for each in state.values() if each.dtype is not None)  # routers may be fp32 in any model
    model, info = loader.from_pretrained(
        None,
        config=config,
        state_dict=with_idle(state, config.get_text_config()),
        dtype=dtype or config.dtype or config.get_text_config().dtype or kinds.most_common(1)[0][0],
        output_loading_info=True,
    )
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, info


def _config(folder: Path) -> PreTrainedConfig:
    # Left out, trust_remote_code asks at the terminal whether to run the checkpoint's own code.
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _reason(error: Exception) -> str:
    said = " ".join(str(error).split())
    if "trust_remote_code" in said:
        return "it has no model of this type, and code that lies in a checkpoint is never run"
    return said if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {said}"


def _loader(config: PreTrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    # Some vision-language types have no class for their text model alone.
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
