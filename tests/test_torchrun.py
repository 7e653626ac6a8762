"""`torchrun -m nextn train`: a process that is killed, one that is told to stop, and a run that ends as if alone."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from test_cli import TINY

from nextn.model.model import Model
from nextn.train.joint_run import prepare_joint_run

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
STEPS, EVERY = 40, 5
RUN = {
    "steps": STEPS,
    "save_every": EVERY,
    "batch_size": 2,
    "length": 32,
    "depths": 2,
    "optimizer": "adamw",
    "lr": 1e-3,
    "dtype": "float32",
    "compile": False,
    "eval_batches": 1,
}
PATIENCE = 120  # seconds: for a start on a machine that is busy


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    (folder / "config.json").write_text(json.dumps(TINY))
    texts = folder / "texts"
    texts.mkdir()
    for index in range(8):
        (texts / f"{index}.txt").write_text(f"the {index} quick brown foxes jump over lazy dogs\n" * 40)
    return folder


@pytest.fixture
def launch(given):
    """torchrun with its own flags, and `nextn train` with more of those."""
    started = []

    def call(out, *more, restarts):
        settings = [word for key, value in RUN.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        files = ["--model", given / "config.json", "--data", given / "texts"]
        started.append(
            subprocess.Popen(
                [*LAUNCH, "--max-restarts", str(restarts), "-m", "nextn", "train", out, *files, *settings, *more],
                env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield call
    for each in started:
        if each.poll() is None:
            each.terminate()  # and not kill, so that it ends its processes
            each.wait()


def losses(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def wait_for_step(out, step, launched):
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and launched.poll() is None:
        if (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_text().splitlines()) >= step:
            return
        time.sleep(0.01)
    launched.terminate()
    raise AssertionError(f"step {step} was not reached: {launched.communicate(timeout=60)[1][-2000:]}")


def process(launched, rank):
    """The pid of a process of torchrun's, by its environment; None where it has none at the moment."""
    for task in Path(f"/proc/{launched.pid}/task").iterdir():
        for pid in (task / "children").read_text().split():
            with suppress(OSError):  # it may end meanwhile
                if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return int(pid)
    return None


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes in /proc")
@pytest.mark.slow
def test_killed_restarted_stopped_and_resumed(launch, given, tmp_path):
    """kill -9 of one process ends the other in bounded time; torchrun starts both again, and they go on from the last
    checkpoint; SIGTERM to one stops both after the same step; resumed, the losses are those of one process that was
    never interrupted."""
    out = tmp_path / "run"
    first = launch(out, restarts=1)
    wait_for_step(out, EVERY + 2, first)
    victim, killed_at = process(first, 1), time.monotonic()
    os.kill(victim, signal.SIGKILL)
    while process(first, 1) in (victim, None):
        assert time.monotonic() - killed_at < 60
        time.sleep(0.05)
    kept = max(int(path.name[-7:]) for path in out.glob("step-*"))
    assert kept % EVERY == 0
    wait_for_step(out, max(losses(out)) + 3, first)
    os.kill(process(first, 1), signal.SIGTERM)
    _, complaint = first.communicate(timeout=60)
    assert "process 0 of 2 lost another one" in complaint
    assert complaint.count("stopped; the state is in") == 1
    step = max(losses(out))
    assert kept < step < STEPS
    assert (out / f"step-{step:07d}" / "trainer.json").exists()

    last = launch(out, "--resume", restarts=0)
    said, complaint = last.communicate(timeout=PATIENCE)
    assert last.returncode == 0, complaint
    assert said.count("wrote") == 1
    assert Model.load(out / "model").head is not None

    alone = prepare_joint_run(
        tmp_path / "whole", data=[given / "texts"], recipe="demo", model=given / "config.json", settings=RUN
    )
    list(alone.trainer.run())
    one, two = losses(tmp_path / "whole"), losses(out)
    assert one.keys() == two.keys() == set(range(1, STEPS + 1))
    assert all(two[step] == pytest.approx(one[step], abs=1e-4) for step in one)


@pytest.mark.slow
def test_two_stages(launch, tmp_path):
    """Catches a second stage that one process runs alone, or moves the trunk, or whose head is not written."""
    out = tmp_path / "run"
    more = ["steps=3", "refine.steps=2", "refine.optimizer=muon", "refine.depths=3", "refine.eval_every=0"]
    launched = launch(out, *[word for each in more for word in ("--set", each)], restarts=0)
    said, complaint = launched.communicate(timeout=PATIENCE)
    assert launched.returncode == 0, complaint
    assert said.count("wrote") == 1
    assert [*losses(out)] == [1, 2, 3]
    assert [len(each) for each in losses(out / "head").values()] == [3, 3]
    joint, made = (Model.load(folder) for folder in (out / "joint", out / "model"))
    trunks = joint.trunk.state_dict(), made.trunk.state_dict()
    assert all(torch.equal(value, trunks[1][name]) for name, value in trunks[0].items())
    heads = joint.head.state_dict(), made.head.state_dict()
    assert not all(torch.equal(value, heads[1][name]) for name, value in heads[0].items())


@pytest.mark.parametrize(("code", "wanted"), [(None, 0), (0, 0), (2, 2)])
def test_a_process_of_torchruns_ends_as_it_would_alone(code, wanted):
    """At once, with what was printed and not yet flushed."""
    script = f"from nextn.__main__ import leave; print('done', end=''); leave({code!r})"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (wanted, "done")
