"""What the processes of a pair are asked to do: parts of a training run, and looks at what came out."""

import gc
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import torch
from tiny import FIXTURES, build, refrains
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.mapped_memory import return_freed_memory
from nextn.errors import CheckpointError, ConfigError, TrainingError
from nextn.losses.mtp_loss import Targets
from nextn.model.layer_states import remove_states
from nextn.model.model import Model
from nextn.model.streamed_trunk import StreamedTrunk
from nextn.train import head_run
from nextn.train.config import HeadConfig, TrainConfig
from nextn.train.distributed import Ranks, unsharded
from nextn.train.head_run import INIT_STATES, StartingPoint, load_starting_point, prepare_head_run
from nextn.train.head_task import HeadTask
from nextn.train.hidden_cache import HiddenStateCache
from nextn.train.joint_run import prepare_joint_run
from nextn.train.joint_task import JointTask
from nextn.train.loop import Trainer
from nextn.train.metrics import EvalRecord, HeadRecord, StepRecord

CONFIG = TrainConfig(
    steps=4, batch_size=4, length=24, depths=3, warmup=1, lam="0.5", dtype="float32", eval_batches=1, lr=1e-3
)


class Ragged(JointTask):
    """A joint task where some rows are mostly padding, so that processes and parts have different numbers of labels."""

    def _targets(self, batch):
        whole = super()._targets(batch)
        documents = whole.documents.clone()
        documents[whole.tokens[:, 0] % 3 == 0, 5:] = -1
        return Targets(whole.tokens, documents, documents >= 0)


def trainer(ranks: Ranks, out: Path, name: str = "glm4_moe", modules: int = 1, seed: int = 0, **settings) -> Trainer:
    model = build(name, modules=modules, seed=seed, initializer_range=0.05)
    task = Ragged(model, refrains(12, 60, seed=1), replace(CONFIG, **settings), ranks=ranks)
    return Trainer(task, out=out)


def values(subject: Trainer) -> dict[str, torch.Tensor]:
    """Whole parameters, on the first process; none on the others."""
    with unsharded(subject.task.joint_module, subject.ranks):
        if not subject.ranks.is_first:
            return {}
        return {name: value.detach().clone() for name, value in subject.task.joint_module.named_parameters()}


def head_values(subject: Trainer) -> dict[str, torch.Tensor]:
    """The head's part of that."""
    return {name: value for name, value in values(subject).items() if name.startswith("head.")}


def reported(records) -> list[tuple[float, ...]]:
    """What each step and evaluation said, times aside."""
    lines = []
    for record in records:
        if isinstance(record, StepRecord):
            lines.append((record.step, *record.loss, *record.match, *record.overlap, record.grad_norm))
        elif isinstance(record, EvalRecord):
            rates = record.forced.loss + record.forced.match + record.forced.overlap
            lines.append((record.step, *rates))
        elif isinstance(record, HeadRecord):
            parts = (record.heldout.greedy, record.heldout.sampled)
            figures = [(*each.rates, *each.emitted, *each.rounds) for each in parts]
            lines.append((record.step, record.heldout.num_positions, *figures[0], *figures[1]))
    return lines


def train(ranks, out, settings=None, *, until=None, ask=None, resume=False):
    """A run, or the part of it up to step `until` -> what it said, whole parameters, step. ask: who stops it."""
    subject = trainer(ranks, out, **(settings or {}))
    if resume:
        assert subject.resume()
    asks = ask in (None, ranks.rank)
    lines = reported(subject.run(lambda: asks and until is not None and subject.step >= until))
    return lines, values(subject), subject.step


def train_and_stop(ranks, out, settings, until, ask=None):
    return train(ranks, out, settings, until=until, ask=ask)


def go_on(ranks, out, settings=None):
    return train(ranks, out, settings, resume=True)


HEAD = HeadConfig(
    steps=4, batch_size=4, length=24, depths=3, warmup=1, dtype="float32", eval_batches=2, eval_every=2, lr=1e-3
)


