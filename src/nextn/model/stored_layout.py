"""A head's own state to the layout that its family stores, and back: experts and gates, fused or one by one."""

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nextn.family_table import ExpertForm
from nextn.model.head import Head

_RUNNING = re.compile(r"(?P<stem>.+\.experts)\.(?P<part>gate_up_proj|up_proj|down_proj)")
_STORED = re.compile(r"(?P<stem>.+\.experts)\.(?:(?P<expert>\d+)\.)?(?P<part>gate_proj|up_proj|down_proj)\.weight")


def to_stored_layout(head: Head, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the head's own state, by canonical name, to the family's stored layout; undone by `to_runtime_layout`."""
    state = _join_gate_up(state, head.family.interleaved_gate_up, _interleaved)
    state = _split_gate_up(state, head.family.separate_gate_up, lambda rows: rows.chunk(2))
    return split_experts(state, head.family.experts)


def to_runtime_layout(head: Head, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state = _split_gate_up(state, head.family.interleaved_gate_up, lambda rows: (rows[0::2], rows[1::2]))
    return _join_gate_up(fuse_experts(state), head.family.separate_gate_up, torch.cat)


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


def _join_gate_up(
    state: Mapping[str, Tensor], paths: Sequence[str], join: Callable[[list[Tensor]], Tensor]
) -> dict[str, Tensor]:
    """Join `block.<path>.gate_proj.weight` and `up_proj` [I, H] to `gate_up_proj` [2I, H]."""
    out = dict(state)
    for stem in _stems(state, paths, "gate_proj.weight"):
        out[f"{stem}gate_up_proj.weight"] = join([out.pop(f"{stem}{part}_proj.weight") for part in ("gate", "up")])
    return out


def _split_gate_up(
    state: Mapping[str, Tensor], paths: Sequence[str], split: Callable[[Tensor], Sequence[Tensor]]
) -> dict[str, Tensor]:
    """Split `block.<path>.gate_up_proj.weight` [2I, H] into `gate_proj` and `up_proj` [I, H]."""
    out = dict(state)
    for stem in _stems(state, paths, "gate_up_proj.weight"):
        gate, up = split(out.pop(f"{stem}gate_up_proj.weight"))
        out |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
    return out


def _stems(state: Mapping[str, Tensor], paths: Sequence[str], part: str) -> list[str]:
    ends = tuple(f".block.{path}.{part}" for path in paths)
    return [name.removesuffix(part) for name in state if name.endswith(ends)]


def _interleaved(pair: list[Tensor]) -> Tensor:
    """Return the rows of both, alternating."""
    return torch.stack(pair, dim=1).flatten(0, 1)
