"""What surrounds the code: workflows, hooks, forms, metadata. Each names only what exists, in the versions we pin."""

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from typer.main import get_command

import nextn
from nextn.cli import app

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
VARIABLES = set(re.findall(r"^([A-Z]+) +\?=", (ROOT / "Makefile").read_text(), re.MULTILINE))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml"))


def parsed(path):
    return yaml.safe_load(path.read_text())


def jobs(path):
    return parsed(path)["jobs"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_runs_only_what_exists(path):
    """Every job has steps and a time limit; every action is pinned; every command is one that the project has."""
    for name, job in jobs(path).items():
        assert job["timeout-minutes"] <= 60, name
        assert job["steps"], name
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./]+", step["uses"])
            else:
                check_command(step["run"])


def check_command(command):
    """A workflow calls make targets, nextn commands, git and test: anything else belongs into the Makefile."""
    for line in filter(None, command.splitlines()):
        program, *words = line.split()
        if program == "make":
            values = {word for word in words if re.fullmatch(r"[A-Z]+=\$\{\{matrix\.[a-z]+\}\}", word)}
            assert {word.partition("=")[0] for word in values} <= VARIABLES, line
            assert set(words) - values <= TARGETS, line
        elif program.endswith("bin/nextn"):
            assert words[0] in get_command(app).commands, line
        else:
            assert program in ("git", "test"), line
            named = [word for word in words if "/" in word and not word.startswith('"')]
            assert all((ROOT / word).exists() for word in named), line


def test_workflows_cover_the_documented_versions():
    ci = {step.get("run") for job in jobs(GITHUB / "workflows" / "ci.yml").values() for step in job["steps"]}
    assert {"make check", "make test", "make wheel", "make docs"} <= ci


def test_publishing_is_trusted_and_for_tags_only():
    """No token is named; only the job that publishes may ask for an identity, and it builds nothing."""
    path = GITHUB / "workflows" / "publish.yml"
    workflow = parsed(path)
    assert "secrets." not in path.read_text()
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    publish = workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build"
    assert not any("run" in step for step in publish["steps"])


