"""What a row may say of a head, and what an engine does with it. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

# Hidden state after or before the final norm, or a hyper-connection model's residual streams, not yet collapsed.
Stage = Literal["post", "pre", "streams"]
# A module's token input: the same as of the trunk's layers, or the embedding before the norm that some trunks apply.
Embedded = Literal["normed", "raw"]
# Where a query is that reads the trunk's keys: at its pair's token or hidden state.
TrunkKV = Literal["", "token", "hidden"]
# One module at every depth; distinct modules, each given the last one's hidden state, or all given the trunk's.
Order = Literal["recursive", "chained", "unchained"]
# Runs the head; reads it and has no graph for it; skips it on load; drops it at conversion; refuses to load; does not
# know the family.
Support = Literal["runs", "loads", "ignores", "drops", "refuses", "absent"]
# A missing tensor of the head is an error; is one in an unquantized checkpoint; the same, and a completely missing
# module always is; keeps its initial value without an error; is not known to do either.
Missing = Literal["raises", "unquantized", "module", "silent", "unknown"]

ENGINES = ("vllm", "sglang", "llamacpp", "transformers")
FACTS = ("embedded", "hidden", "next_hidden", "position0", "order", "trunk_kv")


@dataclass(frozen=True)
class EngineSupport:
    """What one engine does with a family's head; None for a convention means that it follows the family's row."""

    support: Support
    source: str  # where in the engine's code this was read
    embedded: Embedded | None = None
    hidden: Stage | None = None
    next_hidden: Stage | None = None
    position0: Literal["keep", "zero"] | None = None
    order: Order | None = None
    trunk_kv: TrunkKV | None = None
    trunk_roles: tuple[str, ...] = ("embedding", "output")  # takes the trunk's tensor, whatever the file holds
    missing: Missing = "unknown"
    unset: tuple[str, ...] = ()  # keep initial values in a file without copies (vLLM: with pipeline parallelism)
    # Its head loader skips the trunk's tensor, so versions that do not pass on the trunk's leave these roles unset.
    skips: tuple[str, ...] = ()
    unquantized: tuple[str, ...] = ()  # roles that it builds unquantized, whatever the config says
    layers: tuple[int, ...] = ()  # the only layer indices that it supports for the head
    modules: int | None = None  # how many it uses at most; None = all
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fp8:
    """How a family publishes fp8: `<name>.weight` is multiplied by its scales in `<name>.<scale>`, one per block."""

    scale: str = "weight_scale_inv"
    block: tuple[int, int] = (128, 128)
    # Roles that stay in the model's own dtype, as norms, routers and biases inside the block always do.
    unquantized: tuple[str, ...] = ("token_norm", "hidden_norm", "projection", "final_norm", "embedding", "output")
