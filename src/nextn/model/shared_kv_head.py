"""A head whose layers have queries only and read the trunk's keys and values, such as a Gemma 4 assistant.

It has no cache: a chain of drafts stays at one position, where each step attends to what the trunk has stored up to the
pair's hidden state. Layers, sizes and lm_head are its own; only the trunk's embedding and hidden states enter.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from nextn.cache.attention_layer import causal, packed
from nextn.cache.family_caches import TrunkKV
from nextn.cache.kv_cache import KVCache
from nextn.cache.rollout_cache import RolloutCache
from nextn.errors import FamilyError
from nextn.family_table import Family
from nextn.model.head import Head, HeadStep, MTPLayer, check_depths
from nextn.model.head_layers import build_norm, on_meta
from nextn.model.layer_types import LayerType
from nextn.model.logits import logits_of
from nextn.model.streamed_trunk import DeferredTrunk
from nextn.model.transformers_loading import model_of_config
from nextn.model.trunk import Trunk

_Keys = Mapping[LayerType, tuple[Tensor, Tensor]]
_Packing = tuple[Tensor, Tensor]  # positions [B, T] inside documents, and which slots [B, 1, T, S] are of the same one


class QueryLayers(MTPLayer):
    """The projections of a head around its decoder layers, which have queries only."""

    next_projection: nn.Linear
    output: nn.Linear
    centroids: nn.Linear
    token_ordering: Tensor

    def __init__(
        self, family: Family, trunk: Trunk, source: Trunk, types: Sequence[LayerType], num_centroids: int
    ) -> None:
        """Create the layer, which takes the trunk's embeddings and states and reads its keys, with new weights.

        It is made of those of the last layers of `source`, a model of the head's own sizes, that have these types. Only
        the best few of `num_centroids` groups of tokens are drafted from; 0: all tokens are.
        """
        nn.Module.__init__(self)
        outer, inner, vocabulary = trunk.config.hidden_size, source.config.hidden_size, source.vocab_size
        self.family, self.scale, self.layer_types = family, 1.0, list(types)
        self.block, self.final_norm = source.decoder.layers[-len(types) :], build_norm(source)
        sizes = {"projection": (2 * outer, inner), "next_projection": (inner, outer), "output": (inner, vocabulary)}
        sizes |= {"centroids": (inner, num_centroids)} if num_centroids else {}
        for role, (width, rows) in sizes.items():
            setattr(self, role, nn.Linear(width, rows, bias=False, dtype=trunk.dtype))
            source.initialize(getattr(self, role))
        if num_centroids:
            self.register_buffer("token_ordering", torch.arange(vocabulary))

    def project_inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Combine embeddings and hidden states [B, T, H] to the decoder layers' input."""
        parts = [hidden, embedded] if self.family.concat == "hidden_first" else [embedded, hidden]
        states: Tensor = self.projection(torch.cat(parts, dim=-1))
        return states

    def select(self, logits: Tensor, final_hidden: Tensor, num_best: int) -> Tensor:
        """Return the logits [..., V], -inf outside of the groups whose centroids fit best."""
        groups = self.token_ordering.view(self.centroids.out_features, -1)
        best = self.centroids(final_hidden).topk(num_best, dim=-1).indices
        kept = groups[best].flatten(-2)
        return torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))


