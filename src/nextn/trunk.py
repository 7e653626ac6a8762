"""The trunk: the narrow door to transformers' models. Forward, embed, logits, new blocks, caches; nothing of the head.

Everything that reads a model's internals is here and in what it stands on: `loading` makes models, `kinds` says what
their layers keep, `block_config` what a head's blocks are made of. So a new transformers is four files to look at.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from nextn.block_config import block_config, places
from nextn.blocks.idle import cut_idle
from nextn.blocks.residual import ResidualBlock
from nextn.errors import ConfigError, FamilyError
from nextn.families import Stage
from nextn.kinds import Kind, kinds_of, masks_of, new_cache
from nextn.loading import Readable, fresh, loaded
from nextn.rollback import Apart, Cache, causal
from nextn.sampling import Judge, Prediction, Sampling


@dataclass(frozen=True)
class Hidden:
    """normed [B, T, H]: after the final norm, what the output head reads. eaten [B, T, H]: what the MTP head reads."""

    normed: Tensor
    eaten: Tensor


class _Decoder(Protocol):
    """What is asked of transformers' decoders: layers, final norm (under one of two names), initial values, a call."""

    layers: nn.ModuleList
    norm: nn.Module
    norm_f: nn.Module
    hyper_connection_mixer: nn.Module

    def __call__(self, **kwargs: object) -> "_Output": ...
    def _init_weights(self, module: nn.Module) -> None: ...


class _Output(Protocol):
    last_hidden_state: Tensor


