"""Experts of a mixture-of-experts layer that are loaded a few at a time while they run, never all together."""

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from nextn.checkpoint.mapped_memory import release_pages
from nextn.checkpoint.tensors import is_finite
from nextn.errors import CheckpointError

_MAX_BYTES = 2**30  # of one layer's experts together; those of larger layers are loaded a few at a time
STACKED = re.compile(r"(^|\.)experts\.\w+$")  # all experts in one parameter, in names of the model
EXPERT = re.compile(r"\.experts\.(\d+)\.")  # in stored names

# Yields (first, end) of a few experts of a module at a time, while the module's parameters hold only these.
# Closing the iterator restores them, and ends what reads ahead.
ExpertGroups = Callable[[nn.Module], Generator[tuple[int, int], None, None]]


def separable_experts(layer: nn.Module, implementation: str | None) -> Any:
    """Return the module with a layer's experts if they are too large to be loaded together; None if they are not.

    implementation: Of experts, in the model's config: `eager` modules compute in other ways.
    """
    size = sum(value.nbytes for name, value in layer.named_parameters() if STACKED.search(name))
    # `has_gate`: transformers' own implementations compute all experts alike, each token's sum at the end.
    found = [part for part in layer.modules() if hasattr(part, "has_gate")]
    return found[0] if size > _MAX_BYTES and len(found) == 1 and implementation != "eager" else None


def run_in_groups(experts: Any, groups: ExpertGroups, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute what `experts` does for states [N, H], chosen experts [N, K] and weights [N, K].

    The bits are the same where torch computes with one thread; more divide elementwise operations by their size.
    """
    results, num_experts = None, experts.num_experts
    with closing(groups(experts)) as parts:
        try:
            for first, end in parts:
                token, place = ((chosen >= first) & (chosen < end)).nonzero(as_tuple=True)
                if len(token):
                    experts.num_experts = end - first
                    rows, numbers = states[token], (chosen[token, place] - first)[:, None]
                    part = type(experts).forward(experts, rows, numbers, torch.ones_like(rows[:, :1]))
                    if results is None:
                        results = part.new_zeros(*chosen.shape, part.shape[-1])
                    results[token, place] = part
        finally:
            experts.num_experts = num_experts
    assert results is not None
    return (results * weights[..., None]).sum(dim=1).to(states.dtype)


def check_finite(what: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for loaded values that are not finite."""
    loaded = {name: value for name, value in tensors.items() if value.is_floating_point() and not value.is_meta}
    bad = [name for name, value in loaded.items() if not is_finite(value)]
    release_pages(loaded.values())
    if bad:
        raise CheckpointError(f"{what}: {len(bad)} tensors hold NaN or Inf: {', '.join(bad[:8])}")
