"""What decoding costs on this machine: trunk passes, draft steps, memory bandwidth, the bytes that a step reads.

It does not know what the tokens are: the clock is all that it asks.
"""

import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import transformers
from torch import Tensor, nn

from nextn.benchmarking.plan import rotated
from nextn.decode import prepare
from nextn.errors import ConfigError
from nextn.fast.chain import FastChain
from nextn.fast.choose import Engine
from nextn.figures.speedup import Costs, Spread
from nextn.head import Head
from nextn.model import Model
from nextn.policy import Adaptive, Fixed, RoundPlan
from nextn.sampling import Sampling
from nextn.trunk import Trunk

Clock = Callable[[], float]
Pass = Callable[[], object]
_CHUNK = 512


@torch.inference_mode()
def measured_costs(
    model: Model,
    *,
    drafts: int,
    batch: int = 1,
    context: int = 256,
    repeats: int = 7,
    path: str = "auto",
    clock: Clock = time.perf_counter,
) -> Costs:
    """Passes of 1..drafts+1 tokens and a chain of `drafts` draft steps, in turn, `repeats` times after a warm-up.

    Each comes behind what it follows in decoding, as that is what it finds in the processor's caches: a plain step
    behind another one, a verification behind its drafts, drafts behind a verification.
    Each ends in its argmax on the host, as in decoding. path: see `Model.engine`. Raises ConfigError where these do not
    fit the model.
    """
    check(model, drafts=drafts, batch=batch, context=context)
    assert model.head is not None
    made = model.engine(path)
    with made.trunk.alone():
        bench = _Passes(made, batch, context)
        prepare(bench.trunk, bench.head, batch, drafts)
    verify: list[Pass] = [partial(bench.verify, num) for num in range(drafts + 2)]
    chains: list[Pass] = [partial(bench.draft, num) for num in range(drafts + 1)]
    pairs = [(verify[1], verify[1]), *zip(chains[1:], verify[2:], strict=True), (verify[-1], chains[-1])]
    times: list[list[float]] = [[] for _ in pairs]
    for repeat in range(repeats + 1):
        for place in rotated(range(len(pairs)), repeat):
            before, timed = pairs[place]
            before()
            started = clock()
            timed()
            if repeat:
                times[place].append(clock() - started)
    *steps, chain = map(Spread.of, times)
    draft = Spread(chain.median / drafts, chain.low / drafts, chain.high / drafts, chain.num)
    return Costs(batch, context, tuple(steps), draft)


def adaptive(model: Model, *, limit: int, batch: int = 1, context: int = 256, path: str = "auto") -> Adaptive:
    """A draft length that pays, by what this machine takes for each. Raises ConfigError as `measured_costs`."""
    costs = measured_costs(model, drafts=limit, batch=batch, context=context, repeats=7, path=path)
    return Adaptive(costs)


def check(model: Model, *, drafts: int, batch: int, context: int) -> None:
    """Raises ConfigError where costs cannot be measured so."""
    if model.head is None or min(drafts, batch, context) < 1:
        raise ConfigError(f"{drafts=}, {batch=}, {context=}: each must be at least 1, and the model needs a head")
    limit = model.trunk.max_length
    if limit is not None and context + drafts + 1 > limit:
        raise ConfigError(f"context {context} + {drafts + 1} columns of a round do not fit the model's {limit}")


class _Passes:
    """Caches of `context` columns, over which passes are run that leave no column behind."""

    def __init__(self, made: Engine, batch: int, context: int) -> None:
        assert made.head is not None
        self.trunk, self.head, self.batch, self.context = made.trunk, made.head, batch, context
        self.cache = self.trunk.cache(batch)
        self.caches = [self.head.cache(batch) for _ in self.head.stack]
        self.chain = self.head.chain(self.caches[-1], Sampling(), sampled=True)
        self.plans: dict[int, RoundPlan] = {}
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(self.trunk.vocab_size, (batch, context), generator=generator)
        chunk = min(_CHUNK, self.trunk.max_window or _CHUNK)
        for start in range(0, context, chunk):
            tokens = self.tokens[:, start : start + chunk]
            self.states = self.trunk(tokens, self.cache).eaten.clone()
            self.cache.keep([tokens.shape[1]] * batch)
            for index, cache in enumerate(self.caches):
                self.head.step(index, tokens, self.states, cache=cache)
                cache.keep([tokens.shape[1]] * batch)

    def verify(self, columns: int) -> list[list[int]]:
        with self.trunk.alone():
            return self._verify(columns)

    def draft(self, drafts: int) -> list[int]:
        with self.trunk.alone():
            return self._looped(drafts) if self.chain is None else self._chained(self.chain, drafts)

    def _verify(self, columns: int) -> list[list[int]]:
        tokens = self.tokens[:, :1].expand(-1, columns)
        best = self.trunk.read(self.trunk(tokens, self.cache)).best
        self.cache.keep([0] * self.batch)
        return best

    def _chained(self, chain: FastChain, drafts: int) -> list[int]:
        plan = self.plans.setdefault(drafts, Fixed(drafts).plan())
        tokens, limits = [[token] for token in self.tokens[:, 0].tolist()], [drafts] * self.batch
        found, _, _ = chain.run(tokens, list(self.states[:, -1:]), plan, limits=limits, uniforms=None)
        self.caches[-1].truncate([self.context] * self.batch)
        return [row[-1] for row in found]

    def _looped(self, drafts: int) -> list[int]:
        tokens, states, recursion = self.tokens[:, 0].tolist(), self.states[:, -1:], None
        for depth in range(1, drafts + 1):
            if depth <= self.head.num_modules:
                index = self.head.module(depth)
                eaten = torch.tensor(tokens)[:, None]
                step = self.head.step(index, eaten, states, cache=self.caches[index])
                self.caches[index].keep([0] * self.batch)
                guess = self.head.predict(index, step.normed[:, 0])
            else:
                recursion = recursion or self.head.recursion(self.caches[-1], step.recycled[:, 0])
                guess = recursion.step(tokens)
            tokens = guess.best
        self.caches[-1].truncate([self.context] * self.batch)
        return tokens


