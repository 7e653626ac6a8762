"""Build a training run of a head on a frozen trunk from a checkpoint, data and settings."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nextn.checkpoint.checkpoint import SINGLE, Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import open_head, trunk_family
from nextn.checkpoint.snapshot import folder_of, in_parts, on_disk
from nextn.checkpoint.staging_folder import explain_full_disk, named_after, need_room, owned, renamed
from nextn.data.batches import Batches
from nextn.data.corpus import Corpus
from nextn.data.sources import load_corpora
from nextn.devices import training_dtype
from nextn.edit.execute import num_copied
from nextn.edit.gguf_export import refuse_trunk
from nextn.edit.links import refuse_links
from nextn.edit.restore import restore
from nextn.errors import ConfigError, NextnError, TrainingError
from nextn.family_table import by_config, by_name, find, fitted
from nextn.model.deferred_init import DeferredInit
from nextn.model.head import Head
from nextn.model.layer_states import LayerProgress
from nextn.model.model import Model, load_head, read_head
from nextn.model.streamed_trunk import DeferredTrunk
from nextn.model.text_interface import added_tokens_beyond, read_tokenizer
from nextn.model.trunk import Trunk
from nextn.train.config import HeadConfig
from nextn.train.distributed import ALONE, Ranks
from nextn.train.head_files import HEAD_FILE
from nextn.train.head_task import HeadTask
from nextn.train.init_head import init_head
from nextn.train.loop import Trainer
from nextn.train.self_generated import is_on_policy

# Defaults of the settings: about ten minutes on two cores for a model of a few million parameters.
_STEPS, _LENGTH = 500, 256
_INIT_TOKENS = 8192  # that a fresh head is fitted to: as many as a trunk of a few B parameters runs in minutes
_LARGE_VOCABULARY = 32_768  # tokens
# Layouts of a fresh head besides the trunk's own -> family.
LAYOUTS = {"mimo": "mimo_draft", "step35": "step35_draft"}
# Folder, in that of a run, of the states of a streamed trunk while a fresh head is made of it.
INIT_STATES = "states-init"
ShowLayers = Callable[[Trunk, Path], AbstractContextManager[Callable[[LayerProgress], None]]]


def hide_layers(trunk: Trunk, folder: Path) -> AbstractContextManager[Callable[[LayerProgress], None]]:
    """Show nothing, see `prepare_head_run`."""
    return nullcontext(lambda progress: None)


@dataclass(frozen=True)
class StartingPoint:
    """The trunk to train on, and its initial head: the checkpoint's own, that of another file, or a fresh one."""

    model: str | Path
    head: Path | None = None  # a file to take the head from
    fresh: bool = False
    num_modules: int | None = None  # of a fresh head
    layout: str | None = None  # of a fresh head, see `LAYOUTS`; None: the family's
    follow_links: bool = False  # follow links that lead out of the trunk's folder
    stream: bool = False  # the trunk runs once, layer by layer, see `HeadTask.stream_trunk`

    def __post_init__(self) -> None:
        if self.layout is not None and self.layout not in LAYOUTS:
            raise ConfigError(f"--layout {self.layout}; expected {' or '.join(LAYOUTS)}, or none for the trunk's own")
        if self.layout is not None and not self.fresh:
            raise ConfigError(f"--layout {self.layout}: only for a fresh head (--init-head); others keep their layout")
        if self.fresh and self.head is not None:
            raise ConfigError(f"a fresh head and the head of {self.head} exclude each other; give only one")
        if self.num_modules is not None and not self.fresh:
            raise ConfigError(
                f"modules = {self.num_modules}: only for a fresh head; an existing one keeps its number of modules"
            )


