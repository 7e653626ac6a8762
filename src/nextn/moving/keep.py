"""Keeping the head: transformers' `save_pretrained` writes the trunk alone; a hook puts the head back after each save.

`keep_head` keeps the head that the model was loaded with, byte for byte. `save_with` takes it from wherever it is.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from nextn.checkpoints.checkpoint import INDEX, SINGLE, Checkpoint
from nextn.checkpoints.stages import named_after, owned
from nextn.errors import CheckpointError
from nextn.moving.graft import restore
from nextn.moving.relayout import extract

_METHOD = "save_pretrained"


def keep_head(model: PreTrainedModel, source: str | Path | None = None, *, revision: str | None = None) -> None:
    """From now on `model.save_pretrained` writes the head of `source` beside the trunk; a second call changes nothing.

    source: the checkpoint that has the head, a folder, file or hub id; left out, what the model was loaded from. Give
    the model itself or its PEFT wrapper: adapters are saved as they are, a merged model gets its head. Raises
    CheckpointError now, not after the training, if `source` has no whole head.
    """
    model = without_adapters(model)
    if isinstance(vars(model).get(_METHOD), _Saver):
        return
    source = source or model.config._name_or_path
    if not source:
        raise CheckpointError("the model was built, not loaded; give keep_head the checkpoint that has the head")
    base = _base(source, revision or getattr(model.config, "_commit_hash", None))
    with tempfile.TemporaryDirectory() as folder:  # stays empty
        extract(base, Path(folder) / "head.safetensors", dry_run=True, follow_links=True)
    save_with(model, _Stored(base))


class Source(Protocol):
    """Where the head comes from that a save puts beside the trunk."""

    def held(self, folder: Path) -> AbstractContextManager[Path | Checkpoint]:
        """What `restore` takes as a base, to be open while `folder` is written."""

    def seal(self, folder: Path) -> None:
        """Called when the head is in `folder`."""


def save_with(model: PreTrainedModel, source: Source) -> None:
    """From now on `model.save_pretrained` writes the head of `source`, and of no source before."""
    known = vars(model).get(_METHOD)
    save = known.save if isinstance(known, _Saver) else getattr(model, _METHOD)
    setattr(model, _METHOD, _Saver(model, source, save))


def without_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """The model inside a PEFT wrapper, or itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class KeepHead(TrainerCallback):
    """`keep_head` for `transformers.Trainer` and what is made of it: `Trainer(..., callbacks=[KeepHead()])`."""

    def __init__(self, source: str | Path | None = None, *, revision: str | None = None) -> None:
        self.source, self.revision = source, revision

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        model = kwargs["model"]
        assert isinstance(model, PreTrainedModel) or hasattr(model, "get_base_model")
        keep_head(model, self.source, revision=self.revision)


class _Stored:
    """The head of a checkpoint."""

    def __init__(self, base: Path | Checkpoint) -> None:
        self.base = base

    @contextmanager
    def held(self, folder: Path) -> Iterator[Path | Checkpoint]:
        """The base; a copy of its head where the save is about to overwrite it."""
        if not isinstance(self.base, Path) or folder.resolve() not in (self.base, self.base.parent):
            yield self.base
            return
        with owned(folder.resolve()) as stage:
            with named_after(folder, stage):
                extract(self.base, stage / "head.safetensors", follow_links=True)
            yield replace(Checkpoint.open(stage / "head.safetensors"), path=str(self.base))

    def seal(self, folder: Path) -> None:
        """`restore` has written which trunk the head was made for."""


class _Saver:
    """Stands in for one model's `save_pretrained`."""

    def __init__(self, model: PreTrainedModel, source: Source, save: Callable[..., None]) -> None:
        self.model, self.source, self.save = model, source, save

    def __call__(self, *args: object, **kwargs: object) -> None:
        call = signature(self.save).bind(*args, **kwargs)
        push = call.arguments.pop("push_to_hub", False)
        folder = Path(str(call.arguments["save_directory"]))
        with self.source.held(folder) as base:
            self.save(*call.args, **call.kwargs)
            _drop_old_index(folder)
            if call.arguments.get("is_main_process", True) and any(folder.glob("model*.safetensors")):
                # Followed: transformers loads the model through the same links and saves what they lead to.
                restore(folder, base, force=True, follow_links=True)
                self.source.seal(folder)
        if push:  # saves again, into a folder of its own and with the head, and uploads that
            hub = {"token": call.arguments.get("token"), **call.arguments.get("kwargs", {})}
            self.model.push_to_hub(hub.pop("repo_id", folder.name), **hub)


def _base(source: str | Path, revision: str | None) -> Path | Checkpoint:
    """A local base is opened at each save, as it may change; a hub id now, while there is a network."""
    path = Path(source).expanduser()
    return path.resolve() if path.exists() else Checkpoint.open(source, revision=revision)


def _drop_old_index(folder: Path) -> None:
    """A save into one file leaves the index of an earlier one in shards, whose shards it deletes."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists() and single.stat().st_mtime_ns > index.stat().st_mtime_ns:
        index.unlink()
