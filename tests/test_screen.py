"""What reaches the terminal: nothing foreign acts on it, a pipe may close, narrow terminals, progress."""

import io
import json
import os
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path
from unicodedata import category

import loopback
import pytest
import torch
from artifacts import publish
from rich.console import Console
from rich.table import Table
from stored import INDEX, in_one_file
from test_restore import lost
from ticks import Ticks
from tiny import CONFIGS, refrain

from nextn.cli import progress
from nextn.cli.progress import progress_bars
from nextn.cli.screen import (
    Marks,
    _wrapped,
    console,
    echo,
    plain,
    print_json,
    print_table,
    shown,
    visible,
)
from nextn.conformance.build import build_record
from nextn.conformance.record import FILE
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.model.model import Model

FOREIGN = "\x1b[31m\x07\x9b2J\x7f\u202e\u2028\r\x08"
EVIL = f"{FOREIGN}\udcff"
# Of a file: safetensors takes names for UTF-8, so in other locales they are ASCII.
NAME = FOREIGN if sys.getfilesystemencoding() == "utf-8" else FOREIGN.encode("ascii", "ignore").decode()


def harmful(text: str) -> set[str]:
    """Characters that a terminal could act on, line breaks aside."""
    return {char for char in text if char != "\n" and category(char) in ("Cc", "Cf", "Zl", "Zp", "Cs")}


@pytest.fixture
def nextn(here):
    """The command line; whatever it prints is harmless."""

    def call(*args):
        code, out, err = here(*args)
        assert harmful(out + err) == set()
        assert "Traceback" not in err
        return code, out + err

    return call


