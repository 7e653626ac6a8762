"""What is trained: examples, their loss, held-out figures, and the weights that a checkpoint holds.

The loop in `train` knows no model; a task knows no optimiser and no run folder.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from nextn.checkpoints.provenance import record_training
from nextn.corpus.batches import Batch, Batches
from nextn.corpus.data import Corpus
from nextn.decode import Settings
from nextn.distributed.parallel import ALONE, Ranks
from nextn.distributed.sharding import Joined, join, like, whole
from nextn.errors import ConfigError
from nextn.head import outputs
from nextn.losses.loss import LossReport, Targets, depth_weights, mtp_loss
from nextn.model import Model
from nextn.training.blockwise import attend_in_blocks
from nextn.training.checkpointing import checkpoint_layers
from nextn.training.evaluate import decoded, forced
from nextn.training.metrics import EvalRecord, HeadRecord
from nextn.training.train_config import TrainConfig
from nextn.trunk import Hidden, Trunk


@dataclass(frozen=True, eq=False)
class Example:
    """What one step eats. hidden: the trunk's states of the batch, where they are known already."""

    batch: Batch
    hidden: Hidden | None = None


class Report(Protocol):
    """total: the scalar to differentiate. sums, counts: by depth, to be added over ranks and micro-batches."""

    @property
    def total(self) -> Tensor: ...
    @property
    def sums(self) -> Tensor: ...
    @property
    def counts(self) -> Tensor: ...


class Task(Protocol):
    """named: every parameter that is trained, or stored with what is; those without a gradient are not stepped.

    joined: the modules that a loss goes through, cut over the processes `ranks`. has_baseline: whether what training
    starts from is to be compared with. fingerprint: of the trunk that checkpoints belong to; empty if they hold it.
    """

    ranks: Ranks
    joined: Joined
    fingerprint: str
    named: dict[str, nn.Parameter]
    has_baseline: bool

    @property
    def config(self) -> TrainConfig: ...

    def example(self, step: int, *, rank: int = 0, world: int = 1) -> Example:
        """The rows of `rank` in the batch of step `step`: the same whenever and wherever it is asked for."""

    def counts(self, example: Example) -> Tensor:
        """Labels that count, by depth; summed over ranks they are the `denominator` of each."""

    def loss(self, example: Example, lam: float, *, denominator: Tensor | None = None) -> Report:
        """denominator: what each depth's sum is divided by; left out, the example's own counts."""

    def figures(self, report: Report) -> dict[str, tuple[float, ...]]:
        """What a step tells, as fields of `StepRecord`."""

    def evaluate(self, step: int, *, last: bool = False) -> EvalRecord | HeadRecord:
        """Held-out figures after `step` steps; the last ones may cost more."""

    def stored(self) -> dict[str, Tensor]:
        """What the checkpoints of several processes hold, by name: `named`, and buffers."""

    def write(self, folder: Path, extra: Callable[[Path], None]) -> None:
        """Write a checkpoint's weights, whole or not at all; extra(folder) adds files before it gets its name."""

    def read(self, folder: Path) -> None:
        """Take the weights of a checkpoint. Raises CheckpointError for one that is damaged."""

    def write_result(self, folder: Path, source: Path) -> None:
        """Write what users get. source: the run that made it, for the record."""


