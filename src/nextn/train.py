"""One training loop: trunk and head jointly from scratch. A generator of records that resumes exactly where it stopped.

It draws nothing from a global random state and reads no clock but for tokens/s: step s is the same work in every run.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nextn.data import Batch, Batches, Corpus
from nextn.decode import Settings
from nextn.errors import CheckpointError, ConfigError, TrainingError
from nextn.evaluate import Decoded, Forced, decoded, forced
from nextn.head import outputs
from nextn.loss import LambdaSchedule, LossReport, Targets, depth_weights, mtp_loss
from nextn.model import Model
from nextn.provenance import record_training
from nextn.tensor_file import write_json


@dataclass(frozen=True)
class TrainConfig:
    """steps of batch_size rows of length tokens. depths: K of the loss. lam: see `LambdaSchedule.parse`.

    beta: depth weights proportional to beta^(k-1); None = equal. optimizer: `adamw`, or `muon` for the layers' matrices
    at matrix_lr (https://kellerjordan.github.io/posts/muon/) with AdamW at lr for all else. Rates rise over `warmup`
    steps and fall linearly to `final_lr` of themselves over the last `decay` share. dtype: `float32`, or `bfloat16` for
    autocast. compile: decoder layers through torch.compile. save_every, eval_every: steps, 0 = only at the end.
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
    dtype: str = "bfloat16"
    compile: bool = False
    save_every: int = 0
    eval_every: int = 0
    eval_batches: int = 4

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch_size", 1), ("length", 2), ("depths", 0), ("warmup", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)}; expected a whole number >= {least}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype = {self.dtype!r}; expected float32 or bfloat16")
        if self.optimizer not in ("adamw", "muon"):
            raise ConfigError(f"optimizer = {self.optimizer!r}; expected adamw or muon")
        if self.depths >= self.length:
            raise ConfigError(f"depths = {self.depths}; expected fewer than length = {self.length} tokens")
        if not 0 <= self.decay <= 1 or not 0 < self.lr < 1 or self.clip <= 0:
            raise ConfigError(
                f"{self.decay=}, {self.lr=}, {self.clip=}; expected 0 <= decay <= 1, 0 < lr < 1, clip > 0"
            )
        LambdaSchedule.parse(self.lam, total=self.tokens)
        depth_weights(self.depths, beta=self.beta)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "TrainConfig":
        """Strict: an unknown key is a ConfigError."""
        unknown = sorted(set(values) - {each.name for each in fields(cls)})
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}; known: {', '.join(each.name for each in fields(cls))}")
        return cls(**values)  # type: ignore[arg-type]

    @property
    def tokens(self) -> int:
        return self.steps * self.batch_size * self.length

    def schedule(self, step: int) -> float:
        """What the learning rates are multiplied by at step `step` (0-based)."""
        rise = min(1.0, (step + 1) / (self.warmup + 1))
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return rise * (self.final_lr + (1 - self.final_lr) * min(1.0, left))


@dataclass(frozen=True)
class StepRecord:
    """One optimiser step. loss [D+1]: mean cross-entropy in nats, the trunk's first."""

    step: int
    num_steps: int
    tokens: int
    loss: tuple[float, ...]
    lr: float
    lam: float
    grad_norm: float
    tokens_per_s: float


@dataclass(frozen=True)
class EvalRecord:
    """Held-out figures after `step` steps."""

    step: int
    forced: Forced
    decoded: Decoded | None = None


Record = StepRecord | EvalRecord