@dataclass(frozen=True)
class HeadRun:
    """A trainer at step 0, its task, the held-out text and notes for the user."""

    trainer: Trainer
    task: HeadTask
    held_out: Corpus
    notes: tuple[str, ...]

    def check_disk_space(self, *, head_only: bool = False) -> None:
        """Raise CheckpointError if the disk is too full for the checkpoints and the result."""
        out = self.trainer.folder.path
        trunk = 0 if head_only or self._is_separate else num_copied(self.task.origin.checkpoint, out)
        need_room(out, self.trainer.num_bytes_left() + trunk)

    def write(self, *, head_only: bool = False, allow_worse: bool = False) -> Path:
        """Write `model` into the run's folder, or only `head/head.safetensors`, and return its path.

        A head whose layout is stored beside the trunk is always written alone.

        Raises TrainingError if the head is worse than the initial one, beyond noise, and `allow_worse` is not set.
        """
        tracker, out = self.trainer.best_tracker, self.trainer.folder.path
        if tracker.is_worse and not allow_worse:
            raise TrainingError(
                f"the trained head is worse than the one it started from and was not written: {tracker}. Checkpoints "
                f"are in {out}; --allow-worse writes it; a lower lr, more text, or text like the held-out one may help"
            )
        if head_only or self._is_separate:
            path = out / "head" / (SINGLE if self.task.head.family.trunk_kv else HEAD_FILE)
            with explain_full_disk(self.trainer.full_disk_advice):
                self.task.write_head(path, out)
            return path
        self.trainer.write_result(out / "model")
        return out / "model"

    @property
    def _is_separate(self) -> bool:
        return self.task.head.family.separate