class Trunk(nn.Module):
    """A causal language model of transformers, seen through six methods.

    stage: which hidden state the MTP head eats, `post` or `pre` the trunk's final norm, or the `streams` of its last
    layer.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, *, stage: Stage = "post") -> None:
        super().__init__()
        self.model = model
        self.stage = stage
        if not hasattr(model.get_decoder(), "layers"):
            raise FamilyError(
                f"{type(model).__name__} (model_type {model.config.model_type}) has no `layers` in its decoder, "
                "as Llama, Qwen and the families of docs/families.md have; nextn cannot decode with it"
            )
        self.config = model.config.get_text_config(decoder=True)
        self.kinds = kinds_of(self.config)
        _freeze_indexers(model)
        cut_idle(model)
        for module in self._mixers():
            module.register_forward_pre_hook(_record, with_kwargs=True)

    @classmethod
    def from_config(
        cls, config: Mapping[str, object], *, stage: Stage = "post", dtype: torch.dtype = torch.float32
    ) -> "Trunk":
        """A freshly initialised trunk of the given transformers config, a dict with `model_type`."""
        return cls(fresh(config, dtype), stage=stage)

    @classmethod
    def from_pretrained(
        cls,
        folder: Path,
        *,
        state: Mapping[str, Readable] | None = None,
        stage: Stage = "post",
        dtype: torch.dtype | None = None,
    ) -> "Trunk":
        """The trunk of the folder's config; its tensors from state, by stored name, or as transformers reads the files.

        state: plain numbers, whatever the config says of quantisation. dtype None = the config's, else the stored one.
        Raises CheckpointError if a tensor would stay uninitialised, or where transformers cannot load it.
        """
        return cls(loaded(folder, state, dtype), stage=stage)

    @property
    def decoder(self) -> "_Decoder":
        return cast(_Decoder, self.model.get_decoder())

    @property
    def final_norm(self) -> nn.Module:
        """What makes the normed state; in Qwen4, the norm inside what collapses the streams."""
        for name in ("norm", "norm_f"):
            if hasattr(self.decoder, name):
                return cast(nn.Module, getattr(self.decoder, name))
        return cast(nn.Module, self.decoder.hyper_connection_mixer.hc_norm)

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
        """How many tokens there are; embedding and output head may hold rows beyond them, for padding."""
        return getattr(self.config, "unpadded_vocab_size", None) or self.config.vocab_size

    @property
    def max_length(self) -> int | None:
        """Columns that the model was made for, or None where it does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def max_window(self) -> int | None:
        """Columns that a window of its cache can have, or None where there is no limit."""
        return None

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def can_pack(self) -> bool:
        """Whether one row can hold several documents."""
        return all(kind.can_pack for kind in self.kinds)

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """Of the state that the MTP head eats, for one token: (H,), or (S, H) or (S * H,) of S streams."""
        size = self.config.hidden_size
        if self.stage == "streams":
            return (self.config.hc_mult, size) if hasattr(self.config, "hc_mult") else (self.config.hc_count * size,)
        return (size,)

    @property
    def scale(self) -> float:
        """What the normed state is multiplied by before the output head reads it, so that logits come out scaled."""
        return getattr(self.config, "logit_scale", 1.0) / getattr(self.config, "logits_mup_width_multiplier", 1.0)

    def forward(self, tokens: Tensor, cache: Cache | None = None, *, documents: Tensor | None = None) -> Hidden:
        """tokens [B, T], maybe on the host -> Hidden. With a cache, the T columns are a window that the caller closes
        with `cache.keep`.

        documents [B, T] ids: attention and positions stay inside a document (training only, attention trunks only).
        """
        if isinstance(cache, Apart):
            rows = [self(tokens[row : row + 1], each) for row, each in enumerate(cache.rows)]
            return Hidden(torch.cat([row.normed for row in rows]), torch.cat([row.eaten for row in rows]))
        tokens = tokens.to(self.device, non_blocking=True)
        columns = tokens.shape[1]
        if cache is not None:
            if columns == 1 and any(kind.rate for kind in self.kinds) and len(set(cache.lengths)) > 1:
                # DeepSeek-V4 hides no entry from a lone query, so that it would see those of longer rows: never alone.
                tokens = functional.pad(tokens, (0, 1))
            width = tokens.shape[1]
            cache.begin(width)
            positions: Tensor | None = cache.positions(width)
            mask = masks_of(self.kinds, lambda kind: self.mask(kind, width, rows=len(tokens), cache=cache))
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
        normed = out.last_hidden_state[:, :columns]
        return Hidden(normed * self.scale, tap[0][:, :columns] if tap else normed)

    @contextmanager
    def watched(self) -> Iterator[list[Hidden]]:
        """The states of every pass of the trunk that runs inside, whoever calls the model, in order."""
        seen: list[Hidden] = []

        def note(module: nn.Module, args: object, out: Sequence[Tensor]) -> None:
            seen.append(Hidden(out[0] * self.scale, tap.pop() if tap else out[0]))

        with self._tapped() as tap:
            handle = cast(nn.Module, self.decoder).register_forward_hook(note)
            try:
                yield seen
            finally:
                handle.remove()

    def embed(self, tokens: Tensor, *, raw: bool = False) -> Tensor:
        """tokens [B, T] -> [B, T, H]. raw: as stored, without the norm that some trunks have behind their embedding."""
        return functional.embedding(tokens, self.embedding.weight) if raw else self.embedding(tokens)

    def logits(self, normed: Tensor) -> Tensor:
        """normed [..., H] -> [..., V]."""
        return self.output(normed.to(self.output.weight.dtype))[..., : self.vocab_size]  # HY-V4's stays in fp32

    def alone(self) -> AbstractContextManager[None]:
        """To be open while passes run; the fast path wants it."""
        return nullcontext()

    def predict(self, normed: Tensor) -> Prediction:
        """normed [..., H] -> what the trunk predicts."""
        return Prediction(self.logits(normed))

    def read(self, hidden: Hidden) -> Prediction:
        """What the trunk predicts at each column of the pass that gave these states."""
        return self.predict(hidden.normed)

    def prepare(self, rows: int, windows: Sequence[int], *, exact: bool) -> None:
        """Told before a text which numbers of columns its passes will have; exact: each of them often. The fast path
        makes what it needs for them."""

    def judge(self, sampling: Sampling, *, block: bool) -> Judge:
        """What judges the drafts of rounds."""
        return Judge(sampling, block=block)

    def rounds(self, *_: object, **__: object) -> None:
        """Whole rounds as native code runs them, see `FastTrunk.rounds`: there are none here."""

    @property
    def readout(self) -> Tensor:
        """The weight [V, H] that normed states are read with."""
        weight = self.output.weight
        return weight if len(weight) == self.vocab_size else weight[: self.vocab_size]

    def cache(self, batch_size: int) -> Cache:
        """An empty cache for batch_size rows. Raises RollbackError for a layer kind that cannot be put back exactly."""
        return new_cache(self.kinds, batch_size, device=self.device)

    def block(
        self, index: int, count: int, overrides: Mapping[str, object], *, parts: Mapping[str, str] = {}
    ) -> nn.Module:
        """A fresh decoder layer of the trunk's class, for module `index` of `count`; overrides change its config.

        A list in overrides has one entry for each layer of a module: with several, the block is an nn.ModuleList.
        parts: those of such a layer that make a `ResidualBlock`, if that is what the block is.
        """
        config = block_config(self.config, self.kinds, count, overrides)
        layer_class = cast(Callable[..., nn.Module], type(self.decoder.layers[-1]))
        layers = [layer_class(config, place) for place in places(index, overrides)]
        layers = [ResidualBlock(layer, parts) for layer in layers] if parts else layers
        block = layers[0] if len(layers) == 1 else nn.ModuleList(layers)
        self.initialize(block)
        _freeze_indexers(block)
        block.to(self.dtype)
        for name, value in [*block.named_parameters(), *block.named_buffers()]:
            if self.keeps_fp32(name) and value.is_floating_point():
                value.data = value.data.float()
        return block

    def block_kinds(self, index: int, count: int, overrides: Mapping[str, object]) -> list[Kind]:
        """How each layer of that block attends."""
        kinds = kinds_of(block_config(self.config, self.kinds, count, overrides))
        return [kinds[place] for place in places(index, overrides)]

    def has(self, field: str | None) -> bool:
        """Whether the config says yes to this field; to none, always."""
        return field is None or bool(getattr(self.config, field, False))

    def keeps_fp32(self, name: str) -> bool:
        """Whether the model keeps this tensor in fp32 whatever its dtype, such as a router's correction bias."""
        return any(part in name for part in self.model._keep_in_fp32_modules_strict or ())

    def norm(self, size: int | None = None) -> nn.Module:
        """A fresh norm of the trunk's own class. size: of what it norms, if not H."""
        reference = self.final_norm
        eps = getattr(reference, "variance_epsilon", getattr(reference, "eps", None))
        norm: nn.Module = cast(Callable[..., nn.Module], type(reference))(size or self.config.hidden_size, eps=eps)
        self.initialize(norm)
        return norm.to(next(reference.parameters()).dtype)

    def collapse(self) -> nn.Module:
        """What makes one state of streams that lie side by side (Qwen4), fresh, of the trunk's own class."""
        mixer_class = cast(Callable[..., nn.Module], type(self.decoder.hyper_connection_mixer))
        mixer = mixer_class(self.config, use_combine=False)
        self.initialize(mixer)
        return mixer.to(self.dtype)

    @torch.no_grad()
    def initialize(self, module: nn.Module) -> None:
        """Initial values by the trunk's own rule."""
        for part in module.modules():
            self.decoder._init_weights(part)

    def rotary(self, states: Tensor, positions: Tensor, kind: Kind) -> object:
        """Position embeddings for states [B, T, H] at positions [B, T], as layers of this kind want them."""
        rotary = getattr(self.decoder, "rotary_emb", None)
        if rotary is None:
            return None
        if kind.angled:
            count = int(positions[0, 0]) + positions.shape[1]  # rows go apart, so all of them start here
            positions = torch.arange(count, device=self.device).expand(len(positions), -1)
        # Qwen3.5 counts positions in time, height and width; a text token has the same index in all three.
        positions = positions[None] if hasattr(rotary, "mrope_section") else positions
        if "layer_type" not in inspect.signature(rotary.forward).parameters:
            return rotary(states, positions)
        if kind.name in rotary.layer_types:
            return rotary(states, positions, kind.name)
        # DeepSeek-V4 has labels of its own, and its layers choose.
        return {label: rotary(states, positions, label) for label in rotary.layer_types}

    def mask(
        self,
        kind: Kind,
        num_columns: int,
        *,
        rows: int = 1,
        cache: Cache | None = None,
        within: Tensor | None = None,
    ) -> Tensor | None:
        """What a layer of this kind may see: [B, 1, T, columns], or None where causal attention needs no mask.

        cache: the window that is open in it; else T columns from 0, and within [B, 1, T, T] bool limits them further.
        rows: where the layer wants a mask for each. Pools are masked by the layer, which wants to know [rows, T] that
        no column is padding.
        """
        if kind.pool:
            return torch.ones(rows, num_columns, dtype=torch.bool, device=self.device)
        always = kind.is_indexed or self._is_eager
        if cache is not None:
            mask = cache.mask(num_columns, window=kind.window, always=always)
        elif within is None and not always and (kind.window is None or num_columns <= kind.window):
            mask = None
        else:
            mask = causal(torch.arange(num_columns, device=self.device)[None], num_columns, window=kind.window)
            mask = mask if within is None else mask & within
        if kind.angled and mask is not None:
            mask = mask.expand(rows, -1, -1, -1)
        return None if mask is None else self.shown(mask)

    def shown(self, mask: Tensor) -> Tensor:
        """A mask [B, 1, T, columns] bool, True = may be seen, as the layers want it."""
        if not self._is_eager:
            return mask
        # Eager attention adds its mask to the scores.
        return torch.zeros(mask.shape, dtype=self.dtype, device=self.device).masked_fill(
            ~mask, torch.finfo(self.dtype).min
        )

    @property
    def _is_eager(self) -> bool:
        return self.config._attn_implementation == "eager"

    def _packed(self, tokens: Tensor, documents: Tensor | None) -> tuple[Tensor | None, object]:
        # Padding (-1) stands at the right end, where causal attention hides it from every real column.
        if documents is None or bool(((documents == documents[:, :1]) | (documents < 0)).all()):
            return None, None
        if not self.can_pack:
            raise ConfigError("this trunk cannot mask state between packed documents; use one document per row")
        positions, within = packed(documents)
        return positions, masks_of(self.kinds, lambda kind: self.mask(kind, tokens.shape[1], within=within))

    @contextmanager
    def _tapped(self) -> Iterator[list[Tensor]]:
        tap: list[Tensor] = []
        if self.stage == "post":
            yield tap
            return
        thread = threading.get_ident()

        def note(state: Tensor) -> None:
            if threading.get_ident() == thread:  # others may run the same model meanwhile
                tap.append(state)

        if self.stage == "streams":
            handle = self.decoder.layers[-1].register_forward_hook(lambda *call: note(call[-1]))
        else:
            handle = self.final_norm.register_forward_pre_hook(lambda _, args: note(args[0]))
        try:
            yield tap
        finally:
            handle.remove()

    def _mixers(self) -> Iterator[nn.Module]:
        layers, outer = set(self.decoder.layers), "-"
        for name, part in self.decoder.layers.named_modules():
            place = getattr(part, "layer_idx", None)
            if place is None or part in layers or name.startswith(outer):
                continue
            outer = f"{name}."  # what is inside runs again with it
            if self.kinds[place].is_recurrent:
                yield part


def packed(documents: Tensor) -> tuple[Tensor, Tensor]:
    """documents [B, T] -> positions [B, T] counted from each document's start, mask [B, 1, T, T] causal inside it."""
    length = documents.shape[1]
    columns = torch.arange(length, device=documents.device)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    positions = columns - torch.where(starts, columns, 0).cummax(dim=1).values
    same = documents[:, :, None] == documents[:, None, :]
    return positions, (same & (columns[:, None] >= columns))[:, None]


def _freeze_indexers(module: nn.Module) -> None:
    # transformers runs an indexer without gradients: what it picks is no smooth function of its weights.
    for name, value in module.named_parameters():
        if ".indexer." in name:
            value.requires_grad_(False)


def _record(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    cache = next((value for value in [*args, *kwargs.values()] if isinstance(value, Cache)), None)
    if cache is not None:
        cache.layers[module.layer_idx].record(module, args, kwargs)
