"""The interface between training loop and model (`Task`), and the task that trains trunk and head jointly.

A task provides examples, losses, evaluations and the weights of a checkpoint. The training loop knows no model; a task
knows no optimizer and no run folder.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from nextn.checkpoint.provenance import record_training
from nextn.data.batches import Batch, Batches
from nextn.data.corpus import Corpus
from nextn.errors import ConfigError
from nextn.losses.mtp_loss import LossReport, Targets, depth_weights, mtp_loss
from nextn.model.lm_head_columns import lm_head_inputs, lm_head_weights
from nextn.model.model import Model
from nextn.model.trunk import Trunk, TrunkOutput
from nextn.settings import Settings
from nextn.train.config import TrainConfig
from nextn.train.cpu_attention import use_cpu_attention
from nextn.train.distributed import ALONE, JointModule, Ranks, shard, shard_like, unsharded
from nextn.train.evaluation import decoded_figures, teacher_forced_figures
from nextn.train.layer_inputs import checkpoint_layers
from nextn.train.metrics import EvalRecord, Evaluation, HeadRecord, OnEvaluation, unseen


@dataclass(frozen=True, eq=False)
class Example:
    """The input of one micro-batch."""

    batch: Batch
    hidden: TrunkOutput | None = None  # the trunk's states of the batch, if they are known already


class BatchLoss(Protocol):
    """The loss of a micro-batch; sums and counts add up over ranks and micro-batches."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    @property
    def total(self) -> Tensor:
        """The scalar to differentiate."""

    @property
    def sums(self) -> Tensor:
        """Summed loss by depth."""

    @property
    def counts(self) -> Tensor:
        """Labels by depth."""


class Task(Protocol):
    """What a `Trainer` trains."""

    ranks: Ranks
    joint_module: JointModule  # trunk and head, sharded over `ranks`
    fingerprint: str  # of the trunk that checkpoints belong to; empty if they contain it
    named: dict[str, nn.Parameter]  # parameters that are trained or stored; those without a gradient are not stepped
    has_baseline: bool  # whether to evaluate the initial weights, for comparison

    @property
    def config(self) -> TrainConfig: ...

    def example(self, step: int, *, rank: int = 0, world: int = 1) -> Example:
        """Return this rank's rows of the batch of a step, a pure function of its arguments."""

    def counts(self, example: Example) -> Tensor:
        """Return the labels by depth; summed over ranks they are the `denominator` of `loss`."""

    def loss(self, example: Example, lam: float, *, denominator: Tensor | None = None) -> BatchLoss:
        """Compute the loss; each depth's sum is divided by `denominator`, None = the example's own counts."""

    def figures(self, report: BatchLoss) -> dict[str, tuple[float, ...]]:
        """Return the figures of a step, as fields of `StepRecord`."""

    def evaluate(
        self, step: int, *, last: bool = False, on_evaluation: OnEvaluation = unseen
    ) -> EvalRecord | HeadRecord:
        """Evaluate on held-out text after `step` steps; the last evaluation may be more expensive."""

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors of a sharded checkpoint by name: `named`, and buffers."""

    def write(self, folder: Path, extra: Callable[[Path], None]) -> None:
        """Write a checkpoint's weights atomically; extra(folder) adds files before the folder gets its name."""

    def read(self, folder: Path) -> None:
        """Load the weights of a checkpoint. Raises CheckpointError for one that is damaged."""

    def write_result(self, folder: Path, source: Path) -> None:
        """Write the trained model. source: the run that made it, for the record."""


