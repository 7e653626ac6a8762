"""Deferred initialization: parameters whose initial values are computed when they are needed, one at a time.

The code that builds and initializes modules runs as it is, on tensors of the meta device. What it does to them is
recorded, with the state of the random generator before each draw, and is done on real memory later: with the same bits,
in any order. So a process that keeps a part of each parameter never has all of them in memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten
# Operations that do not read the tensor that they write; what was done to it before need not be done.
_OVERWRITING = frozenset(
    {_aten.normal_.default, _aten.uniform_.default, _aten.zero_.default, _aten.copy_.default}
    | {_aten.fill_.Scalar, _aten.fill_.Tensor}
)

# An operation of torch as a dispatch mode sees it: what was called, with which values.
Overload = OpOverload[..., Any]
Arguments = tuple[Any, ...]
Options = dict[str, Any]


class DeferredInit(TorchDispatchMode):
    """A context that records what is done to deferred tensors; other tensors are computed with as usual.

    Operations on deferred tensors outside of it are lost. Of random generators, torch's default one is known.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, _Storage] = {}  # by the address of the meta tensor's storage
        self._is_building = False

    @contextmanager
    def building(self) -> Iterator[None]:
        """Inside, new uninitialized tensors on the CPU are deferred, such as the parameters of a new module."""
        self._is_building = True
        try:
            with self:
                yield
        finally:
            self._is_building = False

    def defer(self, module: nn.Module) -> None:
        """Defer the parameters of a module, with the values that they have now."""
        deferred: dict[nn.Parameter, nn.Parameter] = {}  # a shared parameter once
        for part, name, value in _owners(module):
            if value not in deferred and not value.is_meta:
                meta = torch.empty_like(value, device="meta")
                self._add(meta)
                copy = _Change(_aten.copy_.default, (self._part(meta), value.detach()), {})
                self._storages[_address(meta)].changes = (copy,)
                deferred[value] = nn.Parameter(meta, requires_grad=value.requires_grad)
            setattr(part, name, deferred.get(value, value))

    def __contains__(self, value: object) -> bool:
        return type(value) in (Tensor, nn.Parameter) and _address(cast(Tensor, value)) in self._storages

    def finish(self, module: nn.Module) -> None:
        """Forget all deferred tensors but the parameters of a complete module, and compute its buffers."""
        for part in module.modules():
            for name, value in part.named_buffers(recurse=False):
                if value in self:
                    setattr(part, name, self.compute(value))
        addresses = {_address(value) for value in module.parameters() if value in self}
        self._storages = {address: self._storages[address] for address in addresses}

    @torch.no_grad()
    def compute(self, value: Tensor) -> Tensor:
        """Return the value of a deferred tensor, in memory that nothing else uses."""
        return self._part(value).compute()

    def take(self, value: Tensor) -> Tensor:
        """Return what `compute` does, and forget the deferred tensor."""
        computed = self.compute(value)
        del self._storages[_address(value)]
        return computed

    @contextmanager
    def computed(self, module: nn.Module) -> Iterator[None]:
        """Inside, the deferred parameters of a module have their values."""
        owners = [(part, name, value) for part, name, value in _owners(module) if value in self]
        values = {value: nn.Parameter(self.compute(value), requires_grad=False) for _, _, value in owners}
        try:
            for part, name, value in owners:
                setattr(part, name, values[value])
            yield
        finally:
            for part, name, value in owners:
                setattr(part, name, value)

    def __torch_dispatch__(
        self, func: Overload, types: object, args: Arguments = (), kwargs: Options | None = None
    ) -> object:
        kwargs = kwargs or {}
        if self._is_building and "device" in kwargs:
            kwargs = kwargs | {"device": _intended_device(kwargs["device"])}
            if func is _aten.empty.memory_format and kwargs["device"].type == "cpu":
                return self._add(func(*args, **kwargs | {"device": "meta"}))
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(leaf in self for leaf in operands):
            return func(*args, **kwargs)
        written = [leaf for leaf in _written(func, args, kwargs) if isinstance(leaf, Tensor)]
        if func is _aten._local_scalar_dense.default or any(leaf not in self for leaf in written):
            now = tree_map_only(Tensor, lambda leaf: self.compute(leaf) if leaf in self else leaf, (args, kwargs))
            return func(*now[0], **now[1])
        on_cpu, on_meta = (kwargs | {"device": place} if "device" in kwargs else kwargs for place in ("cpu", "meta"))
        change = self._change(func, args, on_cpu)
        metas = tree_map_only(Tensor, lambda leaf: leaf if leaf.is_meta else leaf.to("meta"), (args, on_meta))
        results = func(*metas[0], **metas[1])
        for index, result in enumerate(tree_leaves(results)):
            if isinstance(result, Tensor) and result not in self:  # neither a view nor an operand
                self._add(result)
                self._storages[_address(result)].changes = (replace(change, created=index),)
        for leaf in written:
            storage = self._storages[_address(leaf)]
            covers = leaf.is_contiguous() and leaf.nbytes == storage.meta.nbytes()
            is_read = sum(_address(each) == _address(leaf) for each in operands if each in self) > 1
            kept = () if covers and func in _OVERWRITING and not is_read else storage.changes
            storage.changes = (*kept, change)
        return results

    def _change(self, func: Overload, args: Arguments, kwargs: Options) -> "_Change":
        """What an operation does; a random one also draws, so that the next draws are those that they would be."""
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            assert kwargs.get("generator") is None, f"{func} with a generator of its own"
            state = torch.get_rng_state()
            scratch = tree_map_only(Tensor, lambda leaf: _scratch(leaf) if leaf in self else leaf, (args, kwargs))
            func(*scratch[0], **scratch[1])
        # Tensors that are not deferred may change before the operation is done.
        args, kwargs = tree_map_only(
            Tensor, lambda leaf: self._part(leaf) if leaf in self else leaf.clone(), (args, kwargs)
        )
        return _Change(func, args, kwargs, state)

    def _add(self, value: Tensor) -> Tensor:
        self._storages[_address(value)] = _Storage(value.untyped_storage())
        return value

    def _part(self, value: Tensor) -> "_Part":
        storage = self._storages[_address(value)]
        offset = int(value.storage_offset())
        return _Part(storage.meta, storage.changes, value.shape, value.stride(), offset, value.dtype)


