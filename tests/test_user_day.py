"""Jobs of a user, as scripts of commands: the sentences that lead from one command to the next, and where it ends.

The other two are elsewhere: a head that goes to an engine in `test_adopt`, a head of one's own loop in `test_trl`.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import nextn
from nextn.checkpoint.checkpoint import SHIPPED

ROOT = Path(__file__).parent.parent
LOG = (
    "SpecDecoding metrics: Mean acceptance length: 1.01, Accepted throughput: 1.0 tokens/s, Drafted throughput: 99.0 "
    "tokens/s, Accepted: 12 tokens, Drafted: 1200 tokens, Per-position acceptance rate: 0.020, 0.005, "
    "Avg Draft acceptance rate: 1.0%\n"
)


@pytest.fixture
def tuned(tmp_path):
    """The bundled model as a fine-tune leaves it: the trunk alone, with the config that declares a head."""
    folder = tmp_path / "tuned"
    folder.mkdir()
    tensors = {}
    for file in sorted(SHIPPED.glob("*.safetensors")):
        tensors |= {name: value for name, value in load_file(file).items() if not name.startswith("mtp.")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((SHIPPED / name).read_bytes())
    return folder


def test_a_lost_head(tuned, here):
    """Audit names the command, restore takes the name of the bundled model, and audit is clean after it.

    Where the count is gone, too, nothing is missing but what CI requires.
    """
    code, out, _ = here("audit", tuned)
    command = re.search(r"nextn restore \S+ --from BASE", out)[0]
    assert code == 1
    config = (tuned / "config.json").read_text()
    (tuned / "config.json").write_text(json.dumps(json.loads(config) | {"mtp_num_hidden_layers": 0}))
    assert [here("audit", tuned, *more)[0] for more in ((), ("--require-head",))] == [0, 1]
    (tuned / "config.json").write_text(config)
    assert here(*shlex.split(command.replace("BASE", "tiny"))[1:])[0] == 0
    code, out, _ = here("audit", tuned, "--require-head", "--json")
    assert (code, json.loads(out)["modules"]) == (0, [0])


def workflow(page, heading=""):
    """What the steps of a page's workflows run, as printed; heading: of the only section that counts."""
    text = (ROOT / "docs" / page).read_text()
    text = text.split(heading)[1].split("\n## ")[0] if heading else text
    blocks = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    return [step["run"] for block in blocks for step in _steps(block) if "run" in step]


def _steps(block):
    """Of a whole file, or of a part of a job."""
    return [step for job in block["jobs"].values() for step in job["steps"]] if isinstance(block, dict) else block


def ci_steps():
    """The commands of ci.md for a checkpoint."""
    commands = map(shlex.split, workflow("how-to/ci.md", "## After a fine-tune"))
    return [command[1:] for command in commands if command[0] == "nextn" and "$MODEL" not in command]


STAND_IN = """\
import http.server, json, pathlib, sys
name, words = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
with open("calls", "a") as calls:
    calls.write(json.dumps([name, *words]) + "\\n")
if name == "vllm":
    json.loads(words[words.index("--speculative-config") + 1]) if "--speculative-config" in words else None
    address = ("localhost", int(words[words.index("--port") + 1]))
    http.server.HTTPServer(address, http.server.SimpleHTTPRequestHandler).serve_forever()
"""


