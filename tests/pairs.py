"""Two processes that stay up: `run(work, *args)` calls a function of an importable module on both, over gloo."""

import os
import queue
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing

from nextn.train.distributed import Ranks


class Pair:
    def __init__(self, store: Path, *, world: int = 2) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["nextn.train.joint_run", "nextn.train.head_run"])  # imported once for both
        self.jobs = [context.Queue() for _ in range(world)]
        self.answers = context.Queue()
        self.processes = [
            context.Process(target=_serve, args=(rank, world, str(store), jobs, self.answers), daemon=True)
            for rank, jobs in enumerate(self.jobs)
        ]
        for process in self.processes:
            process.start()

    def run(self, work: Callable[..., object], *args: object, timeout: float = 120) -> list[object]:
        """What work(ranks, *args) returned on each process. Raises what the lowest failing one raised, as text."""
        for jobs in self.jobs:
            jobs.put((work, args))
        reported: dict[int, tuple[bool, object]] = {}
        for _ in self.jobs:
            try:
                rank, *answer = self.answers.get(timeout=timeout)
            except queue.Empty:
                raise TimeoutError(f"{work.__name__}: only {sorted(reported)} of {len(self.jobs)} answered") from None
            reported[rank] = (answer[0], answer[1])
        for rank in sorted(reported):
            if not reported[rank][0]:
                raise AssertionError(f"process {rank}:\n{reported[rank][1]}")
        return [reported[rank][1] for rank in sorted(reported)]

    def close(self) -> None:
        for jobs in self.jobs:
            jobs.put(None)
        for process in self.processes:
            process.join(timeout=10)
            process.kill()


def _serve(rank: int, world: int, store: str, jobs: "multiprocessing.Queue", answers: "multiprocessing.Queue") -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    while (job := jobs.get()) is not None:
        work, args = job
        try:
            answers.put((rank, True, work(Ranks(rank, world), *args)))
        except BaseException:
            answers.put((rank, False, traceback.format_exc()))
    answers.close()
    answers.join_thread()
    os._exit(0)  # without waiting for the other one's connections
