"""Servers under load: the same checkpoint and prompts through nextn, llama.cpp and vLLM, plain and with MTP.

    python bench/serve.py load CHECKPOINT --out bench/results/serve.json
    python bench/serve.py load TRUNK --head DRAFT --gguf BOTH.gguf    # a separate head, and llama.cpp's file with both
    python bench/serve.py load CHECKPOINT --prompts humaneval         # chats of a benchmark
    python bench/serve.py prefill CHECKPOINT        # inter-token times of running streams beside a long prompt
    python bench/serve.py scheduler CHECKPOINT      # without HTTP: MTP against plain decoding, in turn
    python bench/serve.py scheduler CHECKPOINT --head HEAD --prompts humaneval

`load` starts every server once and then, for each number of streams, runs all servers in turn, several times. A stream
sends one greedy request after the other; all tokens are generated (`ignore_eos`). Engines other than nextn are built
with `python bench/peers.py setup`; one that is missing is left out with the reason.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from engines import environments
from engines.client import Unavailable
from engines.starting import Starter
from record import write_record

from nextn.decoding.generate import encode
from nextn.decoding.text_stream import TextStream
from nextn.evaluate.workload import read_prompts
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.serve.request import GenerationChunk, GenerationRequest
from nextn.serve.round_costs import measure_round_costs
from nextn.serve.scheduler import DraftPolicies, Group, Scheduler, SchedulerLimits
from nextn.serve.served_batch import ServedSequence

REPO = Path(__file__).parent.parent
PROMPTS = (REPO / "README.md", REPO / "CHANGELOG.md")


@dataclass
class Server:
    """One server process."""

    name: str
    command: list[str]
    model: str
    variables: dict[str, str] = field(default_factory=dict)
    port: int = 0  # 0: a free one, then that one again
    process: subprocess.Popen | None = None
    chat: bool = False  # prompts are a user's messages

    def start(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", self.port)) as free:
            self.port = free.getsockname()[1]
        log = (folder / f"{self.name.replace(' ', '-')}.log").open("a")
        command = [part.replace("{port}", str(self.port)) for part in self.command]
        self.process = subprocess.Popen(
            command, env={**os.environ, **self.variables}, stdout=log, stderr=log, start_new_session=True
        )

    async def ready(self, limit_s: float) -> None:
        """Wait for the first answer. Raises Unavailable with the log's last line."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self.process is None or self.process.poll() is not None:
                raise Unavailable(f"{self.name} ended")
            with suppress(OSError, ValueError, IndexError):
                await self.stream("Hello", 4)
                return
            await asyncio.sleep(0.5)
        raise Unavailable(f"{self.name}: no answer within {limit_s:g} s")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, how)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    async def stream(self, prompt: str, tokens: int, /, **more: object) -> "Streamed":
        """Run one streamed completion."""
        body = json.dumps(
            {
                "model": self.model,
                **({"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}),
                "max_tokens": tokens,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
                **more,
            }
        ).encode()
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            path = "chat/completions" if self.chat else "completions"
            head = f"POST /v1/{path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
            status = (await reader.readline()).split()[1]
            if status != b"200":
                raise ValueError(f"status {status!r}: {(await reader.read(2000))[-500:]!r}")
            text, times = [], []
            while line := await reader.readline():
                if not line.startswith(b"data: {"):
                    if line.startswith(b"data: [DONE]"):
                        break
                    continue
                event = json.loads(line[6:])
                choice = (event.get("choices") or [{}])[0]
                if piece := choice.get("text") or choice.get("delta", {}).get("content"):
                    times.append(time.perf_counter() - started)
                    text.append(piece)
            return Streamed("".join(text), tuple(times), time.perf_counter() - started)
        finally:
            writer.close()


@dataclass(frozen=True)
class Streamed:
    """A streamed answer: its text, when its events arrived, and when it ended, in seconds since the request."""

    text: str
    times: tuple[float, ...]
    seconds: float

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def prompts_of(count: int, size: int, seed: int = 0, files: Sequence[Path] = PROMPTS) -> list[str]:
    """Pieces of `size` characters of these files' text."""
    text, draw = "\n".join(path.read_text() for path in files), random.Random(seed)
    return [text[start : start + size] for start in (draw.randrange(len(text) - size) for _ in range(count))]


def nextn_server(checkpoint: Path, *options: str, name: str = "nextn") -> Server:
    called = ["--port", "{port}", "--served-model-name", checkpoint.name]
    return Server(name, [sys.executable, "-m", "nextn", "serve", str(checkpoint), *called, *options], checkpoint.name)


def servers_of(args: argparse.Namespace, folder: Path) -> tuple[list[Server], list[str]]:
    """The servers that can run here, and why others cannot."""
    checkpoint, k = args.checkpoint.resolve(), args.num_speculative_tokens
    starter, absent = Starter(environments.default_folder(), args.threads), []
    head = args.head.resolve() if args.head else None
    dtype = ("--dtype", "bfloat16")  # that of the GGUF and of vLLM
    drafts = ("-k", str(k), *(("--head", str(head)) if head else ()))
    chosen = [
        nextn_server(checkpoint, *dtype, "-k", "0", name="nextn plain"),
        nextn_server(checkpoint, *dtype, *drafts, name="nextn MTP"),
    ]
    try:
        starter.check("llama.cpp")
        gguf = args.gguf or starter.converted(checkpoint, folder / "model.gguf")
        base = [
            str(environments.llama_server(starter.root)), "-m", str(gguf), "--port", "{port}", "-np", str(args.slots),
            "-c", str(args.slots * args.context), "-t", str(args.threads), "--no-webui",
        ]  # fmt: skip
        chosen.append(Server("llama.cpp plain", base, "model"))
        # A file that `nextn export` wrote has a window in its metadata, of which all cells are needed.
        mtp = [*base, "--spec-type", "draft-mtp", "--spec-draft-n-max", str(k), *(["--swa-full"] if args.gguf else [])]
        chosen.append(Server("llama.cpp MTP", mtp, "model"))
    except Unavailable as error:
        absent.append(f"llama.cpp: {error}")
    try:
        starter.check("vllm")
        variables = starter.variables("vllm") | {"VLLM_CPU_KVCACHE_SPACE": "1"}
        base = [
            str(environments.vllm_python(starter.root)), "-m", "vllm.entrypoints.openai.api_server", "--model",
            str(checkpoint), "--served-model-name", checkpoint.name, "--port", "{port}", "--max-model-len",
            str(args.context), "--max-num-seqs", str(args.slots), "--dtype", "bfloat16",
        ]  # fmt: skip
        chosen.append(Server("vllm plain", base, checkpoint.name, variables))
        draft = {"model": str(head)} if head else {}
        mtp = [*base, "--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": k, **draft})]
        if head:  # vLLM reads the number of the draft's layers in the trunk's config
            mtp += ["--hf-overrides", json.dumps({"num_nextn_predict_layers": 1})]
        chosen.append(Server("vllm MTP", mtp, checkpoint.name, variables))
    except Unavailable as error:
        absent.append(f"vllm: {error}")
    return [server for server in chosen if not args.only or server.name.split()[0] in args.only], absent


