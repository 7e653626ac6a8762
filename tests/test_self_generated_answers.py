"""nextn answer: the trunk's answers, what is stored and printed, going on exactly, what is refused, and training."""

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
import torch
from chats import chatty, said
from tiny import build

from nextn.cli.answer import _summary
from nextn.data.sources import load_corpora
from nextn.decoding.rounds import rounds
from nextn.errors import CheckpointError, ConfigError
from nextn.settings import Sampling, Settings
from nextn.train.self_generated import AnswerProgress, generate_answers, read_prompts

ASKED = [list(f"prompt {number}{'!' * (number % 3)}".encode()) for number in range(7)]
SETTINGS = Settings(
    num_speculative_tokens=2, sampling=Sampling(1.0, top_p=0.95), max_tokens=9, eos=(10, 20, 30, 40, 50), seed=5
)


def speaking(seed=0):
    made = build("glm4_moe", vocab_size=264, seed=seed)
    made.tokenizer = chatty()
    return made


@pytest.fixture(scope="module")
def model():
    return speaking()


def run(model, out, asked=ASKED, settings=SETTINGS, **options):
    return list(generate_answers(model, asked, settings, out, **({"batch_size": 3, "backend": "torch"} | options)))


def lines(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "a.jsonl"
    return run(model, out), out


@pytest.mark.more
def test_what_is_stored(model, whole):
    """Each answer in the order of the prompts, whole, with how it ended; the tally adds up to the file."""
    tallies, out = whole
    header, *answers = lines(out)
    assert header["nextn"] == "answers"
    assert [each["prompt"] for each in answers] == ASKED
    for each in answers:
        ended = each["tokens"][-1] in SETTINGS.eos
        assert each["finish"] == ("eos" if ended else "length")
        assert ended or len(each["tokens"]) == 9
        assert not set(each["tokens"][:-1]) & set(SETTINGS.eos)
        assert each["text"] == model.tokenizer.decode(each["tokens"], skip_special_tokens=True)
    assert [tally.answers for tally in tallies[-1:]] == [7]
    assert tallies[-1].tokens == sum(len(each["tokens"]) for each in answers)
    assert sum(tallies[-1].finishes.values()) == 7
    assert {each["finish"] for each in answers} == {"eos", "length"}


@pytest.mark.more
def test_an_answer_depends_on_its_prompt_alone(model, whole):
    """Catches random numbers that hang on the place in the batch: an answer alone is what it is among others."""
    _, out = whole
    for number in (0, 4, 6):
        tokens = []
        for each in rounds(model.trunk, model.head, [ASKED[number]], SETTINGS, seed_offsets=[number]):
            tokens += each.rows[0].emitted
        assert lines(out)[number + 1]["tokens"] == tokens
    texts = {tuple(each["tokens"]) for each in lines(out)[1:]}
    assert len(texts) == 7
    same = [ASKED[0]] * 4
    drawn = run(model, out.with_name("same.jsonl"), asked=same, batch_size=2)
    assert len({tuple(each["tokens"]) for each in lines(out.with_name("same.jsonl"))[1:]}) == 4
    assert drawn[-1].answers == 4


@pytest.mark.more
@pytest.mark.parametrize("cut", [0, 1, 40])
@pytest.mark.parametrize("kept", [0, 2, 3, 5, 7])
def test_going_on_gives_the_same_file(model, whole, tmp_path, kept, cut):
    """Killed after `kept` answers and `cut` bytes of the next: the file ends up the same, byte for byte."""
    _, done = whole
    out = tmp_path / "a.jsonl"
    stored = done.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(stored[: kept + 1]) + [*stored, b""][kept + 1][:cut])
    first, *_ = tallies = run(model, out)
    assert out.read_bytes() == done.read_bytes()
    assert first.answers == (7 if kept == 7 else kept - kept % 3)
    assert tallies[-1].answers == 7
    assert tallies[-1].finishes == whole[0][-1].finishes


