"""A device beside the CPU, on machines without one: tensors that say they are there, with values in host memory.

As on a GPU, an operation over tensors of both devices is an error; so a tensor that is made without the model's device
is found where it is used. Unlike on a GPU, so is an index on the host; and as on Apple's, there is no float64.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

aten = torch.ops.aten
NAME = "second"
_LIBRARY = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
# What may move values between devices.
_COPIES = (aten.copy_.default,)
_MOVES = (*_COPIES, aten._to_copy.default, aten.to.device, aten.to.dtype_layout, aten.to.other)


class _Module(_DummyBackendModule):
    """What torch asks of `torch.second`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: object = None) -> None: ...


class There(Tensor):
    """A tensor on the second device. raw: its values, on the host."""

    raw: Tensor

    @staticmethod
    @torch.inference_mode(False)  # else autograd would refuse views of parameters
    def __new__(cls, raw: Tensor, requires_grad: bool | None = None) -> Any:
        if requires_grad is not None:  # accelerate makes a parameter by the class of the one that it replaces
            return Parameter(raw, requires_grad)
        if raw.dtype == torch.float64:
            raise TypeError("the device has no float64")
        made = Tensor._make_wrapper_subclass(
            cls, raw.size(), raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=torch.device(NAME, 0)
        )
        made.raw = raw
        return made

    def __repr__(self, **_: Any) -> str:
        return f"There({self.raw})"

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def tolist(self) -> Any:
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    there = [each for each in leaves if isinstance(each, There)]
    here = [each for each in leaves if isinstance(each, Tensor) and not isinstance(each, There) and each.ndim]
    if there and here and func not in _MOVES:
        shapes = [tuple(each.shape) for each in here]
        raise RuntimeError(f"{func}: expected all tensors on one device, found some on the CPU of shapes {shapes}")
    if func is aten._fused_sdp_choice.default and there:
        return 0  # attention by small operations
    targets = [each.type == NAME for each in leaves if isinstance(each, torch.device)]
    raw_args, raw_kwargs = tree_unflatten([_on_host(each) for each in leaves], spec)
    if func is aten.histc.default and there:  # CPUs count no whole numbers
        raw_args = (raw_args[0].float(), *raw_args[1:])
    out = func(*raw_args, **raw_kwargs)
    to_there = targets[0] if targets else isinstance(args[0], There) if func in _COPIES else bool(there)
    if not to_there:
        # What was already on the host for real comes back as it is on one device, and as a copy from another.
        return out.clone() if there and targets and any(out is each.raw for each in there) else out
    wrapped = tree_map_only(Tensor, There, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if there else wrapped


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value.raw if isinstance(value, There) else value


class _Mode(TorchDispatchMode):
    """Also sees operations without a tensor, such as torch.zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def second_device() -> Iterator[torch.device]:
    """While open, there is a device named `second`. For backward passes it must be open before the process's first one,
    in which torch counts devices."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
        # Without rules of its own autocast leaves all operations alone, so bfloat16 cannot be seen here.
        _LIBRARY.fallback(torch.library.fallthrough_kernel)
    before = torch.__future__.get_swap_module_params_on_conversion()
    # Else moving a module would untie weights that are tied.
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(.., device=second) asks the mode for the move
    try:
        with _Mode():
            yield torch.device(NAME, 0)
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_swap_module_params_on_conversion(before)
