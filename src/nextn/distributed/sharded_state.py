"""Checkpoints of sharded tensors: each process writes what it holds; any number of processes reads it back.

The files are safetensors, written and cut anew by torch.distributed.checkpoint (`hf_storage`), where a piece's place in
its tensor stands in the file's own metadata. DCP's usual format keeps that in a pickle, and is not used.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from nextn.checkpoints.tensor_file import read_header, write_json
from nextn.distributed.parallel import Ranks
from nextn.errors import CheckpointError

_INDEX, _SHARDS = "shards.json", "shards"


def write_shards(
    folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks, *, owner: str, finish: Callable[[Path], None]
) -> None:
    """Write `folder`, whole or not at all; all processes call it with the same names.

    owner: what `read_shards` must be given, too. finish(folder): called by the first process when the tensors are on
    disk, before the folder gets its name. Raises CheckpointError, on all processes, where it cannot be written.
    """
    staging, old = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "old"))
    if ranks.is_first:
        shutil.rmtree(staging, ignore_errors=True)
        (staging / _SHARDS).mkdir(parents=True)
    ranks.wait()
    writer = HuggingFaceStorageWriter(str(staging / _SHARDS), save_distributed=True)
    try:
        save(_sized(tensors), storage_writer=writer, no_dist=ranks.is_alone)
    except CheckpointException as error:
        raise CheckpointError(f"{folder}: cannot be written: {_first(error)}; nothing has its name") from error
    if ranks.is_first:
        write_json(staging / _INDEX, {"owner": owner, "files": _sizes(staging)})
        finish(staging)
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        staging.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    ranks.wait()


def is_sharded(folder: Path) -> bool:
    return (folder / _SHARDS).is_dir()


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted((folder / _SHARDS).iterdir())}


def stored_names(folder: Path) -> set[str]:
    """Names of the tensors in the folder. Raises CheckpointError for a file that is damaged."""
    return {name for file in sorted((folder / _SHARDS).iterdir()) for name in read_header(file).tensors}


def read_shards(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks, *, owner: str) -> None:
    """Fill `tensors` in place; they may be cut into other pieces than those that were written.

    Raises CheckpointError, on all processes, for tensors that are missing, of another shape, damaged or of another
    owner.
    """
    index = json.loads((folder / _INDEX).read_text())
    # A file that is gone would leave holes that nothing else tells.
    if index["files"] != _sizes(folder):
        raise CheckpointError(
            f"{folder}: its files are not those that were written: expected {index['files']} (bytes), found "
            f"{_sizes(folder)}. Fetch them again, or remove the folder to resume from the one before"
        )
    if index["owner"] != owner:
        raise CheckpointError(f"{folder}: trained on another trunk; give the same --from, or start in another folder")
    reader = HuggingFaceStorageReader(str(folder / _SHARDS))
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # it warns of there being one process
            load(_sized(tensors), storage_reader=reader, no_dist=ranks.is_alone)
    except CheckpointException as error:
        raise CheckpointError(f"{folder}: cannot be read: {_first(error)}") from error


def _sized(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # A view [1] of each scalar: a slice of a stored scalar cannot be asked for.
    return {name: value.detach().reshape(1) if value.ndim == 0 else value.detach() for name, value in tensors.items()}


def _first(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"process {rank}: {cause}"
