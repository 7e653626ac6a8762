"""The engines' own HTTP servers as child processes, with MTP and without."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from engines import environments
from engines.client import Unavailable
from engines.starting import Starter

START_S = 900
MODEL = "m"  # what vLLM's server calls it
# Caches in float32, and attention without a mask in float16.
EXACT = ("-fa", "off", *(part for name in ("-ctk", "-ctv", "-ctkd", "-ctvd") for part in (name, "f32")))


@dataclass(frozen=True)
class Command:
    """What starts a server; its port is added."""

    words: Sequence[object]
    variables: Mapping[str, str] = field(default_factory=dict)


def llama_server(starter: Starter, gguf: Path, k: int, *more: object, slots: int, context: int) -> Command:
    """llama.cpp's server, with a context of so many tokens for each slot; `k` = 0: without MTP."""
    words = [environments.llama_server(starter.root), "-m", gguf, "-np", slots, "-c", slots * context, "--no-webui"]
    words += ["-t", starter.threads, "-tb", starter.threads, "--metrics", *more]
    words += ["--spec-type", "draft-mtp", "--spec-draft-n-max", k] if k else []
    return Command(words, starter.variables("llama.cpp"))


def vllm_server(
    starter: Starter, checkpoint: Path, k: int, *more: object, slots: int, context: int, draft: Path | None = None
) -> Command:
    """vLLM's server, eager; `draft`: a separate head's checkpoint; `k` = 0: without MTP."""
    words = [environments.vllm_python(starter.root), "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint]
    words += ["--max-model-len", context, "--max-num-seqs", slots, "--enforce-eager", "--no-enable-prefix-caching"]
    words += ["--served-model-name", MODEL, *more]
    if k:
        drafts = {"method": "mtp", "num_speculative_tokens": k, **({"model": str(draft)} if draft else {})}
        words += ["--speculative-config", json.dumps(drafts)]
    if draft:  # vLLM reads the number of the draft's layers in the trunk's config
        words += ["--hf-overrides", json.dumps({"num_nextn_predict_layers": 1})]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return Command(words, {**starter.variables("vllm"), **variables, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})


@contextmanager
def served(command: Command, log: Path) -> Iterator[str]:
    """Start it on a free port, and yield its address once it is healthy.

    Raises Unavailable if it does not start; its output is in `log`.
    """
    port = _free_port()
    words = [*map(str, command.words), "--port", str(port)]
    variables = {**os.environ, **command.variables}
    with log.open("w") as output:
        # Its own session, so that the server's children can be killed with it.
        child = subprocess.Popen(words, stdout=output, stderr=output, env=variables, start_new_session=True)
    try:
        _await(child, f"http://127.0.0.1:{port}/health", log)
        yield f"127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):  # it ended, and none of its children is left
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _await(child: subprocess.Popen, health: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and child.poll() is None:
        try:
            with urlopen(health, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise Unavailable(f"the server did not start; its output is in {log}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
