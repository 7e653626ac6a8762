"""The demo: really run with a budget of seconds; its figures and what it prints also from rounds made by hand."""

import json
import math
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import nextn.demo
from nextn.checkpoint.checkpoint import SHIPPED, SHIPPED_HEAD, Checkpoint
from nextn.decoding.records import Round, SequenceRound
from nextn.demo import (
    DecodedModel,
    DecodedPair,
    DecodedSide,
    Demonstration,
    TrainedHead,
    decode_model,
    decode_trained,
    train_demo,
)
from nextn.evaluate.workload import read_prompts
from nextn.model.model import Model
from nextn.train.metrics import Evaluation, HeadRecord, StepRecord

TEXT = b"def add(a, b):\n    return a + b\n\n\nprint((add(1, 22), 'is', [x for x in range(9) if x % 4]), 7)\n"


@pytest.fixture(autouse=True)
def no_published_model(tmp_path, monkeypatch):
    monkeypatch.setenv("NEXTN_REAL_MODELS", str(tmp_path / "models"))


@pytest.mark.slow
def test_the_demo_with_a_budget_of_seconds(tmp_path, here):
    """Both parts, the training interrupted after its first step and resumed by the command."""
    records, run = [], tmp_path / "shipped" / "new-head"
    options = {"num_speculative_tokens": 4, "on_record": records.append, "should_stop": lambda: bool(records)}
    assert train_demo(run, SHIPPED, minutes=1, **options) is None
    first = json.loads((run / "step-0000001" / "trainer.json").read_text())["pace"]["used_s"]
    budget = 1.7 * first + 0.5  # at least one more step, on any machine
    code, out, err = here("demo", "--no-download", "--folder", tmp_path, "--minutes", budget / 60)
    assert code == 0, err
    for title in (
        "1. A trained model",
        "2. A new head for this model",
        "1, temperature 1",
        "greedy, with the new head",
    ):
        assert title in out
    shipped = json.loads((tmp_path / "shipped" / "report.json").read_text())  # both backends, if one had to be built
    assert out.count("output identical") == len(shipped) + 2
    assert all(each["identical_output"] for each in shipped.values())
    report = json.loads((run / "report.json").read_text())
    assert report["identical_output"]
    assert report["greedy"]["mean_acceptance_length"] > 1.2  # a new head is no random one
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    numbers = [step["step"] for step in steps if "lr" in step]
    assert numbers == [*range(1, report["steps"] + 1)]
    assert len(numbers) > 1
    (checkpoint,) = run.glob(f"step-*{report['steps']}")
    pace = json.loads((checkpoint / "trainer.json").read_text())["pace"]
    assert pace["used_s"] + pace["step_s"] / 2 >= budget
    assert Model.load(SHIPPED, head=run / "head").head is not None
    assert f"step {report['steps']}/{report['steps']}  100%  0:00 left" in err


def decode_a_little(decode, model, texts, *, seconds, **options):
    return decode(model, texts, seconds=min(seconds, 0.1), **options)


def test_without_a_compiler(tmp_path, here, monkeypatch):
    """The torch backend decodes, and the demo says why; with --minutes 0 it ends there."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(nextn.demo, "decode_model", partial(decode_a_little, decode_model))
    code, out, err = here("demo", "--no-download", "--folder", tmp_path, "--minutes", "0")
    assert code == 0, err
    assert "torch backend (the native runtime cannot be built without no-such-compiler)" in out
    assert "output identical" in out
    report = json.loads((tmp_path / "shipped" / "report.json").read_text())
    assert [(name, each["num_speculative_tokens"]) for name, each in report.items()] == [("torch", 4)]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_torch_decodes_while_the_native_runtime_is_not_built(tmp_path, monkeypatch):
    """A newcomer sees figures before the compiler runs."""
    status = SimpleNamespace(is_built=False, missing=(), problem="")
    monkeypatch.setattr(nextn.demo, "build_status", lambda: status)
    events = []
    results = nextn.demo.decode_shipped(
        tmp_path, num_speculative_tokens=2, seconds=0.1, on_build=lambda: events.append("build")
    )
    for example in results:
        events.append(example.decoded.backend)
    assert events == ["torch", "build", "native"]
    assert [*json.loads((tmp_path / "report.json").read_text())] == ["torch", "native"]


def unwrapped(text):
    """Without white space: where lines are wrapped depends on the length of paths."""
    return "".join(text.split())


def plain(text, seconds=0.1):
    """A round a byte behind the prefill's."""
    return tuple(Round((SequenceRound(0, (), 0, (byte,)),), 0.0, seconds) for byte in text)


