"""Convert a block between files and transformers: experts, and gate and up projections, stored differently."""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nextn.family_table import ExpertForm

_RUNNING = re.compile(r"(?P<stem>.+\.experts)\.(?P<part>gate_up_proj|up_proj|down_proj)")
_STORED = re.compile(r"(?P<stem>.+\.experts)\.(?:(?P<expert>\d+)\.)?(?P<part>gate_proj|up_proj|down_proj)\.weight")


def split_experts(state: Mapping[str, Tensor], form: ExpertForm = "split") -> dict[str, Tensor]:
    """Convert transformers' fused experts to the form of the files.

    From `experts.gate_up_proj` [E, 2I, H], or `experts.up_proj` where there is no gate, and `experts.down_proj`
    [E, H, I] to `experts.<e>.{gate,up,down}_proj.weight` (split) or `experts.{gate,up,down}_proj.weight` [E, ...]
    (stacked).
    """
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
    """Invert `split_experts` for any form; a state without experts is returned unchanged."""
    out: dict[str, Tensor] = {}
    experts_by_stem: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, value in state.items():
        match = _STORED.fullmatch(name)
        if match is None:
            out[name] = value
        else:
            experts_by_stem.setdefault(match["stem"], {}).setdefault(match["part"], {})[int(match["expert"] or -1)] = (
                value
            )
    for stem, parts in experts_by_stem.items():
        fused = {
            part: experts[-1] if -1 in experts else torch.stack([experts[index] for index in sorted(experts)])
            for part, experts in parts.items()
        }
        if "gate_proj" in fused:
            fused["gate_up_proj"] = torch.cat([fused.pop("gate_proj"), fused.pop("up_proj")], dim=1)
        out |= {f"{stem}.{part}": value for part, value in fused.items()}
    return out


def interleave(state: Mapping[str, Tensor], paths: Sequence[str]) -> dict[str, Tensor]:
    """Combine `block.<path>.gate_proj.weight` and `up_proj` [I, H] to `gate_up_proj` [2I, H], rows alternating."""
    out = dict(state)
    for name in [name for name in state if _matches(name, paths, "gate_proj.weight")]:
        stem = name.removesuffix("gate_proj.weight")
        pair = [out.pop(f"{stem}{part}_proj.weight") for part in ("gate", "up")]
        out[f"{stem}gate_up_proj.weight"] = torch.stack(pair, dim=1).flatten(0, 1)
    return out


def deinterleave(state: Mapping[str, Tensor], paths: Sequence[str]) -> dict[str, Tensor]:
    """Invert `interleave`."""
    out = dict(state)
    for name in [name for name in state if _matches(name, paths, "gate_up_proj.weight")]:
        stem, rows = name.removesuffix("gate_up_proj.weight"), out.pop(name)
        out |= {f"{stem}gate_proj.weight": rows[0::2], f"{stem}up_proj.weight": rows[1::2]}
    return out


def split_gate_up(state: Mapping[str, Tensor], paths: Sequence[str]) -> dict[str, Tensor]:
    """Split `block.<path>.gate_up_proj.weight` [2I, H] into `gate_proj` and `up_proj` [I, H]."""
    out = dict(state)
    for name in [name for name in state if _matches(name, paths, "gate_up_proj.weight")]:
        gate, up = out.pop(name).chunk(2)
        stem = name.removesuffix("gate_up_proj.weight")
        out |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
    return out


def concat_gate_up(state: Mapping[str, Tensor], paths: Sequence[str]) -> dict[str, Tensor]:
    """Invert `split_gate_up`."""
    out = dict(state)
    for name in [name for name in state if _matches(name, paths, "gate_proj.weight")]:
        stem = name.removesuffix("gate_proj.weight")
        out[f"{stem}gate_up_proj.weight"] = torch.cat([out.pop(f"{stem}{part}_proj.weight") for part in ("gate", "up")])
    return out


def _matches(name: str, paths: Sequence[str], part: str) -> bool:
    return any(name.endswith(f".block.{path}.{part}") for path in paths)
