"""A head on a frozen trunk: what may change, exact resume, the best head kept, bad input; and the files it becomes."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from quick import families, loop, others_slow
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny import CONFIGS, FIXTURES, MOST, build, refrains

from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint, write_index
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import Provenance, trunk_fingerprint
from nextn.checkpoint.safetensors_file import RawTensor, write_json, write_safetensors
from nextn.checkpoint.staging_folder import owned
from nextn.edit.restore import restore
from nextn.errors import CheckpointError, ConfigError, FamilyError, TrainingError
from nextn.family_table import LAYOUT_FIELD, MIMO_ARCHITECTURE, find
from nextn.family_table.rows import MIMO_DRAFT
from nextn.model.model import Model
from nextn.train import checkpointing
from nextn.train.config import PARTS, HeadConfig, part_of
from nextn.train.head_files import write_standalone_head, write_with_trunk
from nextn.train.head_task import HeadTask
from nextn.train.hidden_cache import KEY, HiddenStateCache
from nextn.train.loop import Trainer
from nextn.train.metrics import HeadRecord, StepRecord

CONFIG = HeadConfig(
    steps=6, batch_size=2, length=24, depths=3, warmup=1, dtype="float32", eval_batches=2, eval_every=0, save_every=0
)


@pytest.fixture(scope="module")
def corpus():
    return refrains(12, 60, seed=1, eos=47)


def of_fixture(corpus, config=CONFIG, *, name="glm", dtype=None, **settings):
    """A task on a trained fixture, with the fixture as its origin."""
    origin = Inventory.of(Checkpoint.open(FIXTURES / name))
    return HeadTask(Model.load(FIXTURES / name, dtype=dtype), corpus, config, origin=origin, **settings)


def of_family(name, folder, corpus, config):
    model = build(name, modules=MOST[name], initializer_range=0.02)
    model.save(folder)
    return HeadTask(model, corpus, config, origin=Inventory.of(Checkpoint.open(folder)), has_baseline=False)


def losses(records):
    return [record.loss for record in records if isinstance(record, StepRecord)]


@pytest.mark.more
@pytest.mark.parametrize("name", families(CONFIGS))
def test_only_the_head_changes(name, tmp_path):
    """By name: after training, every tensor of the trunk is what it was, bit for bit, and none ever had a gradient;
    every parameter of the head that takes one has one. Its loss falls."""
    config = replace(CONFIG, steps=10, lr=5e-3, depths=max(2, MOST[name]), eval_batches=1)
    task = of_family(name, tmp_path / "model", refrains(12, 60, seed=1), config)
    trunk = task.model.trunk.model
    before = {key: value.clone() for key, value in trunk.state_dict().items()}
    trainer = Trainer(task, out=tmp_path / "run")
    steps = []
    for record in trainer.run():
        steps += [record] if isinstance(record, StepRecord) else []
        assert [key for key, value in trunk.named_parameters() if value.grad is not None or value.requires_grad] == []
    assert [key for key, value in trunk.state_dict().items() if not torch.equal(value, before[key])] == []
    asleep = [key for key, value in task.named.items() if value.requires_grad and value.grad is None]
    assert asleep == []
    assert all(key.startswith("head.") for key in task.named)
    stepped = {id(each) for part in trainer.optimizers for group in part.param_groups for each in group["params"]}
    assert not stepped & {id(value) for value in trunk.parameters()}
    assert sum(steps[-1].loss) < sum(steps[0].loss)


@pytest.mark.more
@pytest.mark.parametrize("kv", ["own", "decode", "first"])
@pytest.mark.parametrize("objective", others_slow(["ce", "kl", "tv", "e2e-tv"], "ce", "e2e-tv"))
def test_every_objective_trains(objective, kv, corpus, tmp_path):
    task = of_fixture(corpus, replace(CONFIG, objective=objective, kv=kv, steps=2, eval_batches=1))
    records = list(Trainer(task, out=tmp_path).run())
    assert torch.isfinite(torch.tensor(losses(records))).all()
    assert all(0 <= share <= 1 for record in records[1:3] for share in record.match + record.overlap)


def test_what_later_depths_attend_to_is_the_configs(corpus):
    """Depth 1 is the same, the depths beyond it are not."""
    tasks = [of_fixture(corpus, replace(CONFIG, kv=kv)) for kv in ("own", "decode", "first")]
    for one, other in combinations([task.loss(task.example(0), 1.0).sums for task in tasks], 2):
        torch.testing.assert_close(one[0], other[0])
        assert (one[1:] - other[1:]).abs().min() > 1e-4


def test_a_half_precision_head_trains_in_fp32(corpus):
    """The trunk stays bf16; a step of 1e-4 that bf16 would round away stays."""
    task = of_fixture(corpus, replace(CONFIG, dtype="bfloat16"), dtype=torch.bfloat16)
    assert task.stored_dtype == torch.bfloat16
    assert {value.dtype for value in task.named.values() if value.requires_grad} == {torch.float32}
    assert task.model.trunk.dtype == torch.bfloat16
    for dtype in ("bfloat16", "float32"):
        task.config = replace(task.config, dtype=dtype)
        task.loss(task.example(0), 1.0).total.backward()
        assert task.named["head.stack.0.projection.weight"].grad.abs().sum() > 0


def test_shares_of_two_ranks_add_up(corpus):
    task = of_fixture(corpus)
    whole = task.loss(task.example(0), 1.0)
    shares = [task.example(0, rank=rank, world=2) for rank in (0, 1)]
    counts = sum(task.counts(share) for share in shares)
    assert torch.equal(counts, whole.counts)
    parts = [task.loss(share, 1.0, denominator=counts) for share in shares]
    torch.testing.assert_close(sum(part.total for part in parts), whole.total)


def gradients(task, out):
    """What the first step reports, and the gradient of every parameter."""
    report = Trainer(task, out=out)._backward(0.7)
    return report, {name: value.grad for name, value in task.named.items()}


@pytest.mark.more
@pytest.mark.parametrize("objective", ["kl", "lk", "e2e-tv"])
def test_accumulated_gradients_are_those_of_the_whole_batch(objective, corpus, tmp_path, monkeypatch):
    """In fp64, to 1e-10, with different numbers of labels in the parts."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # norms, which else round to fp32
    masked = replace(corpus, mask=np.random.default_rng(0).random(corpus.num_tokens) < 1 / 3)
    made = []
    for parts in (1, 2, 4):
        task = of_fixture(
            masked, replace(CONFIG, batch_size=4, accumulate=parts, objective=objective), name="qwen"
        )  # dense: grouped products of experts know no fp64
        task.model.trunk.double(), task.head.double()
        made.append(gradients(task, tmp_path))
    whole, wanted = made[0]
    assert whole.counts.min() > 0
    for report, grads in made[1:]:
        assert torch.equal(report.counts, whole.counts)
        torch.testing.assert_close(report.total, whole.total, rtol=1e-12, atol=0)
        for name, grad in wanted.items():
            torch.testing.assert_close(grads[name], grad, rtol=0, atol=1e-10)


