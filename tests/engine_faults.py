"""Faults planted in a checkpoint's files, and what the package then says of them. No engine is told what was done."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory

# (the head's tensors by canonical name, those of another seed's head) -> its tensors by file name
Change = Callable[["Files"], dict[str, Tensor]]


@dataclass(frozen=True)
class Files:
    """A checkpoint's tensors. names: canonical name -> tensor name, of the head. other: the head of another run."""

    tensors: dict[str, Tensor]
    names: dict[str, str]
    other: dict[str, Tensor]

    @classmethod
    def of(cls, folder: Path, other: Path | None = None) -> "Files":
        tensors = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
        names = dict(Inventory.of(Checkpoint.open(str(folder))).stored)
        return cls(tensors, names, {} if other is None else cls.of(other).tensors)

    def changed(self, *roles: str, by: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The head's tensors of these roles (`projection`, `norm` for every norm), changed."""
        wanted = [
            name
            for canonical, name in self.names.items()
            if canonical.split(".")[1] in roles or ("norm" in roles and "norm" in canonical)
        ]
        return self.tensors | {name: by(self.tensors[name]).contiguous() for name in wanted}


def _dropped(files: Files) -> dict[str, Tensor]:
    return {name: value for name, value in files.tensors.items() if name not in files.names.values()}


def _renamed(files: Files) -> dict[str, Tensor]:
    reported = {name: "mtp." + name.split(".", 3)[3] for name in files.names.values()}
    return {reported.get(name, name): value for name, value in files.tensors.items()}


def _swapped(files: Files) -> dict[str, Tensor]:
    return files.changed("projection", by=lambda weight: torch.cat(weight.chunk(2, dim=1)[::-1], dim=1))


def _shifted(files: Files) -> dict[str, Tensor]:
    return files.changed("norm", by=lambda norm_weight: norm_weight - 1)


def _stale(files: Files) -> dict[str, Tensor]:
    own = [name for canonical, name in files.names.items() if canonical.split(".")[1] not in ("embedding", "output")]
    return files.tensors | {name: files.other[name] for name in own}


def _quantized(bits: int, files: Files) -> dict[str, Tensor]:
    """Matrices to this many bits, one scale a row, to the nearest."""

    def rounded(value: Tensor) -> Tensor:
        if value.ndim < 2:
            return value
        scale = (value.float().abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp_min(1e-12)
        return ((value.float() / scale).round() * scale).to(value.dtype)

    roles = {canonical.split(".")[1] for canonical in files.names} - {"embedding", "output"}
    return files.changed(*roles, by=rounded)


@dataclass(frozen=True)
class InjectedFault:
    """change: what is done to the files. It is to be named by `audit` with one of these rules, by `measure --probe`
    with these readings, or in these words of the probe's verdict, or by `diagnose` with this cause."""

    name: str
    description: str
    change: Change
    rules: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    words: str = ""
    cause: str = ""


INJECTED = (
    InjectedFault("dropped", "the head's tensors are not in the files", _dropped, rules=("head-absent",)),
    InjectedFault("renamed", "the head's tensors have another family's names", _renamed, rules=("names-unknown",)),
    InjectedFault("swapped", "the inputs of the projection are in the wrong order", _swapped, keys=("concat",)),
    InjectedFault("shifted", "1 is subtracted from the head's norm weights", _shifted, keys=("norm-weight:all:+1",)),
    InjectedFault("stale", "the head is that of a trunk of another seed", _stale, words="of another trunk"),
    InjectedFault("quantized", "the head's matrices are rounded to 4 bits", partial(_quantized, 4), cause="no-fault"),
    InjectedFault("crushed", "the head's matrices are rounded to 2 bits", partial(_quantized, 2), cause="head-2-bit"),
)


def plant(fault: InjectedFault, folder: Path, out: Path, *, other: Path) -> None:
    """Writes the checkpoint with its fault; config and tokenizer stay as they are."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = fault.change(Files.of(folder, other))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