async def load_level(server: Server, streams: int, tokens: int, prompts: Sequence[str]) -> dict[str, object]:
    """Run `streams` streams at once, each with its share of the prompts one after the other."""
    answers: list[Streamed] = []

    async def one(index: int) -> None:
        for prompt in prompts[index::streams]:
            answers.append(await server.stream(prompt, tokens))

    started = time.perf_counter()
    await asyncio.gather(*(one(index) for index in range(streams)))
    seconds = time.perf_counter() - started
    gaps = sorted(gap for answer in answers for gap in answer.gaps)
    return {
        "tokens_per_s": len(answers) * tokens / seconds,
        "ttft_s": spread([answer.times[0] for answer in answers]),
        "event_gap_s": spread(gaps),
        "per_token_s": spread([(answer.seconds - answer.times[0]) / (tokens - 1) for answer in answers]),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile."""
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]}


async def load(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    servers, absent = servers_of(args, folder)
    rows: list[dict[str, object]] = []
    questions = [prompt.text for prompt in read_prompts(args.prompts)] if args.prompts else []

    def prompts(streams: int, requests: int, seed: int) -> list[str]:
        count = streams * requests
        return random.Random(seed).sample(questions, count) if questions else prompts_of(count, 200, seed, args.text)

    try:
        for server in list(servers):
            server.chat = bool(questions)
            server.start(folder)
            try:
                await server.ready(args.start_s)
                for streams in args.levels:  # once unmeasured: recordings, compilation, caches
                    await load_level(server, streams, args.tokens, prompts(streams, 1, 10_000 + streams))
                await asyncio.sleep(args.settle_s)
            except (Unavailable, OSError, ValueError) as error:
                absent.append(f"{server.name}: {error}")
                server.stop()
                servers.remove(server)
        for streams in args.levels:
            for repeat in range(args.repeats):
                for server in servers:
                    # No prompt comes twice, as engines keep the caches of those that they have seen.
                    seed = 100 * streams + repeat
                    figures = await load_level(server, streams, args.tokens, prompts(streams, args.requests, seed))
                    rows.append({"server": server.name, "streams": streams, "repeat": repeat, **figures})
                    print(f"{streams:3} streams  {server.name:16} {figures['tokens_per_s']:8.0f} tokens/s", flush=True)
    finally:
        for server in servers:
            server.stop()
    return {"rows": rows, "absent": absent}


def show(record: dict) -> None:
    """Medians over the repeats."""
    names = list(dict.fromkeys(row["server"] for row in record["rows"]))
    print(f"\n{'streams':>7}  {'server':16} {'tokens/s':>9} {'TTFT p50/p95 ms':>18} {'per token p50/p95 ms':>22}")
    for streams in dict.fromkeys(row["streams"] for row in record["rows"]):
        for name in names:
            rows = [row for row in record["rows"] if row["server"] == name and row["streams"] == streams]

            def median(*path: str, rows: list = rows) -> float:
                values = []
                for row in rows:
                    for key in path:
                        row = row[key]
                    values.append(row)
                return statistics.median(values)

            ttft = f"{median('ttft_s', 'p50') * 1e3:.1f} / {median('ttft_s', 'p95') * 1e3:.1f}"
            token = f"{median('per_token_s', 'p50') * 1e3:.2f} / {median('per_token_s', 'p95') * 1e3:.2f}"
            print(f"{streams:7}  {name:16} {median('tokens_per_s'):9.0f} {ttft:>18} {token:>22}")
    for reason in record["absent"]:
        print(f"left out: {reason}")


async def scheduler(args: argparse.Namespace, _: Path) -> dict[str, object]:
    """Tokens per second of the scheduler alone (no HTTP), with MTP and plain in turn."""
    torch.set_num_threads(args.threads)
    model = Model.load(args.checkpoint, head=args.head, dtype=getattr(torch, args.dtype))
    k = args.num_speculative_tokens
    questions = [encode(model, prompt.text, chat=True) for prompt in read_prompts(args.prompts)] if args.prompts else []
    backend, most, policies = backend_for(model, "auto"), max(args.levels), DraftPolicies()
    limits = SchedulerLimits(max_num_seqs=most, max_model_len=args.context, num_speculative_tokens=k)
    for size in range(1, most + 1):  # as the server does while it is idle
        backend.trunk.prepare(size, range(1, k + 2), exact=False)
        if backend.head is not None:
            backend.head.prepare(size, range(1, k + 2))
    group = Group(True, k, True, 0)
    for size in sorted({1 << power for power in range(most.bit_length())} | {most}):
        costs = measure_round_costs(backend, size, group, max_model_len=args.context)
        assert costs is not None
        times = [f"K = {each}: {seconds * 1e3:.2f} ms" for each, seconds in sorted(costs.head.items())]
        print(f"{size:3} sequences: " + ", ".join(times))
        policies.measured(group).costs.set(size, costs.head)
    chosen = Scheduler(backend, limits, policies=policies)
    rows: list[dict[str, object]] = []
    for streams in args.levels:
        for repeat in range(-1, args.repeats):  # the first one records passes
            count, seed = streams * args.requests, 1000 * streams + repeat
            prompts = (
                random.Random(seed).sample(questions, count)
                if questions
                else [encode(model, text) for text in prompts_of(count, args.prompt_chars, seed, args.text)]
            )
            figures = {}
            for name in ("MTP", "plain")[:: 1 if repeat % 2 else -1]:
                texts, seconds, used = run_streams(chosen, model, prompts, streams, args.tokens, name)
                figures[name] = sum(len(text) for text in texts) / seconds, texts, used
            assert figures["MTP"][1] == figures["plain"][1], "the texts differ"
            row = {name: tokens_per_s for name, (tokens_per_s, _, _) in figures.items()}
            row |= {"streams": streams, "repeat": repeat, "mean_drafts": figures["MTP"][2]}
            rows += [row] if repeat >= 0 else []
        ratios = [row["MTP"] / row["plain"] for row in rows if row["streams"] == streams]
        speeds = {name: statistics.median(row[name] for row in rows if row["streams"] == streams) for name in figures}
        drafts = statistics.mean(row["mean_drafts"] for row in rows if row["streams"] == streams)
        print(
            f"{streams:3} streams: plain {speeds['plain']:7.0f}, MTP {speeds['MTP']:7.0f} tokens/s, ratio median "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {drafts:.2f} drafts a round",
            flush=True,
        )
    return {"rows": rows}


def run_streams(
    scheduler: Scheduler, model: Model, prompts: Sequence[Sequence[int]], streams: int, tokens: int, name: str
) -> tuple[list[list[int]], float, float]:
    """Run streams of requests to their ends: tokens, seconds, and mean drafts per round."""
    chunks: list[list[GenerationChunk]] = [[] for _ in prompts]

    def submit(index: int) -> None:
        request = GenerationRequest(
            tuple(prompts[index]), max_tokens=tokens, num_speculative_tokens=None if name == "MTP" else 0
        )

        def emit(chunk: GenerationChunk) -> None:
            chunks[index].append(chunk)
            if chunk.finish is not None and index + streams < len(prompts):
                submit(index + streams)

        text = TextStream(model.tokenizer, ())
        scheduler.waiting.append(ServedSequence.of(request, emit, text, index))

    started = time.perf_counter()
    for index in range(streams):
        submit(index)
    while not scheduler.is_idle:
        scheduler.step()
    seconds = time.perf_counter() - started
    rounds = [each for own in chunks for chunk in own for each in chunk.rounds]
    emitted = [[token for chunk in own for each in chunk.rounds for token in each.emitted] for own in chunks]
    return emitted, seconds, statistics.mean(len(each.drafts) for each in rounds)


async def prefill(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Times between events of running streams: alone, and while a long prompt is processed."""
    server = nextn_server(args.checkpoint.resolve(), "-k", str(args.num_speculative_tokens))
    server.start(folder)
    try:
        await server.ready(args.start_s)
        await asyncio.sleep(args.settle_s)
        (long_prompt,) = prompts_of(1, args.prompt_chars)
        short = prompts_of(args.streams, 100)
        before = await asyncio.gather(*(server.stream(prompt, args.tokens) for prompt in short))
        streams = [asyncio.create_task(server.stream(prompt, args.tokens)) for prompt in short]
        await asyncio.sleep(0.2)
        started = time.perf_counter()
        long_answer = await server.stream(long_prompt, 1)
        prefill_s = time.perf_counter() - started
        during = await asyncio.gather(*streams)
    finally:
        server.stop()
    gaps = [gap for answer in during for gap in answer.gaps]
    median = statistics.median(gaps)
    record = {
        "prompt_chars": args.prompt_chars, "prefill_s": prefill_s, "long_ttft_s": long_answer.times[0],
        "alone_gap_s": spread([gap for answer in before for gap in answer.gaps]), "gap_s": spread(gaps),
        "p95_to_median": spread(gaps)["p95"] / median, "longest_gap_s": max(gaps),
    }  # fmt: skip
    print(json.dumps(record, indent=1))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("checkpoint", type=Path)
    shared.add_argument("--num-speculative-tokens", "-k", type=int, default=4, help="K")
    shared.add_argument("--out", type=Path)
    shared.add_argument("--logs", type=Path, default=Path("runs/serve-logs"))
    shared.add_argument("--start-s", type=float, default=600, help="time limit of a server's start")
    shared.add_argument("--settle-s", type=float, default=120, help="idle time before the measurement, for warm-up")
    shared.add_argument(
        "--text", type=Path, nargs="+", default=list(PROMPTS), help="files whose pieces are the prompts"
    )
    shared.add_argument("--prompts", help="questions as chats instead of pieces of --text: a benchmark or file")
    one = commands.add_parser("load", parents=[shared])
    one.add_argument("--head", type=Path, help="a separate head, as nextn and vLLM take it")
    one.add_argument("--gguf", type=Path, help="llama.cpp's file, if the checkpoint cannot be converted with the head")
    one.add_argument("--levels", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="streams at once")
    one.add_argument("--requests", type=int, default=3, help="per stream")
    one.add_argument("--tokens", type=int, default=160)
    one.add_argument("--repeats", type=int, default=3)
    one.add_argument("--slots", type=int, default=16)
    one.add_argument("--context", type=int, default=1024, help="of llama.cpp and vLLM, per sequence")
    one.add_argument("--threads", type=int, default=os.cpu_count())
    one.add_argument("--only", nargs="*", default=[], help="nextn, llama.cpp, vllm")
    two = commands.add_parser("prefill", parents=[shared])
    two.add_argument("--prompt-chars", type=int, default=4000)
    two.add_argument("--streams", type=int, default=2)
    two.add_argument("--tokens", type=int, default=3000)
    three = commands.add_parser("scheduler", parents=[shared])
    three.add_argument("--levels", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="streams at once")
    three.add_argument("--requests", type=int, default=3, help="per stream")
    three.add_argument("--tokens", type=int, default=160)
    three.add_argument("--repeats", type=int, default=5)
    three.add_argument("--prompt-chars", type=int, default=200)
    three.add_argument("--context", type=int, default=1024)
    three.add_argument("--head", type=Path, help="a separate head")
    three.add_argument("--threads", type=int, default=os.cpu_count())
    three.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    run = {"load": load, "prefill": prefill, "scheduler": scheduler}[args.command]
    record = asyncio.run(run(args, args.logs))
    if args.command == "load":
        show(record)
    write_record(args.out, {"command": sys.argv[1:], args.command: record})


if __name__ == "__main__":
    main()
