"""Make a checkpoint's files local: download from the hub what loading needs. Imports no torch."""

import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub as hub
from huggingface_hub import is_offline_mode

from nextn.checkpoint.checkpoint import CONFIG, Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.partial_download import PartialDownload
from nextn.checkpoint.remote import ADVICE, LocalFile, RemoteFile
from nextn.errors import CheckpointError

# Config, tokenizer, chat template. A pattern with a slash never matches: other folders hold other formats.
_OTHER_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")


def on_disk(
    inventory: Inventory, *, revision: str | None = None, cache_dir: str | Path | None = None, offline: bool = False
) -> Inventory:
    """Return the inventory of the same checkpoint with local files; of a hub checkpoint, download those `needed`.

    The hub's client shows progress and resumes interrupted downloads.

    Args:
        inventory: Of an opened checkpoint.
        revision: The one it was opened with, so that the cache can find it by that name when `offline`.
        cache_dir: Folder of the hub's cache.
        offline: Use the cache only.

    Raises:
        CheckpointError: The download failed, or the cache lacks files.
    """
    if not _remote(inventory):
        return inventory
    checkpoint = inventory.checkpoint
    patterns = [re.sub(r"([*?[])", r"[\1]", name) for name in needed(inventory)]
    folder = _download(checkpoint.path, patterns, revision=revision, cache_dir=cache_dir, offline=offline)
    return Inventory.of(Checkpoint.open(folder), family=inventory.family)


def in_parts(
    inventory: Inventory, *, revision: str | None = None, cache_dir: str | Path | None = None, keep: Path | None = None
) -> Inventory:
    """Return the inventory of the same checkpoint; tensors on the hub are downloaded when they are read.

    Args:
        inventory: Of an opened checkpoint.
        revision: The one it was opened with.
        cache_dir: Folder of the hub's cache, in which tensors are until they are forgotten.
        keep: Folder to keep them in instead.

    Raises:
        CheckpointError: As `on_disk` and `PartialDownload`; for `keep` beside a local checkpoint.
    """
    checkpoint = inventory.checkpoint
    if not _remote(inventory):
        if keep is not None:
            raise CheckpointError(f"{checkpoint.path}: nothing is to be downloaded, so there are no shards to keep")
        return inventory
    folder = _download(checkpoint.path, _OTHER_FILES, revision=revision, cache_dir=cache_dir, offline=False)
    cache = Path(cache_dir or hub.constants.HF_HUB_CACHE) / f"nextn--{checkpoint.path.replace('/', '--')}"
    partial = PartialDownload(checkpoint, keep or cache, keep=keep is not None).checkpoint
    others = {name: LocalFile(path, name) for name in partial.sources if (path := folder / name).is_file()}
    return replace(inventory, checkpoint=replace(partial, sources={**partial.sources, **others}))


def _remote(inventory: Inventory) -> list[str]:
    """The needed files that are on the hub only."""
    sources = inventory.checkpoint.sources
    return [name for name in needed(inventory) if isinstance(sources.get(name), RemoteFile)]


def _download(
    hub_id: str, patterns: Sequence[str], *, revision: str | None, cache_dir: str | Path | None, offline: bool
) -> Path:
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx2's; httpx's in hub 1

    try:
        folder = hub.snapshot_download(
            hub_id,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=list(patterns),
            local_files_only=offline or is_offline_mode(),
        )
    except (HTTPError, OSError) as error:  # the hub's own errors derive from these
        raise CheckpointError(f"{hub_id}: {_reason(error)}. Completed files are kept; try again.") from error
    return Path(folder)


def small_files(
    source: str, *, revision: str | None = None, cache_dir: str | Path | None = None, offline: bool = False
) -> Path:
    """Return the folder with the config and tokenizer of a local checkpoint or hub id; no weights are downloaded.

    Raises CheckpointError if there is none.
    """
    if Path(source).exists():
        return folder_of(Checkpoint.open(source))
    return _download(source, _OTHER_FILES, revision=revision, cache_dir=cache_dir, offline=offline)


def folder_of(checkpoint: Checkpoint) -> Path:
    """Return the folder of a local checkpoint, where its config.json is."""
    config = checkpoint.sources.get(CONFIG)
    if not isinstance(config, LocalFile):
        raise CheckpointError(
            f"{checkpoint.path}: no {CONFIG} there or next to it. Give the model's own folder or hub id."
        )
    return config.path.parent


def needed(inventory: Inventory) -> list[str]:
    """Return the files that loading opens: indexed ones, others with tensors of a head, config and tokenizer."""
    checkpoint = inventory.checkpoint
    named = set(checkpoint.files) - set(checkpoint.unindexed)
    names = [*inventory.spellings(inventory.stored), *inventory.shared.values(), *inventory.unrecognized]
    named |= {checkpoint.tensors[name].file for name in names}
    others = {
        name for name in checkpoint.sources if "/" not in name and any(fnmatch(name, each) for each in _OTHER_FILES)
    }
    return sorted(named | others)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; choose another cache with --cache-dir or HF_HOME"
    response = getattr(error, "response", None)
    if response is None:
        return f"the download failed: {error}"
    advice = ADVICE.get(response.headers.get("X-Error-Code", "")) or ADVICE.get(response.status_code)
    return f"the download failed with HTTP {response.status_code}: {advice or error}"