class JointTask:
    """Trunk and head from scratch, or on from where they are: both train on the same text.

    depths = 0 trains the trunk alone. prompts: decoded at the end for the figures of real decoding, if this
    process is alone.
    """

    has_baseline, fingerprint = False, ""

    def __init__(
        self,
        model: Model,
        corpus: Corpus,
        config: TrainConfig,
        *,
        held_out: Corpus | None = None,
        prompts: Sequence[Sequence[int]] = (),
        ranks: Ranks = ALONE,
    ) -> None:
        ranks.check_batch(config.batch_size, parts=config.accumulate)
        if model.head is None and config.depths:
            raise ConfigError(f"depths = {config.depths}, but the model has no head; use depths = 0")
        self.model, self.config, self.prompts, self.ranks = model, config, prompts, ranks
        self.batches, self.held_out = dealt(corpus, held_out, model.trunk, config)
        self.weights = depth_weights(config.depths, beta=config.beta)
        prepare_layers(model, config)
        self.joined = join(model.trunk, model.head, ranks, dtype=getattr(torch, config.dtype))
        self.named = dict(_parameters(model))

    def example(self, step: int, *, rank: int = 0, world: int = 1) -> Example:
        return Example(self.batches.batch(step, rank=rank, world=world))

    def counts(self, example: Example) -> Tensor:
        return self._targets(example.batch).counts(self.config.depths)

    def loss(self, example: Example, lam: float, *, denominator: Tensor | None = None) -> LossReport:
        """The trunk's and the head's gradients both reach the trunk."""
        targets, depths = self._targets(example.batch), self.config.depths
        tokens, documents = targets.tokens, targets.documents
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
            hidden = self.model.trunk(tokens, documents=documents)
            hiddens = [hidden.normed]
            if depths and self.model.head is not None:
                hiddens += self.model.head.hiddens(tokens, hidden.eaten, depths, documents=documents)
        weights = outputs(self.model.trunk, self.model.head, depths)
        return mtp_loss(
            hiddens,
            weights,
            targets,
            lam=lam,
            depth_weights=self.weights,
            denominator="valid" if denominator is None else denominator,
        )

    def figures(self, report: Report) -> dict[str, tuple[float, ...]]:
        return {"loss": means(report.sums, report.counts)}

    def evaluate(self, step: int, *, last: bool = False) -> EvalRecord:
        # Eager: decoding has a new shape at every step, and each would be compiled.
        with torch.compiler.set_stance("force_eager"):
            return self.joined.look(lambda: self._figures(step, last))

    def _figures(self, step: int, last: bool) -> EvalRecord:
        depths, ranks = self.config.depths, self.ranks
        batches = held_out_batches(self.held_out, self.config, ranks)
        figures = forced(self.model, batches, depths, dtype=getattr(torch, self.config.dtype), total=ranks.total)
        # A sharded model does not decode: each token would gather all layers.
        if not (last and self.prompts and depths and ranks.is_alone):
            return EvalRecord(step, figures)
        return EvalRecord(step, figures, decoded(self.model, self.prompts, Settings(drafts=depths, max_tokens=96)))

    def stored(self) -> dict[str, Tensor]:
        return {**self.named, **dict(self.joined.named_buffers())}

    def write(self, folder: Path, extra: Callable[[Path], None]) -> None:
        self.model.save(folder, extra=extra)

    def read(self, folder: Path) -> None:
        stored = Model.load(folder)
        named = dict(_parameters(stored))
        with torch.no_grad():
            for name, value in self.named.items():
                value.copy_(like(named[name], value))
            _copy_buffers(stored, self.model)

    def write_result(self, folder: Path, source: Path) -> None:
        """The model in its published layout, with the record of which trunk its head was trained with."""
        record = partial(record_training, source=str(source))
        with whole(self.joined, self.ranks):
            if self.ranks.is_first:
                self.model.save(folder, extra=record if self.model.head is not None else None)

    def _targets(self, batch: Batch) -> Targets:
        device = self.model.trunk.device
        documents = batch.documents.to(device)
        return Targets(batch.tokens.to(device), documents, batch.counted.to(device))


def dealt(corpus: Corpus, held_out: Corpus | None, trunk: Trunk, config: TrainConfig) -> tuple[Batches, Batches]:
    """(what steps are made of, what evaluations are, in passes as large as those of training).

    held_out: None for the text that is trained on. Raises ConfigError for text that the model or the settings do not
    fit.
    """
    batches = partial(Batches, length=config.length, seed=config.seed, pack=trunk.can_pack)
    for text in (corpus, held_out or corpus):
        text.check_vocabulary(trunk.vocab_size)
    what = "the held-out text, 5 % of the data,"
    return (
        batches(corpus, batch_size=config.batch_size),
        batches(held_out or corpus, batch_size=config.rows_per_pass, what=what),
    )


def held_out_batches(held_out: Batches, config: TrainConfig, ranks: Ranks) -> Iterator[Batch]:
    """This process's rows of an evaluation."""
    passes = config.eval_batches * config.accumulate
    return (held_out.batch(index, rank=ranks.rank, world=ranks.world) for index in range(passes))


def added(reports: Sequence[Report]) -> Report:
    """The report of the parts of a batch together, without gradient."""
    first, *rest = map(_values, reports)
    return replace(cast(Any, reports[0]), **{name: sum((each[name] for each in rest), first[name]) for name in first})


def summed(report: Report, ranks: Ranks) -> Report:
    """The report of all processes' rows, without gradient; the totals of several are averaged, as gradients are."""
    if ranks.is_alone:
        return report
    parts = _values(report).items()
    whole = {name: ranks.total(value.double() if value.is_floating_point() else value) for name, value in parts}
    return replace(cast(Any, report), **whole | {"total": whole["total"] / ranks.world})


def _values(report: Report) -> dict[str, Tensor]:
    return {each.name: getattr(report, each.name).detach() for each in fields(cast(Any, report))}


def means(sums: Tensor, counts: Tensor) -> tuple[float, ...]:
    """Sums by depth over what was counted; 0 where nothing was."""
    return tuple((sums / counts.clamp_min(1)).tolist())


def prepare_layers(model: Model, config: TrainConfig) -> None:
    """Checkpoint and compile the decoder layers, as the settings say.

    Layer by layer: layers of one kind share a graph, which is compiled once; the head's block is such a layer.
    """
    blocks = model.head.layers if model.head is not None else []
    layers = [*model.trunk.decoder.layers, *blocks]
    if config.checkpoint_layers:
        checkpoint_layers(layers)
    if config.compile:
        attend_in_blocks(model.trunk.model, *blocks)
        for layer in layers:
            layer.compile()


def _parameters(model: Model) -> Iterator[tuple[str, nn.Parameter]]:
    for name, part in (("trunk", model.trunk.model), ("head", model.head)):
        if part is not None:
            yield from ((f"{name}.{key}", value) for key, value in part.named_parameters())


def _copy_buffers(source: Model, target: Model) -> None:
    for old, new in ((source.trunk.model, target.trunk.model), (source.head, target.head)):
        if old is not None and new is not None:
            for (_, value), (_, own) in zip(old.named_buffers(), new.named_buffers(), strict=True):
                own.copy_(value)
