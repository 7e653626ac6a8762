"""The training loop: exact resume, learning, bad input, nothing half-written, the pace of a budget, and event files."""

import builtins
import json
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest
import torch
from quick import families, loop, others_slow
from tiny import CONFIGS, FIXTURES, MOST, build, refrains

from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.provenance import Provenance
from nextn.errors import CheckpointError, ConfigError, TrainingError
from nextn.model.model import Model
from nextn.train.config import TrainConfig
from nextn.train.distributed import ALONE
from nextn.train.joint_task import JointTask, held_out_batches
from nextn.train.loop import Pace, Trainer
from nextn.train.metrics import EvalRecord, StepRecord, event_log, scalars

CONFIG = TrainConfig(
    steps=6, batch_size=2, length=24, depths=3, warmup=1, lam="0.3,0.1@50%", dtype="float32", eval_batches=1
)


@pytest.fixture(scope="module")
def corpus():
    return refrains(12, 60, seed=1)


def trainer(corpus, out, config=CONFIG, name="glm4_moe", modules=1):
    return Trainer(JointTask(build(name, modules=modules, initializer_range=0.02), corpus, config), out=out)


def losses(records):
    return [record.loss for record in records if isinstance(record, StepRecord)]


@pytest.mark.more
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("name", others_slow(["glm4_moe", "qwen3_5", "deepseek_v32"], "qwen3_5"))
def test_resume_is_exact(name, optimizer, corpus, tmp_path):
    """Stopped after step 3 and resumed: the same losses, to the last bit, as never stopped. Catches state that is not
    saved: optimizer moments, data position, lambda, learning rate, buffers."""
    config = replace(CONFIG, optimizer=optimizer)
    whole = losses(trainer(corpus, tmp_path / "whole", config, name).run())
    first = trainer(corpus, tmp_path / "cut", config, name)
    records = []
    for record in first.run(lambda: first.step >= 3):
        records.append(record)
    second = trainer(corpus, tmp_path / "cut", config, name)
    with torch.no_grad():
        for value in second.task.named.values():
            value.add_(1.0)  # resume must not depend on how the model was initialized
    assert second.resume()
    assert second.step == 3
    records += second.run()
    assert losses(records) == whole
    lines = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]


@pytest.mark.more
def test_checkpointed_layers_change_no_loss(corpus, tmp_path):
    """Trunk and head compute the same, again."""
    config = replace(CONFIG, steps=3)
    plain = losses(trainer(corpus, tmp_path / "plain", config).run())
    assert losses(trainer(corpus, tmp_path / "lean", replace(config, checkpoint_layers=True)).run()) == plain


def ragged(corpus):
    """The corpus with a third of its tokens as labels, so that parts of a batch have different numbers of them."""
    return replace(corpus, mask=np.random.default_rng(0).random(corpus.num_tokens) < 1 / 3)


