"""Cotrain a head with a fine-tune: `train_head(trainer)` adds it to a transformers Trainer or a subclass (TRL).

A few methods of the Trainer are wrapped: loss, optimizer, batches of a step, logs, saving, resuming. The trunk runs
once per batch; its hidden states are captured during its forward pass. The head is saved and loaded with the model.
"""

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from nextn.checkpoint.checkpoint import CONFIG
from nextn.checkpoint.provenance import GENERIC, record_training
from nextn.checkpoint.safetensors_file import write_tensors
from nextn.edit.plan import EditPlan
from nextn.edit.restore import restore
from nextn.edit.save_hook import remove_unlisted_heads, save_with, without_adapters
from nextn.errors import ConfigError, require_type
from nextn.model.head import Head
from nextn.model.model import live_trunk, load_head
from nextn.model.trunk import Trunk
from nextn.text_format import some
from nextn.train.cotrain import CotrainLoss, DetachedTrunk, HeadSettings, RunningFigures, model_inputs, targets_of
from nextn.train.head_files import write_head
from nextn.train.init_head import init_head
from nextn.train.layer_inputs import checkpoint_layers

# Sample of the training data on which the trunk's residual stream is measured.
_ROWS, _TOKENS = 8, 256
FOLDER = "head"
# In a folder of their own: next to adapters, a config.json would make transformers load them as a model.
_FILE, _STATE = Path(FOLDER, "head.safetensors"), Path(FOLDER, "training.safetensors")
_MEASURED_EVERY = 10  # steps, if it is not known in advance at which steps the Trainer logs


def train_head(trainer: Trainer, source: str | Path | None = None, settings: HeadSettings | None = None) -> Head:
    """Make `trainer` also train, log, save and resume a head of its model.

    The head's parameters are fp32 and a param group of the Trainer's optimizer; their gradient is clipped separately.
    The Trainer's `loss` stays the model's own.

    Args:
        trainer: The Trainer of the fine-tune.
        source: The checkpoint with the head, a folder, file or hub id; None = the one that the model was loaded from.
        settings: How the head trains.

    Returns:
        The head.

    Raises:
        ConfigError: A head cannot be trained in this Trainer.
        CheckpointError: `source` has no complete head.

    Example:
        >>> from transformers import Trainer, TrainingArguments
        >>> model = nextn.load("tiny").trunk.model  # a transformers model
        >>> data = [{"input_ids": [*range(16)], "labels": [*range(16)]}] * 2
        >>> settings = TrainingArguments("run", max_steps=1, report_to=[], save_strategy="no", disable_tqdm=True)
        >>> trainer = Trainer(model, settings, train_dataset=data)
        >>> head = nextn.train_head(trainer, "tiny", nextn.HeadSettings(depths=2))
        >>> trainer.train().global_step
        {'train_runtime': ...}
        1
    """
    settings = settings or HeadSettings()
    require_type("trainer", trainer, Trainer, "a transformers Trainer or a subclass of it, such as TRL's")
    require_type("settings", settings, HeadSettings, "nextn.HeadSettings(...)")
    _check_supported(trainer)
    model = without_adapters(trainer.model)
    trunk_class = Trunk if settings.joint else DetachedTrunk
    with torch.random.fork_rng():
        torch.manual_seed(trainer.args.seed)  # so that a fresh head is the same on every rank
        if settings.num_modules:
            family, trunk = live_trunk(model, trunk_class=trunk_class)
            tokens = _sample_tokens(trainer)[:, : trunk.max_length].to(trunk.device)
            head, notes = init_head(family, trunk, tokens, num_modules=settings.num_modules)
            for note in notes:
                warnings.warn(note, stacklevel=2)
        else:
            head = load_head(_source(model, source), model, trunk_class=trunk_class)
    head.float().to(trainer.args.device)
    if trainer.args.gradient_checkpointing:
        checkpoint_layers(head.layers)
    saved_head = CotrainedHead(head, made_by=type(trainer).__name__)
    # Make `save_pretrained` write the head: into a model's checkpoint, or into `head/` next to adapters.
    base = without_adapters(trainer.model)
    save_with(base, saved_head)
    if trainer.model is not base:
        trainer.model.save_pretrained = partial(_save_adapters, trainer.model.save_pretrained, saved_head)
    _Hook(trainer, CotrainLoss(head, settings, partial(_autocast, trainer, head.trunk)), saved_head).attach()
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
            self.write(Path(temporary, _FILE))
            yield Path(temporary, _FILE)

    def seal(self, folder: Path) -> None:
        """Record in a saved checkpoint what trained its head."""
        record_training(folder, source=self.made_by, trained_length=self.head.trained_length)

    def write(self, file: Path) -> None:
        """Write the head alone and its config.json, a base for `restore`."""
        head = self.head
        config = head.family.with_count(head.trunk.model.config.to_dict(), head.num_modules)
        metadata = {"source": self.made_by, "trained_length": str(head.trained_length or "")}
        write_head(head, file, config, dtype=head.trunk.dtype, metadata=metadata)

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


