"""The forms in which files store a layer's experts, and what a tensor in one form is in another. No torch.

`split`: `experts.<e>.{gate,up,down}_proj.weight`, one tensor per expert and matrix. `fused`: `experts.gate_up_proj`
[E, 2I, H] and `experts.down_proj` [E, H, I], the parameters of transformers' modules; without gates `experts.up_proj`
[E, I, H]. `stacked`: `experts.{gate,up,down}_proj.weight` [E, ...], in MLX `switch_mlp.*`. Trunk and head may have
different forms.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from nextn.checkpoint.safetensors_file import TensorInfo
from nextn.family_table.spec import ExpertForm

_PATH = re.compile(
    r"(?P<stem>(?:.+\.)?(?:experts|switch_mlp))\.(?:(?P<number>\d{1,6})\.)?(?P<part>gate_up_proj|gate_proj|up_proj|down_proj)"
    r"(?P<suffix>|(?!\.weight\d)[._].+)"
)
_MAX_EXPERTS = 65_536  # of one tensor; published models have at most 1,024


@dataclass(frozen=True, slots=True)
class ExpertPath:
    """A tensor of a layer's experts: `<stem>[.<number>].<part><suffix>`."""

    stem: str  # with `experts` at its end
    number: int | None  # of the expert; None for all of them
    part: str  # gate_proj, up_proj, down_proj or gate_up_proj
    suffix: str  # what follows in the split form: `.weight`, `.weight_scale_inv`, ...
    form: ExpertForm

    @property
    def halves(self) -> tuple[str, ...]:
        """The matrices of one expert in this tensor."""
        return ("gate_proj", "up_proj") if self.part == "gate_up_proj" else (self.part,)

    def name(self) -> str:
        """Return the path."""
        number = "" if self.number is None else f".{self.number}"
        suffix = self.suffix.removeprefix(".weight") if self.form == "fused" else self.suffix
        return f"{self.stem}{number}.{self.part}{suffix}"

    def of_expert(self, number: int, part: str) -> str:
        """Return the path of one expert's matrix in the split form."""
        return f"{self.stem}.{number}.{part}{self.suffix}"

    def all_in(self, form: ExpertForm, *, gated: bool = True) -> str:
        """Return the path of the tensor with all experts, fused or stacked, that this one is a part of."""
        fused = form == "fused"
        part = "gate_up_proj" if fused and gated and self.part in ("gate_proj", "up_proj") else self.part
        return replace(self, number=None, part=part, form=form).name()


def expert_path(path: str) -> ExpertPath | None:
    """Parse a path in a decoder layer, of the running model; None for a tensor that is not of experts."""
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    stem, number, part, suffix = match.group("stem", "number", "part", "suffix")
    stem = stem.replace("switch_mlp", "experts")
    if number is not None:
        return None if part == "gate_up_proj" else ExpertPath(stem, int(number), part, suffix, "split")
    if suffix.startswith("."):
        return None if part == "gate_up_proj" else ExpertPath(stem, None, part, suffix, "stacked")
    return None if part == "gate_proj" else ExpertPath(stem, None, part, f".weight{suffix}", "fused")


def expert_forms(paths: Iterable[str]) -> frozenset[ExpertForm]:
    """Return the forms of the experts among these paths."""
    return frozenset(found.form for path in paths if (found := expert_path(path)) is not None)


def split_view(path: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """Yield path and tensor of each expert's matrices in the split form, parts of the stored one; else that tensor.

    A part has the name of the tensor that holds it. A tensor whose shape does not divide so is yielded as it is.
    """
    found = expert_path(path)
    halves = 1 if found is None else len(found.halves)
    count, *shape = info.shape or (0,)
    if found is None or found.form == "split" or not 0 < count <= _MAX_EXPERTS or (shape and shape[0] % halves):
        yield path, info
        return
    shape = [shape[0] // halves, *shape[1:]] if shape else []
    size, rest = divmod(info.nbytes, count * halves)
    if rest or (halves > 1 and not shape):
        yield path, info
        return
    for number in range(count):
        for place, part in enumerate(found.halves):
            begin = info.begin + (number * halves + place) * size
            yield found.of_expert(number, part), replace(info, shape=tuple(shape), begin=begin, end=begin + size)
