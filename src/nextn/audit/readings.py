"""What the value rules look at: whole norm gains and windows of matrices of head and trunk, read side by side, once.

At most about 130 reads of a checkpoint of any size; packed integers are left undecoded.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nextn.audit.gains import Norm
from nextn.checkpoints.inventory import Inventory
from nextn.checkpoints.provenance import spread
from nextn.checkpoints.storage import split_name
from nextn.checkpoints.tensor_file import TensorInfo

WHOLE = 256 * 1024  # bytes: no norm is longer
WINDOW = 4096
# How many tensors are read: of the head, of the trunk; layers for each kind of norm, of the last so many.
HEAD_NORMS, HEAD_MATRICES, TRUNK_MATRICES, LAYERS, LATE = 40, 48, 16, 4, 16
# Norms of other things than one hidden state: their gains cross 0 in published weights (mlx-vlm#2041).
_OTHER_NORMS = ("hyper_connection", "hc_", "indexer", "linear_attn", "mamba", "mixer")

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Readings:
    """matrices: canonical name -> bytes of the head's, sampled. norms: canonical name -> all bytes of the head's.

    like: canonical name of a sampled matrix of the head's block -> the tensor that does the same in one of the trunk's
    last layers, with its bytes. trunk_norms: kind of norm -> all bytes of the last layers' and of the final one.
    """

    inventory: Inventory
    matrices: Mapping[str, bytes] = field(repr=False)
    norms: Mapping[str, bytes] = field(repr=False)
    like: Mapping[str, tuple[TensorInfo, bytes]] = field(repr=False)
    trunk_norms: Mapping[str, Sequence[tuple[TensorInfo, bytes]]] = field(repr=False)

    @classmethod
    def of(cls, inventory: Inventory) -> "Readings":
        own = inventory.own
        norms = spread([each for each in own if _is_norm(inventory.info(each))], HEAD_NORMS)
        matrices = _sampled(inventory, [each for each in own if _is_matrix(inventory, inventory.info(each))])
        late = _late(inventory)
        like = dict(spread(sorted(_twins(late, matrices).items()), TRUNK_MATRICES))
        all_kinds = dict(_trunk_norms(inventory, late))
        wanted = {_kind(each, all_kinds) for each in norms}
        kinds = {kind: infos for kind, infos in all_kinds.items() if kind in wanted}
        stored, samples = inventory.stored, inventory.checkpoint.samples
        trunk = [info.name for infos in kinds.values() for info in infos]
        gains = iter(samples([*(stored[each] for each in norms), *trunk], WHOLE))
        read = iter(samples([*(stored[each] for each in matrices), *(info.name for info in like.values())], WINDOW))
        return cls(
            inventory,
            norms={each: next(gains) for each in norms},
            trunk_norms={kind: [(info, next(gains)) for info in infos] for kind, infos in kinds.items()},
            matrices={each: next(read) for each in matrices},
            like={each: (info, next(read)) for each, info in like.items()},
        )

    @cached_property
    def head_gains(self) -> dict[str, Norm]:
        """Tensor name -> gains as they multiply, of the norms that can be decoded."""
        return {
            self.inventory.stored[each]: Norm(self._effective(gains), _kind(each, self.trunk_norms))
            for each, data in self.norms.items()
            if (gains := decode(data, self.inventory.info(each).dtype)) is not None
        }

    @cached_property
    def trunk_gains(self) -> dict[str, Norm]:
        """The same of the trunk's last layers, together for each kind of norm."""
        return {
            ", ".join(info.name for info, _ in read): Norm(self._effective(np.concatenate(arrays)), kind)
            for kind, read in self.trunk_norms.items()
            if len(arrays := _decoded((data, info.dtype) for info, data in read)) == len(read)
        }

    @cached_property
    def weights(self) -> dict[str, Values]:
        """Canonical name -> values of the sampled window, of the matrices that can be decoded; fp8 without scales."""
        return _floats((each, self.inventory.info(each), data) for each, data in self.matrices.items())

    @cached_property
    def trunk_weights(self) -> dict[str, Values]:
        """The same of `like`."""
        return _floats((each, info, data) for each, (info, data) in self.like.items())

    def _effective(self, stored: Values) -> Values:
        return stored + 1 if self.inventory.family.gain == "1+w" else stored


