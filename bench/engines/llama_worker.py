"""llama.cpp's `llama-server` as a worker. Options: server, gguf, threads, context, num_speculative_tokens (fixed at its
start), exact (caches in float32, and attention without a mask in float16).

Prompts and texts are token ids; the time is the server's own, from the end of the prefill to the last token.
"""

import atexit
import json
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection
from urllib.error import URLError
from urllib.request import urlopen

from protocol import Answer, Engine, Request, serve

START_S = 300


def load(options: dict) -> Engine:
    port, k = _free_port(), options["num_speculative_tokens"]
    threads, context = str(options["threads"]), str(options["context"])
    flags = ["-np", "1", "-c", context, "-t", threads, "-tb", threads, "--no-webui", "--metrics"]
    if options.get("exact"):
        flags += ["-fa", "off", *(part for name in ("-ctk", "-ctv", "-ctkd", "-ctvd") for part in (name, "f32"))]
    if k:
        flags += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(k)]
    files = ["-m", options["gguf"], "--host", "127.0.0.1", "--port", str(port)]
    child = subprocess.Popen([options["server"], *files, *flags], stdout=sys.stderr, stderr=sys.stderr)
    atexit.register(_end, child)
    root = f"http://127.0.0.1:{port}"
    _await(child, f"{root}/health")

    def decode(request: Request) -> Answer:
        if request.num_speculative_tokens != k:
            raise ValueError(
                f"num_speculative_tokens = {request.num_speculative_tokens}; this server was started with {k}"
            )
        # One connection per request, as the server closes one that is idle while other engines have their turn.
        connection = HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/completion", json.dumps(_body(request)), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        if "timings" not in answer:
            raise ValueError(f"llama-server: {answer}")
        times, tokens = answer["timings"], answer["tokens"]
        drafted, accepted = times.get("draft_n", 0), times.get("draft_n_accepted", 0)
        # Each round emits its accepted drafts and a bonus token; the prefill emits the first token.
        return Answer(tokens, times["predicted_ms"] / 1e3, len(tokens) - 1 - accepted, drafted, accepted)

    return Engine(
        decode,
        {"llama.cpp": _version(options["server"])},
        {"llama-server": " ".join(flags)},
        metrics=lambda: urlopen(f"{root}/metrics", timeout=60).read().decode(),
        close=lambda: _end(child),
    )


def _body(request: Request) -> dict[str, object]:
    return {
        "prompt": request.prompt,
        "n_predict": request.max_tokens,
        "temperature": 0.0,
        "samplers": ["temperature"],
        "return_tokens": True,
        "cache_prompt": False,
    }


def _await(child: subprocess.Popen, health: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise RuntimeError(f"llama-server ended with code {child.returncode}")
        try:
            with urlopen(health, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError):
            time.sleep(0.1)
    raise TimeoutError(f"llama-server was not ready after {START_S} s")


def _end(child: subprocess.Popen) -> None:
    child.terminate()
    child.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _version(server: str) -> str:
    output = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
    return (output.stderr + output.stdout).strip().splitlines()[0]


if __name__ == "__main__":
    serve(load)