@pytest.fixture
def hostile():
    """Makes servers that answer each path with a status and a JSON document, any other with an error -> their URL."""
    servers = []

    def make(**answers):
        class Handler(loopback.Handler):
            def do_GET(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                key = self.path.rpartition("/")[2]
                status, value = answers.get(key, (400, {"error": {"message": f"no {EVIL}\nerror: forged"}}))
                body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                self.give(status, body)

            do_POST = do_GET

        servers.append(loopback.Loopback().listen(Handler))
        return servers[-1].url

    yield make
    for server in servers:
        server.stop()


def test_visible():
    assert visible(EVIL) == r"\x1b[31m\x07\x9b2J\x7f\u202e\u2028\r\x08\udcff"
    assert visible("a\nb\tc\xa0d\u3000e") == r"a\nb\tc\xa0d\u3000e"
    assert visible("a\nb\tc\xa0d\u3000e\u200df", lines=True) == "a\nb\tc\xa0d\u3000e\u200df"
    assert (
        harmful(visible("".join(map(chr, (*range(0x3100), *range(0xD7F0, 0xE010), 0xFEFF, 0xFFF9, 0xE0001))))) == set()
    )
    assert len(shown("x" * 5000)) == 1003


def test_json_and_errors(capsys):
    """JSON keeps every character as an escape of its own; DEL, which `json` leaves raw, too."""
    print_json({"name": EVIL})
    out = capsys.readouterr().out
    assert harmful(out) == set()
    assert json.loads(out)["name"] == EVIL
    echo(f"text {EVIL}", err=True)
    assert harmful(capsys.readouterr().err) == set()


def test_no_console_prints_controls(capsys):
    """What never went through `plain` is made visible by the console itself."""
    table = Table(f"head{NAME}")
    table.add_row(f"cell{NAME}")
    print_table(table)
    out = capsys.readouterr().out
    assert harmful(out) == set()
    assert r"head\x1b" in out


def test_audit(nextn, tmp_path):
    """Tensor names, values of the config, and files that the index names."""

    def change(table):
        table[f"mtp.{NAME}"] = table["mtp.norm.weight"]

    folder = publish(tmp_path / "a", "qwen3_5", change=change)
    index = {"metadata": {}, "weight_map": {f"mtp.x{NAME}": f"gone{NAME}.safetensors"}}
    (folder / INDEX).write_text(json.dumps(index))
    code, said = nextn("audit", folder)
    assert code == 1, said
    assert r"\x1b[31m" in said
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": NAME}))
    assert nextn("audit", folder)[0] == 2
    assert nextn("audit", folder, "--family", EVIL)[0] == 2
    assert nextn("audit", folder, "--ignore", EVIL)[0] == 2
    assert nextn("audit", f"{tmp_path}/none{EVIL}")[0] == 2


@pytest.mark.more
def test_restore_and_convert(nextn, tmp_path):
    """Names of folders, files and tensors in plans and errors."""

    def change(table):
        table[f"other.{NAME}\nwrote 5 bytes"] = next(iter(table.values()))

    base = publish(tmp_path / f"base{NAME}", "glm4_moe", change=change)
    (base / "model.safetensors").rename(base / f"m{NAME}.safetensors")
    target = lost(tmp_path / f"target{NAME}", "glm4_moe")
    for args in (
        ["restore", target, "--from", base, "--dry-run"],
        ["restore", target, "--from", base, "--out", tmp_path / f"out{NAME}"],
        ["convert", base, tmp_path / f"side{NAME}", "--form", "side-file"],
        ["convert", base, tmp_path / f"side{NAME}", "--form", "shards"],
        ["convert", base, tmp_path / f"to{NAME}", "--to", NAME],
        ["extract", base, tmp_path / f"head{NAME}.safetensors"],
    ):
        code, said = nextn(*args)
        assert r"\x1b[31m" in said
        assert code in (0, 2)
        assert not any(line.startswith("wrote 5 bytes") for line in said.splitlines())


def test_measure(nextn, fixture_folder, tmp_path):
    """Errors of strict loading list names; notes and warnings name files."""
    folder = tmp_path / f"m{NAME}"
    shutil.copytree(fixture_folder / "glm", folder)
    prompts = tmp_path / f"p{NAME}.jsonl"
    prompts.write_text(json.dumps({"prompt": [1, 2, 3, 4], "domain": NAME}))
    how = ["--prompts", prompts, "--max-tokens", 8, "-k", 1, "--temperatures", "0", "--backend", "torch"]
    code, said = nextn("measure", folder, *how)
    assert code == 0, said
    in_one_file(folder, lambda table: table.update({f"model.layers.2.{NAME}": torch.ones(2)}))
    code, said = nextn("measure", folder, *how)
    assert code == 2
    assert r"\x1b[31m" in said


@pytest.mark.parametrize(
    "models",
    [
        (200, {"data": [{"id": f"m{NAME}"}]}),
        (200, {"data": [{"id": f"m{NAME}"}, {"id": f"n{NAME}\nno findings"}]}),
        (200, f"<html>{NAME}</html>"),
        (500, {"error": {"message": EVIL}}),
    ],
    ids=["one", "two", "html", "error"],
)
def test_verify(models, nextn, hostile):
    """Names of models, messages and texts of an engine."""
    answer = {"choices": [{"text": f"t{EVIL}\nno findings", "finish_reason": EVIL}], "usage": {}}
    for answers in ({"completions": (200, answer)}, {}):
        url = hostile(models=models, **answers)
        code, said = nextn("verify", url, "--samples", 2, "--timeout", 5)
        assert code in (0, 1, 2)
        assert not any(line.startswith("no findings  forged") for line in said.splitlines())


def test_canary_check(nextn, hostile, fixture_folder, tmp_path):
    """Engines and answers that the kit is held against, and a kit of a stranger's."""
    kit = build_record(fixture_folder / "glm", refrain(8, 33, seed=10**6).tolist(), count=2, tokens=4, temperature=1.0)
    (tmp_path / FILE).write_text(json.dumps(kit))
    model = (200, {"data": [{"id": f"m{NAME}"}]})
    assert nextn("canary", "check", tmp_path, "--engine", hostile(models=model))[0] == 2
    answers = tmp_path / f"answers{NAME}.jsonl"
    answers.write_text("\n".join(json.dumps({"tokens": EVIL}) for _ in range(2)))
    assert nextn("canary", "check", tmp_path, "--answers", answers)[0] == 2
    (tmp_path / FILE).write_text(json.dumps(kit | {"family": EVIL, "nextn": EVIL}))
    answers.write_text("\n".join(json.dumps({"tokens": [1, 2], "text": EVIL}) for _ in range(2)))
    nextn("canary", "check", tmp_path, "--answers", answers)


def piped(*args, env, **options) -> "subprocess.CompletedProcess[bytes]":
    env = os.environ | {"OMP_NUM_THREADS": "1"} | env
    command = [sys.executable, "-m", "nextn", *map(str, args)]
    return subprocess.run(command, capture_output=True, check=False, env=env, timeout=60, **options)


@pytest.mark.more
@pytest.mark.parametrize("args", [["audit", "MODEL"], ["audit", "MODEL", "--json"], ["--version"]], ids=" ".join)
def test_a_closed_pipe(args, fixture_folder):
    """141, as SIGPIPE would end it, and not a word; 1 would mean findings."""
    reader, writer = os.pipe()
    os.close(reader)
    names = [str(fixture_folder / "glm") if arg == "MODEL" else arg for arg in args]
    done = subprocess.run(
        [sys.executable, "-m", "nextn", *names], stdout=writer, stderr=subprocess.PIPE, check=False, timeout=60
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("args", [["audit", "tiny"], ["audit", "tiny", "--json"], ["--help"]], ids=" ".join)
def test_a_full_disk(args):
    """One line and 2, where 1 would mean findings."""
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "nextn", *args]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, timeout=60)
    line = b"error: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.more
