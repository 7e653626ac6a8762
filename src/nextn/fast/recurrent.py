"""What of a recurrent layer is replaced by native ops while a pass is recorded: gated delta rule and convolution.

transformers has no registry for them. But every mixer with this rule calls it, and the convolution, by the same names
in its own module, and these are ours while a pass is recorded, in the thread that records it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from nextn.fast.locks import LOCK
from nextn.fast.tape import Unrecordable, in_use, is_recording

# How many columns a window has at most: the state after each of them is kept, 1 MiB for 16 heads of 128 x 128.
ROOM = 32
_OTHER = "a recurrent layer with another rule than the gated delta rule"


@dataclass(frozen=True)
class StateShape:
    """state: (value heads, key size, value size). channels, kernel: of the convolution."""

    state: tuple[int, int, int]
    channels: int
    kernel: int


class RecordingRecurrentLayer(LinearAttentionLayer):
    """One recurrent layer of a `RecordingCache`. header [3]: addresses of states and histories, and columns.

    Always with a past, if only of zeros: so one column and many go through the same ops. The tensors that it gives
    the mixer stand for what lies in the slabs, and the native ops know the layer by them.
    """

    def __init__(self, header: Tensor) -> None:
        super().__init__()
        self.header, self.past, self.window = header, torch.zeros(1), torch.zeros(1)
        self.record_past = True  # sends windows of one column through update_conv_state, too
        self.conv_states[0] = self.recurrent_states[0] = self.past
        self.has_previous_state[0] = True
        self._ran = False
        self._sizes: tuple[int, int] | None = None
        self._state: tuple[int, int, int] | None = None

    @property
    def shape(self) -> StateShape | None:
        """Known after a recording; None: it left the layer out. Raises Unrecordable where convolution and rule were
        not both native."""
        if not self._ran:
            return None
        if self._sizes is None or self._state is None:
            raise Unrecordable(_OTHER)
        return StateShape(self._state, *self._sizes)

    def begin(self, lengths: Sequence[int], num_columns: int) -> None: ...

    def record(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """A mixer is about to run."""
        if not _has_rule(type(module).__module__):
            raise Unrecordable(_OTHER)

    def update_conv_state(self, conv_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """The window alone: the native op puts it behind the history."""
        self.window, self._ran = conv_states, True
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Nothing to do: the native op wrote it."""
        return recurrent_states

    def convolved(self, window: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """window [B, C, m], weight [C, K] -> [B, C, m]."""
        if activation not in (None, "silu", "swish"):
            raise Unrecordable(f"a convolution with {activation}")
        self._sizes = (weight.shape[0], weight.shape[1])
        batch, channels, width = window.shape
        out = torch.zeros(batch, width, channels, dtype=window.dtype).transpose(1, 2)
        views = [out, window, weight.detach(), *([] if bias is None else [bias.detach()]), self.header[1:2]]
        in_use().native("conv", views, outs=1, ints=[ROOM, int(activation is not None)])
        return out

    def ruled(self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, norm: bool) -> Tensor:
        """query, key [B, m, Hk, Dk], value [B, m, Hv, Dv], g, beta [B, m, Hv] -> [B, m, Hv, Dv]."""
        self._state = (value.shape[2], key.shape[3], value.shape[3])
        out = torch.zeros(value.shape, dtype=query.dtype)
        views = [out, query, key, value, g, beta, self.header[:1]]
        in_use().native("delta", views, outs=1, ints=[ROOM, int(norm)])
        return out


@contextmanager
def native_rule(*modules: nn.Module) -> Iterator[None]:
    """While open, the delta rules of these modules note native ops on the tape in use.

    Threads that record nothing get transformers' own functions. The lock keeps recordings apart, as each puts back
    what it found.
    """
    homes = {type(part).__module__ for module in modules for part in module.modules()}
    places = [sys.modules[home] for home in homes if _has_rule(home)]
    with LOCK:
        old = [(place, name, getattr(place, name)) for place in places for name in _NATIVE]
        try:
            for place, name, function in old:
                setattr(place, name, _while_recording(_NATIVE[name], function))
            yield
        finally:
            for place, name, function in old:
                setattr(place, name, function)


def _while_recording(native: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """The native function in a thread that records, else the plain one."""

    @wraps(plain)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (native if is_recording() else plain)(*args, **kwargs)

    return chosen


def _has_rule(home: str) -> bool:
    return all(hasattr(sys.modules[home], name) for name in _NATIVE)


def _known(tensor: Tensor | None, name: str) -> RecordingRecurrentLayer:
    """The layer whose past or window this is."""
    for layer in in_use().layers:
        if isinstance(layer, RecordingRecurrentLayer) and getattr(layer, name) is tensor:
            return layer
    raise Unrecordable(_OTHER)


def _check(kwargs: dict[str, object]) -> None:
    if strange := sorted(name for name in ("cu_seqlens", "seq_idx") if kwargs.get(name) is not None):
        raise Unrecordable(f"a recurrent layer with {', '.join(strange)}")


def _convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: object,
) -> Tensor:
    _check(kwargs)
    return _known(hidden_states, "window").convolved(hidden_states, weight, bias, activation)


def _rule(
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
    _check(kwargs)
    layer = _known(initial_state, "past")
    return layer.ruled(query, key, value, g, beta, norm=use_qk_l2norm_in_kernel), layer.past


_NATIVE: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _rule,
    "torch_recurrent_gated_delta_rule": _rule,
}
