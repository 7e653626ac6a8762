"""The processes of one run: who this one is, sums over all of them, and what happens when one of them is lost.

Without torchrun there is one process, and every operation here returns what it was given: callers have one path.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from nextn.devices import resolve_device
from nextn.errors import ConfigError, TrainingError

# How long a process waits for the others before it gives up: longer than any checkpoint takes to write.
PATIENCE = timedelta(minutes=10)
_CPU = torch.device("cpu")
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """This process's number and how many there are. device: where its part of the model lies."""

    rank: int = 0
    world: int = 1
    device: torch.device = _CPU
    is_restart: bool = False  # torchrun started the processes again after one was lost

    @property
    def is_first(self) -> bool:
        """Whether this process prints, logs and names files."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.world == 1

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes, in the dtype of values: exact for int64."""
        if self.is_alone:
            return values
        values = values.clone()
        dist.all_reduce(values)
        return values

    def dealt(self, values: Tensor) -> Tensor:
        """values [n] of this process's rows -> [n * world] of all rows, in the order that they were dealt out in."""
        if self.is_alone:
            return values
        parts = [torch.empty_like(values) for _ in range(self.world)]
        dist.all_gather(parts, values)
        return torch.stack(parts, dim=1).flatten()

    def any(self, flag: bool) -> bool:
        """Whether any process says so; all hear the same answer."""
        return flag if self.is_alone else bool(self.total(torch.tensor(int(flag), device=self.device)))

    def wait(self) -> None:
        """Go on when all processes are here."""
        self.any(False)

    def check_batch(self, batch_size: int, *, parts: int = 1) -> None:
        """Raise ConfigError for rows that cannot be dealt out evenly over the processes, and in `parts` on each."""
        if batch_size % (self.world * parts):
            more = f" in {parts} parts (accumulate)" if parts > 1 else ""
            raise ConfigError(
                f"batch_size = {batch_size} on {self.world} processes{more}: every process takes the same number of "
                f"rows; use a multiple of {self.world * parts}"
            )

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Inside, the loss of another process is a TrainingError that says how to go on."""
        try:
            yield
        except RuntimeError as error:
            if self.is_alone or not _is_loss(error):
                raise
            raise TrainingError(
                f"process {self.rank} of {self.world} lost another one ({str(error).splitlines()[0]}). What was saved "
                "stands: start all processes again with --resume"
            ) from error


ALONE = Ranks()


@contextmanager
def processes(device: str = "auto") -> Iterator[Ranks]:
    """The processes that torchrun's environment names, connected: gloo on CPUs, nccl on CUDA; one without torchrun.

    device: as `resolve_device` takes it; with torchrun auto, cuda (each process has a GPU of its own) or cpu.

    Raises ConfigError for an environment that is cut short, for more processes than GPUs on a machine, or for a device
    that is not there.
    """
    missing = [name for name in _VARIABLES if name not in os.environ]
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield Ranks(device=resolve_device(device))
        return
    if missing:
        raise ConfigError(f"RANK is set but {', '.join(missing)} is not; start the processes with torchrun")
    own, restarts = _device(int(os.environ["LOCAL_RANK"]), device), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store, rank, world = next(rendezvous("env://", timeout=PATIENCE))
    # torchrun keeps its store when it starts processes again, and with it the addresses of those that were lost.
    store = PrefixStore(f"start-{restarts}", store)
    # CPU tensors (counts, checkpoints) go over gloo on CUDA machines, too.
    backend = "gloo" if own.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=PATIENCE,
        device_id=own if own.type == "cuda" else None,
    )
    try:
        yield Ranks(rank, world, own, is_restart=restarts != "0")
    finally:
        dist.destroy_process_group()


def _device(local: int, asked: str) -> torch.device:
    if resolve_device(asked).type == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return _CPU
    if asked not in ("auto", "cuda"):
        raise ConfigError(
            f"device = {asked!r} with torchrun, which gives each process a GPU; expected auto, cuda or cpu"
        )
    count = torch.cuda.device_count()
    if local >= count:
        raise ConfigError(
            f"process {local} of this machine has no GPU: there are {count}; use --nproc-per-node {count}"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _is_loss(error: RuntimeError) -> bool:
    # gloo has no exception of its own; its messages begin with its source file.
    return isinstance(error, dist.DistError) or "gloo" in str(error)
