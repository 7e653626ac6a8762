"""The same checkpoint, prompts and machine through nextn, transformers, vLLM and llama.cpp, plain and with MTP.

`python bench/peers.py setup` builds the engines, once; `python bench/peers.py run CHECKPOINT --out FILE` measures.
docs/developers/benchmarking.md says what is compared and how to read it.
"""

import argparse
import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from engines import environments
from engines.client import Unavailable, Worker, cpu_seconds
from engines.comparison import Gap, Report, Run, Setting, settings, turns
from engines.protocol import Request
from engines.starting import Starter
from record import write_record
from rich.console import Console
from rich.progress import track
from rich.table import Table

from nextn.decoding.generate import eos_tokens
from nextn.evaluate.decoding_costs import Machine
from nextn.evaluate.workload import read_prompts
from nextn.model.model import Model
from nextn.settings import WEIGHTS

ENGINES = ["nextn", "transformers", "vllm", "llama.cpp"]
IDLE_S = 2.0
WARM_TOKENS = 32


class Bench:
    """The workers of all settings; one that cannot run or fails is left out from then on, with its reason."""

    def __init__(self, chosen: list[Setting], args: argparse.Namespace, folder: Path) -> None:
        self.settings, self.args, self.folder = chosen, args, folder
        self.workers: dict[tuple, Worker] = {}
        self.unavailable: dict[str, str] = {}
        self.reports: dict[str, dict[str, object]] = {}
        self.environments: dict[tuple, dict[str, str]] = {}
        self.ggufs: dict[str, Path] = {}
        self.starter = Starter(args.engines, args.threads, args.limit)

    def start(self) -> None:
        """Start one after the other, as an engine that loads or compiles would slow down another's start."""
        for key in track(dict.fromkeys(each.worker for each in self.settings), "start"):
            try:
                self.workers[key] = self._started(*key)
            except Unavailable as reason:
                self._drop(self._of(key), str(reason))

    def ask(self, setting: Setting, request: Request) -> tuple[object, float] | None:
        """Return (answer, seconds of the whole request); None if the engine failed."""
        started = time.perf_counter()
        try:
            answer = self.workers[setting.worker].ask(request, limit_s=self.args.limit)
        except Unavailable as reason:
            self._handle_failure(setting, str(reason))
            return None
        return answer, time.perf_counter() - started

    def inspect(self) -> None:
        """Record versions and flags of the workers, and the CPU seconds per second that each uses while idle."""
        before = {key: cpu_seconds(worker.child.pid) for key, worker in self.workers.items()}
        time.sleep(IDLE_S)
        for key, used in before.items():
            worker = self.workers[key]
            idle = (cpu_seconds(worker.child.pid) - used) / IDLE_S
            name = " ".join(str(part) for part in key if part is not None)
            report = {part: worker.hello[part] for part in ("versions", "flags")}
            report["environment"] = self.environments[key]
            if key[0] in environments.ENGINES:
                report["package"] = environments.ENGINES[key[0]][0]
            self.reports[name] = {**report, "idle_cpu": round(idle, 3)}

    def close(self) -> None:
        while self.workers:
            self.workers.popitem()[1].close()

    def _handle_failure(self, setting: Setting, reason: str) -> None:
        """Drop the setting if the worker only refused it; drop all settings of a worker that has ended."""
        if self.workers[setting.worker].child.poll() is None:
            self._drop([setting], reason)
        else:
            self.workers.pop(setting.worker).close()
            self._drop(self._of(setting.worker), reason)

    def _of(self, key: tuple) -> list[Setting]:
        return [each for each in self.settings if each.worker == key]

    def _drop(self, dropped: list[Setting], reason: str) -> None:
        for setting in dropped:
            self.unavailable[setting.name] = reason
            self.settings.remove(setting)

    def _started(self, engine: str, variant: str, k: int | None) -> Worker:
        options: dict[str, object] = {"checkpoint": str(self.folder / "model"), "context": self.args.context}
        if engine == "vllm":
            options |= {"dtype": "bfloat16", "eager": variant == "eager", "num_speculative_tokens": k}
        elif engine == "llama.cpp":
            options |= {"gguf": str(self._converted(variant)), "num_speculative_tokens": k}
        elif variant in WEIGHTS:
            options |= {"dtype": "bfloat16", "weights": variant}
        else:
            options |= {"dtype": variant}
        # For the record: library names without their folders on this machine.
        variables = {name: Path(value).name for name, value in self.starter.variables(engine).items()}
        self.environments[engine, variant, k] = variables
        return self.starter.start(engine, options, log=self.folder / f"{engine}-{variant}-{k}.log")

    def _converted(self, variant: str) -> Path:
        """The checkpoint as GGUF, of bf16 or quantized. Raises Unavailable if llama.cpp is not built."""
        self.starter.check("llama.cpp")
        if variant not in self.ggufs:
            file = self.folder / f"{variant}.gguf"
            self.ggufs[variant] = (
                self.starter.converted(self.folder / "model", file)
                if variant == "bfloat16"
                else self.starter.quantized(self._converted("bfloat16"), file, variant)
            )
        return self.ggufs[variant]