def test_a_terminal_without_the_characters(fixture_folder):
    """What the encoding lacks is escaped."""
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "nextn", "audit", "nowhere\u00e9"]
    done = subprocess.run(command, capture_output=True, check=False, env=env, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(rb"error: nowhere\xe9: neither")


def figures() -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("", "texts", *(f"a_{depth}" for depth in range(1, 6))):
        table.add_column(title, no_wrap=True)
    table.add_row(plain("T=1 ratio"), "20", *["0.123 (0.10-0.14)"] * 5)
    return table


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_tables_fold_between_figures(columns, capsys, monkeypatch):
    """No figure is cut or broken across lines, whatever the width."""
    monkeypatch.setenv("COLUMNS", str(columns))
    print_table(figures())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert sum(line.count("0.123 (0.10-0.14)") for line in lines) == 5
    assert ("a_5 0.123 (0.10-0.14)" in "\n".join(lines)) == (columns < 200)


def test_a_pipe_gets_whole_lines(capsys, monkeypatch):
    """Whatever prints it: a text, a table of figures, or one whose cells would be wrapped or cut in a terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)
    long, prose = f"/{'folder/' * 40}model", "word " * 100
    paths = Table("file", "from", box=None)
    paths.add_row("model.safetensors", plain(long))
    paths.add_row("model.safetensors", plain(prose))
    for printed, lines in ((figures(), 2), (paths, 3), (plain(long), 1), (plain(prose), 1), (prose, 1)):
        for way in (console().print, *([print_table] if isinstance(printed, Table) else [])):
            way(printed)
            out = capsys.readouterr().out
            assert len(out.splitlines()) == lines
            assert prose in out or out == "".join(f"{line.rstrip()}\n" for line in out.splitlines())
            assert "..." not in out
            assert "\u2026" not in out


def test_wrapped():
    assert list(_wrapped(["aa", "bb", "cc"], 6)) == ["aa  bb", "  cc"]
    assert list(_wrapped(["a" * 9, "b"], 4)) == ["a" * 9, "  b"]


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = CONFIGS["glm4_moe"] | {"vocab_size": 264, "max_position_embeddings": 256}
    Model.build(config, tokenizer=byte_tokenizer()).save(folder)
    return folder


@pytest.mark.more
@pytest.mark.parametrize("locale", [{}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}], ids=["", "C"])
def test_standard_input_that_is_not_utf8(locale, byte_model):
    done = piped("generate", byte_model, "-", "-k", "0", input=b"caf\xe9", env=locale)
    said = b"error: standard input is not UTF-8 (byte 0xe9 at offset 3); convert it, for example with iconv -t UTF-8\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", said)


@pytest.mark.parametrize("verb", [["generate", "-k", "0"], ["trace", "-k", "0"]], ids=lambda verb: verb[0])
def test_a_prompt_that_is_not_utf8(verb, byte_model, nextn):
    code, said = nextn(verb[0], byte_model, "caf\udce9", *verb[1:])
    assert code == 2
    assert "error: the prompt is not valid Unicode: character 3 is the lone surrogate '\\udce9'" in said


def test_a_cache_that_cannot_be_written(byte_model, tmp_path, here, monkeypatch):
    """One line that names the place, whichever library wanted to write there."""

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", f"/cache{NAME}")

    monkeypatch.setattr(Model, "load", refuse)
    code, _, err = here("generate", byte_model, "x")
    assert (code, harmful(err)) == (2, set())
    assert err.startswith("error: /cache\\x1b")
    assert err.count("\n") == 1


def test_accepted_drafts_are_marked_everywhere(fixture_folder, monkeypatch):
    """Green in a terminal, underlined where NO_COLOR is set, in brackets where there are no styles."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    said = {}
    for name, options in {
        "pipe": {},
        "terminal": {"force_terminal": True, "color_system": "standard"},
        "NO_COLOR": {"force_terminal": True, "color_system": "standard", "no_color": True},
    }.items():
        screen = Console(file=StringIO(), **options)
        marks = Marks.of(screen)
        for accepted in (False, True):
            screen.print(marks.text(f"t{NAME}", accepted=accepted), end="", soft_wrap=True)
        said[name] = screen.file.getvalue()
    shown_name = visible(f"t{NAME}")
    assert said["pipe"] == f"{shown_name}\u27e6{shown_name}\u27e7"
    assert said["terminal"] == f"{shown_name}\x1b[32m{shown_name}\x1b[0m"
    assert said["NO_COLOR"] == f"{shown_name}\x1b[4m{shown_name}\x1b[0m"


def test_repetitive_text_is_reported(byte_model, here, monkeypatch):
    """Beside the acceptance, in JSON, too; a text of a few tokens is not called so."""
    probs = torch.nn.functional.one_hot(torch.tensor(65), 264).float() * 50
    monkeypatch.setattr(
        "nextn.model.trunk.Trunk.logits", lambda self, final_hidden: probs.expand(*final_hidden.shape[:-1], -1)
    )
    how = ["generate", byte_model, "abc", "-k", 2, "--backend", "torch"]
    _, out, _ = here(*how, "--max-tokens", 100)
    assert "the text is repetitive" in out
    assert "nan" not in out
    assert json.loads(here(*how, "--max-tokens", 100, "--json")[1])["repetitive"]
    assert not json.loads(here(*how, "--max-tokens", 20, "--json")[1])["repetitive"]


@pytest.mark.parametrize("columns", [50, 60, 80])
def test_trace_reads_at_any_width(columns, byte_model, here):
    code, out, err = here("trace", byte_model, "abc", "-k", 2, "--max-tokens", 4, columns=columns)
    assert code == 0, err
    assert "\u2026" not in out
    assert max(map(len, out.splitlines())) <= columns
    assert "token 'a'" in out


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_progress_without_a_terminal_is_lines(clock, monkeypatch, capsys):
    """A command that computes for minutes in a pipe says how far it is, also in a long step, and floods no log."""
    ticks = Ticks()
    monkeypatch.setattr(progress, "Event", lambda: ticks)
    with progress_bars(quiet=False) as added:
        texts, scores = added("texts", 32), added("scores", 2)
        texts(8)
        for _ in range(10):
            ticks.tick()
            clock[0] += progress._EVERY_S
        texts(24)
        ticks.tick()
        scores(2)
        ticks.tick()
    assert capsys.readouterr().err.splitlines() == [*["texts 8/32"] * 3, "scores 0/2"]


def test_quiet_commands_print_no_lines(monkeypatch, capsys):
    monkeypatch.setattr(progress, "status_lines", None)
    with progress_bars(quiet=True) as added:
        added("texts", 2)()
    assert not capsys.readouterr().err


def test_time_left_is_that_of_later_steps(clock):
    """The first step waits, loads and compiles: counting it, the first estimates would be many times too long."""
    with progress_bars(quiet=True) as added:
        step = added("faults", 22)
        clock[0] += 600.0  # another bar
        step()
        assert str(step.__self__) == "1/22"
        clock[0] += 20.0
        step()
    assert str(step.__self__) == "2/22, 6:40 left"


def test_counts_of_bytes_and_a_total_that_is_known_later(clock):
    with progress_bars(quiet=True) as added:
        step = added("written", None, in_gb=True)
        for done in (1e9, 3e9):
            clock[0] += 20.0
            step(done=done, total=9e9, status="layer 3/9")
    assert str(step.__self__) == "3.00/9.00 GB, 1:00 left, layer 3/9"


def test_a_bar_without_total_appears_with_its_first_step(monkeypatch):
    """A bar that is drawn before an error leaves a blank line above it."""
    screen = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"})
    monkeypatch.setattr(progress, "console", lambda **_: screen)
    with progress_bars(quiet=False) as added:
        step = added("answers", None)
        assert not screen.file.getvalue()
        step(status="12 tok/s")
    assert "12 tok/s" in screen.file.getvalue()
