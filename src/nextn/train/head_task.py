"""The task of training a head on a frozen trunk, and the files that it writes.

A head is written alone, or together with its trunk's files, which are not changed.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import trunk_fingerprint, trunk_identity
from nextn.checkpoint.safetensors_file import write_tensors
from nextn.checkpoint.staging_folder import atomic_folder
from nextn.data.batches import Batch
from nextn.data.corpus import Corpus
from nextn.errors import CheckpointError, ConfigError
from nextn.family_table import REPEATED_FIELD
from nextn.losses.distillation import HeadLoss, head_loss
from nextn.losses.divergences import SampledVocabulary, Teacher
from nextn.losses.mtp_loss import Targets, depth_weights
from nextn.model.deferred_init import DeferredInit
from nextn.model.head import Head
from nextn.model.layer_states import LayerProgress
from nextn.model.lm_head_columns import lm_head_inputs, lm_head_weights
from nextn.model.model import Model
from nextn.model.shared_kv_head import SharedKVHead
from nextn.model.streamed_trunk import StreamedTrunk
from nextn.model.trunk import TrunkOutput
from nextn.speculative.draft_vocabulary import DraftVocabulary
from nextn.train.config import HeadConfig, frozen_parameters
from nextn.train.distributed import ALONE, Ranks, shard, unsharded
from nextn.train.evaluation import HeldOutAcceptance, heldout_acceptance
from nextn.train.head_files import HEAD_FILE, write_standalone_head, write_with_trunk
from nextn.train.hidden_cache import HiddenStateCache
from nextn.train.joint_task import BatchLoss, Example, held_out_batches, make_batches, mean_per_depth, prepare_layers
from nextn.train.metrics import HeadRecord, OnEvaluation, Record, StepRecord, unseen

MAX_CURVE_DEPTHS = 8


class HeadTask:
    """Trains a head to match its trunk's output distribution, and evaluates its held-out acceptance.

    The trunk stays in its dtype, in eval mode and without gradients. The head's parameters are fp32 while they train,
    and are cast back to their stored dtype in the result. Without `held_out`, the training text is evaluated.
    `has_baseline`: the head was trained before, and the result is compared with it. `on_policy`: the labels were
    sampled from this trunk at the config's temperature.
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
        on_policy: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        ranks.check_batch(config.batch_size, parts=config.accumulate)
        self.head = _check(model, config)
        if config.kv == "first":
            model.family = replace(model.family, repeated_kv="first")
            self.head.set_family(model.family)
        self.model, self.config, self.origin, self.on_policy = model, config, origin, on_policy
        self.has_baseline, self.ranks = has_baseline, ranks
        self.batches, self.held_out = make_batches(corpus, held_out, model.trunk, config)
        self.cache: HiddenStateCache | None = None
        self.fingerprint = trunk_fingerprint(origin)
        self.frequent = _frequent(corpus, config, model.trunk.vocab_size)
        deferred = None if ranks.is_alone else _deferred(model, self.head)
        with deferred or nullcontext():
            self.stored_dtype = freeze(model.trunk.model, self.head)
        for name in frozen_parameters((name for name, _ in self.head.named_parameters()), config.trained_parts):
            self.head.get_parameter(name).requires_grad_(False)
        self.weights = depth_weights(config.depths, beta=config.beta)
        prepare_layers(model, config)
        dtype: torch.dtype = getattr(torch, config.dtype)
        self.joint_module = shard(model.trunk, self.head, ranks, dtype=dtype, deferred=deferred)
        self.named = {f"head.{name}": value for name, value in self.head.named_parameters()}

    def cached(self, folder: Path, limit_gb: float | None = None) -> HiddenStateCache:
        """Cache the trunk's hidden states of an epoch (or all steps, if fewer), of at most `limit_gb` 1e9 bytes.

        The returned cache must be filled before training. Raises ConfigError if the folder has states of another trunk
        or text, or if a file of the trunk was modified since.
        """
        epoch = -(-self.batches.rows_per_epoch // self.config.batch_size)
        trunk = self.model.trunk
        self.cache = HiddenStateCache(
            trunk,
            self.batches,
            epoch if self.config.minutes else min(epoch, self.config.steps),
            folder,
            autocast=self._trunk_autocast,
            compute=self._compute_states,
            owner=trunk_identity(self.origin),
            limit_gb=limit_gb,
        )
        return self.cache

    def stream_trunk(self, folder: Path, cache: HiddenStateCache, on_layer: Callable[[LayerProgress], None]) -> None:
        """Run a streamed trunk once over all texts of the cache and of evaluations, which then do not need it.

        The first of several processes runs it, and the others then read the states from the folder, which must exist as
        long as this process trains (see `StreamedTrunk.read_layers`).
        """
        trunk, rows = self.model.trunk, self.config.rows_per_pass
        assert isinstance(trunk, StreamedTrunk)
        batches = [cache.batches.batch(index) for index in range(cache.num_batches)]
        pairs = [
            pair for each in batches for pair in zip(each.tokens.split(rows), each.documents.split(rows), strict=True)
        ]
        pairs += [(each.tokens, each.documents) for each in held_out_batches(self.held_out, self.config, ALONE)]
        tokens, documents = zip(*pairs, strict=True)
        with self._autocast(enabled=self._trunk_autocast):
            read = partial(trunk.read_layers, tokens, documents=documents, folder=folder, on_layer=on_layer)
            self.ranks.one_by_one(read)

    def example(self, step: int, *, rank: int = 0, world: int = 1) -> Example:
        if self.cache is not None:
            return Example(*self.cache.batch(step, rank=rank, world=world))
        return Example(self.batches.batch(step, rank=rank, world=world))

    def counts(self, example: Example) -> Tensor:
        return self._targets(example.batch).counts(self.config.depths)[1:]

    def loss(self, example: Example, lam: float, *, denominator: Tensor | None = None) -> HeadLoss:
        """Return the config's objective over depths 1..K, against the trunk's output distribution, times lam."""
        trunk, config, targets = self.model.trunk, self.config, self._targets(example.batch)
        hidden = self.hidden(example)
        run = self.head.teacher_forced_hidden if config.kv == "own" else self.head.rollout_hidden
        with self._autocast():
            hiddens = run(targets.tokens, hidden.head_input, config.depths, documents=targets.documents)
        states = lm_head_inputs(trunk, self.head, [hidden.final_hidden, *hiddens])
        lm_heads = lm_head_weights(trunk, self.head, config.depths)
        if self.frequent is not None:
            size, num_others = trunk.vocab_size, len(self.frequent) // 3
            part = SampledVocabulary.of(targets.tokens, self.frequent, num_others, vocab_size=size, seed=config.seed)
            states, lm_heads = part.inputs(states), part.weights(lm_heads, config.temperature)
            targets = part.targets(targets)
        cap = None if "output" in self.head.family.own else trunk.logit_cap
        final, *hiddens = states
        weight, *weights = lm_heads
        return head_loss(
            hiddens,
            weights,
            Teacher(final, weight, config.temperature, trunk.logit_cap, cap),
            targets,
            objective=config.objective,
            depth_weights=self.weights,
            denominator="valid" if denominator is None else denominator,
            scale=lam,
        )

    def hidden(self, example: Example) -> TrunkOutput:
        """Return the trunk's states of a batch, from the cache if there is one."""
        if example.hidden is not None:
            return example.hidden
        targets = self._targets(example.batch)
        with torch.no_grad(), self._autocast(enabled=self._trunk_autocast):
            return self.model.trunk(targets.tokens, documents=targets.documents)

    def _compute_states(self, batch: Batch) -> TrunkOutput:
        """Compute the trunk's states of a global batch, in passes of the size that this process trains with."""
        if isinstance(self.model.trunk, StreamedTrunk):  # it has read them, and needs no other process
            return self.hidden(Example(batch))
        rows = self.config.rows_per_pass // self.ranks.world
        pairs = zip(batch.tokens.split(rows), batch.documents.split(rows), strict=True)
        parts = [self.joint_module.without_grad(partial(self.hidden, Example(Batch(*pair)))) for pair in pairs]
        names = "final_hidden", "head_input"
        return TrunkOutput(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def figures(self, report: BatchLoss) -> dict[str, tuple[float, ...]]:
        assert isinstance(report, HeadLoss)
        sums = {"loss": report.sums, "match": report.match, "overlap": report.overlap}
        return {name: mean_per_depth(values, report.counts) for name, values in sums.items()}

    def note(self, record: Record) -> str | None:
        """Return a note if the loss of the first step is above that of guessing among all tokens."""
        if not isinstance(record, StepRecord) or record.step > 1 or self.config.objective not in ("ce", "kl"):
            return None
        loss, guess = record.loss[0], math.log(self.model.trunk.vocab_size)
        if loss <= guess:
            return None
        return (
            f"the loss of step 1 is {loss:.2f} nats, above the {guess:.2f} nats of guessing: the initial values of the "
            "head do not fit this trunk, and the first steps only undo that"
        )

    def evaluate(self, step: int, *, last: bool = False, on_evaluation: OnEvaluation = unseen) -> HeadRecord:
        """Measure held-out acceptance at the config's number of depths."""
        # Eager: each new shape would be compiled separately.
        with torch.compiler.set_stance("force_eager"):
            examples = self._held_out_examples(step, on_evaluation)
            evaluate = partial(self._heldout_acceptance, self.config.eval_depths or self.config.depths, examples)
            return HeadRecord(step, self.joint_module.without_grad(evaluate))

    def curve(
        self, max_depths: int = MAX_CURVE_DEPTHS, *, on_point: Callable[[], None] = lambda: None
    ) -> list[HeldOutAcceptance]:
        """Measure held-out acceptance with 1, 2, ..., `max_depths` drafts, fewer if rows are shorter, on all ranks."""

        def measured() -> Iterator[HeldOutAcceptance]:
            examples = [*self._held_out_examples(0, unseen)]  # the trunk's states, once for all
            for count in range(1, min(max_depths, self.config.length - 1) + 1):
                yield self._heldout_acceptance(count, examples)
                on_point()

        with torch.compiler.set_stance("force_eager"):
            return self.joint_module.without_grad(lambda: [*measured()])

    def _held_out_examples(self, step: int, on_evaluation: OnEvaluation) -> Iterator[tuple[Batch, TrunkOutput]]:
        batches = held_out_batches(self.held_out, self.config, self.ranks, step=step, on_evaluation=on_evaluation)
        return ((batch, self.hidden(Example(batch))) for batch in batches)

    def _heldout_acceptance(self, depths: int, examples: Iterable[tuple[Batch, TrunkOutput]]) -> HeldOutAcceptance:
        config = self.config
        return heldout_acceptance(
            self.model.trunk,
            self.head,
            examples,
            depths,
            temperature=config.temperature,
            on_policy=self.on_policy,
            dtype=getattr(torch, config.dtype),
            ranks=self.ranks,
        )

    def stored(self) -> dict[str, Tensor]:
        return {**self.named, **{f"head.{name}": value for name, value in self.head.named_buffers()}}

    def write(self, folder: Path, extra: Callable[[Path], None]) -> None:
        """Write the head alone, in fp32, and the fingerprint of its trunk."""
        with atomic_folder(folder) as stage:
            tensors = {name: value.contiguous() for name, value in self.head.state_dict().items()}
            write_tensors(stage / HEAD_FILE, tensors, {"trunk": self.fingerprint})
            extra(stage)

    def read(self, folder: Path) -> None:
        """Load the head. Raises CheckpointError for a head of another trunk, or of another shape."""
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
                "start again in another folder"
            )

    def write_result(self, folder: Path, source: Path) -> None:
        """Write the trunk's own files with this head, in the family's published layout."""
        self._write_unsharded(write_with_trunk, folder, source)

    def write_head(self, file: Path, source: Path) -> None:
        """Write the head alone, as a base for `restore`."""
        self._write_unsharded(write_standalone_head, file, source)

    def _write_unsharded(self, write: Callable[..., None], path: Path, source: Path) -> None:
        record = {"source": str(source), "trained_length": self.config.length}
        with unsharded(self.head, self.ranks):
            if self.ranks.is_first:
                write(self.origin, self.head, path, dtype=self.stored_dtype, **record)

    def _targets(self, batch: Batch) -> Targets:
        device = self.model.trunk.device
        return Targets(batch.tokens.to(device), batch.documents.to(device), batch.label_mask.to(device))

    @property
    def _trunk_autocast(self) -> bool:
        """Whether the trunk runs under autocast; a trunk in half precision runs without, as in decoding."""
        return self.config.dtype == "bfloat16" and self.model.trunk.dtype == torch.float32

    def _autocast(self, *, enabled: bool = True) -> torch.autocast:
        enabled = enabled and self.config.dtype == "bfloat16"
        return torch.autocast(self.model.trunk.device.type, torch.bfloat16, enabled=enabled)


def freeze(trunk: torch.nn.Module, head: Head) -> torch.dtype:
    """Freeze the trunk, cast the head to fp32, and return the dtype that the head had.

    Both are put in eval mode: dropout would use the global random state.
    """
    trunk.requires_grad_(False).eval()
    stored = next(value.dtype for value in head.parameters() if value.ndim > 1)
    head.float().eval()
    for value in head.parameters():  # also deferred ones, which `head.float()` skips
        value.data = value.data.float()
    return stored


def _frequent(corpus: Corpus, config: HeadConfig, vocab_size: int) -> Tensor | None:
    """Return the most frequent tokens, over which every step computes the loss; None: the whole vocabulary."""
    if not config.loss_vocab or config.loss_vocab >= vocab_size:
        return None
    return DraftVocabulary.of([corpus.ids], max(1, config.loss_vocab * 3 // 4), vocab_size=vocab_size).ids


def _deferred(model: Model, head: Head) -> DeferredInit:
    """Defer the initialization of the head: parameters are computed and cast one at a time, when they are sharded."""
    if model.deferred is None:
        model.deferred = DeferredInit()
        model.deferred.defer(head)
    return model.deferred


def _check(model: Model, config: HeadConfig) -> Head:
    head, limit = model.head, model.trunk.max_length
    if head is None:
        raise ConfigError("the model has no head to train; --init-head makes one")
    if limit is not None and config.length > limit:
        raise ConfigError(f"length = {config.length}; the trunk was made for {limit} tokens at most")
    if config.loss_vocab and model.trunk.logit_cap is not None:
        raise ConfigError(f"loss_vocab = {config.loss_vocab}: this trunk caps its logits, so use 0, all tokens")
    if config.kv != "own" and not head.can_rollout:
        words = "this head has other per-position state than keys and values"
        raise ConfigError(f"kv = {config.kv!r}: {words}; use kv = 'own'")
    if config.kv != "first" and head.family.repeated_kv == "first":
        raise ConfigError(
            f"kv = {config.kv!r}: this head shares the keys of its first run over the depths; use kv = 'first', or "
            f"take {REPEATED_FIELD} out of config.json to train it with its own keys"
        )
    if config.kv == "first" and isinstance(head, SharedKVHead):
        raise ConfigError("kv = 'first': all depths of this head read the trunk's keys already; use kv = 'own'")
    return head
