"""The trunk (target model): the only interface to transformers' models. Forward, embed, logits, new layers, caches.

Everything that reads a model's internals is here and in four other modules: `transformers_loading` builds models,
`layer_loader` loads single layers, `layer_types` says what state they keep, and `head_layers` builds a head's layers.
So a new version of transformers concerns five files.
"""

import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from nextn.cache.attention_layer import causal, packed
from nextn.cache.family_caches import PerSequenceCache
from nextn.cache.kv_cache import CACHE_ARGUMENT, KVCache
from nextn.checkpoint.tensors import StoredTensor
from nextn.errors import ConfigError, FamilyError
from nextn.family_table import Stage
from nextn.model.family_layers import freeze_indexers, remove_unused_experts
from nextn.model.layer_types import (
    LayerType,
    context_length,
    layer_types_of,
    masks_of,
    new_cache,
)
from nextn.model.logits import logits_of
from nextn.model.packed_linear import LazyTensor
from nextn.model.recurrent_check import check_blocks
from nextn.model.transformers_loading import model_from_config, model_from_folder
from nextn.text_format import docs_page


@dataclass(frozen=True)
class TrunkOutput:
    """The hidden states of one pass."""

    final_hidden: Tensor  # [B, T, H] after the final norm, the input of the lm_head
    head_input: Tensor  # [B, T, *hidden_shape], the input of the MTP head


class _Decoder(Protocol):
    """What is used of transformers' decoders: layers, final norm (under one of its names), initialization, a call."""

    layers: nn.ModuleList
    norm: nn.Module
    norm_f: nn.Module
    rotary_emb: nn.Module
    hyper_connection_mixer: nn.Module

    def __call__(self, **kwargs: object) -> "_Output": ...
    def _init_weights(self, module: nn.Module) -> None: ...


class _Output(Protocol):
    last_hidden_state: Tensor


