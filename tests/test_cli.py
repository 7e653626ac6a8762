"""The command line: exit codes, one-line errors, JSON, a run interrupted and resumed."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from chats import chatty
from quick import others_slow
from tiny import CONFIGS

from nextn import cli
from nextn.cli import common
from nextn.cli.common import expanded, stop_flag
from nextn.cli.model_options import ModelOptions
from nextn.decoding.generate import encode
from nextn.errors import ConfigError
from nextn.model.model import Model
from nextn.settings import available_cores

TINY = CONFIGS["glm4_moe"] | {"vocab_size": 264, "max_position_embeddings": 256, "eos_token_id": 257}
SETTINGS = ["--set", "batch_size=2", "--set", "length=32", "--set", "depths=2", "--set", "compile=false"]


def nextn(*args, **options):
    env = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    return subprocess.run(
        [sys.executable, "-m", "nextn", *map(str, args)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
        **options,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory, command):
    """A tiny model trained through the command line, on text files of the user's."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "text").mkdir()
    for index in range(24):
        (folder / "text" / f"{index}.txt").write_text(f"line {index} of the text\n" * 40)
    code, said, complaint = command(
        *["train", folder / "out", "--data", folder / "text", "--model", folder / "config.json"],
        *[*SETTINGS, "--set", "steps=4", "--set", "tensorboard=true", "--json"],
    )
    assert code == 0, complaint
    assert json.loads(said) == {"model": str(folder / "out" / "model")}
    return folder


@pytest.mark.more
def test_answers_resume_in_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "a.jsonl").touch()
    monkeypatch.setattr(common, "_can_hold_files", lambda folder: False)
    assert common.appendable(tmp_path / "a.jsonl") == tmp_path / "a.jsonl"
    with pytest.raises(ConfigError, match="expected a file, in a folder that can be written to"):
        common.appendable(tmp_path / "b.jsonl")


def test_train_wrote_a_model(run):
    model = Model.load(run / "out" / "model")
    assert model.head is not None
    assert model.tokenizer is not None
    assert model.trained_length == 32
    lines = [json.loads(line) for line in (run / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert lines[-1]["decoded"]["num_drafts"] > 0
    assert list((run / "out" / "tensorboard").glob("events.*"))


@pytest.mark.more
def test_generate_as_text_and_json(run, here, monkeypatch):
    code, text, complaint = here("generate", run / "out" / "model", "line 1 of", "--max-tokens", 12, "-k", 3)
    assert code == 0, complaint
    assert "tokens/s on the native backend  AL " in text
    record = json.loads(here("generate", run / "out" / "model", "line 1 of", "--max-tokens", 12, "--json")[1])
    assert len(record["tokens"]) == 12
    assert "conditional" in record["definition"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"line 1 of")))
    plain = here("generate", run / "out" / "model", "-", "-k", 0, "--max-tokens", 12, "--json")[1]
    assert json.loads(plain)["tokens"] == record["tokens"]


