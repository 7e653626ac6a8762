"""The settings of a training run, validated at construction, and the parts of a head that they name."""

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Self, get_args

from nextn.bounded_json import JsonDict
from nextn.devices import training_dtype
from nextn.errors import ConfigError, require, require_at_least
from nextn.losses.distillation import OBJECTIVES
from nextn.losses.mtp_loss import depth_weights
from nextn.train.run_options import RUN_SETTINGS

# Patterns of parameter names in `Head`; the first that matches decides.
_PATTERNS = {
    "experts": r"\.experts\.",
    "router": r"\.gate\.weight$",
    "hyper_connections": r"_hc\.|hyper_connection|\.collapse",
    "norms": r"norm",
    "eh_proj": r"^stack\.\d+\.(token_|hidden_)?projection\.",
    "embed_tokens": r"^stack\.\d+\.embedding\.",
    "lm_head": r"^stack\.\d+\.output\.",
    "mlp": r"\.(mlp|mlp_sconv|shared_experts)\.",
    "attention": r"\.(\w*attn|attn_sconv|mixer)\.",
}
PARTS = (*_PATTERNS, "other")  # other: parameters of layers with names of their own


def part_of(name: str) -> str:
    """Return the part that a parameter of `Head` belongs to, by its name."""
    return next((part for part, pattern in _PATTERNS.items() if re.search(pattern, name)), "other")


def frozen_parameters(names: Iterable[str], trained_parts: str) -> list[str]:
    """Return those of a head's parameters that are in none of the comma-separated parts; none if that is empty.

    Raises ConfigError for a part that this head does not have.
    """
    by_part: dict[str, list[str]] = defaultdict(list)
    for name in names:
        by_part[part_of(name)].append(name)
    trained = {part.strip() for part in trained_parts.split(",")} if trained_parts else set(by_part)
    if unknown := sorted(trained - by_part.keys()):
        parts = ", ".join(part for part in PARTS if part in by_part)
        message = f"trained_parts = {trained_parts}: this head has no part {unknown[0]!r}; its parts are {parts}"
        raise ConfigError(message)
    return [name for part, own in by_part.items() if part not in trained for name in own]


_MINIMA = {
    "steps": 1, "batch_size": 1, "length": 2, "depths": 0, "warmup": 0, "seed": 0, "accumulate": 1, "save_every": 0,
    "eval_every": 0, "eval_batches": 1,
}  # fmt: skip
_MAX_WARMUP = 0.1  # share of a time budget
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "null"}


