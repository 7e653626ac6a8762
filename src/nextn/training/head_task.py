"""A head trained on a frozen trunk: the trunk is read and never changed, and the head alone has gradients."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nextn.checkpoints.inventory import Inventory
from nextn.checkpoints.provenance import trunk_fingerprint
from nextn.checkpoints.stages import atomic_folder
from nextn.corpus.batches import Batch
from nextn.corpus.data import Corpus
from nextn.distributed.parallel import ALONE, Ranks
from nextn.distributed.sharding import join, whole
from nextn.errors import CheckpointError, ConfigError
from nextn.head import Head, outputs
from nextn.losses.loss import Targets, depth_weights
from nextn.losses.objectives import HeadLoss, Teacher, head_loss
from nextn.model import Model
from nextn.training.head_files import HEAD_FILE, write_alone, write_beside_trunk
from nextn.training.hidden_cache import HiddenCache
from nextn.training.metrics import HeadRecord
from nextn.training.tasks import Example, Report, dealt, held_out_batches, means, prepare_layers
from nextn.training.telemetry import Foreseen, foreseen
from nextn.training.train_config import HeadConfig
from nextn.trunk import Hidden


class HeadTask:
    """model: trunk and head. The trunk stays in its dtype, in eval mode and without gradients; the head's parameters
    are fp32 while they train, and cast to what they were when the result is written.

    origin: the checkpoint that the trunk was loaded from. held_out: text for the figures, None for that which is
    trained on. has_baseline: whether the head was one before, to be compared with. drawn: whether the answers in the
    texts were drawn from this trunk at the config's temperature.
    """

    def __init__(
        self,
        model: Model,
        corpus: Corpus,
        config: HeadConfig,
        *,
        origin: Inventory,
        held_out: Corpus | None = None,
        has_baseline: bool = True,
        drawn: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        ranks.check_batch(config.batch_size, parts=config.accumulate)
        self.head = _checked(model, config)
        self.model, self.config, self.origin, self.drawn = model, config, origin, drawn
        self.has_baseline, self.ranks = has_baseline, ranks
        self.batches, self.held_out = dealt(corpus, held_out, model.trunk, config)
        self.cache: HiddenCache | None = None
        self.fingerprint = trunk_fingerprint(origin)
        self.stored_dtype = freeze(model.trunk.model, self.head)
        self.weights = depth_weights(config.depths, beta=config.beta)
        prepare_layers(model, config)
        self.joined = join(model.trunk, self.head, ranks, dtype=getattr(torch, config.dtype))
        self.named = {f"head.{name}": value for name, value in self.head.named_parameters()}

    def cached(self, folder: Path, limit_gb: float | None = None) -> HiddenCache:
        """Take the trunk's states from `folder` from now on, once it is filled: an epoch of them, or all steps'.

        limit_gb: the most that they may take, in 1e9 bytes. Raises ConfigError for a folder of other states.
        """
        epoch = -(-self.batches.num_windows // self.config.batch_size)
        trunk = self.model.trunk
        self.cache = HiddenCache(
            trunk,
            self.batches,
            min(epoch, self.config.steps),
            folder,
            autocast=self._reads_autocast,
            read=self._states,
            owner=self.fingerprint,
            limit_gb=limit_gb,
        )
        return self.cache

    def example(self, step: int, *, rank: int = 0, world: int = 1) -> Example:
        if self.cache is not None:
            return Example(*self.cache.batch(step, rank=rank, world=world))
        return Example(self.batches.batch(step, rank=rank, world=world))

    def counts(self, example: Example) -> Tensor:
        return self._targets(example.batch).counts(self.config.depths)[1:]

    def loss(self, example: Example, lam: float, *, denominator: Tensor | None = None) -> HeadLoss:
        """The objective of the config against the trunk's law, depths 1..K; lam multiplies it."""
        trunk, config, targets = self.model.trunk, self.config, self._targets(example.batch)
        hidden = self.hidden(example)
        read = self.head.unrolled if config.kv == "decode" else self.head.hiddens
        with self._autocast():
            hiddens = read(targets.tokens, hidden.eaten, config.depths, documents=targets.documents)
        return head_loss(
            hiddens,
            outputs(trunk, self.head, config.depths)[1:],
            Teacher(hidden.normed, trunk.readout, config.temperature),
            targets,
            objective=config.objective,
            depth_weights=self.weights,
            denominator="valid" if denominator is None else denominator,
            scale=lam,
        )

    def hidden(self, example: Example) -> Hidden:
        """The trunk's states of a batch: those that are known, else read from the text."""
        if example.hidden is not None:
            return example.hidden
        targets = self._targets(example.batch)
        with torch.no_grad(), self._autocast(enabled=self._reads_autocast):
            return self.model.trunk(targets.tokens, documents=targets.documents)

    def _states(self, batch: Batch) -> Hidden:
        """The trunk's states of a whole batch, in passes as large as this process's in training."""
        rows = self.config.rows_per_pass // self.ranks.world
        pairs = zip(batch.tokens.split(rows), batch.documents.split(rows), strict=True)
        made = [self.joined.look(partial(self.hidden, Example(Batch(*pair)))) for pair in pairs]
        return Hidden(*(torch.cat([getattr(each, name) for each in made]) for name in ("normed", "eaten")))

    def figures(self, report: Report) -> dict[str, tuple[float, ...]]:
        assert isinstance(report, HeadLoss)
        parts = {"loss": report.sums, "match": report.match, "overlap": report.overlap}
        return {name: means(sums, report.counts) for name, sums in parts.items()}

    def evaluate(self, step: int, *, last: bool = False) -> HeadRecord:
        """Held-out figures by `telemetry.DEFINITION`, as deep as the config says."""
        # Eager: a pass of another shape would be compiled for itself.
        with torch.compiler.set_stance("force_eager"):
            return HeadRecord(step, self.joined.look(partial(self._foreseen, self.config.measured)))

    def curve(self, most: int = 8) -> list[Foreseen]:
        """Held-out figures of 1, 2, ..., `most` drafts a round, fewer where rows are shorter. All processes call it."""
        depths = range(1, min(most, self.config.length - 1) + 1)
        with torch.compiler.set_stance("force_eager"):
            return [self.joined.look(partial(self._foreseen, count)) for count in depths]

    def _foreseen(self, depths: int) -> Foreseen:
        ranks, config = self.ranks, self.config
        batches = held_out_batches(self.held_out, config, ranks)
        return foreseen(
            self.model.trunk,
            self.head,
            ((batch, self.hidden(Example(batch))) for batch in batches),
            depths,
            temperature=config.temperature,
            drawn=self.drawn,
            dtype=getattr(torch, config.dtype),
            ranks=ranks,
        )

    def stored(self) -> dict[str, Tensor]:
        return {**self.named, **{f"head.{name}": value for name, value in self.head.named_buffers()}}

    def write(self, folder: Path, extra: Callable[[Path], None]) -> None:
        """The head alone, in fp32, and which trunk it belongs to."""
        with atomic_folder(folder) as stage:
            tensors = {name: value.contiguous() for name, value in self.head.state_dict().items()}
            save_file(tensors, stage / HEAD_FILE, metadata={"trunk": self.fingerprint})
            extra(stage)

    def read(self, folder: Path) -> None:
        """Raises CheckpointError for a head of another trunk, or of another shape."""
        try:
            with safe_open(folder / HEAD_FILE, framework="pt") as file:
                trunk = (file.metadata() or {}).get("trunk")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if trunk == self.fingerprint:
                self.head.load_state_dict(tensors)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"{folder}: its head cannot be read: {error}") from error
        if trunk != self.fingerprint:
            raise CheckpointError(
                f"{folder}: trained on another trunk than {self.origin.checkpoint.path}; give the same --from, or "
                "start anew in another folder"
            )

    def write_result(self, folder: Path, source: Path) -> None:
        """The trunk's own files with this head, in the family's published layout."""
        with whole(self.head, self.ranks):
            if self.ranks.is_first:
                write_beside_trunk(self.origin, self.head, folder, dtype=self.stored_dtype, source=str(source))

    def write_head(self, file: Path, source: Path) -> None:
        """The head alone, as a base for `restore`."""
        with whole(self.head, self.ranks):
            if self.ranks.is_first:
                write_alone(self.origin, self.head, file, dtype=self.stored_dtype, source=str(source))

    def _targets(self, batch: Batch) -> Targets:
        device = self.model.trunk.device
        return Targets(batch.tokens.to(device), batch.documents.to(device), batch.counted.to(device))

    @property
    def _reads_autocast(self) -> bool:
        """A trunk in half precision is read as decoding reads it, without autocast."""
        return self.config.dtype == "bfloat16" and self.model.trunk.dtype == torch.float32

    def _autocast(self, *, enabled: bool = True) -> torch.autocast:
        enabled = enabled and self.config.dtype == "bfloat16"
        return torch.autocast(self.model.trunk.device.type, torch.bfloat16, enabled=enabled)


def freeze(trunk: torch.nn.Module, head: Head) -> torch.dtype:
    """Make the trunk a constant and the head's parameters fp32 -> the dtype that the head had.

    Both are put in eval mode: dropout would draw from a global random state.
    """
    trunk.requires_grad_(False).eval()
    stored = next(value.dtype for value in head.parameters() if value.ndim > 1)
    head.float().eval()
    return stored


def _checked(model: Model, config: HeadConfig) -> Head:
    head, limit = model.head, model.trunk.max_length
    if head is None:
        raise ConfigError("the model has no head to train; --init-head makes one")
    if limit is not None and config.length > limit:
        raise ConfigError(f"length = {config.length}; the trunk was made for {limit} tokens at most")
    if config.kv == "decode" and not head.can_unroll:
        raise ConfigError("kv = 'decode': this head keeps more between columns than keys and values; use kv = 'own'")
    return head
