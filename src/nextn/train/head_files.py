"""Write a trained head to files: alone, or with its trunk's files, which stay bit for bit as they are."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nextn.checkpoint.checkpoint import CONFIG
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import trunk_fingerprint
from nextn.checkpoint.safetensors_file import atomic, write_json
from nextn.checkpoint.separate_head import GENERIC
from nextn.checkpoint.snapshot import folder_of
from nextn.checkpoint.staging_folder import atomic_folder
from nextn.edit.convert import small_config
from nextn.edit.restore import restore
from nextn.errors import ConfigError
from nextn.families import LAYOUT_FIELD
from nextn.model.head import Head, draft_config
from nextn.model.load_head import head_tensors

HEAD_FILE = "head.safetensors"


def write_head(
    head: Head,
    path: Path,
    config: Mapping[str, object],
    *,
    dtype: torch.dtype | None,
    wrapper: str = "",
    metadata: Mapping[str, str] = {},
) -> None:
    """Write the head under its published names, as a base for `restore`.

    Args:
        head: The head.
        path: The .safetensors file.
        config: Written to config.json in the same folder.
        dtype: See `head_tensors`.
        wrapper: See `head_tensors`.
        metadata: Entries of the file's header besides the family.
    """
    tensors = head_tensors(head, copies=False, dtype=dtype, wrapper=wrapper)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path.with_name(CONFIG), config)
    write_tensors(path, tensors, {"format": "pt", "family": head.family.name, **metadata})


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically."""
    with atomic(path) as file:
        save_file(tensors, file.name, metadata=metadata)


def write_standalone_head(origin: Inventory, head: Head, path: Path, *, dtype: torch.dtype | None, source: str) -> None:
    """Write the head into a file, in the format of `nextn.edit.convert.extract`.

    Args:
        origin: The checkpoint of the trunk that the head was trained on.
        head: The head.
        path: The .safetensors file.
        dtype: Cast parameters to it, except those that every model keeps in fp32.
        source: What trained the head, for the record.

    Raises:
        ConfigError: `path` does not end in .safetensors.
    """
    if path.suffix != ".safetensors":
        raise ConfigError(f"{path}: expected a file name that ends in .safetensors")
    wrapper = origin.family.wrapper([*origin.shared.values()])
    config = draft_config(head) if head.family.layer_model else small_config(origin, head.num_modules)
    if head.family.separate and not head.family.layer_model:
        config |= {LAYOUT_FIELD: head.family.name}
    if head.family.name == GENERIC and hasattr(head.trunk.config, "layer_types"):  # what transformers' MtpModel needs
        config |= {
            "mtp_layer_types": [each.name for index in range(head.num_modules) for each in head.layer_types(index)]
        }
    metadata = {
        "source": source, "revision": "", "trained_with": trunk_fingerprint(origin), "trunk": origin.checkpoint.path
    }  # fmt: skip
    write_head(head, path, config, dtype=dtype, wrapper=wrapper, metadata=metadata)


def write_with_trunk(origin: Inventory, head: Head, folder: Path, *, dtype: torch.dtype | None, source: str) -> None:
    """Write a checkpoint into `folder`: all files of `origin`, with its head replaced by this one, or added.

    Weight files without head tensors are hard-linked; the trunk's tensors stay as stored, including quantized ones.
    The head is written unquantized, as the written configs declare. An old folder is replaced once the new one is
    complete. Raises CheckpointError if it cannot be written.
    """
    with atomic_folder(folder) as new:
        alone = new.with_name("alone") / HEAD_FILE
        write_standalone_head(origin, head, alone, dtype=dtype, source=source)
        restore(
            folder_of(origin.checkpoint),
            alone,
            out=new,
            family=origin.family.name,
            force=True,
            trained_by=source,
            follow_links=True,  # `load_starting_point` has rejected links that are not allowed
        )