@pytest.mark.more
@pytest.mark.parametrize("parts", [2, 4])
def test_accumulated_gradients_are_those_of_the_whole_batch(parts, tmp_path, monkeypatch):
    """In fp64, to 1e-10: catches a mean of the parts' means, parts that share rows, and a gradient that is cleared."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # norms, which else round to fp32
    made = []
    for accumulate in (1, parts):
        config = replace(CONFIG, batch_size=4, accumulate=accumulate)
        model = Model.load(FIXTURES / "qwen")  # dense: grouped products of experts know no fp64
        model.trunk.double(), model.head.double()
        text = ragged(refrains(12, 60, seed=1, eos=47))
        subject = Trainer(JointTask(model, text, config), out=tmp_path / str(accumulate))
        report = subject._backward(0.3)
        made.append((report, {name: value.grad for name, value in subject.task.named.items()}))
    (one, whole), (several, added) = made
    assert torch.equal(several.counts, one.counts)
    torch.testing.assert_close(several.sums, one.sums, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(several.total, one.total, rtol=1e-12, atol=1e-12)
    for name, grad in whole.items():
        if grad is None:
            assert added[name] is None
        else:
            torch.testing.assert_close(added[name], grad, rtol=0, atol=1e-10)
            assert grad.abs().max() > 1e-6


@pytest.mark.more
def test_accumulation_is_how_and_not_what(corpus, tmp_path):
    """Steps, log and held-out figures are those of whole batches, and a run goes on with other parts."""
    config = replace(CONFIG, batch_size=4)
    reported = list(trainer(ragged(corpus), tmp_path / "whole", config).run())
    first = trainer(ragged(corpus), tmp_path / "cut", replace(config, accumulate=4))
    records = list(first.run(lambda: first.step >= 3))
    rows = [example.tokens.shape for example in held_out_batches(first.task.held_out, first.config, ALONE)]
    assert rows == [(1, 24)] * 4
    second = trainer(ragged(corpus), tmp_path / "cut", replace(config, accumulate=2, checkpoint_layers=True))
    assert second.resume()
    records += second.run()
    for one, two in zip(losses(reported), losses(records), strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    assert records[-1].forced.loss == pytest.approx(reported[-1].forced.loss, rel=1e-4)
    assert [record.tokens for record in records[:-1]] == [record.tokens for record in reported[:-1]]


@pytest.mark.more
def test_a_crash_repeats_only_the_steps_since_the_checkpoint(corpus, tmp_path):
    """After a kill between checkpoints, the log holds each step once."""
    config = replace(CONFIG, save_every=2)
    running = trainer(corpus, tmp_path, config).run()
    for _ in range(3):
        next(running)  # abandoned at step 3; the last checkpoint is of step 2
    running.close()
    again = trainer(corpus, tmp_path, config)
    assert again.resume()
    assert again.step == 2
    list(again.run())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]


@pytest.mark.more
def test_old_checkpoints_are_removed_and_the_last_loads(corpus, tmp_path):
    list(trainer(corpus, tmp_path, replace(CONFIG, save_every=1)).run())
    folders = sorted(path.name for path in tmp_path.glob("step-*"))
    assert folders == ["step-0000005", "step-0000006"]
    assert Model.load(tmp_path / "step-0000006").head is not None


@pytest.mark.more
@pytest.mark.parametrize("name", families(CONFIGS, {"deepseek_v4", "qwen3_5", "inkling"}))
def test_every_family_learns(name, corpus, tmp_path):
    """A few steps lower the loss of trunk and depths, and every parameter that should move gets a gradient.

    Catches a family's own norm, projection, embedding or output head that the loss does not go through.
    """
    config = replace(CONFIG, steps=12, batch_size=4, lr=5e-3, lam="1.0", depths=max(2, MOST[name]))
    subject = trainer(corpus, tmp_path, config, name, modules=MOST[name])
    loss = subject.task.loss(subject.task.example(0), lam=1.0)
    loss.total.backward()
    asleep = [name for name, value in subject.task.named.items() if value.requires_grad and value.grad is None]
    assert not [name for name in asleep if name.startswith("head.")]
    frozen = [name for name, value in subject.task.named.items() if not value.requires_grad]
    assert all(".indexer." in name or name.endswith("e_score_correction_bias") for name in frozen)
    records = [record for record in subject.run() if isinstance(record, StepRecord)]
    assert torch.isfinite(torch.tensor(losses(records))).all()
    first, last = (
        [sum(loss) / 2 for loss in zip(*(r.loss for r in part), strict=True)] for part in (records[:2], records[-2:])
    )
    assert all(after < before for before, after in zip(first, last, strict=True))


@pytest.mark.more
def test_evaluation_record(corpus, tmp_path):
    """Held-out figures come with the last step: conditional rates in [0, 1], and AL from them."""
    record = list(trainer(corpus, tmp_path).run())[-1]
    assert isinstance(record, EvalRecord)
    assert len(record.forced.loss) == 4
    assert all(0 <= rate <= 1 for rate in record.forced.match + record.forced.overlap)
    a, b, c = record.forced.match
    assert record.forced.greedy_length == pytest.approx(1 + a + a * b + a * b * c)


def test_trunk_only(corpus, tmp_path):
    """depths = 0 trains the trunk alone, and leaves the head as it was."""
    subject = trainer(corpus, tmp_path, replace(CONFIG, depths=0))
    before = {name: value.clone() for name, value in subject.task.model.head.state_dict().items()}
    assert all(len(loss) == 1 for loss in losses(subject.run()))
    assert all(torch.equal(before[name], value) for name, value in subject.task.model.head.state_dict().items())


def test_nan_loss_stops_and_keeps_the_last_checkpoint(corpus, tmp_path):
    """A loss that is not finite names the batch; what was saved before stays whole."""
    subject = trainer(corpus, tmp_path, replace(CONFIG, save_every=1))
    running = subject.run()
    next(running)
    next(running)
    with torch.no_grad():
        subject.task.model.trunk.output.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="the loss of step 2 is nan; the cause is batch 2 of seed 0"):
        next(running)
    assert Model.load(tmp_path / "step-0000001").head is not None


def test_resume_with_other_settings(corpus, tmp_path):
    list(trainer(corpus, tmp_path).run())
    with pytest.raises(ConfigError, match=r"trained with another lr \(.*, now .*\), seed \("):
        trainer(corpus, tmp_path, replace(CONFIG, lr=1e-4, seed=3)).resume()


def test_resume_from_a_damaged_state(corpus, tmp_path):
    from safetensors.torch import load_file, save_file

    list(trainer(corpus, tmp_path).run())
    path = tmp_path / "step-0000006" / "optimizer.safetensors"
    tensors = load_file(path)
    tensors.pop("head.stack.0.projection.weight.exp_avg")
    save_file(tensors, path)
    with pytest.raises(
        CheckpointError, match=r"optimizer tensors are missing: head\.stack\.0\.projection\.weight\.exp_avg"
    ):
        trainer(corpus, tmp_path).resume()


def test_nothing_to_resume(corpus, tmp_path):
    assert not trainer(corpus, tmp_path).resume()


@loop(
    ("values", "words"),
    [
        ({"steps": 0}, "steps = 0"),
        ({"depths": -1}, "depths = -1"),
        ({"depths": 24}, "fewer than length"),
        ({"dtype": "float8"}, "float32 or bfloat16"),
        ({"optimizer": "sgd"}, "adamw or muon"),
        ({"lam": "much"}, "lambda 'much'"),
        ({"lr": 2.0}, "0 < lr < 1"),
        ({"accumulate": 0}, "accumulate = 0; expected a whole number >= 1"),
        ({"accumulate": 3}, "accumulate = 3; expected a divisor of batch_size = 2"),
    ],
)
def test_bad_settings(values, words):
    with pytest.raises(ConfigError, match=words):
        replace(CONFIG, **values)


def test_unknown_setting():
    with pytest.raises(ConfigError, match=r"unknown setting 'lern'; known: steps"):
        TrainConfig.from_dict({"steps": 1, "lern": 3})


def test_schedule_rises_holds_and_falls():
    config = TrainConfig(steps=100, warmup=9, decay=0.5, final_lr=0.1)
    scales = [config.schedule(step) for step in range(100)]
    assert scales[0] == pytest.approx(0.1)
    assert scales[9] == scales[50] == 1
    assert scales[99] == pytest.approx(0.1 + 0.9 / 50)
    assert scales[50:] == sorted(scales[50:], reverse=True)


def test_a_trained_model_says_which_trunk_its_head_saw(corpus, tmp_path):
    """The record is true when written, and the audit notices a trunk that is fine-tuned later."""
    run = trainer(corpus, tmp_path / "run")
    run.write_result(tmp_path / "model")
    written = Checkpoint.open(tmp_path / "model")
    record = Provenance.read(written)
    assert (record.made_by, record.trained_with) == ("train", record.beside)
    assert "head-stale" not in {finding.rule for finding in audit(written).findings}
    with torch.no_grad():
        for weight in run.task.model.trunk.model.parameters():
            weight.mul_(1.01)
    run.task.model.save(tmp_path / "tuned", extra=record.write)
    assert "head-stale" in {finding.rule for finding in audit(Checkpoint.open(tmp_path / "tuned")).findings}


PACED = TrainConfig(steps=100, minutes=2.0, length=8, depths=1, warmup=40, decay=0.5, final_lr=0.1)


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


def run(pace, clock, seconds, step=0, limit=10_000):
    """Steps of seconds(step) each until the run is over -> the learning rates' factors."""
    factors = []
    while not pace.is_over(step) and len(factors) < limit:
        factors.append(pace.schedule(step))
        with pace.measured():
            clock.now += seconds(step)
        clock.now += 7.0  # an evaluation, or a pause: not counted
        step += 1
    return factors