class Trainer:
    """Trains `model` in place. `run` yields records; whoever consumes them draws progress and decides when to stop."""

    def __init__(
        self,
        model: Model,
        corpus: Corpus,
        config: TrainConfig,
        *,
        out: Path,
        held_out: Corpus | None = None,
        prompts: list[list[int]] | None = None,
    ) -> None:
        if model.head is None and config.depths:
            raise ConfigError(f"depths = {config.depths}, but the model has no head; use depths = 0")
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{out}: cannot be written: {error}; choose another folder") from error
        self.model, self.config, self.out, self.step = model, config, out, 0
        pack = model.trunk.can_pack
        self.batches = Batches(corpus, batch_size=config.batch_size, length=config.length, seed=config.seed, pack=pack)
        self.held_out = held_out and Batches(
            held_out, batch_size=config.batch_size, length=config.length, seed=config.seed, pack=pack
        )
        self.prompts = prompts or []
        self.lam = LambdaSchedule.parse(config.lam, total=config.tokens)
        self.weights = depth_weights(config.depths, beta=config.beta)
        self.named = dict(_parameters(model))
        self.optimizers = _optimizers(self.named, config)
        if config.compile:
            _compile(model)

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> Iterator[Record]:
        """Train from the current step to the last; on should_stop() or the end, a checkpoint is written.

        Raises TrainingError for a loss that is not finite; checkpoints written before stay.
        """
        with _Log(self.out / "metrics.jsonl", self.step) as log:
            while self.step < self.config.steps and not should_stop():
                record: Record = self._step()
                log.write(record)
                yield record
                if _due(self.step, self.config.eval_every) and self.step < self.config.steps:
                    record = self.evaluate()
                    log.write(record)
                    yield record
                if _due(self.step, self.config.save_every):
                    self.save()
            if self.step == self.config.steps:
                record = self.evaluate(decode=True)
                log.write(record)
                yield record
            self.save()

    def loss(self, batch: Batch, lam: float) -> LossReport:
        """Loss of one batch; the trunk's and the head's gradients both reach the trunk."""
        tokens, documents = batch.tokens.to(self.model.trunk.device), batch.documents.to(self.model.trunk.device)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
            hidden = self.model.trunk(tokens, documents=documents)
            hiddens = [hidden.normed]
            if self.config.depths and self.model.head is not None:
                hiddens += self.model.head.hiddens(tokens, hidden.eaten, self.config.depths, documents=documents)
        targets = Targets(tokens, documents, batch.counted.to(tokens.device))
        weights = outputs(self.model.trunk, self.model.head, len(hiddens) - 1)
        return mtp_loss(hiddens, weights, targets, lam=lam, depth_weights=self.weights)

    def evaluate(self, *, decode: bool = False) -> EvalRecord:
        """Held-out figures now; decode: also through the decoder, on the trainer's prompts."""
        source = self.held_out or self.batches
        batches = (source.batch(index) for index in range(self.config.eval_batches))
        told = None
        # Eager: decoding has a new shape at every step, and each would be compiled.
        with torch.compiler.set_stance("force_eager"):
            figures = forced(self.model, batches, self.config.depths, dtype=getattr(torch, self.config.dtype))
            if decode and self.prompts and self.config.depths:
                told = decoded(self.model, self.prompts, Settings(drafts=self.config.depths, max_tokens=96))
        return EvalRecord(self.step, figures, told)

    def save(self) -> Path:
        """Write `out/step-<n>`: the model in its published layout and the optimiser's state. Older ones are removed."""
        folder = self.out / f"step-{self.step:07d}"
        if not (folder / "trainer.json").exists():
            self.model.save(folder, extra=self._write_state)
        for old in _checkpoints(self.out)[:-2]:
            _remove(old)
        return folder

    def write_model(self, folder: Path) -> None:
        """Write the model in its published layout, with the record of which trunk its head was trained with."""
        record = partial(record_training, source=str(self.out))
        self.model.save(folder, extra=record if self.model.head is not None else None)

    def has_checkpoint(self) -> bool:
        """Whether `out` holds a checkpoint that `resume` could go on from."""
        return bool(_checkpoints(self.out))

    def resume(self) -> bool:
        """Go back to the newest whole checkpoint under `out`; False if there is none.

        Raises CheckpointError for one that is damaged, ConfigError for one that was trained with other settings.
        """
        found = _checkpoints(self.out)
        if not found:
            return False
        folder = found[-1]
        state = json.loads((folder / "trainer.json").read_text())
        if state["config"] != asdict(self.config):
            changed = sorted(key for key, value in asdict(self.config).items() if state["config"].get(key) != value)
            raise ConfigError(f"{folder} was trained with another {', '.join(changed)}; resume with the same settings")
        stored = Model.load(folder)
        named = dict(_parameters(stored))
        with torch.no_grad():
            for name, value in self.named.items():
                value.copy_(named[name])
            _copy_buffers(stored, self.model)
        self._read_state(folder)
        self.step = state["step"]
        return True

    def _step(self) -> StepRecord:
        started, config = time.perf_counter(), self.config
        lam, scale = self.lam.at(self.step * config.batch_size * config.length), config.schedule(self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * scale
        report = self.loss(self.batches.batch(self.step), lam)
        if not bool(torch.isfinite(report.total)):
            raise TrainingError(
                f"the loss of step {self.step} is {report.total.item()}; batch {self.step} of seed {config.seed} or a "
                f"learning rate of {config.lr * scale:.2g} broke it. Checkpoints in {self.out} stand; try a lower lr"
            )
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        report.total.backward()
        norm = nn.utils.clip_grad_norm_(self.named.values(), config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        tokens = config.batch_size * config.length
        seconds = time.perf_counter() - started
        loss = tuple(report.per_depth.tolist())
        return StepRecord(
            self.step, config.steps, self.step * tokens, loss, config.lr * scale, lam, float(norm), tokens / seconds
        )

    def _write_state(self, folder: Path) -> None:
        names = {id(value): name for name, value in self.named.items()}
        tensors: dict[str, Tensor] = {}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                tensors |= {f"{names[id(parameter)]}.{key}": torch.as_tensor(value) for key, value in state.items()}
        save_file(tensors, folder / "optimizer.safetensors")
        write_json(folder / "trainer.json", {"step": self.step, "config": asdict(self.config)})

    def _read_state(self, folder: Path) -> None:
        tensors = load_file(folder / "optimizer.safetensors")
        names = {id(value): name for name, value in self.named.items()}
        missing = []
        for optimizer in self.optimizers:
            keys = (
                ("momentum_buffer",) if isinstance(optimizer, torch.optim.Muon) else ("step", "exp_avg", "exp_avg_sq")
            )
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                stored = {key: tensors.get(f"{names[id(parameter)]}.{key}") for key in keys}
                missing += [f"{names[id(parameter)]}.{key}" for key, value in stored.items() if value is None]
                optimizer.state[parameter] = stored
        if missing:
            raise CheckpointError(f"{folder}: {len(missing)} optimiser tensors are missing: {', '.join(missing[:4])}")


class _Log:
    """metrics.jsonl: one record a line. Lines of steps that a resumed run does again are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        old = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in old if json.loads(line)["step"] <= step]
        path.write_text("".join(line + "\n" for line in kept))
        self.file = path.open("a", buffering=1)

    def __enter__(self) -> "_Log":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, record: Record) -> None:
        values = asdict(record)
        if isinstance(record, EvalRecord):
            values["forced"] |= {"greedy_AL": record.forced.greedy_length, "sampled_AL": record.forced.sampled_length}
            if record.decoded is not None:
                values["decoded"] = record.decoded.acceptance.as_record() | {"looping": record.decoded.looping}
        self.file.write(json.dumps(values) + "\n")


def _parameters(model: Model) -> Iterator[tuple[str, nn.Parameter]]:
    for name, part in (("trunk", model.trunk.model), ("head", model.head)):
        if part is not None:
            yield from ((f"{name}.{key}", value) for key, value in part.named_parameters())


def _copy_buffers(source: Model, target: Model) -> None:
    for old, new in ((source.trunk.model, target.trunk.model), (source.head, target.head)):
        if old is not None and new is not None:
            for (_, value), (_, own) in zip(old.named_buffers(), new.named_buffers(), strict=True):
                own.copy_(value)


def _optimizers(named: Mapping[str, nn.Parameter], config: TrainConfig) -> list[torch.optim.Optimizer]:
    named = {name: value for name, value in named.items() if value.requires_grad}
    matrices = [value for name, value in named.items() if config.optimizer == "muon" and _is_inner_matrix(name, value)]
    taken = {id(value) for value in matrices}
    rest = [value for value in named.values() if id(value) not in taken]
    # Norm gains and biases are not decayed: pulling a gain to 0 (or 1 + w to 1) is not what decay is for.
    groups = [
        {"params": [value for value in rest if value.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [value for value in rest if value.ndim < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)]
    if matrices:
        muon = torch.optim.Muon(
            matrices, lr=config.matrix_lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        optimizers.append(muon)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def _is_inner_matrix(name: str, value: nn.Parameter) -> bool:
    # Muon is for matrices between hidden states; embeddings, output heads and routers stay with AdamW.
    return value.ndim == 2 and not any(part in name for part in ("embed_tokens", "lm_head", "gate.weight"))


def _compile(model: Model) -> None:
    # Layer by layer: layers of one kind share a graph, which is compiled once; the head's block is such a layer.
    blocks = model.head.layers if model.head is not None else []
    for layer in [*model.trunk.decoder.layers, *blocks]:
        layer.compile()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _checkpoints(out: Path) -> list[Path]:
    return sorted(folder for folder in out.glob("step-*") if (folder / "trainer.json").exists())


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def bits(nats: float) -> float:
    """Nats per token -> bits per token (bits per byte for a byte-level model)."""
    return nats / math.log(2)
