"""The files that a trained head is written to: alone, as a standalone head, or with its trunk."""

from collections.abc import Mapping
from pathlib import Path

import torch

from nextn.checkpoint.checkpoint import CONFIG
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import GENERIC, trunk_fingerprint
from nextn.checkpoint.safetensors_file import write_json, write_tensors
from nextn.checkpoint.snapshot import folder_of
from nextn.checkpoint.staging_folder import atomic_folder
from nextn.edit.convert import small_config
from nextn.edit.restore import restore
from nextn.errors import ConfigError
from nextn.family_table import LAYOUT_FIELD, MIMO_ARCHITECTURE, REPEATED_FIELD
from nextn.model.head import Head
from nextn.model.layer_types import layer_sizes
from nextn.model.load_head import head_tensors
from nextn.model.shared_kv_head import SharedKVHead

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
    """Write the head under its published names, and `config` beside it, as a base for `restore`.

    `dtype` and `wrapper` are those of `head_tensors`; `metadata` is written to the file's header besides the family.
    """
    tensors = head_tensors(head, copies=False, dtype=dtype, wrapper=wrapper)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path.with_name(CONFIG), config)
    own = {"format": "pt", "family": head.family.name, REPEATED_FIELD: head.family.repeated_kv}
    write_tensors(path, tensors, {**own, **metadata})


def write_standalone_head(
    origin: Inventory,
    head: Head,
    path: Path,
    *,
    dtype: torch.dtype | None,
    source: str,
    trained_length: int | None = None,
) -> None:
    """Write the head, trained by `source` on the trunk of `origin`, into a file as `nextn.edit.convert.extract` does.

    Parameters that every model keeps in fp32 are not written in `dtype`. Raises ConfigError if `path` does not end in
    .safetensors.
    """
    if path.suffix != ".safetensors":
        raise ConfigError(f"{path}: expected a file name that ends in .safetensors")
    wrapper = origin.family.wrapper([*origin.shared.values()])
    config = _draft_config(head) if head.family.layer_model else small_config(origin, head.num_modules)
    if head.family.repeated_kv != "own":
        config |= {REPEATED_FIELD: head.family.repeated_kv}
    if isinstance(head, SharedKVHead):
        wrapper, config = "", dict(head.config)
    elif head.family.separate and not head.family.layer_model:
        config |= {LAYOUT_FIELD: head.family.name}
    if head.family.name == GENERIC and hasattr(head.trunk.config, "layer_types"):  # what transformers' MtpModel needs
        names = [each.name for index in range(head.num_modules) for each in head.layer_types(index)]
        config |= {"mtp_layer_types": names}
    metadata = {
        "source": source, "revision": "", "trained_with": trunk_fingerprint(origin), "trunk": origin.checkpoint.path,
        "trained_length": str(trained_length or ""),
    }  # fmt: skip
    write_head(head, path, config, dtype=dtype, wrapper=wrapper, metadata=metadata)


def write_with_trunk(
    origin: Inventory,
    head: Head,
    folder: Path,
    *,
    dtype: torch.dtype | None,
    source: str,
    trained_length: int | None = None,
) -> None:
    """Write a checkpoint into `folder`: all files of `origin`, with its head replaced by this one, or added.

    Weight files without head tensors are hard-linked; the trunk's tensors stay as stored, including quantized ones.
    The head is written unquantized, as the written configs declare. An old folder is replaced once the new one is
    complete. Raises CheckpointError if it cannot be written.
    """
    with atomic_folder(folder) as new:
        alone = new.with_name("alone") / HEAD_FILE
        write_standalone_head(origin, head, alone, dtype=dtype, source=source, trained_length=trained_length)
        restore(
            folder_of(origin.checkpoint),
            alone,
            out=new,
            family=origin.family.name,
            force=True,
            trained_by=source,
            follow_links=True,  # `load_starting_point` has rejected links that are not allowed
        )


def _draft_config(head: Head) -> dict[str, object]:
    """Return the config.json of a head in a checkpoint of its own, by which engines know it as a separate draft."""
    config, trunk = head.trunk.model.config, head.trunk
    return {
        "architectures": [MIMO_ARCHITECTURE],
        "model_type": head.family.layer_model,
        **layer_sizes(config),
        head.family.count_fields[0]: head.num_modules,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "dtype": str(trunk.dtype).removeprefix("torch."),
    }