@pytest.mark.more
def test_texts_longer_than_the_trained_length_are_noted(run, here, tmp_path):
    """Positions that training never saw cost acceptance and text, and nothing else shows it."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "line 1 of"}\n')
    prompts = ["--prompts", tmp_path / "prompts.jsonl", "--temperatures", "0", "-k", "2", "--backend", "torch"]
    for command in (["generate", run / "out" / "model", "line 1 of"], *(
        [*name, run / "out" / "model", *prompts] for name in (("bench", "--repeats", "1"), ("measure",))
    )):  # fmt: skip
        _, table, notes = here(*command, "--max-tokens", 40)
        assert "training saw sequences of 32" in notes
        assert "greedy, " not in table  # one domain, whose row would be that of all texts
        assert "training saw" not in here(*command, "--max-tokens", 8)[2]
    record = json.loads(here("generate", run / "out" / "model", "line 1 of", "--max-tokens", 40, "--json")[1])
    assert "texts reach 49 tokens" in record["notes"][-1]


@pytest.mark.more
def test_trace_prints_the_table(run, here):
    _, table, _ = here("trace", run / "out" / "model", "ab", "--max-tokens", 4)
    assert "hidden state" in table
    assert "draft 1 = " in table
    rows = json.loads(here("trace", run / "out" / "model", "ab", "--max-tokens", 4, "--json")[1])
    assert {row["phase"] for row in rows} >= {"prefill", "draft", "verify"}


def training(run, out) -> list[str]:
    return ["train", out, "--data", run / "text", "--model", run / "config.json", *SETTINGS, "--set", "steps=40"]


def losses(folder) -> list[list[float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


@pytest.fixture(scope="module")
def whole(run, command):
    """Losses of a run that nobody interrupts."""
    assert command(*training(run, run / "whole"))[0] == 0
    return losses(run / "whole")


def test_records_that_cannot_be_written_are_refused_at_once(here, tmp_path):
    """Before the model is looked for, as measuring takes long."""
    (tmp_path / "file").touch()
    for words in (["measure", "no-model"], ["diagnose", "no-model"]):
        for out in (tmp_path, tmp_path / "file" / "record.json", Path("/")):
            code, printed, error = here(*words, "--out", out)
            assert (code, printed, str(out) in error, error.count("\n")) == (2, "", True, 1)


@pytest.mark.parametrize(
    "number", others_slow([signal.SIGINT, signal.SIGTERM], signal.SIGINT), ids=["SIGINT", "SIGTERM"]
)
def test_interrupted_and_resumed(number, run, whole, here, tmp_path):
    """A signal in mid-run: a checkpoint, exit code 130, and the resumed run has the losses of an uninterrupted one."""
    common = training(run, tmp_path / "out")
    args = [sys.executable, "-m", "nextn", *map(str, common)]
    process = subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    metrics = tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") >= 5):
        time.sleep(0.02)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "--resume" in stderr
    stopped = metrics.read_text().count("\n")
    assert 5 <= stopped < 36
    code, _, complaint = here(*common)
    assert code == 2
    assert "holds a run already; use --resume" in complaint
    assert here("train", tmp_path / "out", "--resume")[0] == 0  # all else is in the folder
    assert losses(tmp_path / "out") == whole


def test_a_setting_that_is_given_as_an_option_is_explained(here, tmp_path):
    code, _, said = here("train", tmp_path / "run", "--steps", 20, "--batch-size=4", "--fast")
    assert code == 2
    assert "steps is a setting: give it as --set steps=VALUE\nbatch_size is a setting: give it as --set batch" in said
    for words in (("train", tmp_path / "run", "--device", "none"), ("measure", "tiny", "--steps", 20)):
        assert "is a setting" not in here(*words)[2]


def test_an_interrupt_is_answered(monkeypatch, capfd):
    """By one word, where typer makes an exit code of it; by what is waited for, in a loop that does not look."""

    def command() -> None:
        raise KeyboardInterrupt

    app = typer.Typer()
    app.command()(command)
    monkeypatch.setattr(cli, "build_app", lambda _: app)
    monkeypatch.setattr("sys.argv", ["nextn"])
    with pytest.raises(SystemExit, match="130"):
        cli.main()
    assert capfd.readouterr().err == "interrupted\n"
    finder = "class Finder:\n    def find_spec(self, name, *_):\n        if name == 'typer': raise KeyboardInterrupt\n"
    program = f"import sys\n{finder}sys.meta_path.insert(0, Finder())\nfrom nextn.__main__ import main\nmain()\n"
    start = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (start.returncode, start.stderr) == (130, "interrupted\n")  # while the program is being loaded
    monkeypatch.setattr(common, "_QUIET_S", 0.01)
    with stop_flag() as stopped:
        signal.raise_signal(signal.SIGINT)
        said, deadline = "", time.monotonic() + 20
        while "stopping after this step" not in said and time.monotonic() < deadline:
            said += capfd.readouterr().err
            time.sleep(0.01)
        assert "stopping after this step" in said
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "/nowhere", "x"], "neither a folder"),
        (["generate", "MODEL", ""], "prompt 0 is empty"),
        (["generate", "MODEL", "x" * 300], "prompt 0 has 300 tokens; the context holds 256"),
        (["generate", "MODEL", "x", "--max-tokens", "257"], "max_tokens = 257; expected at most 256, the context of"),
        (["generate", "MODEL", "x", "--chat"], "no chat template"),
        (["trace", "MODEL", ""], "prompt 0 is empty"),
        (["bench", "MODEL", "-k", "auto"], "give the largest K beside it"),
        (["train", "OUT", "--set", "stepz=3"], "unknown setting 'stepz'"),
        (["train", "UNDER_A_FILE"], "expected a folder that can be written to, or a new one"),
        (["canary", "build", "UNDER_A_FILE", "--family", "glm4_moe"], "expected a folder that can be written to"),
        (["answer", "MODEL", "UNDER_A_FILE", "--prompts", "x"], "expected a file, in a folder that can be written to"),
        (["train", "OUT", "--recipe", "none"], "unknown recipe 'none'; known: demo"),
        (["train", "OUT", "--resume"], "holds no checkpoint to resume from"),
        (["train", "/proc/nextn", "--set", "steps=1", "--model", "CONFIG"], "/proc/nextn"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_exit_code_2(args, words, run, here, tmp_path):
    names = {"MODEL": run / "out" / "model", "OUT": tmp_path / "out", "CONFIG": run / "config.json"}
    names["UNDER_A_FILE"] = run / "config.json" / "out"
    code, _, complaint = here(*(names.get(arg, arg) for arg in args))
    assert code == 2, complaint
    assert words in complaint
    *progress, error = complaint.splitlines()
    assert error.startswith("error: ")
    assert all(line.endswith(" ...") for line in progress)


@pytest.mark.more
def test_usage_errors_exit_2(here):
    done = nextn("generate", "/nowhere", "x")
    assert done.returncode == 2
    assert done.stderr.startswith("error: /nowhere: neither a folder")
    assert here("nonsense")[0] == here("generate")[0] == 2


@pytest.mark.more
def test_version():
    assert nextn("--version").stdout.startswith("nextn 0.")


@pytest.mark.one_case
@pytest.mark.parametrize("options", [(), ("--chat",), ("--no-chat",)], ids=" ".join)
def test_chat_template_is_applied_where_there_is_one(options, run, here, tmp_path):
    """By default and with --chat the prompt is a user's message; with --no-chat it is text."""
    model = Model.load(run / "out" / "model")
    model.tokenizer = chatty()
    model.save(tmp_path / "model")
    table = json.loads(here("trace", tmp_path / "model", "hi", "--max-tokens", 2, "--json", *options)[1])
    prefill = [row for row in table if row["round"] == 0 and row["by"] == "trunk"]
    assert len(prefill) == len(encode(model, "hi", chat=options != ("--no-chat",)))


