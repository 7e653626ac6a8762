"""Stored form against running form of a block: experts one by one in files, fused in transformers."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_ONE = re.compile(r"(?P<stem>.+\.experts)\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")


def split_experts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`experts.gate_up_proj` [E, 2I, H], `experts.down_proj` [E, H, I] -> `experts.<e>.{gate,up,down}_proj.weight`."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        if name.endswith(".experts.gate_up_proj"):
            stem = name.removesuffix(".gate_up_proj")
            for expert, (gate, up) in enumerate(part.chunk(2) for part in value):
                out |= {f"{stem}.{expert}.gate_proj.weight": gate, f"{stem}.{expert}.up_proj.weight": up}
        elif name.endswith(".experts.down_proj"):
            stem = name.removesuffix(".down_proj")
            out |= {f"{stem}.{expert}.down_proj.weight": part for expert, part in enumerate(value)}
        else:
            out[name] = value
    return out


def fuse_experts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of `split_experts`; a state without single experts comes back as it is."""
    out: dict[str, Tensor] = {}
    found: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, value in state.items():
        match = _ONE.fullmatch(name)
        if match is None:
            out[name] = value
        else:
            found.setdefault(match["stem"], {}).setdefault(match["part"], {})[int(match["expert"])] = value
    for stem, parts in found.items():
        gate, up, down = (
            [parts[part][index] for index in sorted(parts[part])] for part in ("gate_proj", "up_proj", "down_proj")
        )
        out[f"{stem}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        out[f"{stem}.down_proj"] = torch.stack(down)
    return out
