"""Named workloads that need nothing but this package: models and settings for the built-in byte-level corpus."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nextn.checkpoints.tensor_file import atomic
from nextn.corpus.bytelevel import byte_tokenizer
from nextn.corpus.bytelevel import vocab_size as vocab_size_of
from nextn.corpus.corpus_files import corpora
from nextn.corpus.data import Corpus
from nextn.corpus.prompts import openings, prompts
from nextn.distributed.parallel import ALONE, Ranks
from nextn.errors import ConfigError
from nextn.families import lookup_count
from nextn.model import Model, read_tokenizer
from nextn.training.tasks import JointTask
from nextn.training.train import Trainer
from nextn.training.train_config import TrainConfig


@dataclass(frozen=True)
class Recipe:
    """model: a transformers config as a dict. minutes: about what it takes on two cores."""

    title: str
    model: dict[str, object]
    train: TrainConfig
    minutes: float


def byte_model(*, layers: int, hidden: int, vocab_size: int, max_length: int = 4096) -> dict[str, object]:
    """A deep, narrow trunk of the dense Qwen3.5 kind with attention in every layer: a draft step is cheap beside it."""
    shape = _shape(layers, hidden, vocab_size, max_length)
    return shape | {"model_type": "qwen3_5_text", "layer_types": ["full_attention"] * layers}


def hybrid_model(*, layers: int, hidden: int, vocab_size: int, max_length: int = 4096) -> dict[str, object]:
    """`byte_model` with Qwen3.5's layers: three gated delta nets to one of attention, which the head's block is."""
    return byte_model(layers=layers, hidden=hidden, vocab_size=vocab_size, max_length=max_length) | {
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * (layers // 4),
        "linear_num_key_heads": hidden // 128,
        "linear_num_value_heads": hidden // 64,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }


def mixed_model(*, layers: int, hidden: int, vocab_size: int, max_length: int = 4096) -> dict[str, object]:
    """A deep, narrow trunk in the layout of GLM-4.5, dense but for its last layer, and a head with small experts.

    Deep, so that a draft step costs a sixteenth of a trunk pass; of this family, because most engines run its head.
    """
    return _shape(layers, hidden, vocab_size, max_length) | {
        "model_type": "glm4_moe",
        "use_qk_norm": True,
        "attention_bias": False,
        "first_k_dense_replace": layers - 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 3 * hidden // 4,
        "n_group": 1,
        "topk_group": 1,
    }


def _shape(layers: int, hidden: int, vocab_size: int, max_length: int) -> dict[str, object]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 5 * hidden // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 64,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 257,
        "pad_token_id": 257,
    }


def _byte_training(**settings: Any) -> TrainConfig:
    """What byte-level models of this size learn fastest with; the rest is each recipe's own."""
    shared: dict[str, Any] = {"lam": "1.0", "optimizer": "muon", "lr": 3e-3, "matrix_lr": 0.03, "weight_decay": 0.01}
    return TrainConfig(**shared, **settings)


def by_name(name: str, *, vocab_size: int) -> Recipe:
    """The recipe called `name`. Raises ConfigError that lists the known ones."""
    recipes = {
        "demo": Recipe(
            "5-minute byte-level code model with an MTP head",
            byte_model(layers=8, hidden=256, vocab_size=vocab_size),
            _byte_training(steps=390, batch_size=16, length=256, depths=2, compile=True),
            5,
        ),
        "code": Recipe(
            "half-hour byte-level code model, made to be decoded fast",
            mixed_model(layers=16, hidden=256, vocab_size=vocab_size),
            _byte_training(steps=700, batch_size=8, length=512, depths=4, compile=True, save_every=100),
            28,
        ),
        "hybrid": Recipe(
            "quarter-hour byte-level code model with gated delta nets, to see what MTP brings where state is recurrent",
            hybrid_model(layers=8, hidden=256, vocab_size=vocab_size),
            _byte_training(steps=400, batch_size=8, length=256, depths=4, save_every=100),
            15,
        ),
    }
    if name not in recipes:
        raise ConfigError(f"unknown recipe {name!r}; known: {', '.join(recipes)}")
    return recipes[name]


def training_run(
    out: Path,
    *,
    data: Sequence[str | Path],
    recipe: str,
    model: Path | None,
    tokenizer: Path | None,
    num_modules: int,
    settings: Mapping[str, object],
    all_tokens: bool = False,
    ranks: Ranks = ALONE,
) -> tuple[Trainer, Corpus, Corpus]:
    """A trainer at step 0, its text, and the held-out text. data, all_tokens: see `corpora`; settings go over the
    recipe's.

    Raises ConfigError for data, configs or settings that cannot be used.
    """
    known = read_tokenizer(tokenizer) if tokenizer else byte_tokenizer()
    base = by_name(recipe, vocab_size=-(-vocab_size_of(known) // 8) * 8)
    config = TrainConfig.from_dict(asdict(base.train) | dict(settings))
    shape = _read_config(model) if model else base.model
    context = lookup_count(shape, "max_position_embeddings")
    if context is not None and config.length > context:
        raise ConfigError(f"length = {config.length}; the model's context holds {context} tokens, so use at most that")
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
    return Trainer(task, out=out), corpus, held_out


def held_out_prompts(corpus: Corpus, *, count: int = 8, seed: int = 0) -> list[list[int]]:
    """count prompts of 128 tokens; shorter ones where the text is short, none where there is next to none.

    Of conversations and answers, what stands before the answer; fewer prompts where there are fewer of these.
    """
    if found := openings(corpus, count=count, seed=seed):
        return [prompt.tolist() for prompt in found]
    for length in (128, 32, 8):
        try:
            return [text.tolist() for text in prompts(corpus, count=count, length=length, seed=seed, continuation=0)]
        except ConfigError:
            continue
    return []


def write_prompts(file: Path, corpus: Corpus) -> None:
    """Held-out text for `nextn bench --prompts`: up to 24 prompts, as token ids."""
    for count in (24, 8, 1):
        if found := held_out_prompts(corpus, count=count, seed=1):
            lines = [json.dumps({"prompt": prompt, "domain": "held-out"}) for prompt in found]
            with atomic(file) as target:
                target.write("\n".join(lines).encode() + b"\n")
            return


def _read_config(path: Path) -> dict[str, object]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable JSON file: {error}") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigError(f"{path}: expected a transformers config, a JSON object with `model_type`")
    return values
