"""The values that a family row can have, and what an engine does with the head. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

# Hidden state after or before the final norm, or a hyper-connection model's residual streams, not yet collapsed.
Stage = Literal["post", "pre", "streams"]
# The embedding that an MTP layer takes: as the trunk's layers take it, or before the norm that some trunks apply to it.
Embedded = Literal["normed", "raw"]
# The position of a query that reads the trunk's keys: that of its pair's token, or that of its hidden state.
TrunkKV = Literal["", "token", "hidden"]
# recursive: one module runs at every depth. chained: each depth has its module, which takes the hidden state of the
# depth before. unchained: each depth has its module, and all take the trunk's hidden state.
Order = Literal["recursive", "chained", "unchained"]
# runs: runs the head. loads: reads it, but has no graph for it. ignores: skips it on load. drops: drops it at
# conversion. refuses: does not load the checkpoint. absent: does not know the family.
Support = Literal["runs", "loads", "ignores", "drops", "refuses", "absent"]
# What an engine does if a tensor of the head is missing. raises: an error. unquantized: an error if the checkpoint is
# unquantized. module: the same, and always an error if a whole module is missing. silent: the initial value stays.
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
