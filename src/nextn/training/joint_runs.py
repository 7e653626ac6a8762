"""A run that trains trunk and head together from scratch, and then, if it is to, the head alone on the trunk's law."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from nextn.corpus.bytelevel import byte_tokenizer
from nextn.corpus.bytelevel import vocab_size as vocab_size_of
from nextn.corpus.corpus_files import corpora
from nextn.corpus.data import Corpus
from nextn.distributed.parallel import ALONE, Ranks
from nextn.errors import ConfigError
from nextn.families import lookup_count
from nextn.model import Model, read_tokenizer
from nextn.training.half import training_dtype
from nextn.training.head_runs import HeadRun, Start, head_run
from nextn.training.recipes import by_name, held_out_prompts
from nextn.training.tasks import JointTask
from nextn.training.train import Trainer
from nextn.training.train_config import HeadConfig, TrainConfig

# What the second stage takes from the first where its own settings say nothing.
_KEPT = ("batch_size", "length", "accumulate", "seed", "dtype", "compile", "checkpoint_layers", "save_every")


@dataclass(frozen=True)
class JointRun:
    """A trainer of trunk and head at step 0, its text, and the text that is held out. refine: makes the second stage,
    which starts from what the first one made; None = there is none. settings: all of both stages, defaults included."""

    trainer: Trainer
    corpus: Corpus
    held_out: Corpus
    refine: Callable[[Start], HeadRun] | None
    settings: Mapping[str, object]

    def stages(self, model: Path) -> Iterator[Trainer]:
        """The trainer of each stage, to be run to its end before the next is asked for; then the model is written.

        What the first of two stages made is in `joint`, the second's checkpoints are in `head`. A second stage that
        made the head worse, beyond noise, leaves the first one's.
        """
        first, out = self.trainer, self.trainer.folder.path
        yield first
        if self.refine is None:
            first.write_result(model)
            return
        first.write_result(out / "joint")
        first.optimisers.clear()  # their moments are most of its memory
        torch.compiler.reset()  # its graphs count among the few that torch keeps of a layer's code
        first.ranks.wait()  # for the one that writes
        second = self.refine(Start(out / "joint")).trainer
        yield second
        (first if second.standing.is_worse else second).write_result(model)


def joint_run(
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
    """data, all_tokens: see `corpora`; settings go over the recipe's, `refine` among them over those of its second
    stage, which another model than the recipe's has only where it is asked for.

    Raises ConfigError for data, configs or settings that cannot be used.
    """
    known = read_tokenizer(tokenizer) if tokenizer else byte_tokenizer()
    base = by_name(recipe, vocab_size=-(-vocab_size_of(known) // 8) * 8)
    settings = dict(settings)
    # A recipe's second stage fits its own model.
    second = _refinement(base.refine if model is None else None, settings.pop("refine", {}))
    config = TrainConfig.from_dict(asdict(base.train) | {"dtype": training_dtype(ranks.device.type)} | settings)
    shape = _read_config(model) if model else base.model
    context = lookup_count(shape, "max_position_embeddings")
    _check_length(config, context)
    if second is not None:
        second = {name: getattr(config, name) for name in _KEPT} | second
        checked = HeadConfig.from_dict(second)  # raises now, not behind hours of the first stage
        _check_length(checked, context)
        second = asdict(checked)
    corpus, held_out = corpora(data, known, all_tokens=all_tokens, context=context)
    torch.manual_seed(config.seed)
    built = Model.build(shape, num_modules=num_modules, tokenizer=known)
    if vocab_size_of(known) > built.trunk.vocab_size:
        raise ConfigError(
            f"the tokenizer has {vocab_size_of(known)} tokens, the model's vocab_size is {built.trunk.vocab_size}; "
            "raise vocab_size in the config"
        )
    asked = held_out_prompts(held_out, seed=config.seed)
    task = JointTask(built, corpus, config, held_out=held_out, prompts=asked, ranks=ranks)
    refine = None
    if second is not None and config.depths:
        text = partial(head_run, out / "head", data=data, all_tokens=all_tokens, tokenizer=tokenizer)
        refine = partial(text, settings=second, ranks=ranks)
    return JointRun(Trainer(task, out=out), corpus, held_out, refine, asdict(config) | {"refine": second})


def _check_length(config: TrainConfig, context: int | None) -> None:
    if context is not None and config.length > context:
        raise ConfigError(f"length = {config.length}; the model's context holds {context} tokens, so use at most that")


def _refinement(base: Mapping[str, object] | None, given: object) -> dict[str, object] | None:
    """The settings of the second stage; None if there is to be none."""
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"refine = {given!r}; expected settings such as refine.steps=300, or null for no such stage")
    if given is None or not (base or given):
        return None
    both = {**(base or {}), **given}
    return None if both.get("steps") == 0 else both


def _read_config(path: Path) -> dict[str, object]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable JSON file: {error}") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigError(f"{path}: expected a transformers config, a JSON object with `model_type`")
    return values