class JointTask:
    """Train trunk and head on the same text, from scratch or from their current weights.

    Args:
        model: Is trained in place.
        corpus: Text to train on.
        config: Settings; depths = 0 trains the trunk alone.
        held_out: Text to evaluate on; None: the corpus.
        prompts: Token ids that are decoded at the end, for figures of real decoding, if there is only one process.
        ranks: The processes that train together.

    Raises:
        ConfigError: The settings do not fit the model or the corpus.

    Example:
        >>> from pathlib import Path
        >>> model, text = nextn.load("tiny"), Path("text.py")
        >>> _ = text.write_text("def add(a, b):\\n    return a + b\\n" * 20)
        >>> corpus = nextn.Corpus.from_files([text], model.tokenizer)
        >>> config = nextn.TrainConfig(steps=1, batch_size=2, length=16, depths=2, dtype="float32")
        >>> task = nextn.JointTask(model, corpus, config)
        >>> task.loss(task.example(0), 0.3).counts.tolist()  # labels of the trunk and of two depths
        [30, 28, 26]
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
        model.trunk.check_losses()
        if model.head is None and config.depths:
            raise ConfigError(f"depths = {config.depths}, but the model has no head; use depths = 0")
        self.model, self.config, self.prompts, self.ranks = model, config, prompts, ranks
        self.batches, self.held_out = make_batches(corpus, held_out, model.trunk, config)
        self.weights = depth_weights(config.depths, beta=config.beta)
        prepare_layers(model, config)
        self.joint_module = shard(
            model.trunk, model.head, ranks, dtype=getattr(torch, config.dtype), deferred=model.deferred
        )
        self.named = dict(_parameters(model))

    def example(self, step: int, *, rank: int = 0, world: int = 1) -> Example:
        return Example(self.batches.batch(step, rank=rank, world=world))

    def counts(self, example: Example) -> Tensor:
        return self._targets(example.batch).counts(self.config.depths)

    def loss(self, example: Example, lam: float, *, denominator: Tensor | None = None) -> LossReport:
        """Compute the joint loss; the gradients of both trunk and head reach the trunk."""
        targets, depths = self._targets(example.batch), self.config.depths
        tokens, documents = targets.tokens, targets.documents
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
            hidden = self.model.trunk(tokens, documents=documents)
            hiddens = [hidden.final_hidden]
            if depths and self.model.head is not None:
                hiddens += self.model.head.teacher_forced_hidden(tokens, hidden.head_input, depths, documents=documents)
        return mtp_loss(
            lm_head_inputs(self.model.trunk, self.model.head, hiddens),
            lm_head_weights(self.model.trunk, self.model.head, depths),
            targets,
            lam=lam,
            depth_weights=self.weights,
            denominator="valid" if denominator is None else denominator,
        )

    def figures(self, report: BatchLoss) -> dict[str, tuple[float, ...]]:
        return {"loss": mean_per_depth(report.sums, report.counts)}

    def evaluate(self, step: int, *, last: bool = False, on_evaluation: OnEvaluation = unseen) -> EvalRecord:
        # Eager: decoding has a new shape at every step, and each would be compiled separately.
        with torch.compiler.set_stance("force_eager"):
            return self.joint_module.without_grad(lambda: self._evaluate(step, last, on_evaluation))

    def _evaluate(self, step: int, last: bool, on_evaluation: OnEvaluation) -> EvalRecord:
        depths, ranks = self.config.depths, self.ranks
        batches = held_out_batches(self.held_out, self.config, ranks, step=step, on_evaluation=on_evaluation)
        figures = teacher_forced_figures(
            self.model, batches, depths, dtype=getattr(torch, self.config.dtype), total=ranks.total
        )
        # A sharded model does not decode: each token would gather all layers.
        if not (last and self.prompts and depths and ranks.is_alone):
            return EvalRecord(step, figures)
        return EvalRecord(
            step,
            figures,
            decoded_figures(self.model, self.prompts, Settings(num_speculative_tokens=depths, max_tokens=96)),
        )

    def stored(self) -> dict[str, Tensor]:
        return {**self.named, **dict(self.joint_module.named_buffers())}

    def write(self, folder: Path, extra: Callable[[Path], None]) -> None:
        self.model.save(folder, extra=extra)

    def read(self, folder: Path) -> None:
        stored = Model.load(folder).dequantize()
        named = dict(_parameters(stored))
        with torch.no_grad():
            for name, value in self.named.items():
                value.copy_(shard_like(named[name], value))
            _copy_buffers(stored, self.model)

    def write_result(self, folder: Path, source: Path) -> None:
        """Write the model in its published layout, with the record of which trunk its head was trained with."""
        record = partial(record_training, source=str(source), trained_length=self.config.length)
        with unsharded(self.joint_module, self.ranks):
            if self.ranks.is_first:
                self.model.save(folder, extra=record if self.model.head is not None else None)

    def _targets(self, batch: Batch) -> Targets:
        device = self.model.trunk.device
        documents = batch.documents.to(device)
        return Targets(batch.tokens.to(device), documents, batch.label_mask.to(device))


def make_batches(corpus: Corpus, held_out: Corpus | None, trunk: Trunk, config: TrainConfig) -> tuple[Batches, Batches]:
    """Return the batches for training, and for evaluation (None: on the training text) in passes of the same size.

    Raises ConfigError for text that does not fit the model or the settings.
    """
    batches = partial(Batches, length=config.length, seed=config.seed, pack=trunk.can_pack)
    for text in (corpus, held_out or corpus):
        text.check_vocabulary(trunk.vocab_size)
    name = "the held-out text, 5 % of the data,"
    return (
        batches(corpus, batch_size=config.batch_size),
        batches(held_out or corpus, batch_size=config.rows_per_pass, name=name),
    )


def held_out_batches(
    held_out: Batches, config: TrainConfig, ranks: Ranks, *, step: int = 0, on_evaluation: OnEvaluation = unseen
) -> Iterator[Batch]:
    """Yield this process's rows of the batches of an evaluation after `step` steps."""
    passes = config.eval_batches * config.accumulate
    for index in range(passes):
        on_evaluation(Evaluation(step, index + 1, passes))
        yield held_out.batch(index, rank=ranks.rank, world=ranks.world)


