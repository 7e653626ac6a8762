"""Costs of decoding on this machine: times of trunk passes and draft steps, memory bandwidth, bytes read per step."""

import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import cast

import torch
import transformers
from torch import Tensor, nn

from nextn import __version__
from nextn.decoding.rounds import prepare
from nextn.environment import processor
from nextn.errors import ConfigError
from nextn.evaluate.workload import rotate
from nextn.model.head import Head
from nextn.model.model import Model
from nextn.model.packed_experts import StackedCodes, weights_with_codes
from nextn.model.packed_linear import StoredFp8
from nextn.model.trunk import Trunk
from nextn.runtime.backend import Backend, backend_for
from nextn.runtime.native.grouped import EIGHT_BITS, FOUR_BITS
from nextn.runtime.native.lm_head import FORMAT, num_draft_rows
from nextn.runtime.protocols import DraftChain
from nextn.runtime.torch_backend import TorchTrunk
from nextn.settings import WEIGHT_BITS, Sampling, available_cores
from nextn.speculative.draft_policy import AdaptiveLength, FixedLength, RoundPlan
from nextn.stats.speedup import Costs, Spread

Clock = Callable[[], float]
Pass = Callable[[], object]
_CHUNK = 512  # tokens per prefill pass
# Passes are repeated for so long: among seven of them, those that another process interrupts may be the median.
_MIN_S, _MOST_REPEATS = 0.2, 10  # seconds; in `repeats`
REPORT_S = 4.0  # seconds; for figures that are printed, or that a number of drafts is recommended by


@torch.inference_mode()
def measure_costs(
    model: Model,
    *,
    num_speculative_tokens: int,
    batch: int = 1,
    context: int = 256,
    repeats: int = 7,
    min_s: float = _MIN_S,
    backend: str = "auto",
    clock: Clock = time.perf_counter,
) -> Costs:
    """Time trunk passes of 1..K+1 tokens and a chain of K = `num_speculative_tokens` draft steps, in turn.

    Each is timed right after the pass that precedes it in decoding, as that decides what is in the processor's caches:
    a baseline step after another one, a verification after its drafts, drafts after a verification. Each ends with its
    argmax on the host, as in decoding. One repetition before the `repeats` does not count; more follow until `min_s`
    seconds have passed, at most ten times as many.
    Raises ConfigError if the model has no head, or these sizes do not fit it.
    """
    check_sizes(model, num_speculative_tokens=num_speculative_tokens, batch=batch, context=context)
    assert model.head is not None
    engine, k = backend_for(model, backend), num_speculative_tokens
    with engine.trunk.pass_context():
        bench = _Passes(engine, batch, context)
        prepare(bench.trunk, bench.head, batch, k)
    steps, draft = time_passes(bench, k, repeats=repeats, min_s=min_s, clock=clock)
    return Costs(batch, context, steps, draft)


def time_passes(
    passes: "_Passes", k: int, *, repeats: int, min_s: float = _MIN_S, clock: Clock = time.perf_counter
) -> tuple[tuple[Spread, ...], Spread]:
    """Time what `measure_costs` describes; return the passes of 1..k+1 positions and one draft step."""
    verify: list[Pass] = [partial(passes.verify, num) for num in range(k + 2)]
    chains: list[Pass] = [partial(passes.draft, num) for num in range(k + 1)]
    # (pass before, timed pass)
    pairs = [(verify[1], verify[1]), *zip(chains[1:], verify[2:], strict=True), (verify[-1], chains[-1])]
    times: list[list[float]] = [[] for _ in pairs]
    began = clock()
    for repeat in range(_MOST_REPEATS * repeats + 1):
        if repeat > repeats and clock() - began >= min_s:
            break
        for index in rotate(range(len(pairs)), repeat):
            before, timed = pairs[index]
            before()
            started = clock()
            timed()
            if repeat:
                times[index].append(clock() - started)
    *steps, chain = map(Spread.of, times)
    return tuple(steps), Spread(chain.median / k, chain.low / k, chain.high / k, chain.num)


def adaptive_length(
    model: Model, *, limit: int, num_copy_tokens: int = 0, context: int = 256, backend: str = "auto"
) -> AdaptiveLength:
    """Measure the costs on this machine and return the draft length that pays by them, at most `limit` drafts.

    The verification of up to `num_copy_tokens` copies is measured, too. Raises ConfigError as `measure_costs`.
    """
    longest = max(limit, num_copy_tokens)
    costs = measure_costs(model, num_speculative_tokens=longest, context=context, backend=backend)
    return AdaptiveLength(costs, limit=limit)


def check_sizes(model: Model, *, num_speculative_tokens: int, batch: int, context: int) -> None:
    """Raise ConfigError if `measure_costs` cannot run with these sizes."""
    if model.head is None or min(num_speculative_tokens, batch, context) < 1:
        raise ConfigError(
            f"{num_speculative_tokens=}, {batch=}, {context=}: each must be at least 1, and the model needs a head"
        )
    limit = model.trunk.max_length
    if limit is not None and context + num_speculative_tokens + 1 > limit:
        raise ConfigError(
            f"context {context} + {num_speculative_tokens + 1} positions of a round do not fit the model's {limit}; "
            f"expected a context of at most {limit - num_speculative_tokens - 1}"
        )


