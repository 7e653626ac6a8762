"""A checkpoint with all its files on this disk: as it is, or fetched from the hub, no more of it than loading needs.

Knows the hub's downloads, and the inventory that says which files hold the trunk and the head; no torch.
"""

import re
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub as hub
from huggingface_hub import is_offline_mode

from nextn.checkpoints.checkpoint import CONFIG, Checkpoint
from nextn.checkpoints.inventory import Inventory
from nextn.checkpoints.remote import ADVICE, LocalFile
from nextn.errors import CheckpointError

# Config, tokenizer, chat template. A pattern with a slash never matches: other folders hold other formats.
_BESIDE = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")


def on_disk(
    inventory: Inventory, *, revision: str | None = None, cache_dir: str | Path | None = None, offline: bool = False
) -> Inventory:
    """The inventory of the same checkpoint with its files on this disk; of a hub checkpoint those `needed` are fetched.

    revision: as it was opened by; the cache then knows it by that name, for `offline`. The hub's client shows progress
    and goes on with an interrupted download. Raises CheckpointError where it fails.
    """
    checkpoint = inventory.checkpoint
    if all(isinstance(source, LocalFile) for name in needed(inventory) if (source := checkpoint.sources.get(name))):
        return inventory
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx2's; httpx's in hub 1

    try:
        folder = hub.snapshot_download(
            checkpoint.path,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=[re.sub(r"([*?[])", r"[\1]", name) for name in needed(inventory)],
            local_files_only=offline or is_offline_mode(),
        )
    except (HTTPError, OSError) as error:  # the hub's own errors are of one of the two kinds
        raise CheckpointError(f"{checkpoint.path}: {_reason(error)}. What was fetched stays; try again.") from error
    return Inventory.of(Checkpoint.open(folder), family=inventory.family)


def folder_of(checkpoint: Checkpoint) -> Path:
    """The folder of a checkpoint on this disk: where its config.json lies."""
    config = checkpoint.sources.get(CONFIG)
    if not isinstance(config, LocalFile):
        raise CheckpointError(
            f"{checkpoint.path}: no {CONFIG} there or beside it. Give the model's own folder or hub id."
        )
    return config.path.parent


def needed(inventory: Inventory) -> list[str]:
    """The files that loading opens: what the index names, what else holds a head's tensor, and what is beside it."""
    checkpoint = inventory.checkpoint
    named = set(checkpoint.files) - set(checkpoint.unindexed)
    heads = [*inventory.spellings(inventory.stored), *inventory.shared.values(), *inventory.strangers]
    named |= {checkpoint.tensors[name].file for name in heads}
    beside = {name for name in checkpoint.sources if "/" not in name and any(fnmatch(name, each) for each in _BESIDE)}
    return sorted(named | beside)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; name another cache with --cache-dir or HF_HOME"
    response = getattr(error, "response", None)
    if response is None:
        return f"the download failed: {error}"
    advice = ADVICE.get(response.headers.get("X-Error-Code", "")) or ADVICE.get(response.status_code)
    return f"the download failed with HTTP {response.status_code}: {advice or error}"
