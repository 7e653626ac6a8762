"""The trace of a model's pass: the operations that depend on its inputs, recorded while it runs once.

Everything computed from weights and sizes alone is a constant of the trace. It knows neither models nor kernels.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from nextn.errors import NextnError
from nextn.model.deferred_init import Arguments, Options, Overload
from nextn.model.logits import FLOAT_LINEAR

aten = torch.ops.aten
_VIEWS = (aten._unsafe_view.default,)  # views, though not by their schema
# Operations whose results are numbers or shapes that differ for other inputs.
_DATA_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Untraceable(NextnError):
    """The pass cannot be replayed for other inputs; the message says why."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One recorded operation."""

    func: Overload | str  # an aten overload, or the name of a native op that a hook put in place of model code
    args: Arguments  # as called; for a native op its views, outputs included
    kwargs: Options
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

    def __torch_dispatch__(
        self, func: Overload, types: object, args: Arguments = (), kwargs: Options | None = None
    ) -> object:
        kwargs = kwargs or {}
        depends = any(storage_key(tensor) in self.dynamic for tensor in _tensors(args, kwargs))
        if depends and _is_data_dependent(func, args):
            raise Untraceable(f"{func} depends on the values of its inputs")
        if depends and func._schema.is_mutable and storage_key(args[0]) not in self.dynamic:
            self._make_dynamic(args[0])
        out = self._uncomputed(func, args, kwargs) if depends else func(*args, **kwargs)
        outs = _tensors(out)
        self._alive += outs
        self._created |= {storage_key(tensor) for tensor in outs}
        if depends:
            self._append(Entry(func, args, kwargs, outs))
        return out

    def _uncomputed(self, func: Overload, args: Arguments, kwargs: Options) -> object:
        """Return memory of the results' shapes that nobody writes.

        What depends on the inputs has no meaning here, only its shape. So a recording reads no weights, and memory for
        all intermediates of a large pass is not taken.
        """
        if func.is_view or func in _VIEWS:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            written = func._schema.arguments[0].alias_info
            return args[0] if written is not None and written.is_write else func(*args, **kwargs)
        if func is FLOAT_LINEAR.default:
            return args[0].new_empty((*args[0].shape[:-1], len(args[1])), dtype=torch.float32)
        named = tuple([(name, _signature(value)) for name, value in kwargs.items()])
        return _mapped(_forms_of_results(func, _signature(args), named), _Form.empty)

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
    key: int = tensor.untyped_storage()._cdata
    return key


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


class _Form(NamedTuple):
    """All of a tensor but its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: str = "cpu") -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def zeros(self) -> Tensor:
        return torch.zeros_like(self.empty("meta"), device="cpu")


def _form(tensor: Tensor) -> _Form:
    return _Form(tensor.shape, tensor.stride(), tensor.dtype)


class _Scalar(NamedTuple):
    """An argument that is no tensor; 1, 1.0 and True are different ones, as the results' dtypes are."""

    kind: type
    value: object


def _signature(values: object) -> object:
    """Return nested arguments as a key, which holds all that the forms of the results depend on."""
    if isinstance(values, Tensor):
        return _form(values)
    if isinstance(values, (tuple, list)):
        return tuple([_signature(value) for value in values])
    return _Scalar(type(values), values)


@lru_cache(maxsize=4096)  # the layers of a model repeat each other, and so do its recordings
def _forms_of_results(func: Overload, args: object, kwargs: tuple[tuple[str, object], ...]) -> object:
    """Return what the operation gives for arguments of these signatures, with forms in place of tensors."""

    def result(made: Callable[[_Form], Tensor], **others: object) -> object:
        named = {name: _mapped(value, made) for name, value in kwargs} | others
        return _mapped(func(*_mapped(args, made), **named), _form)

    device = {"device": torch.device("meta")} if any(name == "device" for name, _ in kwargs) else {}
    try:
        return result(lambda form: form.empty("meta"), **device)
    except NotImplementedError:  # it has to be computed; memory that nobody wrote may hold indices that no row has
        return result(_Form.zeros)


def _mapped(values: object, function: Callable[[Any], object]) -> Any:
    """Return nested results, signatures or forms with `function` of each tensor or form, and scalars as they were."""
    if isinstance(values, (Tensor, _Form)):
        return function(values)
    if isinstance(values, _Scalar):
        return values.value
    if isinstance(values, (tuple, list)):
        return [_mapped(value, function) for value in values]
    return values


def _is_data_dependent(func: Overload, args: Arguments) -> bool:
    if func is aten.index.Tensor:  # tagged because of boolean masks; integer indices give a known shape
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return any(tag in func.tags for tag in _DATA_DEPENDENT)
