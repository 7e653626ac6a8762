"""Parts of a head by name, of which some are trained and the others frozen. Imports no torch."""

import re
from collections import defaultdict
from collections.abc import Iterable

from nextn.errors import ConfigError

# Patterns of parameter names in `Head`; the first that matches decides.
_PATTERNS = {
    "experts": r"\.experts\.",
    "router": r"\.gate\.weight$",
    "hyper_connections": r"_hc\.|hyper_connection|\.collapse",
    "norms": r"norm",
    "eh_proj": r"^stack\.\d+\.(token_|hidden_)?projection\.",
    "embed_tokens": r"^stack\.\d+\.embedding\.",
    "lm_head": r"^stack\.\d+\.output\.",
    "mlp": r"\.(mlp|mlp_sconv|shared_experts)\.",
    "attention": r"\.(\w*attn|attn_sconv|mixer)\.",
}
PARTS = (*_PATTERNS, "other")  # other: parameters of layers with names of their own


def part_of(name: str) -> str:
    """Return the part that a parameter of `Head` belongs to, by its name."""
    return next((part for part, pattern in _PATTERNS.items() if re.search(pattern, name)), "other")


def frozen_parameters(names: Iterable[str], trained_parts: str) -> list[str]:
    """Return those of a head's parameters that are in none of the comma-separated parts; none if that is empty.

    Raises ConfigError for a part that this head does not have.
    """
    by_part: dict[str, list[str]] = defaultdict(list)
    for name in names:
        by_part[part_of(name)].append(name)
    trained = {part.strip() for part in trained_parts.split(",")} if trained_parts else set(by_part)
    if unknown := sorted(trained - by_part.keys()):
        parts = ", ".join(part for part in PARTS if part in by_part)
        raise ConfigError(
            f"trained_parts = {trained_parts}: this head has no part {unknown[0]!r}; its parts are {parts}"
        )
    return [name for part, own in by_part.items() if part not in trained for name in own]