def test_stopping_leaves_whole_batches(model, whole, tmp_path):
    """Catches a half-finished batch in the file, and a stop that is only seen when all is done."""
    out, asked = tmp_path / "a.jsonl", []
    tallies = run(model, out, should_stop=lambda: asked.append(1) or len(asked) > 12)
    assert tallies[-1].answers == 3
    assert lines(out) == lines(whole[1])[:4]
    run(model, out)
    assert out.read_bytes() == whole[1].read_bytes()


@pytest.mark.more
def test_more_prompts_go_on(model, whole, tmp_path):
    """Catches a larger count that starts anew or repeats answers; fewer prompts change nothing."""
    out = tmp_path / "a.jsonl"
    run(model, out, asked=ASKED[:4])
    first = run(model, out)[0]
    assert first.answers == 3
    assert out.read_bytes() == whole[1].read_bytes()
    assert run(model, out, asked=ASKED[:2])[-1].answers == 7
    assert out.read_bytes() == whole[1].read_bytes()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"settings": Settings(num_speculative_tokens=2, sampling=Sampling(0.5, top_p=0.95), max_tokens=9, seed=5)},
            "temperature = 1",
        ),
        ({"batch_size": 4}, r"was made with batch_size = 3 \(now 4\); resume with the same"),
        ({"asked": [[1, 2], *ASKED[1:]]}, r"a\.jsonl:2: the answer to another prompt than number 0"),
        (
            {
                "settings": Settings(
                    num_speculative_tokens=0, sampling=SETTINGS.sampling, max_tokens=9, eos=SETTINGS.eos, seed=5
                )
            },
            "head",
        ),
    ],
)
def test_other_settings_are_refused(changed, words, model, whole, tmp_path):
    """Catches a file in which two settings are mixed; what is refused stays as it was."""
    out = tmp_path / "a.jsonl"
    out.write_bytes(whole[1].read_bytes())
    with pytest.raises(ConfigError, match=words):
        run(model, out, **changed)
    assert out.read_bytes() == whole[1].read_bytes()


def test_another_model_is_refused(whole):
    """Other weights of the same shapes, in the trunk or in the head."""
    with pytest.raises(ConfigError, match="holds answers of another trunk"):
        run(speaking(seed=1), whole[1])
    other = speaking()
    with torch.no_grad():
        next(iter(other.head.parameters())).add_(1)
    with pytest.raises(ConfigError, match="holds answers of another head"):
        run(other, whole[1])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a file of answers"),
        (b'{"text": "mine"}\n', "its first line is not"),
        (b"HEADER_KEY{broken\n{}\n", r"a\.jsonl:2: not JSON"),
        (b'HEADER_KEY{"prompt": [1]}\n', r"a\.jsonl:2: not a stored answer"),
    ],
)
def test_a_file_of_something_else_is_left_alone(content, words, model, whole, tmp_path):
    """Catches a user's file that is cut or written to because it has the name."""
    out = tmp_path / "a.jsonl"
    out.write_bytes(content.replace(b"HEADER_KEY", whole[1].read_bytes().splitlines(keepends=True)[0]))
    before = out.read_bytes()
    with pytest.raises(CheckpointError, match=words):
        run(model, out)
    assert out.read_bytes() == before


def test_a_full_disk_leaves_whole_batches(model, whole, tmp_path, monkeypatch):
    """The batch that does not fit is taken back; the rest stands, and the error says so."""
    out, real, calls = tmp_path / "a.jsonl", os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) == 3:  # the header, then batches
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left on device\. Complete batches are kept"):
        run(model, out)
    assert lines(out) == lines(whole[1])[:4]