class SharedKVHead(Head):
    """A head that reads the keys and values of the trunk's last layers that store any, per type of layer."""

    def __init__(self, family: Family, trunk: Trunk, config: Mapping[str, object]) -> None:
        """Create the head with new weights; raise FamilyError if config, keys, states or tokens do not fit."""
        if isinstance(trunk, DeferredTrunk):
            raise FamilyError(
                f"{family.title} read the trunk's keys, which a trunk that is loaded layer by layer does not keep; "
                "load the whole model (--no-stream), in one process"
            )
        nn.Module.__init__(self)
        self.family, self.draft_vocabulary, self.exact = family, None, False
        self._trunk, self.config = (trunk,), config
        with _config_errors(family):
            own = AutoConfig.for_model(**copy.deepcopy({**config}))
            text = own.text_config
            _check_values(own)
            _check_fit(own, trunk)
            windows = {"sliding_attention": text.sliding_window}
            types = [LayerType(name, windows.get(name)) for name in text.layer_types]
            self._source = (_source(text, trunk),)
            num_centroids = own.num_centroids if own.use_ordered_embeddings else 0
            self.stack = nn.ModuleList([QueryLayers(family, trunk, self._source[0], types, num_centroids)])
        self.num_best = own.centroid_intermediate_top_k
        # Per type of the head's layers, the trunk's layer whose keys and values they read.
        self.read_layers = {each: storing_layers(trunk, each.name)[-1] for each in dict.fromkeys(types)}
        self.windows = {each: each.window for each in self.read_layers}

    @property
    def can_rollout(self) -> bool:
        return True

    def cache(self, batch_size: int, trunk_cache: KVCache | None = None) -> KVCache:
        """Return a view of the trunk's cache; None: one that is only measured."""
        return TrunkKV(trunk_cache, batch_size)

    def step(
        self,
        index: int,
        tokens: Tensor,
        hidden: Tensor,
        *,
        cache: KVCache | None = None,
        within: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> HeadStep:
        """Run the head over pairs of tokens [B, T] and states [B, T, H], each at its own position; see `Head.step`.

        cache: A view of the trunk's, which has stored the positions.
        """
        keys = cast(TrunkKV, cache)  # or what records it
        tokens = tokens.to(hidden.device, non_blocking=True)
        length, end = tokens.shape[1], max(keys.lengths) + tokens.shape[1]
        keys.begin(length)
        return self._read(tokens, hidden, keys.positions(length), self._keys(keys, end))

    def refresh(self, index: int, tokens: Tensor, hidden: Tensor, *, cache: KVCache) -> None:
        """Count the positions: there is nothing to store."""
        cache.begin(tokens.shape[1])

    def repeat(self, index: int, tokens: Tensor, hidden: Tensor, *, cache: KVCache) -> HeadStep:
        """Run the head once more at the position where it just was."""
        cache.rollback_to([length - 1 for length in cache.lengths])
        return self.step(index, tokens, hidden, cache=cache)

    def _read(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, keys: _Keys, packing: _Packing | None = None
    ) -> HeadStep:
        """positions: [B, T], of the hidden states; keys: per type of layer, keys and values of all positions so far."""
        layers = cast(QueryLayers, self.stack[0])
        embedded = self._embed(tokens).to(layers.dtype)
        states = layers.project_inputs(embedded, hidden.to(embedded.dtype))
        queries = (positions if packing is None else packing[0]) + int(self.family.trunk_kv == "token")
        rotary, masks = {}, {}
        for layer_type, (key, _) in keys.items():
            rotary[layer_type] = self._source[0].rotary(states, queries, layer_type)
            visible = causal(positions, key.shape[2], window=self.visible_window(layer_type))
            visible = visible if packing is None else visible & packing[1]
            masks[layer_type] = self.trunk.to_attention_mask(visible)
        for layer_type, layer in zip(layers.layer_types, layers.layers, strict=True):
            states = layer(
                states,
                shared_kv_states={layer_type.name: keys[layer_type]},
                position_embeddings=rotary[layer_type],
                attention_mask=masks[layer_type],
                position_ids=queries,
            )
        final_hidden = layers.final_norm(states)
        return HeadStep(final_hidden, layers.next_projection(final_hidden))

    def visible_window(self, layer_type: LayerType) -> int | None:
        """Return how many positions layers of this type see up to that of the pair's hidden state; None: all.

        transformers lets a query at its token's position see one key more: as many before the hidden state's.
        """
        window = self.windows[layer_type]
        return window and window + int(self.family.trunk_kv == "token")

    def earlier_layer(self, layer_type: LayerType) -> int | None:
        """Return the trunk's layer of this type before the one that is read; None if that is the first."""
        return next(iter(storing_layers(self.trunk, layer_type.name)[-2:-1]), None)

    def _keys(self, cache: TrunkKV, num_positions: int) -> _Keys:
        dtype = cast(QueryLayers, self.stack[0]).dtype  # a head may train in fp32 on a trunk in bf16
        states = {each: cache.keys_and_values(layer, num_positions) for each, layer in self.read_layers.items()}
        return {each: (keys.to(dtype), values.to(dtype)) for each, (keys, values) in states.items()}

    def draft_logits(self, index: int, final_hidden: Tensor) -> Tensor:
        layers = cast(QueryLayers, self.stack[index])
        if self.draft_vocabulary is not None or "output" not in self.family.own:
            return super().draft_logits(index, final_hidden)
        logits = logits_of(layers.output, final_hidden)
        return logits if not hasattr(layers, "centroids") else layers.select(logits, final_hidden, self.num_best)

    def _hidden_by_depth(
        self, tokens: Tensor, hidden: Tensor, depths: int, documents: Tensor | None, rollout: RolloutCache | None
    ) -> list[Tensor]:
        """A chain attends to the same keys in training and in decoding, so there is one answer. The trunk's keys are
        computed again from the tokens."""
        check_depths(depths, tokens.shape[1])
        cache = self.trunk.cache(len(tokens))
        with torch.no_grad():
            self.trunk(tokens, cache, documents=documents)
        keys = self._keys(TrunkKV(cache, len(tokens)), tokens.shape[1])
        positions, outs = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), []
        packing = None if documents is None else packed(documents)
        for depth in range(1, depths + 1):
            num = tokens.shape[1] - depth
            part = packing and (packing[0][:, :num], packing[1][:, :, :num])
            step = self._read(tokens[:, depth:], hidden[:, :num], positions[:, :num], keys, part)
            outs.append(step.final_hidden)
            hidden = step.next_hidden
        return outs