def save_head(
    head: Head, folder: str | Path, *, source: str = "a training loop", trained_length: int | None = None
) -> EditPlan | None:
    """Write a head that was trained in memory into the folder of its saved trunk, or alone into a file.

    Call it in one process; for a folder, after `model.save_pretrained(folder)`. A head that is there is replaced.

    Args:
        head: The head, of `load_head` or `new_head`.
        folder: A checkpoint folder with the trunk as it is now, which gets a record of the training; or a file name
            that ends in .safetensors, for `nextn.load(..., head=...)` and `--head`. A config.json is written beside it.
        source: What trained the head, for nextn.json, by which `audit` later sees whether the trunk has changed.
        trained_length: Tokens of the longest text in training, for nextn.json: decoding prints a note beyond them.
            Default: of those that `CotrainLoss` was given; unknown in a loop without it.

    Returns:
        What was written into the folder; None for a file.

    Raises:
        CheckpointError: The folder has no trunk, or one that the head does not fit.
        ConfigError: A value is not of its kind.

    Example:
        >>> model = nextn.load("tiny")
        >>> model.trunk.model.save_pretrained("saved")
        >>> nextn.save_head(model.head, "saved").num_bytes > 0
        True
        >>> nextn.save_head(model.head, "alone/head.safetensors")
        >>> nextn.load("tiny", head="alone/head.safetensors").head.num_modules
        1
    """
    require_type("head", head, Head, "what nextn.load_head or nextn.train_head returns")
    if trained_length is not None and not (type(trained_length) is int and trained_length > 0):
        raise ConfigError(f"trained_length = {trained_length!r}; expected a number of tokens, or None")
    head.trained_length = trained_length or head.trained_length
    saved = CotrainedHead(head, made_by=source)
    if Path(folder).suffix == ".safetensors":
        _check_place(Path(folder))
        saved.write(Path(folder))
        return None
    if not Path(folder).is_dir():
        raise ConfigError(
            f"{folder}: no such folder; save the trunk there first (`model.save_pretrained`), or give a file name "
            "that ends in .safetensors to save the head alone"
        )
    with saved.open_base(Path(folder)) as base:
        family = GENERIC if head.family.name == GENERIC else None
        plan = restore(folder, base, force=True, follow_links=True, family=family)
    remove_unlisted_heads(Path(folder))
    saved.seal(Path(folder))
    return plan


def _check_place(file: Path) -> None:
    """Refuse to write a head alone over other weights, or its config.json over another model's."""
    others = [each.name for each in file.parent.glob("*.safetensors*") if each != file]
    if file.exists():
        try:
            with safe_open(file, "pt") as opened:
                is_head = "family" in (opened.metadata() or {})
        except SafetensorError:
            is_head = False
    else:
        is_head = not file.with_name(CONFIG).exists()
    if others or not is_head:
        raise ConfigError(
            f"{file}: its folder has another model ({some(others or [CONFIG])}), whose files would be replaced; give a "
            "folder of its own for the head, such as head/head.safetensors"
        )


def _save_adapters(
    save: Callable[..., None], head: CotrainedHead, save_directory: str, *args: object, **kwargs: object
) -> None:
    """Replaces the `save_pretrained` of a PEFT wrapper."""
    save(save_directory, *args, **kwargs)
    if kwargs.get("is_main_process", True):
        head.write(Path(save_directory, _FILE))


_Samples = tuple[Sequence[Mapping[str, object]], object]  # of a step, and the number of their labels


