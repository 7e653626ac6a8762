"""The published model served by engines: `measure`, `diagnose --drive`, `verify` and `advise` against their servers.

    python bench/live.py FOLDER --engine llama.cpp --engine "vllm mimo" --out bench/results/smollm2-engines.json
    python bench/live.py FOLDER --engine llama.cpp --loads 1,4,16,32 --advice bench/results/smollm2-loads.json

Each engine is served twice in bf16, with MTP and without, the model and its head in a form of `published.py`. The first
line notes processor time, wall time and peak memory of each command of `nextn`, and what it says; the second its K by
load. Prompts are HumanEval's, or those of --prompts. FOLDER keeps checkpoints, prompts and logs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import environments
from engines.client import Unavailable
from engines.servers import Command, llama_server, served, vllm_server
from engines.starting import Starter
from published import K, form, stored
from record import origin, write_record

from nextn.checkpoint.checkpoint import SHIPPED_HEAD
from nextn.edit.adopt import adopt
from nextn.edit.published_model import smollm2
from nextn.errors import NextnError
from nextn.evaluate.load_advice import num_requests
from nextn.evaluate.workload import read_prompts

COMMANDS = ("measure", "measure --engine", "diagnose --drive", "verify --against")
NEXTN = (sys.executable, "-m", "nextn")


@dataclass(frozen=True)
class Pair:
    """One engine's servers with MTP and without, and what `nextn` is given of the model."""

    drafting: Command
    plain: Command
    model: Path
    head: Path | None = None


def pair(name: str, starter: Starter, folder: Path, *, slots: int, context: int) -> Pair:
    """The servers of an engine, each for so many streams of so many tokens."""
    adopted = folder / "smollm2"
    if not adopted.exists():
        adopt(smollm2(), adopted, head=SHIPPED_HEAD)
    engine = name.partition(" ")[0]
    if engine == "nextn":
        base = [*NEXTN, "serve", smollm2(), "--threads", starter.threads, "--max-num-seqs", slots]
        base += ["--max-model-len", context]
        drafting = [*base, "--head", SHIPPED_HEAD, "-k", K, "--fixed-k"]
        return Pair(Command(drafting), Command([*base, "-k", 0]), smollm2(), SHIPPED_HEAD)
    model, head, options = form(name, adopted, folder)
    if engine == "llama.cpp":
        file = Path(options["gguf"]) if "gguf" in options else folder / "bf16.gguf"
        if not file.exists():
            starter.converted(model, file)
        window = ["--swa-full"] if "gguf" in options else []  # `nextn export` writes one, of which all cells are needed

        def server(k: int) -> Command:
            return llama_server(starter, file, k, *window, slots=slots, context=context)
    else:

        def server(k: int) -> Command:
            draft = head if k else None
            return vllm_server(starter, model, k, "--dtype", "bfloat16", slots=slots, context=context, draft=draft)

    return Pair(server(K), server(0), model, head)


@contextmanager
def addresses(servers: Pair, logs: Path) -> Iterator[tuple[str, str]]:
    """Serve both, and yield their addresses, the one with MTP first."""
    with (
        served(servers.drafting, logs / "drafting.log") as drafting,
        served(servers.plain, logs / "plain.log") as plain,
    ):
        yield drafting, plain


def timed(words: Sequence[object], summary: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Run a command of `nextn`; return its times, peak memory and exit code, and a summary of what it prints."""
    before, load = time.monotonic(), os.getloadavg()[0]
    command = [*NEXTN, *map(str, words), "--json"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr)
    assert child.stdout is not None
    printed = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode not in (0, 1, 3):  # 1: findings, 3: the data cannot decide
        raise SystemExit(f"nextn {words[0]} ended with code {child.returncode}")
    return {
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "wall_s": round(time.monotonic() - before, 1),
        "peak_mb": used.ru_maxrss // 1024,
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "exit": child.returncode,
        **summary(json.loads(printed)),
    }


def measured(record: Mapping[str, Any]) -> dict[str, Any]:
    row = next(each for each in record["figures"] if (each["domain"], each["num_speculative_tokens"]) == ("all", K))
    return {"mean_acceptance_length": row["mean_acceptance_length"], "acceptance": row["acceptance"]}


def diagnosed(record: Mapping[str, Any]) -> dict[str, Any]:
    (case,) = record["cases"]
    return {"named": record["named"], "summary": record["summary"], "counters": case["counters"]}


def verified(record: Mapping[str, Any]) -> dict[str, Any]:
    checks = record["checks"]
    failed = {each["name"]: each["evidence"] for each in checks if each["outcome"] == "failed"}
    return {"checks": {each["name"]: each["outcome"] for each in checks}, **({"failed": failed} if failed else {})}


def commands(
    servers: Pair, drafting: str, plain: str, prompts: Path, options: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run each of the commands on the prompts, with nextn's side in float32."""
    model = [servers.model, *(["--head", servers.head] if servers.head else [])]
    asked = ["--prompts", prompts, "--max-tokens", options.tokens, "--temperatures", 0, "--dtype", "float32", "-k", K]
    every = ["--prompts", prompts, "--samples", 16, "--context", 384, "--max-seconds", options.max_seconds]
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "measure": lambda: timed(["measure", *model, *asked], measured),
        "measure --engine": lambda: timed(["measure", *model, "--engine", drafting, *asked], measured),
        "diagnose --drive": lambda: timed(["diagnose", *model, "--engine", drafting, "--drive", *asked], diagnosed),
        "verify --against": lambda: {
            "max_seconds": options.max_seconds,
            **timed(["verify", drafting, "--against", plain, *every], verified),
        },
    }
    for name in options.commands:
        yield name, run[name]()


