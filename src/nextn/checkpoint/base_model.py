"""The model that a checkpoint was made from, by its config.json, model card or nextn.json, for commands that name it.

All are untrusted text, and the name becomes a part of a command that users copy into a shell: only the hub's own
grammar of ids and existing folders are accepted, and the name is quoted.
"""

import re
from pathlib import Path

from nextn.checkpoint.checkpoint import CONFIG, Checkpoint
from nextn.errors import CheckpointError

_CARD = "README.md"
RECORD = "nextn.json"
_CARD_BYTES = 64 * 1024
_MAX_PATH = 1024  # characters
# huggingface_hub/utils/_validators.py, with the namespace that every id of the hub's models now has.
_HUB_ID = re.compile(r"(?=.{3,96}$)[A-Za-z0-9_]([\w.-]*[A-Za-z0-9_])?/[A-Za-z0-9_]([\w.-]*[A-Za-z0-9_])?", re.ASCII)
_FRONT_MATTER = re.compile(r"\ufeff?---[ \t]*\r?\n(.*?)\n---", re.DOTALL)
# A scalar on the same line, or a list there or on the lines below.
_BASE_MODEL = re.compile(r"^base_model:([^\n]*(?:\n[ \t]*-[ \t][^\n]*)*)", re.MULTILINE)


def base_model(checkpoint: Checkpoint) -> str | None:
    """Return the hub id or folder of the model that this one was made from; None if no file names one."""
    names = checkpoint.config.get("_name_or_path"), _card_base(checkpoint), _recorded_source(checkpoint)
    return next((name for name in names if isinstance(name, str) and _is_usable(name, checkpoint)), None)


def _is_usable(name: str, checkpoint: Checkpoint) -> bool:
    """Whether it is another checkpoint, on the hub or, for a local one, in a folder that exists."""
    if name.lower().rstrip("/") == checkpoint.path.lower().rstrip("/") or _same_folder(name, checkpoint.path):
        return False
    return is_hub_id(name) or (checkpoint.revision is None and _is_checkpoint_folder(name))


def is_hub_id(name: str) -> bool:
    """Whether the hub would accept this as the id "namespace/name" of a repository."""
    return bool(_HUB_ID.fullmatch(name)) and not re.search(r"\.\.|--|\.git$", name)


def _same_folder(first: str, second: str) -> bool:
    try:
        return Path(first).samefile(second)
    except (OSError, ValueError):
        return False


def _is_checkpoint_folder(name: str) -> bool:
    if len(name) > _MAX_PATH or not name.isprintable() or name.startswith("-"):
        return False
    try:
        return (Path(name) / CONFIG).is_file()
    except OSError:
        return False


def _recorded_source(checkpoint: Checkpoint) -> object:
    try:
        return (checkpoint.read_json(RECORD) or {}).get("source")
    except CheckpointError:  # `audit` reports it
        return None


def _card_base(checkpoint: Checkpoint) -> str | None:
    """The only base_model in the card's front matter; None if there are several, as of a merge."""
    if _CARD not in checkpoint.sources:
        return None
    try:
        card = checkpoint.sources[_CARD].start(_CARD_BYTES)[0].decode(errors="replace")
    except CheckpointError:  # a card that cannot be read is no reason to stop
        return None
    front_matter = _FRONT_MATTER.match(card)
    match = front_matter and _BASE_MODEL.search(front_matter[1])
    if not match:
        return None
    words = re.sub(r"(?m)(^|\s)(#.*|-(?=\s))", " ", match[1])
    names = [name.strip("\"'") for name in re.split(r"[\s,\[\]]+", words) if name.strip("\"'")]
    return names[0] if len(names) == 1 else None
