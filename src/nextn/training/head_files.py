"""A trained head as files: beside its trunk's own, which stay as they are bit for bit, or alone."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nextn.checkpoints.checkpoint import CONFIG
from nextn.checkpoints.inventory import Inventory
from nextn.checkpoints.provenance import trunk_fingerprint
from nextn.checkpoints.snapshot import folder_of
from nextn.checkpoints.stages import atomic_folder
from nextn.checkpoints.tensor_file import atomic, write_json
from nextn.errors import ConfigError
from nextn.filling import head_tensors
from nextn.head import Head
from nextn.moving.graft import restore
from nextn.moving.relayout import small_config

HEAD_FILE = "head.safetensors"


def write_head(
    head: Head,
    path: Path,
    config: Mapping[str, object],
    *,
    dtype: torch.dtype | None,
    wrapper: str = "",
    told: Mapping[str, str] = {},
) -> None:
    """Write the head into the file `path` under its published names, and `config` beside it: a base for `restore`.

    dtype, wrapper: as of `filling.head_tensors`. told: what the file's header says beyond the family.
    """
    tensors = head_tensors(head, copies=False, dtype=dtype, wrapper=wrapper)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path.with_name(CONFIG), config)
    write_tensors(path, tensors, {"format": "pt", "family": head.family.name, **told})


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file that is whole or not there."""
    with atomic(path) as file:
        save_file(tensors, file.name, metadata=metadata)


def write_alone(origin: Inventory, head: Head, path: Path, *, dtype: torch.dtype | None, source: str) -> None:
    """Write the head into the file `path`, as `relayout.extract` would.

    origin: the checkpoint of the trunk that it was trained on. dtype: cast to it what is not fp32 in any model. source:
    what trained it. Raises ConfigError for a name that is no .safetensors file's.
    """
    if path.suffix != ".safetensors":
        raise ConfigError(f"{path}: a head is written into a .safetensors file")
    wrapper = origin.family.wrapper([*origin.shared.values()])
    config = small_config(origin, head.num_modules)
    told = {"source": source, "revision": "", "trained_with": trunk_fingerprint(origin)}
    write_head(head, path, config, dtype=dtype, wrapper=wrapper, told=told)


def write_beside_trunk(origin: Inventory, head: Head, folder: Path, *, dtype: torch.dtype | None, source: str) -> None:
    """Write a checkpoint into `folder`: all files of `origin`, its head replaced by this one, or added.

    Weight files that hold nothing of a head are hard-linked; the trunk's tensors stay as stored, quantised ones too.
    The head is written unquantised, and the configs say so. An old folder is replaced once the new one is whole. Raises
    CheckpointError where it cannot be written.
    """
    with atomic_folder(folder) as new:
        alone = new.with_name("alone") / HEAD_FILE
        write_alone(origin, head, alone, dtype=dtype, source=source)
        restore(
            folder_of(origin.checkpoint),
            alone,
            out=new,
            family=origin.family.name,
            force=True,
            trained_by=source,
            follow_links=True,  # `load_start` refused those that nobody asked for
        )