class _Hook(TrainerCallback):
    """Wrappers of the Trainer's methods, each of which calls the original as `inner`; and what a step begins with."""

    def __init__(self, trainer: Trainer, cotrain: CotrainLoss, saved_head: CotrainedHead) -> None:
        self.trainer, self.cotrain, self.saved_head, self.head = trainer, cotrain, saved_head, cotrain.head
        depths, device = cotrain.settings.depths, trainer.args.device
        # Labels of the current step [depths]; None: unknown, as the Trainer makes the texts in the step (GRPO).
        self.denominator: Tensor | None = torch.ones(depths, device=device)
        self.figures = {kind: RunningFigures(depths, device) for kind in ("train", "eval")}
        self.grad_norm: Tensor | None = None

    def attach(self) -> None:
        wrappers = (
            self.compute_loss, self.create_optimizer, self.get_batch_samples, self.log,
            self._save_optimizer_and_scheduler, self._load_from_checkpoint, self._load_best_model,
        )  # fmt: skip
        for wrapper in wrappers:
            name = wrapper.__name__
            setattr(self.trainer, name, partial(wrapper, getattr(self.trainer, name)))
        self.trainer.add_callback(self)

    def compute_loss(
        self,
        inner: Callable[..., Tensor | tuple[Tensor, object]],
        model: nn.Module,
        inputs: Mapping[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, *tuple[object, ...]]:
        batch = model_inputs(inputs)
        targets, tokens = targets_of(batch), batch["input_ids"]  # first, as the Trainer may remove the labels
        trunk, is_training = self.head.trunk, model.training
        with trunk.capture_hidden() as captured:
            result = inner(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        self.head.train(is_training)
        states = self.cotrain.states(tokens, targets, captured[0])
        counts = self.cotrain.counts(targets)
        denominator = counts if self.denominator is None or not is_training else self.denominator
        head_loss, sums = self.cotrain.loss(states, targets, denominator)
        is_measured = not is_training or self._is_measured()
        survived = self.cotrain.survival(states, targets) if is_measured and len(states) > 1 else None
        self.figures["train" if is_training else "eval"].add(sums, counts, survived)
        if not is_training:
            return result
        loss, *rest = result if isinstance(result, tuple) else (result,)
        head_loss = head_loss * self._loss_scale(num_items_in_batch)
        loss = loss + (head_loss - head_loss.detach())  # the gradient of both, the value of the trunk's loss
        return (loss, *rest) if return_outputs else loss

    def _loss_scale(self, num_items: object) -> float:
        """The head's loss is over all labels of a step: undo the averages over ranks and micro-batches.

        If these labels are not known in advance, it is averaged over both instead.
        """
        trainer = self.trainer
        is_step_loss = trainer.loss_is_scaled_for_ga
        if is_step_loss is None:
            is_step_loss = trainer.compute_loss_func is not None or (
                trainer.model_accepts_loss_kwargs and num_items is not None
            )
        num_parts: int = trainer.current_gradient_accumulation_steps
        num_ranks: int = trainer.accelerator.num_processes
        if self.denominator is None:
            return 1 / num_parts if is_step_loss else 1
        return num_ranks * (1 if is_step_loss else num_parts)

    def get_batch_samples(
        self, inner: Callable[..., _Samples], epoch_iterator: object, num_batches: int, device: torch.device
    ) -> _Samples:
        samples, num_items = inner(epoch_iterator, num_batches, device)
        if samples and not isinstance(samples[0], Mapping):  # rows of prompts
            self.denominator = None
            return samples, num_items
        counts = torch.zeros(self.cotrain.settings.depths, dtype=torch.int64, device=device)
        for sample in samples:
            counts += self.cotrain.counts(targets_of(sample)).to(device)
        self.denominator = self.trainer.accelerator.reduce(counts, "sum")
        return samples, num_items

    def create_optimizer(self, inner: Callable[..., Optimizer], *args: object, **kwargs: object) -> Optimizer:
        optimizer, trainer = inner(*args, **kwargs), self.trainer
        known = {id(value) for group in optimizer.param_groups for value in group["params"]}
        new = [value for value in self.head.parameters() if value.requires_grad and id(value) not in known]
        lr = self.cotrain.settings.lr or trainer.args.learning_rate
        # No decay of norm weights and biases, as in the Trainer's own groups.
        for values, decay in (
            ([value for value in new if value.ndim >= 2], trainer.args.weight_decay),
            ([value for value in new if value.ndim < 2], 0.0),
        ):
            if values:
                optimizer.add_param_group({"params": values, "lr": lr, "weight_decay": decay})
        return optimizer

    def log(self, inner: Callable[..., None], logs: dict[str, float], *args: object, **kwargs: object) -> None:
        losses = (key for key in logs if key.startswith("eval") and key.endswith("_loss"))
        prefix = next((key.removesuffix("loss") for key in losses), "")
        if prefix or "loss" in logs:
            running = self.figures["eval" if prefix else "train"]
            running.sums = self.trainer.accelerator.reduce(running.sums, "sum")
            logs |= {f"{prefix}head_{name}": value for name, value in running.figures().items()}
            running.clear()
            if not prefix and self.grad_norm is not None:
                logs["head_grad_norm"] = self.grad_norm.item()
        inner(logs, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, inner: Callable[..., None], output_dir: str) -> None:
        inner(output_dir)
        if self.trainer.args.should_save:
            self.saved_head.write_state(Path(output_dir))

    def _load_from_checkpoint(self, inner: Callable[..., None], resume_from_checkpoint: str, *args: object) -> None:
        inner(resume_from_checkpoint, *args)
        self.saved_head.read(Path(resume_from_checkpoint))

    def _load_best_model(self, inner: Callable[..., None]) -> None:
        inner()
        self.saved_head.read(Path(self.trainer.state.best_model_checkpoint))

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.head.zero_grad()

    on_step_end = on_train_begin

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        """Reduce and clip the head's gradient, between clipping of the model's and the optimizer step."""
        values = [value for value in self.head.parameters() if value.requires_grad]
        if self.trainer.accelerator.num_processes > 1:
            for value in values:
                gradient = torch.zeros_like(value) if value.grad is None else value.grad
                value.grad = self.trainer.accelerator.reduce(gradient, "mean")
        limit = self.trainer.args.max_grad_norm
        self.grad_norm = nn.utils.clip_grad_norm_(values, limit if limit > 0 else float("inf"))

    def _is_measured(self) -> bool:
        args, state = self.trainer.args, self.trainer.state
        step: int = state.global_step + 1
        every = state.logging_steps if args.logging_strategy == IntervalStrategy.STEPS else _MEASURED_EVERY
        return step % max(every, 1) == 0 or step == state.max_steps or (step == 1 and args.logging_first_step)


def _autocast(trainer: Trainer, trunk: Trunk) -> AbstractContextManager[object]:
    """The autocast of the head's fp32 parameters: to a half-precision trunk's dtype, else the Trainer's."""
    is_half, device = trunk.dtype.itemsize < 4, trunk.device.type
    return torch.autocast(device, trunk.dtype) if is_half else trainer.accelerator.autocast()


def _source(model: PreTrainedModel, source: str | Path | None) -> str | Path:
    path = source or model.config._name_or_path
    if not path:
        raise ConfigError(
            "the model was built, not loaded: give train_head the checkpoint that has the head, or num_modules in "
            "HeadSettings for a fresh one"
        )
    return path


def _check_supported(trainer: Trainer) -> None:
    """Raise ConfigError for a Trainer in which a head would train wrongly, or not at all."""
    if isinstance(vars(trainer).get("compute_loss"), partial):
        raise ConfigError("this Trainer trains a head already; make a new Trainer for another one")
    args, accelerator = trainer.args, trainer.accelerator
    parallel = getattr(accelerator, "parallelism_config", None)
    unsupported = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled,
        "nn.DataParallel": args.n_gpu > 1,
        "a model sharded at load time": trainer.is_distributed_loading_by_transformers,
        "tensor, context or sequence parallelism": parallel is not None
        and parallel.total_size > parallel.dp_replicate_size,
        "torch_compile=True (layer.compile() of each decoder layer works)": args.torch_compile,
        "a scheduler made before the head (give the optimizer alone)": trainer.lr_scheduler is not None,
    }
    reasons = [name for name, is_on in unsupported.items() if is_on]
    if reasons:
        raise ConfigError(
            f"a head cannot be trained in this Trainer: {'; '.join(reasons)}. Use one process or "
            "DistributedDataParallel (torchrun), or train the head afterwards, on the frozen trunk"
        )
    model = without_adapters(trainer.model)
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"a head can only be trained with a transformers PreTrainedModel, not {type(model).__name__}")
    if hasattr(model.get_output_embeddings(), "base_layer"):
        raise ConfigError("lm_head has an adapter; leave it out of target_modules, as the MTP head uses it too")
