"""The threads of steps on a CPU: one where the machine is busy, and as before once the run is over."""

from contextlib import suppress

import pytest
import torch

from nextn.devices import torch_threads
from nextn.errors import TrainingError
from nextn.train import loop
from nextn.train.loop import ThreadChoice, chosen_threads, explain_compilation, time_of_work


@pytest.fixture
def quiet(monkeypatch):
    """Three threads; while the list has True, three are faster than one."""
    is_quiet = [True]
    monkeypatch.setattr(loop, "time_of_work", lambda choices: [1.0, 2.0] if is_quiet[0] else [2.0, 1.0])
    with torch_threads(3):
        yield is_quiet


def threads_of_steps(speeds, choice):
    used = []
    for speed in speeds:
        used.append(torch.get_num_threads())
        choice.update(speed)
    return used


def test_a_slow_first_step_changes_nothing(quiet):
    """It compiles. Code for a number of threads is made once, so steps are not tried with another one."""
    assert threads_of_steps((0.1, 8, 9, 5, 9), ThreadChoice()) == [3] * 5


def test_one_thread_beside_other_work(quiet):
    quiet[0] = False
    assert threads_of_steps((0.1, 8, 9), ThreadChoice()) == [1] * 3


def test_work_that_begins_later(quiet):
    """A slow step is looked into: it may also be one of many tokens, or an evaluation beside it."""
    choice = ThreadChoice()
    assert threads_of_steps((0.1, 8, 3, 8), choice) == [3] * 4
    quiet[0] = False
    assert threads_of_steps((8, 3, 8), choice) == [3, 3, 1]


def test_work_is_timed_with_each_number():
    with torch_threads(2):
        assert all(seconds > 0 for seconds in time_of_work((2, 1), rounds=2))


@pytest.mark.parametrize("enabled", [True, False])
def test_the_number_is_restored(enabled, quiet):
    quiet[0] = False
    with suppress(KeyboardInterrupt), chosen_threads(enabled=enabled) as choose:
        assert torch.get_num_threads() == (1 if enabled else 3)
        choose(1.0)
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 3


def test_failures_of_the_compiler_say_what_to_do():
    """A traceback of torch, where a damaged file of its cache is all that is wrong; others stay what they are."""

    def broken(graph, inputs):
        raise ImportError("/tmp/torchinductor_x/a.so: file too short")

    double, advice = torch.compile(lambda values: values * 2, backend=broken), "remove that folder.*compile=false"
    with pytest.raises(TrainingError, match=rf"a\.so: file too short.*{advice}"), explain_compilation():
        double(torch.ones(2))
    with pytest.raises(RuntimeError, match="shapes"), explain_compilation():
        torch.nn.Linear(2, 2)(torch.ones(1, 3))
