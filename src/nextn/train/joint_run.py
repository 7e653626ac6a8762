"""Named recipes, and runs that train trunk and head jointly from scratch, then optionally the head alone."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from nextn.bounded_json import read_json
from nextn.checkpoint.safetensors_file import atomic
from nextn.data.batches import leading_prompts, sample_prompts
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


@dataclass(frozen=True)
class Recipe:
    """A model and the settings of its training stages."""

    title: str
    model: dict[str, object]  # a transformers config
    train: TrainConfig
    minutes: float  # approximate time on two cores with bfloat16 instructions
    # Settings of a second stage that trains only the head, see `prepare_joint_run`.
    refine: Mapping[str, object] | None = None


def byte_model(*, layers: int, hidden: int, vocab_size: int) -> dict[str, object]:
    """Return the config of a deep, narrow dense Qwen3.5 with attention in every layer: draft steps are cheap for it."""
    shape = _shape(layers, hidden, vocab_size)
    return shape | {"model_type": "qwen3_5_text", "layer_types": ["full_attention"] * layers}


def _shape(layers: int, hidden: int, vocab_size: int) -> dict[str, object]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 5 * hidden // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 1 << (hidden // 128).bit_length() - 1,  # a power of two, for an even split over cores
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 257,
        "pad_token_id": 257,
    }


# Overrides of `byte_model`: several heads in spite of the small width.
_NARROW = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
# Overrides of `byte_model` with 8 layers of 256: three gated delta nets per layer with attention; the head attends.
_HYBRID = {
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
# A GLM-4.5 of 16 layers of 384, dense except for its last layer, with few heads, and a head with small experts. It is
# deep so that a draft step costs a sixteenth of a trunk pass, and of this family because most engines run its head.
_MIXED = {
    "model_type": "glm4_moe", "use_qk_norm": True, "attention_bias": False, "first_k_dense_replace": 15,
    "n_routed_experts": 4, "num_experts_per_tok": 1, "n_shared_experts": 1, "moe_intermediate_size": 288, "n_group": 1,
    "topk_group": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 1152,
}  # fmt: skip


def _byte_training(**settings: object) -> TrainConfig:
    """Settings with which byte-level models of this size learn fastest, plus the recipe's own."""
    shared = {"lam": "1.0", "optimizer": "muon", "lr": 3e-3, "matrix_lr": 0.03, "weight_decay": 0.01}
    return TrainConfig.from_dict(shared | settings)


def by_name(name: str, *, vocab_size: int) -> Recipe:
    """Return the recipe called `name`. Raises ConfigError for an unknown name."""
    recipes = {
        "demo": Recipe(
            "5-minute byte-level code model with an MTP head",
            byte_model(layers=8, hidden=256, vocab_size=vocab_size),
            _byte_training(steps=390, batch_size=16, length=256, depths=2, compile=True),
            5,
        ),
        "tiny": Recipe(
            "byte-level code model of 5 MB, the one that comes with the package",
            byte_model(layers=12, hidden=128, vocab_size=vocab_size) | _NARROW,
            _byte_training(steps=1200, depths=4, compile=True, save_every=200, eval_every=200),
            15,
        ),
        "code": Recipe(
            "half-hour byte-level code model, made to be decoded fast",
            # 52 MB in bfloat16 exceed the CPU cache: as for larger models, a baseline step is limited by memory
            # bandwidth, and verification uses compute that would idle. Attention reads no weights, so it is kept small.
            _shape(layers=16, hidden=384, vocab_size=vocab_size) | _MIXED,
            _byte_training(steps=450, batch_size=8, length=512, depths=4, compile=True, save_every=100),
            27,
            # The head alone on its trunk's distribution, with more depths than the first stage could afford.
            {"steps": 340, "depths": 6, "optimizer": "muon", "matrix_lr": 0.01, "lr": 1e-3, "eval_every": 100},
        ),
        "hybrid": Recipe(
            "quarter-hour byte-level code model with gated delta nets, to see what MTP brings where state is recurrent",
            byte_model(layers=8, hidden=256, vocab_size=vocab_size) | _HYBRID,
            _byte_training(steps=400, batch_size=8, length=256, depths=4, save_every=100),
            15,
        ),
    }
    if name not in recipes:
        raise ConfigError(f"unknown recipe {name!r}; known: {', '.join(recipes)}")
    return recipes[name]


def held_out_prompts(corpus: Corpus, *, count: int = 8, seed: int = 0) -> list[list[int]]:
    """Return `count` prompts of 128 tokens, shorter ones if the text is short, none if there is almost none.

    For conversations and answers, return up to `count` of their prompts.
    """
    if prompts := leading_prompts(corpus, count=count, seed=seed):
        return [prompt.tolist() for prompt in prompts]
    for length in (128, 32, 8):
        try:
            return [text.tolist() for text in sample_prompts(corpus, count=count, length=length, seed=seed)]
        except ConfigError:
            continue
    return []


def write_prompts(file: Path, corpus: Corpus) -> None:
    """Write up to 24 held-out prompts, as token ids, for `nextn bench --prompts`."""
    for count in (24, 8, 1):
        if prompts := held_out_prompts(corpus, count=count, seed=1):
            lines = [json.dumps({"prompt": prompt, "domain": "held-out"}) for prompt in prompts]
            with atomic(file) as target:
                target.write("\n".join(lines).encode() + b"\n")
            return


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
