"""Build a run that trains trunk and head jointly from scratch, then optionally the head on the trunk's distribution."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from nextn.bounded_json import read_json
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.data.byte_tokenizer import vocab_size as vocab_size_of
from nextn.data.corpus import Corpus
from nextn.data.sources import load_corpora
from nextn.devices import training_dtype
from nextn.errors import ConfigError
from nextn.family_table import lookup_count
from nextn.model.deferred_init import DeferredInit
from nextn.model.model import Model
from nextn.model.text_interface import read_tokenizer
from nextn.train.config import HeadConfig, TrainConfig
from nextn.train.distributed import ALONE, Ranks
from nextn.train.head_run import HeadRun, StartingPoint, prepare_head_run
from nextn.train.joint_task import JointTask
from nextn.train.loop import Trainer
from nextn.train.recipes import by_name, held_out_prompts

# Settings that the second stage inherits from the first unless it has its own.
_INHERITED = ("batch_size", "length", "accumulate", "seed", "dtype", "compile", "checkpoint_layers", "save_every")


@dataclass(frozen=True)
class JointRun:
    """A trainer of trunk and head at step 0, and the second stage if there is one."""

    trainer: Trainer
    corpus: Corpus
    held_out: Corpus
    refine: Callable[[StartingPoint], HeadRun] | None  # builds the second stage from the first one's result
    settings: Mapping[str, object]  # of both stages, defaults included

    def stages(self, model: Path) -> Iterator[Trainer]:
        """Yield the trainer of each stage, each to be run to its end before the next; then write the model.

        The first of two stages is written to `joint`, the checkpoints of the second to `head`. If the second stage
        made the head worse, beyond noise, the first one's result is the model.
        """
        first, out = self.trainer, self.trainer.folder.path
        yield first
        if self.refine is None:
            first.write_result(model)
            return
        first.write_result(out / "joint")
        first.optimizers.clear()  # their moments are most of its memory
        torch.compiler.reset()  # its graphs count towards torch's recompilation limit of a layer's code
        first.ranks.wait()  # for the rank that writes
        second = self.refine(StartingPoint(out / "joint")).trainer
        yield second
        (first if second.best_tracker.is_worse else second).write_result(model)


def prepare_joint_run(
    out: Path,
    *,
    data: Sequence[str | Path] = (),
    recipe: str,
    model: Path | None = None,
    tokenizer: Path | None = None,
    num_modules: int = 1,
    settings: Mapping[str, object],
    all_tokens: bool = False,
    ranks: Ranks = ALONE,
) -> JointRun:
    """Build the model of a recipe, load the data (see `load_corpora`) and build the trainer.

    `model` is a transformers config to train instead of the recipe's model, without the recipe's second stage;
    `tokenizer` a folder, if not the byte tokenizer. `settings` override the recipe's; `refine` holds those of the
    second stage. Raises ConfigError for data, config or settings that cannot be used.
    """
    text_tokenizer = read_tokenizer(tokenizer) if tokenizer else byte_tokenizer()
    base = by_name(recipe, vocab_size=-(-vocab_size_of(text_tokenizer) // 8) * 8)
    settings = dict(settings)
    # A recipe's second stage fits its own model.
    second = _refinement(base.refine if model is None else None, settings.pop("refine", {}))
    config = TrainConfig.from_dict(asdict(base.train) | {"dtype": training_dtype(ranks.device.type)} | settings)
    shape = _read_config(model) if model else base.model
    context = lookup_count(shape, "max_position_embeddings")
    _check_length(config, context)
    if second is not None:
        second = {name: getattr(config, name) for name in _INHERITED} | second
        head_config = HeadConfig.from_dict(second)  # raises now, not after hours of the first stage
        _check_length(head_config, context)
        second = asdict(head_config)
    corpus, held_out = load_corpora(data, text_tokenizer, all_tokens=all_tokens, context=context)
    torch.manual_seed(config.seed)
    deferred = None if ranks.is_alone else DeferredInit()
    with nullcontext() if deferred is None else deferred.building():
        built = Model.build(shape, num_modules=num_modules, tokenizer=text_tokenizer)
    built.deferred = deferred
    if (num_tokens := vocab_size_of(text_tokenizer)) > built.trunk.vocab_size:
        raise ConfigError(
            f"the tokenizer has {num_tokens} tokens, the model's vocab_size is {built.trunk.vocab_size}; raise "
            "vocab_size in the config"
        )
    prompts = held_out_prompts(held_out, seed=config.seed)
    task = JointTask(built, corpus, config, held_out=held_out, prompts=prompts, ranks=ranks)
    refine = None
    if second is not None and config.depths:
        head_stage = partial(prepare_head_run, out / "head", data=data, all_tokens=all_tokens, tokenizer=tokenizer)
        refine = partial(head_stage, settings=second, ranks=ranks)
    return JointRun(Trainer(task, out=out), corpus, held_out, refine, asdict(config) | {"refine": second})


def _check_length(config: TrainConfig, context: int | None) -> None:
    if context is not None and config.length > context:
        raise ConfigError(f"length = {config.length}; the model's context holds {context} tokens; use at most that")


def _refinement(base: Mapping[str, object] | None, given: object) -> dict[str, object] | None:
    """The settings of the second stage; None if there is none."""
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"refine = {given!r}; expected settings such as refine.steps=300, or null for no such stage")
    if given is None or not (base or given):
        return None
    merged = {**(base or {}), **given}
    return None if merged.get("steps") == 0 else merged


def _read_config(path: Path) -> dict[str, object]:
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable JSON file: {error}") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigError(f"{path}: expected a transformers config, a JSON object with `model_type`")
    return values
