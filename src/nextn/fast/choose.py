"""Which path a model decodes on: the fast one where it can be recorded and says what the plain one says, else plain."""

from dataclasses import dataclass

import torch

from nextn.errors import ConfigError
from nextn.fast.engine import FastHead, FastRecursion, FastTrunk
from nextn.fast.locks import LOCK
from nextn.fast.native import load
from nextn.fast.quantized import BITS
from nextn.fast.tape import Unrecordable
from nextn.fast.weights import Weights
from nextn.head import Head, Recursion
from nextn.settings import PATHS
from nextn.trunk import Trunk

# What decoding is given, whichever path it is on.
AnyTrunk = Trunk | FastTrunk
AnyHead = Head | FastHead
AnyRecursion = Recursion | FastRecursion

# How far hidden states may be from the plain path's, relative to their size: many roundings, and no wrong column.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
_WINDOWS = (7, 1, 3)  # columns: what a prefill, a plain step and a verification look like


@dataclass(frozen=True, eq=False)
class Engine:
    """What decoding runs on. reason: why it is the plain path; empty on the fast one. runtime: what runs the passes."""

    trunk: AnyTrunk
    head: AnyHead | None
    reason: str = ""
    runtime: str = "torch"
    head_bits: int | None = None  # of each weight that drafts are made by; None: all that it has

    @property
    def path(self) -> str:
        return "plain" if self.reason else "fast"


def engine(trunk: Trunk, head: Head | None, *, path: str = "auto") -> Engine:
    """path: `auto` takes the fast path where it can; `fast` raises ConfigError where it cannot; `plain` never does.

    The fast path is the native runtime, which runs on CPUs; on other devices torch decodes. It keeps a packed copy of
    the weights: after they change or move, it must be made anew. Several threads may use it.
    """
    if path not in PATHS:
        raise ConfigError(f"path = {path!r}; expected one of {', '.join(PATHS)}")
    if path == "plain":
        return Engine(trunk, head, "the plain path was asked for")
    try:
        with LOCK:
            return _fast(trunk, head)
    except (ConfigError, Unrecordable) as error:
        if path == "fast":
            raise ConfigError(f"no fast path: {error}") from error
        return Engine(trunk, head, str(error))


def _fast(trunk: Trunk, head: Head | None) -> Engine:
    if trunk.device.type != "cpu":
        raise Unrecordable(f"the native runtime runs on CPUs, the model is on {trunk.device}")
    made = _native(trunk, head)
    _check(trunk, head, made)
    return made


@torch.inference_mode(False)  # what is made here outlives the caller's mode
def _native(trunk: Trunk, head: Head | None) -> Engine:
    if trunk.dtype not in (torch.float32, torch.bfloat16):
        raise Unrecordable(f"{trunk.dtype} has no native runtime on CPUs; float32 and bfloat16 do")
    runtime = load()
    weights = Weights(runtime)
    fast = FastTrunk(trunk, runtime, weights)
    if head is None:
        return Engine(fast, None, runtime="native code")
    rounds = not head.exact and trunk.dtype == torch.bfloat16 and runtime.multiplies_pairs
    own = Weights(runtime, rounds=True) if rounds else weights
    made = FastHead(head, fast, runtime, own, own_output=rounds)
    return Engine(fast, made, runtime="native code", head_bits=BITS if rounds else None)


@torch.inference_mode()
def _check(trunk: Trunk, head: Head | None, made: Engine) -> None:
    """Raises Unrecordable where the two paths differ: a model may do what no recording can show."""
    generator = torch.Generator().manual_seed(0)
    caches = trunk.cache(1), made.trunk.cache(1)
    head_caches = None if head is None or made.head is None else (head.cache(1), made.head.cache(1))
    for columns in _WINDOWS:
        tokens = torch.randint(trunk.vocab_size, (1, columns), generator=generator)
        plain, fast = trunk(tokens, caches[0]), made.trunk(tokens, caches[1])
        _compare(plain.normed, fast.normed, "the trunk")
        for cache in caches:
            cache.keep([columns])
        if head is not None and made.head is not None and head_caches is not None:
            states = plain.eaten.clone()
            one = head.step(0, tokens, states, cache=head_caches[0])
            other = made.head.step(0, tokens, states, cache=head_caches[1])
            _compare(one.normed, other.normed, "the head")
            for cache in head_caches:
                cache.keep([columns])


def _compare(plain: torch.Tensor, fast: torch.Tensor, what: str) -> None:
    # Of each column; the median, because in bf16 a near-tie of a router may send one to another expert.
    apart = (plain - fast).float().norm(dim=-1) / plain.float().norm(dim=-1).clamp_min(1e-6)
    if not float(apart.median()) <= _TOLERANCE[plain.dtype]:
        raise Unrecordable(f"{what} recorded says something else than run plainly (off by {float(apart.median()):.2g})")