def measure(args: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(args.threads)
    model = Model.load(args.checkpoint)
    prompts = read_prompts(args.prompts)[: args.num_prompts]
    ids = tuple(prompt.tokens(model) for prompt in prompts)
    eos = eos_tokens(model)
    every = settings(args.num_speculative_tokens, modules=model.head.num_modules, quantized=args.quantized)
    chosen = [each for each in every if each.engine in args.only]
    # One folder for every run, as vLLM's compilation cache is keyed by the checkpoint's path.
    folder = args.engines / "run"
    folder.mkdir(parents=True, exist_ok=True)
    model.save(folder / "model", dtype=torch.bfloat16)
    bench, load = Bench(chosen, args, folder), [os.getloadavg()[0]]
    with closing(bench):
        bench.start()
        runs = decoded(bench, ids, Request([], args.max_tokens, 0, list(eos)))
    load.append(os.getloadavg()[0])
    completed = tuple(bench.settings)
    domains = tuple(prompt.domain for prompt in prompts)
    report = Report(ids, domains, eos, completed, tuple(run for run in runs if run.setting in completed))
    gap = gap_of(Model.load(folder / "model", dtype=torch.float32))
    machine = vars(Machine.of(model))
    others = {name: getattr(args, name) for name in ("max_tokens", "repeats", "threads", "context", "rest")}
    plan = {"k_values": args.num_speculative_tokens} | others
    return {
        "model": args.name or args.checkpoint.name,
        "load": load,
        "parameters": sum(value.numel() for value in model.trunk.model.parameters()),
        "machine": {name: machine[name] for name in ("name", "cores", "versions", "bandwidth")},
        "plan": {**plan, "temperature": 0},
        **report.as_record(unavailable=bench.unavailable, workers=bench.reports, gap=gap),
    }


def decoded(bench: Bench, ids: Sequence[tuple[int, ...]], request: Request) -> list[Run]:
    """Run all turns, after one warm-up request per setting and a look at CPU use while idle."""
    short = replace(request, prompt=list(ids[0]), max_tokens=min(request.max_tokens, WARM_TOKENS))
    for setting in track(list(bench.settings), "warm up"):
        bench.ask(setting, replace(short, num_speculative_tokens=setting.num_speculative_tokens))
    bench.inspect()
    runs = []
    for repeat, prompt, turn in track(list(turns(list(bench.settings), len(ids), bench.args.repeats)), "decode"):
        for setting in (each for each in turn if each in bench.settings):
            time.sleep(bench.args.rest)
            result = bench.ask(
                setting,
                replace(request, prompt=list(ids[prompt]), num_speculative_tokens=setting.num_speculative_tokens),
            )
            if result is not None:
                runs.append(Run(setting, prompt, repeat, *result))
    return runs


def gap_of(model: Model) -> Gap:
    @torch.inference_mode()
    def gap(text, ours: int, theirs: int) -> float:
        logits = model.trunk.logits(model.trunk(torch.tensor([list(text)])).final_hidden[:, -1])[0]
        return round((logits[ours] - logits[theirs]).item(), 4)

    return gap


def show(record: dict) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    titles = ("", "K", "tokens/s", "quartiles", "over our baseline", "AL", "accepted", "identical texts", "largest gap")
    for title in titles:
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for each in record["figures"]:
        speed, ratio, gaps = each["tokens_per_s"], each["ratio"], [one["gap"] or 0.0 for one in each["differences"]]
        table.add_row(
            f"{each['engine']} {each['variant']}",
            str(each["num_speculative_tokens"]),
            _figure(speed["median"], 0),
            f"{_figure(speed['low'], 0)}-{_figure(speed['high'], 0)}",
            _figure(ratio["median"], 2),
            _figure(each["mean_acceptance_length"], 2),
            _figure(each["kept_share"], 2),
            f"{each['identical']}/{each['texts']}",
            _figure(max(gaps, default=None), 3),
        )
    console = Console(width=max(Console().width, 120))
    console.print(table)
    for name, reason in record["unavailable"].items():
        console.print(f"{name}: unavailable: {reason}", markup=False)
    prompts = record["prompts"]
    repetitive = f"{len(prompts['repetitive'])} are repetitive and left out"
    if prompts["only_repetitive"]:
        repetitive = "all are repetitive, none left out"
    console.print(
        f"{len(prompts['domains'])} prompts: {repetitive}; {len(prompts['short'])} with short texts", markup=False
    )
    for name, worker in record["workers"].items():
        if worker["idle_cpu"] > 0.05:
            console.print(f"note: {name} uses {worker['idle_cpu']:.2f} processors while idle", markup=False)


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    setup, run = verbs.add_parser("setup"), verbs.add_parser("run")
    for verb in (setup, run):
        verb.add_argument("--engines", type=Path, default=environments.default_folder(), help="where they are built")
    setup.add_argument("--jobs", type=int, default=2, help="compilers at once")
    run.add_argument("checkpoint", type=Path)
    run.add_argument("--out", type=Path)
    run.add_argument("--name", help="what the record calls the checkpoint")
    run.add_argument("--only", type=lambda text: text.split(","), default=ENGINES, help="engines, comma-separated")
    run.add_argument(
        "--num-speculative-tokens",
        "-k",
        type=_integers,
        default=(1, 2, 4),
        help="every K, comma-separated",
    )
    run.add_argument("--quantized", action="store_true", help="also weights of 8 and 4 bits, nextn's and llama.cpp's")
    run.add_argument("--prompts", type=Path, help="as for `nextn bench`")
    run.add_argument("--num-prompts", type=int)
    run.add_argument("--max-tokens", type=int, default=256)
    run.add_argument("--repeats", type=int, default=3)
    run.add_argument("--threads", type=int, default=2)
    run.add_argument("--context", type=int, default=2048, help="context size of vLLM and llama.cpp, in tokens")
    run.add_argument("--rest", type=float, default=0.05, help="seconds between requests")
    run.add_argument("--limit", type=float, default=900, help="seconds allowed for a start or an answer")
    args = parser.parse_args()
    if args.verb == "setup":
        environments.build(args.engines, jobs=args.jobs, say=print)
        return
    record = measure(args)
    show(record)
    write_record(args.out, record)


if __name__ == "__main__":
    main()