@pytest.mark.more
def test_parts_of_stored_batches(corpus, tmp_path):
    """Rows of states on disk are dealt out in parts like rows of text; the files are the same for any number."""
    made = []
    for parts in (1, 2):
        task = of_fixture(corpus, replace(CONFIG, batch_size=4, accumulate=parts))
        first, *_ = list(task.cached(tmp_path / "hidden").fill())
        assert first == (0 if parts == 1 else 6, 6)
        made.append(gradients(task, tmp_path))
    for name, grad in made[0][1].items():
        torch.testing.assert_close(made[1][1][name], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.more
def test_resume_is_exact(corpus, tmp_path):
    config = replace(CONFIG, eval_every=2, patience=5)
    whole = Trainer(of_fixture(corpus, config), out=tmp_path / "whole")
    reported = list(whole.run())
    first = Trainer(of_fixture(corpus, config), out=tmp_path / "cut")
    records = list(first.run(lambda: first.step >= 3))
    second = Trainer(of_fixture(corpus, config), out=tmp_path / "cut")
    assert second.resume()
    records += second.run()
    assert losses(records) == losses(reported)
    assert second.best_tracker == whole.best_tracker
    assert all(
        torch.equal(one, two) for one, two in zip(second.task.named.values(), whole.task.named.values(), strict=True)
    )


@pytest.mark.more
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_some_parts_are_trained(optimizer, corpus, tmp_path):
    """All parameters of these parts change, no others; the optimizer has state of these alone, and a run resumes."""
    config = replace(CONFIG, trained_parts="eh_proj, norms,attention", optimizer=optimizer)
    before = {name: value.detach().clone() for name, value in of_fixture(corpus, config).named.items()}
    whole, first = (Trainer(of_fixture(corpus, config), out=tmp_path / name) for name in ("whole", "cut"))
    list(whole.run())
    changed = {name for name, value in whole.task.named.items() if not torch.equal(value, before[name])}
    parts = {part: {name for name in before if part_of(name.removeprefix("head.")) == part} for part in PARTS}
    assert changed == parts["eh_proj"] | parts["norms"] | parts["attention"]
    assert all(parts[part] for part in ("experts", "router", "mlp"))
    list(first.run(lambda: first.step >= 3))
    moments = load_file(next((tmp_path / "cut").glob("step-*")) / "optimizer.safetensors")
    assert {name.rpartition(".")[0] for name in moments} == changed
    second = Trainer(of_fixture(corpus, config), out=tmp_path / "cut")
    assert second.resume()
    list(second.run())
    assert all(torch.equal(value, whole.task.named[name]) for name, value in second.task.named.items())
    with pytest.raises(ConfigError, match="another trained_parts"):
        Trainer(of_fixture(corpus, replace(config, trained_parts="norms")), out=tmp_path / "cut").resume()


@pytest.mark.parametrize("name", families(CONFIGS))
def test_every_parameter_has_a_part(name):
    """In every family; each head has norms, a projection, attention, and an MLP or experts."""
    parts = {part_of(name) for name, _ in build(name).head.named_parameters()}
    assert {"norms", "eh_proj", "attention"} <= parts
    assert {"mlp", "experts"} & parts
    assert "other" not in parts


@pytest.mark.more
def test_a_checkpoint_holds_the_head_alone(corpus, tmp_path):
    task = of_fixture(corpus)
    list(Trainer(task, out=tmp_path).run())
    stored = load_file(tmp_path / "step-0000006" / "head.safetensors")
    assert stored.keys() == task.head.state_dict().keys()


@pytest.mark.more
def test_states_from_disk_train_the_same_head(corpus, tmp_path, monkeypatch):
    """An epoch's states, made once: the same loss as from the text, and steps do not run the trunk again."""
    task = of_fixture(corpus, replace(CONFIG, steps=4))
    list(task.cached(tmp_path / "hidden").fill())
    for step in range(4):
        example = task.example(step)
        assert example.hidden is not None
        reported, again = task.loss(example, 1.0), task.loss(replace(example, hidden=None), 1.0)
        torch.testing.assert_close(reported.sums, again.sums)
    monkeypatch.setattr(task.model.trunk, "forward", lambda *args, **kwargs: pytest.fail("the trunk ran"))
    Trainer(task, out=tmp_path / "run")._step()
    with pytest.raises(ConfigError, match="limit"):
        task.cached(tmp_path / "other", limit_gb=-1)


@pytest.mark.more
@pytest.mark.parametrize("stream", [False, True])
def test_states_of_an_edited_trunk_are_refused(stream, corpus, tmp_path):
    """One byte that no fingerprint samples, whether the trunk is in memory or streamed; a head's file may change."""
    build("glm4_moe").save(tmp_path / "model")

    def cached():
        origin = Inventory.of(Checkpoint.open(tmp_path / "model"))
        model = Model.load(tmp_path / "model", stream=stream)
        return HeadTask(model, corpus, CONFIG, origin=origin).cached(tmp_path / "hidden")

    cache = cached()
    if stream:
        write_json(tmp_path / "hidden" / KEY, cache._key)
    else:
        list(cache.fill())
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    checkpoint = Checkpoint.open(tmp_path / "model")
    for path in (tmp_path / "model").glob("*.safetensors"):
        if path.name != checkpoint.info(name).file:
            os.utime(path, (0, 0))
    cached()
    with (tmp_path / "model" / checkpoint.info(name).file).open("r+b") as file:
        file.seek(checkpoint.info(name).begin)
        file.write(b"1")
    edited = Inventory.of(Checkpoint.open(tmp_path / "model"))
    assert trunk_fingerprint(edited) == trunk_fingerprint(Inventory.of(checkpoint))
    with pytest.raises(ConfigError, match="holds the hidden states of another trunk"):
        cached()


@pytest.mark.slow
def test_a_streamed_trunk_trains_as_good_a_head(corpus, tmp_path):
    """From an untrained projection: the acceptance of the run in memory, without a cache, within its interval."""
    config, scores = replace(CONFIG, steps=60, lr=5e-3, eval_batches=10), []
    for stream in (False, True):
        model, origin = Model.load(FIXTURES / "glm", stream=stream), Inventory.of(Checkpoint.open(FIXTURES / "glm"))
        with torch.no_grad():
            model.head.stack[0].projection.weight.normal_(std=0.02, generator=torch.Generator().manual_seed(1))
        task = HeadTask(model, corpus, config, origin=origin)
        if stream:
            cache = task.cached(tmp_path / "hidden")
            task.stream_trunk(tmp_path / "states", cache, lambda layer: None)
            list(cache.fill())
        tracker = (trainer := Trainer(task, out=tmp_path / str(stream))).best_tracker
        list(trainer.run())
        assert tracker.best.score > tracker.baseline.score + 3 * tracker.best.noise()
        scores.append(tracker.best)
    assert not scores[1].is_worse(scores[0])


def test_another_trunk_is_refused(corpus, tmp_path):
    list(Trainer(of_fixture(corpus), out=tmp_path).run())
    with pytest.raises(CheckpointError, match=r"step-0000006: trained on another trunk than .*glm_one"):
        Trainer(of_fixture(corpus, name="glm_one"), out=tmp_path).resume()


@pytest.mark.more
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nan_names_the_batch_and_keeps_the_last_checkpoint(where, corpus, tmp_path, monkeypatch):
    trainer = Trainer(of_fixture(corpus, replace(CONFIG, save_every=1)), out=tmp_path)
    whole = trainer.task.loss

    def broken(example, lam, **over):
        report = whole(example, lam, **over)
        if trainer.step == 2 and where == "gradient":
            report.total.register_hook(lambda grad: grad * float("nan"))
        return replace(report, total=report.total * float("nan")) if trainer.step == 2 and where == "loss" else report

    monkeypatch.setattr(trainer.task, "loss", broken)
    with pytest.raises(TrainingError, match=f"the {where} of step 2 is nan; the cause is batch 2 of seed 0"):
        list(trainer.run())
    again = Trainer(of_fixture(corpus, replace(CONFIG, save_every=1)), out=tmp_path)
    assert again.resume()
    assert all(torch.isfinite(value).all() for value in again.task.named.values())


def test_a_best_head_of_a_killed_session_is_kept(corpus, tmp_path):
    """Killed after an evaluation and before the next checkpoint, and resumed with less time than that took."""
    config = replace(CONFIG, eval_every=1, save_every=2, lr=1e-2, warmup=0)
    first = Trainer(of_fixture(corpus, config), out=tmp_path)
    scores = {}
    for record in first.run():
        if isinstance(record, HeadRecord):
            scores[record.step] = record.heldout.score
            if record.step == 3:
                break
    best = max(scores.keys() - {0}, key=lambda step: scores[step])
    second = Trainer(of_fixture(corpus, replace(config, minutes=1e-6)), out=tmp_path)
    assert second.resume()
    list(second.run())
    assert second.step == 2
    assert (second.best_tracker.best_step, second.best_tracker.best.score) == (best, scores[best])
    assert second.task.evaluate(2).heldout.score == pytest.approx(scores[best])
    assert best == 3, f"else this shows nothing: {scores}"


@pytest.mark.more
def test_the_best_head_is_taken_back_and_patience_ends_the_run(corpus, tmp_path):
    """A learning rate that wrecks the head: its first evaluation is the best, and two worse ones end the run."""
    config = replace(CONFIG, steps=40, lr=0.1, warmup=0, eval_every=2, patience=2)
    trainer = Trainer(of_fixture(corpus, config), out=tmp_path)
    seen = []
    records = [record for record in trainer.run(on_evaluation=seen.append) if isinstance(record, HeadRecord)]
    assert [each.step for each in seen if each.batch == each.num_batches] == [each.step for each in records]
    assert trainer.step < 40
    best = max(records[1:], key=lambda record: record.heldout.score)
    assert (trainer.best_tracker.best_step, trainer.best_tracker.best) == (best.step, best.heldout)
    assert trainer.task.evaluate(trainer.step).heldout.score == pytest.approx(best.heldout.score)
    assert trainer.best_tracker.is_worse
    assert trainer.best_tracker.baseline == records[0].heldout


@pytest.mark.more
def test_the_curve_is_what_evaluations_say(corpus):
    """Of each number of drafts; more drafts never make rounds shorter, and rows bound them."""
    task = of_fixture(corpus, replace(CONFIG, eval_depths=2))
    points = task.curve(5)
    assert [len(point.greedy.rates) for point in points] == [1, 2, 3, 4, 5]
    assert points[1] == task.evaluate(0).heldout
    lengths = [point.greedy.length for point in points]
    assert lengths[0] > 1.2
    assert lengths[2] > lengths[0]
    short = of_fixture(corpus, replace(CONFIG, length=4, depths=2))
    assert len(short.curve()) == 3


@pytest.mark.more
def test_a_fresh_head_has_nothing_to_be_compared_with(corpus, tmp_path):
    trainer = Trainer(of_fixture(corpus, has_baseline=False), out=tmp_path)
    records = list(trainer.run())
    assert isinstance(records[0], StepRecord)
    assert not trainer.best_tracker.is_worse


def killed(work, folder, is_due):
    """Run `work(folder)` in a process of its own, and kill it as soon as it is due."""
    process = multiprocessing.get_context("fork").Process(target=work, args=(folder,))
    process.start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not is_due():
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def _slowly(folder):
    """Train with a checkpoint at every step, each of which takes long to write."""
    whole = checkpointing.write_tensors

    def save(*args):
        whole(*args)
        time.sleep(0.15)

    checkpointing.write_tensors = save
    texts = refrains(12, 60, seed=1, eos=47)
    list(Trainer(of_fixture(texts, replace(CONFIG, save_every=1, steps=40)), out=folder).run())


@pytest.mark.more
def test_kill_9_during_a_checkpoint_loses_only_the_steps_behind_the_last(corpus, tmp_path):
    """Killed while it writes: what is found is whole, the steps go on from it, and nothing half-written stays."""
    config = replace(CONFIG, save_every=1, steps=40)
    torn = ".step-*/new/optimizer.safetensors"
    killed(_slowly, tmp_path, lambda: (tmp_path / "step-0000003").exists() and any(tmp_path.glob(torn)))
    assert any(tmp_path.glob(".step-*"))
    trainer = Trainer(of_fixture(corpus, config), out=tmp_path)
    assert trainer.resume()
    done = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert done - 1 <= trainer.step <= done
    trainer.save()
    assert not any(tmp_path.glob(".step-*"))


def _filling_slowly(folder):
    """Fill a cache whose files take long to get their names."""
    whole = os.fsync

    def fsync(file):
        whole(file)
        time.sleep(0.15)

    os.fsync = fsync
    task = of_fixture(refrains(12, 60, seed=1, eos=47), replace(CONFIG, save_every=1))
    list(task.cached(folder / "hidden").fill())


@pytest.mark.more
def test_kill_9_while_states_are_written(corpus, tmp_path, monkeypatch):
    """Whole files stay, the torn one goes, only what is missing is made again, and the steps are the same."""
    monkeypatch.setitem(HiddenStateCache.__init__.__kwdefaults__, "shard_bytes", 1)
    config = replace(CONFIG, save_every=1)
    task = of_fixture(corpus, config)
    list(task.cached(tmp_path / "whole").fill())
    reported = losses(Trainer(task, out=tmp_path / "one").run())
    hidden = tmp_path / "two" / "hidden"
    second = hidden / "hidden-00001.safetensors"
    killed(_filling_slowly, tmp_path / "two", lambda: second.exists() and any(hidden.glob(".hidden-*.tmp")))
    assert any(hidden.glob(".hidden-*.tmp"))
    task = of_fixture(corpus, config)
    kept, *_ = list(task.cached(hidden).fill())
    assert 2 <= kept[0] < 6
    assert not any(hidden.glob(".*"))
    for path in hidden.glob("hidden-*"):
        assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()
    assert losses(Trainer(task, out=tmp_path / "two").run()) == reported


@loop(
    ("values", "words"),
    [
        ({"length": 4096}, "length = 4096; the trunk was made for 512 tokens at most"),
        ({"objective": "mse"}, "objective = 'mse'; expected one of ce, kl"),
        ({"kv": "both"}, "kv = 'both'; expected own, decode or first"),
        ({"temperature": 0.0}, "temperature = 0.0; expected a number > 0"),
        ({"depths": 0}, "depths = 0; expected at least 1"),
        ({"depths": 24}, "fewer than length"),
        ({"patience": 2}, "eval_every = 0; expected at least 1, as patience = 2 counts evaluations"),
        ({"eval_depths": 24}, "eval_depths < length"),
        (
            {"trained_parts": "mlp,lm_head"},
            "no part 'lm_head'; its parts are experts, router, norms, eh_proj, mlp, att",
        ),
    ],
)
def test_bad_settings(values, words, corpus):
    with pytest.raises(ConfigError, match=words):
        of_fixture(corpus, replace(CONFIG, **values))


def test_settings_of_heads_are_no_settings_of_joint_training():
    from nextn.train.config import TrainConfig

    with pytest.raises(ConfigError, match="unknown setting 'objective'"):
        TrainConfig.from_dict({"steps": 1, "objective": "kl"})


def test_a_head_that_cannot_be_unrolled(corpus, tmp_path):
    for kv in ("decode", "first"):
        with pytest.raises(ConfigError, match=f"kv = '{kv}': .*; use kv = 'own'"):
            of_family("deepseek_v32", tmp_path / kv, corpus, replace(CONFIG, kv=kv))


def test_keys_of_the_first_run_are_part_of_what_is_written(corpus, tmp_path):
    """The model that training writes decodes so, also with its head restored; another head in its place does not."""
    task = of_fixture(corpus, replace(CONFIG, kv="first", steps=2))
    list(Trainer(task, out=tmp_path / "run").run())
    task.write_result(tmp_path / "model", tmp_path / "run")
    task.write_head(tmp_path / "alone" / "head.safetensors", tmp_path / "run")
    (tmp_path / "alone" / "config.json").unlink()  # the file says it, too
    restore(FIXTURES / "glm", tmp_path / "alone" / "head.safetensors", out=tmp_path / "restored", force=True)
    restore(tmp_path / "restored", FIXTURES / "glm", out=tmp_path / "back", force=True)
    Model.load(tmp_path / "model").save(tmp_path / "saved")
    kinds = {
        name: Model.load(tmp_path / name).head.family.repeated_kv for name in ("model", "restored", "saved", "back")
    }
    assert kinds == {"model": "first", "restored": "first", "saved": "first", "back": "own"}
    alone = Model.load(FIXTURES / "glm", head=tmp_path / "alone" / "head.safetensors")
    assert alone.head.family.repeated_kv == "first"
    with pytest.raises(ConfigError, match=r"kv = 'own': .*; use kv = 'first', or take mtp_repeated_kv"):
        HeadTask(alone, corpus, CONFIG, origin=task.origin)
    mimo = {"architectures": [MIMO_ARCHITECTURE], "model_type": MIMO_DRAFT.layer_model}
    for draft in (mimo, {LAYOUT_FIELD: "step35_draft"}):
        assert find({**draft, "mtp_repeated_kv": "first"}).repeated_kv == "first"
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    write_json(tmp_path / "model" / "config.json", config | {"mtp_repeated_kv": "last"})
    with pytest.raises(FamilyError, match="mtp_repeated_kv = 'last'; expected own or first"):
        Model.load(tmp_path / "model")


def test_no_head(corpus):
    model = Model.load(FIXTURES / "glm")
    model.head = None
    with pytest.raises(ConfigError, match="--init-head makes one"):
        HeadTask(model, corpus, CONFIG, origin=Inventory.of(Checkpoint.open(FIXTURES / "glm")))


def test_a_loss_over_a_part_of_the_vocabulary(corpus, tmp_path):
    """It learns as the whole loss does, and the figures that a head is chosen by are over all tokens."""
    whole, part = (of_fixture(corpus, replace(CONFIG, loss_vocab=size)) for size in (0, 32))
    assert len(part.frequent) == 24
    records = [[*Trainer(task, out=tmp_path / name).run()] for name, task in (("whole", whole), ("part", part))]
    for first, second in zip(*map(losses, records), strict=True):
        assert first != second
        torch.testing.assert_close(second, first, rtol=0.1, atol=0.02)
    assert records[0][0] == records[1][0]  # before the first step
    with pytest.raises(
        ConfigError, match="loss_vocab = 32; expected a number of tokens, with an objective other than ce"
    ):
        replace(CONFIG, loss_vocab=32, objective="ce")


@pytest.mark.more
def test_a_start_that_is_worse_than_guessing_is_noted(corpus, tmp_path):
    task = of_fixture(corpus, CONFIG)
    assert [*map(task.note, Trainer(task, out=tmp_path / "trained").run())] == [None] * (CONFIG.steps + 2)
    damaged = of_fixture(corpus, CONFIG)
    with torch.no_grad():
        next(damaged.head.stack[0].final_norm.parameters()).mul_(-30)
    first, *others = [note for note in map(damaged.note, Trainer(damaged, out=tmp_path / "run").run()) if note]
    assert "above the 3.87 nats of guessing" in first
    assert not others


@pytest.mark.more
def test_a_full_disk_at_a_checkpoint(corpus, tmp_path, monkeypatch):
    """One line that says what is whole, and how to go on; the run goes on from there to the same steps."""
    config = replace(CONFIG, save_every=2)
    reported = losses(Trainer(of_fixture(corpus, config), out=tmp_path / "whole").run())
    out, save = tmp_path / "run", save_file

    def full(tensors, path, **options):
        if "step-0000004" in path:
            Path(path).write_bytes(b"half")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save(tensors, path, **options)

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(CheckpointError) as found:
        list(Trainer(of_fixture(corpus, config), out=out).run())
    assert str(found.value).startswith(f"{out / 'step-0000004'}: cannot be written: No space left on device")
    assert f"{out / 'step-0000002'} is complete: with more free space, `nextn train {out} --resume`" in str(found.value)
    assert "stage" not in str(found.value)
    assert {path.name for path in out.iterdir()} == {"step-0000002", "metrics.jsonl"}
    monkeypatch.undo()
    trainer = Trainer(of_fixture(corpus, config), out=out)
    assert trainer.resume()
    assert losses(trainer.run()) == reported[2:]


def test_room_is_checked_first(corpus, tmp_path, monkeypatch):
    """Checkpoints, the best head and the result; before any step, or before a checkpoint is begun."""
    trainer = Trainer(of_fixture(corpus, replace(CONFIG, save_every=1)), out=tmp_path / "run")
    trainer.save()
    written = sum(path.stat().st_size for path in trainer.folder.checkpoints()[0].glob("*.safetensors"))
    assert trainer.num_bytes_left() > 2 * written
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=trainer.num_bytes_left() - 9))
    with pytest.raises(CheckpointError, match=r"run: not enough disk space: .*, 9 too few.*step-0000000 is complete"):
        next(trainer.run())
    trainer.step = 3
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1))
    with pytest.raises(CheckpointError, match="step-0000003: not enough disk space"):
        trainer.save()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-0000000"]