def test_a_hub_id_reaches_the_checkpoint(run, here, monkeypatch):
    asked = []

    def load(source, **_):
        asked.append(source)
        raise ConfigError("asked")

    monkeypatch.setattr(Model, "load", load)
    code, _, complaint = here("generate", "org/model@v1", "x")
    assert (code, complaint, asked) == (2, "error: asked\n", ["org/model@v1"])


@pytest.mark.more
def test_weights_of_few_bits(here):
    """One option for every command that decodes; refused where it would have no effect."""
    for bits in (8, 4):
        code, text, _ = here("generate", "tiny", "def", "--max-tokens", 8, "--weights", f"int{bits}", "--json")
        record = json.loads(text)
        assert (code, record["backend"], record["weight_bits"], record["head_bits"]) == (0, "native", bits, 8)
    answer = ["answer", "y", "--prompts", "z"]
    for name, *more in (["generate", "x"], ["chat"], ["serve"], ["bench"], ["advise"], answer):
        complaint = here(name, "tiny", *more, "--weights", "int3")[2]
        assert "weights 'int3'; expected one of stored, int8, int4" in complaint, name
    for other in (("--backend", "torch"), ("--device", "cuda")):
        code, _, complaint = here("generate", "tiny", "def", "--weights", "int8", *other)
        assert code == 2
        assert "excludes --backend torch and devices other than cpu" in complaint


@pytest.mark.more
def test_a_number_of_threads(here):
    """A valid number is for a whole process, so another one gets it."""
    most = available_cores()
    for name, *more in (["generate", "x"], ["serve"], ["bench"]):
        for number in (0, most + 1):
            complaint = here(name, "tiny", *more, "--threads", number)[2]
            assert f"--threads {number}; expected 1 to {most}, the cores that" in complaint, name
    code = """
import sys, threading, torch
from nextn.cli.common import shipped_path
from nextn.cli.model_options import ModelOptions
from nextn.runtime.native.abi import load
options = ModelOptions(shipped_path("tiny"), threads=int(sys.argv[1]))
options.check()
options.load(need_head=True)
numbers = [torch.get_num_threads(), load().num_threads]
thread = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))  # as a server's
thread.start()
thread.join()
print(*numbers)
"""
    number = most if os.environ["OMP_NUM_THREADS"] == "1" else 1  # not what the process would take anyway
    done = subprocess.run([sys.executable, "-c", code, str(number)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == 3 * [str(number)]


def test_options_of_a_dataclass():
    """Two of the same type in another order would go unnoticed."""
    taken = []

    @expanded("head", dtype="float32")
    def command(*, prompt: str = "p", options: ModelOptions, as_json: bool = False) -> None:
        taken.append((prompt, options, as_json))

    app = typer.Typer()
    app.command()(command)
    app(["m", "--device-map", "r", "--threads", "2", "--as-json"], standalone_mode=False)
    assert taken == [("p", ModelOptions("m", dtype="float32", device_map="r", threads=2), True)]
    with pytest.raises(SystemExit):
        app(["m", "--head", "h"])
    assert len(taken) == 1


@pytest.mark.more
def test_a_kv_cache_of_eight_bits(here):
    code, text, _ = here("generate", "tiny", "def", "--max-tokens", 8, "--kv-cache-dtype", "int8", "--json")
    record = json.loads(text)
    assert (code, record["backend"], record["kv_cache_dtype"]) == (0, "native", "int8")
    for name, *more in (["generate", "x"], ["serve"], ["bench"]):
        complaint = here(name, "tiny", *more, "--kv-cache-dtype", "fp8")[2]
        assert "kv_cache_dtype 'fp8'; expected one of auto, int8" in complaint, name
    _, _, complaint = here("generate", "tiny", "def", "--kv-cache-dtype", "int8", "--backend", "torch")
    assert complaint.startswith("error: --kv-cache-dtype int8 excludes --backend torch")
    _, _, complaint = here("measure", "tiny", "--weights", "int8", "--texts", "x")
    assert complaint.startswith("error: --weights int8 with --texts or --engine")