def test_python_versions_agree():
    """The matrix, the classifiers, requires-python, ruff and mypy."""
    versions = [each.rsplit(" ", 1)[1] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert jobs(GITHUB / "workflows" / "ci.yml")["test"]["strategy"]["matrix"]["python-version"] == versions
    assert PROJECT["requires-python"] == f">={versions[0]}"
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{versions[0].replace('.', '')}"
    assert PYPROJECT["tool"]["mypy"]["python_version"] == versions[0]


def test_pinned_packages_install_with_the_first_release_of_the_lowest_python():
    """Debian 12 has 3.11.2; pip refuses a package that asks for a later one, and with it everything."""
    lines = (ROOT / "constraints.txt").read_text().split()
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    needed = {
        each.name: each.metadata.get("Requires-Python", "")
        for each in distributions()
        if pins.get(canonicalize_name(each.name)) == each.version.partition("+")[0]
    }
    lowest = f"{PROJECT['requires-python'].removeprefix('>=')}.0"
    assert [name for name, python in needed.items() if lowest not in SpecifierSet(python)] == []
    assert len(needed) > 0.9 * len(pins)


def test_hooks_are_the_tools_of_make_check():
    """pre-commit runs the programs of the .venv, so that constraints.txt alone says which versions."""
    hooks = [hook for repo in parsed(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    commands = {
        re.split(r" --check| --dry-run| \.", line.strip().removeprefix("$(BIN)/"))[0] for line in recipe.splitlines()
    }
    entries = {re.split(r" --force-exclude| -i", hook["entry"].removeprefix(".venv/bin/"))[0] for hook in hooks}
    assert entries == commands


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_form(path):
    """A form that GitHub takes, which asks for `nextn env`."""
    form = parsed(path)
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["type"] in ("input", "textarea") for field in fields)
    assert all(field["id"] and field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)
    assert any("nextn env" in field["attributes"]["label"] for field in fields)


def test_citation():
    citation = parsed(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == nextn.__version__
    assert citation["license"] == PROJECT["license"]


def test_dependencies_are_pinned():
    """Everything that pyproject asks for has a version in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {re.sub("[-_.]+", "-", line.split("==")[0]).lower() for line in lines}
    extras = [each for group in PROJECT["optional-dependencies"].values() for each in group]
    names = {re.match(r"[\w.-]+", each)[0] for each in (*PROJECT["dependencies"], *extras)} - {"nextn"}
    assert {re.sub("[-_.]+", "-", name).lower() for name in names} <= pinned


@pytest.mark.more
def test_extras_are_used():
    """Each optional package is imported by the package or by the examples that the extra is for, or builds the site."""
    text = "\n".join(path.read_text() for folder in ("src", "examples") for path in (ROOT / folder).rglob("*.py"))
    homes = {"tensorboard": "torch.utils.tensorboard", "prometheus-client": "prometheus_client"}
    homes["accelerate"] = "transformers"  # its Trainer needs it
    for extra, packages in PROJECT["optional-dependencies"].items():
        for package in packages if extra not in ("dev", "docs") else ():
            name = re.match(r"[\w-]+", package)[0]
            assert re.search(rf"^\s*(from|import) {homes.get(name, name)}\b", text, re.MULTILINE), f"{extra}: {name}"
    site = (ROOT / "mkdocs.yml").read_text()
    used = {"mkdocs": "nav:", "mkdocs-material": "name: material", "mkdocstrings": "- mkdocstrings:"}
    used["mkdocstrings-python"] = "python:"
    named = {re.match(r"[\w-]+", package)[0] for package in PROJECT["optional-dependencies"]["docs"]}
    assert {name for name, line in used.items() if line in site} == named


def test_development_packages_are_used():
    """Each is imported by the tests, run by the Makefile, or a plugin whose options are used."""
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py")) + (ROOT / "Makefile").read_text()
    uses = {"pyyaml": "import yaml", "pytest-timeout": "mark.timeout(", "pytest-xdist": "--numprocesses"}
    uses |= {
        "build": "-m build",
        "ruff": "/ruff check",
        "mypy": "/mypy",
        "clang-format": "/clang-format",
        "compressed-tensors": "compressed_tensors.",
    }
    for package in PROJECT["optional-dependencies"]["dev"]:
        name = re.match(r"[\w-]+", package)[0]
        assert name == "nextn" or re.search(re.escape(uses.get(name, "")) or rf"(?:from|import) {name}\b", text), name


@pytest.mark.more
def test_lists_of_tests_can_be_run():
    """Of targets that only nightly runs have; what is loaded before a sanitized run changes the runtime by name."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Makefile").read_text())
    lists = dict(re.findall(r"^(MASKED|NEWEST|NATIVE_TESTS) *:= (.*)$", text, re.MULTILINE))
    files = {name: [f"tests/test_{word}.py" for word in words.split()] for name, words in lists.items()}
    assert len(files) == 3
    assert [file for each in files.values() for file in each if not (ROOT / file).exists()] == []
    command = [sys.executable, "-m", "pytest", "-p", "sanitized", "--collect-only", *files["NATIVE_TESTS"]]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": "tests"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_types_are_published():
    """PEP 561: without the marker, type checkers ignore our annotations."""
    assert (Path(nextn.__file__).parent / "py.typed").exists()


def test_an_interrupted_example_keeps_what_it_has(tmp_path):
    """make would delete the answers that are written so far, from which the next call resumes."""
    out = tmp_path / "run"
    (out / "model").mkdir(parents=True)
    (out / "chat-heldout.jsonl").touch()
    program = tmp_path / "nextn"
    program.write_text('#!/bin/sh\necho part > "$3"\nexec sleep 60\n')
    program.chmod(0o755)
    answers = out / "answers-0-1.jsonl"
    with subprocess.Popen(
        ["make", "-s", "-C", ROOT / "examples" / "smollm2", "-o", out / "chat-heldout.jsonl", f"OUT={out}",
         f"NEXTN={program}", answers], start_new_session=True, stderr=subprocess.PIPE,
    ) as run:  # fmt: skip
        while not (answers.exists() and answers.read_text()) and run.poll() is None:
            time.sleep(0.01)
        os.killpg(run.pid, signal.SIGTERM)  # SIGINT is ignored where a shell started the tests in the background
        assert run.wait(20), run.stderr.read()
    assert answers.read_text() == "part\n"