@dataclass(frozen=True)
class TrainConfig:
    """Settings of training trunk and head jointly, in steps of batch_size rows of length tokens.

    Attributes:
        steps: Optimizer steps.
        minutes: Time budget: training ends after this many minutes of steps, and its schedules follow the share of them
            that is used; `steps` is then ignored. 0 = none.
        batch_size: Rows of a step, over all processes.
        length: Tokens of a row.
        depths: K of the loss.
        lam: Weight of the head's loss, see `LambdaSchedule.parse`.
        beta: Depth weights are proportional to beta^(k-1); None = equal.
        optimizer: `adamw`, or `muon` for hidden matrices (https://kellerjordan.github.io/posts/muon/) and AdamW for
            all other parameters.
        lr: Of AdamW.
        matrix_lr: Of Muon.
        final_lr: The share of lr that it decays to.
        warmup: Steps of linear warmup.
        decay: The share of steps, at the end, over which the learning rate decays linearly.
        weight_decay: Of matrices and embeddings.
        clip: Maximal gradient norm.
        seed: Of the initialization and the order of the data.
        dtype: `float32`, or `bfloat16` for autocast; by default bfloat16 where it is faster (`training_dtype`).
        compile: Apply torch.compile to decoder layers.
        checkpoint_layers: Activation checkpointing of decoder layers.
        accumulate: Micro-batches per step; a forward pass has batch_size / accumulate rows, over all processes.
        save_every: Steps between checkpoints, 0 = only at the end.
        eval_every: Steps between evaluations, 0 = only at the end.
        eval_batches: Batches of an evaluation.

    Example:
        >>> nextn.TrainConfig(steps=100, batch_size=4, length=256, depths=2).optimizer
        'adamw'
    """

    steps: int
    minutes: float = 0.0
    batch_size: int = 16
    length: int = 256
    depths: int = 4
    lam: str = "0.3"
    beta: float | None = None
    optimizer: str = "adamw"
    lr: float = 2e-3
    matrix_lr: float = 0.02
    final_lr: float = 0.05
    warmup: int = 40
    decay: float = 0.5
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    dtype: str = field(default_factory=training_dtype)
    compile: bool = False
    checkpoint_layers: bool = False
    accumulate: int = 1
    save_every: int = 0
    eval_every: int = 0
    eval_batches: int = 4

    def __post_init__(self) -> None:
        require_at_least(self, **_MINIMA)
        parts = f"a divisor of batch_size = {self.batch_size}, as it splits the rows of a step into equal parts"
        require(
            self,
            minutes=(0 <= self.minutes < math.inf, "a number of minutes > 0, or 0 for no time budget"),
            lr=(0 < self.lr < 1, "0 < lr < 1"),
            matrix_lr=(0 < self.matrix_lr < 1, "0 < matrix_lr < 1"),
            final_lr=(0 <= self.final_lr <= 1, "a share of lr, 0 <= final_lr <= 1"),
            decay=(0 <= self.decay <= 1, "a share of the steps, 0 <= decay <= 1"),
            weight_decay=(0 <= self.weight_decay < math.inf, "a number >= 0"),
            clip=(self.clip > 0, "a norm of gradients > 0"),
            accumulate=(not self.batch_size % self.accumulate, parts),
            dtype=(self.dtype in ("float32", "bfloat16"), "float32 or bfloat16"),
            optimizer=(self.optimizer in ("adamw", "muon"), "adamw or muon"),
            depths=(self.depths < self.length, f"fewer than length = {self.length} tokens"),
        )
        LambdaSchedule.parse(self.lam, total=self.tokens)
        depth_weights(self.depths, beta=self.beta)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Build settings from a dict. Raises ConfigError for an unknown key or a wrong type; lam may be a number."""
        known = {field.name: field.type for field in fields(cls)}
        unknown = sorted(set(values) - {*known})
        if unknown:
            raise ConfigError(
                f"unknown setting {unknown[0]!r}; known: {', '.join(known)}; `nextn train` "
                f"also takes {', '.join(RUN_SETTINGS)}"
            )
        if "steps" not in values:
            raise ConfigError("steps is not set; expected a whole number >= 1")
        return cls(**JsonDict((name, _typed(name, value, known[name])) for name, value in values.items()))

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.steps * self.tokens_per_step

    @property
    def rows_per_pass(self) -> int:
        """Rows of a forward pass, over all processes."""
        return self.batch_size // self.accumulate

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.length

    def schedule(self, step: int, *, share: float | None = None) -> float:
        """Return the factor of the learning rates at a step (0-based).

        share: of a time budget that is used before the step. Warmup then ends after a tenth of the budget, however few
            steps that are.
        """
        warmup = (step + 1) / (self.warmup + 1)
        decay = (self.steps - step) / max(1.0, self.decay * self.steps)
        if share is not None:
            warmup = max(warmup, share / _MAX_WARMUP)
            decay = (1 - share) / max(1e-9, self.decay)
        warmup = min(1.0, warmup)
        return warmup * (self.final_lr + (1 - self.final_lr) * min(1.0, decay))


def _typed(name: str, value: object, annotation: object) -> object:
    """The value, if it has the annotated type of its field."""
    types = get_args(annotation) or (annotation,)
    if annotation is str and type(value) in (int, float):  # `lam`: 0.3
        return str(value)
    if type(value) in types or (float in types and type(value) is int):
        return value
    expected = " or ".join(_TYPE_NAMES[each] for each in types)
    raise ConfigError(f"{name} = {value!r}; expected {expected}")


@dataclass(frozen=True)
class HeadConfig(TrainConfig):
    """Settings of training a head on a frozen trunk; lam multiplies the loss.

    Attributes:
        beta: Depth weights are proportional to beta^(k-1) (FastMTP, arXiv 2509.18362).
        objective: One of `OBJECTIVES`.
        temperature: Of the distributions of trunk and head.
        kv: The keys that depths beyond the last module attend to: `own`, each depth's own (cheap), `decode`, those
            that decoding gives them, or `first`, those of the module's first run alone, in decoding from then on, too
            (NVIDIA/Megatron-LM#6472).
        eval_depths: K of the held-out acceptance, 0 = depths.
        loss_vocab: About how many tokens the loss is computed over: three quarters are the most frequent ones of the
            text, with those of the batch; the others are drawn in each step, see `SampledVocabulary`. 0 = all.
        patience: Stop after this many consecutive evaluations without a better held-out acceptance length, 0 = never.
        trained_parts: Comma-separated `PARTS` of the head to train, while the others stay as they are. Empty: all.
    """

    batch_size: int = 8
    lam: str = "1.0"
    beta: float | None = 0.8
    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup: int = 20
    save_every: int = 200
    eval_every: int = 100
    objective: str = "kl"
    temperature: float = 1.0
    kv: str = "own"
    eval_depths: int = 0
    trained_parts: str = ""
    loss_vocab: int = 0
    patience: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        is_vocab_valid = not self.loss_vocab or (self.loss_vocab > 0 and self.objective != "ce")
        require(
            self,
            objective=(self.objective in OBJECTIVES, f"one of {', '.join(OBJECTIVES)}"),
            depths=(self.depths >= 1, "at least 1 for a head"),
            loss_vocab=(is_vocab_valid, "a number of tokens, with an objective other than ce, or 0 for all tokens"),
            kv=(self.kv in ("own", "decode", "first"), "own, decode or first"),
            temperature=(0 < self.temperature < math.inf, "a number > 0"),
            eval_depths=(0 <= self.eval_depths < self.length, "0 <= eval_depths < length"),
            patience=(self.patience >= 0, "a number >= 0"),
            eval_every=(
                self.eval_every > 0 or not self.patience,
                f"at least 1, as patience = {self.patience} counts evaluations",
            ),
        )


@dataclass(frozen=True)
class LambdaSchedule:
    """Lambda as a step function of the tokens trained on: values[j] holds from starts[j] on."""

    starts: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value >= 0 for value in self.values):
            raise ConfigError(f"lambda values {self.values} must be finite and >= 0.")
        is_rising = all(before < after for before, after in pairwise(self.starts))
        if len(self.starts) != len(self.values) or self.starts[:1] != (0,) or not is_rising:
            raise ConfigError(f"lambda starts {self.starts} must be one per value, begin at 0 and rise.")

    @classmethod
    def parse(cls, text: str, *, total: int | None = None) -> "LambdaSchedule":
        """Read "0.3", "0.3,0.1@10e12" (from that many tokens on) or "0.3,0.1@67%" (of the run's `total` tokens)."""
        try:
            steps = [_parse_step(piece, total) for piece in text.split(",")]
        except (ValueError, OverflowError):
            raise ConfigError(
                f"lambda {text!r} cannot be read. Write 0.3, or steps VALUE@TOKENS as in 0.3,0.1@10e12 or 0.3,0.1@67%."
            ) from None
        return cls(starts=tuple(start for start, _ in steps), values=tuple(value for _, value in steps))

    def at(self, tokens: int) -> float:
        """Lambda of a step that begins after `tokens` tokens."""
        return self.values[bisect_right(self.starts, tokens) - 1]


def _parse_step(piece: str, total: int | None) -> tuple[int, float]:
    value, has_start, start = piece.partition("@")
    if not has_start:
        return 0, float(value)
    if not start.strip().endswith("%"):
        return int(float(start)), float(value)
    if total is None:
        message = f"lambda step {piece!r} is a share of a run of unknown length. Give the total or a token count."
        raise ConfigError(message)
    return round(float(start.strip()[:-1]) / 100 * total), float(value)
