"""Where the model of `nextn demo` is kept: SmolLM2-135M-Instruct, which `edit.published_model` prepares."""

import os
from pathlib import Path

from nextn.errors import CheckpointError

NAME = "SmolLM2-135M-Instruct"
SHORT_NAME = "smollm2"  # which every command takes


def default_folder() -> Path:
    """Return NEXTN_REAL_MODELS, or nextn-models in the user's cache. Raises CheckpointError if there is neither."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise CheckpointError(f"no cache folder: {error}; set NEXTN_REAL_MODELS to a folder") from error
    return Path(os.environ.get("NEXTN_REAL_MODELS") or cache / "nextn-models")


def demo_model() -> Path:
    """Return the model's checkpoint folder. Raises CheckpointError if it was not prepared yet."""
    folder = default_folder() / NAME
    if not folder.exists():
        raise CheckpointError(
            f"{SHORT_NAME}: the model of `nextn demo`, {NAME}, is not in {folder.parent}; `nextn demo --minutes 0` "
            "downloads it (93 MB)"
        )
    return folder