def storing_layers(trunk: Trunk, name: str) -> list[int]:
    """Return the indices of the trunk's layers of this type that store keys and values."""
    return [index for index, layer_type in enumerate(trunk.layer_types) if layer_type.name == name]


@contextmanager
def _config_errors(family: Family) -> Iterator[None]:
    """Turn what transformers and torch raise for a config into FamilyError."""
    try:
        yield
    except FamilyError:
        raise
    except Exception as error:  # an untrusted config
        reason = " ".join(str(error).split())[:300]
        raise FamilyError(f"the config.json is not one of {family.title}: {type(error).__name__}: {reason}") from error


def _check_values(own: PreTrainedConfig) -> None:
    """Raise ValueError for values of transformers' config that no such head can have."""
    text, vocabulary = own.text_config, own.text_config.vocab_size
    if text.num_hidden_layers != len(text.layer_types):
        raise ValueError(f"{len(text.layer_types)} layer_types; expected num_hidden_layers, {text.num_hidden_layers}")
    if "sliding_attention" in text.layer_types and text.sliding_window < 1:
        raise ValueError(f"sliding_window is {text.sliding_window}; expected at least 1")
    if own.use_ordered_embeddings:
        groups, best = own.num_centroids, own.centroid_intermediate_top_k
        if groups < 1 or vocabulary % groups:
            raise ValueError(f"num_centroids is {groups}; expected groups of one size of the {vocabulary} tokens")
        if not 1 <= best <= groups:
            raise ValueError(f"centroid_intermediate_top_k is {best}; expected 1 to num_centroids, {groups}")


def _check_fit(own: PreTrainedConfig, trunk: Trunk) -> None:
    """Raise FamilyError listing what of the trunk does not fit the head's config."""
    text, config = own.text_config, trunk.config
    facts = [("backbone_hidden_size", own.backbone_hidden_size, config.hidden_size, "hidden_size")]
    facts.append(("vocab_size", text.vocab_size, trunk.vocab_size, "vocab_size"))
    problems = []
    for name in dict.fromkeys(text.layer_types):
        if not (read := storing_layers(trunk, name)):
            problems.append(f"its {name} layers read keys of the trunk's, which has none of this type that stores any")
            continue
        expected, found = text.per_layer_config[text.layer_types.index(name)], config.per_layer_config[read[-1]]
        for size in ("num_key_value_heads", "head_dim"):
            facts.append((f"{size} of {name}", getattr(expected, size), getattr(found, size, None), size))
    differing = (fact for fact in facts if fact[1] != fact[2])
    problems += [f"{name} is {expected}, the trunk's {other} {found}" for name, expected, found, other in differing]
    if problems:
        message = f"the head does not fit this trunk: {'; '.join(problems)}; give the trunk that it was made for"
        raise FamilyError(message)


def _source(text: PreTrainedConfig, trunk: Trunk) -> Trunk:
    """Return a model on the meta device whose last layers are the head's. Layers before them count as those whose keys
    they read, without which transformers builds no layers with queries only."""
    config, names = copy.deepcopy(text), list(text.layer_types)
    own = {} if text._heterogeneity_spec is None else text._heterogeneity_spec.per_layer_overrides
    options = {name: own.get(index, {}) for index, name in enumerate(names)}
    config.per_layer_config = None
    config.layer_types = [*dict.fromkeys(names), *names]
    config.num_hidden_layers, config.num_kv_shared_layers = len(config.layer_types), len(names)
    config.per_layer_config = {index: options[name] for index, name in enumerate(config.layer_types)}
    return on_meta(lambda: Trunk(model_of_config(config, trunk.dtype)), like=trunk)