def by_load(drafting: str, plain: str, prompts: Path, num_prompts: int, tokens: int, loads: str) -> dict[str, Any]:
    words = ["advise", "--engine", drafting, "--against", plain, "--batches", loads, "--temperatures", 0]
    words += ["--prompts", prompts, "--max-tokens", tokens]
    requests = {streams: num_requests(num_prompts, int(streams)) for streams in loads.split(",")}
    return {"command": f"nextn {shown(words)}", "requests": requests, **timed(words, _without_copies)}


def _without_copies(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of the one temperature, which `temperatures` repeats."""
    return {name: value for name, value in record.items() if name != "temperatures"}


def shown(words: Sequence[object]) -> str:
    """A command for the record, with the names of files in place of their paths on this machine."""
    names = (Path(str(word)).name if str(word).startswith("/") else str(word) for word in words)
    return re.sub(r'"/[^"]*/([^"/]+)"', r'"\1"', " ".join(names))  # also within JSON


def written(source: str, most: int, folder: Path) -> Path:
    """Write so many prompts, evenly spaced, to a file that every command reads."""
    prompts = read_prompts(source)
    rows = [{"prompt": each.text, "domain": each.domain} for each in prompts[:: max(1, len(prompts) // most)][:most]]
    file = folder / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def run_commands(name: str, prompts: Path, about: Mapping[str, Any], args: argparse.Namespace, *, slots: int) -> None:
    """Serve one engine, and record what the commands say of it. Raises Unavailable if it does not start."""
    servers = pair(name, Starter(args.engines, args.threads), args.folder, slots=slots, context=512)
    about = {**about, "server": shown(servers.drafting.words), "plain_server": shown(servers.plain.words)}
    with addresses(servers, args.folder) as (drafting, plain):
        if args.out:
            rows: dict[str, Any] = {}
            for command, row in commands(servers, drafting, plain, prompts, args):
                rows[command] = row
                print(name, command, row, flush=True)
                record = stored(args.out)
                live = {**record.get("live", {}), name: {**about, "commands": rows}}
                write_record(args.out, {**record, "live": live})
        if args.advice:
            found = by_load(drafting, plain, prompts, args.num_prompts, args.tokens, args.loads)
            record = {"model": "SmolLM2-135M-Instruct", **stored(args.advice)}
            write_record(args.advice, {**record, "engines": {**record.get("engines", {}), name: {**about, **found}}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", action="append", required=True, help="nextn, or a form of published.py")
    parser.add_argument("--prompts", default="humaneval")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=COMMANDS, help="for --out")
    parser.add_argument("--max-seconds", type=int, default=400, help="of verify; what it misses is inconclusive")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--loads", default="1,4,16,32", help="streams, for --advice")
    parser.add_argument("--engines", type=Path, default=environments.default_folder(), help="where they are built")
    parser.add_argument("--out", type=Path, help="record of the commands, beside what it has")
    parser.add_argument("--advice", type=Path, help="record of `nextn advise`, beside what it has")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    prompts = written(args.prompts, args.num_prompts, args.folder)
    slots = max(map(int, args.loads.split(","))) if args.advice else 8  # as many as `verify` asks at once
    about = {
        **origin(),
        "prompts": args.num_prompts,
        "source": args.prompts,
        "tokens": args.tokens,
        "num_speculative_tokens": K,
        "threads": args.threads,
    }
    for name in args.engine:
        run_commands(name, prompts, about, args, slots=slots)


if __name__ == "__main__":
    try:
        main()
    except (Unavailable, NextnError) as reason:
        raise SystemExit(f"error: {reason}") from reason