@dataclass(frozen=True)
class Machine:
    """Where the figures come from. bandwidth: bytes/s, read and written, of a copy; peak_memory: bytes, of the process
    on a CPU, of torch's allocator on a GPU. step_bytes, draft_bytes: weights that a plain and a draft step read.
    head_bits: of `Engine`."""

    name: str
    cores: int
    threads: int
    versions: dict[str, str]
    dtype: str
    bandwidth: float
    step_bytes: int
    draft_bytes: int
    peak_memory: int
    head_bits: int | None = None

    @classmethod
    def of(cls, model: Model, *, head_bits: int | None = None) -> "Machine":
        """To be called last: peak_memory is what was used up to now."""
        device = model.trunk.device
        peak = peak_memory(device)  # before the copy, which needs much
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        return cls(
            name=gpu or processor(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            threads=torch.get_num_threads(),
            versions=versions | {"transformers": transformers.__version__},
            dtype=str(model.trunk.dtype).removeprefix("torch."),
            bandwidth=copy_bandwidth(device),
            step_bytes=step_bytes(model.trunk),
            draft_bytes=draft_bytes(model.head, head_bits) if model.head is not None else 0,
            peak_memory=peak,
            head_bits=head_bits,
        )


def processor() -> str:
    """What kernels hang on: the system, the architecture and the widest vectors that torch uses."""
    return f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def copy_bandwidth(
    device: torch.device, *, num_bytes: int = 2**28, repeats: int = 5, clock: Clock = time.perf_counter
) -> float:
    """Bytes/s of copying num_bytes, each read and written; the median. num_bytes: well beyond the caches."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target, times = torch.empty_like(source), []
    for repeat in range(repeats + 1):
        started = clock()
        target.copy_(source)
        target[-1].item()  # waits for a GPU
        if repeat:
            times.append(clock() - started)
    return 2 * num_bytes / Spread.of(times).median


def step_bytes(trunk: Trunk) -> int:
    """Weights that a pass over one token reads: all but those of an embedding that is no output head, and those of the
    experts that the router leaves out."""
    looked_up = () if trunk.embedding.weight is trunk.output.weight else (trunk.embedding.weight,)
    return _read(trunk.model, trunk, looked_up)


def draft_bytes(head: Head, bits: int | None = None) -> int:
    """Weights that a draft step reads: one module (their mean) and the output head. bits: of `Engine.head_bits`."""
    looked_up = tuple(part.weight for part in head.modules() if isinstance(part, nn.Embedding))
    own = {id(head.output(index).weight): head.output(index).weight for index in range(head.num_modules)}
    inner = _read(head, head.trunk, (*looked_up, *own.values()))
    output = head.output(0).weight
    stored = inner // head.num_modules + output.numel() * output.element_size()
    return stored if bits is None else stored // output.element_size()


def _read(module: nn.Module, trunk: Trunk, without: tuple[Tensor, ...]) -> int:
    skipped, total = {id(weight) for weight in without}, 0.0
    chosen = getattr(trunk.config, "num_experts_per_tok", None) or 0
    for name, weight in module.named_parameters():
        if id(weight) in skipped:
            continue
        # Experts are one tensor [experts, ...] in transformers 5.
        is_experts = chosen and ".experts." in f".{name}" and weight.ndim == 3
        share = min(1.0, chosen / len(weight)) if is_experts else 1.0
        total += weight.numel() * weight.element_size() * share
    return round(total)


def peak_memory(device: torch.device) -> int:
    """Bytes: the allocator's peak on a GPU, else the process's resident peak; 0 where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux, bytes on macOS
