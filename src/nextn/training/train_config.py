"""The settings of a training run: checked where they are made, so that a run cannot begin with ones that do not fit."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, get_args

from nextn.errors import ConfigError, need_whole
from nextn.losses.loss import LambdaSchedule, depth_weights
from nextn.losses.objectives import OBJECTIVES
from nextn.training.half import training_dtype

# They say how a step is computed, not what it comes to: a run goes on with others.
INDIFFERENT = ("accumulate", "checkpoint_layers")
_LEAST = {
    "steps": 1, "batch_size": 1, "length": 2, "depths": 0, "warmup": 0, "seed": 0, "accumulate": 1, "save_every": 0,
    "eval_every": 0, "eval_batches": 1,
}  # fmt: skip
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "null"}


@dataclass(frozen=True)
class TrainConfig:
    """steps of batch_size rows of length tokens. depths: K of the loss. lam: see `LambdaSchedule.parse`.

    accumulate: parts of equal size that the rows of a step pass through the model in, one after the other; memory is
    that of a part, what is learnt that of the whole. So a pass has batch_size / accumulate rows, over all processes.

    beta: depth weights proportional to beta^(k-1); None = equal. optimizer: `adamw`, or `muon` for the layers' matrices
    at matrix_lr (https://kellerjordan.github.io/posts/muon/) with AdamW at lr for all else. Rates rise over `warmup`
    steps and fall linearly to `final_lr` of themselves over the last `decay` share. dtype: `float32`, or `bfloat16` for
    autocast; left out, that where it pays (`half`). compile: decoder layers through torch.compile. checkpoint_layers:
    they keep their inputs alone and compute the rest again in the backward pass. save_every, eval_every: steps, 0 =
    only at the end.
    """

    steps: int
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
        need_whole(self, **_LEAST)
        for name, fits, words in (
            ("lr", 0 < self.lr < 1, "0 < lr < 1"),
            ("matrix_lr", 0 < self.matrix_lr < 1, "0 < matrix_lr < 1"),
            ("final_lr", 0 <= self.final_lr <= 1, "a share of lr, 0 <= final_lr <= 1"),
            ("decay", 0 <= self.decay <= 1, "a share of the steps, 0 <= decay <= 1"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "a number >= 0"),
            ("clip", self.clip > 0, "a norm of gradients > 0"),
        ):
            if not fits:
                raise ConfigError(f"{name} = {getattr(self, name)}; expected {words}")
        if self.batch_size % self.accumulate:
            raise ConfigError(
                f"accumulate = {self.accumulate}; expected a divisor of batch_size = {self.batch_size}, the rows of a "
                "step, which are dealt out in that many parts"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype = {self.dtype!r}; expected float32 or bfloat16")
        if self.optimizer not in ("adamw", "muon"):
            raise ConfigError(f"optimizer = {self.optimizer!r}; expected adamw or muon")
        if self.depths >= self.length:
            raise ConfigError(f"depths = {self.depths}; expected fewer than length = {self.length} tokens")
        LambdaSchedule.parse(self.lam, total=self.tokens)
        depth_weights(self.depths, beta=self.beta)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Strict: an unknown key and a value of another type are ConfigErrors. lam may be a number."""
        known = {each.name: each.type for each in fields(cls)}
        unknown = sorted(set(values) - {*known})
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}; known: {', '.join(known)}")
        if "steps" not in values:
            raise ConfigError("steps is not set; expected a whole number >= 1")
        return cls(**{name: _typed(name, value, known[name]) for name, value in values.items()})

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def rows_per_pass(self) -> int:
        return self.batch_size // self.accumulate

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.length

    def schedule(self, step: int) -> float:
        """What the learning rates are multiplied by at step `step` (0-based)."""
        rise = min(1.0, (step + 1) / (self.warmup + 1))
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return rise * (self.final_lr + (1 - self.final_lr) * min(1.0, left))


def _typed(name: str, value: object, kind: object) -> Any:
    """value, if it is of the kind that a field is annotated with."""
    kinds = get_args(kind) or (kind,)
    if kind is str and type(value) in (int, float):  # `lam`: 0.3
        return str(value)
    if type(value) in kinds or (float in kinds and type(value) is int):
        return value
    words = " or ".join(_WORDS[each] for each in kinds)
    raise ConfigError(f"{name} = {value!r}; expected {words}")


@dataclass(frozen=True)
class HeadConfig(TrainConfig):
    """Settings of a head that is trained on a frozen trunk; lam multiplies the loss.

    objective: one of `objectives.OBJECTIVES`. temperature: of the trunk's law and the head's. kv: what the depths
    beyond the last module attend to, `own` (each depth its own keys, cheap) or `decode` (what decoding really sees).
    eval_depths: K of the held-out figures, 0 = depths. patience: stop after that many evaluations in turn without a
    better held-out acceptance length, 0 = never. Deeper depths weigh beta^(k-1) (FastMTP, arXiv 2509.18362).
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
    patience: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective not in OBJECTIVES:
            raise ConfigError(f"objective = {self.objective!r}; expected one of {', '.join(OBJECTIVES)}")
        if self.depths < 1:
            raise ConfigError(f"depths = {self.depths}; a head has at least one")
        if self.kv not in ("own", "decode"):
            raise ConfigError(f"kv = {self.kv!r}; expected own or decode")
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"temperature = {self.temperature}; expected a number > 0, of the law that is learnt")
        if not 0 <= self.eval_depths < self.length or self.patience < 0:
            raise ConfigError(
                f"{self.eval_depths=}, {self.patience=}; expected 0 <= eval_depths < length, patience >= 0"
            )
        if self.patience and not self.eval_every:
            raise ConfigError(f"patience = {self.patience} needs evaluations; set eval_every")

    @property
    def measured(self) -> int:
        """K of the held-out figures."""
        return self.eval_depths or self.depths
