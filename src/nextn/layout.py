"""Stored form against running form of a block: experts one by one or stacked in files, fused in transformers."""

import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Form = Literal["split", "fused", "stacked"]
_RUNNING = re.compile(r"(?P<stem>.+\.experts)\.(?P<part>gate_up_proj|up_proj|down_proj)")
_STORED = re.compile(r"(?P<stem>.+\.experts)\.(?:(?P<expert>\d+)\.)?(?P<part>gate_proj|up_proj|down_proj)\.weight")


def split_experts(state: Mapping[str, Tensor], form: Form = "split") -> dict[str, Tensor]:
    """`experts.gate_up_proj` [E, 2I, H], or `experts.up_proj` where there is no gate, and `experts.down_proj` [E, H, I]
    -> `experts.<e>.{gate,up,down}_proj.weight` for split, `experts.{gate,up,down}_proj.weight` [E, ...] for stacked."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        match = None if form == "fused" else _RUNNING.fullmatch(name)
        if match is None:
            out[name] = value
            continue
        fused = match["part"] == "gate_up_proj"
        parts = zip(("gate_proj", "up_proj"), value.chunk(2, dim=1), strict=True) if fused else [(match["part"], value)]
        for part, experts in parts:
            if form == "stacked":
                out[f"{match['stem']}.{part}.weight"] = experts
            else:
                out |= {f"{match['stem']}.{index}.{part}.weight": expert for index, expert in enumerate(experts)}
    return out


def fuse_experts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of `split_experts`, whatever the form; a state without experts comes back as it is."""
    out: dict[str, Tensor] = {}
    found: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, value in state.items():
        match = _STORED.fullmatch(name)
        if match is None:
            out[name] = value
        else:
            found.setdefault(match["stem"], {}).setdefault(match["part"], {})[int(match["expert"] or -1)] = value
    for stem, parts in found.items():
        whole = {
            part: experts[-1] if -1 in experts else torch.stack([experts[index] for index in sorted(experts)])
            for part, experts in parts.items()
        }
        if "gate_proj" in whole:
            whole["gate_up_proj"] = torch.cat([whole.pop("gate_proj"), whole.pop("up_proj")], dim=1)
        out |= {f"{stem}.{part}": value for part, value in whole.items()}
    return out
