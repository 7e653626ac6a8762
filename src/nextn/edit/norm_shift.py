"""Shift norm weights of a head by a whole number, where a converter or an engine has another convention for them."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import FLOATS, floats
from nextn.edit.plan import Piece
from nextn.errors import CheckpointError, ConfigError
from nextn.text_format import counted, some

_BF16_ROUNDING = 2.0**-9  # of a value, at most
NEGATIVE = 0.2  # share of negative weights of one norm that shows weights less 1; a trained norm has hardly any
_NORM_WEIGHT = re.compile(r"norm\w*(\.m)?\.weight$")
_SHIFT = re.compile(r"(add|subtract)-([12])(?::(.+))?")


@dataclass(frozen=True)
class NormWeightShift:
    """What to add to norm weights of a head."""

    offset: int
    names: tuple[str, ...] = ()  # of the tensors; () for all norm weights of the head

    @classmethod
    def parse(cls, text: str) -> "NormWeightShift":
        """Read add-1, subtract-1, add-2 or subtract-2, and after a colon tensor names joined by commas."""
        match = _SHIFT.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"norm weights: {text}; expected add-1, subtract-1, add-2 or subtract-2, for single tensors followed "
                "by a colon and their names, joined by commas"
            )
        sign = 1 if match[1] == "add" else -1
        return cls(sign * int(match[2]), tuple(match[3].split(",")) if match[3] else ())

    def __str__(self) -> str:
        return f"{'add' if self.offset > 0 else 'subtract'}-{abs(self.offset)}"

    def chosen(self, head: Inventory) -> set[str]:
        """Return the names of the head's norm weights to shift. Raises ConfigError for a name that is none of them."""
        all_names = {name for canonical, name in head.stored.items() if is_norm_weight(canonical)}
        if unknown := sorted({*self.names} - all_names):
            raise ConfigError(
                f"{head.checkpoint.path}: {some(unknown)} {'is' if len(unknown) == 1 else 'are'} no norm weight of the "
                f"head; it has {some(sorted(all_names), 8)}"
            )
        return {*self.names} or all_names


def shifted(fresh: Mapping[str, Piece], head: Inventory, shift: NormWeightShift) -> tuple[dict[str, Piece], str]:
    """Return the pieces of a head with the norm weights shifted, and a note on what changes."""
    names = shift.chosen(head)
    if shift.offset < 0:
        _refuse_lost_bits(head.checkpoint, sorted(names), shift)
    pieces = {name: replace(piece, edit=shift_fn(piece.info.dtype, shift.offset)) if piece.name in names else piece
              for name, piece in fresh.items()}  # fmt: skip
    change = "without loss" if shift.offset < 0 else "values near 0 are rounded"
    return pieces, (
        f"{shift} on {counted(len(names), 'norm weight')} of the head, in fp32 rounded to their dtype: {change}"
    )


def _refuse_lost_bits(checkpoint: Checkpoint, names: Iterable[str], by: NormWeightShift) -> None:
    """Raise CheckpointError for weights that the shift changes by more than bf16 itself rounds.

    Float32 in the file would not keep them: vLLM, SGLang and transformers load norm weights in the model's dtype.
    """
    worst: dict[str, tuple[float, float]] = {}  # name -> the largest relative change, and the weight
    for name in names:
        dtype, data = checkpoint.info(name).dtype, checkpoint.read_bytes(name)
        shift = shift_fn(dtype, by.offset)
        stored, shifted = (floats(each, dtype).astype(np.float64) for each in (data, shift(data)))
        change = np.abs(shifted - by.offset - stored) / np.where(stored == 0, 1, np.abs(stored))
        largest = int(change.argmax())
        if change[largest] > _BF16_ROUNDING:
            worst[name] = float(change[largest]), float(stored[largest])
    if worst:
        name, (lost, value) = max(worst.items(), key=lambda item: item[1])
        raise CheckpointError(
            f"{checkpoint.path}: --norm-weights {by} would change {some([*worst])} beyond rounding, by up to "
            f"{lost:.1%} ({value:.4g} in {name}): near 0, w - {-by.offset} has fewer bits than w. Keep the head in a "
            "layout that stores w, or train a head in the other one"
        )


def is_norm_weight(canonical: str) -> bool:
    """Whether a tensor of the head is a norm weight, which some families store as w for 1 + w."""
    return _NORM_WEIGHT.search(canonical) is not None


def stores_less_one(head: Inventory) -> bool:
    """Whether norm weights of the head are stored as w for 1 + w: then those below 1 are negative, and no others."""
    infos = [head.info(canonical) for canonical in head.stored if is_norm_weight(canonical)]
    stored = (floats(head.checkpoint.read_bytes(info.name), info.dtype) for info in infos if info.dtype in FLOATS)
    return any((values < 0).mean() > NEGATIVE for values in stored)


def shift_fn(dtype: str, offset: float) -> Callable[[bytes], bytes]:
    """Return a function that adds `offset` to values given as bytes, rounding to nearest even.

    Raises CheckpointError for dtypes other than BF16, F16 and F32.
    """
    if dtype not in FLOATS:
        raise CheckpointError(f"a norm weight is {dtype}; only BF16, F16 and F32 can be shifted")

    def shift(data: bytes) -> bytes:
        values = floats(data, dtype) + np.float32(offset)
        if dtype != "BF16":
            return values.astype(FLOATS[dtype]).tobytes()
        bits = values.view("<u4")
        return bytes(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2"))

    return shift