def drafted(text, seconds=0.1):
    """Rounds of two drafts that keep one, and emit a byte of the trunk's own."""
    rest = [text[at : at + 2] for at in range(1, len(text), 2)]
    rounds = [Round((SequenceRound(0, (part[0], 0), 1, tuple(part)),), seconds / 2, seconds / 2) for part in rest]
    return (*plain(text[:1]), *rounds)


def decoded(*, other=b"", texts=3):
    """other: what MTP says in place of the greedy text; texts: those beside one that loops."""
    loop, count = b"\n" * 99, texts + 1
    greedy = DecodedPair(
        DecodedSide((*[plain(TEXT)] * texts, plain(loop))),
        DecodedSide((*[drafted(other or TEXT)] * texts, drafted(loop, 1e-6))),
    )
    sampled = DecodedPair(DecodedSide((plain(TEXT),) * count), DecodedSide((drafted(TEXT),) * count))
    return DecodedModel((tuple(b"# a prompt\n"),) * count, greedy, sampled, 8, 2, "native", "", 1)


def test_texts_are_no_longer_than_what_the_head_is_trained_on():
    """Longer ones once cost all acceptance, and nothing said so."""
    assert nextn.demo._TRAINING["length"] >= nextn.demo._PROMPT_TOKENS + nextn.demo._MAX_TOKENS


def test_repetitive_text_does_not_count():
    """Catches a speedup of loops, which say nothing of other text."""
    pair = decoded(texts=1).greedy
    assert pair.non_degenerate == [0]
    assert pair.figures().speedup == pytest.approx(2)
    assert pair.speedup > 2.5
    assert pair.figures().mtp.acceptance.rates == (1.0, 0.0)
    only = DecodedPair(pair.plain.select([1]), pair.mtp.select([1]))
    assert only.non_degenerate == []
    assert only.as_record() == {"prompts": 1, "repetitive": 1, "speedup_with_repetitive": only.speedup}
    assert DecodedPair.join([pair, only]).non_degenerate == [0]


def test_seconds_are_without_the_prefill():
    side = DecodedSide((plain(TEXT[:5], seconds=2.0),))
    assert (side.seconds, side.tokens_per_s) == (8.0, 0.5)


def test_identical_is_of_all_greedy_texts():
    assert decoded().identical
    assert not decoded(other=TEXT[:-4] + b"!" + TEXT[-3:]).identical
    assert decoded().as_record()["identical_output"]


@pytest.mark.parametrize(
    ("seconds", "rate", "num_prompts", "num_tokens"),
    [(8.0, 1000.0, 3, 160), (8.0, 64.0, 2, 64), (8.0, 10.0, 1, 32), (0.0, 10.0, 1, 32)],
)
def test_prompts_and_tokens_follow_the_budget(monkeypatch, seconds, rate, num_prompts, num_tokens):
    """Plain first, then MTP, of one prompt after the other: a machine that slows down affects both."""
    now, asked = 0.0, []

    def decode_side(backend, texts, settings):
        nonlocal now
        now += settings.max_tokens / rate
        asked.append((bytes(texts[0]), settings.num_speculative_tokens, settings.max_tokens))
        return DecodedSide((plain(TEXT[: settings.max_tokens], seconds=1 / rate),))

    monkeypatch.setattr(nextn.demo, "decode_side", decode_side)
    monkeypatch.setattr(nextn.demo, "backend_for", lambda model, name: SimpleNamespace(name="torch", reason="so"))
    monkeypatch.setattr(nextn.demo, "eos_tokens", lambda model: ())
    found = decode_model(None, [b"a", b"bc", b"def"], num_speculative_tokens=3, seconds=seconds, clock=lambda: now)
    assert asked[:3] == [(b"a", 0, 32), (b"a", 3, 32), (b"a", 0, 32)]  # warms up, and measures
    assert [len(found.prompts), asked[-1][2]] == [num_prompts, num_tokens]
    assert [each[:2] for each in asked[3:7]] == [(b"a", 0), (b"a", 3)] * 2
    assert len(asked) == 3 + 4 * num_prompts
    assert now <= 3 * 32 / rate + max(seconds, 4 * num_tokens / rate) + 4 * num_tokens / rate