@pytest.mark.parametrize(("step_s", "num_steps"), [(0.1, 1200), (1.0, 120), (3.5, 34), (50.0, 2), (400.0, 1)])
def test_the_number_of_steps_follows_the_speed(step_s, num_steps):
    clock = Clock()
    pace = Pace(PACED, clock=clock)
    assert len(run(pace, clock, lambda step: step_s)) == num_steps
    assert pace.used_s == pytest.approx(num_steps * step_s)


def test_the_schedule_is_whole_at_any_speed():
    """Catches warmup that takes a slow machine's whole budget, and decay that a slow machine never reaches."""
    for step_s in (0.2, 1.0, 4.0):
        clock = Clock()
        factors = run(Pace(PACED, clock=clock), clock, lambda step, step_s=step_s: step_s)
        assert factors[0] == pytest.approx(1 / 41)
        full = [index for index, factor in enumerate(factors) if factor > 0.999]
        assert min(full) <= 0.1 * len(factors) + 1
        assert max(full) == pytest.approx(0.5 * len(factors), abs=2)
        assert factors[-1] < 0.1 + 3 / len(factors)
        assert factors[max(full) :] == sorted(factors[max(full) :], reverse=True)


def test_a_machine_that_slows_down_ends_in_time():
    """Also a slow first step, as with compilation, is part of the budget."""
    clock = Clock()
    pace = Pace(PACED, clock=clock)
    factors = run(pace, clock, lambda step: 40.0 if step == 0 else 0.5 if step < 60 else 2.0)
    assert pace.used_s == pytest.approx(120, abs=1.01)
    assert 70 < len(factors) < 90
    assert factors[-1] < 0.15


