"""Trunk and head over several processes with FSDP2: each keeps its part of every parameter, gradient and moment.

A unit is gathered when its forward begins. Decoder layers, the trunk's and the head's, are units of their own; all else
(embedding, output head, norms, projections) is read in several places of one step, such as by the chunked loss, and
belongs to one unit around the whole step. So what is tied or shared is one parameter, gathered once and reduced once.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from nextn.distributed.parallel import Ranks
from nextn.head import Head
from nextn.trunk import Trunk

T = TypeVar("T")


class _Differentiable(Protocol):
    @property
    def total(self) -> Tensor: ...


R = TypeVar("R", bound=_Differentiable)


class Joined(nn.Module):
    """Trunk and head as one module whose forward is a piece of work: inside, their parameters can be read anywhere."""

    def __init__(self, trunk: Trunk, head: Head | None) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, work: Callable[[], T]) -> T:
        return work()

    def loss(self, work: Callable[[], R]) -> R:
        """work(), whose total is to be differentiated."""
        return cast(tuple[R, Tensor], self(lambda: _with_total(work())))[0]

    def exchange(self, now: bool) -> None:
        """Whether the next backward pass adds its gradients up over the processes; those of a pass that does not are
        kept whole on each process until one does."""
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(now)

    @torch.no_grad()
    def look(self, work: Callable[[], T]) -> T:
        """work(), without gradients. All processes must do the same passes in it."""
        try:
            return cast(T, self(work))
        finally:
            if isinstance(self, FSDPModule):
                self.reshard()


def _with_total(report: R) -> tuple[R, Tensor]:
    # Beside the report, as FSDP looks for tensors in tuples: gathering for the backward pass hangs on them.
    return report, report.total


def join(trunk: Trunk, head: Head | None, ranks: Ranks, *, dtype: torch.dtype = torch.float32) -> Joined:
    """Trunk and head as one module; of several processes, each keeps its part, on its device.

    dtype: what layers of fp32 parameters are gathered in; gradients are always reduced in fp32. A layer stays in the
    dtype it has if it holds anything that keeps fp32, and whole if it is packed (quantised), as packed bytes are cut
    nowhere. Take parameters for an optimiser from the model after this call.
    """
    joined = Joined(trunk, head)
    if ranks.is_alone:
        return joined if ranks.device.type == "cpu" else joined.to(ranks.device)
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    packed: set[nn.Parameter] = set()
    for unit in dict.fromkeys([*trunk.decoder.layers, *([] if head is None else head.layers)]):
        if all(value.is_floating_point() for value in unit.parameters()):
            fully_shard(unit, mesh=mesh, mp_policy=_policy(trunk, unit, dtype))
        else:
            packed.update(unit.to(ranks.device).parameters())
    fully_shard(joined, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32), ignored_params=packed)
    return joined


def _policy(trunk: Trunk, unit: nn.Module, dtype: torch.dtype) -> MixedPrecisionPolicy:
    # Inputs stay as they are: autocast chooses for each product, and the states between layers stay in fp32.
    exact = any(trunk.keeps_fp32(name) for name, _ in unit.named_parameters())
    is_wide = all(value.dtype == torch.float32 for value in unit.parameters())
    gathered = dtype if is_wide and not exact else None
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)


def clip(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale the gradients down to the norm `limit` over all processes -> the norm they had."""
    norm = nn.utils.clip_grad_norm_(parameters, limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def gather_gradients(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """A pre-step hook for an optimiser that needs whole matrices (Muon): its gradients, from all processes, on each.

    Its moments are whole on each process then, too; the parameters stay in parts.
    """
    for group in optimizer.param_groups:
        for value in group["params"]:
            if value.grad is not None:
                value.grad = undivided(value.grad)


def undivided(value: Tensor) -> Tensor:
    """value, whole on each process."""
    return value.redistribute(placements=[Replicate()]) if isinstance(value, DTensor) else value


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """value, whole on each process, cut as the parameter is; scalars stay whole."""
    if not isinstance(parameter, DTensor) or value.ndim == 0:
        return value
    mesh = parameter.device_mesh
    return distribute_tensor(value.to(parameter.device), mesh, parameter.placements, src_data_rank=None)


@contextmanager
def whole(module: nn.Module, ranks: Ranks) -> Iterator[None]:
    """While open, the first process holds every parameter whole, in host memory, as if it were alone.

    All processes enter; tensors are gathered one at a time. Outside the first process the model is as it was.
    """
    if ranks.is_alone:
        yield
        return
    places = [(part, name, value) for part in module.modules() for name, value in part.named_parameters(recurse=False)]
    gathered: dict[nn.Parameter, nn.Parameter] = {}
    for value in dict.fromkeys(value for _, _, value in places):  # what is tied once, and stays so
        if isinstance(value, DTensor):
            full = cast(DTensor, value.detach()).full_tensor()
            if ranks.is_first:
                gathered[value] = nn.Parameter(full.cpu(), requires_grad=value.requires_grad)
    try:
        for part, name, value in places:
            setattr(part, name, gathered.get(value, value))
        yield
    finally:
        for part, name, value in places:
            setattr(part, name, value)
        ranks.wait()