def test_both_heads_continue_the_same_prompts(monkeypatch, tmp_path):
    """Though one is faster: else the figures beside each other were of other texts."""
    asked = []

    def decode(model, texts, *, seconds, max_tokens, **options):
        asked.append((model, [*texts], seconds, max_tokens))
        return decoded()

    monkeypatch.setattr(nextn.demo, "decode_model", decode)
    monkeypatch.setattr(nextn.demo, "load_for", lambda checkpoint, *, head: head)
    monkeypatch.setattr(nextn.demo, "sample_prompts", lambda *_, **__: [np.array([number]) for number in range(6)])
    record = SimpleNamespace(as_record=dict, held_out=None)
    trained = TrainedHead(tmp_path / "run" / "head", 9, record, None, 30.0)
    trained.folder.mkdir(parents=True)
    decode_trained(trained, replace(example(tmp_path), head=Path("own")))
    (new, texts, _, _), (own, same, seconds, length) = asked
    assert (new, len(texts), own) == (trained.folder, 6, Path("own"))
    assert (same, seconds, length) == (texts[: len(decoded().prompts)], math.inf, decoded().max_tokens)


def example(path, prompts=("# a prompt\n",), **changes):
    return Demonstration(path, None, prompts, decoded(**changes), lambda tokens: bytes(tokens).decode(errors="replace"))


@pytest.fixture
def reported(tmp_path, monkeypatch, here):
    """`nextn demo` whose training and decoding are over -> what it prints of them."""

    def call(*args, **changes):
        side = SimpleNamespace(rates=(0.5,), length=1.5)
        heldout = SimpleNamespace(
            as_record=lambda: {"greedy": {}}, greedy=side, sampled=side, temperature=1.0, noise=lambda: 0.1
        )
        trained = TrainedHead(tmp_path / "shipped" / "new-head" / "head", 9, heldout, None, 30.0)

        def train(*args, on_record, **options):
            on_record(HeadRecord(9, heldout))
            return trained

        monkeypatch.setattr("nextn.demo.train_demo", train)
        shipped = tmp_path / "shipped" / "model"
        monkeypatch.setattr("nextn.demo.decode_shipped", lambda *args, **options: iter([example(shipped)]))
        both = example(shipped, **changes), example(shipped)
        monkeypatch.setattr("nextn.demo.decode_trained", lambda *args: both)
        code, out, err = here("demo", "--no-download", "--folder", tmp_path, *args)
        assert code == 0, err
        evaluated = "on the files' own text: greedy 0.50 (AL 1.500)"  # the results below it are of other texts
        assert "--json" in args or "--minutes" in args or evaluated in err
        command = shlex.join(["nextn", "generate", str(shipped), "def add("])
        assert "--json" in args or unwrapped(command) in unwrapped(out)
        return out

    return call


def test_a_published_model(tmp_path, here, monkeypatch):
    """Its answers with accepted drafts marked, figures of each, and one line where it is not there."""
    prompts = ("Why is the sky blue?", "Name a bird.", "never asked")
    monkeypatch.setenv("NEXTN_REAL_MODELS", str(tmp_path))
    answers = example(tmp_path / "SmolLM2-135M-Instruct", prompts, texts=1)
    asked = []

    def decode(folder, *, num_speculative_tokens, note, **options):
        asked.append(num_speculative_tokens)
        note("SmolLM2-135M-Instruct is downloaded once: 93 MB ...")
        return answers

    monkeypatch.setattr("nextn.demo.decode_published", decode)
    code, out, err = here("demo", "--minutes", "0", "--folder", tmp_path)
    assert code == 0, err
    assert "downloaded once: 93 MB" in err
    assert "Why is the sky blue?" in out
    assert prompts[-1] not in out
    assert "\u27e6" in out
    assert out.count("plain 10 tokens/s") >= len(answers.decoded.prompts)
    assert "output identical" in out
    assert asked == [3]
    assert "To try it: nextn chat smollm2 --head smollm2-head" in out
    answers = replace(answers, checkpoint=tmp_path / "elsewhere")
    assert f"nextnchat{tmp_path}/elsewhere--head" in unwrapped(here("demo", "--minutes", "0", "--folder", tmp_path)[1])


def test_without_the_published_model(reported, here, tmp_path):
    reported()
    _, out, err = here("demo", "--no-download", "--minutes", "0", "--folder", tmp_path)
    assert "note: the small model of the package, as SmolLM2-135M-Instruct is not there" in err
    assert "downloads are off" in err
    assert "1. A trained model" in out


def test_the_head_in_the_package():
    """It is small, in the layout of a Llama of those sizes, and its card and prompts come with it."""
    head = Checkpoint.open(SHIPPED_HEAD)
    assert sum(path.stat().st_size for path in SHIPPED_HEAD.iterdir()) < 10e6
    assert (head.config["hidden_size"], head.config["num_mtp_layers"]) == (576, 1)
    assert len(read_prompts(SHIPPED_HEAD / "prompts.jsonl")) == 5
    assert (SHIPPED_HEAD / "README.md").read_text().startswith("---\nlicense: apache-2.0")


