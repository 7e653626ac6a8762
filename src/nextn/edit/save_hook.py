"""Hook `save_pretrained`, which writes only the trunk in transformers, to restore the head after each save.

`keep_head` keeps the head that the model was loaded with, byte for byte; `save_with` takes it from any `HeadSource`.
"""

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from nextn.checkpoint.checkpoint import INDEX, SINGLE, Checkpoint, shipped_path
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.staging_folder import named_after, owned
from nextn.edit.convert import extract
from nextn.edit.plan import HEAD_FILE
from nextn.edit.reindex import side_files
from nextn.edit.restore import restore
from nextn.errors import CheckpointError, ConfigError

_METHOD = "save_pretrained"
_HEAD_FILE = re.compile(rf"{re.escape(Path(HEAD_FILE).stem)}(-\d+)?\.safetensors")  # see `free_name`


def keep_head(model: PreTrainedModel, source: str | Path | None = None) -> None:
    """Make `model.save_pretrained` also write the head of `source`; a second call changes nothing.

    Args:
        model: The model or its PEFT wrapper: adapters are saved as they are, a merged model gets its head.
        source: The checkpoint that has the head, a folder, file or hub id; by default what the model was loaded from,
            in that revision.

    Raises:
        CheckpointError: `source` has no complete head. Raised now, not after the training.

    Example:
        >>> model = nextn.load("tiny").trunk.model  # a transformers model
        >>> nextn.keep_head(model, "tiny")
        >>> model.save_pretrained("kept")
        >>> nextn.audit("kept").modules
        (0,)
    """
    if not hasattr(model, _METHOD):
        raise ConfigError(f"model is {type(model).__name__}; expected a transformers model, or its PEFT wrapper")
    model = without_adapters(model)
    if isinstance(vars(model).get(_METHOD), _Saver):
        return
    source = source or _loaded_from(model)
    if not source:
        raise CheckpointError("the model was built, not loaded; give keep_head the checkpoint that has the head")
    base = _base(source)
    with tempfile.TemporaryDirectory() as folder:  # stays empty
        extract(base, Path(folder) / "head.safetensors", dry_run=True, follow_links=True)
    save_with(model, _Stored(base))


class HeadSource(Protocol):
    """The source of the head that a save adds."""

    def open_base(self, folder: Path) -> AbstractContextManager[Path | Checkpoint]:
        """Return a base for `restore`, valid while `folder` is written."""

    def seal(self, folder: Path) -> None:
        """Finish `folder`, to which the head was added."""


def save_with(model: PreTrainedModel, source: HeadSource) -> None:
    """Make `model.save_pretrained` write the head of `source`, replacing any earlier source."""
    hook = vars(model).get(_METHOD)
    save = hook.save if isinstance(hook, _Saver) else getattr(model, _METHOD)
    setattr(model, _METHOD, _Saver(model, source, save))


def without_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class KeepHead(TrainerCallback):
    """Keep the head in every checkpoint that a `transformers.Trainer`, or one based on it, saves, as `keep_head` does.

    Args:
        source: The checkpoint that has the head, a folder, file or hub id; by default what the model was loaded from.

    Example:
        >>> from transformers import Trainer, TrainingArguments
        >>> model = nextn.load("tiny").trunk.model  # a transformers model
        >>> trainer = Trainer(model, TrainingArguments("run", report_to=[]), callbacks=[nextn.KeepHead("tiny")])
        >>> trainer.save_model("with-head")
        >>> nextn.audit("with-head").modules
        (0,)
    """

    def __init__(self, source: str | Path | None = None) -> None:
        self.source = source

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        model = kwargs["model"]
        assert isinstance(model, PreTrainedModel) or hasattr(model, "get_base_model")
        keep_head(model, self.source)


class _Stored:
    """The head of a checkpoint."""

    def __init__(self, base: Path | Checkpoint) -> None:
        self.base = base

    @contextmanager
    def open_base(self, folder: Path) -> Iterator[Path | Checkpoint]:
        """Yield the base, or a copy of its head where the save is about to overwrite it."""
        if not isinstance(self.base, Path) or folder.resolve() not in (self.base, self.base.parent):
            yield self.base
            return
        with owned(folder.resolve()) as stage:
            with named_after(folder, stage):
                extract(self.base, stage / "head.safetensors", follow_links=True)
            yield replace(Checkpoint.open(stage / "head.safetensors"), path=str(self.base))

    def seal(self, folder: Path) -> None:
        """Do nothing: `restore` wrote the record."""


class _Saver:
    """Replacement for one model's `save_pretrained`."""

    def __init__(self, model: PreTrainedModel, source: HeadSource, save: Callable[..., None]) -> None:
        self.model, self.source, self.save = model, source, save

    def __call__(self, *args: object, **kwargs: object) -> None:
        call = signature(self.save).bind(*args, **kwargs)
        push = call.arguments.pop("push_to_hub", False)
        folder = Path(str(call.arguments["save_directory"]))
        with self.source.open_base(folder) as base:
            self.save(*call.args, **call.kwargs)
            _drop_old_index(folder)
            if call.arguments.get("is_main_process", True) and any(folder.glob("model*.safetensors")):
                # Links are followed: transformers also loads the model through them and saves what they lead to.
                restore(folder, base, force=True, follow_links=True)
                remove_unlisted_heads(folder)
                self.source.seal(folder)
        if push:  # push_to_hub saves again, with the head, into a folder of its own that it uploads
            hub = {"token": call.arguments.get("token"), **call.arguments.get("kwargs", {})}
            self.model.push_to_hub(hub.pop("repo_id", folder.name), **hub)


def _loaded_from(model: PreTrainedModel) -> str:
    """Return the folder or hub id, with its commit, that the model was loaded from; "" if it was built."""
    name, commit = str(model.config._name_or_path), getattr(model.config, "_commit_hash", None)
    return name if commit is None or Path(name).exists() else f"{name}@{commit}"


def _base(source: str | Path) -> Path | Checkpoint:
    """Return a path for a local base, opened at each save, as it may change; a hub id is opened now."""
    path = Path(shipped_path(source)).expanduser()
    return path.resolve() if path.exists() else Checkpoint.open(source)


def remove_unlisted_heads(folder: Path) -> None:
    """Remove the files of heads that earlier saves wrote into `folder`, which the index of the last one does not list.

    llama.cpp's converter reads every model*.safetensors. Files of other names, or with other tensors, stay.
    """
    for file in side_files(Inventory.of(Checkpoint.open(folder))):
        if _HEAD_FILE.fullmatch(file):
            (folder / file).unlink()


def _drop_old_index(folder: Path) -> None:
    """Remove the index of an earlier sharded save: a single-file save deletes the shards but not their index."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists() and single.stat().st_mtime_ns > index.stat().st_mtime_ns:
        index.unlink()
