"""Synthetic checkpoints in published layouts, written without torch: what audit, restore and convert are tested on.

Values are random normal numbers (norm gains near 1, or near 0 where the family stores w for 1 + w), seeded by tensor
name: the same name has the same values in two artifacts of one seed. Shapes are tiny and agree with config.json.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from layouts import LAYOUTS
from parts import DIM, EXPERTS, HEADS, INNER, KV, LAYERS, H, Shapes, V

from nextn.checkpoint.checkpoint import Checkpoint, write_index
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.safetensors_file import RawTensor, write_json, write_safetensors
from nextn.family_table import Family, by_name

__all__ = [
    "DIM", "EXPERTS", "HEADS", "INNER", "KV", "LAYERS", "LAYOUTS", "H", "Shapes", "V", "bf16", "e4m3",
    "inventory_of", "load_json", "prefixed", "publish", "tensors", "values", "watched", "write",
]  # fmt: skip

_SIZES: dict[str, object] = {
    "vocab_size": V, "hidden_size": H, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": DIM, "intermediate_size": 2 * H, "max_position_embeddings": 2048,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
# Matrices that no release stores in fp8, beside the plain roles: routers and gates of few rows.
_PLAIN = re.compile(
    r"(gate|router\.classifier|shared_expert_gate|in_proj_(a|b|ba)|weights_proj|index_qk_proj)\.weight$"
)


def inventory_of(folder: Path) -> Inventory:
    return Inventory.of(Checkpoint.open(folder))


def tensors(name: str, *, modules: int = 1, copies: bool = True) -> Shapes:
    """Published name -> shape of every tensor of the family's tiny checkpoint; copies as `publish` takes it."""
    family, layout = by_name(name), LAYOUTS[name]
    root = _root(family)
    outer = layout.extra | ({f"{layout.norm}.weight": (H,)} if layout.norm else {})
    shapes: Shapes = {
        f"{path}.weight": (V, H) for role, path in family.trunk.items() if not (layout.tied and role == "output")
    }
    shapes |= {f"{root}{path}": shape for path, shape in outer.items()}
    for index, layer in enumerate(layout.trunk):
        shapes |= {f"{root}layers.{index}.{path}": shape for path, shape in layer.items()}
    for index in range(modules):
        for path, shape in _module(name, index, copies).items():
            shapes[family.published(f"{index}.{path}", LAYERS)] = shape
        stem = family.names["block"].format(module=index, layer=LAYERS + index)
        block = layout.trunk[-1] if layout.block is None else layout.block
        shapes |= {f"{stem}.{path}": shape for path, shape in block.items()}
    return shapes


def _root(family: Family) -> str:
    """The leading path of the trunk's layers."""
    root = family.trunk["embedding"].rpartition(".")[0]
    return f"{root}." if root else ""


def _module(name: str, index: int, copies: bool) -> Shapes:
    """Canonical name without its index -> shape, without the block; what the whole head has once is in module 0."""
    family, said = by_name(name), LAYOUTS[name].module
    wide = {"projection": (H, 2 * H), "token_projection": (H, H), "hidden_projection": (H, H)}
    shapes: Shapes = {}
    for role, path in family.names.items():
        copied = role in family.copies and (role in family.read_only_copies or not copies)
        if role == "block" or copied or (index and "{" not in path):
            continue
        own = {path: shape for path, shape in said.items() if re.match(rf"{role}(\.|$)", path)}
        shapes |= own or {f"{role}.weight": wide.get(role, (V, H) if role in ("embedding", "output") else (H,))}
    return shapes


def values(name: str, shape: tuple[int, ...], *, norm_weight: float, seed: int) -> np.ndarray:
    """fp32 values of one tensor, seeded by its name; `gain` is where norm gains lie."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    out = 0.1 * rng.standard_normal(shape).astype(np.float32)
    return norm_weight + out if "norm" in name and len(shape) == 1 and name.endswith("weight") else out


def bf16(array: np.ndarray) -> bytes:
    """Round to nearest even, as torch does."""
    bits = np.ascontiguousarray(array, "<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def e4m3(array: np.ndarray) -> bytes:
    """Finite fp32 -> F8_E4M3: round to nearest even, saturate at 448."""
    size = np.minimum(np.abs(array.astype(np.float64)), 448.0)
    exponent = np.frexp(np.maximum(size, 2.0**-6))[1] - 1  # subnormals have the smallest normal number's
    steps = np.rint(np.ldexp(size, 3 - exponent)).astype(np.int64)  # 8 to 16 for normal numbers, fewer below
    code = steps + 8 * (exponent + 6)  # 16 steps are 8 of the next exponent, and the code is the same
    return (code | np.where(np.signbit(array), 0x80, 0)).astype("u1").tobytes()


def publish(
    folder: Path,
    name: str,
    *,
    modules: int = 1,
    copies: bool = True,
    shards: int = 1,
    dtype: str = "BF16",
    seed: int = 0,
    fp8: bool = False,
    wrapper: str = "",
    side_file: str = "",
    config: Mapping[str, object] = {},
    change: Callable[[dict[str, RawTensor]], None] | None = None,
) -> Path:
    """Write the family's tiny checkpoint into `folder` -> folder.

    copies: embedding and output head again inside each module, equal to the trunk's, where the family stores them so.
    shards: how many files; more than one comes with an index. fp8: matrices in fp8 with scales by block and the
    quantization_config, as `Family.fp8` says. wrapper: one of `Family.wrappers`, put before the names it stands for;
    the text model's config moves to text_config where the wrapper is a vision-language model's. side_file: the head's
    tensors go there and the index, if there is one, does not list them. config: keys over the family's. change: edits
    the table of tensors before it is written (drop, rename, replace).
    """
    family = by_name(name)
    norm_weight = 0.0 if family.norm_weight == "1+w" else 1.0
    table: dict[str, RawTensor] = {}
    plain: list[str] = []
    for each, shape in tensors(name, modules=modules, copies=copies).items():
        data = values(
            _original(name, each), shape, norm_weight=1.0 if "linear_attn.norm" in each else norm_weight, seed=seed
        )
        stored = prefixed(family, each, wrapper)
        if fp8 and _quantized(family, each, shape):
            table |= _blocks(family, stored, data)
        else:
            plain += [stored.removesuffix(".weight")] if len(shape) > 1 else []
            table[stored] = RawTensor(dtype, shape, bf16(data) if dtype == "BF16" else data.astype("<f4").tobytes())
    if change is not None:
        change(table)
    settings = family.with_count(_config(family, wrapper), modules)
    if fp8:
        settings["quantization_config"] = _quantization(family, plain)
    write_json(folder / "config.json", settings | dict(config))
    head = {each for each in table if side_file and family.canonical(each, LAYERS) is not None}
    write(folder, {each: table[each] for each in table if each not in head}, shards=shards)
    if side_file:
        write_safetensors(folder / side_file, {each: table[each] for each in head}, metadata={"format": "pt"})
    return folder


def _original(name: str, tensor: str) -> str:
    """A copy has the values of the trunk's tensor."""
    family = by_name(name)
    canonical = family.canonical(tensor, LAYERS)
    role = canonical.split(".")[1] if canonical else ""
    path = family.trunk["embedding" if LAYOUTS[name].tied else role] if role in family.copies else ""
    return f"{path}.weight" if path else tensor