def decode(data: bytes, dtype: str) -> Values | None:
    """The values of little-endian floats; None for a dtype that holds packed or whole numbers."""
    match dtype:
        case "BF16":
            return _bits(np.frombuffer(data, "<u2").astype("<u4") << 16, "<f4")
        case "F16" | "F32" | "F64":
            return np.frombuffer(data, f"<f{int(dtype[1:]) // 8}").astype(np.float64)
        case "F8_E5M2":
            return _bits(np.frombuffer(data, "u1").astype("<u2") << 8, "<f2")
        case "F8_E4M3":
            return _E4M3[np.frombuffer(data, "u1")]
    return None


def _bits(bits: NDArray[np.integer], kind: str) -> Values:
    return bits.view(kind).astype(np.float64)


def _e4m3() -> Values:
    """Sign, 4 bits of exponent with bias 7, 3 bits of mantissa; 0x7F and 0xFF are NaN, there is no infinity."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    return np.where(code & 127 == 127, np.nan, np.where(code & 128, -size, size))


_E4M3 = _e4m3()


def _floats(parts: Iterable[tuple[str, TensorInfo, bytes]]) -> dict[str, Values]:
    found = {name: decode(data, info.dtype) for name, info, data in parts}
    return {name: array for name, array in found.items() if array is not None and len(array)}


def _decoded(parts: Iterable[tuple[bytes, str]]) -> list[Values]:
    return [array for data, dtype in parts if (array := decode(data, dtype)) is not None]


def _is_norm(info: TensorInfo) -> bool:
    name = info.name
    return (
        len(info.shape) == 1
        and "norm" in name
        and name.endswith("weight")
        and 0 < info.nbytes <= WHOLE
        and not any(other in name for other in _OTHER_NORMS)
    )


def _is_matrix(inventory: Inventory, info: TensorInfo) -> bool:
    """Scales are as few and as equal as the matrices allow, and not judged."""
    return len(info.shape) > 1 and "scale" not in split_name(info.name, inventory.checkpoint.tensors)[1]


def _sampled(inventory: Inventory, names: Sequence[str]) -> list[str]:
    """The same places in every module; of the experts, which are many and alike, a fourth of the share."""
    share = max(4, HEAD_MATRICES // max(1, len(inventory.modules)))
    chosen: list[str] = []
    for index in inventory.modules[:HEAD_MATRICES]:
        mine = [each for each in names if each.startswith(f"{index}.")]
        experts = [each for each in mine if ".experts." in each]
        few = spread(experts, max(1, share // 4))
        chosen += few + spread([each for each in mine if ".experts." not in each], share - len(few))
    return chosen


def _path(canonical: str) -> str:
    """Path in the block, as the running model has it; nothing for what is outside."""
    return canonical.partition(".block.")[2]


def _late(inventory: Inventory) -> list[dict[str, TensorInfo]]:
    """The trunk's last layers, last first, by the running model's paths; enough for one of each kind of attention."""
    running = inventory.running_paths
    newest = sorted(inventory.layers, reverse=True)[:LATE]
    return [{running[path]: info for path, info in inventory.layers[index].items()} for index in newest]


def _twins(late: Sequence[Mapping[str, TensorInfo]], matrices: Sequence[str]) -> dict[str, TensorInfo]:
    """Canonical name -> tensor of the late layer that has most of them."""
    best: dict[str, TensorInfo] = {}
    for layer in late:
        best = max(best, {each: layer[_path(each)] for each in matrices if _path(each) in layer}, key=len)
    return best


def _kind(canonical: str, trunk: Container[str]) -> str:
    """What a norm has in common with the trunk's: its path in the layers, `final`, or nothing."""
    path = "final" if canonical.split(".")[1] == "final_norm" else _path(canonical)
    return path if path in trunk else ""


def _trunk_norms(
    inventory: Inventory, late: Sequence[Mapping[str, TensorInfo]]
) -> Iterator[tuple[str, list[TensorInfo]]]:
    for path in sorted({path for layer in late for path, info in layer.items() if _is_norm(info)}):
        yield path, [layer[path] for layer in late if path in layer][:LAYERS]
    root = inventory.shared.get("embedding", "").removesuffix(".weight").rpartition(".")[0]
    names = [f"{root}.{last}.weight".removeprefix(".") for last in ("norm", "norm_f", "final_layernorm")]
    found = [inventory.checkpoint.tensors[name] for name in names if name in inventory.checkpoint.tensors]
    if found:
        yield "final", found[:1]
