"""Help, completion and documentation on the command line; families by name; wrong options, and missing extras."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from artifacts import publish
from quick import loop
from typer.main import get_command
from typer.testing import CliRunner

from nextn import text_format
from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import SHIPPED, SHIPPED_HEAD, Checkpoint, shipped_path
from nextn.checkpoint.demo_model import NAME
from nextn.cli import app
from nextn.cli.commands import COMMANDS
from nextn.errors import CheckpointError, FamilyError
from nextn.family_table import by_config, rows, separate_rows, withheld
from nextn.family_table.search import families
from nextn.text_format import docs_page, install_command

PANELS = ["Check", "Fix", "Train", "Decode", "Engines", "Learn"]


def run(*args, **env):
    return subprocess.run(
        [sys.executable, "-m", "nextn", *args], capture_output=True, encoding="utf-8", timeout=60, env=os.environ | env
    )


@pytest.mark.more
def test_help_is_grouped():
    """Every command is in a group, and the groups come in this order."""
    assert {command.rich_help_panel for command in get_command(app).commands.values()} == set(PANELS)
    done = run("--help", COLUMNS="100", PYTHONIOENCODING="utf-8")
    assert done.returncode == 0
    assert re.findall(r"─ (\w+) ─", done.stdout) == ["Options", *PANELS]
    assert "Usage: nextn " in done.stdout


def test_help_begins_with_the_two_commonest_calls():
    """They are calls of the command: their options and numbers of arguments are its own."""
    for name, each in {name: each for group in COMMANDS.values() for name, each in group.items()}.items():
        command, start = commands()[name], ["nextn", *name.split()]
        for call, shown in zip(each.calls, command.help.split("\n\n"), strict=False):
            words = shlex.split(shown.strip("`"))
            assert words == [*start, *shlex.split(call)]
            parameters = {option: own for own in command.params for option in own.opts}
            assert {word for word in words if word[0] == "-"} <= parameters.keys(), shown
            flags = {option for option, own in parameters.items() if getattr(own, "is_flag", False)}
            takes_next = [word[0] == "-" and word not in flags for word in words]
            given = [
                word
                for word, is_value in zip(words[len(start) :], takes_next[len(start) - 1 :], strict=False)
                if word[0] != "-" and not is_value
            ]
            arguments = [own for own in command.params if own.param_type_name == "argument"]
            assert sum(own.required for own in arguments) <= len(given) <= len(arguments), shown
        assert len(each.summary) <= 64, name


def test_help_of_all_commands_has_a_line_for_each():
    """At 80 characters; with its panels it fits one screen of 56 lines."""
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output
    assert len(text.strip().splitlines()) <= 56


@pytest.mark.more
@pytest.mark.parametrize(
    ("words", "completed"),
    [("nextn me", {"measure"}), ("nextn canary ", {"build", "check"}), ("nextn bench --temp", {"--temperatures"})],
)
def test_shell_completes(words, completed):
    done = run(_NEXTN_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    assert set(done.stdout.split()) == completed
    assert not done.stderr


@pytest.mark.more
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_names_the_command(shell):
    """Also when it is asked for as `python -m nextn`, where the program's own name is another one."""
    done = run("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0
    assert "_NEXTN_COMPLETE=complete_" in done.stdout


def commands():
    top = get_command(app).commands
    inner = {f"canary {name}": each for name, each in top["canary"].commands.items()}
    return {**{name: each for name, each in top.items() if name != "canary"}, **inner}


def test_help_refers_to_the_documentation_site():
    """Each epilog has the name of a page that exists; no text names a file of the repository instead."""
    root = Path(__file__).parent.parent
    for name, command in commands().items():
        page = re.fullmatch("Documentation: `nextn docs (.+)`", command.epilog)[1]
        assert command.epilog == f"Documentation: {docs_page(page)}"
        assert (root / "docs" / f"{page}.md").exists(), name
        texts = [command.help or "", *(getattr(each, "help", None) or "" for each in command.params)]
        assert not any(re.search(r"(?<!main/)docs/", text) for text in texts), name


def test_descriptions_have_no_line_breaks_inside_paragraphs():
    """A terminal wraps them at its own width."""
    assert not [name for name, each in commands().items() if "\n" in (each.help or "").replace("\n\n", "")]


def test_options_mean_one_thing_everywhere():
    """An option of one name has the same short name and the same negation in every command."""
    for name, command in commands().items():
        options = {option: each for each in command.params for option in each.opts}
        assert ("-k" in options) == ("--num-speculative-tokens" in options), name
        if "--chat" in options:
            assert "--no-chat" in options["--chat"].secondary_opts, name


def test_every_command_takes_the_same_names(tmp_path, monkeypatch):
    """Whatever takes a checkpoint takes `tiny`, the one in the package, and `smollm2`, the one of the demo."""
    monkeypatch.setenv("NEXTN_REAL_MODELS", str(tmp_path))
    with pytest.raises(CheckpointError, match="nextn demo --minutes 0"):
        shipped_path("smollm2")
    (folder := tmp_path / NAME).mkdir()
    takes = re.compile(r"(folder|file)\b.*\bhub id", re.IGNORECASE)
    for name, command in get_command(app).commands.items():
        context = command.make_context(name, [], resilient_parsing=True)
        for each in command.params:
            options = each.opts[0]
            if options == "--head" or (takes.search(each.help or "") and options != "--served-model-name"):
                assert each.callback, (name, options)
                assert each.callback(context, each, "tiny") == str(SHIPPED), (name, options)
                assert each.callback(context, each, "smollm2") == str(folder), (name, options)
                assert each.callback(context, each, SHIPPED_HEAD.name) == str(SHIPPED_HEAD), (name, options)


DOCS = Path(__file__).parent.parent / "docs"


def test_lists_all_pages(here):
    code, out, _ = here("docs")
    names = [line.split()[0] for line in out.splitlines()]
    assert code == 0
    assert sorted(names) == sorted(path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md"))
    assert names[:2] == ["index", "tutorials/first-hour"]


def test_shows_a_page_by_name_or_last_part(here):
    text = (DOCS / "how-to" / "low-acceptance.md").read_text().rstrip()
    for topic in ("how-to/low-acceptance", "low-acceptance", "docs/how-to/low-acceptance.md"):
        code, out, _ = here("docs", topic)
        assert code == 0
        assert out.rstrip() == text


def test_a_whole_name_comes_before_last_parts(here):
    """There are several pages called index, of which one has no folder."""
    code, out, _ = here("docs", "index")
    assert (code, out.rstrip()) == (0, (DOCS / "index.md").read_text().rstrip())


def test_an_unknown_page_is_refused_with_those_that_are_meant(here):
    for topic, words in (("low-aceptance", "low-acceptance"), ("zzz", "`nextn docs` lists all pages")):
        code, _, complaint = here("docs", topic)
        assert code == 2
        assert words in complaint


# Runs commands one after the other -> exit code, stderr, whether torch was imported.
RUN = """
import contextlib, io, json, sys
from nextn.cli import main
for arguments in json.load(sys.stdin):
    sys.argv = ["nextn", *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main()
        except SystemExit as ended:
            print(json.dumps([ended.code, said.getvalue(), "torch" in sys.modules]))
"""
MODEL = "{model}"


CASES = [
    (["generate", MODEL, "text", "--dtype", "int3"], "dtype 'int3'; expected one of auto, float32, bfloat16"),
    (["generate", MODEL, "text", "--backend", "quick"], "backend 'quick'; expected one of auto, native, torch"),
    (["generate", MODEL, "text", "--device", "gpu"], "device = 'gpu'; expected auto, cpu"),
    (
        ["generate", MODEL, "text", "--num-speculative-tokens", "-1"],
        "num_speculative_tokens = -1; expected a whole number >= 0",
    ),
    (["generate", MODEL, "text", "-k", str(2**31)], "num_speculative_tokens = 2147483648; expected"),
    (["generate", MODEL, "text", "--copy", "9" * 20], "num_copy_tokens = 99999999999999999999; expected"),
    (["generate", MODEL, "text", "--max-tokens", "9" * 300], "expected a whole number >= 1, at most 2147483647"),
    (["generate", MODEL, "text", "--seed", "9" * 20], "seed = 99999999999999999999; expected a whole number"),
    (["generate", MODEL, "text", "--top-p", "7"], "top_p=7.0 must be above 0"),
    (["generate", MODEL, "text", "--draft-vocab", "none.txt:9"], "--draft-vocab none.txt:9: not a readable"),
    (["generate", "nowhere", "text"], "nowhere: neither a folder"),
    (["trace", "nowhere", "text"], "nowhere: neither a folder"),
    (["bench", MODEL, "--prompts", "none.txt"], "none.txt: cannot be read"),
    (["bench", MODEL, "-k", "a"], "--num-speculative-tokens 'a'; expected comma-separated whole numbers"),
    (["bench", MODEL, "--repeats", "0"], "repeats = 0; expected"),
    (["advise", MODEL, "--temperatures", "warm"], "--temperatures 'warm'; expected comma-separated numbers"),
    (["advise", MODEL, "--batches", "0"], "--batches '0'; expected comma-separated whole numbers >= 1"),
    (["advise", "nowhere"], "nowhere: neither a folder"),
    (["measure", MODEL, "--max-tokens", "1"], "max_tokens = 1; expected 3 or more"),
    (["measure", MODEL, "--prompts", "none.jsonl"], "none.jsonl: no such file"),
    (["answer", MODEL, "out.jsonl", "--prompts", "none.txt"], "none.txt: no such file or folder"),
    (["diagnose", MODEL, "--engine", "log.txt", "--prompts", "none.txt"], "none.txt: cannot be read"),
    (["diagnose", MODEL, "--engine", "log.txt", "--rule", "luck"], "rule = 'luck'; expected one of"),
    (["train", "out", "--data", "none.txt"], "none.txt: no such file or folder"),
    (["train", "out", "--model", "none.json"], "--model none.json: no such file"),
    (["train", "out", "--freeze-trunk", "--from", "nowhere"], "nowhere: neither a folder"),
    *(
        ([command, "some.gguf", *more], "some.gguf: not a valid GGUF file")
        for command, more in (
            ("generate", ["text"]), ("trace", ["text"]), ("chat", []), ("bench", []), ("advise", []),
            ("measure", []), ("answer", ["out.jsonl", "--prompts", "some.gguf"]), ("diagnose", ["--engine", "log.txt"]),
        )
    ),
    (["generate", MODEL, "text", "--head", "some.gguf"], "`nextn convert some.gguf OUT`"),
    (["train", "out", "--freeze-trunk", "--from", "some.gguf"], "`nextn convert some.gguf OUT`"),
]  # fmt: skip


@pytest.mark.more
def test_refused_without_torch(fixture_folder, tmp_path):
    """All in one process, so that the cases take no longer than one start of it."""
    model = str(min(fixture_folder.iterdir()))
    given = json.dumps([[model if each == MODEL else each for each in arguments] for arguments, _ in CASES])
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    for (arguments, words), (code, said, torch) in zip(CASES, results, strict=True):
        assert words in said, (arguments, said)
        assert (code, torch) == (2, False), arguments
        assert said.startswith("error: ")
    assert [each.name for each in tmp_path.iterdir()] == ["some.gguf"]  # nothing is written


def test_serve_refuses_a_broken_file(here, tmp_path):
    """It imports torch first, which the others must not."""
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    code, _, said = here("serve", tmp_path / "some.gguf")
    assert code == 2
    assert re.fullmatch(r"error: \S+some.gguf: not a valid GGUF file.*", said.strip(), re.DOTALL)


def test_packages_are_those_of_pyproject():
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    packages = tomllib.loads(text)["project"]["optional-dependencies"]
    for extra in ("plot", "gguf", "serve", "data", "accelerate"):
        command = install_command(extra)
        assert command.startswith("pip install ")
        assert sorted(each.strip("'") for each in command.split()[2:]) == sorted(packages[extra])


def test_an_extra_of_others_is_written_out():
    command = install_command("train")
    assert "accelerate" in command
    assert "trl" in command
    assert "nextn" not in command


@pytest.mark.parametrize("missing", [PackageNotFoundError, None])
def test_without_metadata_the_sources_are_named(monkeypatch, missing):
    def fails(name):
        if missing:
            raise missing(name)

    monkeypatch.setattr(text_format, "requires", fails)
    assert "'.[serve]' in the folder of nextn's sources" in install_command("serve")


def listed(*words):
    result = CliRunner().invoke(app, ["families", *words])
    assert result.exception is None, result.exception
    return " ".join(result.output.split())


NAMES = [
    ("Qwen3.8-27B", {"qwen3_5"}),
    ("qwen3.8 27b", {"qwen3_5"}),
    ("Qwen3.8", {"qwen3_5", "qwen3_5_moe", "qwen4_exp"}),
    ("MiMo-V2.6-Distill-Qwen-9B", {"qwen3_5"}),
    ("MiMo-V2.6-Qwen-9B", {"qwen3_5"}),
    ("Ternary Bonsai 2", {"qwen3_5"}),
    ("GLM-5.3-Flash", {"glm5_next"}),
    ("glm 5.3", {"glm_moe_dsa", "glm5_next"}),
    ("GLM-4.6", {"glm4_moe", "glm4v_moe"}),
    ("deepseek r1", {"deepseek_v3"}),
    ("mimo v2.5", {"mimo_v2"}),
    ("kimi_k3", {"kimi_k3"}),
    ("gemma 4", {"gemma4_assistant"}),
    ("gemma-4-26B-A4B-it-assistant", {"gemma4_assistant"}),
    ("google/gemma-4-31B-it-assistant", {"gemma4_assistant"}),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", {"qwen3_next"}),
    ("zai-org/GLM-4.7-Flash-FP8", {"glm4_moe_lite"}),
    ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", {"nemotron_h"}),
    ("baidu/ERNIE-4.5-21B-A3B-PT", {"ernie4_5_moe"}),
    ("LGAI-EXAONE/K-EXAONE-236B-A23B", {"exaone_moe"}),
    ("inclusionAI/Ling-mini-2.0", {"bailing_moe_v2"}),
    ("Motif-Technologies/Motif-3-NVFP4", {"motif3"}),
    ("deepseek-ai/DeepSeek-V4-Flash-0731", set()),
    ("moonshotai/Kimi-VL-A3B-Instruct", set()),
    ("ibm-granite/granite-docling-258M", set()),
    ("Nemotron-3.5-Transcribe", set()),
    ("moonshotai/Kimi-Linear-48B-A3B-Instruct", set()),
]


@loop(("words", "names"), NAMES)
def test_names_that_people_know(words, names):
    assert {row.name for row in families(words).families} == names


def test_all_and_one():
    everything = json.loads(listed("--json"))
    assert [each["name"] for each in everything["families"]] == [row.name for row in (*rows(), *separate_rows())]
    (one,) = json.loads(listed("glm5_next", "--json"))["families"]
    assert one["layout"] == "model.layers.{layer}"
    assert one["engines"]["sglang"] == "runs"
    assert "decode" in one["works"]
    assert "audit" in json.loads(listed("mimo", "7b", "--json"))["families"][0]["works"]
    text = listed("glm", "5.3", "flash")
    assert "glm5_next" in text
    assert "SGLang" in text


def test_nothing_found_is_an_error():
    for words in ("no such model", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "zai-org/GLM-4-9B", "Qwen/Qwen3-30B-A3B"):
        result = CliRunner().invoke(app, ["families", words])
        assert isinstance(result.exception, FamilyError), words
        assert words in str(result.exception)


@loop("kind", ["minimax_m2", "kimi_k2", "kimi_k25", "kimi_vl", "kimi_linear"])
def test_what_was_never_published(tmp_path_factory, kind):
    """Neither lost nor damaged, whatever the config declares; no command looks for it."""
    folder = publish(
        tmp_path_factory.mktemp("m"), "deepseek_v3", modules=0,
        config={"model_type": kind, "num_mtp_modules": 3, "use_mtp": True, "num_mtp_layers": 1},
    )  # fmt: skip
    report = audit(Checkpoint.open(folder))
    assert report.clean
    (found,) = (each for each in report.findings if each.rule == "head-withheld")
    assert "published no MTP head" in found.found
    assert "num_mtp_modules = 3" in found.found
    assert not any(each.rule == "head-absent" for each in report.findings)
    with pytest.raises(FamilyError, match="published no MTP head"):
        by_config({"model_type": kind, "num_mtp_modules": 3})
    assert "published no MTP head" in listed(kind)


def test_a_count_in_an_unknown_model(tmp_path):
    """A config declares a head that nobody has seen."""
    config = {"model_type": "unseen_moe", "num_nextn_predict_layers": 1}
    report = audit(Checkpoint.open(publish(tmp_path, "deepseek_v3", modules=0, config=config)))
    assert [each.rule for each in report.findings] == ["head-withheld"]
    assert "nextn knows none that was published" in report.findings[0].found


def test_the_audit_says_which_models(tmp_path):
    report = audit(Checkpoint.open(publish(tmp_path, "glm4_moe")))
    assert report.title == "GLM-4.5 / 4.6 / 4.7 (and Air)"


def test_the_outer_model_type_counts():
    """A Kimi-K3, which has a head, has a text model of the type of one that has none."""
    text = {"model_type": "kimi_linear"}
    assert withheld({"model_type": "kimi_k3", "text_config": text}) is None
    assert withheld({"model_type": "other", "text_config": text}) is withheld(text)
    assert withheld(text) is not None
