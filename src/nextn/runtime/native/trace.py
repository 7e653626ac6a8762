"""The trace of a model's pass: the operations that depend on its inputs, recorded while it runs once.

Everything computed from weights and sizes alone is a constant of the trace. It knows neither models nor kernels.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from nextn.errors import NextnError
from nextn.model.logits import FLOAT_LINEAR

aten = torch.ops.aten
# Operations whose results are numbers or shapes that differ for other inputs.
_DATA_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Untraceable(NextnError):
    """The pass cannot be replayed for other inputs; the message says why."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One recorded operation."""

    func: Any  # an aten overload, or the name of a native op that a hook put in place of model code
    args: tuple[Any, ...]  # as called; for a native op its views, outputs included
    kwargs: dict[str, Any]
    outs: list[Tensor]  # every tensor that it returned or, for a native op, writes
    ints: tuple[int, ...] = ()  # of a native op
    reals: tuple[float, ...] = ()  # of a native op

    @property
    def mutates(self) -> bool:
        return not isinstance(self.func, str) and self.func._schema.is_mutable

    @cached_property
    def inputs(self) -> list[Tensor]:
        return _tensors(self.args, self.kwargs)

    @cached_property
    def in_keys(self) -> frozenset[int]:
        """Storages that it was given."""
        return frozenset(map(storage_key, self.inputs))

    @cached_property
    def out_keys(self) -> frozenset[int]:
        """Storages that it writes."""
        return frozenset(map(storage_key, self.outs))


class Trace(TorchDispatchMode):
    """Records a pass: `with Trace(inputs) as trace: ...`. Raises Untraceable in the middle of the pass."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs, self.entries = list(inputs), list[Entry]()
        self.dynamic = {storage_key(tensor) for tensor in inputs}  # storages that depend on the inputs
        self._created: set[int] = set()
        self._alive: list[Tensor] = []  # keeps storages alive, whose keys could otherwise be reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        depends = any(storage_key(tensor) in self.dynamic for tensor in _tensors(args, kwargs))
        if depends and _is_data_dependent(func, args):
            raise Untraceable(f"{func} depends on the values of its inputs")
        if depends and func._schema.is_mutable and storage_key(args[0]) not in self.dynamic:
            self._make_dynamic(args[0])
        out = self._placeholder(func, args) if depends else None
        out = func(*args, **kwargs) if out is None else out
        outs = _tensors(out)
        self._alive += outs
        self._created |= {storage_key(tensor) for tensor in outs}
        if depends:
            self._append(Entry(func, args, kwargs, outs))
        return out

    def _placeholder(self, func: Any, args: Sequence[Any]) -> Tensor | None:
        """Return zeros instead of a product with a weight, or rows of one. What depends on the inputs has no meaning
        here, only its shape; and a recording that reads no weights takes little time and memory."""
        if func in (aten.mm.default, aten.addmm.default):
            rows, weight = args[-2:]
            shape = (rows.shape[0], weight.shape[1])
        elif func is aten.embedding.default:
            weight, ids = args[:2]
            shape = (*ids.shape, weight.shape[1])
        elif func is FLOAT_LINEAR.default:
            x, weight = args[:2]
            return x.new_zeros((*x.shape[:-1], len(weight)), dtype=torch.float32)
        else:
            return None
        return None if storage_key(weight) in self.dynamic else weight.new_zeros(shape)

    def add_native(
        self, op: str, views: Sequence[Tensor], *, outs: int, ints: Sequence[int] = (), reals: Sequence[float] = ()
    ) -> None:
        """Record a native op that writes its first `outs` views."""
        self._alive += views
        self._append(Entry(op, tuple(views), {}, list(views[:outs]), tuple(ints), tuple(reals)))

    def _append(self, entry: Entry) -> None:
        self.dynamic |= {storage_key(tensor) for tensor in entry.outs}
        self.entries.append(entry)

    def _make_dynamic(self, tensor: Tensor) -> None:
        """Record a copy that restores a constant's current values, because the pass is about to write into it."""
        if storage_key(tensor) not in self._created:
            raise Untraceable("the pass writes into a tensor that belongs to the model")
        storage = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        storage.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,))
        saved = storage.clone()
        self._alive += [storage, saved]
        self._append(Entry(aten.copy_.default, (storage, saved), {}, [storage]))


class TraceRecorder(Trace):
    """A trace that knows the cache layers of the recorded pass."""

    def __init__(self, inputs: Sequence[Tensor], layers: Sequence[object] = ()) -> None:
        super().__init__(inputs)
        self.layers = layers


def is_recording() -> bool:
    """Return whether this thread is recording a pass."""
    return isinstance(_get_current_dispatch_mode(), TraceRecorder)


def current_trace() -> TraceRecorder:
    """Return the trace that this thread is recording. Raises Untraceable if there is none."""
    trace = _get_current_dispatch_mode()
    if not isinstance(trace, TraceRecorder):
        raise Untraceable("no pass is being recorded")
    return trace


def record(run: Callable[[], Iterable[Tensor]], trace: Trace) -> list[Tensor]:
    """Run once under the trace and return the outputs. Raises Untraceable."""
    # In inference mode, composite operations would reach a dispatch mode without being decomposed.
    with torch.inference_mode(False), torch.no_grad(), trace:
        return list(run())


def storage_key(tensor: Tensor) -> int:
    """Return the identity of the tensor's storage, which all its views share."""
    return tensor.untyped_storage()._cdata


def _tensors(*values: object) -> list[Tensor]:
    """The tensors in nested arguments; torch's own pytree walk would take a third of the recording time."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(*value)
        elif value and isinstance(value, dict):
            found += _tensors(*value.values())
    return found


def _is_data_dependent(func: Any, args: tuple[Any, ...]) -> bool:
    if func is aten.index.Tensor:  # tagged because of boolean masks; integer indices give a known shape
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return any(tag in func.tags for tag in _DATA_DEPENDENT)