def test_what_is_shown_of_a_budget():
    clock = Clock()
    pace = Pace(PACED, clock=clock)
    run(pace, clock, lambda step: 2.0, limit=15)
    assert (pace.share(15), pace.num_steps(15), pace.remaining_s(15)) == (0.25, 60, 90.0)
    assert pace.tokens(15) == PACED.tokens // 4


def test_without_a_budget_steps_count():
    clock = Clock()
    pace = Pace(replace(PACED, minutes=0.0, steps=10), clock=clock)
    assert len(run(pace, clock, lambda step: 99.0 if step == 0 else 2.0)) == 10
    assert pace.schedule(4) == pace.config.schedule(4)
    assert (pace.share(4), pace.num_steps(4), pace.remaining_s(4)) == (0.4, 10, 12.0)
    assert pace.tokens(4) == 4 * PACED.tokens_per_step


def test_the_budget_is_of_all_sessions():
    """Catches a resumed run that begins its budget again, and a finished one that trains another step."""
    clock = Clock()
    first = Pace(PACED, clock=clock)
    run(first, clock, lambda step: 2.0, limit=20)
    second = Pace(PACED, clock=clock)
    second.load_state(json.loads(json.dumps(first.as_state())))
    assert second.schedule(20) == first.schedule(20)
    assert len(run(second, clock, lambda step: 2.0, step=20)) == 40
    third = Pace(PACED, clock=clock)
    third.load_state(second.as_state())
    assert third.is_over(60)
    longer = Pace(replace(PACED, minutes=3.0), clock=clock)
    longer.load_state(second.as_state())
    assert len(run(longer, clock, lambda step: 2.0, step=60)) == 30


def test_no_budget_is_negative():
    with pytest.raises(ConfigError, match=r"minutes = -1"):
        replace(PACED, minutes=-1.0)


@pytest.mark.more
def test_a_run_with_a_budget_is_resumed(tmp_path):
    """The loop asks the clock twice a step; each is a second apart, so a budget of six seconds is six steps."""
    clock = Clock()

    def tick():
        clock.now += 1
        return clock.now

    def trainer(minutes=0.1):
        config = TrainConfig(
            steps=1, minutes=minutes, batch_size=2, length=24, depths=1, dtype="float32", eval_batches=1
        )
        task = JointTask(build("qwen3_5", initializer_range=0.02), refrains(12, 60, seed=1), config)
        return Trainer(task, out=tmp_path, clock=tick)

    first = trainer()
    records = list(first.run(lambda: first.step >= 2))
    assert not first.is_over
    second = trainer()
    assert second.resume()
    assert second.num_bytes_left() > 0
    records += second.run()
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert [record.step for record in steps] == [1, 2, 3, 4, 5, 6]
    assert [record.num_steps for record in steps] == [6] * 6
    assert [record.share for record in steps] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])
    assert steps[-1].remaining_s == 0
    again = trainer()
    assert again.resume()
    assert again.is_over
    more = trainer(minutes=0.15)
    assert more.resume()
    assert len([record for record in more.run() if isinstance(record, StepRecord)]) == 3


@dataclass
class Reported:
    step: int
    loss: tuple[float, ...]
    forced: dict[str, object]
    note: str = "text"
    exact: bool = True

    def as_record(self):
        return asdict(self)


def test_numbers_by_their_place():
    reported = Reported(3, (1.5, 2.0), {"match": [0.5, None], "definition": "words", "AL": 2})
    assert dict(scalars(reported.as_record())) == {
        "step": 3.0, "loss/0": 1.5, "loss/1": 2.0, "forced/match/0": 0.5, "forced/AL": 2.0,
    }  # fmt: skip


def test_tensorboard_reads_them(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with event_log(tmp_path) as write:
        for step in (1, 2, 3):
            write(Reported(step, (9.0 if step == 3 else 0.5 * step,), {"AL": step}))
    with event_log(tmp_path, step=2) as write:  # resumed after step 2
        write(Reported(3, (1.5,), {"AL": 3}))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["forced/AL", "loss/0"]
    assert [(each.step, each.value) for each in events.Scalars("loss/0")] == [(1, 0.5), (2, 1.0), (3, 1.5)]


def test_without_the_package(tmp_path, monkeypatch):
    inner = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.startswith("torch.utils.tensorboard"):
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return inner(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match=r"pip install .tensorboard>="), event_log(tmp_path):
        pass
