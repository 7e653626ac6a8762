"""The processes of a distributed run: rank, collectives, and errors when a process is lost.

Without torchrun there is one process, and every collective returns its input, so callers need no special case.
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
    """This process's rank, the world size, and the collectives that training uses."""

    rank: int = 0
    world: int = 1
    device: torch.device = _CPU  # of this process's shard of the model
    is_restart: bool = False  # torchrun started the processes again after one was lost

    @property
    def is_first(self) -> bool:
        """Whether this process prints, logs and names files."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.world == 1

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over all processes, in the dtype of values: exact for int64."""
        if self.is_alone:
            return values
        values = values.clone()
        dist.all_reduce(values)
        return values

    def gather_rows(self, values: Tensor) -> Tensor:
        """Gather values [n] of this process's rows (rank::world) as [n * world], in the order of the global batch."""
        if self.is_alone:
            return values
        parts = [torch.empty_like(values) for _ in range(self.world)]
        dist.all_gather(parts, values)
        return torch.stack(parts, dim=1).flatten()

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return flag if self.is_alone else bool(self.total(torch.tensor(int(flag), device=self.device)))

    def wait(self) -> None:
        """Wait for all processes (a barrier)."""
        self.any(False)

    def check_batch(self, batch_size: int, *, parts: int = 1) -> None:
        """Raise ConfigError if a batch cannot be split evenly over the processes, and into `parts` on each."""
        if batch_size % (self.world * parts):
            more = f" in {parts} parts (accumulate)" if parts > 1 else ""
            raise ConfigError(
                f"batch_size = {batch_size} on {self.world} processes{more}: every process takes the same number of "
                f"rows; use a multiple of {self.world * parts}"
            )

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Inside, the loss of another process raises TrainingError with how to resume."""
        try:
            yield
        except RuntimeError as error:
            if self.is_alone or not _is_loss(error):
                raise
            raise TrainingError(
                f"process {self.rank} of {self.world} lost another one ({str(error).splitlines()[0]}). Checkpoints are "
                "intact: start all processes again with --resume"
            ) from error


ALONE = Ranks()


@contextmanager
def processes(device: str = "auto") -> Iterator[Ranks]:
    """Connect the processes that torchrun started, by gloo on CPUs and nccl on CUDA; without torchrun there is one.

    device: as `resolve_device` takes it; with torchrun auto, cuda (one GPU per process) or cpu. Raises ConfigError for
    an incomplete environment, more processes than GPUs on a machine, or a device that does not exist.
    """
    missing = [name for name in _VARIABLES if name not in os.environ]
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield Ranks(device=resolve_device(device))
        return
    if missing:
        raise ConfigError(f"RANK is set but {', '.join(missing)} is not; start the processes with torchrun")
    own_device, restarts = (
        _device(int(os.environ["LOCAL_RANK"]), device),
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )
    store, rank, world = next(rendezvous("env://", timeout=PATIENCE))
    # torchrun keeps its store over restarts, and with it the addresses of lost processes.
    store = PrefixStore(f"start-{restarts}", store)
    # CPU tensors (counts, checkpoints) use gloo on CUDA machines too.
    backend = "gloo" if own_device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=PATIENCE,
        device_id=own_device if own_device.type == "cuda" else None,
    )
    try:
        yield Ranks(rank, world, own_device, is_restart=restarts != "0")
    finally:
        dist.destroy_process_group()


def _device(local_rank: int, device: str) -> torch.device:
    if resolve_device(device).type == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return _CPU
    if device not in ("auto", "cuda"):
        raise ConfigError(
            f"device = {device!r} with torchrun, which gives each process a GPU; expected auto, cuda or cpu"
        )
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"process {local_rank} of this machine has no GPU: there are {count}; use --nproc-per-node {count}"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _is_loss(error: RuntimeError) -> bool:
    # gloo has no exception class; its messages begin with its source file.
    return isinstance(error, dist.DistError) or "gloo" in str(error)