def test_the_story(reported, tmp_path):
    text = reported()
    first, second = text.split("2. A new head for this model, trained here")
    for part, label in ((first, "prompt 1, greedy"), (second, "prompt 1, greedy, with the new head")):
        lines = part[part.index(label) :].splitlines()
        assert f"{label} (in brackets: accepted drafts)" in lines[0]
        assert "\u27e6e\u27e7" in lines[2]
        story = [line.replace("\u27e6", "").replace("\u27e7", "") for line in lines[1:4]]
        assert story == ["# a prompt", "def add(a, b):", "    return a + b"]
        assert "greedy         AL 2.00 at K = 2  a_1 1.00  a_2 0.00  (1 of 4 texts repetitive, left out)" in part
        assert "plain 10 tokens/s, MTP 20 tokens/s = 2.00 x  output identical" in part
        assert part.count("output") == 1 + (part is second)
    assert unwrapped("for 3 minutes (--minutes)") in unwrapped(second)
    assert "results on the model's continuations of held-out code" in second
    assert "the new head, 9 steps:" in second
    folder = tmp_path / "shipped" / "new-head"
    assert unwrapped(f"trained in 30 s; in {folder}: head, report.json") in unwrapped(second)
    command = shlex.join(["nextn", "generate", str(tmp_path / "shipped" / "model"), "def add("])
    assert unwrapped(f"{command} --head {folder / 'head'}") in unwrapped(second)
    assert "output DIFFERENT" in reported(other=TEXT[:-1] + b"!")


def test_without_figures_of_repetitive_texts(reported):
    text = reported(texts=0).split("2. A new head")[1]
    assert "greedy         no figures: 1 of 1 texts are repetitive" in text
    assert "greedy, with the new head" not in text
    assert text.count(" x") == 3  # of temperature 1, and of the other head
    few = reported(texts=2).split("2. A new head")[1]
    assert "greedy         no figures: 1 of 3 texts are repetitive" in few
    assert few.count(" x") == 3


def test_drafts_that_cost_more_than_they_save_are_named(reported, monkeypatch):
    assert "costs more" not in reported()
    monkeypatch.setattr(DecodedPair, "speedup", 0.9)
    assert unwrapped("checking drafts costs more than the new head saves") in unwrapped(reported())


def test_json(reported):
    record = json.loads(reported("--json"))
    new = record["new_head"]
    figures = new["num_speculative_tokens"], new["steps"], new["greedy"]["repetitive"], new["temperature_1"]["speedup"]
    assert figures == (2, 9, 1, pytest.approx(2))
    assert record["own_head"]["num_speculative_tokens"] == 2
    assert record["shipped"]["native"]["identical_output"]


def test_stopped(reported, tmp_path, monkeypatch, here):
    """A stopped demo says how to go on, and prints no figures of the training."""
    reported("--minutes", "0")
    monkeypatch.setattr("nextn.demo.train_demo", lambda *args, **options: None)
    code, out, err = here("demo", "--no-download", "--folder", tmp_path, "--minutes", "1.5")
    assert code == 130
    assert unwrapped(f"nextn demo --folder {tmp_path} --minutes 1.5") in unwrapped(err)
    assert "results" not in out.split("2. A new head")[1]


def test_progress_moves_without_a_terminal(capsys):
    """A line at every interval, also while a step takes long; none twice, and the last one is what the end was."""
    from time import sleep

    from nextn.cli.train_common import progress

    record = StepRecord(3, 12, 0.25, 125.0, 96, (1.0, 0.5), 1e-3, 0.3, 1.0, 50.0)
    with progress(quiet=False, every_s=0.05) as on_record:
        sleep(0.12)
        on_record(record)
        sleep(0.12)
        on_record(Evaluation(3, 2, 8))
        sleep(0.12)
        on_record(replace(record, step=4, loss=(0.0,), match=(0.0,), overlap=(0.0,)))
        sleep(0.12)
        on_record(replace(record, step=12, share=1.0, remaining_s=0.0))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("train  0:00  ")
    assert "train  0:00  step 3/12  25%  2:05 left  bits 1.44 0.72  50 tok/s" in lines
    assert "train  0:00  step 3  evaluation on held-out text, batch 2/8" in lines
    assert "train  0:00  step 4/12  25%  2:05 left  no token with a label  50 tok/s" in lines
    assert lines[-1].startswith("train  0:00  step 12/12  100%  0:00 left")
    assert len(lines) == len(set(lines))
    with progress(quiet=True, every_s=0.01) as on_record:
        sleep(0.03)
        on_record(record)
    assert capsys.readouterr().err == ""
