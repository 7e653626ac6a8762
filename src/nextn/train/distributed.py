"""The processes of a distributed run: rank, collectives, errors when one is lost, and sharding with FSDP2.

Without torchrun there is one process, and every collective returns its input, so callers need no special case.

With several, each has its shard of every parameter, gradient and moment of trunk and head. A unit is gathered when its
forward begins. Each decoder layer of trunk and head is a unit. All other parameters (embedding, lm_head, norms,
projections) are read in several places of a step, such as the chunked loss, and form one unit around the whole step, so
that a tied or shared parameter is gathered once and reduced once.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from nextn.checkpoint.mapped_memory import return_freed_memory
from nextn.devices import resolve_device
from nextn.errors import ConfigError, TrainingError
from nextn.model.deferred_init import DeferredInit
from nextn.model.head import Head
from nextn.model.streamed_trunk import DeferredTrunk, StreamedTrunk
from nextn.model.trunk import Trunk

# How long a process waits for the others before it gives up: longer than any checkpoint takes to write.
PATIENCE = timedelta(minutes=10)
_LONG_PATIENCE = timedelta(days=7)  # for a process that streams a trunk; one that ends is noticed at once
_CPU = torch.device("cpu")
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
T = TypeVar("T")


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

    def one_by_one(self, work: Callable[[], T]) -> T:
        """Run work in the first process, for hours if need be, then in each of the others; return its own result.

        Raises TrainingError in the others if it fails in one.
        """
        if self.is_alone:
            return work()
        results: list[T] = []
        with self.guarded():
            group = dist.new_group(timeout=_LONG_PATIENCE, backend="gloo")
            try:
                for turn in range(self.world):
                    has_failed = torch.ones(1)
                    try:
                        results += [work()] if turn == self.rank else []
                        has_failed.zero_()
                    finally:
                        dist.all_reduce(has_failed, group=group)
                    if has_failed:
                        raise TrainingError(f"process {turn} of {self.world} ended while the others waited for it")
            finally:
                dist.destroy_process_group(group)
        return results[0]

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
            # gloo has no exception class; its messages begin with its source file.
            if self.is_alone or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise TrainingError(
                f"process {self.rank} of {self.world} lost another one ({str(error).splitlines()[0]}). Checkpoints are "
                "intact: start all processes again with --resume"
            ) from error


ALONE: Ranks = Ranks()


@contextmanager
def processes(device: str = "auto") -> Iterator[Ranks]:
    """Connect the processes that torchrun started, by gloo on CPUs and nccl on CUDA; without torchrun there is one.

    With torchrun, `device` is auto, cuda (one GPU per process) or cpu. Raises ConfigError for an incomplete
    environment, more processes than GPUs on a machine, or a device that does not exist.
    """
    missing = [name for name in _VARIABLES if name not in os.environ]
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield Ranks(device=resolve_device(device))
        return
    if missing:
        raise ConfigError(f"RANK is set but {', '.join(missing)} is not; start the processes with torchrun")
    own_device = _device(int(os.environ["LOCAL_RANK"]), device)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
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
        message = f"device = {device!r} with torchrun, which gives each process a GPU; expected auto, cuda or cpu"
        raise ConfigError(message)
    count = torch.cuda.device_count()
    if local_rank >= count:
        message = f"process {local_rank} of this machine has no GPU: there are {count}; use --nproc-per-node {count}"
        raise ConfigError(message)
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


class _Differentiable(Protocol):
    @property
    def total(self) -> Tensor: ...


R = TypeVar("R", bound=_Differentiable)


class JointModule(nn.Module):
    """Trunk and head as one module that runs a function as its forward: inside it, all parameters are gathered."""

    def __init__(self, trunk: Trunk, head: Head | None) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, work: Callable[[], T]) -> T:
        return work()

    def loss(self, work: Callable[[], R]) -> R:
        """Run work(), whose total is to be differentiated."""
        return cast(tuple[R, Tensor], self(lambda: _with_total(work())))[0]

    def sync_gradients(self, enabled: bool) -> None:
        """Set whether the next backward pass reduces gradients over the processes; else they accumulate unsharded."""
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(enabled)

    @torch.no_grad()
    def without_grad(self, work: Callable[[], T]) -> T:
        """Run work() without gradients. All processes must run the same forward passes in it."""
        try:
            return cast(T, self(work))
        finally:
            if isinstance(self, FSDPModule):
                self.reshard()


def _with_total(report: R) -> tuple[R, Tensor]:
    # FSDP attaches its backward hooks to tensors that it finds in the output; it searches tuples, but not reports.
    return report, report.total


def shard(
    trunk: Trunk,
    head: Head | None,
    ranks: Ranks,
    *,
    dtype: torch.dtype = torch.float32,
    deferred: DeferredInit | None = None,
) -> JointModule:
    """Make one module of trunk and head, sharded over the processes; create optimizers after this call.

    Not sharded are packed (quantized) layers, as packed bytes cannot be split, and a streamed trunk. fp32 layers are
    gathered in `dtype`, but for those with a parameter that must stay in fp32; gradients are always reduced in fp32.
    `deferred` computes the parameters that are on the meta device, one at a time.
    """
    module = JointModule(trunk, head)
    if ranks.is_alone:
        return module if ranks.device.type == "cpu" else module.to(ranks.device)
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    # A streamed trunk runs before training, in one process alone; of its parameters, most are never loaded for good.
    ignored = set(trunk.to(ranks.device).parameters()) if isinstance(trunk, StreamedTrunk) else set[nn.Parameter]()
    if deferred is not None:
        deferred.finish(module)
    for unit in _units(trunk, head):
        if all(value.is_floating_point() for value in unit.parameters()):
            with _computed(unit, deferred, ranks.device):
                fully_shard(unit, mesh=mesh, mp_policy=_policy(trunk, unit, dtype))
        else:
            ignored.update(unit.to(ranks.device).parameters())
    with _computed(module, deferred, ranks.device):
        fully_shard(
            module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32), ignored_params=ignored
        )
    if isinstance(trunk, DeferredTrunk):
        trunk.close()
    return module


@contextmanager
def _computed(unit: nn.Module, deferred: DeferredInit | None, device: torch.device) -> Iterator[None]:
    """Inside, a unit is sharded; then deferred parameters are computed one by one, and this process keeps its part."""
    if deferred is None:
        yield
        return
    values = {name: value for name, value in unit.named_parameters() if value in deferred}
    yield
    for name, value in values.items():
        parameter = unit.get_parameter(name)
        with torch.no_grad():
            part = torch.empty_like(parameter, device=device)
            part.copy_(shard_like(deferred.take(value), part))
        # In place, as `Module.to_empty` does it: FSDP has the parameter, and reads its new state at the first forward.
        torch.utils.swap_tensors(parameter, nn.Parameter(part, requires_grad=parameter.requires_grad))
        return_freed_memory()


def _units(trunk: Trunk, head: Head | None) -> Iterator[nn.Module]:
    """The decoder layers of head and trunk, but a streamed one's; a deferred trunk's are loaded, each when taken."""
    yield from dict.fromkeys([] if head is None else head.layers)
    if not isinstance(trunk, StreamedTrunk):
        yield from trunk.loaded_layers() if isinstance(trunk, DeferredTrunk) else dict.fromkeys(trunk.decoder.layers)


def _policy(trunk: Trunk, unit: nn.Module, dtype: torch.dtype) -> MixedPrecisionPolicy:
    # Inputs are not cast: autocast decides per matmul, and the states between layers stay in fp32.
    needs_fp32 = any(trunk.keeps_fp32(name) for name, _ in unit.named_parameters())
    is_fp32 = all(value.dtype == torch.float32 for value in unit.parameters())
    param_dtype = dtype if is_fp32 and not needs_fp32 else None
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Clip the global gradient norm to `limit` and return the norm before clipping."""
    norm = nn.utils.clip_grad_norm_(parameters, limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def gather_gradients(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Gather gradients on every process: a pre-step hook for an optimizer that needs full matrices (Muon).

    Its moments are then replicated too; the parameters stay sharded.
    """
    for group in optimizer.param_groups:
        for value in group["params"]:
            if value.grad is not None:
                value.grad = replicated(value.grad)


def replicated(value: Tensor) -> Tensor:
    """Return the full tensor on each process."""
    return value.redistribute(placements=[Replicate()]) if isinstance(value, DTensor) else value


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Shard a tensor, replicated on each process, like the parameter; scalars stay replicated."""
    if not isinstance(parameter, DTensor) or value.ndim == 0:
        return value
    mesh = parameter.device_mesh
    return distribute_tensor(value.to(parameter.device), mesh, parameter.placements, src_data_rank=None)


@contextmanager
def unsharded(module: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Inside, the first process has every parameter unsharded, in host memory; the others' models are unchanged.

    All processes must enter. Tensors are gathered one at a time.
    """
    if ranks.is_alone:
        yield
        return
    owners = [(part, name, value) for part in module.modules() for name, value in part.named_parameters(recurse=False)]
    gathered: dict[nn.Parameter, nn.Parameter] = {}
    for value in dict.fromkeys(value for _, _, value in owners):  # a tied parameter once, so that it stays tied
        if isinstance(value, DTensor):
            full = cast(DTensor, value.detach()).full_tensor()
            if ranks.is_first:
                gathered[value] = nn.Parameter(full.cpu(), requires_grad=value.requires_grad)
    try:
        for part, name, value in owners:
            setattr(part, name, gathered.get(value, value))
        yield
    finally:
        for part, name, value in owners:
            setattr(part, name, value)
        ranks.wait()
