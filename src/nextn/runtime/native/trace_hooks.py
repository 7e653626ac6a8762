"""Hooks that replace model code by native ops while a pass is recorded: attention, experts, cache, linear attention.

Attention and experts use transformers' own registries, so no architecture is named here. The gated delta rule and its
causal convolution have no registry; but every mixer calls them by the same names in its own module, and these names are
replaced while a pass is recorded, for the recording thread.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.cache_utils import LinearAttentionLayer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from nextn.cache.kv_cache import KVCache
from nextn.model.layer_types import IGNORABLE_ARGUMENTS, LayerType
from nextn.model.packed_experts import packed_parts
from nextn.runtime.native import LOCK
from nextn.runtime.native.trace import Untraceable, current_trace, is_recording

ModuleT = TypeVar("ModuleT", bound=nn.Module)
# Largest block over a recurrent layer: what each position changes in the state is kept until the block is committed.
MAX_RECURRENT_BLOCK = 32
_NAME = "nextn"  # in transformers' registries
_IGNORED = IGNORABLE_ARGUMENTS | {"is_causal"}  # arguments without effect: the native op applies the mask itself
Shape = tuple[int, int, int]  # of an attention layer: kv heads, key size, value size
_OTHER_RULE = "a recurrent layer whose update is not the gated delta rule"


class RecordingLayer:
    """One attention layer of a `RecordingCache`."""

    is_croppable = True
    is_sliding = False

    def __init__(self, layer_type: LayerType, header: Tensor, starts: Tensor, *, int8: bool = False) -> None:
        self.layer_type, self.header, self.starts, self.int8 = layer_type, header, starts, int8
        self.shape: Shape | None = None  # set by a recording
        self.keys: Tensor | None = None  # that it handed out, by which the hook recognizes the layer
        self.is_stored = False  # whether the buffers hold these keys and their values

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Return the block's own keys and values, which the native op writes to the KV buffers.

        Latents (DeepSeek's MLA) are therefore cached expanded, each position once.
        """
        self.keys = keys
        return keys, values

    def read(self, num_positions: int, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return placeholders [B, kv heads, m, size] for the keys and values that are stored."""
        heads, *sizes = shape
        self.keys, values = (torch.zeros(len(self.starts), heads, num_positions, size, dtype=dtype) for size in sizes)
        self.is_stored = True
        return self.keys, values

    def begin(self, lengths: Sequence[int], num_positions: int) -> None: ...


@dataclass(frozen=True)
class StateShape:
    """Sizes of a recurrent layer's state."""

    state: tuple[int, int, int]  # value heads, key size, value size
    channels: int  # of the convolution
    kernel: int  # width of the convolution


class RecordingRecurrentLayer(LinearAttentionLayer):
    """One recurrent layer of a `RecordingCache`. header [3]: addresses of states and histories, and capacity.

    It always has a previous state, if only zeros, so that a block of one position and one of many take the same path
    through the mixer. The tensors that it hands out are placeholders, by which the hooks recognize the layer.
    """

    def __init__(self, header: Tensor) -> None:
        super().__init__()
        self.header, self.past, self.conv_input = header, torch.zeros(1), torch.zeros(1)
        self.record_past = True  # makes blocks of one position call update_conv_state, too
        self.conv_states[0] = self.recurrent_states[0] = self.past
        self.has_previous_state[0] = True
        self._ran = False
        self._conv_sizes: tuple[int, int] | None = None
        self._state_sizes: tuple[int, int, int] | None = None

    @property
    def shape(self) -> StateShape | None:
        """The sizes, known after a recording; None if the recorded pass skipped the layer.

        Raises Untraceable unless both the convolution and the rule were replaced.
        """
        if not self._ran:
            return None
        if self._conv_sizes is None or self._state_sizes is None:
            raise Untraceable(_OTHER_RULE)
        return StateShape(self._state_sizes, *self._conv_sizes)

    def begin(self, lengths: Sequence[int], num_positions: int) -> None: ...

    def record(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Check a mixer that is about to run."""
        if not _has_delta_rule(type(module).__module__):
            raise Untraceable(_OTHER_RULE)

    def update_conv_state(self, conv_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the block alone; the native op puts the history before it."""
        self.conv_input, self._ran = conv_states, True
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Do nothing; the native op writes the state."""
        return recurrent_states

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """Record the convolution of x [B, C, m] with weight [C, K] -> [B, C, m]."""
        if activation not in (None, "silu", "swish"):
            raise Untraceable(f"a convolution with activation {activation}; only silu has a native form")
        self._conv_sizes = (weight.shape[0], weight.shape[1])
        batch, channels, width = x.shape
        out = torch.zeros(batch, width, channels, dtype=x.dtype).transpose(1, 2)
        views = [out, x, weight.detach(), *([] if bias is None else [bias.detach()]), self.header[1:2]]
        ints = [MAX_RECURRENT_BLOCK, int(activation is not None)]
        current_trace().add_native("causal_conv", views, outs=1, ints=ints)
        return out

    def apply_rule(self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, norm: bool) -> Tensor:
        """Record the rule: query, key [B, m, Hk, Dk], value [B, m, Hv, Dv], g, beta [B, m, Hv] -> [B, m, Hv, Dv]."""
        self._state_sizes = (value.shape[2], key.shape[3], value.shape[3])
        out = torch.zeros(value.shape, dtype=query.dtype)
        views = [out, query, key, value, g, beta, self.header[:1]]
        current_trace().add_native("gated_delta_rule", views, outs=1, ints=[MAX_RECURRENT_BLOCK, int(norm)])
        return out


class RecordingCache(KVCache):
    """The cache of a pass that is being recorded. headers [layers, 3], starts [B], positions [B, m] int64.

    `int8`: attention layers store keys and values in eight bits.
    """

    def __init__(
        self,
        layer_types: Sequence[LayerType],
        headers: Tensor,
        starts: Tensor,
        positions: Tensor,
        *,
        int8: bool = False,
    ) -> None:
        super().__init__([], len(starts))
        self._positions = positions
        for layer_type, header in zip(layer_types, headers, strict=True):
            if layer_type.name == "linear_attention" and layer_type.num_states == 1:
                self.layers.append(RecordingRecurrentLayer(header))
            elif layer_type.name in ("full_attention", "sliding_attention", "dummy"):  # "dummy" stores nothing
                self.layers.append(RecordingLayer(layer_type, header, starts, int8=int8))
            else:
                states = f" with {layer_type.num_states} states" if layer_type.num_states > 1 else ""
                raise Untraceable(f"layers of type {layer_type.name}{states} have no native form")

    def positions(self, num_positions: int) -> Tensor:
        return self._positions

    def mask(self, num_positions: int, *, window: int | None = None, always: bool = False) -> Tensor | None:
        """Return None: the native op applies the mask itself."""
        return None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise Untraceable("the model reads the length of the cache")


class RecordingTrunkKV(RecordingCache):
    """The trunk's cache in a recorded pass of a head that reads it. shapes: of the layers that it reads, by index."""

    def __init__(
        self, shapes: Mapping[int, Shape], dtype: torch.dtype, types: Sequence[LayerType], *args: Tensor, int8: bool
    ) -> None:
        super().__init__(types, *args, int8=int8)
        pairs: Iterable[tuple[RecordingLayer, Shape]] = zip(self.layers, shapes.values(), strict=True)
        self._by_index = dict(zip(shapes, pairs, strict=True))
        self._dtype = dtype

    def keys_and_values(self, layer: int, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return what `TrunkKV.keys_and_values` returns."""
        stored, shape = self._by_index[layer]
        return stored.read(num_positions, shape, self._dtype)


def copy_for_recording(module: ModuleT, copies: Sequence[tuple[nn.Module, nn.Module]] = ()) -> ModuleT:
    """Copy a module so that attention and experts of the copy record native ops.

    The copy shares all parameters, buffers and hooks with the original, which other threads may run meanwhile; its
    configs are its own. Modules that it refers to are replaced by their `copies`. Raises Untraceable if it cannot be
    copied.
    """
    memo: dict[int, object] = {id(original): twin for original, twin in copies}
    for part in module.modules():
        memo |= {id(tensor): tensor for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))}
        # Hooks are copied shallowly: not the objects that they belong to. Other threads add hooks while they run.
        hooks = [value for name, value in vars(part).items() if "_hooks" in name and isinstance(value, dict)]
        memo |= {id(value): value.copy() for value in hooks}
    try:
        twin = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, copy.Error) as error:
        raise Untraceable(f"the model cannot be copied for recording: {error}") from error
    for part in packed_parts(twin):
        part.is_recorded = True
    for config in _configs(twin):
        config._attn_implementation = config._experts_implementation = _NAME
    return twin


def _configs(module: nn.Module) -> list[PreTrainedConfig]:
    configs = [getattr(part, "config", None) for part in module.modules()]
    return list({id(config): config for config in configs if isinstance(config, PreTrainedConfig)}.values())


@contextmanager
def record_delta_rules(*modules: nn.Module) -> Iterator[None]:
    """While open, the gated delta rules of these modules record native ops in the current trace.

    Threads that record nothing still get transformers' own functions. The lock separates recordings, as each restores
    the functions that it replaced.
    """
    names = {type(part).__module__ for module in modules for part in module.modules()}
    homes = [sys.modules[name] for name in names if _has_delta_rule(name)]
    with LOCK:
        originals = [(home, name, getattr(home, name)) for home in homes for name in _REPLACEMENTS]
        try:
            for home, name, original in originals:
                setattr(home, name, _while_recording(_REPLACEMENTS[name], original))
            yield
        finally:
            for home, name, original in originals:
                setattr(home, name, original)


def _while_recording(replacement: Callable[..., object], original: Callable[..., object]) -> Callable[..., object]:
    """Call the replacement in a thread that records, else the original."""

    @wraps(original)
    def dispatch(*args: object, **kwargs: object) -> object:
        return (replacement if is_recording() else original)(*args, **kwargs)

    return dispatch


def _has_delta_rule(module_name: str) -> bool:
    return all(hasattr(sys.modules[module_name], name) for name in _REPLACEMENTS)


def _layer_of(placeholder: Tensor | None, attribute: str) -> RecordingRecurrentLayer:
    """The layer that handed out this tensor as `past` or `conv_input`."""
    for layer in current_trace().layers:
        if isinstance(layer, RecordingRecurrentLayer) and getattr(layer, attribute) is placeholder:
            return layer
    raise Untraceable(_OTHER_RULE)


def _refuse_packing(kwargs: dict[str, object]) -> None:
    if unsupported := sorted(name for name in ("cu_seqlens", "seq_idx") if kwargs.get(name) is not None):
        raise Untraceable(f"a recurrent layer with {', '.join(unsupported)}")


def _causal_conv(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: object
) -> Tensor:
    _refuse_packing(kwargs)
    return _layer_of(hidden_states, "conv_input").convolve(hidden_states, weight, bias, activation)


def _gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    _refuse_packing(kwargs)
    layer = _layer_of(initial_state, "past")
    return layer.apply_rule(query, key, value, g, beta, norm=use_qk_l2norm_in_kernel), layer.past


_REPLACEMENTS: dict[str, Callable[..., object]] = {
    "causal_conv1d_fn": _causal_conv,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "torch_recurrent_gated_delta_rule": _gated_delta_rule,
}


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [B, H, m, D] x 3 -> [B, m, H, Dv]."""
    trace = current_trace()
    layer = _layer_with(key, trace.layers, cast(int, module.layer_idx))
    if not isinstance(layer, RecordingLayer) or key.shape[2] != query.shape[2]:
        raise Untraceable("attention over other positions than the block's own")
    unsupported = sorted(name for name, value in kwargs.items() if value is not None and name not in _IGNORED)
    if unsupported:
        raise Untraceable(f"attention with {', '.join(unsupported)}")
    if layer.int8 and (key.shape[3] % 4 or value.shape[3] % 4):
        raise Untraceable(f"an int8 KV cache of heads of size {key.shape[3]} and {value.shape[3]}, not multiples of 4")
    out = torch.zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3], dtype=query.dtype)
    layer.shape = (key.shape[1], key.shape[3], value.shape[3])
    views = [out.transpose(1, 2), query, key, value, layer.starts, layer.header]
    views += [] if s_aux is None else [s_aux.detach()]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    ints, reals = [int(layer.int8), layer.layer_type.window or 0], [scale, softcap or 0.0]
    trace.add_native("attend_stored" if layer.is_stored else "attention", views, outs=1, ints=ints, reals=reals)
    layer.is_stored = True
    return out, None


def _layer_with(key: Tensor, layers: Sequence[object], index: int) -> object:
    """Return the layer that handed out these keys: another one's, where layers share them; else that at the index,
    as some models expand what they get."""
    found = next((each for each in layers if isinstance(each, RecordingLayer) and each.keys is key), None)
    own = layers[index] if index < len(layers) else None
    is_without_keys = isinstance(own, RecordingLayer) and own.layer_type.name == "dummy"
    return found if found is not None or is_without_keys else own


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts interface: [T, H], [T, k], [T, k] -> [T, H]. Follows its `batched_mm`, which loads the
    weights of every pair of a token and an expert."""
    if self.is_transposed or self._is_expert_parallel:
        raise Untraceable("experts that are stored transposed, or distributed over processes")
    num_chosen = top_k_index.shape[-1]
    states = hidden_states[:, None].expand(-1, num_chosen, -1).reshape(-1, hidden_states.shape[-1])
    ids = top_k_index.reshape(-1)
    name = "gate_up_proj" if self.has_gate else "up_proj"
    inner = _expert_linear(self, name, states, ids)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    out = _expert_linear(self, "down_proj", inner, ids)
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    weighted = out * top_k_weights.reshape(-1, 1)
    return weighted.view(-1, num_chosen, weighted.shape[-1]).sum(dim=1).to(hidden_states.dtype)


def _expert_linear(module: nn.Module, name: str, states: Tensor, ids: Tensor) -> Tensor:
    weight = getattr(module, name).detach()  # [E, N, K]
    out = torch.zeros(len(states), weight.shape[1], dtype=states.dtype)
    views = [out, states.contiguous(), ids.contiguous(), weight]
    views += [getattr(module, f"{name}_bias").detach()] if module.has_bias else []
    current_trace().add_native("expert_linear", views, outs=1, ints=weight.shape[1:])
    return out


AttentionInterface.register(_NAME, _attention)
ALL_EXPERTS_FUNCTIONS.register(_NAME, _experts)
