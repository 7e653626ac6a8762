"""A model's pass, recorded operation by operation as it runs once: what depends on the inputs, and nothing else.

Whatever is computed from weights and sizes alone is a constant of the record. Knows neither models nor kernels.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from nextn.errors import NextnError

aten = torch.ops.aten
# Their results are numbers or shapes that the program of another input would not share.
_DATA_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Unrecordable(NextnError):
    """The pass cannot be replayed for other inputs; the message says why."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One operation. func: an aten overload, or the name of a native op that a hook put in place of model code.

    args and kwargs as they were called; outs: every tensor that came out. For a native op, args are its views, with
    the outs among them, then its ints and reals.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[Tensor]
    ints: tuple[int, ...] = ()
    reals: tuple[float, ...] = ()

    @property
    def mutates(self) -> bool:
        return not isinstance(self.func, str) and self.func._schema.is_mutable

    @property
    def read(self) -> list[Tensor]:
        return _tensors((self.args, self.kwargs))

    @property
    def tensors(self) -> list[Tensor]:
        """All that it reads or writes."""
        return [*self.read, *self.outs]


class Tape(TorchDispatchMode):
    """Use: `with Tape(inputs) as tape: pass`. Raises Unrecordable in the middle of the pass."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs, self.entries = list(inputs), list[Entry]()
        self.dynamic = {key(tensor) for tensor in inputs}
        self._made: set[int] = set()
        self._alive: list[Tensor] = []  # a freed storage's place could be taken by another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = _tensors((args, kwargs))
        depends = any(key(tensor) in self.dynamic for tensor in read)
        if depends and _is_data_dependent(func, args):
            raise Unrecordable(f"{func} depends on the values that it meets")
        if depends and func._schema.is_mutable and key(args[0]) not in self.dynamic:
            self._thaw(args[0])
        out = func(*args, **kwargs)
        outs = _tensors(out)
        self._alive += outs
        self._made |= {key(tensor) for tensor in outs}
        if depends:
            self._note(Entry(func, args, kwargs, outs))
        return out

    def native(
        self, op: str, views: Sequence[Tensor], *, outs: int, ints: Sequence[int] = (), reals: Sequence[float] = ()
    ) -> None:
        """Note a native op, whose first `outs` views it writes."""
        self._alive += views
        self._note(Entry(op, tuple(views), {}, list(views[:outs]), tuple(ints), tuple(reals)))

    def _note(self, entry: Entry) -> None:
        self.dynamic |= {key(tensor) for tensor in entry.outs}
        self.entries.append(entry)

    def _thaw(self, tensor: Tensor) -> None:
        """A constant is about to be written into: its values now are put back at this place in every replay."""
        if key(tensor) not in self._made:
            raise Unrecordable("the pass writes into a tensor that the model keeps")
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        whole.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,))
        saved = whole.clone()
        self._alive += [whole, saved]
        self._note(Entry(aten.copy_.default, (whole, saved), {}, [whole]))


class RecordingTape(Tape):
    """A tape that knows the layers of the cache of the pass that it records."""

    def __init__(self, inputs: Sequence[Tensor], layers: Sequence[object] = ()) -> None:
        super().__init__(inputs)
        self.layers = layers


def is_recording() -> bool:
    """Whether this thread records a pass."""
    return isinstance(_get_current_dispatch_mode(), RecordingTape)


def in_use() -> RecordingTape:
    """The tape of the pass that is being recorded. Raises Unrecordable."""
    tape = _get_current_dispatch_mode()
    if not isinstance(tape, RecordingTape):
        raise Unrecordable("no pass is being recorded")
    return tape


def key(tensor: Tensor) -> int:
    """Tells storages apart: views of one another have the same."""
    return tensor.untyped_storage()._cdata


def _tensors(values: object) -> list[Tensor]:
    """Of nested arguments; torch's own walk of them takes a third of a recording."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


def _is_data_dependent(func: Any, args: tuple[Any, ...]) -> bool:
    if func is aten.index.Tensor:  # tagged for the sake of masks; whole numbers give a shape that is known
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return any(tag in func.tags for tag in _DATA_DEPENDENT)


def recorded(run: Callable[[], Iterable[Tensor]], tape: Tape) -> list[Tensor]:
    """Run once on the tape -> what it returned. Raises Unrecordable."""
    # In inference mode a dispatch mode would meet composite operations that are not taken apart.
    with torch.inference_mode(False), torch.no_grad(), tape:
        return list(run())
