"""The Python API: every public name has an example that runs, is documented, and gives what its command prints."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import json
import pkgutil
import re
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from typer.testing import CliRunner

import nextn
from nextn.cli import app

ROOT = Path(__file__).parents[1]
PUBLIC = {name: getattr(nextn, name) for name in nextn.__all__}
FUNCTIONS = {name: value for name, value in PUBLIC.items() if not inspect.isclass(value)}
# Not public: made for one page or example, and said so there.
INTERNAL = {
    "docs/how-to/decode-on-cpus.md": {"runtime"},
    "examples/sft_head.py": {"data"},
    "examples/smollm2/prompts.py": {"data"},
}


@pytest.mark.more
def test_every_name_has_an_example_that_runs(tmp_path, monkeypatch, capfd):
    """As a reader would copy it, each in an empty folder."""
    without, failed = [], []
    for name, value in PUBLIC.items():
        tests = doctest.DocTestFinder().find(value, name, globs={"nextn": nextn})  # methods, too
        if "\nExample:\n    >>> " not in inspect.getdoc(value):
            without.append(name)
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
        failed += [each.name for each in tests if runner.run(each).failed]
    assert (without, failed) == ([], []), capfd.readouterr().out


def test_every_parameter_is_explained():
    missing = []
    for name, value in PUBLIC.items():
        text = inspect.getdoc(value)
        assert re.match(r"[^\n]+\.(\n\n|$| [A-Z])", text + "\n\n"), f"{name}: {text.splitlines()[0]}"
        if name in FUNCTIONS or ("__init__" in vars(value) and not dataclasses.is_dataclass(value)):
            names = list(inspect.signature(value).parameters)
            missing += [f"{name}: {each}" for each in names if not re.search(rf"\n    (\w+, )*{each}: ", text)]
        if name in FUNCTIONS:
            gives = inspect.signature(value).return_annotation not in (None, "None")
            missing += [f"{name}: Returns"] * (gives and not re.search(r"\n(Returns|Yields):\n", text))
    assert missing == []


def test_names_stay_functions_whatever_is_imported():
    """Importing a submodule puts it into the package, under its own name."""
    before = nextn.audit("tiny")
    for module in pkgutil.walk_packages(nextn.__path__, "nextn."):
        if module.name != "nextn.__main__":
            importlib.import_module(module.name)
    assert {name: getattr(nextn, name) for name in nextn.__all__} == PUBLIC
    assert nextn.audit("tiny") == before


def printed(*args):
    result = CliRunner().invoke(app, [*map(str, args), "--json"])
    assert result.exit_code < 4, result.exception
    return json.loads(result.stdout)


def as_json(report, **other):
    """Without what another run or machine changes."""
    record = json.loads(json.dumps(report.to_dict())) | other
    return {key: value for key, value in record.items() if key not in ("seconds", "machine")}


@pytest.mark.more
def test_audit_and_families_give_the_json_of_the_commands():
    assert as_json(nextn.audit("tiny")).items() <= printed("audit", "tiny").items()
    with pytest.raises(nextn.NextnError, match="did you mean head-absent"):
        nextn.audit("tiny", ignore=["head-abscent"])
    assert as_json(nextn.families("GLM 5.3")) == printed("families", "GLM", "5.3")


@pytest.mark.more
def test_measure_and_diagnose_give_the_json_of_the_commands(tmp_path):
    prompts, counters = tmp_path / "prompts.txt", tmp_path / "answer.json"
    prompts.write_text("def add(a, b):\n\nimport os")
    counters.write_text(json.dumps({"timings": {"draft_n": 1000, "draft_n_accepted": 20}}))
    same = ("--prompts", prompts, "-k", 2, "--temperatures", 0, "--max-tokens", 8, "--backend", "torch")
    plan = nextn.ReferencePlan(2, (0.0,), 8, backend="torch")
    source = printed("audit", "tiny")["path"]  # commands show the path of the checkpoint in the package
    found = as_json(nextn.measure(source, prompts, plan))
    assert found.items() <= printed("measure", "tiny", *same).items()
    plan = dataclasses.replace(plan, rule="ratio")
    diagnosis = nextn.diagnose(source, str(counters), prompts, plan, num_speculative_tokens=2)
    assert as_json(diagnosis) == printed("diagnose", "tiny", "--engine", counters, *same)
    assert nextn.measure(nextn.load("tiny"), ["def add(a, b):"], plan).hashes == {}  # weights may have been changed


@pytest.mark.more
def test_arguments_of_another_type_are_refused_by_name():
    """What a notebook passes by mistake; one text would be decoded character by character."""
    model, settings = nextn.load("tiny"), nextn.Settings(max_tokens=4)
    plan = nextn.ReferencePlan(1, (0.0,), 8, backend="torch")
    wrong = {
        "prompts is 'def add'": [
            lambda: nextn.generate(model, "def add", settings),
            lambda: list(nextn.stream(model, "def add", settings)),
        ],
        "prompts is {'input_ids'": [lambda: nextn.generate(model, {"input_ids": [1]}, settings)],
        "a prompt is": [
            lambda: nextn.generate(model, [[{"role": "user", "content": "hi"}]], settings),
            lambda: nextn.measure(model, [1, 2], plan),
            lambda: nextn.measure(model, [[1.5]], plan),
        ],
        "settings is int 2; expected nextn.Settings": [lambda: nextn.generate(model, ["a"], 2)],
        "model is ": [
            lambda: nextn.generate("tiny", ["a"], settings),
            lambda: nextn.measure(model.trunk, ["a"], plan),
            lambda: nextn.keep_head(3),
        ],
        "plan is Settings": [lambda: nextn.measure(model, ["a"], settings)],
        "sampling is float 0.7; expected nextn.Sampling": [lambda: nextn.Settings(sampling=0.7)],
        "eos is int 2; expected": [lambda: nextn.Settings(eos=2)],
        "max_tokens is str '5'; expected": [lambda: nextn.Settings(max_tokens="5")],
        "temperature 1.0 was not measured; expected one of 0": [
            lambda: nextn.measure(model, ["def add(a, b):"], plan).figures(1.0)
        ],
        "trainer is ": [lambda: nextn.train_head(model)],
        "head is ": [lambda: nextn.save_head(model, "x")],
    }
    for words, calls in wrong.items():
        for call in calls:
            with pytest.raises(nextn.NextnError, match=re.escape(words)):
                call()


def test_verify_gives_the_json_of_the_command():
    engine = FakeEngine("one-more")
    try:
        report = nextn.verify(engine.url, checks=["max-tokens"])
        assert report.failed
        assert as_json(report) == printed("verify", engine.url, "--check", "max-tokens")
        with pytest.raises(nextn.NextnError, match="no check greed"):
            nextn.verify(engine.url, checks=["greed"])
    finally:
        engine.stop()


def test_docs_and_examples_use_public_names():
    """Where there is one: blocks of Python on pages, and the example programs."""
    found: dict[str, set[str]] = {}
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]:
        text = path.read_text()
        blocks = [text] if path.suffix == ".py" else re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        blocks = [block for block in blocks if "nextn" in block]
        for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nextn"):
                assert not {alias.name for alias in node.names} & set(nextn.__all__), f"{path}: import nextn instead"
                found.setdefault(path.relative_to(ROOT).as_posix(), set()).add(node.module.split(".")[1])
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nextn":
                assert node.attr in nextn.__all__, f"{path}: nextn.{node.attr}"
    assert found == INTERNAL