class Trunk(nn.Module):
    """A causal language model of transformers.

    `stage` says which hidden state is the MTP head's input: `post` or `pre` the trunk's final norm, or the `streams` of
    its last layer.
    """

    model: PreTrainedModel
    __call__: Callable[..., TrunkOutput]

    def __init__(self, model: PreTrainedModel, *, stage: Stage = "post") -> None:
        super().__init__()
        self.model = model
        self.stage = stage
        # One of `WEIGHTS`: with "int8" or "int4", the native backend decodes with weights of that many bits.
        self.weights = "stored"
        # One of `KV_CACHE_DTYPES`: with "int8", the native backend's KV caches have eight bits, also the head's.
        self.kv_cache_dtype = "auto"
        # The device of each decoder layer, or "disk", where they are not all on `device`; see `device_map`.
        self.layer_places: tuple[str, ...] = ()
        if not hasattr(model.get_decoder(), "layers"):
            raise FamilyError(
                f"{type(model).__name__} (model_type {model.config.model_type}) has no `layers` in its decoder, "
                f"as Llama, Qwen and the known families have ({docs_page('reference/families/index')}); nextn cannot "
                "decode with it"
            )
        self.config = model.config.get_text_config(decoder=True)
        self.layer_types = layer_types_of(self.config)
        # Whether blocks of several positions continue what is cached; only mixers of recurrent layers may not.
        self._continues = not any(layer.is_recurrent for layer in self.layer_types)
        freeze_indexers(model)
        remove_unused_experts(model)
        for module in self._mixers():
            module.register_forward_pre_hook(_record, with_kwargs=True)

    @classmethod
    def from_config(
        cls, config: Mapping[str, object], *, stage: Stage = "post", dtype: torch.dtype = torch.float32
    ) -> "Trunk":
        """Build a freshly initialized trunk from a transformers config, a dict with `model_type`."""
        return cls(model_from_config(config, dtype), stage=stage)

    @classmethod
    def from_pretrained(
        cls,
        folder: Path,
        *,
        state: Mapping[str, LazyTensor] | None = None,
        packed: Mapping[str, StoredTensor] = {},
        stage: Stage = "post",
        dtype: torch.dtype | None = None,
    ) -> "Trunk":
        """Load the trunk of a checkpoint folder, see `model_from_folder`."""
        return cls(model_from_folder(folder, state, dtype, packed), stage=stage)

    @property
    def decoder(self) -> "_Decoder":
        return cast(_Decoder, self.model.get_decoder())

    @property
    def final_norm(self) -> nn.Module:
        """The norm before the lm_head; in Qwen4, the one inside the module that collapses the streams."""
        for name in ("norm", "norm_f", "final_layernorm"):
            if hasattr(self.decoder, name):
                return cast(nn.Module, getattr(self.decoder, name))
        if hasattr(self.decoder, "hyper_connection_mixer"):
            return cast(nn.Module, self.decoder.hyper_connection_mixer.hc_norm)
        raise FamilyError(f"{type(self.model).__name__} has no final norm under a name that nextn knows")

    @property
    def embedding(self) -> nn.Embedding:
        return cast(nn.Embedding, self.model.get_input_embeddings())

    @property
    def output(self) -> nn.Linear:
        return cast(nn.Linear, self.model.get_output_embeddings())

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """The number of tokens; embedding and lm_head may have more rows, for padding."""
        return int(getattr(self.config, "unpadded_vocab_size", None) or self.config.vocab_size)

    @property
    def max_length(self) -> int | None:
        """The context length, see `context_length`."""
        return context_length(self.config)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def can_pack(self) -> bool:
        """Whether one sequence can hold several documents."""
        return all(layer_type.can_pack for layer_type in self.layer_types)

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """The shape of the head's hidden input for one token: (H,), or (S, H) or (S * H,) of S streams."""
        size = self.config.hidden_size
        if self.stage == "streams":
            return (self.config.hc_mult, size) if hasattr(self.config, "hc_mult") else (self.config.hc_count * size,)
        return (size,)

    @property
    def scale(self) -> float:
        """The factor applied to the final hidden state before the lm_head, which scales the logits."""
        factors, divisors = ["logit_scale", "lm_head_multiplier"], ["logits_mup_width_multiplier"]
        # Granite divides by it.
        (factors if self.config.model_type == "hyperclovax" else divisors).append("logits_scaling")
        factor, divisor = (
            math.prod(getattr(self.config, name, 1.0) for name in names) for names in (factors, divisors)
        )
        return factor / divisor

    @property
    def logit_cap(self) -> float | None:
        """The bound that logits approach, as Gemma's do; None where they have none."""
        names = ("final_logit_softcapping", "logits_soft_cap")  # the second one of RecurrentGemma
        return next((cap for name in names if (cap := getattr(self.config, name, None)) is not None), None)

    def check_losses(self) -> None:
        """Raise FamilyError if losses, which multiply states with the lm_head, do not have this model's logits."""
        if self.logit_cap is not None:
            raise FamilyError(
                f"model_type {self.config.model_type} caps its logits (at {self.logit_cap:g}), "
                "which losses of the trunk do not compute; train its head with --freeze-trunk"
            )

    def forward(self, tokens: Tensor, cache: KVCache | None = None, *, documents: Tensor | None = None) -> TrunkOutput:
        """Run the model over tokens [B, T], from any device; they become a block of the cache, to be committed.

        With `documents` [B, T] ids, attention and positions stay inside a document (only without a cache or with an
        empty one, and only if `can_pack`).
        """
        if isinstance(cache, PerSequenceCache):
            outputs = [self(tokens[index : index + 1], own) for index, own in enumerate(cache.sequences)]
            return TrunkOutput(
                torch.cat([output.final_hidden for output in outputs]),
                torch.cat([output.head_input for output in outputs]),
            )
        tokens = tokens.to(self.device, non_blocking=True)
        length = tokens.shape[1]
        if cache is not None:
            if length == 1 and any(layer.compress_rate for layer in self.layer_types) and len(set(cache.lengths)) > 1:
                # DeepSeek-V4 masks no entries for a single query, so it would see those of longer sequences: add one.
                tokens = functional.pad(tokens, (0, 1))
            size = tokens.shape[1]
            cache.begin(size)
            positions: Tensor | None = cache.positions(size)
            mask = masks_of(self.layer_types, lambda layer: self.mask(layer, size, rows=len(tokens), cache=cache))
        if cache is None or documents is not None:
            own_positions, own_mask = self._packed_mask(tokens, documents)
            if cache is None or own_positions is not None:
                positions, mask = own_positions, own_mask
        with self._captured() as captured:
            out = self.decoder(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                use_cache=cache is not None,
                **{CACHE_ARGUMENT: cache},
            )
        final_hidden = out.last_hidden_state[:, :length]
        return TrunkOutput(final_hidden * self.scale, captured[0][:, :length] if captured else final_hidden)

    @contextmanager
    def capture_hidden(self) -> Iterator[list[TrunkOutput]]:
        """Collect the states of every pass of the model inside the context, whoever calls it, in order."""
        outputs: list[TrunkOutput] = []

        def record(module: nn.Module, args: object, out: Sequence[Tensor]) -> None:
            outputs.append(TrunkOutput(out[0] * self.scale, captured.pop() if captured else out[0]))

        with self._captured() as captured, cast(nn.Module, self.decoder).register_forward_hook(record):
            yield outputs

    def embed(self, tokens: Tensor, *, raw: bool = False) -> Tensor:
        """Embed tokens [B, T] -> [B, T, H]. raw: without the norm or scale that some trunks add to their embedding."""
        return functional.embedding(tokens, self.embedding.weight) if raw else self.embedding(tokens)

    def logits(self, final_hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of final_hidden [..., H] in float32, see `logits_of`."""
        return self.capped(logits_of(self.output, final_hidden)[..., : self.vocab_size])

    def capped(self, logits: Tensor) -> Tensor:
        """Return the logits that the product with the lm_head becomes."""
        return logits if self.logit_cap is None else self.logit_cap * torch.tanh(logits / self.logit_cap)

    @property
    def lm_head(self) -> Tensor:
        """The weight [V, H] of the output projection, without padding rows."""
        weight = self.output.weight
        return weight if len(weight) == self.vocab_size else weight[: self.vocab_size]

    @property
    def lm_head_bias(self) -> Tensor | None:
        """The bias [V] of the output projection, without padding; None if it has none."""
        bias = self.output.bias
        return None if bias is None else bias[: self.vocab_size]

    def cache(self, batch_size: int) -> KVCache:
        """Return an empty cache. Raises RollbackError for layers that cannot be rolled back, or continued, exactly."""
        if not self._continues:
            empty_cache = partial(new_cache, self.layer_types, 1, device=self.device)
            mixer, name = next(self._mixers(), None), type(self.model).__name__
            check_blocks(self, empty_cache, mixer, name=name, vocab_size=self.vocab_size)
            self._continues = True
        return new_cache(self.layer_types, batch_size, device=self.device)

    def config_flag(self, field: str | None) -> bool:
        """Whether this field of the config is set and true; True for None."""
        return field is None or bool(getattr(self.config, field, False))

    def keeps_fp32(self, name: str) -> bool:
        """Whether the model keeps this tensor in fp32 whatever its dtype, such as a router's correction bias."""
        return any(part in name for part in self.model._keep_in_fp32_modules_strict or ())

    @torch.no_grad()
    def initialize(self, module: nn.Module) -> None:
        """Initialize a module as the trunk's class does."""
        for part in module.modules():
            self.decoder._init_weights(part)

    def rotary(self, states: Tensor, positions: Tensor, layer_type: LayerType) -> object:
        """Return rotary embeddings for states [B, T, H] at positions [B, T], as layers of this type take them."""
        rotary = getattr(self.decoder, "rotary_emb", None)
        if rotary is None:
            return None
        if layer_type.rotates_all_keys:
            count = int(positions[0, 0]) + positions.shape[1]  # all sequences have this length, see LayerType
            positions = torch.arange(count, device=self.device).expand(len(positions), -1)
        # Qwen3.5 counts positions in time, height and width; a text token has the same index in all three.
        positions = positions[None] if hasattr(rotary, "mrope_section") else positions
        if "layer_type" not in inspect.signature(rotary.forward).parameters:
            return rotary(states, positions)
        if layer_type.name in rotary.layer_types:
            return rotary(states, positions, layer_type.name)
        # DeepSeek-V4 uses other labels, and its layers choose among them.
        return {label: rotary(states, positions, label) for label in rotary.layer_types}

    def mask(
        self,
        layer_type: LayerType,
        num_positions: int,
        *,
        rows: int = 1,
        cache: KVCache | None = None,
        within: Tensor | None = None,
    ) -> Tensor | None:
        """Return the mask [B, 1, T, keys] of layers of this type; None where causal attention needs none.

        It is for the cache's open block; without a cache, the positions start at 0, and `within` [B, 1, T, T] bool
        restricts it further. `rows` is the batch size, for layers that need one mask per sequence. Layers with pools
        build their mask themselves, and get [rows, T] bool here: no position is padding.
        """
        if layer_type.pool_size:
            return torch.ones(rows, num_positions, dtype=torch.bool, device=self.device)
        always = layer_type.is_indexed or self._is_eager
        if cache is not None:
            mask = cache.mask(num_positions, window=layer_type.window, always=always)
        elif within is None and not always and (layer_type.window is None or num_positions <= layer_type.window):
            mask = None
        else:
            mask = causal(
                torch.arange(num_positions, device=self.device)[None], num_positions, window=layer_type.window
            )
            mask = mask if within is None else mask & within
        if layer_type.rotates_all_keys and mask is not None:
            mask = mask.expand(rows, -1, -1, -1)
        return None if mask is None else self.to_attention_mask(mask)

    def to_attention_mask(self, mask: Tensor) -> Tensor:
        """Convert a mask [B, 1, T, keys] bool, True = visible, to what the layers take."""
        if not self._is_eager:
            return mask
        # Eager attention adds its mask to the scores.
        zeros = torch.zeros(mask.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill(~mask, torch.finfo(self.dtype).min)

    @property
    def _is_eager(self) -> bool:
        return bool(self.config._attn_implementation == "eager")

    def _packed_mask(self, tokens: Tensor, documents: Tensor | None) -> tuple[Tensor | None, object]:
        # Padding (-1) is at the right end, where causal attention hides it from every real position.
        if documents is None or bool(((documents == documents[:, :1]) | (documents < 0)).all()):
            return None, None
        if not self.can_pack:
            raise ConfigError("this trunk cannot mask state between packed documents; use one document per sequence")
        positions, within = packed(documents)
        return positions, masks_of(self.layer_types, lambda layer: self.mask(layer, tokens.shape[1], within=within))

    @contextmanager
    def _captured(self) -> Iterator[list[Tensor]]:
        captured: list[Tensor] = []
        if self.stage == "post":
            yield captured
            return
        thread = threading.get_ident()

        def record(state: Tensor) -> None:
            if threading.get_ident() == thread:  # other threads may run the same model concurrently
                captured.append(state)

        if self.stage == "streams":
            handle = self.decoder.layers[-1].register_forward_hook(lambda *call: record(call[-1]))
        else:
            handle = self.final_norm.register_forward_pre_hook(lambda _, args: record(args[0]))
        with handle:
            yield captured

    def _mixers(self) -> Iterator[nn.Module]:
        layers, outer = set(self.decoder.layers), "-"
        for name, part in self.decoder.layers.named_modules():
            index = getattr(part, "layer_idx", None)
            if index is None or part in layers or name.startswith(outer):
                continue
            outer = f"{name}."  # its submodules are replayed with it
            if self.layer_types[index].is_recurrent:
                yield part


def _record(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    cache = next((value for value in [*args, *kwargs.values()] if isinstance(value, KVCache)), None)
    if cache is not None:
        cache.layers[module.layer_idx].record(module, args, kwargs)
