"""What of a transformers model is replaced by native ops while a pass is recorded: attention, the cache, experts.

All through transformers' own registries, so no architecture is named here; recurrent.py has what has no registry.
"""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from nextn.fast.recurrent import RecordingRecurrentLayer
from nextn.fast.tape import Unrecordable, in_use
from nextn.kinds import IDLE, Kind
from nextn.rollback import Cache

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_NAME = "nextn"
_IDLE = IDLE | {"is_causal"}  # the cache knows which columns a query sees


class RecordingLayer:
    """One attention layer of a `RecordingCache`. shape: (kv heads, key size, value size), known after a recording."""

    is_croppable = True
    is_sliding = False

    def __init__(self, kind: Kind, header: Tensor, starts: Tensor) -> None:
        self.kind, self.header, self.starts = kind, header, starts
        self.shape: tuple[int, int, int] | None = None

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """The window's own columns: what the model makes of them is written to the slab by the native op.

        So latents (DeepSeek's) are cached expanded, each column once.
        """
        return keys, values

    def begin(self, lengths: Sequence[int], num_columns: int) -> None: ...


class RecordingCache(Cache):
    """What a pass sees as its cache while it is recorded. headers [layers, 3], starts [B], positions [B, m] int64."""

    def __init__(self, kinds: Sequence[Kind], headers: Tensor, starts: Tensor, positions: Tensor) -> None:
        super().__init__([], len(starts))
        self._positions = positions
        for kind, header in zip(kinds, headers, strict=True):
            if kind.name == "linear_attention" and kind.states == 1:
                self.layers.append(RecordingRecurrentLayer(header))
            elif kind.name in ("full_attention", "sliding_attention"):
                self.layers.append(RecordingLayer(kind, header, starts))
            else:
                several = f" with {kind.states} states" if kind.states > 1 else ""
                raise Unrecordable(f"layers of kind {kind.name}{several} have no native form")

    def positions(self, num_columns: int) -> Tensor:
        return self._positions

    def mask(self, num_columns: int, *, window: int | None = None, always: bool = False) -> Tensor | None:
        """None: the native op knows which columns a query sees."""
        return None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise Unrecordable("the model asks how long the cache is")


def recordable(module: ModuleT, copies: Sequence[tuple[nn.Module, nn.Module]] = ()) -> ModuleT:
    """Copy a module for recording: attention and experts of the copy note native ops on the tape in use.

    The copy shares all parameters, buffers and hooks with the original, which other threads may run meanwhile; its
    configs are its own.

    Args:
        copies: modules that this one refers to, each with its own copy, which the new one refers to.

    Raises:
        Unrecordable: the module cannot be copied.
    """
    shared: dict[int, object] = {id(original): twin for original, twin in copies}
    for part in module.modules():
        shared |= {id(tensor): tensor for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))}
        # Not what hooks belong to; and other threads add some while they run.
        hooks = [known for name, known in vars(part).items() if "_hooks" in name and isinstance(known, dict)]
        shared |= {id(known): known.copy() for known in hooks}
    try:
        twin = copy.deepcopy(module, shared)
    except (TypeError, RuntimeError, copy.Error) as error:
        raise Unrecordable(f"the model cannot be copied to be recorded: {error}") from error
    for config in _configs(twin):
        config._attn_implementation = config._experts_implementation = _NAME
    return twin


def _configs(module: nn.Module) -> list[Any]:
    found: list[Any] = [getattr(part, "config", None) for part in module.modules()]
    return list({id(config): config for config in found if config is not None}.values())


def note(op: str, views: Sequence[Tensor], *, outs: int) -> None:
    """Note a native op on the tape in use."""
    in_use().native(op, views, outs=outs)


def _attend(
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [B, H, m, D] x 3 -> [B, m, H, Dv]."""
    tape = in_use()
    layer = tape.layers[cast(int, module.layer_idx)]
    if not isinstance(layer, RecordingLayer) or key.shape[2] != query.shape[2]:
        raise Unrecordable("attention over something else than the window's columns")
    strange = sorted(name for name, given in kwargs.items() if given is not None and name not in _IDLE)
    if strange:
        raise Unrecordable(f"attention with {', '.join(strange)}")
    out = torch.zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3], dtype=query.dtype)
    layer.shape = (key.shape[1], key.shape[3], value.shape[3])
    views = [out.transpose(1, 2), query, key, value, layer.starts, layer.header]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    views += [] if s_aux is None else [s_aux.detach()]
    tape.native("attend", views, outs=1, ints=[layer.kind.window or 0], reals=[scale, softcap or 0.0])
    return out, None


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts interface: [T, H], [T, k], [T, k] -> [T, H]; after its `batched_mm`, which loads the
    weights of every pair of a token and an expert."""
    if self.is_transposed or self._is_expert_parallel:
        raise Unrecordable("experts that are stored transposed, or spread over processes")
    chosen = top_k_index.shape[-1]
    states = hidden_states[:, None].expand(-1, chosen, -1).reshape(-1, hidden_states.shape[-1])
    ids = top_k_index.reshape(-1)
    name = "gate_up_proj" if self.has_gate else "up_proj"
    inner = _expert_linear(self, name, states, ids)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    out = _expert_linear(self, "down_proj", inner, ids)
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    weighted = out * top_k_weights.reshape(-1, 1)
    return weighted.view(-1, chosen, weighted.shape[-1]).sum(dim=1).to(hidden_states.dtype)


def _expert_linear(module: Any, name: str, states: Tensor, ids: Tensor) -> Tensor:
    weight = getattr(module, name).detach()  # [E, N, K]
    out = torch.zeros(len(states), weight.shape[1], dtype=states.dtype)
    views = [out, states.contiguous(), ids.contiguous(), weight]
    views += [getattr(module, f"{name}_bias").detach()] if module.has_bias else []
    in_use().native("expert_linear", views, outs=1, ints=weight.shape[1:])
    return out


AttentionInterface.register(_NAME, _attend)
ALL_EXPERTS_FUNCTIONS.register(_NAME, _experts)