# Two things magnify the order of sums beyond the tests' 1e-5. AdamW's first step divides a gradient by its size: one of
# 5e-10 among others of 3e-3 was nothing but rounding, and moved its weight by 1.3e-5. Seed 7 has no such gradient: no
# weight differs by more than 5e-7 with AVX-512, AVX2 or SSE (with seed 2, by 3e-5). And bfloat16 states in front of
# lm_head are rounded up or down, which changed single acceptance probabilities by 3e-4: the fixture is in float32.
FIXTURE_HEAD = replace(HEAD, seed=7)


def head_trainer(ranks: Ranks, out: Path, config: HeadConfig = FIXTURE_HEAD) -> Trainer:
    """A head on a frozen trunk, both from a trained fixture, in float32."""
    origin, corpus = Inventory.of(Checkpoint.open(FIXTURES / "glm")), refrains(12, 60, seed=1, eos=47)
    model = Model.load(FIXTURES / "glm", dtype=torch.float32, defer=not ranks.is_alone)
    return Trainer(HeadTask(model, corpus, config, origin=origin, ranks=ranks), out=out)


def train_head(ranks, out, *, until=None, resume=False, write=False, config=FIXTURE_HEAD, states=None):
    """A run, or a part of it -> what it said; of the trunk, whether it is what it was; the head's parameters."""
    subject = head_trainer(ranks, out, config)
    if states is not None:
        with patch.dict(HiddenStateCache.__init__.__kwdefaults__, shard_bytes=40_000):  # three batches, and one
            list(subject.task.cached(states).fill(ranks=ranks))
    if resume:
        assert subject.resume()
    before = values(subject)
    lines = reported(subject.run(lambda: until is not None and subject.step >= until))
    after = values(subject)
    if write:
        subject.write_result(out / "model")
    frozen = [name for name in before if name.startswith("trunk.")]
    head = {name: value for name, value in after.items() if name.startswith("head.")}
    return lines, all(torch.equal(before[name], after[name]) for name in frozen), head


def head_until(ranks, out, until):
    return train_head(ranks, out, until=until)


def head_with(ranks, out, settings):
    return train_head(ranks, out, config=replace(FIXTURE_HEAD, **settings))


def head_from_states(ranks, out, states):
    return train_head(ranks, out, states=states)


def streamed_head(ranks, out, model, fresh):
    """A head of a streamed trunk -> what training said, the head's parameters, and which layers this process ran."""
    layers, real = [], StreamedTrunk._loaded
    start, data = StartingPoint(model, stream=True, fresh=fresh), [out.parent / "text.txt"]
    with patch.object(StreamedTrunk, "_loaded", lambda self, index: layers.append(index) or real(self, index)):
        run = prepare_head_run(out, start, data=data, settings=asdict(HEAD), ranks=ranks)
        with patch.dict(HiddenStateCache.__init__.__kwdefaults__, shard_bytes=40_000):
            cache = run.task.cached(out / "hidden")
        run.task.stream_trunk(out / "states", cache, lambda _: None)
        list(cache.fill(ranks=ranks))
    lines = reported(run.trainer.run(lambda: False))
    head = {name: value for name, value in values(run.trainer).items() if name.startswith("head.")}
    return lines, head, layers


def one_by_one(ranks, failing):
    """In which order the processes worked, by a file; or what each says if one fails."""
    order = []

    def work():
        if ranks.rank == failing:
            raise ConfigError("there is no such text")
        order.append(time.monotonic())
        return ranks.rank

    try:
        return ranks.one_by_one(work), order
    except (ConfigError, TrainingError) as error:
        return str(error), order


def head_to_the_end(ranks, out):
    return train_head(ranks, out, resume=True, write=True)


def export(ranks, out):
    """Train, and write the result -> whole parameters."""
    subject = trainer(ranks, out)
    list(subject.run())
    subject.write_result(out / "model")
    return values(subject)


def held(ranks, out):
    """How many values this process keeps, and of how many; and whether tied weights are one parameter."""
    subject = trainer(ranks, out, name="cohere2_moe")
    parameters = [*subject.task.named.values()]
    assert all(isinstance(each, DTensor) for each in parameters)
    trunk = subject.task.model.trunk
    kept = sum(each.to_local().numel() for each in parameters)
    return kept, sum(each.numel() for each in parameters), trunk.embedding.weight is trunk.output.weight


