"""The structures that native code is called with, field by field as csrc/layout.cpp lists them."""

import ctypes

import torch
from torch import Tensor

from nextn.errors import ConfigError

_MAX_DIMS = 6
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int64: 2, torch.bool: 3}
_INT, _REAL, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_ARRAY = _INT * _MAX_DIMS
_LETTERS = {_INT: "i", _REAL: "d", _POINTER: "p", _ARRAY: "a"}


def type_of(dtype: torch.dtype) -> int:
    """`Type` of runtime.h; -1 for a dtype that no kernel knows."""
    return _TYPES.get(dtype, -1)


class View(ctypes.Structure):
    """`View` of runtime.h: sizes and strides count elements."""

    _fields_ = (
        ("data", _POINTER),
        ("type", _INT),
        ("ndim", _INT),
        ("size", _ARRAY),
        ("stride", _ARRAY),
    )

    @classmethod
    def of(cls, tensor: Tensor) -> "View | None":
        """None for a dtype or number of dimensions that no kernel knows."""
        if tensor.dtype not in _TYPES or tensor.ndim > _MAX_DIMS:
            return None
        pad = (0,) * (_MAX_DIMS - tensor.ndim)
        sizes = _ARRAY(*tensor.shape, *pad)
        strides = _ARRAY(*tensor.stride(), *pad)
        return cls(tensor.data_ptr(), _TYPES[tensor.dtype], tensor.ndim, sizes, strides)


def _all(kind: type, *names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for name in names)


class ToldStruct(ctypes.Structure):
    """`Told` of chain.h."""

    _fields_ = (("logits", _POINTER), ("type", _INT), *_all(_POINTER, "best", "confidence"))


class WaitingStruct(ctypes.Structure):
    """`Waiting` of chain.h."""

    _fields_ = (*_all(_INT, "rows", "room", "bytes"), *_all(_POINTER, "widths", "starts", "eaten", "states"))


class FeedStruct(ctypes.Structure):
    """`Feed` of chain.h."""

    _fields_ = (("program", _POINTER), ("size", _INT), *_all(_POINTER, "tokens", "starts", "states"))


class ChainStruct(ctypes.Structure):
    """`Chain` of chain.h."""

    _fields_ = (
        *_all(_INT, "rows", "vocab", "depths", "draws"),
        *_all(_REAL, "temperature", "top_p", "min_p"),
        *_all(_INT, "top_k", "bins"),
        *_all(_POINTER, "edges", "table", "take", "go", "limits", "uniforms", "eaten"),
        ("ran", _INT),
        *_all(_POINTER, "drafts", "counts", "asked", "confidences", "laws", "survival", "ended"),
    )


class StepsStruct(ctypes.Structure):
    """`Steps` of chain.h."""

    _fields_ = _all(_POINTER, "feeds", "next", "told", "starts", "states")


class WindowStruct(ctypes.Structure):
    """`Window` of rounds.h."""

    _fields_ = (
        *_all(_POINTER, "passed", "readout", "judge"),
        ("size", _INT),
        *_all(_POINTER, "tokens", "starts", "best", "states"),
        ("columns", _INT),
        *_all(_POINTER, "drafts", "limits", "uniforms", "kept", "next"),
    )


class RowsStruct(ctypes.Structure):
    """`Rows` of rounds.h."""

    _fields_ = (
        ("count", _INT),
        *_all(_POINTER, "last", "lengths", "missing"),
        *_all(_INT, "drafts", "context"),
        ("waiting", _POINTER),
        ("num_ends", _INT),
        ("ends", _POINTER),
        ("numbers", _INT),
        *_all(_POINTER, "used", "uniforms"),
    )


class FoundStruct(ctypes.Structure):
    """`Found` of rounds.h."""

    _fields_ = (
        ("depths", _INT),
        *_all(_POINTER, "drafts", "counts", "kept", "next", "asked", "confidences", "seconds"),
    )


STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    View,
    ToldStruct,
    WaitingStruct,
    FeedStruct,
    ChainStruct,
    StepsStruct,
    WindowStruct,
    RowsStruct,
    FoundStruct,
)


def check_layouts(library: ctypes.CDLL) -> None:
    """Compare the structures with what the compiler made of theirs. Raises ConfigError where one differs."""
    compiled = dict(line.split(": ") for line in library.nextn_layouts().decode().splitlines())
    ours = {each.__name__.removesuffix("Struct"): _layout(each) for each in STRUCTURES}
    for name in sorted(ours.keys() | compiled.keys()):
        if ours.get(name) != compiled.get(name):
            raise ConfigError(
                f"the native runtime has structure {name} as ({compiled.get(name)}), this version of nextn as "
                f"({ours.get(name)}): delete {library._name} so that it is built again, or reinstall nextn"
            )


def _layout(structure: type[ctypes.Structure]) -> str:
    """Size, then offset and letter of each field, as layout.cpp writes them."""
    fields = [f"{name} {getattr(structure, name).offset}{_LETTERS[kind]}" for name, kind, *_ in structure._fields_]
    return ", ".join([str(ctypes.sizeof(structure)), *fields])