class _Passes:
    """Caches of `context` positions, and passes over them that are rolled back."""

    def __init__(self, engine: Backend, batch: int, context: int) -> None:
        assert engine.head is not None
        self.trunk, self.head, self.batch, self.context = engine.trunk, engine.head, batch, context
        self.cache = self.trunk.cache(batch)
        self.caches = [self.head.cache(batch, self.cache) for _ in range(self.head.num_modules)]
        self.chain = self.head.chain(self.caches[-1], Sampling(), sampled=True)
        self.plans: dict[int, RoundPlan] = {}
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(self.trunk.vocab_size, (batch, context), generator=generator)
        chunk = min(_CHUNK, self.trunk.max_block_size or _CHUNK)
        for start in range(0, context, chunk):
            tokens = self.tokens[:, start : start + chunk]
            self.states = self.trunk(tokens, self.cache).head_input.clone()
            self.cache.commit([tokens.shape[1]] * batch)
            for index, cache in enumerate(self.caches):
                self.head.step(index, tokens, self.states, cache=cache)
                cache.commit([tokens.shape[1]] * batch)

    def verify(self, num_positions: int) -> list[list[int]]:
        with self.trunk.pass_context():
            tokens = self.tokens[:, :1].expand(-1, num_positions)
            best: list[list[int]] = self.trunk.read(self.trunk(tokens, self.cache)).best
            self.cache.commit([0] * self.batch)
            return best

    def draft(self, k: int) -> list[int]:
        with self.trunk.pass_context():
            return self._draft_stepwise(k) if self.chain is None else self._draft_natively(self.chain, k)

    def _draft_natively(self, chain: DraftChain, k: int) -> list[int]:
        plan = self.plans.setdefault(k, FixedLength(k).plan())
        tokens, limits = [[token] for token in self.tokens[:, 0].tolist()], [k] * self.batch
        drafted, _, _ = chain.run(tokens, list(self.states[:, -1:]), plan, limits=limits, uniforms=None)
        self.caches[-1].rollback_to([self.context] * self.batch)
        return [sequence[-1] for sequence in drafted]

    def _draft_stepwise(self, k: int) -> list[int]:
        tokens, states, recursion = self.tokens[:, 0].tolist(), self.states[:, -1:], None
        for depth in range(1, k + 1):
            if depth <= self.head.num_modules:
                index = self.head.layer_index(depth)
                step = self.head.step(index, torch.tensor(tokens)[:, None], states, cache=self.caches[index])
                self.caches[index].commit([0] * self.batch)
                prediction = self.head.predict(index, step.final_hidden[:, 0])
            else:
                recursion = recursion or self.head.recursion(self.caches[-1], step.next_hidden[:, 0])
                prediction = recursion.step(tokens)
            tokens = prediction.best
        self.caches[-1].rollback_to([self.context] * self.batch)
        return tokens


@dataclass(frozen=True)
class Machine:
    """The machine, the software and the day that figures come from."""

    name: str
    cores: int
    threads: int
    versions: dict[str, str]
    dtype: str
    bandwidth: float  # bytes/s of a copy, read and written
    step_bytes: int  # of weights that a baseline step reads
    draft_bytes: int  # of weights that a draft step reads
    peak_memory: int  # bytes: of the process on a CPU, of torch's allocator on a GPU
    head_bits: int | None = None  # see `Backend.head_bits`
    draft_lm_head_bits: int | None = None  # see `Backend.draft_lm_head_bits`
    weight_bits: int | None = None  # see `Backend.weight_bits`
    kv_cache_dtype: str = "auto"  # see `Trunk.kv_cache_dtype`
    date: str = ""  # YYYY-MM-DD, UTC
    load: float = 0.0  # processes that ran or waited in the last minute, of all users; 0 where not known

    @property
    def busy_note(self) -> str | None:
        """A warning if other work shared the processors."""
        num_cores = os.cpu_count() or self.cores
        if self.load <= num_cores + 1:
            return None
        return (
            f"the machine's load was {self.load:.1f} on {num_cores} cores, so other work shared them and times vary; "
            "measure again when it is idle"
        )

    @classmethod
    def of(cls, model: Model, engine: Backend | None = None) -> "Machine":
        """Describe this machine; call it last, as peak_memory is what was used so far.

        engine: What decoded; None: nothing was decoded, or not with weights that the backend chooses.
        """
        bits = engine or Backend(TorchTrunk(model.trunk), None, weight_bits=WEIGHT_BITS[model.trunk.weights])
        device = model.trunk.device
        peak = peak_memory(device)  # before the bandwidth test, which allocates much
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        versions = {"nextn": __version__, "python": platform.python_version(), "torch": torch.__version__}
        return cls(
            name=gpu or processor_name(),
            cores=available_cores(),
            threads=torch.get_num_threads(),
            versions=versions | {"transformers": transformers.__version__},
            dtype=str(model.trunk.dtype).removeprefix("torch."),
            bandwidth=copy_bandwidth(device),
            step_bytes=step_bytes(model.trunk, bits.weight_bits),
            draft_bytes=0
            if model.head is None
            else draft_bytes(model.head, bits.head_bits, lm_head_bits=bits.draft_lm_head_bits),
            peak_memory=peak,
            head_bits=bits.head_bits,
            draft_lm_head_bits=bits.draft_lm_head_bits,
            weight_bits=bits.weight_bits,
            kv_cache_dtype=model.trunk.kv_cache_dtype,
            date=datetime.now(UTC).date().isoformat(),
            load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        )


