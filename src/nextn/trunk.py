"""The trunk: the narrow door to transformers' models. Forward, embed, logits, new blocks, caches; nothing of the head.

Everything that reads a model's internals is here, so a new transformers is one file to look at.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DummyLayer, get_layer_types_and_kwargs
from transformers.utils import logging as transformers_logging

from nextn.errors import CheckpointError, ConfigError, RollbackError
from nextn.families import Stage
from nextn.rollback import AttentionLayer, Cache, RecurrentLayer

_SLIDING = ("sliding_attention", "chunked_attention")
_RECURRENT = ("linear_attention", "conv")


@dataclass(frozen=True)
class Hidden:
    """normed [B, T, H]: after the final norm, what the output head reads. eaten [B, T, H]: what the MTP head reads."""

    normed: Tensor
    eaten: Tensor


class _Decoder(Protocol):
    """What is asked of transformers' decoders: `layers`, the final `norm`, and a call."""

    layers: nn.ModuleList
    norm: nn.Module

    def __call__(self, **kwargs: object) -> "_Output": ...


class _Output(Protocol):
    last_hidden_state: Tensor


class _IdleLayer(DummyLayer):
    """A decoder layer without state."""

    def begin(self, lengths: object, num_columns: int) -> None: ...
    def keep(self, counts: object, num_columns: int) -> None: ...
    def drop(self, counts: object) -> None: ...
    def select(self, rows: Tensor) -> None: ...


