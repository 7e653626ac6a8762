"""How to decode, as plain values that are checked where they are made. Imports no torch, so that the command line
refuses a wrong value at once."""

from dataclasses import dataclass, field
from math import inf

from nextn.errors import ConfigError, need_whole

PATHS = ("auto", "fast", "plain")


@dataclass(frozen=True)
class Sampling:
    """How a law is made from logits. The defaults are greedy decoding; raises ConfigError on a value out of range."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        rules = {
            # below 1e-4, logits / temperature can overflow float32
            "temperature": (self.temperature == 0 or 1e-4 <= self.temperature < inf, "0 (greedy) or at least 1e-4"),
            "top_k": (isinstance(self.top_k, int) and self.top_k >= 0, "0 (off) or a positive whole number"),
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


@dataclass(frozen=True)
class Contract:
    """What an engine must get right besides the family's facts. The defaults are right; each change plants one fault.

    prefill: the head's cache is filled over the whole prompt. rerun: kept columns run again with the trunk's true
    hidden states. offset: the pair at column i is (t_{i+1}, h_{i+offset}); 0 or -1. +1 can be scored, see `columns`,
    and not drafted with: that state is not known then.
    """

    prefill: bool = True
    rerun: bool = True
    offset: int = 0


@dataclass(frozen=True)
class Settings:
    """drafts: K, 0 = plain decoding. p_min: a round drafts on only while the head is that sure. sampled_drafts: draw
    drafts from q, else take its argmax. block: judge the drafts of a round together, which keeps more of them.

    max_tokens: new tokens per row. eos: token ids that end a row; None: the checkpoint's in `generate` and `stream`,
    none in `rounds`. chunk: columns per prefill pass. Raises ConfigError on values out of range.
    """

    drafts: int = 4
    p_min: float = 0.0
    sampling: Sampling = field(default_factory=Sampling)
    sampled_drafts: bool = True
    block: bool = True
    max_tokens: int = 256
    eos: tuple[int, ...] | None = None
    seed: int = 0
    chunk: int = 512
    contract: Contract = field(default_factory=Contract)

    def __post_init__(self) -> None:
        need_whole(self, drafts=0, max_tokens=1, chunk=1)
        if self.contract.offset not in (0, -1):
            raise ConfigError(f"contract.offset = {self.contract.offset}; expected 0 or -1")