def exchanges(ranks, out, accumulate):
    """How often gradients are added up over the processes in one step."""
    subject = trainer(ranks, out, accumulate=accumulate)
    with patch.object(dist, "reduce_scatter_single", wraps=dist.reduce_scatter_single) as reduce:
        subject._step()
    return reduce.call_count


def break_batch(ranks, out):
    """A weight that is not a number on one process alone: what each process says of it."""
    subject = trainer(ranks, out)
    if not ranks.is_first:
        with torch.no_grad():
            subject.task.model.trunk.final_norm.weight.to_local().fill_(float("nan"))
    try:
        list(subject.run())
    except TrainingError as error:
        return str(error)
    return None


def damaged(ranks, out, how):
    """Train to step 2, then lose something of the checkpoint: what each process says on resuming."""
    train(ranks, out, until=2)
    shards = out / "step-0000002" / "shards"
    if ranks.is_first:
        victim = sorted(shards.iterdir())[0]
        victim.unlink() if how == "lost" else victim.write_bytes(b"x" * victim.stat().st_size)
    ranks.wait()
    try:
        trainer(ranks, out).resume()
    except CheckpointError as error:
        return str(error)
    return None


def uneven(ranks, out):
    try:
        trainer(ranks, out, batch_size=3)
    except ConfigError as error:
        return str(error)
    return None


def fresh_head(ranks, out, model):
    """A new head on a frozen trunk -> what training said, and the head's parameters before and after it."""
    run = prepare_head_run(
        out, StartingPoint(model, fresh=True), data=[out.parent / "text.txt"], settings=asdict(HEAD), ranks=ranks
    )
    before = head_values(run.trainer)
    return reported(run.trainer.run(lambda: False)), before, head_values(run.trainer)


def peak_of_loading(ranks, folder, stream=False):
    """How far resident memory rises while a checkpoint is loaded and sharded, and the bytes of the process's share."""

    def load():
        start = StartingPoint(folder, stream=stream)
        model, origin, _ = load_starting_point(start, near=folder.parent, ranks=ranks)
        return HeadTask(model, refrains(12, 60, seed=1), HEAD, origin=origin, ranks=ranks).joint_module

    return peak(load)


def peak_of_fresh_head(ranks, out, model):
    """The same while a new head is made and sharded with its trunk."""
    data, start = [out.parent / "text.txt"], StartingPoint(model, fresh=True)
    head_run._INIT_TOKENS = 256  # their states are no part of the trunk

    def load():
        if ranks.is_first:
            remove_states(out / INIT_STATES)
        ranks.wait()
        return prepare_head_run(out, start, data=data, settings=asdict(HEAD), ranks=ranks).task.joint_module

    return peak(load)


def peak_of_joint_training(ranks, out, config):
    """The same while trunk and head are made, to be trained jointly."""
    return peak(lambda: joint_from_scratch(ranks, out, config).task.joint_module)


def joint_from_scratch(ranks, out, config):
    """The trainer of a new model."""
    settings = asdict(CONFIG) | {"depths": 1}
    data = [out.parent / "text.txt"]
    return prepare_joint_run(out, data=data, recipe="demo", model=config, settings=settings, ranks=ranks).trainer


def train_from_scratch(ranks, out, config):
    """Parameters before training, and what it said."""
    subject = joint_from_scratch(ranks, out, config)
    return values(subject), reported(subject.run(lambda: False))


def peak(load):
    load()  # imports, and buffers that stay
    peaks = []
    for _ in range(2):  # other threads of the process may add to one of them
        gc.collect()
        return_freed_memory()
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        before = resident("VmRSS")
        module = load()
        peaks.append(resident("VmHWM") - before)
        share = sum(value.to_local().nbytes for value in module.parameters() if isinstance(value, DTensor))
        del module
    return min(peaks), share


def resident(key):
    return 1024 * int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1])
