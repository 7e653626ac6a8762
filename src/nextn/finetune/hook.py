"""A head that trains beside a fine-tune: `train_head(trainer)` adds it to a Trainer of transformers, or made of it.

The Trainer stays what it is; a few of its methods are wrapped: loss, optimiser, batches of a step, logs, saving, going
on. The trunk runs once; its states are taken as it runs.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from nextn.errors import ConfigError
from nextn.finetune.beside import Beside, HeadSettings, SeveredTrunk, Tally
from nextn.finetune.fresh import fresh_head
from nextn.finetune.live_head import LiveHead, save_beside
from nextn.finetune.tuned import targets_of
from nextn.head import Head
from nextn.model import load_head
from nextn.moving.keep import without_adapters
from nextn.training.checkpointing import checkpoint_layers
from nextn.trunk import Trunk

_MEASURED_EVERY = 10  # steps, where it is not known before which steps the Trainer will log


def train_head(
    trainer: Trainer,
    source: str | Path | None = None,
    settings: HeadSettings | None = None,
    *,
    revision: str | None = None,
) -> Head:
    """From now on `trainer` trains a head beside its model, logs its figures, saves it and goes on with it -> the head.

    source: the checkpoint with the head, a folder, file or hub id; left out, what the model was loaded from. The head's
    parameters are fp32 and a param group of the Trainer's optimiser; their gradient is clipped apart from the model's.
    The Trainer's `loss` stays the model's own. Raises ConfigError for a Trainer that a head cannot train in,
    CheckpointError where `source` has no whole head.
    """
    settings = settings or HeadSettings()
    _refuse(trainer)
    model = without_adapters(trainer.model)
    made = Trunk if settings.joint else SeveredTrunk
    with torch.random.fork_rng():
        torch.manual_seed(trainer.args.seed)  # of a fresh head, the same on every rank
        if settings.num_modules:
            head = fresh_head(trainer, model, num_modules=settings.num_modules, made=made)
        else:
            head = load_head(_source(model, source), model, revision=revision, made=made)
    head.float().to(trainer.args.device)
    if trainer.args.gradient_checkpointing:
        checkpoint_layers(head.layers)
    live = LiveHead(head, made_by=type(trainer).__name__)
    save_beside(trainer.model, live)
    _Hook(trainer, Beside(head, settings, partial(_autocast, trainer, head.trunk)), live).attach()
    return head


class _Hook:
    """What the Trainer's methods do more, each around its own."""

    def __init__(self, trainer: Trainer, beside: Beside, live: LiveHead) -> None:
        self.trainer, self.beside, self.live, self.head = trainer, beside, live, beside.head
        depths, device = beside.settings.depths, trainer.args.device
        self.over = torch.ones(depths, device=device)  # labels of the step that is under way
        self.tallies = {kind: Tally(depths, device) for kind in ("train", "eval")}
        self.norm: Tensor | None = None

    def attach(self) -> None:
        wrappers = (
            self.compute_loss, self.create_optimizer, self.get_batch_samples, self.log,
            self._save_optimizer_and_scheduler, self._load_from_checkpoint, self._load_best_model,
        )  # fmt: skip
        for wrapper in wrappers:
            name = wrapper.__name__
            setattr(self.trainer, name, partial(wrapper, getattr(self.trainer, name)))
        self.trainer.add_callback(_Steps(self))

    def compute_loss(
        self,
        inner: Callable[..., Any],
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        targets, tokens = targets_of(inputs), inputs["input_ids"]  # now: the Trainer may take the labels out
        trunk, is_training = self.head.trunk, model.training
        with trunk.watched() as seen:
            told = inner(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        self.head.train(is_training)
        states = self.beside.states(tokens, targets, seen[0])
        counts = self.beside.counts(targets)
        over = self.over if is_training else counts
        extra, sums = self.beside.loss(states, targets, over)
        measured = not is_training or self._is_measured()
        reached = self.beside.reached(states, targets) if measured and len(states) > 1 else None
        self.tallies["train" if is_training else "eval"].add(sums, counts, reached)
        if not is_training:
            return told
        loss, *rest = told if return_outputs else (told,)
        extra = extra * self._share(num_items_in_batch)
        loss = loss + (extra - extra.detach())  # the gradient of both, the value of the trunk's
        return (loss, *rest) if return_outputs else loss

    def _share(self, num_items: object) -> int:
        """`extra` is over all labels of the step, on all ranks: undo that ranks are averaged, and micro-batches."""
        trainer = self.trainer
        is_whole = trainer.loss_is_scaled_for_ga
        if is_whole is None:
            is_whole = trainer.compute_loss_func is not None or (
                trainer.model_accepts_loss_kwargs and num_items is not None
            )
        return trainer.accelerator.num_processes * (1 if is_whole else trainer.current_gradient_accumulation_steps)

    def get_batch_samples(
        self, inner: Callable[..., Any], epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> Any:
        samples, num_items = inner(epoch_iterator, num_batches, device)
        counts = torch.zeros(self.beside.settings.depths, dtype=torch.int64, device=device)
        for sample in samples:
            counts += self.beside.counts(targets_of(sample)).to(device)
        self.over = self.trainer.accelerator.reduce(counts, "sum")
        return samples, num_items

    def create_optimizer(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer, trainer = inner(*args, **kwargs), self.trainer
        known = {id(value) for group in optimizer.param_groups for value in group["params"]}
        named = [value for value in self.head.parameters() if value.requires_grad and id(value) not in known]
        lr = self.beside.settings.lr or trainer.args.learning_rate
        # Norm gains and biases are not decayed, as in the Trainer's own groups.
        for values, decay in (
            ([value for value in named if value.ndim >= 2], trainer.args.weight_decay),
            ([value for value in named if value.ndim < 2], 0.0),
        ):
            if values:
                optimizer.add_param_group({"params": values, "lr": lr, "weight_decay": decay})
        return optimizer

    def log(self, inner: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        prefix = next(
            (key.removesuffix("loss") for key in logs if key.startswith("eval") and key.endswith("_loss")), ""
        )
        if prefix or "loss" in logs:
            tally = self.tallies["eval" if prefix else "train"]
            tally.sums = self.trainer.accelerator.reduce(tally.sums, "sum")
            logs |= {f"{prefix}head_{name}": value for name, value in tally.figures().items()}
            tally.clear()
            if not prefix and self.norm is not None:
                logs["head_grad_norm"] = self.norm.item()
        inner(logs, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, inner: Callable[..., Any], output_dir: str) -> None:
        inner(output_dir)
        if self.trainer.args.should_save:
            self.live.write_state(Path(output_dir))

    def _load_from_checkpoint(self, inner: Callable[..., Any], resume_from_checkpoint: str, *args: Any) -> None:
        inner(resume_from_checkpoint, *args)
        self.live.read(Path(resume_from_checkpoint))

    def _load_best_model(self, inner: Callable[..., Any]) -> None:
        inner()
        self.live.read(Path(self.trainer.state.best_model_checkpoint))

    def before_step(self) -> None:
        """Between clipping of the model's gradient and the optimiser's step."""
        values = [value for value in self.head.parameters() if value.requires_grad]
        if self.trainer.accelerator.num_processes > 1:
            for value in values:
                gradient = torch.zeros_like(value) if value.grad is None else value.grad
                value.grad = self.trainer.accelerator.reduce(gradient, "mean")
        limit = self.trainer.args.max_grad_norm
        self.norm = nn.utils.clip_grad_norm_(values, limit if limit > 0 else float("inf"))

    def _is_measured(self) -> bool:
        args, state = self.trainer.args, self.trainer.state
        step = state.global_step + 1
        every = state.logging_steps if args.logging_strategy == IntervalStrategy.STEPS else _MEASURED_EVERY
        return step % max(every, 1) == 0 or step == state.max_steps or (step == 1 and args.logging_first_step)


class _Steps(TrainerCallback):
    def __init__(self, hook: _Hook) -> None:
        self.hook = hook

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self.hook.head.zero_grad()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self.hook.before_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.hook.head.zero_grad()


def _autocast(trainer: Trainer, trunk: Trunk) -> Any:
    """What the fp32 parameters of the head compute in: a half-precision trunk's dtype, else the Trainer's."""
    if trunk.dtype.itemsize < 4:
        return torch.autocast(trunk.device.type, trunk.dtype)
    return trainer.accelerator.autocast()


def _source(model: PreTrainedModel, source: str | Path | None) -> str | Path:
    found = source or model.config._name_or_path
    if not found:
        raise ConfigError(
            "the model was built, not loaded: give train_head the checkpoint that has the head, or num_modules in "
            "HeadSettings for a fresh one"
        )
    return found


def _refuse(trainer: Trainer) -> None:
    """What would train a head wrongly, or not at all."""
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
        "a scheduler made before the head (give the optimiser alone)": trainer.lr_scheduler is not None,
    }
    found = [name for name, is_on in unsupported.items() if is_on]
    if found:
        raise ConfigError(
            f"a head cannot train beside this Trainer: {'; '.join(found)}. Use one process or DistributedDataParallel "
            "(torchrun), or train the head afterwards, on the frozen trunk"
        )
    model = without_adapters(trainer.model)
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"a head is trained beside a model of transformers, not beside {type(model).__name__}")
    if hasattr(model.get_output_embeddings(), "base_layer"):
        raise ConfigError("the output head has an adapter; leave lm_head out of target_modules: the head reads it, too")