def prefixed(family: Family, name: str, wrapper: str) -> str:
    if family.has_bare_head and name.startswith("mtp.") and wrapper != "model.mtp.":
        return name  # a trunk in a vision-language model
    meant = family.wrappers.get(wrapper, "")
    return wrapper + name.removeprefix(meant) if wrapper and name.startswith(meant) else name


def _config(family: Family, wrapper: str) -> dict[str, object]:
    """The family's config, with the text model's keys in text_config where it is a vision-language model's."""
    layout = LAYOUTS[family.name]
    text = {key: value for key, value in (_SIZES | layout.config).items() if value is not None}
    if not layout.composite and (not wrapper or wrapper.startswith("model.mtp")):
        return text
    outer = next((kind for kind in family.model_types if kind != text["model_type"]), text["model_type"])
    return {"model_type": outer, "text_config": text, "tie_word_embeddings": layout.tied}


def _quantized(family: Family, name: str, shape: tuple[int, ...]) -> bool:
    """Whether a release in fp8 has this matrix in fp8; a 3-dimensional one is a stack of experts or a convolution."""
    assert family.fp8 is not None, f"{family.name} has no fp8 releases"
    canonical = family.canonical(name, LAYERS)
    if canonical is not None:
        inside = canonical.split(".")[1] not in family.fp8.unquantized and "norm" not in name
    else:
        inside = family.trunk_layer(name) is not None
    matrix = len(shape) == 2 or (len(shape) == 3 and "conv" not in name)
    return inside and matrix and name.endswith(".weight") and not _PLAIN.search(name)


def _blocks(family: Family, name: str, data: np.ndarray) -> dict[str, RawTensor]:
    """`name` in fp8 and its scales [..., ceil(out / block), ceil(in / block)], by which its values are multiplied."""
    assert family.fp8 is not None
    rows, columns = family.fp8.block
    *_, height, width = data.shape
    scale = np.zeros((*data.shape[:-2], -(-height // rows), -(-width // columns)), np.float32)
    scaled = data.copy()
    for row in range(scale.shape[-2]):
        for column in range(scale.shape[-1]):
            place = (..., slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns))
            scale[..., row, column] = np.abs(data[place]).max((-2, -1)) / 448
            scaled[place] /= scale[..., row, column][..., None, None]
    beside = f"{name.removesuffix('.weight')}.{family.fp8.scale}"
    return {
        name: RawTensor("F8_E4M3", data.shape, e4m3(scaled)),
        beside: RawTensor("F32", scale.shape, scale.astype("<f4").tobytes()),
    }


def _quantization(family: Family, plain: list[str]) -> dict[str, object]:
    """Qwen's releases list what is not in fp8, DeepSeek's and those made like them list nothing."""
    assert family.fp8 is not None
    said = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(family.fp8.block),
    }
    return said | ({"modules_to_not_convert": plain} if family.name.startswith("qwen") else {})


def write(folder: Path, table: Mapping[str, RawTensor], *, shards: int = 1) -> None:
    """Put `table` into one file, or into `shards` files with an index; consecutive names share a file."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", table, metadata={"format": "pt"})
        return
    files = {name: f"model-{1 + place * shards // len(table):05d}-of-{shards:05d}.safetensors"
             for place, name in enumerate(table)}  # fmt: skip
    for file in sorted(set(files.values())):
        write_safetensors(folder / file, {name: table[name] for name in table if files[name] == file})
    write_index(folder, files, sum(len(each.data) for each in table.values()))


@contextmanager
def watched() -> Iterator[list[str]]:
    """The names of the tensors that samples are read of, one for each read."""
    names: list[str] = []
    read = Checkpoint.read_blocks

    def spy(self, places, size):
        names.extend(info.name for info, _ in places)
        return read(self, places, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "read_blocks", spy)
        yield names


def load_json(path: Path) -> dict:
    return json.loads(path.read_text())