@pytest.mark.more
def test_two_runs_in_one_folder(corpus, tmp_path):
    """The second is refused while the first one runs, and may go on when it has ended."""
    config = replace(CONFIG, save_every=1)
    first = Trainer(of_fixture(corpus, config), out=tmp_path)
    records = first.run()
    next(records)
    second = Trainer(of_fixture(corpus, config), out=tmp_path)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: another process is changing"):
        list(second.run())
    list(records)
    assert second.resume()
    list(second.run())
    assert not list(tmp_path.glob(".*"))


def trunk_bytes(folder):
    """Name -> dtype, shape and bytes of every tensor that is not the head's own."""
    inventory = Inventory.of(Checkpoint.open(folder))
    heads = inventory.spellings(inventory.own)
    return {
        name: (info.dtype, info.shape, b"".join(inventory.checkpoint.chunks(name)))
        for name, info in inventory.checkpoint.tensors.items()
        if name not in heads
    }


def changed(head):
    with torch.no_grad():
        for value in head.parameters():
            value.add_(0.125)
    return head


def same_head(one, two):
    mine, theirs = one.state_dict(), two.state_dict()
    assert mine.keys() == theirs.keys()
    return all(torch.equal(value, theirs[name].to(value.dtype)) for name, value in mine.items())


@pytest.mark.more
@pytest.mark.parametrize("name", ["glm", "qwen", "v4", "glm_two"])
def test_a_head_is_replaced_and_the_trunk_is_not(name, tmp_path):
    origin = Inventory.of(Checkpoint.open(FIXTURES / name))
    model = Model.load(FIXTURES / name)
    dtype = model.trunk.dtype
    head = changed(model.head.float())
    write_with_trunk(origin, head, tmp_path / "out", dtype=dtype, source="runs/first", trained_length=77)
    assert trunk_bytes(tmp_path / "out") == trunk_bytes(FIXTURES / name)
    again = Model.load(tmp_path / "out")
    assert same_head(again.head, head)
    assert again.head.stack[0].dtype == dtype
    written = Checkpoint.open(tmp_path / "out")
    record = Provenance.read(written)
    assert (record.made_by, record.source, record.trained_length) == ("train", "runs/first", 77)
    assert record.trained_with == record.beside == trunk_fingerprint(origin)
    assert {found.rule for found in audit(written).findings} <= {
        found.rule for found in audit(origin.checkpoint).findings
    }
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_files_of_the_trunk_keep_their_mode(tmp_path):
    """They are linked, so that a change of the new folder's files would be one of the trunk's."""
    trunk = shutil.copytree(FIXTURES / "glm", tmp_path / "trunk")
    files = sorted(trunk.glob("*.safetensors"))
    for file in files:
        file.chmod(0o440)
    head = Model.load(trunk).head
    write_with_trunk(Inventory.of(Checkpoint.open(trunk)), head, tmp_path / "out", dtype=None, source="run")
    assert {file.stat().st_mode & 0o777 for file in files} == {0o440}
    linked = [file for file in (tmp_path / "out").glob("*.safetensors") if file.stat().st_nlink > 1]
    assert linked


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_next", "deepseek_v4", "step3p5", "exaone_moe", "nemotron_h"])
def test_a_head_is_added_where_there_was_none(name, tmp_path):
    """A checkpoint that promises no head and holds none becomes one that loads with it, clean for the audit."""
    model = build(name)
    head = model.head
    model.head = None
    model.save(tmp_path / "trunk")
    origin = Inventory.of(Checkpoint.open(tmp_path / "trunk"))
    write_with_trunk(origin, head, tmp_path / "out", dtype=None, source="runs/first")
    assert trunk_bytes(tmp_path / "out") == trunk_bytes(tmp_path / "trunk")
    assert same_head(Model.load(tmp_path / "out").head, head)
    findings = audit(Checkpoint.open(tmp_path / "out")).findings
    assert not [found.rule for found in findings if found.severity == "error"]


