"""Experts that compute nothing (LongCat-Flash): transformers has rows for them in `gate_up_proj`, and no file has."""

from collections.abc import Mapping
from typing import TypeVar, cast

from torch import nn

Value = TypeVar("Value")
_FIRST = (".experts.0.gate_proj.weight", ".experts.0.up_proj.weight")


def with_idle(state: Mapping[str, Value], config: object) -> dict[str, Value]:
    """The stored tensors, and any for the experts that have none: `cut_idle` takes them away again."""
    out, first = dict(state), getattr(config, "n_routed_experts", 0)
    likes = [name for name in state if name.endswith(_FIRST)]
    for expert in range(first, first + (getattr(config, "zero_expert_num", None) or 0)):
        out |= {name.replace(".experts.0.", f".experts.{expert}."): state[name] for name in likes}
    return out


def cut_idle(model: nn.Module) -> None:
    """Leave the rows of the experts that compute something: the others are never read."""
    for part in model.modules():
        rows = getattr(part, "gate_up_proj", None)
        if getattr(part, "zero_expert_num", 0) and isinstance(rows, nn.Parameter):
            part.gate_up_proj = nn.Parameter(rows.detach()[: cast(int, part.num_routed_experts)].clone())
