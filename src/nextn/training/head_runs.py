"""A run that trains a head on a frozen trunk, put together from a checkpoint, texts and settings."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from nextn.checkpoints.checkpoint import Checkpoint
from nextn.checkpoints.inventory import Inventory
from nextn.checkpoints.snapshot import folder_of, on_disk
from nextn.checkpoints.stages import named_after, need_room, owned, renamed
from nextn.corpus.batches import Batches
from nextn.corpus.corpus_files import corpora
from nextn.corpus.data import Corpus
from nextn.distributed.parallel import ALONE, Ranks
from nextn.errors import ConfigError, NextnError, TrainingError
from nextn.model import Model, read_tokenizer
from nextn.moving.graft import restore
from nextn.moving.links import refuse_links
from nextn.moving.staging import num_copied
from nextn.training.drawn import are_drawn
from nextn.training.half import training_dtype
from nextn.training.head_files import HEAD_FILE
from nextn.training.head_task import HeadTask
from nextn.training.init_head import init_head
from nextn.training.train import Trainer
from nextn.training.train_config import HeadConfig

# What a run is made of where the settings say nothing: about ten minutes on two cores for a model of a few million.
_STEPS, _LENGTH = 500, 256


@dataclass(frozen=True)
class Start:
    """Where a head comes from: the trunk's own checkpoint, the file `head`, or fresh with `num_modules`.

    model, revision, cache_dir, offline: as `Model.load` takes them. follow_links: links that lead out of the folder of
    the trunk are followed.
    """

    model: str | Path
    head: Path | None = None
    fresh: bool = False
    num_modules: int | None = None
    revision: str | None = None
    cache_dir: Path | None = None
    offline: bool = False
    follow_links: bool = False

    def __post_init__(self) -> None:
        if self.fresh and self.head is not None:
            raise ConfigError(f"a fresh head and the head of {self.head} exclude each other; give one")
        if self.num_modules is not None and not self.fresh:
            raise ConfigError(
                f"modules = {self.num_modules}: a head that is there keeps its own; this is for a fresh one"
            )


@dataclass(frozen=True)
class HeadRun:
    """A trainer at step 0 and its task; the text that is held out; what is worth saying that is no error."""

    trainer: Trainer
    task: HeadTask
    held_out: Corpus
    notes: tuple[str, ...]

    def need_room(self, *, head_only: bool = False) -> None:
        """Raise CheckpointError where the disk has no room for the checkpoints and for what `write` writes."""
        out = self.trainer.folder.path
        trunk = 0 if head_only else num_copied(self.task.origin.checkpoint, out)
        need_room(out, self.trainer.num_bytes_left() + trunk)

    def write(self, *, head_only: bool = False, allow_worse: bool = False) -> Path:
        """Write `model` into the run's folder, or `head/head.safetensors` alone -> where.

        Raises TrainingError for a head that is worse than the one it started from, beyond noise, unless allowed.
        """
        standing, out = self.trainer.standing, self.trainer.folder.path
        if standing.is_worse and not allow_worse:
            raise TrainingError(
                f"the trained head is worse than the one it started from ({standing}) and was not written. Checkpoints "
                f"are in {out}; --allow-worse writes it; a lower lr, more text, or text like the held-out one may help"
            )
        if head_only:
            path = out / "head" / HEAD_FILE
            with self.trainer.whole_named():
                self.task.write_head(path, out)
            return path
        self.trainer.write_result(out / "model")
        return out / "model"


def head_run(
    out: Path,
    start: Start,
    *,
    data: Sequence[str | Path],
    settings: Mapping[str, object],
    all_tokens: bool = False,
    tokenizer: Path | None = None,
    drawn: bool = False,
    ranks: Ranks = ALONE,
) -> HeadRun:
    """data, all_tokens: see `corpora`. settings: of `HeadConfig`. tokenizer: a folder, if not the model's own. drawn:
    files that do not say how they were made hold answers drawn from this trunk at the settings' temperature.

    Raises FamilyError for a trunk whose family has no row or cannot be run, CheckpointError for files that do not fit,
    ConfigError for data or settings that cannot be used.
    """
    model, origin, notes = load_start(start, near=out)
    limit = model.trunk.max_length or _LENGTH
    usual = {"steps": _STEPS, "length": min(_LENGTH, limit), "dtype": training_dtype(ranks.device.type)}
    config = HeadConfig.from_dict(usual | dict(settings))
    known = _tokenizer(model, tokenizer, start)
    corpus, held_out = corpora(data, known, all_tokens=all_tokens, context=model.trunk.max_length)
    is_drawn, doubts = are_drawn(data, model.trunk, config.temperature, said=drawn, all_tokens=all_tokens)
    notes += [*corpus.notes, *doubts]
    torch.manual_seed(config.seed)
    if start.fresh:
        tokens = Batches(corpus, batch_size=2, length=config.length, seed=config.seed, pack=False).batch(0).tokens
        count = 1 if start.num_modules is None else start.num_modules
        model.head, told = init_head(model.family, model.trunk, tokens, num_modules=count)
        notes += told
    task = HeadTask(
        model,
        corpus,
        config,
        origin=origin,
        held_out=held_out,
        has_baseline=not start.fresh,
        drawn=is_drawn,
        ranks=ranks,
    )
    return HeadRun(Trainer(task, out=out), task, held_out, tuple(notes))


def load_start(start: Start, *, near: Path) -> tuple[Model, Inventory, list[str]]:
    """-> trunk and head as training begins (no head if it is to be fresh), the trunk's checkpoint, and notes.

    near: a folder for what is only there while loading.
    """
    at, cache, offline = start.revision, start.cache_dir, start.offline
    checkpoint = Checkpoint.open(start.model, revision=at, cache_dir=cache, offline=offline)
    origin = on_disk(Inventory.of(checkpoint), revision=at, cache_dir=cache, offline=offline)
    refuse_links(origin.checkpoint, follow=start.follow_links)
    with _with_head(origin, start.head, near) as folder:
        model = Model.load(folder, need_head=not start.fresh, skip_head=start.fresh)
    return model, origin, list(model.notes)


@contextmanager
def _with_head(origin: Inventory, head: Path | None, near: Path) -> Iterator[Path]:
    """The trunk's folder, or a passing one with the head of another file; weights are linked, not copied."""
    folder = folder_of(origin.checkpoint)
    if head is None:
        yield folder
        return
    with owned(near / f"start-{os.getpid()}") as stage:  # one for each of several processes
        with named_after(near, stage):
            restore(folder, head, out=stage / "model", force=True, follow_links=True)
        try:
            yield stage / "model"
        except NextnError as error:  # the trunk is as published: the file's head is what is new
            raise renamed(error, stage / "model", head) from error


def _tokenizer(model: Model, folder: Path | None, start: Start) -> PreTrainedTokenizerBase:
    known = read_tokenizer(folder) if folder else model.tokenizer
    if known is None:
        raise ConfigError(f"{start.model} has no tokenizer beside it; give the folder of one with --tokenizer")
    if len(known) > model.trunk.vocab_size:
        raise ConfigError(f"the tokenizer has {len(known)} tokens, the model's vocabulary {model.trunk.vocab_size}")
    return known