@pytest.mark.more
def test_an_fp8_trunk_stays_fp8(tmp_path):
    """Its bytes and scales stay; the head is written unquantized, and config.json leaves it out of the quantization."""
    model = build("deepseek_v3")
    model.save(tmp_path / "trunk", dtype=torch.bfloat16, fp8=True)
    origin = Inventory.of(Checkpoint.open(tmp_path / "trunk"))
    assert "F8_E4M3" in {info.dtype for info in origin.checkpoint.tensors.values()}
    loaded = Model.load(tmp_path / "trunk")
    head = changed(loaded.head.float())
    write_with_trunk(origin, head, tmp_path / "out", dtype=torch.bfloat16, source="runs/first")
    assert trunk_bytes(tmp_path / "out") == trunk_bytes(tmp_path / "trunk")
    written = Inventory.of(Checkpoint.open(tmp_path / "out"))
    assert {written.info(name).dtype for name in written.own} <= {"BF16", "F32"}
    assert not [found.rule for found in audit(written.checkpoint).findings if found.severity == "error"]
    again = Model.load(tmp_path / "out")
    torch.testing.assert_close(
        again.head.stack[0].projection.weight.float(), head.stack[0].projection.weight, rtol=1e-2, atol=1e-2
    )


def test_a_head_alone_is_a_base_for_restore(tmp_path):
    origin = Inventory.of(Checkpoint.open(FIXTURES / "glm"))
    model = Model.load(FIXTURES / "glm")
    head = changed(model.head.float())
    path = tmp_path / "head" / "head.safetensors"
    write_standalone_head(origin, head, path, dtype=torch.bfloat16, source="runs/first")
    assert sorted(each.name for each in path.parent.iterdir()) == ["config.json", "head.safetensors"]
    restore(FIXTURES / "glm", path, out=tmp_path / "out", force=True)
    assert same_head(Model.load(tmp_path / "out").head, head)
    with pytest.raises(ConfigError, match=r"ends in \.safetensors"):
        write_standalone_head(origin, head, tmp_path / "head.bin", dtype=None, source="run")