@dataclass(eq=False)
class _Storage:
    """The memory of deferred tensors that are views of each other."""

    meta: torch.UntypedStorage  # kept, so that its address is not used again
    changes: tuple["_Change", ...] = ()


@dataclass(frozen=True, eq=False)
class _Part:
    """A deferred tensor as it was at some time."""

    meta: torch.UntypedStorage  # not a `_Storage`: in a cycle with it, operands would stay in memory
    changes: tuple["_Change", ...]
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def compute(self) -> Tensor:
        memory = torch.UntypedStorage(self.meta.nbytes())
        for change in self.changes:
            memory = change.apply(self.meta, memory)
        return self.of(memory)

    def of(self, memory: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(memory, self.offset, self.shape, self.stride)


@dataclass(frozen=True, eq=False)
class _Change:
    """An operation on deferred tensors."""

    func: Overload
    args: Arguments
    kwargs: Options
    generator_state: Tensor | None = None  # before a random operation
    created: int | None = None  # which of its results is the changed memory; None: it changes an operand

    def apply(self, meta: torch.UntypedStorage, memory: torch.UntypedStorage) -> torch.UntypedStorage:
        """Run the operation with `memory` in place of `meta`, and return the changed memory."""

        def value(part: _Part) -> Tensor:
            return part.of(memory) if part.meta is meta else part.compute()

        args, kwargs = tree_map_only(_Part, value, (self.args, self.kwargs))
        with torch.random.fork_rng(devices=[], enabled=self.generator_state is not None):
            if self.generator_state is not None:
                torch.set_rng_state(self.generator_state)
            results = self.func(*args, **kwargs)
        return memory if self.created is None else tree_leaves(results)[self.created].untyped_storage()


def _intended_device(device: torch.device | None) -> torch.device:
    """The CPU for tensors that are to be where a deferred one is; the meta device where a context asks for it."""
    if device is None or device.type == "meta":
        return _device.CURRENT_DEVICE or torch.device("cpu")
    return device


def _address(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _owners(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for part in module.modules():
        yield from ((part, name, value) for name, value in [*part.named_parameters(recurse=False)])


def _scratch(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _written(func: Overload, args: Arguments, kwargs: Options) -> Iterator[object]:
    """The operands that an operation changes."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)