@pytest.mark.more
def test_greedy_answers_are_those_without_a_head(model, tmp_path):
    """Lossless: the head makes it faster, not different."""
    files = [tmp_path / "head.jsonl", tmp_path / "plain.jsonl"]
    for out, k in zip(files, (3, 0), strict=True):
        run(model, out, settings=Settings(num_speculative_tokens=k, max_tokens=8))
    with_head, plain = ([each["tokens"] for each in lines(out)[1:]] for out in files)
    assert with_head == plain
    headless = speaking()
    headless.head = None
    run(headless, tmp_path / "none.jsonl", settings=Settings(num_speculative_tokens=3, max_tokens=8))
    assert (tmp_path / "none.jsonl").read_bytes() == files[1].read_bytes()


@pytest.mark.more
def test_repetitive_answers_are_reported(model, tmp_path):
    """A trunk that repeats itself is counted, and each repetitive answer says so."""
    loop = speaking()
    with torch.no_grad():
        loop.trunk.output.weight.zero_()
    tally = run(loop, tmp_path / "a.jsonl", settings=Settings(num_speculative_tokens=0, max_tokens=24, eos=()))[-1]
    assert tally.repetitive == 7
    assert all(each["repetitive"] for each in lines(tmp_path / "a.jsonl")[1:])


def test_training_reads_them(whole):
    """The header is no document, and only the answers count."""
    train, held = load_corpora([whole[1]], chatty())
    answers = lines(whole[1])[1:]
    assert train.num_labels + held.num_labels == sum(len(each["tokens"]) for each in answers)
    assert len(train.names) + len(held.names) == 7


CHATS = [{"messages": said(("user", f"ask {number}"), ("assistant", "gold"))} for number in range(3)]


def test_prompts_of_records_then_of_texts(model, tmp_path):
    """The records' first, up to count; the rest cut from the texts, as many tokens each, the same for one seed."""
    records, text = tmp_path / "r.jsonl", tmp_path / "t.txt"
    records.write_text("".join(json.dumps(each) + "\n" for each in CHATS))
    text.write_text("".join(f"{number} is the number of this line\n" for number in range(99)))
    found, notes = read_prompts([records, text], model, count=5, length=12, seed=1, chat=False)
    assert bytes(found[2]) == b"<u>ask 2<a>"
    assert [len(each) for each in found[3:]] == [12, 12]
    assert notes == []
    assert read_prompts([records, text], model, count=5, length=12, seed=1, chat=False)[0] == found
    assert read_prompts([records, text], model, count=5, length=12, seed=2, chat=False)[0] != found
    assert read_prompts([records], model, chat=False)[0] == found[:3]
    assert read_prompts([records], model, count=2, chat=False)[0] == found[:2]


@pytest.mark.parametrize(
    ("content", "count", "words"),
    [
        ('{"text": ""}', None, r"p\.jsonl:1: the prompt is empty"),
        ('{"prompt": [300]}', None, "token 300 is not in the model's vocabulary of 264"),
        ('{"a": 1}', None, "its columns are a"),
        ("", None, "no prompt was found"),
        ('{"text": "a"}', 0, "count = 0"),
    ],
)
def test_bad_prompts(content, count, words, model, tmp_path):
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_prompts([tmp_path / "p.jsonl"], model, count=count, chat=False)


def test_texts_need_a_count(model, tmp_path):
    (tmp_path / "t.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"t\.txt is text: give the number"):
        read_prompts([tmp_path / "t.txt"], model, chat=False)


def test_prompts_that_fill_the_context(model, tmp_path):
    """Catches a run that ends at a long prompt, and prompts that go without a word."""
    context = model.trunk.max_length
    sizes = (context - 1, context, 3)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": [1] * size}) + "\n" for size in sizes))
    found, notes = read_prompts([tmp_path / "p.jsonl"], model, chat=False)
    assert [len(each) for each in found] == [context - 1, 3]
    assert notes == [f"1 of 3 prompts fill the model's context of {context} tokens: left out"]


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
    """The file and what is reported of it; a second call finds all answers there."""
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


def test_repetitive_answers_are_printed():
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