def test_a_trunk_packed_by_another_method_stays_as_it_is(tmp_path):
    """Words of int4 are bytes like others, and the config says that the head is not packed so."""
    model = build("qwen3_5")
    model.save(tmp_path / "trunk")
    (file,) = [path for path in (tmp_path / "trunk").glob("*.safetensors") if "00001-of" in path.name]
    checkpoint = Checkpoint.open(tmp_path / "trunk")
    tensors = {name: checkpoint.raw(name) for name, info in checkpoint.tensors.items() if info.file == file.name}
    tensors = {name: replace(raw, data=b"".join(raw.data())) for name, raw in tensors.items()}
    for name in [name for name in tensors if name.endswith("mlp.up_proj.weight")]:
        del tensors[name]
        tensors[name.replace(".weight", ".qweight")] = RawTensor("I32", (4, 64), bytes(range(256)) * 4)
    write_safetensors(file, tensors, metadata={"format": "pt"})
    checkpoint = Checkpoint.open(tmp_path / "trunk")
    write_index(tmp_path / "trunk", {name: info.file for name, info in checkpoint.tensors.items()}, 0)
    config = checkpoint.config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    write_json(tmp_path / "trunk" / "config.json", config)
    origin = Inventory.of(Checkpoint.open(tmp_path / "trunk"))
    write_with_trunk(origin, changed(model.head), tmp_path / "out", dtype=torch.bfloat16, source="run")
    assert trunk_bytes(tmp_path / "out") == trunk_bytes(tmp_path / "trunk")
    assert "mtp" in json.dumps(Checkpoint.open(tmp_path / "out").config["quantization_config"])


def test_a_failure_names_the_folder_and_leaves_the_old_one(tmp_path, monkeypatch):
    """Not the place where the result is prepared; two processes cannot replace one result at once."""
    model = build("glm4_moe", initializer_range=0.02)
    model.save(tmp_path / "trunk")
    origin = Inventory.of(Checkpoint.open(tmp_path / "trunk"))
    out = tmp_path / "model"
    write = partial(write_with_trunk, origin, model.head, out, dtype=None, source="run")
    write()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with owned(out), pytest.raises(CheckpointError, match=f"{out}: another process is changing"):
        write()

    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device") as found:
        write()
    assert ".nextn" not in str(found.value)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"trunk", "model"}
