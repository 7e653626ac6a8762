"""How to decode, as plain values that are checked on construction.

Imports no torch, so that the command line rejects a wrong value at once.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from operator import index

from nextn.errors import ConfigError, require_at_least, require_type

BACKENDS = ("auto", "native", "torch")
WEIGHT_BITS = {"stored": None, "int8": 8, "int4": 4}
WEIGHTS = tuple(WEIGHT_BITS)  # what products use, see `Trunk.weights`
KV_CACHE_DTYPES = ("auto", "int8")  # see `Trunk.kv_cache_dtype`


def check_prompts(prompts: object) -> None:
    """Raise ConfigError for one text, whose characters would be prompts, and for what is no list of prompts."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise ConfigError(f"prompts is {prompts!r:.60}; expected a list of texts or of token ids, such as ['def add(']")


def prompt_ids(prompt: object) -> tuple[int, ...]:
    """Return the token ids of a prompt that is not text. Raises ConfigError for anything else."""
    try:
        return tuple(map(index, prompt))  # type: ignore[call-overload]
    except TypeError as error:
        raise ConfigError(
            f"a prompt is {prompt!r:.60}; expected text or a list of token ids. Messages: render them by the "
            "tokenizer's apply_chat_template, or give one user message as text with chat=True"
        ) from error


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Sampling:
    """How logits become probabilities; the defaults are greedy decoding. Raises ConfigError on a value out of range.

    Attributes:
        temperature: 0 is greedy.
        top_k: Keep this many tokens; 0: all.
        top_p: Keep the most likely tokens that together have this probability; 1: all.
        min_p: Keep tokens with at least this share of the largest probability; 0: all.
        repetition_penalty: As in transformers; 1: none.

    Example:
        >>> nextn.Sampling(temperature=0.7, top_p=0.9).top_k
        0
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        rules = {
            # below 1e-4, logits / temperature can overflow float32
            "temperature": (self.temperature == 0 or 1e-4 <= self.temperature < inf, "0 (greedy) or at least 1e-4"),
            "top_k": (isinstance(self.top_k, int) and 0 <= self.top_k < 2**31, "0 (off) or a positive whole number"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            "min_p": (0 <= self.min_p <= 1, "from 0 (off) to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < inf, "above 0 and finite (1 is off)"),
        }
        wrong = [f"{name}={getattr(self, name)} must be {valid}" for name, (ok, valid) in rules.items() if not ok]
        if wrong:
            raise ConfigError("; ".join(wrong))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def needs_seen(self) -> bool:
        return self.repetition_penalty != 1


_MAX_DRAFTS = 1024  # of one round: passes are compiled and buffers made for each number of them


@dataclass(frozen=True)
class Contract:
    """The clauses of the engine contract on how a head is run. The defaults are right; each change injects a fault."""

    prefill: bool = True  # the head's cache is filled over the whole prompt
    refresh: bool = True  # the head runs over accepted positions again, with the trunk's true hidden states
    # The head's input at position i is (t_{i+1}, h_{i+offset}); 0 or -1. With +1 it can be scored (`teacher_forced`),
    # but not drafted, as that state is not known yet.
    offset: int = 0


@dataclass(frozen=True)
class Settings:
    """Options of decoding. Raises ConfigError on values out of range.

    Attributes:
        num_speculative_tokens: K, the draft tokens of a round; 0: plain decoding.
        num_copy_tokens: The most tokens that a round copies from the sequence's own text as drafts; 0: none.
        p_min: A round drafts on only while the head is at least this confident.
        sampling: Of the trunk and the head.
        sampled_drafts: Sample drafts from the head's distribution, else take its argmax.
        block_verification: Verify a round's drafts jointly, which accepts more of them.
        max_tokens: New tokens per sequence.
        eos: Token ids that end a sequence; None: the checkpoint's (in `rounds`: none).
        seed: Each sequence has its own generator.
        chunk: Positions per prefill pass.
        contract: How the head is run; changes of the default inject a fault.

    Example:
        >>> settings = nextn.Settings(num_speculative_tokens=3, sampling=nextn.Sampling(1.0), max_tokens=64)
        >>> settings.sampled_drafts
        True
    """

    num_speculative_tokens: int = 4
    num_copy_tokens: int = 0
    p_min: float = 0.0
    sampling: Sampling = field(default_factory=Sampling)
    sampled_drafts: bool = True
    block_verification: bool = True
    max_tokens: int = 256
    eos: tuple[int, ...] | None = None
    seed: int = 0
    chunk: int = 512
    contract: Contract = field(default_factory=Contract)

    def __post_init__(self) -> None:
        require_at_least(self, _MAX_DRAFTS, num_speculative_tokens=0, num_copy_tokens=0)
        require_at_least(self, max_tokens=1, chunk=1)
        require_type("sampling", self.sampling, Sampling, "nextn.Sampling(temperature)")
        require_type("eos", self.eos, (tuple, list, type(None)), "token ids, such as (2,), or None")
        require_at_least(self, 2**63 - 1, seed=-(2**63))
        if self.contract.offset not in (0, -1):
            raise ConfigError(f"contract.offset = {self.contract.offset}; expected 0 or -1")