@pytest.mark.parametrize("page", ["how-to/ci.md", "reference/verify.md"])
def test_workflows_run_in_a_shell(page, tmp_path):
    """As a runner runs them, with stand-ins for the programs: quotes, `&`, functions, and the wait for an engine."""
    for name in ("vllm", "nextn", "pip"):
        (tmp_path / name).write_text(f"#!{sys.executable}\n{STAND_IN}")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "health").touch()
    script = "\n".join(workflow(page)).replace("sleep 5", "sleep 0.1")
    for port in ("8000", "8001"):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            script = script.replace(port, str(free.getsockname()[1]))
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "MODEL": "org/model",
        "NO_PROXY": "localhost",
    }
    with subprocess.Popen(["bash", "-e"], stdin=-1, cwd=tmp_path, env=environment, start_new_session=True) as shell:
        try:
            shell.communicate(script.encode(), timeout=30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0
    called = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert len([each for each in called if each[:2] == ["nextn", "verify"]]) == 1
    assert all("org/model" in each for each in called if each[0] == "vllm")


@pytest.mark.slow
def test_the_steps_of_the_ci_page(tmp_path, here, monkeypatch):
    """All pass for a sound head, a worse one fails at both gates, and other prompts are refused."""
    monkeypatch.chdir(tmp_path)
    for name in ("released", "model"):
        shutil.copytree(SHIPPED, Path("out") / name)
    rows = (SHIPPED / "prompts.jsonl").read_text().splitlines()[:9]  # of which two repeat themselves
    Path("prompts.jsonl").write_text("\n".join(rows))
    audit, minimum, released, gate = ci_steps()
    assert [here(*step)[0] for step in (audit, minimum, released, gate)] == [0, 0, 0, 0]
    damaged = nextn.load(Path("out") / "model")
    with torch.no_grad():
        damaged.head.stack[0].projection.weight.mul_(-1)
    shutil.rmtree(Path("out") / "model")
    damaged.save(Path("out") / "model", copies=False)
    assert [here(*step)[0] for step in (audit, minimum, gate)] == [0, 1, 1]
    Path("prompts.jsonl").write_text("\n".join(rows[:2]))
    code, _, err = here(*gate)
    assert (code, "not these 2" in err) == (2, True)


def test_the_workflow_file_of_the_ci_page():
    """Its keys are those of GitHub Actions, and each step uses an action or runs something."""
    text = (ROOT / "docs/how-to/ci.md").read_text()
    file = yaml.safe_load(re.search(r"```yaml\n(# .github/workflows/.*?)```", text, re.DOTALL)[1])
    assert file.keys() == {"name", True, "env", "jobs"}  # YAML reads "on" as true
    (job,) = file["jobs"].values()
    assert job.keys() == {"runs-on", "timeout-minutes", "steps"}
    assert all(len({"run", "uses"} & step.keys()) == 1 for step in job["steps"])
    assert all(step.keys() <= {"name", "if", "run", "uses", "with"} for step in job["steps"])


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "code"), [(1, 0), (-1, 1)])
def test_the_workflow_file_runs(scale, code, tmp_path, monkeypatch, here):
    """With a model that is as it was, and with one whose head is worse: the last step has measure's exit code."""
    monkeypatch.chdir(tmp_path)
    rows = (SHIPPED / "prompts.jsonl").read_text().splitlines()[:9]  # of which two repeat themselves
    Path("prompts.jsonl").write_text("\n".join(rows))
    model = nextn.load("tiny")
    assert here("measure", "tiny", "--prompts", "prompts.jsonl", "-k", "2", "--out", "baseline.json")[0] == 0
    with torch.no_grad():
        model.head.stack[0].projection.weight.mul_(scale)
    model.save(Path("model"), copies=False)
    audit, measure = workflow("how-to/ci.md", "### A full workflow")[1:]
    Path("nextn").write_text(f'#!/bin/sh\nexec {sys.executable} -m nextn "$@"\n')
    Path("nextn").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": "model"}
    assert subprocess.run(["bash", "-e", "-c", audit], env=environment).returncode == 0
    assert subprocess.run(["bash", "-e", "-c", measure], env=environment).returncode == code
    assert Path("measured.json").exists()


@pytest.mark.slow
def test_no_acceptance(tmp_path, here):
    """Twelve accepted drafts exclude "no draft is ever accepted"; the headline has its odds and what it assumes."""
    (tmp_path / "vllm.log").write_text(LOG)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join((SHIPPED / "prompts.jsonl").read_text().splitlines(keepends=True)[:8]))
    how = ("--prompts", prompts, "--max-tokens", 48, "--backend", "torch")
    code, out, _ = here("diagnose", "tiny", "--engine", tmp_path / "vllm.log", *how)
    assert code == 1
    assert "nothing-accepted" not in out
    assert "if the engine is greedy" in out
    assert out.index("1. the engine serves this folder") < out.index("--drive")


@pytest.mark.more
def test_from_python():
    """Results are pooled by the public class."""
    model = nextn.load(SHIPPED)
    settings = nextn.Settings(num_speculative_tokens=2, max_tokens=8)
    results = nextn.generate(model, ["def add(", "import "], settings)
    assert nextn.Acceptance.of(results).num_drafted[0] == sum(each.acceptance.num_drafted[0] for each in results)