def processor_name() -> str:
    """Return the processor, the system, and the instruction sets that the choice of kernels depends on."""
    found = processor()
    sets = " ".join(cast(list[str], found["instruction_sets"]))
    return f"{found['name']} ({platform.system()} {platform.machine()}: {sets})"


def copy_bandwidth(
    device: torch.device, *, num_bytes: int = 2**28, repeats: int = 5, clock: Clock = time.perf_counter
) -> float:
    """Return the median bytes/s, read and written, of copying num_bytes, which should be far larger than the caches."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target, times = torch.empty_like(source), []
    for repeat in range(repeats + 1):
        started = clock()
        target.copy_(source)
        target[-1].item()  # synchronizes with a GPU
        if repeat:
            times.append(clock() - started)
    return 2 * num_bytes / Spread.of(times).median


def step_bytes(trunk: Trunk, bits: int | None = None) -> int:
    """Return the bytes of weights of `bits` (None: as stored) that a pass over one token reads.

    All but those of an embedding that is not tied to the lm_head, and of experts that the router does not choose.
    """
    looked_up = () if trunk.embedding.weight is trunk.output.weight else (trunk.embedding.weight,)
    stored, output = _bytes_read(trunk.model, trunk, looked_up), trunk.output.weight
    packed, rounded = _packed_bytes(trunk.model, trunk, bits)
    if bits is None:
        return packed + stored
    values = stored // output.element_size() + rounded
    # With int4, the lm_head has eight bits (runtime/backend.py).
    four = values - output.numel() if bits == 4 else 0
    return packed + round(four * FOUR_BITS.bytes_per_weight + (values - four) * EIGHT_BITS.bytes_per_weight)


def draft_bytes(
    head: Head, bits: int | None = None, *, num_tokens: int | None = None, lm_head_bits: int | None = None
) -> int:
    """Return the bytes of weights of `bits` that a draft step reads: one MTP layer (their mean) and the lm_head.

    The lm_head has `num_tokens` rows (None: those of the draft vocabulary, else all), of `lm_head_bits` if given.
    """
    looked_up = tuple(part.weight for part in head.modules() if isinstance(part, nn.Embedding))
    own = {id(head.output(index).weight): head.output(index).weight for index in range(head.num_modules)}
    inner = _bytes_read(head, head.trunk, (*looked_up, *own.values()))
    output = head.output(0).weight
    values = (num_tokens or num_draft_rows(head)) * output.shape[1]
    divisor = 1 if bits is None else output.element_size()
    of_values = values * output.element_size() // divisor if lm_head_bits is None else values * FORMAT.bytes_per_weight
    return (
        sum(_packed_bytes(head, head.trunk, bits)) // head.num_modules
        + inner // head.num_modules // divisor
        + round(of_values)
    )


def stacked_experts(module: nn.Module, trunk: Trunk) -> list[tuple[Tensor, float]]:
    """Return the parameters with all routed experts [E, ...], and the share of the experts that a token takes."""
    # Experts are one tensor [experts, ...] in transformers 5.
    found = [value for name, value in module.named_parameters() if ".experts." in f".{name}" and value.ndim == 3]
    return [(value, share) for value in found if (share := _chosen_share(trunk, len(value)))]


def _chosen_share(trunk: Trunk, num_experts: int) -> float:
    """The share of the experts that a token takes; 0 if the config does not tell."""
    return min(1.0, (getattr(trunk.config, "num_experts_per_tok", None) or 0) / num_experts)


def _packed_bytes(module: nn.Module, trunk: Trunk, bits: int | None) -> tuple[int, int]:
    """What a token reads of weights that keep their codes: stored bytes, and fp8 values if these are rounded."""
    kept = rounded = 0.0
    for weight in weights_with_codes(module):
        share = _chosen_share(trunk, len(weight.experts)) or 1.0 if isinstance(weight, StackedCodes) else 1.0
        for matrix in weight.matrices:
            if isinstance(matrix, StoredFp8) and bits in (4, 8):
                rounded += share * matrix.stand_in.numel()
            else:
                kept += share * matrix.num_bytes
    return round(kept), round(rounded)


def _bytes_read(module: nn.Module, trunk: Trunk, without: tuple[Tensor, ...]) -> int:
    skipped, total = {id(weight) for weight in without}, 0.0
    shares = {id(weight): share for weight, share in stacked_experts(module, trunk)}
    for weight in module.parameters():
        if id(weight) not in skipped:
            total += weight.nbytes * shares.get(id(weight), 1.0)
    return round(total)


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: of the allocator on a GPU, else the process's resident set; 0 if not available."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux, bytes on macOS
