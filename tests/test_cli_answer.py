"""`nextn answer`: what it prints and writes, one-line errors, Ctrl-C and going on, and training on what it wrote."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from chats import chatty, said
from tiny import build

from nextn.cli.answer import _summary
from nextn.train.self_generated import AnswerProgress


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint, and prompts as conversations and as text."""
    made = tmp_path_factory.mktemp("answer")
    model = build("glm4_moe", vocab_size=264)
    model.tokenizer = chatty()
    model.save(made / "model")
    chats = [{"messages": said(("user", f"ask {number}"), ("assistant", "gold"))} for number in range(40)]
    (made / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats))
    (made / "text.txt").write_text("".join(f"{number} is the number of this line\n" for number in range(99)))
    return made


def arguments(folder, out, *more, prompts="chats.jsonl"):
    return ("answer", folder / "model", out, "--prompts", folder / prompts, "--backend", "torch", *more)


def test_answers_and_the_summary(folder, tmp_path, here):
    """The file and what is told of it; a second call finds all answers there."""
    out = tmp_path / "a.jsonl"
    asked = arguments(folder, out, "--count", 6, "--max-tokens", 5, "--batch", 4)
    code, said, _ = here(*asked)
    assert code == 0
    assert "6 of 6 answers" in said
    stored = out.read_bytes()
    header, *answers = map(json.loads, stored.splitlines())
    assert len(answers) == 6
    assert (header["settings"]["sampling"]["temperature"], header["settings"]["num_speculative_tokens"]) == (1.0, 4)
    code, said, _ = here(*asked, "--json")
    reported = json.loads(said)
    assert (code, reported["answers"], reported["total"], reported["file"]) == (0, 6, 6, str(out))
    assert reported["tokens"] == sum(len(each["tokens"]) for each in answers)
    assert out.read_bytes() == stored


@pytest.mark.more
def test_other_settings_are_a_usage_error(folder, tmp_path, here):
    out = tmp_path / "a.jsonl"
    here(*arguments(folder, out, "--count", 2, "--max-tokens", 3))
    code, _, complaint = here(*arguments(folder, out, "--count", 2, "--max-tokens", 3, "--temperature", 0.7))
    assert code == 2
    assert "temperature = 1.0 (now 0.7)" in complaint
    code, _, complaint = here(*arguments(folder, out, prompts="text.txt"))
    assert (code, "--count 1000" in complaint) == (2, True)


def test_repetitive_answers_are_reported():
    """The summary counts repetitive answers, if there are any."""
    tally = AnswerProgress(total=9, answers=4, tokens=99, repetitive=1, finishes=Counter(length=3, eos=1))
    first, note = _summary(tally, Path("a.jsonl")).splitlines()
    assert first == "a.jsonl: 4 of 9 answers, 99 tokens (3 length, 1 eos)"
    assert note.startswith("note: 1 answers (25%) are repetitive")
    assert _summary(replace(tally, repetitive=0), Path("a.jsonl")) == first


@pytest.mark.slow
def test_control_c_and_going_on(folder, tmp_path, here):
    """Interrupted inside a run: exit 130, whole batches only, and the same command ends with the file of one run."""
    out, whole = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    options = ("--max-tokens", 24, "--count", 12, "--batch", 2)
    command = [sys.executable, "-m", "nextn", *map(str, arguments(folder, out, *options))]
    running = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while (not out.exists() or out.read_bytes().count(b"\n") < 3) and time.monotonic() < deadline:
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    complaint = running.communicate(timeout=60)[1]
    assert (running.returncode, "the same command resumes" in complaint) == (130, True), complaint
    cut = out.read_bytes()
    assert 3 <= cut.count(b"\n") < 13
    assert cut.count(b"\n") % 2 == 1
    for to in (out, whole):
        assert here(*arguments(folder, to, *options))[0] == 0
    assert out.read_bytes() == whole.read_bytes()
    assert out.read_bytes().startswith(cut)


@pytest.mark.more
def test_training_on_the_answers(folder, tmp_path, here):
    """`nextn train --data` takes what `nextn answer` wrote."""
    out = tmp_path / "a.jsonl"
    here(*arguments(folder, out, "--max-tokens", 4, "--count", 20))
    small = ["steps=1", "batch_size=2", "length=16", "depths=1", "compile=false", "eval_batches=1"]
    config = json.loads((folder / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    options = [part for each in small for part in ("--set", each)]
    options += ["--tokenizer", folder / "model", "--model", tmp_path / "config.json"]
    code, said, complaint = here("train", tmp_path / "run", "--data", out, *options)
    assert (code, "wrote" in said) == (0, True), complaint