def add_losses(reports: Sequence[BatchLoss]) -> BatchLoss:
    """Add up the reports of micro-batches, without gradient."""
    first, *rest = map(_values, reports)
    sums = {name: sum((values[name] for values in rest), first[name]) for name in first}
    return replace(reports[0], **sums)


def sum_over_ranks(report: BatchLoss, ranks: Ranks) -> BatchLoss:
    """Add up the reports of all processes, without gradient; their totals are averaged, as gradients are."""
    if ranks.is_alone:
        return report
    values = _values(report).items()
    sums = {name: ranks.total(value.double() if value.is_floating_point() else value) for name, value in values}
    return replace(report, **sums | {"total": sums["total"] / ranks.world})


def _values(report: BatchLoss) -> dict[str, Tensor]:
    return {field.name: getattr(report, field.name).detach() for field in fields(report)}


def mean_per_depth(sums: Tensor, counts: Tensor) -> tuple[float, ...]:
    """Divide sums by counts, [K] each; 0 for a depth without labels."""
    return tuple((sums / counts.clamp_min(1)).tolist())


def prepare_layers(model: Model, config: TrainConfig) -> None:
    """Apply activation checkpointing and torch.compile to the decoder layers, as the settings say, and fast attention.

    Layer by layer, because layers of one type, including the head's block, share a graph that is compiled once.
    """
    blocks = model.head.layers if model.head is not None else []
    layers = [*model.trunk.decoder.layers, *blocks]
    if config.checkpoint_layers:
        checkpoint_layers(layers)
    if model.trunk.device.type == "cpu" and config.dtype == "bfloat16":
        use_cpu_attention(model.trunk.model, *blocks)
    if config.compile:
        for layer in layers:
            layer.compile()


def _parameters(model: Model) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in (("trunk", model.trunk.model), ("head", model.head)):
        if module is not None:
            yield from ((f"{prefix}.{name}", value) for name, value in module.named_parameters())


def _copy_buffers(source: Model, target: Model) -> None:
    for old, new in ((source.trunk.model, target.trunk.model), (source.head, target.head)):
        if old is not None and new is not None:
            for (_, value), (_, own) in zip(old.named_buffers(), new.named_buffers(), strict=True):
                own.copy_(value)
