"""The head that is cotrained in a transformers Trainer: initializing it, and saving and loading it with the model.

This module does not know how the head is trained.
"""

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, Trainer

from nextn.checkpoint.provenance import record_training
from nextn.edit.save_hook import save_with, without_adapters
from nextn.errors import ConfigError
from nextn.model.head import Head
from nextn.model.model import live_trunk, load_head
from nextn.model.trunk import Trunk
from nextn.train.head_files import write_head, write_tensors
from nextn.train.init_head import init_head

# Sample of the training data on which the trunk's residual stream is measured.
_ROWS, _TOKENS = 8, 256
FOLDER = "head"
# In a folder of their own: next to adapters, a config.json would make transformers load them as a model.
_FILE, _STATE = Path(FOLDER, "head.safetensors"), Path(FOLDER, "training.safetensors")


def fresh_head(trainer: Trainer, model: PreTrainedModel, *, num_modules: int, trunk_class: type[Trunk]) -> Head:
    """Initialize a head of `num_modules` modules for a Trainer's model, see `init_head`; its notes become warnings.

    Raises ConfigError if the family allows fewer modules, or the Trainer has no training data.
    """
    family, trunk = live_trunk(model, trunk_class=trunk_class)
    tokens = _sample_tokens(trainer)[:, : trunk.max_length].to(trunk.device)
    head, notes = init_head(family, trunk, tokens, num_modules=num_modules)
    for note in notes:
        warnings.warn(note, stacklevel=3)
    return head


def _sample_tokens(trainer: Trainer) -> Tensor:
    """[1, T] tokens of the first rows of the training data."""
    rows = [] if trainer.train_dataset is None else list(islice(trainer.train_dataset, _ROWS))
    if not rows:
        raise ConfigError("a fresh head is initialized on some training text: give the Trainer a train_dataset first")
    ids = [row["input_ids"] for row in rows] if "input_ids" in rows[0] else trainer.data_collator(rows)["input_ids"]
    return torch.cat([torch.as_tensor(row).flatten() for row in ids])[None, :_TOKENS]


class CotrainedHead:
    """Saves and loads a head in memory, in the model's dtype; `made_by` goes into the record of each save."""

    def __init__(self, head: Head, *, made_by: str) -> None:
        self.head, self.made_by = head, made_by

    @contextmanager
    def open_base(self, folder: Path) -> Iterator[Path]:
        """Write the head to a temporary file, which is valid inside the context."""
        with tempfile.TemporaryDirectory() as temporary:
            self.write(Path(temporary))
            yield Path(temporary, _FILE)

    def seal(self, folder: Path) -> None:
        """Record in a saved checkpoint what trained its head."""
        record_training(folder, source=self.made_by)

    def write(self, folder: Path) -> None:
        """Write `head/head.safetensors` and its config.json, a base for `restore`."""
        head = self.head
        config = head.family.with_count(head.trunk.model.config.to_dict(), head.num_modules)
        write_head(head, folder / _FILE, config, dtype=head.trunk.dtype)

    def write_state(self, folder: Path) -> None:
        """Write `head/training.safetensors`, the parameters in training precision."""
        write_tensors(folder / _STATE, self.head.state_dict())

    def read(self, folder: Path) -> None:
        """Load the parameters of a checkpoint, in training precision if stored, else as published.

        Raises CheckpointError if it has neither.
        """
        if (folder / _STATE).exists():
            state = load_file(folder / _STATE)
        else:
            source = folder / _FILE if (folder / _FILE).exists() else folder
            state = load_head(source, self.head.trunk.model).state_dict()
        self.head.load_state_dict(state)


def save_with_head(model: PreTrainedModel, head: CotrainedHead) -> None:
    """Make `model.save_pretrained` write the head: into a model's checkpoint, or into `head/` next to adapters."""
    base = without_adapters(model)
    save_with(base, head)
    if model is not base:
        model.save_pretrained = _AdapterSaver(model.save_pretrained, head)


class _AdapterSaver:
    """Replaces the `save_pretrained` of a PEFT wrapper."""

    def __init__(self, save: Callable[..., None], head: CotrainedHead) -> None:
        self.save, self.head = save, head

    def __call__(self, save_directory: str, *args: object, **kwargs: object) -> None:
        self.save(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            self.head.write(Path(save_directory))