class Trunk(nn.Module):
    """A causal language model of transformers, seen through six methods.

    stage: which hidden state the MTP head eats, `post` or `pre` the trunk's final norm.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, *, stage: Stage = "post") -> None:
        super().__init__()
        self.model = model
        self.stage = stage
        self.config = model.config.get_text_config(decoder=True)
        for module in self._mixers():
            module.register_forward_pre_hook(_record, with_kwargs=True)

    @classmethod
    def from_config(
        cls, config: Mapping[str, object], *, stage: Stage = "post", dtype: torch.dtype = torch.float32
    ) -> "Trunk":
        """A freshly initialised trunk of the given transformers config, a dict with `model_type`."""
        known = AutoConfig.for_model(**dict(config))
        return cls(AutoModelForCausalLM.from_config(known, dtype=dtype, attn_implementation="sdpa"), stage=stage)

    @classmethod
    def from_pretrained(cls, folder: Path, *, stage: Stage = "post", dtype: torch.dtype | None = None) -> "Trunk":
        """The trunk of a checkpoint folder. Raises CheckpointError if a tensor would stay uninitialised."""
        with _quiet():
            try:
                model, info = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=dtype or "auto", attn_implementation="sdpa", output_loading_info=True
                )
            except (OSError, ValueError, KeyError) as error:
                raise CheckpointError(f"{folder}: transformers cannot load the trunk: {error}") from error
        bad = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        if bad:
            raise CheckpointError(
                f"{folder}: {len(bad)} trunk tensors are missing or of another shape: {', '.join(bad[:8])}"
            )
        return cls(model, stage=stage)

    @property
    def decoder(self) -> "_Decoder":
        return cast(_Decoder, self.model.get_decoder())

    @property
    def embedding(self) -> nn.Embedding:
        return cast(nn.Embedding, self.model.get_input_embeddings())

    @property
    def output(self) -> nn.Linear:
        return cast(nn.Linear, self.model.get_output_embeddings())

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_length(self) -> int | None:
        """Columns that the model was made for, or None where it does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def is_recurrent(self) -> bool:
        return any(kind in _RECURRENT for kind in get_layer_types_and_kwargs(self.config)[0])

    def forward(self, tokens: Tensor, cache: Cache | None = None, *, documents: Tensor | None = None) -> Hidden:
        """tokens [B, T] -> Hidden. With a cache, the T columns are a window that the caller closes with `cache.keep`.

        documents [B, T] ids: attention and positions stay inside a document (training only, attention trunks only).
        """
        if cache is not None:
            cache.begin(tokens.shape[1])
            positions: Tensor | None = cache.positions(tokens.shape[1])
            mask = self._masks(cache, tokens.shape[1])
        else:
            positions, mask = self._packed(tokens, documents)
        with self._tapped() as tap:
            out = self.decoder(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        normed = out.last_hidden_state
        return Hidden(normed, tap[0] if tap else normed)

    def logits(self, normed: Tensor) -> Tensor:
        """normed [..., H] -> [..., V]."""
        return self.output(normed)

    def cache(self, batch_size: int) -> Cache:
        """An empty cache for batch_size rows. Raises RollbackError for a layer kind that cannot be put back exactly."""
        kinds, options = get_layer_types_and_kwargs(self.config)
        layers = [_cache_layer(kind, option) for kind, option in zip(kinds, options, strict=True)]
        return Cache(layers, batch_size, device=self.device)

    def block(self, index: int, count: int, overrides: Mapping[str, object]) -> nn.Module:
        """A fresh decoder layer of the trunk's class, for module `index` of `count`; overrides change its config."""
        config = copy.deepcopy(self.config)
        config.num_hidden_layers = count
        for name, value in overrides.items():
            setattr(config, name, value * count if isinstance(value, list) else value)
        block: nn.Module = cast(Callable[..., nn.Module], type(self.decoder.layers[-1]))(config, index)
        self.initialize(block)
        block.to(self.dtype)
        for part in block.modules():
            for name, value in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
                if self.keeps_fp32(name):
                    value.data = value.data.float()
        return block

    def keeps_fp32(self, name: str) -> bool:
        """Whether the model keeps this tensor in fp32 whatever its dtype, such as a router's correction bias."""
        return any(part in name for part in self.model._keep_in_fp32_modules_strict or ())

    def norm(self) -> nn.Module:
        """A fresh norm of the trunk's own class."""
        reference = self.decoder.norm
        eps = getattr(reference, "variance_epsilon", getattr(reference, "eps", None))
        norm: nn.Module = cast(Callable[..., nn.Module], type(reference))(self.config.hidden_size, eps=eps)
        self.initialize(norm)
        return norm.to(self.dtype)

    @torch.no_grad()
    def initialize(self, module: nn.Module) -> None:
        """Initial values by the trunk's own rule."""
        for part in module.modules():
            self.model._init_weights(part)

    def rotary(self, states: Tensor, positions: Tensor) -> object:
        """Position embeddings for states [B, T, H] at positions [B, T], as the trunk's layers want them."""
        rotary = getattr(self.decoder, "rotary_emb", None)
        if rotary is None:
            return None
        # Qwen3.5 counts positions in time, height and width; a text token has the same index in all three.
        return rotary(states, positions[None] if hasattr(rotary, "mrope_section") else positions)

    def _masks(self, cache: Cache, num_columns: int) -> object:
        kinds = set(get_layer_types_and_kwargs(self.config)[0])
        window = getattr(self.config, "sliding_window", None)
        masks = {
            kind: cache.mask(num_columns, window=window if kind in _SLIDING else None)
            for kind in kinds - set(_RECURRENT)
        }
        if len(kinds) == 1:
            return next(iter(masks.values()), None)
        return masks | dict.fromkeys(kinds & set(_RECURRENT))

    def _packed(self, tokens: Tensor, documents: Tensor | None) -> tuple[Tensor | None, object]:
        # Padding (-1) stands at the right end, where causal attention hides it from every real column.
        if documents is None or bool(((documents == documents[:, :1]) | (documents < 0)).all()):
            return None, None
        if self.is_recurrent:
            raise ConfigError("a recurrent trunk cannot mask state between packed documents; use one document per row")
        positions, mask = packed(documents)
        kinds = set(get_layer_types_and_kwargs(self.config)[0])
        if kinds & set(_SLIDING):
            raise ConfigError("packing is not supported for sliding-window trunks; use one document per row")
        return positions, mask

    @contextmanager
    def _tapped(self) -> Iterator[list[Tensor]]:
        tap: list[Tensor] = []
        if self.stage == "post":
            yield tap
            return
        handle = self.decoder.norm.register_forward_pre_hook(lambda _, args: tap.append(args[0]))
        try:
            yield tap
        finally:
            handle.remove()

    def _mixers(self) -> Iterator[nn.Module]:
        kinds, _ = get_layer_types_and_kwargs(self.config)
        for layer, kind in zip(self.decoder.layers, kinds, strict=True):
            if kind in _RECURRENT:
                yield from (
                    part
                    for part in layer.modules()
                    if getattr(part, "layer_idx", None) is not None and part is not layer
                )


def packed(documents: Tensor) -> tuple[Tensor, Tensor]:
    """documents [B, T] -> positions [B, T] counted from each document's start, mask [B, 1, T, T] causal inside it."""
    length = documents.shape[1]
    columns = torch.arange(length, device=documents.device)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    positions = columns - torch.where(starts, columns, 0).cummax(dim=1).values
    same = documents[:, :, None] == documents[:, None, :]
    return positions, (same & (columns[:, None] >= columns))[:, None]


def _cache_layer(kind: str, options: Mapping[str, object]) -> AttentionLayer | RecurrentLayer | _IdleLayer:
    if kind == "full_attention" or kind in _SLIDING:
        return AttentionLayer()
    if kind in _RECURRENT:
        return RecurrentLayer(int(str(options.get("number_of_states", 1))))
    if kind == "dummy":
        return _IdleLayer()
    known = ", ".join(("full_attention", *_SLIDING, *_RECURRENT))
    raise RollbackError(f"layers of kind {kind!r} cannot be put back exactly; supported: {known}")


def _record(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    cache = next((value for value in [*args, *kwargs.values()] if isinstance(value, Cache)), None)
    if cache is not None:
        cache.layers[module.layer_idx].record(module, args, kwargs)


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
