"""A head in memory that trains beside a model of transformers: written with each save, read back on resuming.

It knows files and folders; not what trains the head.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file
from transformers import PreTrainedModel

from nextn.checkpoints.provenance import record_training
from nextn.head import Head
from nextn.model import load_head
from nextn.moving.keep import save_with, without_adapters
from nextn.training.head_files import write_head, write_tensors

FOLDER = "head"
# In a folder of their own: beside adapters, a config.json would make transformers take them for a model.
_FILE, _STATE = Path(FOLDER, "head.safetensors"), Path(FOLDER, "training.safetensors")


class LiveHead:
    """Written in the model's dtype, whatever the head trains in. made_by: what the record of a save says."""

    def __init__(self, head: Head, *, made_by: str) -> None:
        self.head, self.made_by = head, made_by

    @contextmanager
    def held(self, folder: Path) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as aside:
            self.write(Path(aside))
            yield Path(aside, _FILE)

    def seal(self, folder: Path) -> None:
        record_training(folder, source=self.made_by)

    def write(self, folder: Path) -> None:
        """`head/head.safetensors` and its config.json, a base for `restore`."""
        head = self.head
        config = head.family.with_count(head.trunk.model.config.to_dict(), head.num_modules)
        write_head(head, folder / _FILE, config, dtype=head.trunk.dtype)

    def write_state(self, folder: Path) -> None:
        """`head/training.safetensors`, the parameters as they train."""
        write_tensors(folder / _STATE, self.head.state_dict())

    def read(self, folder: Path) -> None:
        """Back to what a checkpoint holds: the parameters as they trained, or as they were published.

        Raises CheckpointError where it holds neither.
        """
        if (folder / _STATE).exists():
            state = load_file(folder / _STATE)
        else:
            source = folder / _FILE if (folder / _FILE).exists() else folder
            state = load_head(source, self.head.trunk.model).state_dict()
        self.head.load_state_dict(state)


def save_beside(model: PreTrainedModel, live: LiveHead) -> None:
    """From now on `model.save_pretrained` writes the head: into the checkpoint of a model, into `head/` of adapters."""
    base = without_adapters(model)
    save_with(base, live)
    if model is not base:
        model.save_pretrained = _AdapterSaver(model.save_pretrained, live)


class _AdapterSaver:
    """Stands in for one PEFT wrapper's `save_pretrained`."""

    def __init__(self, save: Callable[..., None], live: LiveHead) -> None:
        self.save, self.live = save, live

    def __call__(self, save_directory: str, *args: object, **kwargs: object) -> None:
        self.save(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            self.live.write(Path(save_directory))
