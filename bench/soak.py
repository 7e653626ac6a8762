"""Keep a server busy with random requests, and check all that it answers, counts and uses.

    python bench/soak.py src/nextn/assets/tiny --minutes 60 --out bench/results/serve-soak.json

Requests arrive at random: greedy and sampled, of all lengths, with shared prefixes, several choices, stop strings,
schemas and tools, streamed and whole; some clients leave early, some send nonsense. Every complete answer must be the
one that the request got alone, without drafts, before the soak. At quiet moments nothing may run or wait, the counters
must grow by exactly what was reported to clients, and memory, threads and files must be as before. Then the server is
stopped (SIGTERM) and killed (SIGKILL) under load and started again: every client must get an answer or an end.
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx2
from record import write_record
from serve import Server, nextn_server, prompts_of
from soak_requests import (
    INVALID,
    Answer,
    Case,
    leave_half_a_request,
    random_cases,
    send,
    send_invalid,
    with_chat_template,
)

from nextn.engines.counters import parse_series, sum_series

_COUNTED = (
    "prompt_tokens", "generation_tokens", "request_success", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
)  # fmt: skip
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_MAX_CLIENTS = 40  # at once
_STUCK_S = 90.0  # a request that takes longer is stuck
_GRACES_S = (0.1, 3.0)  # that running answers have when the server stops
_MIN_PHASE_S = 8.0  # between two starts
_FLAT = 0.02  # growth of resident memory that is taken for noise


class Soak:
    """A server, its clients, and what they saw."""

    def __init__(self, server: Server, args: argparse.Namespace) -> None:
        self.server, self.args, self.draw = server, args, random.Random(args.seed)
        self.client: httpx2.AsyncClient | None = None
        self.references: list[tuple[Case, Answer]] = []
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.usage: list[dict[str, float]] = []  # of the process, at quiet moments
        self.stops: list[dict[str, object]] = []
        self.num_audits = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._signal: signal.Signals | None = None  # that the server was sent
        self._grace_s = 0.0

    async def run(self) -> None:
        """One long phase without a restart, then shorter ones that end with a signal."""
        await self._start()
        await self._settle()
        texts = prompts_of(60, 400, self.args.seed)
        for case in random_cases(self.draw, self.args.cases, texts):
            answer = await send(self._client, case, stream=False, k=0)
            self._require(answer.outcome == "complete", f"no reference for {case}: {answer}")
            self.references.append((case, answer))
        seconds = 60 * self.args.minutes
        await self._load(seconds * 0.75)
        for index in range(self.args.restarts):
            await self._stop((signal.SIGTERM, signal.SIGKILL)[index % 2])
            await self._start()
            await self._load(max(_MIN_PHASE_S, self.draw.uniform(0.5, 1.5) * seconds * 0.25 / self.args.restarts))
        await self._stop(signal.SIGTERM)

    @property
    def _client(self) -> httpx2.AsyncClient:
        assert self.client is not None
        return self.client

    def _require(self, is_right: bool, problem: str) -> None:
        if not is_right:
            self.problems.append(problem[:1000])
            print(f"problem: {problem}", flush=True)

    async def _start(self) -> None:
        self._grace_s = self.draw.choice(_GRACES_S)
        self.server.command[-1] = str(self._grace_s)
        self.server.start(self.args.logs)
        await self.server.ready(300)
        self._connect()
        self._signal = None

    def _connect(self) -> None:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=8)
        url = f"http://127.0.0.1:{self.server.port}"
        self.client = httpx2.AsyncClient(base_url=url, timeout=_STUCK_S, limits=limits)

    async def _settle(self) -> None:
        """Wait until the server has recorded the passes of all batch sizes, which takes memory: until it idles."""
        used = -math.inf
        while (now := cpu_seconds(self.server.process.pid)) > used + 0.2:
            used = now
            await asyncio.sleep(2)

    async def _load(self, seconds: float) -> None:
        """Let requests arrive for so long, with quiet moments."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            await self._arrivals(min(left, self.args.quiet_s))
            await self._audit()

    async def _arrivals(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            task = asyncio.create_task(self._one())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(self.draw.expovariate(self.args.rate))
            if len(self._tasks) > _MAX_CLIENTS:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    async def _one(self) -> None:
        """One client."""
        kind, is_late = self.draw.random(), self._signal is not None
        try:
            async with asyncio.timeout(_STUCK_S):
                if kind < 0.12:
                    answer = await send_invalid(self._client, self.draw.choice(INVALID))
                elif kind < 0.15:
                    answer = await leave_half_a_request(self.draw, self.server.port)
                else:
                    answer = await self._ask(leaves=kind < 0.35)
        except TimeoutError:
            answer = Answer("stuck", f"no end after {_STUCK_S:g} s")
        except Exception as error:  # of a client: an answer that is not of OpenAI's form, for example
            answer = Answer("failed", repr(error))
        # A server that gets a signal finishes what it has begun, or says that it does not.
        is_cut_off = answer.outcome == "broken" and (is_late or self._signal is signal.SIGKILL)
        is_end_expected = self._signal is not None and (answer.outcome in ("ended", "unreachable") or is_cut_off)
        self.outcomes[f"{answer.outcome} after {self._signal.name}" if is_end_expected else answer.outcome] += 1
        is_fine = is_end_expected or answer.outcome in ("complete", "refused", "cancelled")
        self._require(is_fine, f"{answer.outcome}: {answer.detail}")

    async def _ask(self, *, leaves: bool = False) -> Answer:
        """Send a request with a reference; a client that leaves does so after a random time."""
        case, reference = self.draw.choice(self.references)
        how = {"stream": self.draw.random() < 0.6, "k": self.draw.choice((None, None, 0, 2, 4))}
        try:
            async with asyncio.timeout(self.draw.random() * 0.5 if leaves else None):
                answer = await send(self._client, case, **how)
        except TimeoutError:
            return Answer("cancelled")
        if answer.outcome == "complete" and answer.choices != reference.choices:
            return Answer("wrong", f"{case} {how}: {answer.choices} instead of {reference.choices}")
        return answer

    async def _audit(self) -> None:
        """Wait until all is quiet, then compare counters with what is reported to a few clients."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        before = await self._quiet_counters()
        answers = await asyncio.gather(*(self._ask() for _ in range(self.args.audited)))
        after = await self._quiet_counters()
        reported = sum((answer.counts for answer in answers), Counter())
        grown = {name: after[name] - before[name] for name in _COUNTED}
        wrong = {name: (grown[name], reported[name]) for name in _COUNTED if grown[name] != reported[name]}
        self._require(all(answer.outcome == "complete" for answer in answers), f"audited: {answers}")
        self._require(not wrong, f"counters grew by, reported to clients: {wrong}")
        accepted, drafted = (after[f"spec_decode_num_{name}_tokens"] for name in ("accepted", "draft"))
        self._require(accepted <= drafted, f"{accepted} tokens accepted of {drafted}")
        self.num_audits += 1
        await self._client.aclose()  # else its idle connections count
        await asyncio.sleep(0.2)
        self.usage.append({"second": time.monotonic(), **process_usage(self.server.process.pid)})
        self._connect()

    async def _quiet_counters(self) -> dict[str, float]:
        ends = time.monotonic() + 10
        while True:
            text = (await self._client.get("/metrics")).text
            series = parse_series(text)
            gauges = {name: sum_series(series, f"nextn:{name}") for name in _GAUGES}
            if not any(gauges.values()) or time.monotonic() > ends:
                break
            await asyncio.sleep(0.05)
        self._require(not any(gauges.values()), f"with no client: {gauges}")
        return {name: sum_series(series, f"nextn:{name}") or 0.0 for name in _COUNTED}

    async def _stop(self, how: signal.Signals) -> None:
        """Send a signal under load; the process must end, and every client must get an end."""
        process = self.server.process
        await self._arrivals(self.draw.uniform(1, 4))
        self._signal = how
        before, started, num_open = self.outcomes.copy(), time.monotonic(), len(self._tasks)
        process.send_signal(how)
        await self._arrivals(1.0)  # some come too late
        while process.poll() is None and time.monotonic() - started < self._grace_s + 20:
            await asyncio.sleep(0.05)
        seconds = time.monotonic() - started
        self._require(process.poll() == (0 if how is signal.SIGTERM else -how), f"{how.name}: exit {process.poll()}")
        self._require(seconds < self._grace_s + 5, f"{how.name}: the server took {seconds:.1f} s to end")
        _, late = await asyncio.wait(self._tasks, timeout=5) if self._tasks else (set(), set())
        self._require(not late, f"{how.name}: {len(late)} clients had no end 5 s after the server's")
        await self._client.aclose()
        outcomes = dict(self.outcomes - before)
        self.stops.append({"signal": how.name, "open": num_open, "seconds": round(seconds, 2), "outcomes": outcomes})
        self.server.stop(signal.SIGKILL)

    def record(self) -> dict[str, object]:
        return {
            "minutes": self.args.minutes, "rate": self.args.rate, "cases": self.args.cases,
            "outcomes": dict(self.outcomes), "problems": self.problems[:20], "num_problems": len(self.problems),
            "audits": self.num_audits, "memory": memory_growth(self._long_phase), "stops": self.stops,
            "usage": self._long_phase,
        }  # fmt: skip

    @property
    def _long_phase(self) -> list[dict[str, float]]:
        begin = self.usage[0]["second"]
        pids = [each["pid"] for each in self.usage]
        first = [each for each in self.usage if each["pid"] == pids[0]]
        return [each | {"second": round(each["second"] - begin)} for each in first]


def process_usage(pid: int) -> dict[str, float]:
    """Resident memory, threads and open files of a process."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    resident = int(lines["VmRSS"].split()[0]) / 1024
    files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return {"pid": pid, "resident_mb": round(resident, 1), "threads": int(lines["Threads"]), "files": files}


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_growth(usage: list[dict[str, float]]) -> dict[str, float]:
    """Medians of a tenth of the samples, after the first quarter, for warm-up, and at the end."""
    num = max(1, len(usage) // 10)
    sizes = [each["resident_mb"] for each in usage]
    begin = sizes[len(sizes) // 4 :][:num]
    first, last = statistics.median(begin), statistics.median(sizes[-num:])
    return {"after_warm_up_mb": first, "at_end_mb": last, "growth": round(last / first - 1, 4)}


def check_usage(soak: Soak) -> None:
    """Memory, threads and files must be at the end what they were after warm-up."""
    usage = soak.record()["usage"]
    settled = usage[len(usage) // 4 :]
    growth = memory_growth(usage)["growth"]
    soak._require(growth <= _FLAT, f"resident memory grew by {growth:.1%}")
    for name in ("threads", "files"):
        first, last = settled[0][name], settled[-1][name]
        soak._require(last <= first, f"{name}: {first} after warm-up, {last} at the end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=4, help="arrivals per second")
    parser.add_argument("--cases", type=int, default=150, help="different requests")
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--quiet-s", type=float, default=30, help="seconds between quiet moments")
    parser.add_argument("--audited", type=int, default=6, help="requests whose counters are compared")
    parser.add_argument("--num-speculative-tokens", "-k", type=int, default=4, help="K")
    parser.add_argument("--copy", type=int, default=0, help="tokens of a round that may be copied from the text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path, default=Path("runs/serve-logs"))
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = with_chat_template(args.checkpoint, Path(folder) / "model")
        options = (
            "-k",
            str(args.num_speculative_tokens),
            "--copy",
            str(args.copy),
            "--cache-gb",
            "0.5",
            "--grace",
            "0",
        )
        soak = Soak(nextn_server(checkpoint, *options), args)
        try:
            asyncio.run(soak.run())
        finally:
            soak.server.stop(signal.SIGKILL)
    check_usage(soak)
    record = soak.record()
    print(json.dumps({name: value for name, value in record.items() if name not in ("usage", "stops")}, indent=1))
    write_record(args.out, {"command": sys.argv[1:], "soak": record})
    sys.exit(1 if soak.problems else 0)


if __name__ == "__main__":
    main()