def prepare_head_run(
    out: Path,
    start: StartingPoint,
    *,
    data: Sequence[str | Path],
    settings: Mapping[str, object],
    all_tokens: bool = False,
    tokenizer: Path | None = None,
    on_policy: bool = False,
    ranks: Ranks = ALONE,
    show_layers: ShowLayers = hide_layers,
) -> HeadRun:
    """Load the starting point and the data (see `load_corpora`), and build the trainer by `settings` of `HeadConfig`.

    `tokenizer` is a folder, if not the model's own. `on_policy`: data without a header was sampled from this trunk at
    the settings' temperature. Raises FamilyError if the trunk's family is unknown or cannot be run, CheckpointError if
    files do not fit together, ConfigError if data or settings cannot be used.
    """
    HeadConfig.from_dict({"steps": _STEPS} | dict(settings))  # raises now, not after minutes of loading
    model, origin, notes = load_starting_point(start, near=out, ranks=ranks)
    limit = model.trunk.max_length or _LENGTH
    defaults = {"steps": _STEPS, "length": min(_LENGTH, limit), "dtype": training_dtype(ranks.device.type)}
    config = HeadConfig.from_dict(defaults | dict(settings))
    text_tokenizer = _tokenizer(model, tokenizer, start)
    corpus, held_out = load_corpora(data, text_tokenizer, all_tokens=all_tokens, context=model.trunk.max_length)
    all_on_policy, policy_notes = is_on_policy(
        data, model.trunk, config.temperature, declared=on_policy, all_tokens=all_tokens
    )
    notes += [*corpus.notes, *policy_notes]
    torch.manual_seed(config.seed)
    if start.fresh:
        rows = -(-_INIT_TOKENS // config.length)
        tokens = Batches(corpus, batch_size=rows, length=config.length, seed=config.seed, pack=False).batch(0).tokens
        if start.layout is not None:
            _set_layout(model, origin.checkpoint, start.layout)
        num_modules = 1 if start.num_modules is None else start.num_modules
        with show_layers(model.trunk, out / INIT_STATES) as on_layer:
            options: dict[str, Any] = {"num_modules": num_modules, "folder": out / INIT_STATES, "on_layer": on_layer}
            model.head, head_notes = _new_head(model, origin.checkpoint, tokens, ranks, options)
        notes += head_notes
    notes += [] if "loss_vocab" in settings else _large_vocabulary(model.trunk, config)
    task = HeadTask(
        model,
        corpus,
        config,
        origin=origin,
        held_out=held_out,
        has_baseline=not start.fresh,
        on_policy=all_on_policy,
        ranks=ranks,
    )
    return HeadRun(Trainer(task, out=out), task, held_out, tuple(notes))


def _large_vocabulary(trunk: Trunk, config: HeadConfig) -> list[str]:
    """Return a note if the loss over all tokens is most of a step, and could be computed over fewer."""
    is_large = trunk.vocab_size > _LARGE_VOCABULARY and not config.loss_vocab
    if not is_large or config.objective == "ce" or trunk.logit_cap is not None:
        return []
    return [
        f"the loss is computed over all {trunk.vocab_size:,} tokens of the vocabulary, which is most of a step's work: "
        "`--set loss_vocab=8192` takes the most frequent ones and the others as one term, for a head that is as good"
    ]


def _set_layout(model: Model, checkpoint: Checkpoint, layout: str) -> None:
    """Let a new head have this layout. Raises FamilyError or ConfigError if the trunk does not fit it."""
    model.family = fitted(by_name(LAYOUTS[layout]), checkpoint.config)
    model.trunk.stage = model.family.hidden
    if layout == "step35":
        refuse_trunk(checkpoint, model.family)


def _new_head(
    model: Model, checkpoint: Checkpoint, tokens: Tensor, ranks: Ranks, options: Mapping[str, Any]
) -> tuple[Head, list[str]]:
    """Initialize a head from the trunk's layers; return it with notes. options: see `init_head`."""
    model.deferred = None if ranks.is_alone else DeferredInit()
    if type(model.trunk) is DeferredTrunk:
        make = partial(_new_head_for_deferred, model, checkpoint, tokens, deferred=model.deferred, **options)
    else:
        make = partial(init_head, model.family, model.trunk, tokens, deferred=model.deferred, **options)
    return ranks.one_by_one(make) if isinstance(model.trunk, DeferredTrunk) else make()


def _new_head_for_deferred(
    model: Model, checkpoint: Checkpoint, tokens: Tensor, *, num_modules: int, **options: Any
) -> tuple[Head, list[str]]:
    """Do what `init_head` does for a trunk whose layers are loaded when they are sharded: stream them, one by one."""
    streamed = Model.load(checkpoint, skip_head=True, stream=True).trunk
    streamed.stage = model.trunk.stage
    made, notes = init_head(model.family, streamed, tokens, num_modules=num_modules, **options)
    with torch.device("meta"):
        head = Head(model.family, model.trunk, num_modules=num_modules)
    head.load_state_dict(made.state_dict(), assign=True)
    return head, notes


def load_starting_point(
    start: StartingPoint, *, near: Path, ranks: Ranks = ALONE
) -> tuple[Model, Inventory, list[str]]:
    """Return the trunk and the initial head (none if it is to be fresh), the trunk's checkpoint, and notes.

    Temporary files are written `near` while loading. Several ranks load the trunk's decoder layers when they are
    sharded.
    """
    checkpoint = Checkpoint.open(start.model)
    is_added = start.head is not None and find(checkpoint.config) is None  # to a model without a family
    family = trunk_family(checkpoint) if start.fresh or is_added else by_config(checkpoint.config)
    origin = Inventory.of(checkpoint, family=family)
    origin.refuse_draft_model(adding=start.fresh or start.head is not None)
    if start.stream:
        origin = in_parts(origin)
    origin = on_disk(origin)
    refuse_links(origin.checkpoint, follow=start.follow_links)
    if start.stream or not ranks.is_alone:
        model = _load_by_layer(start, origin)
        return model, origin, list(model.notes)
    if is_added:
        model = Model.load(folder_of(origin.checkpoint), head=start.head, stream=start.stream).dequantize()
        return model, origin, list(model.notes)
    with _with_head(origin, start.head, near) as folder:
        model = Model.load(folder, need_head=not start.fresh, skip_head=start.fresh).dequantize()
    return model, origin, list(model.notes)


def _load_by_layer(start: StartingPoint, origin: Inventory) -> Model:
    """The trunk, whose decoder layers are not loaded yet, and the initial head, which is: its experts train."""
    model = Model.load(origin.checkpoint, skip_head=True, stream=start.stream, defer=not start.stream)
    if start.fresh:
        return model
    if start.head is None:
        model.head = load_head(origin.checkpoint, model.trunk)
        return model
    head = open_head(start.head, origin)
    model.family, model.trunk.stage = head.family, head.family.hidden
    model.head = read_head(head, model.trunk)
    return model


@contextmanager
def _with_head(origin: Inventory, head: Path | None, near: Path) -> Iterator[Path]:
    """The trunk's folder, or a temporary one with the head of another file; weights are linked, not copied."""
    folder = folder_of(origin.checkpoint)
    if head is None:
        yield folder
        return
    with owned(near / f"start-{os.getpid()}") as stage:  # one per process
        with named_after(near, stage):
            restore(folder, head, out=stage / "model", force=True, follow_links=True)
        try:
            yield stage / "model"
        except NextnError as error:  # the trunk is as published, so the error is about the file's head
            raise renamed(error, stage / "model", head) from error


def _tokenizer(model: Model, folder: Path | None, start: StartingPoint) -> PreTrainedTokenizerBase:
    tokenizer = read_tokenizer(folder) if folder else model.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{start.model} has no tokenizer; give the folder of one with --tokenizer")
    added_tokens_beyond(tokenizer, model.trunk.vocab_size)
    return tokenizer
