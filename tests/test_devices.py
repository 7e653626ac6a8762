"""Which device a model runs on, that what it makes is made there, and on how many threads of a CPU it trains."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import typer

from nextn.cli import app
from nextn.devices import resolve_device, torch_threads, training_dtype
from nextn.errors import ConfigError, TrainingError
from nextn.train import distributed, loop
from nextn.train.distributed import processes
from nextn.train.loop import ThreadChoice, chosen_threads, explain_compilation, time_of_work

LOADING = {"generate", "trace", "bench", "advise", "measure", "diagnose", "train", "answer", "chat", "serve"}


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"),
    [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_auto_is_the_first_that_is_there(cuda, mps, expected, monkeypatch):
    for kind, is_there in (("cuda", cuda), ("mps", mps)):
        monkeypatch.setattr(torch.get_device_module(kind), "is_available", lambda found=is_there: found)
        monkeypatch.setattr(torch.get_device_module(kind), "device_count", lambda found=is_there: int(found))
    assert resolve_device() == resolve_device("auto") == torch.device(expected)


@pytest.mark.parametrize("name", ["nonsense", "cuda:97", "mps", "vulkan", "cpu:x"])
def test_a_device_that_is_not_there(name):
    if name == "mps" and torch.mps.is_available():
        pytest.skip("it is there")
    with pytest.raises(ConfigError, match=f"device = '{name}'.* expected one of auto, .*cpu"):
        resolve_device(name)


def test_a_device_of_torch():
    assert resolve_device(torch.device("cpu")) == torch.device("cpu")


def test_every_command_that_loads_a_model_takes_a_device():
    found = {}
    for name, command in typer.main.get_command(app).commands.items():
        inner = {f"{name} {key}": each for key, each in getattr(command, "commands", {}).items()} or {name: command}
        found |= {
            key: option.default for key, each in inner.items() for option in each.params if option.name == "device"
        }
    assert found == dict.fromkeys(LOADING, "auto")


@pytest.mark.parametrize(
    ("asked", "gpus", "expected"), [("auto", 0, "cpu"), ("cpu", 2, "cpu"), ("auto", 2, "cuda:1"), ("cuda", 2, "cuda:1")]
)
def test_processes_of_torchrun(asked, gpus, expected, monkeypatch):
    """Each has a GPU of its own where there are some and no CPU is asked for."""
    for name, value in (("is_available", gpus > 0), ("device_count", gpus), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert distributed._device(1, asked) == torch.device(expected)


def test_processes_of_torchrun_choose_no_gpu_themselves(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"device = 'cuda:1' with torchrun.*expected auto, cuda or cpu"):
        distributed._device(0, "cuda:1")


def test_one_process_refuses_a_device_that_is_not_there(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="cuda:97"), processes("cuda:97"):
        pass


def test_training_is_in_float32_where_bfloat16_is_not_known_to_pay():
    assert training_dtype("mps") == "float32"


@pytest.mark.slow
def test_a_second_device():
    """Everything on a device that refuses tensors of the CPU; see second_device_checks.py."""
    command = [sys.executable, "-m", "pytest", "-n", "0", str(Path(__file__).with_name("second_device_checks.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:]


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
