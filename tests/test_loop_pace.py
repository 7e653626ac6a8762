"""How far a run is, by steps and by a time budget that follows the measured speed, with a clock that the test turns."""

import json
from dataclasses import replace

import pytest
from tiny import build, refrains

from nextn.errors import ConfigError
from nextn.train.config import TrainConfig
from nextn.train.joint_task import JointTask
from nextn.train.loop import Pace, Trainer
from nextn.train.metrics import StepRecord

CONFIG = TrainConfig(steps=100, minutes=2.0, length=8, depths=1, warmup=40, decay=0.5, final_lr=0.1)


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
    pace = Pace(CONFIG, clock=clock)
    assert len(run(pace, clock, lambda step: step_s)) == num_steps
    assert pace.used_s == pytest.approx(num_steps * step_s)


def test_the_schedule_is_whole_at_any_speed():
    """Catches warmup that takes a slow machine's whole budget, and decay that a slow machine never reaches."""
    for step_s in (0.2, 1.0, 4.0):
        clock = Clock()
        factors = run(Pace(CONFIG, clock=clock), clock, lambda step, step_s=step_s: step_s)
        assert factors[0] == pytest.approx(1 / 41)
        full = [index for index, factor in enumerate(factors) if factor > 0.999]
        assert min(full) <= 0.1 * len(factors) + 1
        assert max(full) == pytest.approx(0.5 * len(factors), abs=2)
        assert factors[-1] < 0.1 + 3 / len(factors)
        assert factors[max(full) :] == sorted(factors[max(full) :], reverse=True)


def test_a_machine_that_slows_down_ends_in_time():
    """Also a slow first step, as with compilation, is part of the budget."""
    clock = Clock()
    pace = Pace(CONFIG, clock=clock)
    factors = run(pace, clock, lambda step: 40.0 if step == 0 else 0.5 if step < 60 else 2.0)
    assert pace.used_s == pytest.approx(120, abs=1.01)
    assert 70 < len(factors) < 90
    assert factors[-1] < 0.15


def test_what_is_shown_of_a_budget():
    clock = Clock()
    pace = Pace(CONFIG, clock=clock)
    run(pace, clock, lambda step: 2.0, limit=15)
    assert (pace.share(15), pace.num_steps(15), pace.remaining_s(15)) == (0.25, 60, 90.0)
    assert pace.tokens(15) == CONFIG.tokens // 4


def test_without_a_budget_steps_count():
    clock = Clock()
    pace = Pace(replace(CONFIG, minutes=0.0, steps=10), clock=clock)
    assert len(run(pace, clock, lambda step: 99.0 if step == 0 else 2.0)) == 10
    assert pace.schedule(4) == pace.config.schedule(4)
    assert (pace.share(4), pace.num_steps(4), pace.remaining_s(4)) == (0.4, 10, 12.0)
    assert pace.tokens(4) == 4 * CONFIG.tokens_per_step


def test_the_budget_is_of_all_sessions():
    """Catches a resumed run that begins its budget again, and a finished one that trains another step."""
    clock = Clock()
    first = Pace(CONFIG, clock=clock)
    run(first, clock, lambda step: 2.0, limit=20)
    second = Pace(CONFIG, clock=clock)
    second.load_state(json.loads(json.dumps(first.as_state())))
    assert second.schedule(20) == first.schedule(20)
    assert len(run(second, clock, lambda step: 2.0, step=20)) == 40
    third = Pace(CONFIG, clock=clock)
    third.load_state(second.as_state())
    assert third.is_over(60)
    longer = Pace(replace(CONFIG, minutes=3.0), clock=clock)
    longer.load_state(second.as_state())
    assert len(run(longer, clock, lambda step: 2.0, step=60)) == 30


def test_no_budget_is_negative():
    with pytest.raises(ConfigError, match=r"minutes = -1"):
        replace(CONFIG, minutes=-1.0)


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
